"""Events that a task cannot handle: found one by one, kept as dead letters, and passed over."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.tasks.streams_harness import Streams, handled, payloads, stream_wait

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.steps import StepFailed, StepHandled
from headgate.protocol.messages.task_streams import StreamOptions
from headgate.protocol.values import decode_value
from headgate.store.store import Store
from headgate.store.tasks.outcomes import WorkerLost

S = TaskState
SKIP = StreamOptions(poison="skip")


FAILED = StepFailed("cannot take it", "Traceback")


def work(tasks: Streams, poison: Any, how: StepFailed | WorkerLost = FAILED) -> list[list[Any]]:
    """Handle what waits as a worker does that fails on one payload, over all tries; return what each step got."""
    steps: list[list[Any]] = []
    while tasks.state() in (S.SCHEDULED, S.UP_FOR_RETRY):
        if tasks.state() is S.UP_FOR_RETRY:
            tasks.let_go()
            tasks.retry()
            tasks.stream_it(stream_wait(SKIP))
            continue
        task, part = tasks.take()
        steps.append(payloads(part))
        if poison in steps[-1]:
            tasks.end(task.token, how, part)
        else:
            tasks.end(task.token, StepHandled(handled(part, last=steps[-1][-1])))
    return steps


@pytest.mark.parametrize("retries", [0, 1])
def test_poison_is_found_one_by_one_and_passed_over(store: Store, query: Query, retries: int) -> None:
    tasks = Streams(store, query, retries=retries)
    tasks.stream_it(stream_wait(SKIP))
    tasks.fire(1, 2, "bad", 4)
    steps = work(tasks, "bad")
    assert steps == [[1, 2, "bad", 4], [1], [2], *[["bad"]] * (retries + 1), [4]]
    assert (tasks.state(), tasks.place()) == (S.DEFERRED, (4, {"last": 4}))
    (letter,) = query("SELECT * FROM dead_letter")
    assert decode_value(bytes(letter["payload"])) == "bad"
    assert (letter["content"], letter["state"], letter["traceback"]) == ("event", "open", "Traceback")
    assert letter["reason"] == "the task a of run r1 of etl could not handle it: cannot take it"
    tasks.fire(5, 6)
    assert work(tasks, "bad") == [[5, 6]], "several at once again"


def test_an_endless_task_passes_over_what_ends_its_workers(store: Store, query: Query) -> None:
    tasks = Streams(store, query, retries=0, endless=True)
    tasks.stream_it(stream_wait(SKIP))
    tasks.fire(1, "bad", 3)
    assert work(tasks, "bad", WorkerLost("killed by SIGSEGV")) == [[1, "bad", 3], [1], ["bad"], [3]]
    (letter,) = query("SELECT * FROM dead_letter")
    assert decode_value(bytes(letter["payload"])) == "bad"


def test_poison_at_the_beginning_leaves_what_the_handler_begins_with(store: Store, query: Query) -> None:
    tasks = Streams(store, query, retries=0)
    tasks.stream_it(stream_wait(SKIP))
    tasks.fire("bad")
    assert work(tasks, "bad") == [["bad"]]
    assert tasks.place() == (1, {"rows": 0})


def test_without_the_rule_the_task_fails_on_poison(store: Store, query: Query) -> None:
    tasks = Streams(store, query, retries=0)
    tasks.stream_it()
    tasks.fire("bad")
    assert work(tasks, "bad") == [["bad"]]
    assert (tasks.state(), tasks.place()[0], query("SELECT * FROM dead_letter")) == (S.FAILED, 0, [])


@pytest.mark.parametrize("where", ["execute", "stream_ended", "for good"])
def test_a_failure_that_no_event_is_to_blame_for_passes_over_none(store: Store, query: Query, where: str) -> None:
    tasks = Streams(store, query, retries=0)
    tasks.stream_it(stream_wait(SKIP))
    if where == "stream_ended":
        tasks.finish()
        assert tasks.end(tasks.take()[0].token, StepFailed("boom")) is S.FAILED
        return
    tasks.fire(1)
    task, part = tasks.take()
    if where == "execute":
        assert tasks.end(task.token, StepFailed("boom")) is S.FAILED
    else:
        assert tasks.end(task.token, StepFailed("boom", may_retry=False), part) is S.FAILED
    assert (tasks.place()[0], query("SELECT * FROM dead_letter")) == (0, [])


def test_an_event_that_was_passed_over_is_redriven_to_the_end_of_its_stream(store: Store, query: Query) -> None:
    tasks = Streams(store, query, retries=0)
    tasks.stream_it(stream_wait(SKIP))
    tasks.fire("bad", keyed=True)
    work(tasks, "bad")
    (letter,) = query("SELECT id FROM dead_letter")
    assert store.letters.redrive(letter["id"], by="me").state == "redriven"
    assert tasks.state() is S.SCHEDULED
    _, part = tasks.take()
    assert (payloads(part), part.handled) == (["bad"], 1)


def test_the_trigger_goes_on_after_its_newest_event_and_not_after_one_that_was_redriven(
    store: Store, query: Query
) -> None:
    tasks = Streams(store, query, retries=0)
    tasks.stream_it(stream_wait(SKIP))
    tasks.fire("bad")
    work(tasks, "bad")
    tasks.fire("new")
    (letter,) = query("SELECT id FROM dead_letter")
    store.letters.redrive(letter["id"], by="me")
    last = store.last_event(tasks.trigger_id)
    assert last is not None
    assert decode_value(last.payload) == "new", "or it would fire all events after the old one again"
