"""Deliberate bugs of the part for tasks: each breaks one promise, and the simulation has to find it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy import bindparam, func, select, update
from tests.proof.simulation.mutants import Mutant, Patch
from tests.proof.simulation.tasks.directed import DIRECTED
from tests.proof.simulation.tasks.maps import mutants as of_maps
from tests.proof.simulation.tasks.streams import mutants as of_streams

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import TriggerSpec
from headgate.runner import host, trigger_run
from headgate.runner.trigger_run import Ending, TriggerRun
from headgate.scheduling import states, trigger_rules
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import leased
from headgate.store.ids import Epoch
from headgate.store.scheduling import planning
from headgate.store.scheduling.planning import Planned, PlanningVerbs
from headgate.store.tables import task_instance, trigger_event
from headgate.store.tasks import dags, deferral, dispatch, outcomes, task_rows, task_streams, user_actions, values
from headgate.store.tasks.deferral import DeferralVerbs
from headgate.store.tasks.dispatch import Candidate
from headgate.store.tasks.outcomes import NotBegun, OutcomeVerbs, StepEnd, WorkerLost
from headgate.store.tasks.task_rows import LockedTask
from headgate.supervisor.tasks import steps
from headgate.supervisor.tasks.core import TaskCore
from headgate.supervisor.tasks.reports import Reports
from headgate.supervisor.triggers.assignments import Assignments
from headgate.supervisor.triggers.releases import Releases
from headgate.triggers.base import BaseTrigger

S = TaskState


# --- late answers ----------------------------------------------------------------------------------


def _guard_by_token_dropped() -> Sequence[Patch]:
    changed, locked = task_rows.changed_each, task_rows.locked

    def changed_of_any(tx: Tx, row: Any, by: Sequence[dict[str, Any]], values: Sequence[dict[str, Any]]) -> list[bool]:
        return changed(tx, row, [{"id": of_one["id"]} for of_one in by], values)

    def locked_of_any(tx: Tx, instance: Any, *, token: Any = None, state: Any = None) -> Any:
        return locked(tx, instance, state=state)

    return [(task_rows, "changed_each", changed_of_any), (task_rows, "locked", locked_of_any)]


def _one_token_a_task() -> Sequence[Patch]:
    def give(verbs: Any, tx: LeasedTx, chosen: Sequence[Any]) -> Any:
        new_token, names = task_rows.new_token, iter(chosen)
        task_rows.new_token = lambda: f"token-of-{next(names)}"
        try:
            return original(verbs, tx, chosen)
        finally:
            task_rows.new_token = new_token

    original = dispatch.DispatchVerbs._give
    return [(dispatch.DispatchVerbs, "_give", give)]


def _guard_by_old_state_dropped() -> Sequence[Patch]:
    original = task_rows.changed_each

    def changed_from_any(
        tx: Tx, row: Any, by: Sequence[dict[str, Any]], values: Sequence[dict[str, Any]]
    ) -> list[bool]:
        if by and "token" in by[0]:
            row = msgspec.structs.replace(row, from_=frozenset(TaskState))
        return original(tx, row, by, values)

    return [(task_rows, "changed_each", changed_from_any)]


# --- deferral --------------------------------------------------------------------------------------


def _resumed_without_clearing_the_trigger() -> Sequence[Patch]:
    effects = task_rows.effects

    def keeping(row: Any) -> dict[str, Any]:
        return {name: value for name, value in effects(row).items() if name != "trigger_id"}

    def resume(tx: Tx, events: Sequence[Any], waited_for: Any) -> frozenset[int]:
        statement = update(task_instance).where(
            deferral._C.trigger_id == bindparam("of_trigger"), task_rows.is_in(S.DEFERRED)
        )
        first = {event.trigger_id: event for event in reversed(events) if event.trigger_id in waited_for}
        for trigger_id in sorted(first):
            values = keeping(deferral._EVENT)
            tx.connection.execute(statement.values(values), {"of_trigger": trigger_id, "now": tx.now})
        return frozenset()

    return [(deferral, "take_events", resume)]


def _trigger_not_finished_by_its_event() -> Sequence[Patch]:
    original = task_rows.finish_trigger

    def leave_open(tx: Tx, trigger_id: int) -> bool:
        # That of a stream would be started for ever.
        return task_streams.read_by_trigger(tx, trigger_id) is not None and original(tx, trigger_id)

    return [(task_rows, "finish_trigger", leave_open)]


def _trigger_not_removed_on_clear() -> Sequence[Patch]:
    def leave_open(tx: Tx, task: LockedTask) -> None:
        pass

    return [(user_actions, "_end_trigger", leave_open)]


def _a_failed_trigger_resumes_nobody() -> Sequence[Patch]:
    def take_none(*_arguments: Any) -> frozenset[int]:
        return frozenset()

    return [(deferral, "take_ends", take_none)]


def _timeouts_by_another_clock() -> Sequence[Patch]:
    original = DeferralVerbs.time_out.__wrapped__  # type: ignore[attr-defined]

    @leased
    def time_out(self: DeferralVerbs, tx: LeasedTx, /, **limits: Any) -> Any:
        tx._now = tx.now - timedelta(seconds=2)
        return original(self, tx, **limits)

    return [(DeferralVerbs, "time_out", time_out)]


def _any_event_resumes() -> Sequence[Patch]:
    resume = Prepared(
        update(task_instance)
        .where(deferral._C.trigger_id == bindparam("of_trigger"), task_rows.is_in(S.DEFERRED))
        .values(
            task_rows.effects(deferral._EVENT)
            | {
                "event_id": select(func.max(trigger_event.c.id))
                .where(trigger_event.c.trigger_id == bindparam("of_trigger"))
                .scalar_subquery()
            }
        )
    )
    return [(deferral, "_RESUME", resume), *_a_trigger_goes_on_after_its_first_event()]


def _a_trigger_goes_on_after_its_first_event() -> Sequence[Patch]:
    def begin(self: TriggerRun, spec: TriggerSpec, trigger: BaseTrigger) -> None:
        original(self, msgspec.structs.replace(spec, takes_one_event=False), trigger)

    original = TriggerRun.__init__
    return [(TriggerRun, "__init__", begin)]


def _a_fired_trigger_is_started_again() -> Sequence[Patch]:
    def expect_nothing(self: Assignments, trigger_id: int) -> None:
        pass

    def restart(run: TriggerRun, error: Any) -> Ending:
        closed = RuntimeError("closed") if run.is_fulfilled else None
        run.is_fulfilled = False
        return original(run, error or closed)

    def is_over(self: Releases, trigger_id: int, over: Any) -> bool:
        return False

    original = trigger_run.judge
    return [
        (Releases, "is_over", is_over),
        (Assignments, "expect_end", expect_nothing),
        (host, "judge", restart),
    ]


# --- bundles ---------------------------------------------------------------------------------------


def _ends_are(change: Callable[[steps.End], Any]) -> Sequence[Patch]:
    original = Reports._oldest_ends

    def oldest(self: Reports) -> list[steps.End]:
        return [end._replace(outcome=change(end)) for end in original(self)]

    return [(Reports, "_oldest_ends", oldest)]


def _the_rest_of_a_bundle_loses_its_try() -> Sequence[Patch]:
    lost = WorkerLost("the worker is gone")
    return _ends_are(lambda end: lost if end.outcome == NotBegun() else end.outcome)


def _the_lost_step_is_returned() -> Sequence[Patch]:
    return _ends_are(lambda end: NotBegun() if isinstance(end.outcome, WorkerLost) else end.outcome)


def _a_dead_supervisors_bundles_are_returned() -> Sequence[Patch]:
    original = task_rows.fail

    def fail(tx: Tx, task: LockedTask, event: str, *others: Any) -> TaskState:
        return task_rows.apply(tx, task, "returned") if event == "adopted" else original(tx, task, event, *others)

    return [(task_rows, "fail", fail)]


def _a_returned_step_is_another_try() -> Sequence[Patch]:
    def return_all(tx: LeasedTx, ends: Sequence[tuple[StepEnd, dict[str, Any]]]) -> dict[str, TaskState | None]:
        found: dict[str, TaskState | None] = {}
        for end, columns in ends:
            task = task_rows.locked(tx, end.id, token=end.token, state=S.RUNNING)
            if task is not None:
                found[end.token] = task_rows.apply(tx, task, "returned", try_number=task.try_number + 1, **columns)
        return found

    return [(outcomes, "_return", return_all)]


# --- workers and supervisors that are gone ---------------------------------------------------------


def _lost_workers_are_ignored() -> Sequence[Patch]:
    def ignore(*_arguments: Any) -> None:
        return None

    return [(outcomes, "_lose_worker", ignore)]


def _nobody_adopts() -> Sequence[Patch]:
    def adopt_none(*_arguments: Any) -> list[Any]:
        return []

    return [(OutcomeVerbs, "adopt", adopt_none)]


def _dispatch_in_doubt_is_forgotten() -> Sequence[Patch]:
    original = TaskCore._check_running

    def look(self: TaskCore, epoch: Epoch, now: float) -> None:
        self._dispatch_in_doubt = False
        original(self, epoch, now)

    return [(TaskCore, "_check_running", look)]


def _outcome_dropped_when_the_database_is_away() -> Sequence[Patch]:
    original = Reports._store_next

    def store_next(self: Reports, epoch: Epoch, now: float) -> None:
        before = list(self._inbox)
        try:
            original(self, epoch, now)
        except Exception:
            self._inbox.clear()
            self._inbox.extend(before[1:])
            raise

    return [(Reports, "_store_next", store_next)]


def _steps_begin_without_time_left() -> Sequence[Patch]:
    original = steps.time_of
    return [(steps, "time_of", lambda task: max(original(task), 0.1))]


def _execution_timeout_is_ignored() -> Sequence[Patch]:
    def end_none(self: TaskCore, now: float) -> None:
        for run in self._running.values():
            run.ends_at = math.inf

    return [(TaskCore, "_end_late_steps", end_none)]


# --- values ----------------------------------------------------------------------------------------


def _outcome_stored_without_xcoms() -> Sequence[Patch]:
    def leave_none(tx: Tx, rows: Sequence[Any]) -> None:
        pass

    return [(values, "store_xcoms", leave_none)]


def _xcoms_kept_over_tries() -> Sequence[Patch]:
    def keep(tx: Tx, instance: Any) -> None:
        pass

    return [(values, "delete_xcoms", keep)]


# --- scheduling ------------------------------------------------------------------------------------


def _dispatch_forgets_pools() -> Sequence[Patch]:
    original = dispatch.fit

    def fit(candidates: Sequence[Candidate], slots: dict[str, int], free: dict[str, int], *others: Any) -> Any:
        return original(candidates, slots, dict.fromkeys(free, 1000), *others)

    return [(dispatch, "fit", fit)]


def _ended_by_a_trigger_marks_no_run() -> Sequence[Patch]:
    end_task = deferral._end_task

    def end_unnoticed(tx: Tx, event: Any) -> bool:
        before = set(tx._dirty_runs)
        is_over = end_task(tx, event)
        tx._dirty_runs &= before
        return is_over

    return [(deferral, "_end_task", end_unnoticed)]


def _mark_cleared_before_the_read() -> Sequence[Patch]:
    """The mark comes off first, in a transaction of its own, and the look is the next one: if there is a next one."""
    original = PlanningVerbs.plan
    taken: dict[int, list[int]] = {}

    def plan(self: PlanningVerbs, epoch: Any, **limits: Any) -> Planned:
        runs = taken.pop(id(self), None)
        with self.database.leased(epoch) as tx:
            marked: list[int] = []
            if runs is None:
                marked = [run for (run,) in tx.connection.exec_driver_sql("SELECT id FROM dag_run WHERE needs_look")]
                tx.connection.exec_driver_sql("UPDATE dag_run SET needs_look = false")
            for run in runs or ():
                tx.connection.exec_driver_sql("UPDATE dag_run SET needs_look = true WHERE id = ?", (run,))
        if runs is not None:
            return original(self, epoch, **limits)
        if marked:
            taken[id(self)] = marked
        return Planned(evaluated=len(marked))

    return [(PlanningVerbs, "plan", plan)]


def _runs_end_over_what_waits() -> Sequence[Patch]:
    return [(states, "UNFINISHED", states.UNFINISHED - {S.DEFERRED})]


def _branch_skips_nothing() -> Sequence[Patch]:
    def leave(*_arguments: Any) -> None:
        pass

    return [(outcomes, "_skip", leave)]


def _clear_does_not_reopen_the_run() -> Sequence[Patch]:
    def leave(tx: Tx, run: Any) -> None:
        pass

    return [(dags, "reopen", leave)]


def _skipped_counts_as_success() -> Sequence[Patch]:
    original = trigger_rules.ready

    def ready(rule: Any, upstream_states: Iterable[TaskState]) -> Any:
        return original(rule, [S.SUCCESS if state is S.SKIPPED else state for state in upstream_states])

    return [(trigger_rules, "ready", ready)]


def _decided_too_early() -> Sequence[Patch]:
    original = trigger_rules.ready

    def ready(rule: Any, upstream_states: Iterable[TaskState]) -> Any:
        return original(rule, [state for state in upstream_states if state in states.TERMINAL])

    return [(trigger_rules, "ready", ready)]


def _paused_dags_begin() -> Sequence[Patch]:
    original = planning._Evaluation.evaluate

    def evaluate(self: Any, run: Any) -> bool:
        return original(self, run._replace(is_paused=False, removed_at=None))

    return [(planning._Evaluation, "evaluate", evaluate)]


def _tries_without_end() -> Sequence[Patch]:
    return [(LockedTask, "has_tries_left", property(lambda self: self.try_number <= self.tries_max))]


MUTANTS: dict[str, Mutant] = {
    "guard-by-token-dropped": Mutant(
        "a late answer changes nothing", "a late answer counted", _guard_by_token_dropped, directed="outcome in doubt"
    ),
    "one-token-a-task": Mutant("each dispatch has a token of its own", "a step of nobody's", _one_token_a_task, 300),
    "guard-by-old-state-dropped": Mutant(
        "what a user has ended stays ended", "no such transition", _guard_by_old_state_dropped, directed="clear"
    ),
    "resumed-without-clearing-the-trigger": Mutant(
        "I8: resumed is no longer waiting", "an event was dead-lettered", _resumed_without_clearing_the_trigger, 20
    ),
    "trigger-not-finished-by-its-event": Mutant(
        "the trigger's row goes with its task", "a trigger left open", _trigger_not_finished_by_its_event, 20
    ),
    "trigger-not-removed-on-clear": Mutant(
        "a clear ends the trigger", "a trigger left open", _trigger_not_removed_on_clear, 200
    ),
    "a-failed-trigger-resumes-nobody": Mutant(
        "I8: nothing waits for ever", "never resumed", _a_failed_trigger_resumes_nobody, 50
    ),
    "timeouts-by-another-clock": Mutant("timeouts by the database's clock", "late", _timeouts_by_another_clock, 50),
    "any-event-resumes": Mutant(
        "resumed by the first event", "resumed by another's event", _any_event_resumes, directed="events"
    ),
    "a-trigger-goes-on-after-its-first-event": Mutant(
        "I8: a deferral takes one event",
        "fired after its first event",
        _a_trigger_goes_on_after_its_first_event,
        directed="events",
    ),
    "a-fired-trigger-is-started-again": Mutant(
        "I8: a trigger is over with its event", "ran again after its event", _a_fired_trigger_is_started_again, 100
    ),
    "steps-begin-without-time-left": Mutant(
        "no step begins after the end of its try",
        "began after the end of its try",
        _steps_begin_without_time_left,
        directed="no time left",
    ),
    "lost-workers-are-ignored": Mutant("a worker's death fails its try", "stuck", _lost_workers_are_ignored, 20),
    "the-rest-of-a-bundle-loses-its-try": Mutant(
        "what a worker has not begun costs no try",
        "a try lost by waiting",
        _the_rest_of_a_bundle_loses_its_try,
        directed="bundle",
    ),
    "the-lost-step-is-returned": Mutant(
        "a try begins once", "a step that had begun was returned", _the_lost_step_is_returned, 20
    ),
    "a-dead-supervisors-bundles-are-returned": Mutant(
        "a try begins once", "no such transition", _a_dead_supervisors_bundles_are_returned, 100
    ),
    "a-returned-step-is-another-try": Mutant(
        "what a worker has not begun costs no try",
        "a try lost by waiting",
        _a_returned_step_is_another_try,
        directed="bundle",
    ),
    "nobody-adopts": Mutant("a supervisor's death fails its tries", "stuck", _nobody_adopts, 100),
    "dispatch-in-doubt-is-forgotten": Mutant(
        "a lost answer of a dispatch loses no task",
        "stuck",
        _dispatch_in_doubt_is_forgotten,
        directed="dispatch in doubt",
    ),
    "outcome-dropped-when-the-database-is-away": Mutant(
        "an outcome waits for the database", "stuck", _outcome_dropped_when_the_database_is_away, directed="outcome"
    ),
    "execution-timeout-is-ignored": Mutant(
        "an execution_timeout ends its step", "late", _execution_timeout_is_ignored, directed="deadline"
    ),
    "branch-skips-nothing": Mutant(
        "a branch skips what it names", "not what the step came to", _branch_skips_nothing, 50
    ),
    "outcome-stored-without-xcoms": Mutant(
        "an outcome and its XComs are one", "lost XComs", _outcome_stored_without_xcoms, 20
    ),
    "xcoms-kept-over-tries": Mutant(
        "a new try forgets the last one's XComs", "lost XComs", _xcoms_kept_over_tries, 100
    ),
    "dispatch-forgets-pools": Mutant("no pool is overcommitted", "pool overcommitted", _dispatch_forgets_pools, 50),
    "ended-by-a-trigger-marks-no-run": Mutant(
        "an end is noticed by the run", "stuck", _ended_by_a_trigger_marks_no_run, 100
    ),
    "mark-cleared-before-the-read": Mutant(
        "no end is overlooked", "stuck", _mark_cleared_before_the_read, directed="look"
    ),
    "runs-end-over-what-waits": Mutant(
        "no run ends over an unfinished task", "a run ended over an unfinished task", _runs_end_over_what_waits, 50
    ),
    "clear-does-not-reopen-the-run": Mutant("a clear has the run go on", "stuck", _clear_does_not_reopen_the_run, 200),
    "skipped-counts-as-success": Mutant("trigger rules", "wrong by its rule", _skipped_counts_as_success, 100),
    "decided-too-early": Mutant(
        "a rule waits until no end could change it", "wrong by its rule", _decided_too_early, 20
    ),
    "paused-dags-begin": Mutant(
        "nothing begins in a paused DAG", "began while paused", _paused_dags_begin, directed="pause"
    ),
    "tries-without-end": Mutant("no more tries than allowed", "not what the step came to", _tries_without_end, 50),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())
MUTANTS |= of_streams.MUTANTS | of_maps.MUTANTS
