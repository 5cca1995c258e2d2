"""The supervisor's part for tasks, without loop, sockets and processes: what executors report in, what they run out.

It is one of the core's duties (`headgate.supervisor.core`): called once a turn, it stores outcomes, looks whether
users have acted on what runs, lets the scheduler take a step, and gives workers their next tasks. Each is one short
transaction, outcomes a few of them, so that none waits long behind another.

What a worker reports stands in one queue until the database has it, in the order it came; a worker is not given more
meanwhile, so the queue is never longer than there are workers. An outcome stored twice is stored once: its token
matches no row the second time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.queries import CreateRun, Response
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSkipped, StepSucceeded, XCom
from headgate.protocol.messages.worker import AssetEvent, Step, StepEnded
from headgate.scheduling.states import FAIL_METHOD
from headgate.store.errors import DATABASE_UNUSABLE, RowsRefused, ValueRefused
from headgate.store.ids import Epoch, TryName
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks.deferral import Deferral
from headgate.store.tasks.dispatch import TaskToRun
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.executors.base import Executor, ExecutorEvent, StepLost, StepQuery
from headgate.supervisor.logs.task_logs import TaskLogs
from headgate.supervisor.queries import QueryHandler, QueryRefused
from headgate.supervisor.tasks.dag_files import DagFiles
from headgate.supervisor.tasks.scheduler import Scheduler

# Outcomes stored before other duties have their turn: those of four workers, at once for one look at their runs and one
# dispatch. Each is a transaction; where one takes 50 ms, the others wait no longer than for a slice of events.
OUTCOMES_A_STEP_MAX = 4
DISPATCH_MAX = 100  # tasks of one dispatch: bounds its locks
FAIL_STEP_S = 30.0  # for a step that is resumed to fail, whatever is left of its time: it has its file to load
PASSED_OVER_WAIT_S = 0.05  # before asking again for pools that another supervisor was busy with


class TaskTimes(msgspec.Struct, frozen=True):
    """How often things are done, in seconds."""

    look_s: float = 5.0  # how often to ask what users did to running tasks, where nobody seems to have written


class _Running(msgspec.Struct):
    """A step that an executor has."""

    task: TaskToRun
    ends_at: float  # when its execution_timeout is over; infinity for none
    is_ending: bool = False


class _End(msgspec.Struct, frozen=True):
    """What was stored of a step; ``state`` None: nothing, since somebody was first. ``told`` is for the log."""

    event: str
    state: TaskState | None
    told: Mapping[str, object] = {}


class TaskCore:
    """Gives tasks to an executor, and stores what comes of them."""

    def __init__(
        self,
        store: TaskVerbs,
        executor: Executor,
        scheduler: Scheduler,
        answers: QueryHandler,
        files: DagFiles,
        logs: TaskLogs,
        *,
        queues: Sequence[str],
        times: TaskTimes,
        retry: DatabaseRetry,
    ) -> None:
        self._store = store
        self._executor = executor
        self._scheduler = scheduler
        self._answers = answers
        self._files = files
        self._logs = logs
        self._queues = tuple(queues)
        self._times = times
        self._retry = retry
        self._running: dict[str, _Running] = {}
        self._inbox: deque[tuple[TaskToRun, ExecutorEvent]] = deque()
        self._look_at = 0.0
        self._dispatch_at = 0.0  # when tasks may be waiting for workers; infinity: none are
        self._dispatch_is_unknown = False  # the last one did not return: it may have given tasks to nobody
        self._is_draining = False
        self._has_changed_triggers = False  # in this step

    # --- what happens -----------------------------------------------------------------------------

    def notify(self, *, has_fenced: bool = False) -> None:
        """Somebody has written to the database, or an event has resumed a task: look. Or others lost their leases."""
        self._scheduler.notify()
        if has_fenced:
            self._scheduler.notify_fenced()
        self._look_at = self._dispatch_at = 0.0

    def step(self, epoch: Epoch, now: float) -> bool:
        """Do one bounded piece of each duty that is due; return whether triggers may have come to be, or have ended.

        Raises `LeaseLost`.
        """
        for event in self._executor.events(now):
            self._receive(event)
        self._end_what_is_late(now)
        if not self._retry.ready(now):
            return False
        self._has_changed_triggers = False
        try:
            self._store_some(epoch)
            self._look_after_running(epoch, now)
            if not self._is_draining:
                if self._files.step(epoch, now):
                    self._scheduler.notify()
                self._schedule(epoch, now)
                self._dispatch(epoch, now)
        except (*DATABASE_UNUSABLE, RowsRefused) as exc:  # rows that are refused here are no one task's
            self._retry.failed(exc, now)
        else:
            self._retry.succeeded(now)
        return self._has_changed_triggers

    def wake_at(self) -> float:
        """When `step` has something to do even if nothing happens."""
        asks = [self._look_at if self._running else math.inf]
        if self._inbox:
            asks.append(0.0)
        if not self._is_draining:
            asks += [self._scheduler.wake_at(), self._files.wake_at()]
        if self._dispatch_is_unknown:
            asks.append(0.0)  # what it gave is looked for at once
        elif not self._is_draining and self._room():
            asks.append(self._dispatch_at)
        late = min((run.ends_at for run in self._running.values() if not run.is_ending), default=math.inf)
        return min(late, self._executor.wake_at(), max(min(asks), self._retry.at))

    def running(self) -> list[TryName]:
        """Return the names of the tasks that an executor has."""
        return [run.task.name for run in self._running.values()]

    def drain(self, now: float) -> bool:
        """Give out nothing more; return whether nothing runs any more, and all outcomes are stored."""
        self._is_draining = True
        return self._executor.drain(now) and not self._inbox

    def end_all(self, reason: str) -> None:
        """End what still runs: its tries have failed, with this reason."""
        for token, run in self._running.items():
            run.is_ending = True
            self._executor.end(token, "lost", reason)

    def abandon(self) -> None:
        """The lease is lost: others have the tasks now. End everything, and store nothing."""
        self._is_draining = True
        self._inbox.clear()
        self._running.clear()
        self.close()

    def close(self) -> None:
        """Leave no process behind."""
        self._executor.close()
        self._files.close()

    # --- outcomes ---------------------------------------------------------------------------------

    def _receive(self, event: ExecutorEvent) -> None:
        run = self._running.get(event.token)
        if run is None:
            return  # an executor that reports a step twice changes nothing
        if not isinstance(event, StepQuery):
            del self._running[event.token]
        self._inbox.append((run.task, event))

    def _store_some(self, epoch: Epoch) -> None:
        for _ in range(min(len(self._inbox), OUTCOMES_A_STEP_MAX)):
            self._store_next(epoch)

    def _store_next(self, epoch: Epoch) -> None:
        """Store the oldest outcome, or answer the oldest query. Whatever raises leaves it where it is."""
        task, event = self._inbox[0]
        match event:
            case StepQuery():
                self._executor.answer(event.token, self._answer(task, event))
            case StepEnded():
                marks.reach("tasks.before_outcome")
                end = self._store_outcome(epoch, task, event.outcome)
                if end.state is None:
                    # Whoever cleared the task waits to hear that this worker is done with it.
                    self._store.lose_worker(epoch, task.id, task.token, "its outcome came too late")
                marks.reach("tasks.outcome_stored")
                self._tell_end(task, end)
            case StepLost():
                state = self._store.lose_worker(epoch, task.id, task.token, event.reason)
                self._tell_end(task, _End("the worker was lost", state, {"error": event.reason}))
            case _:
                assert_never(event)
        self._inbox.popleft()
        if not isinstance(event, StepQuery):
            self._scheduler.notify()
            self._dispatch_at = 0.0  # slots of a pool are free
        elif isinstance(event.query, CreateRun):
            self._scheduler.notify()

    def _store_outcome(self, epoch: Epoch, task: TaskToRun, outcome: StepOutcome) -> _End:
        try:
            return self._store_as_told(epoch, task, outcome)
        except (ValueRefused, RowsRefused) as refused:
            # What the author could not be told in the worker: the task fails with it, and keeps none of its XComs.
            state = self._store.fail(epoch, task.id, task.token, str(refused))
            return _End("the outcome cannot be stored", state, {"error": str(refused)})

    def _store_as_told(self, epoch: Epoch, task: TaskToRun, outcome: StepOutcome) -> _End:
        xcoms = _by_key(outcome.xcoms)
        match outcome:
            case StepSucceeded():
                won = self._store.succeed(epoch, task.id, task.token, xcoms=xcoms, skips=outcome.skips)
                return _End("succeeded", TaskState.SUCCESS if won else None)
            case StepSkipped():
                won = self._store.succeed(epoch, task.id, task.token, end="skipped", xcoms=xcoms)
                return _End("skipped", TaskState.SKIPPED if won else None, {"reason": outcome.reason})
            case StepFailed():
                state = self._store.fail(
                    epoch, task.id, task.token, outcome.error, may_retry=outcome.may_retry, xcoms=xcoms
                )
                return _End("failed", state, {"error": outcome.error, "traceback": outcome.traceback})
            case StepDeferred():
                wait = Deferral(
                    outcome.classpath, outcome.kwargs, outcome.next_method, outcome.next_kwargs, outcome.timeout_s
                )
                token = self._store.defer(epoch, task.id, task.token, wait, xcoms=xcoms)
                self._has_changed_triggers = True
                told = {"trigger": outcome.classpath, "goes_on_in": outcome.next_method}
                return _End("deferred", None if token is None else TaskState.DEFERRED, told)
            case _:
                assert_never(outcome)

    def _tell_end(self, task: TaskToRun, end: _End) -> None:
        event, state = end.event, None if end.state is None else end.state.value
        if state is None:
            event = f"{event}, which came too late: the task was cleared or marked meanwhile"
        level = "error" if "error" in end.told else "info"
        told = {name: value for name, value in end.told.items() if value}
        self._logs.say(task.name, level, event, state=state, **told)
        self._logs.flush()

    def _answer(self, task: TaskToRun, asked: StepQuery) -> Response:
        try:
            return Response(asked.id, self._answers.answer(asked.query, dag_run_id=task.dag_run_id))
        except (QueryRefused, RowsRefused) as refused:
            # A database that is away raises further: the step waits, as its outcome would.
            return Response(asked.id, error=str(refused))

    # --- what runs --------------------------------------------------------------------------------

    def _end_what_is_late(self, now: float) -> None:
        for token, run in self._running.items():
            if now >= run.ends_at and not run.is_ending:
                run.is_ending = True
                self._executor.end(token, "timeout", "its execution_timeout is over")

    def _look_after_running(self, epoch: Epoch, now: float) -> None:
        """End what users have cleared or marked; begin what a dispatch gave us without our hearing of it."""
        if self._dispatch_is_unknown:
            self._find_given(epoch, now)
        elif now < self._look_at or not self._running:
            return
        owned = {task.token: task.state for task in self._store.owned(epoch)}
        for token, run in self._running.items():
            if not run.is_ending and owned.get(token) is not TaskState.RUNNING:
                run.is_ending = True
                self._logs.say(run.task.name, "warning", "a user has cleared or marked the task: its worker is ended")
                self._executor.end(token, "user", "a user has cleared or marked the task")
        self._look_at = now + self._times.look_s

    def _find_given(self, epoch: Epoch, now: float) -> None:
        """Begin what a dispatch has given us, if it did; nobody else will.

        Where its commit is still under way `taken` waits for it, or raises after a while, and is asked again.
        """
        known = self._known()
        for task in self._store.owned_running(epoch):
            if task.token not in known:
                self._begin(task, now)
        known = self._known()
        for owned in self._store.owned(epoch):
            if owned.state is TaskState.RESTARTING and owned.token not in known:
                # Cleared meanwhile: it waits to hear that its worker is gone, and it never had one.
                self._store.lose_worker(epoch, owned.id, owned.token, "it was cleared before it began")
                self._scheduler.notify()
        self._dispatch_is_unknown = False

    def _known(self) -> set[str]:
        return self._running.keys() | {task.token for task, _ in self._inbox}

    # --- to workers -------------------------------------------------------------------------------

    def _schedule(self, epoch: Epoch, now: float) -> None:
        result = self._scheduler.step(epoch, now)
        if result.may_dispatch:
            self._dispatch_at = min(self._dispatch_at, now)
        if result.in_triggers or result.timed_out or result.removed:
            self._has_changed_triggers = True
        for task in result.adopted:
            if task.error:  # whoever would have said so is gone
                self._logs.say(task.name, "error", "the worker was lost", state=task.state.value, error=task.error)

    def _room(self) -> int:
        """Return how many steps may be given out. A worker whose outcome is not stored yet counts as taken."""
        unstored = sum(not isinstance(event, StepQuery) for _, event in self._inbox)
        return max(0, self._executor.room() - unstored)

    def _dispatch(self, epoch: Epoch, now: float) -> None:
        limit = min(self._room(), DISPATCH_MAX)
        if limit == 0 or now < self._dispatch_at or self._dispatch_is_unknown:
            return
        self._dispatch_is_unknown = True
        given = self._store.dispatch(epoch, limit=limit, queues=self._queues)
        self._dispatch_is_unknown = False
        if given.tasks:
            marks.reach("tasks.dispatched")
        for task in given.tasks:
            self._begin(task, now)
        if len(given.tasks) == limit:
            self._dispatch_at = now  # there may be more, as soon as there is room
        else:
            self._dispatch_at = now + PASSED_OVER_WAIT_S if given.passed_over else math.inf

    def _begin(self, task: TaskToRun, now: float) -> None:
        self._logs.say(task.name, "info", "begun", method=task.next_method or "execute")
        if task.error:
            failure = StepFailed(f"what the task is to go on with cannot be read: {task.error}", may_retry=False)
            self._inbox.append((task, StepEnded(task.token, failure)))
            return
        if not self._running:
            self._look_at = now + self._times.look_s  # it was ours a moment ago
        self._running[task.token] = _Running(task, now + _time_of(task))
        self._executor.submit(step_of(task))


def _time_of(task: TaskToRun) -> float:
    """Return how many seconds a step may take."""
    if task.remaining_s is None:
        return math.inf
    # What resumes to fail may do so because there is no time left. It says why, which a step that was ended would not.
    return max(task.remaining_s, FAIL_STEP_S if task.next_method == FAIL_METHOD else 0.0)


def step_of(task: TaskToRun) -> Step:
    """Return what a worker is told of a task."""
    interval = task.data_interval
    return Step(
        token=task.token,
        task_instance_id=task.id,
        file=task.file,
        dag_id=task.dag,
        run_id=task.run_id,
        task_id=task.task_id,
        try_number=task.try_number,
        next_method=task.next_method,
        next_kwargs=task.next_kwargs,
        event=task.event,
        params=task.conf,
        logical_date_s=None if task.logical_date is None else task.logical_date.timestamp(),
        data_interval_s=None if interval is None else (interval[0].timestamp(), interval[1].timestamp()),
        asset_events=tuple(
            AssetEvent(event.asset, event.payload, event.stored_at.timestamp()) for event in task.asset_events
        ),
    )


def _by_key(xcoms: Sequence[XCom]) -> dict[str, bytes]:
    return {xcom.key: xcom.value for xcom in xcoms}
