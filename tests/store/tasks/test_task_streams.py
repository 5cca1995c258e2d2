"""Streams of tasks in the store: how one begins, takes events, goes on over tries, and ends (I20, I21)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.store.harness import Clock, OpenStore, Query
from tests.store.tasks.streams_harness import Streams, handled, payloads, stream_wait

from headgate.protocol.messages.dags import StartTrigger, TaskState
from headgate.protocol.messages.steps import StepFailed, StepHandled, XCom
from headgate.protocol.messages.task_streams import Handled, StreamOptions, StreamPart
from headgate.protocol.values import decode_value
from headgate.scheduling import states
from headgate.store.errors import ValueRefused
from headgate.store.store import Store
from headgate.store.tasks.outcomes import WorkerLost

S = TaskState


# --- many events of one trigger ------------------------------------------------------------------


def test_a_task_handles_the_events_of_one_trigger_in_order_each_once(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    assert tasks.stream_it() is S.DEFERRED
    seen: list[Any] = []
    for batch in (["a"], ["b", "c"], ["d"]):
        assert tasks.fire(*batch).moved_tasks
        assert tasks.state() is S.SCHEDULED
        task, part = tasks.take()
        assert (task.next_method, part.handled, part.waiting) == ("handle_trigger_events", len(seen), len(batch))
        assert [event.sequence_index for event in part.events] == list(range(len(seen), len(seen) + len(batch)))
        assert part.state is None if not seen else decode_value(part.state or b"") == {"rows": len(seen)}
        seen += payloads(part)
        assert tasks.end(task.token, StepHandled(handled(part, rows=len(seen)))) is S.DEFERRED
        assert tasks.is_open(), "one trigger for all of them"
    assert (seen, tasks.place()) == (["a", "b", "c", "d"], (4, {"rows": 4}))
    assert store.poll(tasks.epoch, ("default",)).ended == []
    assert tasks.row()["trigger_id"] == tasks.trigger_id


def test_what_comes_while_a_step_runs_is_the_next_step_at_once(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    task, part = tasks.take()
    tasks.fire(2, 3)
    assert tasks.end(task.token, StepHandled(handled(part))) is S.SCHEDULED
    assert payloads(tasks.take()[1]) == [2, 3]


def test_an_outcome_that_comes_twice_or_late_moves_nothing(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    task, part = tasks.take()
    outcome = StepHandled(handled(part, rows=1))
    tasks.fire(2)
    assert tasks.end(task.token, outcome) is S.SCHEDULED
    assert tasks.end(task.token, outcome) is None
    again, _ = tasks.take()
    assert tasks.end(task.token, outcome) is None, "the step that runs now is another one"
    assert tasks.place() == (1, {"rows": 1})
    assert tasks.end(again.token, WorkerLost("killed")) is S.UP_FOR_RETRY


def test_a_slice_that_is_stored_twice_and_events_that_come_again_change_nothing(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    events = tasks.events(1, 2, keyed=True)
    store.store_slice(tasks.epoch, events=events)
    tasks.handle()
    before = tasks.row(), tasks.stream()
    assert store.store_slice(tasks.epoch, events=events).stored == 0
    tasks.runs += 1
    tasks.fired = 0
    assert tasks.fire(1, 2, keyed=True).redelivered == 2, "a later run delivers the same messages"
    assert (tasks.row(), tasks.stream()) == before


def test_a_step_that_says_it_has_handled_other_events_than_it_can_have_is_refused(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("each", count=1)))
    tasks.fire(1, 2, 3)
    task, part = tasks.take()
    (event,) = part.events
    for wrong in (Handled(event.id, 2, b"{}"), Handled(event.id + 1, 1, b"{}"), Handled(event.id + 9, 3, b"{}")):
        with pytest.raises(ValueRefused, match=r"has handled . events of its stream"):
            tasks.end(task.token, StepHandled(wrong))
    assert (tasks.state(), tasks.place()) == (S.RUNNING, (0, None))
    assert tasks.end(task.token, StepHandled(handled(part))) is S.SCHEDULED


def test_a_task_without_a_stream_handles_no_events(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    with pytest.raises(ValueRefused, match="a stream that the task does not have"):
        tasks.end(tasks.run_it(), StepHandled(Handled(1, 1, b"{}")))


# --- contracts -----------------------------------------------------------------------------------


def test_each_gets_one_event_a_step(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("each", count=1)))
    tasks.fire(1, 2)
    assert tasks.handle() is S.SCHEDULED
    assert tasks.handle() is S.DEFERRED
    assert tasks.place()[0] == 2


def test_latest_gets_the_newest_and_those_before_it_count_as_handled(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("latest", count=1)))
    tasks.fire(1, 2, 3)
    task, part = tasks.take()
    assert (payloads(part), part.handled, part.waiting) == ([3], 2, 3)
    tasks.fire(4, 5)
    assert tasks.end(task.token, StepHandled(handled(part))) is S.SCHEDULED
    assert tasks.place()[0] == 3
    assert payloads(tasks.take()[1]) == [5]


def test_a_batch_begins_when_it_is_whole_or_nothing_more_will_come(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("batch", count=3)))
    tasks.fire(1, 2)
    assert tasks.state() is S.DEFERRED
    tasks.fire(3, 4)
    assert payloads(tasks.take()[1]) == [1, 2, 3]
    assert tasks.end(tasks.row()["token"], WorkerLost("killed")) is S.UP_FOR_RETRY
    tasks.let_go()
    tasks.retry()
    assert tasks.stream_it(stream_wait(StreamOptions("batch", count=3))) is S.SCHEDULED, "a whole batch waits"
    assert tasks.handle() is S.DEFERRED
    tasks.fire(5, is_last=True)
    _, part = tasks.take()
    assert (payloads(part), part.is_over) == ([4, 5], True)


def test_a_batch_that_is_not_whole_begins_after_its_seconds_by_the_databases_clock(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions("batch", count=9, seconds=10.0)))
    assert store.scheduling.next_due(tasks.epoch).in_s is None
    clock.advance(100)
    tasks.fire(1)
    clock.advance(6)
    tasks.fire(2)
    assert store.scheduling.next_due(tasks.epoch).in_s == 4, "since the first"
    clock.advance(3.999)
    assert store.tasks.begin_due_batches(tasks.epoch) == []
    clock.advance(0.001)
    assert store.tasks.begin_due_batches(tasks.epoch) == [tasks.a]
    assert store.scheduling.next_due(tasks.epoch).in_s is None
    assert tasks.handle() is S.DEFERRED
    tasks.fire(3)
    tasks.clear_it()
    assert store.scheduling.next_due(tasks.epoch).in_s is None
    assert store.tasks.begin_due_batches(tasks.epoch) == []


def test_the_timeout_is_of_the_wait_for_the_next_event(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Streams(store, query, execution_timeout_s=100.0)
    tasks.stream_it(stream_wait(StreamOptions("batch", count=2), timeout_s=30.0))
    for wait_s in (20, 20):
        clock.advance(wait_s)
        assert store.tasks.time_out(tasks.epoch) == []
        tasks.fire("x")
    clock.advance(29)
    assert tasks.handle() is S.DEFERRED
    clock.advance(29)
    assert store.tasks.time_out(tasks.epoch) == []
    clock.advance(2)
    assert store.tasks.time_out(tasks.epoch) == [tasks.a], "its execution_timeout goes over all of it"
    assert not tasks.is_open()
    task, _ = tasks.take()
    assert decode_value(task.next_kwargs or b"")["reason"] == "execution_timeout"


# --- its end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["event", "run"])
def test_a_stream_that_is_over_has_one_step_with_its_end(store: Store, query: Query, how: str) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    task, part = tasks.take()
    assert not part.is_over
    over = tasks.fire(2, is_last=True).over if how == "event" else tasks.finish().over
    assert over == {tasks.trigger_id}, "it is not started again"
    assert tasks.end(task.token, StepHandled(handled(part))) is S.SCHEDULED
    assert not tasks.is_open()
    task, part = tasks.take()
    assert (payloads(part), part.is_over) == ([2] if how == "event" else [], True)
    assert tasks.succeed_it_with(task, part) is S.SUCCESS
    assert tasks.place()[0] == (2 if how == "event" else 1)


def test_the_end_of_a_run_whose_events_are_all_handled_resumes_the_task_that_waits(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    tasks.handle()
    assert tasks.finish().over == {tasks.trigger_id}
    assert tasks.state() is S.SCHEDULED
    assert tasks.take()[1].is_over


def test_a_trigger_that_fails_fails_the_try_after_all_that_it_has_fired(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    assert tasks.finish("failed", error="no more pages").over == {tasks.trigger_id}
    task, part = tasks.take()
    assert (payloads(part), part.is_over) == ([1], False)
    assert tasks.end(task.token, StepHandled(handled(part))) is S.SCHEDULED
    task, _ = tasks.take()
    assert task.next_method == "__fail__"
    told = decode_value(task.next_kwargs or b"")
    assert (told["error"], told["reason"]) == ("no more pages", "trigger_failure")
    assert tasks.place()[0] == 1


def test_a_trigger_that_fails_while_its_task_waits_fails_the_try_at_once(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.finish("failed", error="no more pages")
    assert tasks.take()[0].next_method == "__fail__"


@pytest.mark.parametrize("held", [True, False])
def test_a_trigger_that_may_not_run_or_has_an_event_refused_fails_its_stream(
    store: Store, query: Query, held: bool
) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    if held:
        assert not store.hold_trigger(tasks.epoch, tasks.trigger_id, "quarantine", "it ended its runner")
    else:
        refused = msgspec.structs.replace(tasks.events(2)[0], seq=0)  # of no message of a broker
        store.dead_letter_event(tasks.epoch, refused, "it ended its runner")
    assert tasks.handle() is S.SCHEDULED, "what was stored before is handled"
    task, _ = tasks.take()
    assert (task.next_method, decode_value(task.next_kwargs or b"")["error"]) == ("__fail__", "it ended its runner")
    tasks.end(task.token, WorkerLost("killed"))
    tasks.let_go()
    tasks.retry()
    assert tasks.stream_it() is S.DEFERRED
    assert tasks.trigger(tasks.trigger_id)["hold"] is None, "the next try is given another chance, as with a new one"


@pytest.mark.parametrize("kind", ["success", "skipped", "failed"])
@pytest.mark.parametrize("waits", [True, False])
def test_an_event_that_ends_the_task_ends_it_after_all_before(
    store: Store, query: Query, kind: Any, waits: bool
) -> None:
    tasks = Streams(store, query, retries=0)
    tasks.stream_it()
    tasks.fire(1)
    if waits:
        tasks.handle()
    assert tasks.fire({"xcoms": {"rows": 7}}, kind=kind).over == {tasks.trigger_id}
    if not waits:
        assert tasks.handle() == tasks.state()
    assert tasks.state().value == {"success": "success", "skipped": "skipped", "failed": "failed"}[kind]
    assert tasks.place()[0] == 1
    value = store.tasks.pull_xcom(tasks.run, "a", "rows")
    assert value is not None
    assert decode_value(value) == 7


@pytest.mark.parametrize("elements", [None, "each"])
def test_a_task_that_its_trigger_ends_well_tells_of_no_error_of_an_earlier_try(
    store: Store, query: Query, elements: Any
) -> None:
    tasks = Streams(store, query)
    tasks.stream_it(stream_wait(StreamOptions(elements=elements)))
    tasks.finish("failed", error="no more pages")
    tasks.end(tasks.take()[0].token, StepFailed("TaskDeferralError: no more pages"))
    assert tasks.row()["last_error"]
    tasks.let_go()
    tasks.retry()
    tasks.stream_it(stream_wait(StreamOptions(elements=elements)))
    if elements is None:
        tasks.fire({"xcoms": {}}, kind="success")
    else:
        tasks.fire([1, 2], is_last=True)
    assert (tasks.state(), tasks.row()["last_error"]) == (S.SUCCESS, None)


def test_a_task_that_ends_its_stream_itself_ends_its_trigger(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1, 2)
    assert tasks.succeed_it() is S.SUCCESS
    assert not tasks.is_open()
    assert store.poll(tasks.epoch, ("default",)).ended == [tasks.trigger_id]
    assert tasks.place()[0] == 2
    tasks.fire(3)
    assert (tasks.state(), tasks.place()[0]) == (S.SUCCESS, 2)


# --- beginning -----------------------------------------------------------------------------------


def test_a_task_begins_its_stream_without_a_worker(store: Store, query: Query) -> None:
    wait = stream_wait(StreamOptions("each", count=1))
    start = StartTrigger(wait.classpath, wait.kwargs, wait.next_method, wait.next_kwargs, None, wait.stream)
    tasks = Streams(store, query, start_trigger=start)
    assert tasks.plan().in_triggers == 1
    tasks.trigger_id = tasks.stream()["trigger_id"]
    tasks.claim()
    tasks.fire(1, 2)
    assert tasks.handle() is S.SCHEDULED
    assert tasks.fail_it() is S.UP_FOR_RETRY
    tasks.let_go()
    assert tasks.retry() == [tasks.a]
    assert tasks.state() is S.SCHEDULED, "an event waits already"
    assert payloads(tasks.take()[1]) == [2]
    assert tasks.is_open()


def test_the_supervisor_that_runs_it_is_told_to_take_more_than_one_event(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    store.release_triggers(tasks.epoch, [tasks.trigger_id])
    tasks.fire(1)
    (claimed,) = store.claim_triggers(tasks.epoch, limit=9, queues=("default",))
    assert claimed.is_task_stream
    assert claimed.task is not None
    assert claimed.task.task_id == "a", "though the task does not wait at this moment"


def test_xcoms_of_handled_events_are_stored_with_them(store: Store, query: Query) -> None:
    tasks = Streams(store, query)
    tasks.stream_it()
    tasks.fire(1)
    tasks.handle(xcoms=[XCom("k", b"1")])
    tasks.fire(2)
    assert tasks.fail_it() is S.UP_FOR_RETRY
    tasks.retry()
    assert store.tasks.pull_xcom(tasks.run, "a", "k") == b"1", "the event is not handled again"


# --- the table of states -------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["stream_event", "stream_waits", "stream_goes_on", "stream_failed"])
def test_a_row_of_the_table_of_states_is_what_a_stream_does(store: Store, query: Query, event: str) -> None:
    (row,) = states.of(event)
    tasks = Streams(store, query)
    tasks.stream_it()
    part = StreamPart()
    if event != "stream_event":
        tasks.fire(1)
        _, part = tasks.take()
    before = tasks.row()
    if event in ("stream_event", "stream_goes_on"):
        tasks.fire(2)
    elif event == "stream_failed":
        tasks.finish("failed", error="boom")
    if event != "stream_event":
        assert tasks.end(str(before["token"]), StepHandled(handled(part))) is row.to
    after = tasks.row()
    assert (before["state"], after["state"]) == (next(iter(row.from_)).value, row.to.value)
    assert (after["trigger_id"] is not None) == (row.trigger_id == "set")
    assert after["next_method"] == ("__fail__" if row.next_method == "__fail__" else before["next_method"])
    assert after["token"] != before["token"]
