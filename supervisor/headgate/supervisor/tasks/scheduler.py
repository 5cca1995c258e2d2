"""The scheduler role: it has the store begin what may begin, at most one short transaction a step.

It is driven by what happens. Whoever ends a task, stores an event, or hears that others have written to the database
calls `notice`; what becomes due by the clock, the database is asked for in one statement, after a notice and rarely
otherwise. Where nothing happens, nothing else is asked. Several schedulers on one PostgreSQL share the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import structlog

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.planning import RunEnd
from headgate.store.errors import DATABASE_UNUSABLE, RowsRefused
from headgate.store.ids import DagRunId, Epoch, TaskInstanceId
from headgate.store.scheduling.new_runs import NewRuns
from headgate.store.store import Store
from headgate.store.tasks.outcomes import Adopted
from headgate.supervisor.backoff import DatabaseRetry

log = structlog.get_logger(__name__)

ASK_INTERVAL_S = 5.0  # how often to ask what is due even if nothing seems to have happened: a notice may get lost
ASK_AGAIN_S = 0.1  # the same while there is one notice after the other
PASSED_OVER_WAIT_S = 0.02  # until rows are tried again that another had locked: its transaction takes milliseconds


class SchedulerNews(msgspec.Struct, frozen=True):
    """What one step brought about.

    ``may_dispatch``: tasks became ``scheduled``. ``in_triggers``: so many began in their trigger, which can be claimed
    now; ``removed`` have ended, with the triggers they waited for. ``ended`` are runs by their ids, ``made`` runs as
    (dag_id, run_id). ``adopted`` are tasks of supervisors that are gone; ``timed_out`` those whose deferral took too
    long.
    """

    may_dispatch: bool = False
    in_triggers: int = 0
    removed: int = 0
    ended: dict[DagRunId, RunEnd] = {}
    made: list[tuple[str, str]] = []
    adopted: list[Adopted] = []
    timed_out: list[TaskInstanceId] = []


NO_NEWS = SchedulerNews()


class Scheduler:
    """One supervisor's scheduler. Times are those of the caller's monotonic clock."""

    def __init__(self, store: Store, *, retry: DatabaseRetry) -> None:
        self._store = store
        self._retry = retry
        # When each duty is due, the most urgent first: they are begun in this order.
        duties = ("plan", "retry", "time_out", "dates", "assets", "adopt", "ask")
        self._at: dict[str, float] = dict.fromkeys(duties, math.inf)
        self._at["ask"] = 0.0
        self._asked_at = -math.inf
        self._was_in_vain = False  # something was due, and what was done about it changed nothing
        self._duties: dict[str, Callable[[Epoch, float], SchedulerNews]] = {
            "plan": self._plan,
            "retry": self._retry_tasks,
            "time_out": self._time_out,
            "dates": self._create_due,
            "assets": self._create_of_assets,
            "adopt": self._adopt,
            "ask": self._ask,
        }
        self.deadline_at = math.inf  # when the first of the epoch's own running tasks has used up its time

    def notify(self) -> None:
        """Something has happened: a task has ended, an event was stored, somebody has written to the database."""
        self._at["plan"] = self._at["assets"] = 0.0
        self._at["ask"] = min(self._at["ask"], self._asked_at + ASK_AGAIN_S)

    def notify_fenced(self) -> None:
        """Others were fenced: their tasks can be adopted."""
        self._at["adopt"] = 0.0

    def wake_at(self) -> float:
        """When `step` has something to do even if nothing happens."""
        return max(self._retry.at, min(self._at.values()))

    def step(self, epoch: Epoch, now: float) -> SchedulerNews:
        """Do what is most urgently due, if anything. Raises `LeaseLost` when another has fenced ``epoch``."""
        if now < self.wake_at():
            return NO_NEWS
        duty = next(name for name, at in self._at.items() if at <= now)
        self._at[duty] = math.inf
        try:
            news = self._duties[duty](epoch, now)
        except (*DATABASE_UNUSABLE, RowsRefused) as exc:  # refused rows would be a bug of ours
            # It may have been committed or not; either way, the marks and dates of it are in the database.
            self._at[duty] = self._retry.failed(exc, now)
            return NO_NEWS
        self._retry.succeeded(now)
        return news

    # --- duties ----------------------------------------------------------------------------------

    def _plan(self, epoch: Epoch, now: float) -> SchedulerNews:
        planned = self._store.scheduling.plan(epoch)
        if planned.evaluated:
            in_vain = planned.left == planned.evaluated and not (planned.scheduled or planned.in_triggers)
            if in_vain:
                self._at["plan"] = now + PASSED_OVER_WAIT_S
            elif planned.left or planned.has_more:
                self._at["plan"] = now
        self._tell_unreadable(planned.unreadable)
        if planned.ended:  # their DAGs may have another run now
            self._at["assets"] = now
            self._at["dates"] = now
        return SchedulerNews(
            may_dispatch=planned.scheduled > 0,
            in_triggers=planned.in_triggers,
            removed=planned.removed,
            ended=planned.ended,
        )

    def _tell_unreadable(self, dags: Mapping[str, str]) -> None:
        for dag, problem in dags.items():
            log.error("a DAG cannot be read as it is stored; nothing of it begins here", dag=dag, problem=problem)

    def _retry_tasks(self, epoch: Epoch, now: float) -> SchedulerNews:
        retried = self._store.tasks.retry_due(epoch)
        if retried:
            self._at["retry"] = now
            self._was_in_vain = False
        return SchedulerNews(may_dispatch=bool(retried), in_triggers=len(retried))

    def _time_out(self, epoch: Epoch, now: float) -> SchedulerNews:
        timed_out = self._store.tasks.time_out(epoch)
        if timed_out:
            self._at["time_out"] = now
            self._was_in_vain = False
        return SchedulerNews(may_dispatch=bool(timed_out), timed_out=timed_out)

    def _create_due(self, epoch: Epoch, now: float) -> SchedulerNews:
        return self._made(self._store.scheduling.create_due_runs(epoch), "dates", now)

    def _create_of_assets(self, epoch: Epoch, now: float) -> SchedulerNews:
        return self._made(self._store.scheduling.create_asset_runs(epoch), "assets", now)

    def _made(self, new: NewRuns, duty: str, now: float) -> SchedulerNews:
        if new.made:
            self._at["plan"] = now
            self._was_in_vain = False
        if new.more:
            self._at[duty] = now if new.made else now + PASSED_OVER_WAIT_S
        for dag, events in new.dropped.items():
            log.warning("more asset events wait for a DAG than may; the oldest make no run", dag=dag, events=events)
        self._tell_unreadable(new.unreadable)
        for dag, problem in new.broken.items():
            log.error("a DAG has no next run", dag=dag, problem=problem)
        return SchedulerNews(made=new.made)

    def _adopt(self, epoch: Epoch, now: float) -> SchedulerNews:
        adopted = self._store.tasks.adopt(epoch)
        if adopted:
            self._at["adopt"] = self._at["plan"] = now
            log.warning("adopted tasks of supervisors that are gone", tasks=len(adopted))
        return SchedulerNews(may_dispatch=any(task.state is TaskState.SCHEDULED for task in adopted), adopted=adopted)

    def _ask(self, epoch: Epoch, now: float) -> SchedulerNews:
        due = self._store.scheduling.next_due(epoch)
        self._asked_at = now
        self._at["ask"] = now + ASK_INTERVAL_S
        self.deadline_at = math.inf if due.deadline_in_s is None else now + due.deadline_in_s
        for duty, is_due in (("plan", due.has_dirty), ("assets", due.has_waiting), ("adopt", due.has_orphans)):
            if is_due:
                self._at[duty] = min(self._at[duty], now)
        if due.in_s is None:
            self._was_in_vain = False
        elif due.in_s > 0:
            self._was_in_vain = False
            self._at["ask"] = min(self._at["ask"], now + due.in_s)
        else:
            self._at |= dict.fromkeys(("retry", "time_out", "dates", "assets"), now)
            if not self._was_in_vain:
                # What is due may not be ours to do, as where another has locked it: not again at once.
                self._was_in_vain = True
                self._at["ask"] = now  # after these: what comes next
        return NO_NEWS
