"""The part of the core for tasks, without loop, sockets and processes: it takes reports of executors and submits tasks.

It is one of the core's duties (`headgate.supervisor.core`). In each step it stores outcomes, ends steps of tasks that
users have cleared or marked, lets the scheduler take a step, and dispatches tasks to workers. Each is one short
transaction, so that none waits long behind another.

Workers get short tasks in bundles (`headgate.scheduling.bundles`), so that none waits between two of them for the
database. What they report waits in `Reports` until it is stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.steps import EXECUTION_TIMEOUT_OVER, StepFailed, StepNotBegun
from headgate.protocol.messages.worker import StepEnded
from headgate.scheduling.bundles import Lookout, Places, StepTimes
from headgate.scheduling.why import DagFolder
from headgate.store.errors import DATABASE_UNUSABLE, RowsRefused
from headgate.store.ids import Epoch, TaskInstanceId, TriggerId, TryName
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import HEALTHY_S, StepEnd, WorkerLost
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.executors.base import EndReason, Executor, ExecutorEvent, StepLost, StepQuery
from headgate.supervisor.logs.task_logs import TaskLogs
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.queries import QueryHandler
from headgate.supervisor.tasks import steps
from headgate.supervisor.tasks.dag_files import DagFiles
from headgate.supervisor.tasks.decisions import Decisions
from headgate.supervisor.tasks.reports import Reports
from headgate.supervisor.tasks.scheduler import Scheduler, note_scheduled

DISPATCH_MAX = 100  # tasks of one dispatch: bounds its locks
PASSED_OVER_WAIT_S = 0.05  # before pools are tried again that another supervisor had locked


class TaskTimes(msgspec.Struct, frozen=True):
    """Intervals in seconds."""

    look_s: float = 5.0  # between two checks of running tasks if none seems to have been written to
    healthy_s: float = HEALTHY_S  # until an endless task counts as one that runs well


class _Running(msgspec.Struct):
    """A step that an executor has."""

    task: TaskToRun
    ends_at: float  # when its execution_timeout is over; infinity for none
    ending: EndReason | None = None  # why it is ended, if it is
    is_shut_down: bool = False  # it is ended because its supervisor leaves


class TaskCore:
    """Dispatches tasks to an executor, and stores their outcomes."""

    def __init__(
        self,
        store: TaskVerbs,
        executor: Executor,
        scheduler: Scheduler,
        answers: QueryHandler,
        files: DagFiles,
        decisions: Decisions,
        logs: TaskLogs,
        *,
        queues: Sequence[str],
        times: TaskTimes,
        retry: DatabaseRetry,
        clock: Callable[[], float] = time.monotonic,
        step_times: StepTimes | None = None,
        figures: Figures | None = None,
    ) -> None:
        self._figures = Figures() if figures is None else figures
        self._store = store
        self._executor = executor
        self._scheduler = scheduler
        self._files = files
        self._decisions = decisions
        self._logs = logs
        self._queues = tuple(queues)
        self._times = times
        self._retry = retry
        self._step_times = StepTimes() if step_times is None else step_times
        self._lookout = Lookout()
        self._reports = Reports(
            store,
            scheduler,
            answers,
            logs,
            executor.answer,
            healthy_s=times.healthy_s,
            clock=clock,
            figures=self._figures,
        )
        self._logs = logs
        self._running: dict[str, _Running] = {}
        self._look_at = 0.0
        self._dispatch_at = 0.0  # when tasks may be waiting for workers; infinity: none are
        self._endless_at = 0.0  # the same of endless tasks, even if no worker of the pool is free
        self._dispatch_in_doubt = False  # the last one raised: it may have dispatched tasks that no worker got
        self._is_draining = False
        self._has_changed_triggers = False  # in this step
        self._has_expanded = False  # until `take_expanded`

    # --- the step ---------------------------------------------------------------------------------

    def notify(self, *, has_fenced: bool = False) -> None:
        """Look for work soon: the database was written to, or, with ``has_fenced``, others have lost their leases."""
        self._scheduler.notify()
        if has_fenced:
            self._scheduler.notify_fenced()
        self._look_at = self._dispatch_at = self._endless_at = 0.0

    def notify_signals(self) -> None:
        """Look soon for tasks that wait for signals, or listen to them: some may have been sent."""
        self._reports.notify_signals()

    def step(self, epoch: Epoch, now: float) -> bool:
        """Do one bounded piece of each duty that is due; return whether triggers may have been created or have ended.

        Raises `LeaseLost`.
        """
        for event in self._executor.events(now):
            self._receive(event)
        self._end_late_steps(now)
        if not self._retry.ready(now):
            return False
        self._has_changed_triggers = False
        try:
            self._store_reports(epoch, now)
            self._check_running(epoch, now)
            if not self._is_draining:
                if self._files.step(epoch, now):
                    self._scheduler.notify()
                self._schedule(epoch, now)
                if self._decisions.step(epoch, now):
                    self._scheduler.notify_decided()
                self._dispatch(epoch, now)
        except (*DATABASE_UNUSABLE, RowsRefused) as exc:  # refused rows here belong to no one task
            self._retry.failed(exc, now)
        else:
            self._retry.succeeded(now)
        return self._has_changed_triggers

    def wake_at(self) -> float:
        """Return the time at which `step` must be called even if nothing happens."""
        asks = [self._look_at if self._running else math.inf, self._reports.wake_at()]
        if not self._is_draining:
            asks += [self._scheduler.wake_at(), self._files.wake_at(), self._decisions.wake_at()]
        if self._dispatch_in_doubt:
            asks.append(0.0)  # find its tasks at once
        elif not self._is_draining:
            asks += [self._dispatch_at] if self._places().most else []
            asks += [self._endless_at] if self._executor.endless_room() else []
        late = min((run.ends_at for run in self._running.values() if run.ending is None), default=math.inf)
        return min(late, self._executor.wake_at(), max(min(asks), self._retry.at))

    def take_handled(self) -> dict[TriggerId, int]:
        """Return the number of events of each stream, by its trigger, that were handled since the last call."""
        return self._reports.take_handled()

    def take_expanded(self) -> bool:
        """Return whether instances of mapped tasks were made since the last call."""
        has_expanded, self._has_expanded = self._has_expanded, False
        return has_expanded

    def running(self) -> list[TryName]:
        """Return the names of the tasks that an executor has."""
        return [run.task.name for run in self._running.values()]

    @property
    def dag_folder(self) -> DagFolder | None:
        """What its DAG files are; None before all are parsed."""
        return self._files.told

    def logs_trouble(self) -> str:
        """Return why logs of tasks cannot be written at the moment; "" if they can."""
        return self._logs.trouble

    def passed_over(self) -> list[tuple[str, str]]:
        """Return what is passed over for a while, because it has failed, and why."""
        return self._scheduler.troubles() + self._reports.troubles()

    def drain(self, now: float) -> bool:
        """Dispatch nothing more; return whether nothing runs any more and all outcomes are stored.

        Endless tasks are not waited for: they are ended here, and begin elsewhere.
        """
        if not self._is_draining:
            self._reports.retry_aside()
        self._is_draining = True
        self.end_endless("its supervisor was asked to stop")
        return self._executor.drain(now) and not self._reports

    def end_endless(self, reason: str) -> None:
        """End the endless tasks, which begin again elsewhere, or here; repeating it changes nothing (I30)."""
        for token, run in self._running.items():
            if run.task.is_endless and run.ending is None:
                run.ending, run.is_shut_down = "lost", True
                self._executor.end(token, "lost", reason)

    def end_all(self, reason: str) -> None:
        """End all steps that still run: their tries fail, with this reason."""
        for token, run in self._running.items():
            run.ending, run.is_shut_down = run.ending or "lost", True
            self._executor.end(token, "lost", reason)

    def abandon(self) -> None:
        """End all steps and store nothing: the lease is lost, and others own the tasks."""
        self._is_draining = True
        self._reports.clear()
        self._running.clear()
        self.close()

    def close(self) -> None:
        """Leave no process behind."""
        self._executor.close()
        self._files.close()
        self._decisions.close()

    # --- reports ----------------------------------------------------------------------------------

    def _receive(self, event: ExecutorEvent) -> None:
        run = self._running.get(event.token)
        if run is None:
            return  # an executor that reports a step twice changes nothing
        if not isinstance(event, StepQuery):
            del self._running[event.token]
        if isinstance(event, StepEnded) and not isinstance(event.outcome, StepNotBegun):
            self._step_times.note(run.task.kind, event.took_s)
            self._figures.observe(catalogue.STEP_SECONDS, event.took_s)
        task = run.task
        if isinstance(event, StepLost) and run.is_shut_down:
            task, event = steps.without_events(task), msgspec.structs.replace(event, is_blameless=True)
        self._reports.add(task, event)

    def _store_reports(self, epoch: Epoch, now: float) -> None:
        try:
            self._reports.step(epoch, now)
        finally:
            stored = self._reports.take_stored()
            if stored.has_ends:
                self._dispatch_at = 0.0  # slots of a pool are free
            if stored.has_endless:
                self._endless_at = 0.0
            self._has_changed_triggers |= stored.has_changed_triggers

    # --- running tasks ----------------------------------------------------------------------------

    def _end_late_steps(self, now: float) -> None:
        for token, run in self._running.items():
            if now >= run.ends_at and run.ending is None:
                run.ending = "timeout"
                self._executor.end(token, "timeout", EXECUTION_TIMEOUT_OVER)

    def _check_running(self, epoch: Epoch, now: float) -> None:
        """End steps of tasks that users, or signals, have ended; begin those of a dispatch in doubt."""
        if self._dispatch_in_doubt:
            self._find_dispatched(epoch, now)
        elif now < self._look_at or not self._running:
            return
        owned = {task.token: task.state for task in self._store.owned(epoch)}
        for token, run in self._running.items():
            # Also one whose time is over, or that is to leave: a user's action calls its on_kill() (I14).
            if run.ending != "user" and owned.get(token) is not TaskState.RUNNING:
                run.ending = "user"
                self._logs.say(run.task.name, "info", f"{steps.TAKEN_AWAY}: its worker is ended")
                self._executor.end(token, "user", steps.TAKEN_AWAY)
        self._look_at = now + self._times.look_s

    def _find_dispatched(self, epoch: Epoch, now: float) -> None:
        """Start the tasks of a dispatch that raised, if it was committed: no other supervisor will.

        If its commit is still in progress, the query waits for it, or raises after a while and is repeated.
        """
        known = self._known()
        for task in self._store.owned_running(epoch):
            if task.token not in known:
                self._begin(task, now)
        known = self._known()
        for owned in self._store.owned(epoch):
            if owned.state is TaskState.RESTARTING and owned.token not in known:
                # Cleared meanwhile. It may be started again after its worker has ended, and it never had one.
                self._let_go(epoch, owned.id, owned.token)
        for instance, token in self._store.left(epoch):
            if token not in known:  # marked meanwhile: the same
                self._let_go(epoch, instance, token)
        self._dispatch_in_doubt = False

    def _let_go(self, epoch: Epoch, instance: TaskInstanceId, token: str) -> None:
        """Have a task go on that no worker has, or ever will have, under this token."""
        self._store.store_ends(epoch, [StepEnd(instance, token, WorkerLost("it was cleared before it began"))])
        self._scheduler.notify()

    def _known(self) -> set[str]:
        return self._running.keys() | self._reports.tokens()

    # --- to workers -------------------------------------------------------------------------------

    def _schedule(self, epoch: Epoch, now: float) -> None:
        result = self._scheduler.step(epoch, now)
        note_scheduled(self._figures, result)
        self._has_expanded |= result.instances > 0
        if result.has_questions:
            self._decisions.notify()
        if result.may_dispatch:
            self._dispatch_at = min(self._dispatch_at, now)
            self._endless_at = min(self._endless_at, now)
        if result.may_have_taken:
            self._look_at = now  # nobody tells a supervisor of what it has written itself
        self._has_changed_triggers |= result.changes_triggers
        for task in result.adopted:
            if task.error:  # its own supervisor cannot log it
                self._logs.say(task.name, "error", "the worker was lost", state=task.state.value, error=task.error)

    def _places(self) -> Places:
        """Return the places for further steps. A worker whose outcome is not stored yet counts as busy."""
        unstored = self._reports.ends()
        rooms = [] if unstored else self._executor.rooms()
        return Places(self._step_times, max(0, self._executor.room() - unstored), rooms)

    def _dispatch(self, epoch: Epoch, now: float) -> None:
        places = self._places()
        limit = min(self._lookout.limit(places), DISPATCH_MAX) if now >= self._dispatch_at else 0
        endless = self._executor.endless_room() if limit or now >= self._endless_at else 0
        if not (limit or endless) or self._dispatch_in_doubt:
            return
        self._dispatch_in_doubt = True
        given = self._store.dispatch(epoch, limit=limit, queues=self._queues, places=places, endless=endless)
        self._dispatch_in_doubt = False
        if given.tasks:
            marks.reach("tasks.dispatched")
        for task in given.tasks:
            self._begin(task, now)
        again_at = now + PASSED_OVER_WAIT_S if given.passed_over else math.inf
        if endless:
            self._endless_at = min(again_at, math.inf if given.endless_in_s is None else now + given.endless_in_s)
        if limit:
            taken = sum(not task.is_endless for task in given.tasks)
            self._lookout.found(places, limit, taken)
            # There may be more, as soon as there is room.
            self._dispatch_at = now if taken == limit or given.has_more else again_at

    def _begin(self, task: TaskToRun, now: float) -> None:
        if task.error:
            self._say_begun(task)
            failure = StepFailed(f"the arguments to resume the task with cannot be read: {task.error}", may_retry=False)
            self._reports.add(task, StepEnded(task.token, failure))
            return
        time_s = steps.time_of(task)
        if time_s <= 0:  # it has waited for a worker until the end of its try
            self._say_begun(task)
            self._reports.add(task, StepEnded(task.token, StepFailed(EXECUTION_TIMEOUT_OVER)))
            return
        if not self._running:
            self._look_at = now + self._times.look_s  # it was ours a moment ago
        self._running[task.token] = _Running(task, now + time_s)
        step = steps.step_of(task, None if time_s == math.inf else now + time_s)
        self._executor.submit(step, self._step_times.of(task.kind), is_endless=task.is_endless)

    def _say_begun(self, task: TaskToRun) -> None:
        """Say in the log of a task that it has begun, though no worker does: for those the executor says it."""
        self._logs.begun(task.name, task.next_method)
