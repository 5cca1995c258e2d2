"""Credit: no more is stored and not handled than ``ahead``, and a trigger whose events are handled goes on (I22)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.messages.runner import Credit, TriggerSpec
from headgate.protocol.messages.task_streams import AHEAD_MAX
from headgate.store.errors import DatabaseAway
from headgate.store.ids import TriggerId
from headgate.store.tasks.stream_steps import Room
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.credits import Credits

RETRY_S = 5.0


class Streams:
    """Streams that runs 'run-ID' of the triggers feed, with a database that may be away."""

    def __init__(self, **ahead: int) -> None:
        self.rooms = {int(name[1:]): Room(limit, 0) for name, limit in ahead.items()}
        self.runs = {trigger_id: f"run-{trigger_id}" for trigger_id in self.rooms}
        self.is_away = False
        self.asked: list[list[int]] = []
        retry = DatabaseRetry("credits", RETRY_S, RETRY_S)
        self.credits = Credits(cast(Any, self), cast(Any, self), retry=retry)
        self.given: dict[int, int] = {}

    def stream_rooms(self, triggers: Sequence[int]) -> dict[int, Room]:
        if self.is_away:
            raise DatabaseAway("sqlite://", "away")
        self.asked.append(list(triggers))
        return {one: self.rooms[one] for one in triggers if one in self.rooms}

    def run_of(self, trigger_id: int) -> str | None:
        return self.runs.get(trigger_id)

    def start(self, trigger_id: int = 1) -> None:
        spec = TriggerSpec(trigger_id, self.runs[trigger_id], "n", "a.B", b"{}", credit=0)
        watcher = TriggerSpec(99, "run-99", "w", "a.B", b"{}")
        self.credits.started([spec, watcher])

    def step(self, now: float = 0.0) -> list[Credit]:
        message = self.credits.step(now)
        credits_ = [] if message is None else list(message.credits)
        self.given.update((one.trigger_id, one.events) for one in credits_)
        return credits_

    def wait(self, trigger_id: int, events: int) -> None:
        """Let events wait from now on; more or fewer than before."""
        self.rooms[trigger_id] = self.rooms[trigger_id]._replace(waiting=events)


def test_a_run_begins_with_what_is_free_and_gets_more_when_a_quarter_is() -> None:
    streams = Streams(t1=100)
    streams.wait(1, 30)
    streams.start()
    assert streams.step() == [Credit(1, "run-1", 70)]
    assert streams.credits.wake_at() is None
    streams.wait(1, 100)
    streams.credits.fired({(1, "run-1"): 70})
    assert streams.step() == [], "it has none left, and nothing is free"
    streams.wait(1, 76)
    streams.credits.handled({TriggerId(1): 24})
    assert streams.credits.wake_at() is None, "less than a quarter: nobody asks"
    streams.wait(1, 75)
    streams.credits.handled({TriggerId(1): 1})
    assert streams.step() == [Credit(1, "run-1", 95)]


def test_a_trigger_stands_while_the_elements_of_its_task_wait_for_instances() -> None:
    streams = Streams(t1=100)
    streams.start()
    assert streams.step() == [Credit(1, "run-1", 100)]
    streams.credits.fired({(1, "run-1"): 100})
    streams.rooms[1] = Room(100, 0, elements=90)
    streams.credits.handled({TriggerId(1): 100})
    assert streams.step() == [], "no more than 10 are free"
    streams.rooms[1] = Room(100, 0, elements=80)
    streams.credits.expanded()
    assert streams.step() == []
    streams.rooms[1] = Room(100, 0, elements=70)
    streams.credits.expanded()
    assert streams.step() == [Credit(1, "run-1", 130)]
    streams.credits.fired({(1, "run-1"): 130})
    streams.rooms[1] = Room(100, 0)
    streams.credits.expanded()
    assert streams.step() == [Credit(1, "run-1", 230)]
    streams.credits.expanded()
    assert streams.credits.wake_at() is None, "none of its elements takes room"


def test_one_step_that_takes_only_the_newest_frees_all_that_waited() -> None:
    streams = Streams(t1=100)
    streams.rooms[1] = Room(100, 0, is_latest=True)
    streams.start()
    streams.step()
    streams.wait(1, 100)
    streams.credits.fired({(1, "run-1"): 100})
    assert streams.step() == []
    streams.wait(1, 0)
    streams.credits.handled({TriggerId(1): 1})
    assert streams.step() == [Credit(1, "run-1", 200)], "the next look would come seconds later"


def test_only_the_current_run_counts_and_one_that_is_over_is_forgotten() -> None:
    streams = Streams(t1=8, t2=8)
    streams.start(1)
    streams.start(2)
    assert len(streams.step()) == 2
    streams.credits.fired({(1, "run-0"): 8, (3, "run-3"): 8})
    assert streams.credits.wake_at() is None
    streams.credits.fired({(1, "run-1"): 8, (2, "run-2"): 8})
    del streams.runs[1]
    streams.runs[2] = "run-of-another-runner"
    assert streams.step() == []
    streams.credits.fired({(1, "run-1"): 16, (2, "run-2"): 16})
    streams.credits.handled({TriggerId(1): 16, TriggerId(2): 16})
    streams.credits.look()
    assert streams.credits.wake_at() is None
    assert streams.asked == [[1, 2]]


def test_what_another_supervisor_has_handled_is_found_by_a_look() -> None:
    streams = Streams(t1=4)
    streams.start()
    streams.step()
    streams.wait(1, 4)
    streams.credits.fired({(1, "run-1"): 4})
    assert streams.step() == []
    streams.wait(1, 1)
    assert streams.credits.wake_at() is None
    streams.credits.look()
    assert streams.step() == [Credit(1, "run-1", 7)]


def test_a_run_with_much_credit_left_is_not_asked_for() -> None:
    streams = Streams(t1=100)
    streams.start()
    streams.step()
    streams.credits.fired({(1, "run-1"): 24})
    streams.credits.handled({TriggerId(1): 24})
    streams.credits.look()
    assert streams.credits.wake_at() is None


def test_while_the_database_is_away_it_is_asked_again_and_nothing_is_given() -> None:
    streams = Streams(t1=4)
    streams.is_away = True
    streams.start()
    assert streams.step(10.0) == []
    assert streams.credits.wake_at() == 10.0 + RETRY_S
    assert streams.step(10.0 + RETRY_S / 2) == []
    streams.is_away = False
    assert streams.step(10.0 + RETRY_S) == [Credit(1, "run-1", 4)]


def test_a_batch_that_is_nearly_whole_gets_the_events_that_it_lacks() -> None:
    streams = Streams(t1=100)
    streams.rooms[1] = Room(100, 90, batch=100)
    streams.start()
    assert streams.step() == [Credit(1, "run-1", 10)], "less than a quarter: but nothing is handled before"
    streams.credits.fired({(1, "run-1"): 10})
    assert streams.step() == [Credit(1, "run-1", 20)], "those were known by their keys: none of them waits"


def test_runs_that_are_over_are_forgotten_however_much_credit_they_had() -> None:
    streams = Streams(t1=100)
    streams.start()
    streams.step()
    streams.credits.look()
    assert 1 in streams.credits
    streams.runs[1] = "run-2"
    streams.credits.look()
    assert 1 not in streams.credits


def test_a_trigger_that_feeds_no_stream_any_more_gets_nothing() -> None:
    streams = Streams(t1=4)
    streams.start()
    del streams.rooms[1]
    assert streams.step() == []
    assert streams.credits.wake_at() is None


@pytest.mark.parametrize(("ahead", "asked"), [(AHEAD_MAX, [1, 1, 1]), (AHEAD_MAX // 3, [3])])
def test_one_step_counts_no_more_events_than_one_stream_may_have(ahead: int, asked: list[int]) -> None:
    streams = Streams(t1=ahead, t2=ahead, t3=ahead)
    for trigger_id in (1, 2, 3):
        streams.start(trigger_id)
    streams.step()  # how many may wait is not known before
    for trigger_id in (1, 2, 3):
        streams.credits.fired({(trigger_id, f"run-{trigger_id}"): ahead})
    del streams.asked[:]
    while streams.credits.wake_at() is not None:
        streams.step()
    assert [len(some) for some in streams.asked] == asked


ACTS = st.tuples(st.sampled_from(["fire", "fire twice", "store", "handle", "handle elsewhere"]), st.integers(1, 30))


@given(ahead=st.integers(1, 40), is_latest=st.booleans(), acts=st.lists(ACTS, max_size=60))
def test_whatever_happens_no_more_than_ahead_waits_and_nothing_stands_for_ever(
    ahead: int, is_latest: bool, acts: list[tuple[str, int]]
) -> None:
    streams = Streams(t1=ahead)
    streams.rooms[1] = Room(ahead, 0, is_latest=is_latest)
    fired = known = waiting = in_flight = 0
    streams.start()
    streams.step()
    for act, number in [*acts, ("store", 1), ("handle elsewhere", 1000)]:
        match act:
            case "fire" | "fire twice":  # those of the second kind are known by their keys, and not stored again
                number = min(number, streams.given[1] - fired)
                fired += number
                in_flight += number if act == "fire" else 0
            case "store":
                waiting, in_flight, known = waiting + in_flight, 0, fired
                streams.wait(1, waiting)
                streams.credits.fired({(1, "run-1"): known})
            case _:
                number = waiting if is_latest else min(number, waiting)
                waiting -= number
                streams.wait(1, waiting)
                if act == "handle":
                    streams.credits.handled({TriggerId(1): min(1, number) if is_latest else number})
                else:
                    streams.credits.look()
        streams.step()
        if act == "handle" and number and waiting == 0:
            assert streams.given[1] > known, "nothing waits: it may go on without a look"
        assert waiting <= ahead
        assert streams.given[1] - known + waiting <= ahead, "what it may fire has room"
    assert waiting == in_flight == 0
    assert streams.given[1] > fired, "all is handled: it may go on"
