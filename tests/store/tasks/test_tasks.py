"""Dispatch and outcomes in the store: which tasks get a worker, and whose answer counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Query
from tests.supervisor.tasks_harness import WAIT, Tasks, clear, event_of, task_states

from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState
from headgate.protocol.messages.runner import FinishedTrigger
from headgate.protocol.messages.steps import Emitted
from headgate.protocol.values import decode_value
from headgate.store.db.engine import open_engine
from headgate.store.db.prepared import driver_of
from headgate.store.errors import LeaseLost
from headgate.store.ids import DagRunId, Epoch, TaskInstanceId
from headgate.store.store import Store
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks import deferral, dispatch, outcomes
from headgate.store.tasks.dispatch import Candidate, fit
from headgate.store.tasks.outcomes import StepEnd, WorkerLost

S = TaskState


def tasks_of(*ids: str, **changes: Any) -> tuple[TaskSpec, ...]:
    return tuple(TaskSpec(task_id, "Op", **changes) for task_id in ids)


# --- who gets a worker ---------------------------------------------------------------------------


def test_tasks_go_to_workers_by_priority_and_each_to_one(store: Store, query: Query) -> None:
    specs = tuple(
        TaskSpec(name, "Op", priority_weight=weight) for name, weight in zip("abcd", (1, 5, 3, 3), strict=True)
    )
    tasks = Tasks(store, query, tasks=specs)
    assert tasks.plan().scheduled == 4
    assert [task.task_id for task in tasks.dispatch(limit=3)] == ["b", "c", "d"]
    (last,) = tasks.dispatch(limit=3)
    assert (last.task_id, last.dag, last.run_id, last.try_number, last.next_method) == ("a", "etl", "r1", 1, None)
    assert tasks.dispatch() == []


def test_a_resumed_task_goes_before_all_that_has_not_begun(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, tasks=tasks_of("waits"))
    _, trigger_id = tasks.defer_it()
    urgent = DagSpec("other", tasks=tasks_of("urgent", priority_weight=100))
    store.tasks.save_file(tasks.epoch, "other.py", [urgent])
    store.tasks.create_run("other", "r1")
    assert tasks.plan().scheduled == 1
    store.store_slice(tasks.epoch, events=[event_of(trigger_id, {"rows": 3})])
    first, second = tasks.dispatch()
    assert (first.task_id, second.task_id) == ("waits", "urgent")
    assert (first.next_method, first.next_kwargs) == (WAIT.next_method, WAIT.next_kwargs)
    assert first.event is not None
    assert decode_value(first.event) == {"rows": 3}
    assert (second.next_method, second.next_kwargs, second.event) == (None, None, None)


def test_a_pool_never_has_more_slots_in_use_than_it_has(store: Store, query: Query) -> None:
    specs = (*tasks_of("a", "b", "c", pool="small"), *tasks_of("other"))
    tasks = Tasks(store, query, tasks=specs)
    store.tasks.set_pool("small", 2)
    assert tasks.plan().scheduled == 4
    given = tasks.dispatch()
    assert [task.task_id for task in given] == ["a", "b", "other"]
    assert tasks.dispatch() == []
    # A task that waits for its trigger needs no slot, and gets one again before it goes on.
    assert ends.defer(store.tasks, tasks.epoch, given[0].id, given[0].token, WAIT)
    assert [task.task_id for task in tasks.dispatch()] == ["c"]
    (trigger,) = store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES)
    store.store_slice(tasks.epoch, events=[event_of(trigger.id)])
    assert tasks.dispatch() == []
    assert ends.succeed(store.tasks, tasks.epoch, given[1].id, given[1].token)
    assert [task.task_id for task in tasks.dispatch()] == ["a"]


def test_a_task_of_an_unknown_pool_another_queue_or_a_paused_dag_waits(store: Store, query: Query) -> None:
    specs = (*tasks_of("a"), *tasks_of("lost", pool="nobody made it"), *tasks_of("gpu", queue="gpu"))
    tasks = Tasks(store, query, tasks=specs)
    assert tasks.plan().scheduled == 3
    store.tasks.set_paused("etl", is_paused=True)
    assert tasks.dispatch() == []
    store.tasks.set_paused("etl", is_paused=False)
    assert [task.task_id for task in tasks.dispatch()] == ["a"]
    store.tasks.set_pool("nobody made it", 1)
    assert [task.task_id for task in tasks.dispatch()] == ["lost"]
    gpu = store.tasks.dispatch(tasks.epoch, limit=9, queues=("gpu",)).tasks
    assert [task.task_id for task in gpu] == ["gpu"]


def test_what_does_not_fit_holds_up_its_own_pool_only_and_what_never_fits_nothing() -> None:
    def candidate(id_: int, pool: str, slots: int, weight: int = 1, *, resumed: bool = False) -> Candidate:
        return Candidate(TaskInstanceId(id_), pool, slots, resumed, weight, DagRunId(1), f"t{id_}", None)

    waiting = [candidate(1, "p", 3, 9), candidate(2, "p", 1), candidate(3, "q", 1), candidate(4, "p", 50, 99)]
    slots, free = {"p": 4, "q": 1}, {"p": 2, "q": 1}
    assert fit(waiting, slots, free, 10) == ([3], False)
    assert fit(waiting, slots, {"p": 4, "q": 1}, 10) == ([1, 2, 3], False)
    assert fit(waiting, slots, {"p": 4, "q": 1}, 2) == ([1, 2], False)
    assert fit([candidate(1, "q", 1, 5), candidate(2, "q", 1, resumed=True)], slots, free, 10) == ([2], False)
    assert fit(waiting, slots, {"p": 4, "q": 1}, 0) == ([], False)


# --- whose answer counts -------------------------------------------------------------------------


def answers(tasks: Tasks, token: str) -> dict[str, object]:
    """Have a worker say everything that a worker can say; return what it is told."""
    verbs, epoch, a = tasks.store.tasks, tasks.epoch, tasks.a
    return {
        "defer": ends.defer(verbs, epoch, a, token, WAIT, xcoms={"k": b"1"}),
        "succeed": ends.succeed(verbs, epoch, a, token, xcoms={"k": b"1"}),
        "fail": ends.fail(verbs, epoch, a, token, "late", xcoms={"k": b"1"}),
        "lose_worker": ends.lose_worker(verbs, epoch, a, token, "late"),
    }


REFUSED = {"defer": False, "succeed": False, "fail": None, "lose_worker": None}


@pytest.mark.parametrize("then", ["running again", "deferred", "resumed", "deferred again", "marked"])
def test_a_late_answer_of_an_earlier_worker_changes_nothing(store: Store, query: Query, then: str) -> None:
    tasks = Tasks(store, query, retries=3, retry_delay_s=0.0)
    old = tasks.run_it()
    if then == "running again":
        assert ends.lose_worker(store.tasks, tasks.epoch, tasks.a, old, "killed") is S.UP_FOR_RETRY
        assert store.tasks.retry_due(tasks.epoch) == [tasks.a]
        tasks.dispatch()
    elif then == "marked":
        store.tasks.mark(tasks.a, "success")
    else:
        assert ends.defer(store.tasks, tasks.epoch, tasks.a, old, WAIT)
        if then != "deferred":
            (trigger,) = store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES)
            store.store_slice(tasks.epoch, events=[event_of(trigger.id)])
            (again,) = tasks.dispatch()
            if then == "deferred again":
                ends.defer(store.tasks, tasks.epoch, tasks.a, again.token, WAIT)
    before = tasks.row()
    assert before["token"] != old
    assert answers(tasks, old) == REFUSED
    assert tasks.row() == before | {"old_token": None, "old_owner_id": None}, "but that this worker is gone"
    assert query("SELECT * FROM xcom") == []


def test_the_token_of_a_deferral_is_no_workers(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    token, _ = tasks.defer_it()
    before = tasks.row()
    assert answers(tasks, token) == REFUSED
    assert tasks.row() == before


def test_an_event_of_an_earlier_deferral_resumes_no_later_one(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, first = tasks.defer_it()
    tasks.clear_it()
    _, second = tasks.defer_it()
    assert first != second
    before = tasks.row()
    store.store_slice(tasks.epoch, events=[event_of(first), event_of(first, kind="failed", index=1)])
    failed = FinishedTrigger(first, f"run-{first}", "failed", 2, error="boom")
    store.store_slice(tasks.epoch, finished=[failed])
    assert tasks.row() == before


def test_an_event_that_is_stored_twice_resumes_once(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    event = event_of(trigger_id)
    store.store_slice(tasks.epoch, events=[event])
    (task,) = tasks.dispatch()
    assert ends.defer(store.tasks, tasks.epoch, tasks.a, task.token, WAIT)
    before = tasks.row()
    assert store.store_slice(tasks.epoch, events=[event]).stored == 0
    assert tasks.row() == before


def test_the_first_event_of_a_slice_is_the_one_that_resumes(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    store.store_slice(tasks.epoch, events=[event_of(trigger_id, n, index=n) for n in range(3)])
    (task,) = tasks.dispatch()
    assert task.event is not None
    assert decode_value(task.event) == 0
    assert len(list(store.inspect.events())) == 3


@pytest.mark.parametrize(("kinds", "state"), [(("event", "failed"), S.SCHEDULED), (("success", "event"), S.SUCCESS)])
def test_of_several_events_in_a_slice_the_first_says_what_becomes_of_the_task(
    store: Store, query: Query, kinds: tuple[Any, ...], state: TaskState
) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    store.store_slice(tasks.epoch, events=[event_of(trigger_id, kind=kind, index=n) for n, kind in enumerate(kinds)])
    assert tasks.state() is state


def test_a_slice_that_is_refused_resumes_nothing(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    before = tasks.row()
    with pytest.raises(Exception, match="refuses"):
        store.store_slice(tasks.epoch, events=[event_of(trigger_id), event_of(10_000)])
    assert tasks.row() == before


def test_the_events_of_watchers_cost_no_statement_for_tasks(sqlite_url: str, secrets: Any) -> None:
    with Store(open_engine(sqlite_url), secrets=secrets) as store:
        tasks = Tasks(store, lambda *_: [])
        watched = store.add_watcher("w", "a.B", {})
        said: list[str] = []
        store.database._connected().connection.driver_connection.set_trace_callback(said.append)  # type: ignore[union-attr]

        def slice_of(trigger_id: int) -> str:
            said.clear()
            end = FinishedTrigger(trigger_id, f"run-{trigger_id}", "failed", 1, error="boom")
            store.store_slice(tasks.epoch, events=[event_of(trigger_id)], finished=[end])
            return "\n".join(said)

        assert [trigger.id for trigger in store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES)] == [watched]
        assert "INSERT INTO trigger_event" in (alone := slice_of(watched))
        assert "task_instance" not in alone
        assert ends.defer(store.tasks, tasks.epoch, tasks.a, tasks.run_it(), WAIT)
        (waited_for,) = store.claim_triggers(tasks.epoch, limit=9, queues=QUEUES)
        assert "task_instance" not in slice_of(watched)
        assert slice_of(waited_for.id).count("UPDATE task_instance") == 1


def test_what_is_asked_again_and_again_never_reads_the_tasks_that_have_ended(sqlite_url: str) -> None:
    asked = {
        "resume": deferral._RESUME,
        "time out": deferral._TIMED_OUT,
        "retry": dispatch._RETRY_DUE.for_all,
        "candidates": dispatch._CANDIDATES,
        "slots in use": dispatch._USED,
        "owned": outcomes._OWNED,
        "left": outcomes._LEFT,
        "orphans": outcomes._ORPHANS,
    }
    with open_engine(sqlite_url).connect() as connection:
        for name, statement in asked.items():
            parameters = [None] * len(statement.places(connection.dialect))
            text = "EXPLAIN QUERY PLAN " + statement.text(connection.dialect)
            plan = [step for *_, step in driver_of(connection).execute(text, parameters).fetchall()]
            assert any("task_instance USING INDEX" in step for step in plan), (name, plan)
            assert not any("SCAN task_instance" in step for step in plan), (name, plan)


# --- owners --------------------------------------------------------------------------------------


def test_tasks_of_supervisors_that_are_gone_are_adopted_and_deferred_ones_wait_on(store: Store, query: Query) -> None:
    tasks = Tasks(store, query, tasks=(*tasks_of("a", "b"), *tasks_of("r", retries=1), *tasks_of("d")))
    tasks.plan()
    given = {task.task_id: task for task in tasks.dispatch()}
    ids = {name: task.id for name, task in given.items()}
    assert set(given) == {"a", "b", "r", "d"}
    ends.defer(store.tasks, tasks.epoch, ids["b"], given["b"].token, WAIT)
    assert clear(store, tasks.run, "d") == {"d": S.RESTARTING}
    assert [owned.state for owned in store.tasks.owned(tasks.epoch)] == [S.RUNNING, S.RUNNING, S.RESTARTING]
    other = tasks.register()
    assert [(line.triggers, line.tasks) for line in store.inspect.triggerers()] == [(0, 0), (0, 3)]
    assert store.tasks.adopt(other) == []
    store.fence_triggerers(other, dead=[tasks.epoch])
    adopted = {task.name.task_id: task for task in store.tasks.adopt(other)}
    expected = {"a": S.FAILED, "r": S.UP_FOR_RETRY, "d": S.NONE}
    assert {name: task.state for name, task in adopted.items()} == expected
    assert {name: task.id for name, task in adopted.items()} == {name: ids[name] for name in expected}
    assert [bool(adopted[name].error) for name in "ard"] == [True, True, False]
    assert adopted["a"].name.try_number == 1
    assert store.tasks.adopt(other) == []
    assert store.tasks.owned(tasks.epoch) == []
    assert task_states(store, tasks.run)["b"] is S.DEFERRED
    assert f"epoch {tasks.epoch}" in tasks.row(ids["a"])["last_error"]


def calls(tasks: Tasks, epoch: Epoch) -> dict[str, Callable[[], object]]:
    """Return a call of every verb that writes for an epoch."""
    verbs, a = tasks.store.tasks, tasks.a
    token = str(tasks.row()["token"])
    return {
        "save_file": lambda: verbs.save_file(epoch, "etl.py", []),
        "save_import_error": lambda: verbs.save_import_error(epoch, "etl.py", "error"),
        "retry_due": lambda: verbs.retry_due(epoch),
        "dispatch": lambda: verbs.dispatch(epoch, limit=1, queues=QUEUES),
        "time_out": lambda: verbs.time_out(epoch),
        "begin_due_batches": lambda: verbs.begin_due_batches(epoch),
        "reopen_streams": lambda: verbs.reopen_streams(epoch),
        "store_ends": lambda: verbs.store_ends(epoch, [StepEnd(a, token, WorkerLost("error"))]),
        "emit": lambda: verbs.emit(epoch, a, token, Emitted(0, (b"1",))),
        "send_signals": lambda: verbs.send_signals(epoch, a, token, []),
        "adopt": lambda: verbs.adopt(epoch),
    }


def test_a_fenced_epoch_moves_no_task_by_any_verb(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    tasks.run_it()
    store.fence_triggerers(tasks.register(), dead=[tasks.epoch])
    before = {table: query(f"SELECT * FROM {table}") for table in ("task_instance", "dag", "dag_run", "xcom")}
    takes_epoch = set()
    for name, verb in inspect.getmembers(TaskVerbs, inspect.isfunction):
        parameters = inspect.signature(verb).parameters
        is_leased = "tx" in parameters and parameters["tx"].annotation == "LeasedTx"
        if not name.startswith("_") and (is_leased or "epoch" in parameters):
            takes_epoch.add(name)
    assert calls(tasks, tasks.epoch).keys() == takes_epoch - {"owned", "owned_running", "left"}  # which read
    for call in calls(tasks, tasks.epoch).values():
        with pytest.raises(LeaseLost):
            call()
    assert {table: query(f"SELECT * FROM {table}") for table in before} == before
