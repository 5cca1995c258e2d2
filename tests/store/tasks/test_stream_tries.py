"""Streams of tasks over several tries: what a failure, a take-over and a user's act do to place, state and trigger."""

from __future__ import annotations

import pytest
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.store.tasks.streams_harness import Streams, handled, payloads, stream_wait

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import FinishedTrigger
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepHandled
from headgate.protocol.values import decode_value
from headgate.store.store import Store
from headgate.store.tasks.outcomes import WorkerLost

S = TaskState


# --- the next try --------------------------------------------------------------------------------


def test_a_retry_goes_on_behind_the_last_event_that_is_handled(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(url="old"))
    tasks.fire(1, 2, 3, keyed=True)
    assert tasks.fail_it(number=2, rows=2) is S.UP_FOR_RETRY
    assert tasks.place() == (2, {"rows": 2})
    assert not tasks.is_open()
    tasks.let_go()
    assert tasks.retry() == [tasks.a]
    trigger_id = tasks.trigger_id
    assert tasks.stream_it(stream_wait(url="new")) is S.SCHEDULED, "an event waits already"
    assert tasks.trigger_id == trigger_id, "the same trigger, and so the same log and the same keys"
    assert tasks.fire(2, 3, 4, keyed=True).stored == 1
    task, part = tasks.take()
    assert (payloads(part), part.handled) == ([3, 4], 2)
    assert decode_value(part.state or b"") == {"rows": 2}, "not the kwargs of the new deferral"
    assert tasks.end(task.token, StepHandled(handled(part, rows=4))) is S.DEFERRED
    last = store.last_event(tasks.trigger_id)
    assert last is not None
    assert last.payload == b"4"


def test_a_retry_before_the_first_handled_event_takes_the_kwargs_of_its_own_deferral(
    store: Store, query: Query
) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    tasks.fail_it()
    tasks.let_go()
    tasks.retry()
    tasks.stream_it()
    task, part = tasks.take()
    assert (part.state, part.handled, payloads(part)) == (None, 0, [1])
    assert decode_value(task.next_kwargs or b"") == {"rows": 0}


