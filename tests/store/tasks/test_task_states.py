"""Every row of the table of states, through the real store on both databases; and nothing that is not in it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.supervisor.tasks_harness import WAIT, Tasks, event_of

from headgate.protocol.messages.dags import StartTrigger, TaskSpec, TaskState
from headgate.protocol.messages.runner import FinishedTrigger
from headgate.scheduling.states import FAIL_METHOD, TRANSITIONS, Transition
from headgate.store.store import Store
from headgate.store.tasks import deferral, task_rows, user_actions

S = TaskState

# Streams: `test_task_streams`; maps: `tests.store.scheduling.test_expansion`; endless tasks: `tests.store.signals`.
ELSEWHERE = ("stream_", "expanded", "unexpandable", "map_", "moved")
ROWS = [(row, state) for row in TRANSITIONS for state in sorted(row.from_) if not row.event.startswith(ELSEWHERE)]
FRESH_ONLY = {"scheduled", "upstream_failed", "upstream_skipped", "started_in_trigger"}  # never after a deferral
TO_RETRY = {"failed_to_retry", "ended_to_retry", "worker_lost_to_retry", "adopted_to_retry"}
DAY_S = 86_400.0


def slice_of(tasks: Tasks, trigger_id: int, kind: Any) -> None:
    tasks.store.store_slice(tasks.epoch, events=[event_of(trigger_id, kind=kind, index=7)])


def trigger_fails(tasks: Tasks, trigger_id: int) -> None:
    finished = FinishedTrigger(trigger_id, f"run-{trigger_id}", "failed", 0, error="boom", traceback="Traceback")
    tasks.store.store_slice(tasks.epoch, finished=[finished])


def adopt(tasks: Tasks) -> None:
    other = tasks.register()
    assert tasks.store.tasks.adopt(other) == [], "its owner is alive"
    tasks.store.fence_triggerers(other, dead=[tasks.epoch])
    tasks.store.tasks.adopt(other)


class Below(Tasks):
    """A run of two tasks, of which the first is below the second."""

    def __init__(self, store: Store, query: Query, **changes: Any) -> None:
        super().__init__(store, query, tasks=(TaskSpec("a", "Op", upstream=("up",), **changes), TaskSpec("up", "Op")))
        self.upstream("success")

    def upstream(self, state: str) -> None:
        """Have the second task be in a state, as of now."""
        self.query(f"UPDATE task_instance SET state = '{state}' WHERE task_id = 'up'")

    def decide(self, event: str) -> None:
        """Have the scheduler evaluate the run, where the second task has come to the state that causes ``event``."""
        self.upstream({"scheduled": "success", "upstream_failed": "failed", "upstream_skipped": "skipped"}[event])
        self.query("UPDATE dag_run SET needs_look = true, state = 'running', ended_at = NULL")
        self.plan()

    def bring_to(self, state: TaskState) -> str | None:
        if state is S.UPSTREAM_FAILED:
            self.upstream("none")
        return super().bring_to(state)


def start_in_trigger(tasks: Tasks) -> None:
    with tasks.store.database.writing() as tx:
        deferral.start_in_trigger(tx, tasks.a, StartTrigger(WAIT.classpath, WAIT.kwargs, "resume", WAIT.next_kwargs))


def happens(event: str, tasks: Below, clock: Clock, token: str, trigger_id: int) -> None:
    """Have ``event`` happen to the first task, whatever its state is, by whoever would cause it."""
    verbs, epoch, a = tasks.store.tasks, tasks.epoch, tasks.a
    match event:
        case "scheduled" | "upstream_failed" | "upstream_skipped":
            tasks.decide(event)
        case "picked_up":
            verbs.dispatch(epoch, limit=10, queues=QUEUES)
        case "started_in_trigger":
            start_in_trigger(tasks)
        case "deferred":
            ends.defer(verbs, epoch, a, token, WAIT)
        case "succeeded" | "skipped":
            ends.succeed(verbs, epoch, a, token, end=event)
        case "failed" | "failed_to_retry":
            ends.fail(verbs, epoch, a, token, "error", may_retry=event != "failed")
        case "retry_due" | "timed_out":
            clock.advance(DAY_S)
            verbs.retry_due(epoch) if event == "retry_due" else verbs.time_out(epoch)
        case "event":
            slice_of(tasks, trigger_id, "event")
        case "ended_success" | "ended_skipped" | "ended_failed" | "ended_to_retry":
            slice_of(tasks, trigger_id, "failed" if event == "ended_to_retry" else event.removeprefix("ended_"))
        case "trigger_failed":
            trigger_fails(tasks, trigger_id)
        case "worker_lost" | "worker_lost_to_retry" | "restarted":
            ends.lose_worker(verbs, epoch, a, token, "killed by SIGKILL")
        case "returned":
            ends.give_back(verbs, epoch, a, token)
        case "adopted" | "adopted_to_retry":
            adopt(tasks)
        case "cleared":
            tasks.clear_it()
        case "marked_success" | "marked_failed":
            verbs.mark(a, event.removeprefix("marked_"))  # type: ignore[arg-type]
        case "overruled":
            verbs.mark(a, "success")
        case "marked_skipped":
            with tasks.store.database.leased(epoch) as tx:
                task = task_rows.locked(tx, a)
                assert task is not None
                user_actions.mark_one(tx, task, "skipped", None)
        case "removed":
            tasks.remove_it()
        case _:
            raise AssertionError(f"the test knows no {event}")


def resume(tasks: Tasks, clock: Clock) -> int:
    """Bring the first task to ``scheduled`` by an event; return the id of its trigger."""
    _, trigger_id = tasks.defer_it()
    slice_of(tasks, trigger_id, "event")
    assert tasks.state() is S.SCHEDULED
    return trigger_id


@pytest.mark.parametrize(("row", "source"), ROWS, ids=[f"{row.event}-{source.value}" for row, source in ROWS])
def test_a_row_of_the_table_is_what_the_store_does(
    open_store: OpenStore, query: Query, row: Transition, source: TaskState
) -> None:
    clock = Clock()
    retries = int(row.event in TO_RETRY or source is S.UP_FOR_RETRY)
    tasks = Below(open_store(clock=clock), query, retries=retries, retry_delay_s=60.0, execution_timeout_s=DAY_S)
    if row.event not in FRESH_ONLY and source not in (S.NONE, S.UPSTREAM_FAILED):
        resume(tasks, clock)
    token = tasks.bring_to(source)
    before = tasks.row()
    happens(row.event, tasks, clock, token or "", before["trigger_id"] or 0)
    after = tasks.row()

    assert after["state"] == row.to.value
    expected = {"set": after["trigger_id"] is not None, "clear": after["trigger_id"] is None}
    assert expected.get(row.trigger_id, after["trigger_id"] == before["trigger_id"])
    methods = {"set": WAIT.next_method, "clear": None, FAIL_METHOD: FAIL_METHOD, "-": before["next_method"]}
    assert after["next_method"] == methods[row.next_method]
    assert (after["ended_at"] is not None) == (row.to in (S.SUCCESS, S.FAILED, S.SKIPPED, S.UPSTREAM_FAILED, S.REMOVED))
    if before["trigger_id"] is not None:
        trigger = tasks.trigger(before["trigger_id"])
        is_by_user = row.by == "user"
        assert (trigger["removed_at"] is not None, trigger["finished_at"] is not None) == (is_by_user, not is_by_user)
    if row.event in ("picked_up", "started_in_trigger", "deferred"):
        assert after["token"] not in (None, before["token"])


def test_the_rows_are_tested_with_a_task_that_has_something_to_clear() -> None:
    clearing = [(row.event, source) for row, source in ROWS if row.next_method == "clear"]
    fresh = [pair for pair in clearing if pair[1] in (S.NONE, S.UPSTREAM_FAILED)]
    assert len(fresh) < len(clearing) / 3


@pytest.mark.parametrize("state", list(TaskState), ids=lambda state: state.value)
def test_what_is_not_in_the_table_does_not_happen(open_store: OpenStore, query: Query, state: TaskState) -> None:
    clock = Clock()
    tasks = Below(open_store(clock=clock), query, retries=1, retry_delay_s=60.0)
    old_trigger = tasks.store.add_watcher("w", "a.B", {})
    if state not in (S.NONE, S.UPSTREAM_FAILED):
        old_trigger = resume(tasks, clock)
    token = tasks.bring_to(state) or "none"
    before = tasks.row()
    possible = {row.event for row in TRANSITIONS if state in row.from_}
    # The same verb: what it does then depends on the tries left, or on the state, and that is tested above.
    for alike in (
        *({"failed", "failed_to_retry"}, {"ended_failed", "ended_to_retry"}, {"adopted", "adopted_to_retry"}),
        *({"worker_lost", "worker_lost_to_retry", "restarted"}, {"marked_success", "overruled"}),
    ):
        possible |= alike if possible & alike else set()
    if state is S.RESTARTING:  # the worker is done with it, whatever its outcome is: it is restarted
        possible |= {"deferred", "succeeded", "skipped", "failed", "failed_to_retry", "returned"}
    events = sorted({row.event for row, _ in ROWS} - possible)
    # Last of all: it ends the lease with which the others act, and a removal changes the DAG.
    events.sort(key=lambda event: (event.startswith("adopted"), event == "removed"))
    for event in events:
        happens(event, tasks, clock, token, old_trigger)
        assert tasks.row() == before, event
