"""Streams of tasks where something comes late, twice, or from another side than the task expects."""

from __future__ import annotations

import pytest
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.store.tasks.streams_harness import Streams, handled, payloads, stream_wait

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import FinishedTrigger, RefusedEvent
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepHandled, StepSucceeded
from headgate.protocol.messages.task_streams import StreamOptions
from headgate.protocol.values import decode_value
from headgate.store.ids import DagRunId
from headgate.store.store import Store

S = TaskState


@pytest.mark.parametrize("late", ["event", "end"])
def test_what_a_stream_brings_late_does_not_resume_a_task_that_waits_for_another_trigger(
    store: Store, query: Query, late: str
) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    task, part = tasks.take()
    tasks.fire(2)
    wait = stream_wait()
    plain = StepDeferred(wait.classpath, wait.kwargs, "resume", wait.next_kwargs, handled=handled(part))
    assert tasks.end(task.token, plain) is S.DEFERRED, "it has ended its stream, and waits for something else"
    before = tasks.row()
    # The run of the stream's trigger does not know it yet.
    if late == "event":
        tasks.fire(3)
    else:
        tasks.finish()
    assert tasks.row() == before


def test_an_event_that_is_refused_does_not_end_the_run_of_its_trigger_by_itself(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    name = tasks.run_name()
    refused = RefusedEvent(tasks.trigger_id, name, 0, 0, "too long", 9, b"head")
    assert tasks.store.store_slice(tasks.epoch, refused=[refused]).over == frozenset(), "its runner goes on"
    assert store.poll(tasks.epoch, QUEUES).ended == [tasks.trigger_id], "and is told to cancel it"
    tasks.fired = 1
    assert tasks.finish("failed", error="boom").over == {tasks.trigger_id}, "so it is not started again"


def test_a_run_that_returns_behind_its_last_event_opens_no_trigger_of_a_try_that_is_over(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(timeout_s=5.0))
    clock.advance(5)
    assert store.tasks.time_out(tasks.epoch) == [tasks.a]
    tasks.fire(1, is_last=True)
    tasks.finish()
    assert (tasks.is_open(), tasks.stream()["reopens"]) == (False, False)
    tasks.fail_it()
    tasks.retry()
    assert tasks.stream_it(stream_wait(timeout_s=5.0)) is S.SCHEDULED, "the event is there for the next try"
    assert tasks.is_open()


def test_what_an_earlier_try_has_left_of_a_batch_shortens_no_wait_of_the_next_one(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query, retry_delay_s=60.0)
    batch = stream_wait(StreamOptions("batch", count=3), timeout_s=20.0)
    tasks.stream_it(batch)
    tasks.fire("x", keyed=True)
    for _ in range(2):
        clock.advance(20)
        assert store.tasks.time_out(tasks.epoch) == [tasks.a]
        tasks.fail_it()
        tasks.let_go()
        clock.advance(60)
        tasks.retry()
        assert tasks.stream_it(batch) is S.DEFERRED
        assert store.tasks.time_out(tasks.epoch) == [], "its own wait has just begun"
        tasks.fire("x", keyed=True)
        clock.advance(19)
        assert store.tasks.time_out(tasks.epoch) == [], "and what comes again is no reason to end it"


def test_events_that_came_while_a_step_ran_shorten_no_wait_behind_it(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("batch", count=2), timeout_s=20.0))
    tasks.fire(1, 2, 3)
    task, part = tasks.take()
    clock.advance(60)
    assert tasks.end(task.token, StepHandled(handled(part))) is S.DEFERRED
    clock.advance(19)
    assert store.tasks.time_out(tasks.epoch) == []
    clock.advance(1)
    assert store.tasks.time_out(tasks.epoch) == [tasks.a]


def test_a_trigger_that_cannot_be_started_fails_each_try_anew(store: Store, query: Query) -> None:
    tasks = Streams(store, query, retries=1)
    # As a supervisor reports a trigger whose kwargs it cannot read: without a run.
    for state in (S.UP_FOR_RETRY, S.FAILED):
        assert tasks.stream_it() is S.DEFERRED
        unreadable = FinishedTrigger(tasks.trigger_id, "", "failed", 0, error="no key decrypts its kwargs")
        store.store_slice(tasks.epoch, finished=[unreadable])
        store.release_triggers(tasks.epoch, [tasks.trigger_id])
        assert not tasks.is_open()
        task, _ = tasks.take()
        assert task.next_method == "__fail__"
        assert tasks.end(task.token, StepFailed("no key decrypts its kwargs")) is state
        tasks.retry()


def test_an_end_of_the_task_that_is_kept_as_a_letter_fails_the_try(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1, keyed=True)
    tasks.handle()
    slice_ = tasks.fire(1, keyed=True, kind="success")
    assert len(slice_.differing) == 1, "another event has its key"
    task, _ = tasks.take()
    assert task.next_method == "__fail__"
    assert "another event has its key" in decode_value(task.next_kwargs or b"")["error"]


def test_the_outcome_of_a_task_that_is_cleared_from_its_start_is_late_and_not_refused(
    store: Store, query: Query
) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    task, part = tasks.take()
    cleared = store.tasks.clear_many(DagRunId(tasks.run), [tasks.row()["task_id"]], streams="from_start")
    assert list(cleared.cleared.values()) == [S.RESTARTING]
    assert tasks.end(task.token, StepHandled(handled(part))) is None
    assert tasks.state() is S.NONE


@pytest.mark.parametrize("retries", [0, 1])
def test_of_the_latest_events_that_one_is_poison_which_the_step_had(store: Store, query: Query, retries: int) -> None:
    tasks = Streams(store, query, retries=retries)
    latest = StreamOptions("latest", count=1, poison="skip")
    tasks.stream_it(stream_wait(latest))
    tasks.fire("old", "older", "bad")
    for _ in range(retries + 1):
        task, part = tasks.take()
        assert payloads(part) == ["bad"]
        assert tasks.end(task.token, StepFailed("boom"), part) is S.UP_FOR_RETRY
        tasks.let_go()
        tasks.retry()
        tasks.stream_it(stream_wait(latest))
    assert (tasks.state(), tasks.place()) == (S.DEFERRED, (3, {"rows": 0}))
    (letter,) = query("SELECT payload FROM dead_letter")
    assert decode_value(bytes(letter["payload"])) == "bad"
    tasks.fire("good")
    task, part = tasks.take()
    assert (payloads(part), part.handled) == (["good"], 3)
    assert tasks.end(task.token, StepSucceeded(handled=handled(part))) is S.SUCCESS