def test_a_step_that_begins_a_try_sees_how_far_its_stream_has_come(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    assert tasks.dispatch() == []
    tasks.stream_it()
    tasks.fire(1, 2)
    tasks.fail_it(number=1, rows=1)
    tasks.retry()
    task, part = tasks.take()
    assert (task.next_method, part.events, part.handled, part.waiting) == (None, (), 1, 1)
    assert decode_value(part.state or b"") == {"rows": 1}


def test_each_event_handled_gives_all_tries_back(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query, retries=1, retry_delay_s=10.0, retry_exponential_backoff=True)
    tasks.stream_it()
    for number in range(1, 5):
        tasks.fire("x", "y")
        assert tasks.fail_it(number=1) is S.UP_FOR_RETRY, "the first try at this place"
        assert tasks.row()["tries_max"] == number + 1
        tasks.let_go()
        clock.advance(9.999)
        assert tasks.retry() == []
        clock.advance(0.001)
        assert tasks.retry() == [tasks.a], "each place has its own delays"
        tasks.stream_it()
    assert tasks.fail_it() is S.FAILED, "the second try at the same place"
    assert tasks.place()[0] == 4


def test_a_step_that_may_not_be_retried_keeps_what_it_has_handled(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1, 2)
    task, part = tasks.take()
    outcome = StepFailed("boom", may_retry=False, handled=handled(part, number=1, rows=1))
    assert tasks.end(task.token, outcome) is S.FAILED
    assert tasks.place() == (1, {"rows": 1})
    assert not tasks.is_open()


# --- its trigger ---------------------------------------------------------------------------------


def test_a_trigger_is_opened_again_only_after_its_last_run_has_ended(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    tasks.handle()
    tasks.fire(2)
    tasks.fail_it()
    tasks.retry()
    assert tasks.stream_it() is S.SCHEDULED
    trigger_id = tasks.trigger_id
    assert store.poll(tasks.epoch, QUEUES).ended == [trigger_id], "the old run is to end"
    # The old run still fires an event, and returns: the event counts, the end is that of the run alone.
    tasks.fire(3)
    assert tasks.finish().over == {trigger_id}, "its supervisor does not start it again by itself"
    assert tasks.stream()["ended_as"] is None
    assert tasks.is_open(), "with the end of the old run it is free"
    assert tasks.claim() == [tasks.trigger_id]
    task, part = tasks.take()
    assert (payloads(part), part.is_over) == ([2, 3], False)
    assert tasks.end(task.token, StepHandled(handled(part))) is S.DEFERRED
    assert tasks.finish().over == {tasks.trigger_id}, "this run is the new one's"


@pytest.mark.parametrize("is_last", [True, False])
def test_what_a_run_reports_twice_does_not_end_the_next_one(store: Store, query: Query, is_last: bool) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    events = tasks.events(1, is_last=is_last)
    end = FinishedTrigger(tasks.trigger_id, tasks.run_name(), "returned", 1)
    store.store_slice(tasks.epoch, events=events, finished=[] if is_last else [end])
    tasks.handle()
    tasks.end(tasks.take()[0].token, StepFailed("boom in stream_ended"))
    tasks.retry()
    tasks.stream_it()
    # It was unknown whether the first commit had arrived, and the task has gone on elsewhere meanwhile.
    store.store_slice(tasks.epoch, events=events, finished=[] if is_last else [end])
    assert tasks.stream()["ended_as"] is None
    assert tasks.state() is S.DEFERRED


def test_a_trigger_whose_supervisor_is_gone_is_opened_again_by_any_other(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    other = tasks.register()
    tasks.stream_it()
    tasks.fire(1)
    assert tasks.fail_it(number=1) is S.UP_FOR_RETRY
    tasks.retry()
    assert tasks.stream_it() is S.DEFERRED
    assert not tasks.is_open()
    assert not store.scheduling.next_due(other).has_reopening
    assert store.fence_triggerers(other, dead=[tasks.epoch]) == [tasks.epoch]
    assert store.scheduling.next_due(other).has_reopening
    assert store.tasks.reopen_streams(other) == [tasks.trigger_id]
    assert tasks.is_open()
    assert not store.scheduling.next_due(other).has_reopening
    assert tasks.claim(other) == [tasks.trigger_id]
    tasks.fire(2, epoch=other)
    assert tasks.state() is S.SCHEDULED


def test_one_supervisor_handles_what_the_trigger_of_another_fires(open_store: OpenStore, query: Query) -> None:
    one, two = open_store(), open_store()
    tasks = Streams(one, query)
    runs_it = tasks.register()
    tasks.stream_it()
    one.release_triggers(tasks.epoch, [tasks.trigger_id])
    assert [row.id for row in two.claim_triggers(runs_it, limit=9, queues=QUEUES)] == [tasks.trigger_id]
    two.store_slice(runs_it, events=tasks.events(1))
    task, part = tasks.take()
    two.store_slice(runs_it, events=tasks.events(2))
    assert tasks.end(task.token, StepHandled(handled(part))) is S.SCHEDULED
    assert tasks.fail_it() is S.UP_FOR_RETRY
    assert two.poll(runs_it, QUEUES).ended == [tasks.trigger_id], "though another supervisor's worker has failed"


def test_the_trigger_of_a_take_over_adds_behind_what_was_stored(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    other = tasks.register()
    tasks.stream_it()
    tasks.fire(1, 2)
    task, part = tasks.take()
    store.fence_triggerers(other, dead=[tasks.epoch])
    (adopted,) = store.tasks.adopt(other)
    assert adopted.state is S.UP_FOR_RETRY
    tasks.epoch = other
    assert not tasks.is_open(), "the try has ended, and its trigger with it"
    assert tasks.retry() == [tasks.a]
    assert tasks.stream_it() is S.SCHEDULED
    assert tasks.is_open(), "its owner was gone"
    tasks.fire(3)
    again, part = tasks.take()
    assert (payloads(part), tasks.end(again.token, StepHandled(handled(part)))) == ([1, 2, 3], S.DEFERRED)
    assert tasks.end(task.token, WorkerLost("it was of the other")) is None


# --- users ---------------------------------------------------------------------------------------


def test_a_task_that_succeeded_and_is_cleared_begins_its_stream_anew(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    tasks.succeed_it()
    first = tasks.trigger_id
    assert tasks.clear_it() is S.NONE
    assert query("SELECT * FROM task_stream") == []
    assert tasks.stream_it() is S.DEFERRED
    assert tasks.trigger_id != first
    assert tasks.place() == (0, None)


def test_a_user_says_whether_a_stream_begins_from_its_start_or_goes_on(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    tasks.succeed_it()
    first = tasks.trigger_id
    store.tasks.clear_many(tasks.run, ["a"], streams="go_on")
    tasks.stream_it()
    assert (tasks.trigger_id, tasks.place()[0]) == (first, 1)
    store.tasks.clear_many(tasks.run, ["a"], streams="from_start")
    tasks.stream_it()
    assert tasks.trigger_id != first
    assert tasks.place() == (0, None)


@pytest.mark.parametrize("state", [S.FAILED, S.UP_FOR_RETRY, S.DEFERRED, S.SCHEDULED, S.RUNNING])
def test_a_task_that_is_cleared_in_the_middle_of_its_stream_goes_on(
    store: Store, query: Query, state: TaskState
) -> None:
    tasks = Streams(store, query, retries=0 if state is S.FAILED else 2)
    tasks.stream_it()
    tasks.fire(1)
    tasks.handle(rows=1)
    token = None
    if state is not S.DEFERRED:
        tasks.fire(2)
    if state is S.RUNNING:
        token = tasks.take()[0].token
    if state in (S.FAILED, S.UP_FOR_RETRY):
        tasks.fail_it()
    was_open = tasks.is_open()
    assert tasks.state() is state
    tasks.clear_it()
    assert (tasks.trigger(tasks.trigger_id)["removed_at"] is not None) is was_open, "with its on_kill()"
    if token is not None:
        assert tasks.end(token, WorkerLost("ended")) is S.NONE
    assert tasks.place() == (1, {"rows": 1})
    first = tasks.trigger_id
    tasks.stream_it()
    assert tasks.trigger_id == first
    assert not tasks.is_open(), "its runner is to call on_kill() first"
    tasks.let_go()
    assert tasks.is_open()
    assert tasks.claim() == [first]


def test_a_task_that_is_marked_or_removed_ends_its_stream_in_every_state(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    for state in (S.DEFERRED, S.SCHEDULED, S.RUNNING):
        tasks.stream_it()
        if state is not S.DEFERRED:
            tasks.fire(1)
        token = tasks.take()[0].token if state is S.RUNNING else None
        assert store.tasks.mark(tasks.a, "success")
        assert store.poll(tasks.epoch, QUEUES).removed == [tasks.trigger_id]
        if token is not None:
            assert tasks.end(token, WorkerLost("ended")) is None
        tasks.let_go()
        assert tasks.clear_it() is S.NONE
    tasks.stream_it()
    tasks.fire(1)
    tasks.remove_it()
    assert tasks.state() is S.REMOVED
    assert not tasks.is_open()


def test_a_retry_that_is_cancelled_before_its_trigger_is_open_leaves_it_over(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    tasks.fail_it(number=1)
    tasks.retry()
    assert tasks.stream_it() is S.DEFERRED
    store.tasks.mark(tasks.a, "failed")
    tasks.let_go()
    assert not tasks.is_open()
    assert store.tasks.remove_orphans() == []


def test_a_task_may_go_on_without_its_stream(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1, is_last=True)
    task, part = tasks.take()
    wait = stream_wait()
    plain = StepDeferred(wait.classpath, wait.kwargs, "resume", wait.next_kwargs, handled=handled(part, rows=1))
    assert tasks.end(task.token, plain) is S.DEFERRED
    second = tasks.row()["trigger_id"]
    assert second != tasks.trigger_id
    assert tasks.place() == (1, {"rows": 1})
    store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES)
    tasks.trigger_id, first = second, tasks.trigger_id
    assert tasks.fire("done").over == {second}
    (task,) = tasks.dispatch()
    assert (task.next_method, task.event, task.stream) == ("resume", b'"done"', None)
    assert not tasks.is_open()
    assert tasks.trigger(first)["finished_at"] is not None
