"""The scheduler: it runs the duties that are due, each in one short transaction of the store, at most one in a step.

It is driven by events. Code that ends a task, stores an event, or learns that other processes have written to the
database calls `notify`. One statement finds out which duties are due by the clock: it is run after a notification and
rarely otherwise, and an idle scheduler runs no other. Several schedulers on one PostgreSQL share the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import structlog

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.planning import RunEnd
from headgate.store.errors import BLAMELESS, DATABASE_UNUSABLE, ItemFailed
from headgate.store.ids import DagRunId, Epoch, TaskInstanceId
from headgate.store.scheduling.new_runs import NewRuns
from headgate.store.scheduling.planning import FROM_FIRST
from headgate.store.store import Store
from headgate.store.tasks.outcomes import HEALTHY_S, Adopted
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.tasks.faults import Faults

log = structlog.get_logger(__name__)

ASK_INTERVAL_S = 5.0  # between two queries for due duties without a notification, because one may get lost
ASK_AGAIN_S = 0.1  # the same while there is one notification after the other
LATE_S = 0.1  # a duty that has been due for so long goes before those that are more urgent
PASSED_OVER_WAIT_S = 0.02  # before rows locked by another process are tried again: its transaction takes milliseconds


class SchedulerStep(msgspec.Struct, frozen=True):
    """Result of one step.

    ``may_dispatch``: tasks became ``scheduled``. ``in_triggers``: the number of tasks that started in their trigger,
    which can be claimed now. ``removed``: the number of tasks that ended together with the triggers they waited for.
    ``ended`` are runs by their ids, ``made`` are new runs as (dag_id, run_id). ``adopted`` are tasks of supervisors
    that have died; ``timed_out`` are tasks whose deferral took too long. ``instances`` of mapped tasks were made.
    ``may_have_taken``: workers or triggers of tasks may have to be ended. ``has_questions``: users' code may have to
    decide about signals.
    """

    may_dispatch: bool = False
    instances: int = 0
    in_triggers: int = 0
    removed: int = 0
    may_have_taken: bool = False
    ended: dict[DagRunId, RunEnd] = {}
    made: list[tuple[str, str]] = []
    adopted: list[Adopted] = []
    timed_out: list[TaskInstanceId] = []
    has_questions: bool = False

    @property
    def changes_triggers(self) -> bool:
        """Whether triggers may have been created, or have ended."""
        return bool(self.in_triggers or self.timed_out or self.removed or self.may_have_taken)


NOTHING_DONE = SchedulerStep()


def note_scheduled(figures: Figures, done: SchedulerStep) -> None:
    """Count what a step has done."""
    for ended in done.ended.values():
        figures.add(catalogue.RUNS_ENDED, ended)
    figures.add(catalogue.RUNS_MADE, by=len(done.made))
    figures.add(catalogue.TASKS_ADOPTED, by=len(done.adopted))


class Duty:
    """One kind of work of the scheduler; ``due_at`` is infinity if there is none to do.

    ``seen_due_at`` is the time at which it was first found due and not run. It has failed, and is not run before
    ``failed_until``, whatever happens.
    """

    def __init__(self, name: str, run: Callable[[Epoch, float], SchedulerStep]) -> None:
        self.name = name
        self.run = run
        self.due_at = math.inf
        self.seen_due_at = math.inf
        self.failed_until = 0.0

    @property
    def wake_at(self) -> float:
        """The time at which it is to be run."""
        return max(self.due_at, self.failed_until)

    def require(self, at: float) -> None:
        """Make it due at this time, unless it is due earlier already."""
        self.due_at = min(self.due_at, at)


class Scheduler:
    """One supervisor's scheduler. Times are those of the caller's monotonic clock."""

    def __init__(self, store: Store, *, retry: DatabaseRetry, healthy_s: float = HEALTHY_S) -> None:
        self._store = store
        self._healthy_s = healthy_s
        self._retry = retry
        self._faults = Faults(store.scheduling)
        self._evaluation = Duty("evaluate runs", self._evaluate_runs)
        self._retries = Duty("retry tasks", self._retry_tasks)
        self._timeouts = Duty("end deferrals that are too late", self._time_out)
        self._batches = Duty("begin batches", self._begin_due_batches)
        self._reopening = Duty("open triggers of streams again", self._reopen_streams)
        self._signals = Duty("consider signals", self._consider_signals)
        self._questions = Duty("have users' code asked", self._report_questions)
        self._ticks = Duty("meet rules by the time", self._tick)
        self._dates = Duty("create runs by dates", self._create_runs_by_date)
        self._event_runs = Duty("create runs for events", self._create_runs_by_event)
        self._adoption = Duty("adopt tasks", self._adopt)
        self._query = Duty("ask what is due", self._ask)
        self._duties = (  # in order of urgency
            self._signals,
            self._questions,
            self._evaluation,
            self._retries,
            self._timeouts,
            self._batches,
            self._reopening,
            self._ticks,
            self._dates,
            self._event_runs,
            self._adoption,
            self._query,
        )
        self._query.due_at = 0.0
        self._asked_at = -math.inf
        self._planned_to = FROM_FIRST  # the run behind which the next evaluation begins
        self._was_in_vain = False  # duties were due, but running them changed nothing
        self._is_in_doubt = False  # nobody knows whether the last one was committed
        self.deadline_at = math.inf  # the first execution timeout among the epoch's own running tasks

    def notify(self) -> None:
        """Make a query due soon: an event was stored, or other processes have written."""
        self.notify_ended()
        self._event_runs.due_at = 0.0

    def notify_ended(self) -> None:
        """Have runs evaluated: steps of tasks have ended. Events that wait for runs are looked at when a run has ended.

        There may be thousands of them, of DAGs that are paused or have all their runs.
        """
        self._evaluation.due_at = 0.0
        self._query.require(self._asked_at + ASK_AGAIN_S)

    def notify_signals(self) -> None:
        """Make those due that wait for signals: some may have been sent, or a task may wait for one now."""
        self._signals.due_at = 0.0

    def notify_decided(self) -> None:
        """Have what was decided about signals act, and look for more of them."""
        self._signals.due_at = self._evaluation.due_at = 0.0
        self._query.require(self._asked_at + ASK_AGAIN_S)  # a decision that has failed is made again

    def notify_fenced(self) -> None:
        """Make adoption due: other supervisors were fenced, so their tasks can be adopted."""
        self._adoption.due_at = 0.0

    def wake_at(self) -> float:
        """Return the time at which `step` must be called even if nothing happens."""
        return max(self._retry.at, min([duty.wake_at for duty in self._duties]))

    def troubles(self) -> list[tuple[str, str]]:
        """Return what waits because it has failed as nobody foresaw, and why."""
        return self._faults.told()

    def step(self, epoch: Epoch, now: float) -> SchedulerStep:
        """Run the most urgent due duty, if any. Raises `LeaseLost` if another supervisor has fenced ``epoch``.

        An error that nobody foresaw, of ours, costs what it is about, or else the duty, a while; all else goes on.
        """
        if now < self.wake_at():
            return NOTHING_DONE
        self._faults.step(now)
        duty = self._next_duty(now)
        duty.due_at = duty.seen_due_at = math.inf
        try:
            result = duty.run(epoch, now)
        except DATABASE_UNUSABLE as exc:
            # It may have been committed or not. In either case the next try, and the query behind it, find all that is
            # due in the database; and what its result would have said is said with the next one.
            duty.due_at = self._retry.failed(exc, now)
            self._query.require(duty.due_at)
            self._is_in_doubt = True
            return NOTHING_DONE
        except BLAMELESS:
            raise
        except Exception as exc:
            self._retry.succeeded(now)
            if isinstance(exc, ItemFailed) and self._faults.pass_over(exc, now):
                duty.due_at = now
            else:
                duty.due_at = duty.failed_until = self._faults.duty_failed(duty.name, exc, now)
            return NOTHING_DONE
        self._retry.succeeded(now)
        if duty.failed_until:
            duty.failed_until = 0.0
            self._faults.duty_succeeded(duty.name)
        if self._is_in_doubt:
            self._is_in_doubt = False
            instances = max(result.instances, 1)
            result = msgspec.structs.replace(result, may_dispatch=True, may_have_taken=True, instances=instances)
        return result

    def _next_duty(self, now: float) -> Duty:
        """Return the most urgent due duty, or the one that has been late for longest.

        A supervisor that stores one outcome after the other has runs to evaluate in each of its steps; retries,
        timeouts and dates, and the query that finds them, must not wait for the end of it.
        """
        due = [duty for duty in self._duties if duty.wake_at <= now]
        for duty in due:
            duty.seen_due_at = min(duty.seen_due_at, now)
        latest = min(due, key=lambda duty: duty.seen_due_at)
        return latest if now - latest.seen_due_at >= LATE_S else due[0]

    # --- duties ----------------------------------------------------------------------------------

    def _evaluate_runs(self, epoch: Epoch, now: float) -> SchedulerStep:
        planned = self._store.scheduling.plan(epoch, after=self._planned_to)
        self._planned_to = planned.next_after
        if planned.instances:
            marks.reach("maps.committed")
        if planned.evaluated or planned.has_more:
            in_vain = planned.left == planned.evaluated and not planned.has_changed
            if in_vain:
                self._evaluation.due_at = now + PASSED_OVER_WAIT_S
            elif planned.left or planned.has_more:
                self._evaluation.due_at = now
        if planned.in_triggers or planned.has_rules:
            self._signals.due_at = now  # some of them may wait for signals
        self._log_unreadable(planned.unreadable)
        if planned.ended:  # their DAGs may have another run now
            self._event_runs.due_at = now
            self._dates.due_at = now
        return SchedulerStep(
            may_dispatch=planned.scheduled > 0,
            in_triggers=planned.in_triggers,
            removed=planned.removed,
            may_have_taken=planned.taken > 0,
            ended=planned.ended,
            instances=planned.instances,
        )

    def _log_unreadable(self, dags: Mapping[str, str]) -> None:
        for dag, problem in dags.items():
            log.error("a DAG cannot be read as it is stored; nothing of it begins here", dag=dag, problem=problem)

    def _retry_tasks(self, epoch: Epoch, now: float) -> SchedulerStep:
        retried = self._store.tasks.retry_due(epoch)
        if retried:
            self._retries.due_at = self._signals.due_at = now
            self._was_in_vain = False
        return SchedulerStep(may_dispatch=bool(retried), in_triggers=len(retried))

    def _time_out(self, epoch: Epoch, now: float) -> SchedulerStep:
        timed_out = self._store.tasks.time_out(epoch)
        if timed_out:
            self._timeouts.due_at = now
            self._was_in_vain = False
        return SchedulerStep(may_dispatch=bool(timed_out), timed_out=timed_out)

    def _begin_due_batches(self, epoch: Epoch, now: float) -> SchedulerStep:
        begun = self._store.tasks.begin_due_batches(epoch)
        if begun:
            self._batches.due_at = self._evaluation.due_at = now
            self._was_in_vain = False
        return SchedulerStep(may_dispatch=bool(begun))

    def _reopen_streams(self, epoch: Epoch, now: float) -> SchedulerStep:
        reopened = self._store.tasks.reopen_streams(epoch)
        if reopened:
            self._reopening.due_at = now
        return SchedulerStep(in_triggers=len(reopened))

    def _consider_signals(self, epoch: Epoch, now: float) -> SchedulerStep:
        considered = self._store.scheduling.consider_signals(epoch)
        if considered.has_more:
            self._signals.due_at = now
        if considered.tasks or considered.rules:
            self._evaluation.due_at = now
        if considered.for_runs:
            self._event_runs.due_at = now
        return SchedulerStep(has_questions=considered.asked > 0)

    def _report_questions(self, epoch: Epoch, now: float) -> SchedulerStep:
        return SchedulerStep(has_questions=True)

    def _tick(self, epoch: Epoch, now: float) -> SchedulerStep:
        if self._store.scheduling.tick(epoch):
            self._ticks.due_at = self._evaluation.due_at = now
            self._was_in_vain = False
        return NOTHING_DONE

    def _create_runs_by_date(self, epoch: Epoch, now: float) -> SchedulerStep:
        return self._made(self._store.scheduling.create_due_runs(epoch), self._dates, now)

    def _create_runs_by_event(self, epoch: Epoch, now: float) -> SchedulerStep:
        return self._made(self._store.scheduling.create_event_runs(epoch), self._event_runs, now)

    def _made(self, new: NewRuns, duty: Duty, now: float) -> SchedulerStep:
        if new.made:
            self._evaluation.due_at = now
            self._was_in_vain = False
        if new.more:
            duty.due_at = now if new.made else now + PASSED_OVER_WAIT_S
        for dag, events in new.dropped.items():
            log.warning(
                "more events or signals wait for a DAG than may; the oldest make no run", dag=dag, events=events
            )
        self._log_unreadable(new.unreadable)
        for dag, problem in new.broken.items():
            log.error("a DAG has no next run", dag=dag, problem=problem)
        return SchedulerStep(made=new.made)

    def _adopt(self, epoch: Epoch, now: float) -> SchedulerStep:
        adopted = self._store.tasks.adopt(epoch, healthy_s=self._healthy_s)
        if adopted:
            self._adoption.due_at = self._evaluation.due_at = now
            log.warning("adopted tasks of supervisors that are gone", tasks=len(adopted))
        return SchedulerStep(may_dispatch=any(task.state is TaskState.SCHEDULED for task in adopted), adopted=adopted)

    def _ask(self, epoch: Epoch, now: float) -> SchedulerStep:
        due = self._store.scheduling.next_due(epoch)
        self._asked_at = now
        others_are_due = any(duty.wake_at <= now for duty in self._duties)
        # It does not know when that becomes due which the others are about to do.
        self._query.due_at = now + (ASK_AGAIN_S if others_are_due else ASK_INTERVAL_S)
        self.deadline_at = math.inf if due.deadline_in_s is None else now + due.deadline_in_s
        for duty, is_due in (
            (self._evaluation, due.has_dirty),
            (self._event_runs, due.has_waiting),
            (self._adoption, due.has_orphans),
            (self._reopening, due.has_reopening),
            (self._signals, due.has_signals),
        ):
            if is_due:
                duty.require(now)
        if due.ask_in_s is not None:
            self._questions.require(now + max(0.0, due.ask_in_s))
        if due.in_s is None:
            self._was_in_vain = False
        elif due.in_s > 0:
            self._was_in_vain = False
            self._query.require(now + due.in_s)
        else:
            for duty in (self._retries, self._timeouts, self._batches, self._ticks, self._dates, self._event_runs):
                duty.due_at = now
            if not self._was_in_vain:
                # Query again right after these duties, but not twice in a row: it may be that only another process can
                # do the work that is due, for example because it has locked the rows.
                self._was_in_vain = True
                self._query.due_at = now
        return NOTHING_DONE
