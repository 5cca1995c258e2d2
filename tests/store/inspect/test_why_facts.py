"""The facts behind a "why": who holds up a stream, and failures that are over."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import QUEUES, Clock, OpenStore, add, register

from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger, FiredEvent
from headgate.scheduling.why import Answer
from headgate.store.store import Store

ERROR = ("TypeError: list indices", "Traceback (most recent call last):\n  File x\nTypeError: list indices")


class Stream:
    """The watchers ``raw`` and ``big`` on one shared stream, in a store whose clock the test moves."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.epoch = register(store)
        names: tuple[str, ...] = ("raw", "big")
        self.ids: dict[str, int] = dict(zip(names, add(store, *names), strict=True))
        store.claim_triggers(self.epoch, limit=10, queues=QUEUES)
        described = tuple(DescribedTrigger(id_, f"described {id_}", "d", "the log") for id_ in self.ids.values())
        store.store_slice(self.epoch, described=described)
        self.runs = 0

    def fail(self, name: str, *, times: int = 1, **fields: Any) -> None:
        for _ in range(times):
            self.runs += 1
            run = FinishedTrigger(self.ids[name], f"run {self.runs}", "failed", 0, *ERROR, **fields)
            self.store.store_slice(self.epoch, finished=[run])

    def fire(self, name: str) -> None:
        self.runs += 1
        self.store.store_slice(self.epoch, events=[FiredEvent(self.ids[name], f"run {self.runs}", 0, 1, b"\x01")])

    def why(self, name: str) -> Answer:
        return self.store.inspect.why_trigger(self.ids[name])


@pytest.fixture
def stream(open_store: OpenStore) -> Stream:
    clock = Clock()
    return Stream(open_store(clock=clock), clock)


def test_a_stream_held_up_by_a_neighbour_that_fails_names_it_its_error_and_since_when(stream: Stream) -> None:
    stream.fail("big", times=7)
    stream.clock.advance(90)
    stream.store.heartbeat(stream.epoch)
    answer = stream.why("raw")
    assert (answer.reason, answer.headline) == (
        "stream_waits",
        "its stream the log waits for big while that one does not run: "
        "it has failed 7 times, the last time 1 min 30 s ago: TypeError: list indices",
    )
    assert stream.why("big").reason == "failing"


def test_a_stream_held_up_by_a_neighbour_that_is_held_names_it_unless_a_user_has_paused_it(stream: Stream) -> None:
    stream.store.hold_trigger(stream.epoch, stream.ids["big"], "quarantine", "it blocked the loop\nfor 31 s")
    stream.clock.advance(5)
    assert stream.why("raw").headline.endswith("does not run: quarantine for 5.0 s: it blocked the loop for 31 s")
    stream.store.pause_watcher("big")
    assert stream.why("raw").reason == "running"


def test_a_failure_after_which_an_event_was_stored_is_not_told_as_failing(stream: Stream) -> None:
    stream.fail("big", times=2)
    stream.clock.advance(1)
    stream.fire("big")
    stream.clock.advance(2)
    answer = stream.why("big")
    assert (answer.reason, answer.headline) == (
        "running",
        f"supervisor {stream.epoch} (pid 1 on h) runs it; its newest event is 2.0 s old",
    )
    assert ("failures", "2, and it has stored events since: TypeError: list indices") in answer.facts
    assert stream.why("raw").reason == "running", "the stream does not wait for it any more"
    stream.fail("big")
    assert (stream.why("big").reason, stream.why("raw").reason) == ("failing", "stream_waits")


def test_a_failure_on_a_message_is_told_although_events_of_other_messages_are_stored(stream: Stream) -> None:
    stream.fail("big", message_key="berlin:4711")
    stream.clock.advance(1)
    stream.fire("big")
    assert stream.why("big").reason == "poison"


def test_a_failure_that_is_reset_is_a_fact_and_not_the_headline(stream: Stream) -> None:
    stream.fail("big")
    stream.store.reset_failures(stream.epoch, [stream.ids["big"]])
    stream.clock.advance(3)
    answer = stream.why("big")
    assert answer.reason == "running"
    assert ("last failure", "3.0 s ago: TypeError: list indices") in answer.facts


def test_an_error_is_one_line_in_the_answer_and_whole_beside_it(stream: Stream) -> None:
    stream.fail("big")
    answer = stream.why("big")
    assert answer.headline.endswith("ago: TypeError: list indices")
    ((name, error),) = answer.errors
    assert name == "last error of the trigger"
    assert error.endswith("Traceback (most recent call last):\n  File x\nTypeError: list indices")
