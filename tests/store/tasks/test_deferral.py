"""Deferrals and tries in the store: the ends of triggers, timeouts and retries, and which XComs are kept over them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.supervisor.tasks_harness import WAIT, Tasks, event_of

from headgate.protocol.messages.dags import StartTrigger, TaskState
from headgate.protocol.messages.runner import EventKind, FinishedTrigger, Outcome, RefusedEvent
from headgate.protocol.values import decode_value
from headgate.store.errors import ValueRefused
from headgate.store.store import Store
from headgate.store.tables import task_instance
from headgate.store.tasks.deferral import Deferral

S = TaskState


# --- the trigger's end ---------------------------------------------------------------------------


def test_a_trigger_that_ends_without_an_event_or_fails_resumes_its_task_to_fail(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    outcomes: tuple[tuple[Outcome, str, str], ...] = (
        ("returned", "", "ended without an event"),
        ("failed", "boom", "boom"),
    )
    for outcome, error, expected in outcomes:
        _, trigger_id = tasks.defer_it()
        end = FinishedTrigger(trigger_id, f"run-{trigger_id}", outcome, 0, error=error, traceback="Traceback ...")
        store.store_slice(tasks.epoch, finished=[end])
        (task,) = tasks.dispatch()
        assert task.next_method == "__fail__"
        assert task.next_kwargs is not None
        told = decode_value(task.next_kwargs)
        assert expected in told["error"]
        assert (told["traceback"], told["reason"]) == ("Traceback ...", "trigger_failure")
        assert task.event is None
        store.tasks.mark(tasks.a, "failed")
        ends.lose_worker(store.tasks, tasks.epoch, tasks.a, task.token, "it was marked")
        tasks.clear_it()


def test_a_trigger_that_was_cancelled_or_belongs_to_another_leaves_its_task_waiting(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    before = tasks.row()
    cancelled = FinishedTrigger(trigger_id, f"run-{trigger_id}", "cancelled", 0, reason="reassigned")
    store.store_slice(tasks.epoch, finished=[cancelled])
    other = tasks.register()
    failed = FinishedTrigger(trigger_id, f"run-{trigger_id}", "failed", 0, error="boom")
    store.store_slice(other, finished=[failed])
    assert tasks.row() == before


def test_the_end_of_a_run_gives_up_a_trigger_whose_task_has_gone_on(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    store.store_slice(tasks.epoch, events=[event_of(trigger_id)])
    trigger = tasks.trigger(trigger_id)
    assert trigger["finished_at"] is not None
    assert trigger["triggerer_id"] == tasks.epoch
    store.store_slice(tasks.epoch, finished=[FinishedTrigger(trigger_id, f"run-{trigger_id}", "returned", 1)])
    assert tasks.trigger(trigger_id) == {**trigger, "triggerer_id": None}


def test_a_task_whose_trigger_is_held_fails_at_once_with_the_reason(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    assert not store.hold_trigger(tasks.epoch, trigger_id, "quarantine", "it ended its runner 3 times"), "it is over"
    (task,) = tasks.dispatch()
    assert task.next_method == "__fail__"
    assert task.next_kwargs is not None
    told = decode_value(task.next_kwargs)
    assert (told["error"], told["reason"]) == ("it ended its runner 3 times", "trigger_failure")
    poll = store.poll(tasks.epoch, QUEUES)
    assert (poll.ended, poll.held) == ([trigger_id], {})


def test_a_refused_event_resumes_its_task_to_fail_at_once_and_with_the_reason(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    reason = "an event of d.r.a has 2,000,000 bytes; the limit is 1,048,576"
    refused = RefusedEvent(trigger_id, f"run-{trigger_id}", 0, 0, reason, 2_000_000, b"x")
    result = store.store_slice(tasks.epoch, refused=[refused])
    assert result.over == {trigger_id}
    assert result.moved_tasks
    assert tasks.row()["last_error"] == reason
    (task,) = tasks.dispatch()
    assert task.next_method == "__fail__"
    assert decode_value(task.next_kwargs or b"")["error"] == reason
    # The report of the end, which may come in a later slice, changes nothing.
    end = FinishedTrigger(trigger_id, f"run-{trigger_id}", "returned", 1)
    assert store.store_slice(tasks.epoch, finished=[end]).over == frozenset()


def test_an_event_that_becomes_a_dead_letter_resumes_its_task_to_fail_with_the_reason(
    store: Store, query: Query
) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    store.dead_letter_event(tasks.epoch, event_of(trigger_id), "the database cannot take it")
    assert (tasks.state(), tasks.row()["last_error"]) == (S.SCHEDULED, "the database cannot take it")
    (task,) = tasks.dispatch()
    assert task.next_method == "__fail__"


@pytest.mark.parametrize("kind", ["event", "success", "failed", "skipped"])
def test_a_slice_says_which_triggers_are_over_because_their_task_has_gone_on(
    store: Store, query: Query, kind: EventKind
) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    assert store.store_slice(tasks.epoch, events=[event_of(trigger_id, kind=kind)]).over == {trigger_id}
    assert store.store_slice(tasks.epoch, events=[event_of(trigger_id, kind=kind)]).over == frozenset()


def test_an_end_event_pushes_its_xcoms(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    store.store_slice(tasks.epoch, events=[event_of(trigger_id, {"xcoms": {"rows": [1, 2]}}, kind="success")])
    assert tasks.state() is S.SUCCESS
    value = store.tasks.pull_xcom(tasks.run, "a", "rows")
    assert value is not None
    assert decode_value(value) == [1, 2]
    assert store.tasks.pull_xcom(tasks.run, "a", "other") is None


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"xcoms": {"big": "x" * 50_000}}, r"the XCom 'big' needs 50,002 bytes; the limit is 49,152"),
        ({"xcoms": {"": 1}}, "the key of an XCom must not be empty"),
        ({"xcoms": {f"k{n}": n for n in range(101)}}, "101 XComs at once; the limit is 100"),
        ({"xcoms": 5}, "the XComs of the event cannot be read"),
    ],
)
def test_an_end_event_whose_xcoms_are_refused_fails_the_task(
    store: Store, query: Query, payload: Any, reason: str
) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    assert store.store_slice(tasks.epoch, events=[event_of(trigger_id, payload, kind="success")]).stored == 1
    row = tasks.row()
    assert row["state"] == "failed"
    assert reason in row["last_error"]
    assert query("SELECT * FROM xcom") == []


def test_an_orphan_is_removed_and_no_watchers_or_waiting_tasks_trigger(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, waited_for = tasks.defer_it()
    watched = store.add_watcher("w", "a.B", {})
    query(
        'INSERT INTO "trigger" (classpath, kwargs, created_date) '
        'SELECT classpath, kwargs, created_date FROM "trigger" WHERE id = :id',
        id=watched,
    )
    orphans = store.tasks.remove_orphans()
    assert len(orphans) == 1
    assert not set(orphans) & {waited_for, watched}
    assert store.tasks.remove_orphans() == []


# --- times ---------------------------------------------------------------------------------------


def test_the_deadline_is_over_the_whole_try_deferrals_included(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Tasks(store, query, execution_timeout_s=100.0)
    begun = clock.now
    _, trigger_id = tasks.defer_it(Deferral("a.B", b"{}", "resume", b"{}", timeout_s=60.0))
    clock.advance(50)
    store.store_slice(tasks.epoch, events=[event_of(trigger_id)])
    (task,) = tasks.dispatch()
    assert (task.deadline, task.remaining_s) == (begun + timedelta(seconds=100), 50.0)
    # The second deferral may take 60 s by itself, but the task has only 50 s left.
    ends.defer(store.tasks, tasks.epoch, tasks.a, task.token, Deferral("a.B", b"{}", "resume", b"{}", timeout_s=60.0))
    clock.advance(49.999)
    assert store.tasks.time_out(tasks.epoch) == []
    clock.advance(0.001)
    assert store.tasks.time_out(tasks.epoch) == [tasks.a]
    (late,) = tasks.dispatch()
    assert late.next_kwargs is not None
    assert decode_value(late.next_kwargs)["reason"] == "execution_timeout"
    assert late.remaining_s == 0.0
    assert store.tasks.time_out(tasks.epoch) == []


def test_a_wait_of_its_own_times_out_by_the_databases_clock(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    tasks.defer_it(Deferral("a.B", b"{}", "resume", b"{}", timeout_s=3600.0))
    assert store.tasks.time_out(tasks.epoch) == []
    # As if an hour had passed: nobody can set the database's own clock.
    with store.database.writing() as tx:
        long_ago = datetime(2020, 1, 1, tzinfo=UTC)
        tx.connection.execute(update(task_instance).values(trigger_timeout=long_ago))
    assert store.tasks.time_out(tasks.epoch) == [tasks.a]
    (task,) = tasks.dispatch()
    assert task.next_kwargs is not None
    failure = decode_value(task.next_kwargs)
    assert 0.0 <= failure.pop("waited_s") < 3600.0, "since the deferral, however early it was to time out"
    assert failure == {
        "error": "what it waited for had not come when the timeout of the deferral was over",
        "traceback": "",
        "reason": "trigger_timeout",
    }


def test_a_scheduled_task_begins_its_time_when_it_is_dispatched(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    tasks = Tasks(open_store(clock=clock), query, execution_timeout_s=10.0)
    tasks.bring_to(S.SCHEDULED)
    clock.advance(1000)
    (task,) = tasks.dispatch()
    assert (task.deadline, task.remaining_s) == (clock.now + timedelta(seconds=10), 10.0)


def test_retries_wait_longer_each_time_and_end_and_a_clear_begins_them_anew(
    open_store: OpenStore, query: Query
) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    tasks = Tasks(store, query, retries=2, retry_delay_s=10.0, retry_exponential_backoff=True)
    for round_ in (1, 2):
        for try_number, wait_s in ((1, 10), (2, 20)):
            assert ends.fail(store.tasks, tasks.epoch, tasks.a, tasks.run_it(), "error") is S.UP_FOR_RETRY
            assert tasks.row()["try_number"] == try_number + 3 * (round_ - 1)
            clock.advance(wait_s - 0.001)
            assert store.tasks.retry_due(tasks.epoch) == []
            clock.advance(0.001)
            assert store.tasks.retry_due(tasks.epoch) == [tasks.a]
        assert ends.fail(store.tasks, tasks.epoch, tasks.a, tasks.run_it(), "the last error") is S.FAILED
        assert tasks.row()["last_error"] == "the last error"
        assert tasks.clear_it() is S.NONE
        assert tasks.row()["last_error"] is None


def test_a_new_try_does_not_see_the_xcoms_of_the_one_before(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, retries=1, retry_delay_s=0.0)
    token = tasks.run_it()
    assert ends.defer(store.tasks, tasks.epoch, tasks.a, token, WAIT, xcoms={"k": b"1", "l": b"2"})
    (trigger,) = store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES)
    store.store_slice(tasks.epoch, events=[event_of(trigger.id)])
    (task,) = tasks.dispatch()
    ends.fail(store.tasks, tasks.epoch, tasks.a, task.token, "error", xcoms={"k": b"3"})
    assert store.tasks.pull_xcom(tasks.run, "a", "k") == b"3"
    assert store.tasks.pull_xcom(tasks.run, "a", "l") == b"2"
    assert store.tasks.retry_due(tasks.epoch) == [tasks.a]
    assert query("SELECT * FROM xcom") == []


def test_xcoms_go_in_with_whatever_ends_a_step_or_nothing_does(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, retries=1)
    too_big = {"big": b"x" * 50_000}
    token = tasks.run_it()
    verbs: list[Callable[[], object]] = [
        lambda: ends.defer(store.tasks, tasks.epoch, tasks.a, token, WAIT, xcoms=too_big),
        lambda: ends.fail(store.tasks, tasks.epoch, tasks.a, token, "error", xcoms=too_big),
    ]
    for verb in verbs:
        with pytest.raises(ValueRefused, match="'big'"):
            verb()
        assert tasks.state() is S.RUNNING
    assert all(line.removed_at for line in store.inspect.triggers(with_ended=True))
    assert ends.defer(store.tasks, tasks.epoch, tasks.a, token, WAIT, xcoms={"before": b"1"})
    (trigger,) = store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES)
    store.store_slice(tasks.epoch, events=[event_of(trigger.id)])
    (task,) = tasks.dispatch()
    assert ends.fail(store.tasks, tasks.epoch, tasks.a, task.token, "error", xcoms={"after": b"2"}) is S.UP_FOR_RETRY
    assert store.tasks.pull_xcom(tasks.run, "a", "before") == b"1"
    assert store.tasks.pull_xcom(tasks.run, "a", "after") == b"2"


def test_a_cleared_task_has_no_xcoms_and_its_old_worker_pushes_none(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    assert ends.succeed(store.tasks, tasks.epoch, tasks.a, tasks.run_it(), xcoms={"return_value": b"1"})
    assert tasks.clear_it() is S.NONE
    assert query("SELECT * FROM xcom") == []
    token = tasks.run_it()
    assert tasks.clear_it() is S.RESTARTING
    (owned,) = store.tasks.owned(tasks.epoch)
    assert (owned.token, owned.state) == (token, S.RESTARTING)
    assert not ends.succeed(store.tasks, tasks.epoch, tasks.a, token, xcoms={"k": b"2"})
    assert query("SELECT * FROM xcom") == []
    assert tasks.state() is S.NONE, "its old worker is done with it"
    assert store.tasks.owned(tasks.epoch) == []


def test_a_task_that_begins_in_its_trigger_does_so_once_a_try(store: Store, query: Query) -> None:
    start = StartTrigger(WAIT.classpath, WAIT.kwargs, WAIT.next_method, WAIT.next_kwargs, 60.0)
    tasks = Tasks(store, query, execution_timeout_s=60.0, start_trigger=start)
    assert tasks.plan().in_triggers == 1
    (trigger,) = store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES)
    row = tasks.row()
    assert None not in (row["started_at"], row["deadline"], row["trigger_timeout"])
    store.store_slice(tasks.epoch, events=[event_of(trigger.id)])
    assert tasks.plan().in_triggers == 0
    (task,) = tasks.dispatch()
    assert (task.next_method, task.try_number) == (WAIT.next_method, 1)


def test_a_trigger_waits_in_the_queue_of_its_task(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, queue="gpu")
    tasks.bring_to(S.SCHEDULED)
    (task,) = store.tasks.dispatch(tasks.epoch, limit=1, queues=("gpu",)).tasks
    ends.defer(store.tasks, tasks.epoch, tasks.a, task.token, WAIT)
    assert store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES) == []
    assert len(store.claim_triggers(tasks.epoch, limit=9, queues=("gpu",))) == 1, "where the task ran"
