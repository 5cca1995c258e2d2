"""The part of the core for tasks, without loop, sockets and processes: it takes reports of executors and submits tasks.

It is one of the core's duties (`headgate.supervisor.core`). In each step it stores outcomes, ends steps of tasks that
users have cleared or marked, lets the scheduler take a step, and dispatches tasks to workers. Each is one short
transaction, so that none waits long behind another.

Workers get short tasks in bundles (`headgate.scheduling.bundles`), so that none waits between two of them for the
database. Their reports are queued, in order, until they are stored. As long as one is not stored its worker gets no
other step, so the queue is never longer than the bundles of all workers. All outcomes that have come in meanwhile are
stored in one transaction, as far as that takes no longer than storing a slice of events may. If one of them is refused,
the group is halved until the bad one stands alone and fails its task; its neighbours lose nothing. An outcome that is
stored a second time changes nothing, because its token then matches no row.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.queries import (
    VALUE_QUERIES,
    CreateRun,
    EmitElements,
    GetStartSignals,
    ListenSignals,
    Response,
    SendSignals,
    SignalsSent,
)
from headgate.protocol.messages.steps import (
    EXECUTION_TIMEOUT_OVER,
    Emitted,
    StepDeferred,
    StepFailed,
    StepHandled,
)
from headgate.protocol.messages.worker import StepEnded
from headgate.scheduling.bundles import Lookout, Places, StepTimes
from headgate.store.errors import DATABASE_UNUSABLE, RowsRefused, ValueRefused
from headgate.store.ids import Epoch, TaskInstanceId, TriggerId, TryName
from headgate.store.signals import sending
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import HEALTHY_S, NotBegun, StepEnd, WorkerLost
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.executors.base import Executor, ExecutorEvent, StepLost, StepQuery
from headgate.supervisor.logs.task_logs import TaskLogs
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.queries import QueryHandler, QueryRefused
from headgate.supervisor.slice_size import SliceSize
from headgate.supervisor.tasks import steps
from headgate.supervisor.tasks.dag_files import DagFiles
from headgate.supervisor.tasks.decisions import Decisions
from headgate.supervisor.tasks.listeners import Listeners
from headgate.supervisor.tasks.scheduler import Scheduler, note_scheduled
from headgate.supervisor.tasks.steps import End, end_of, handled_by, sender_of, step_end_of

OUTCOMES_MAX = 64  # of steps, stored in one transaction
OUTCOMES_FIRST = 4  # of the first groups, before the speed of the database is known
# Groups and answers to queries before other duties run. Each is a transaction; one evaluation of their runs and one
# dispatch serve all of them.
STORED_A_STEP_MAX = 4
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
    is_ending: bool = False
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
        self._answers = answers
        self._files = files
        self._decisions = decisions
        self._logs = logs
        self._queues = tuple(queues)
        self._times = times
        self._retry = retry
        self._clock = clock
        self._step_times = StepTimes() if step_times is None else step_times
        self._lookout = Lookout()
        self._listeners = Listeners(answers, store)
        self._running: dict[str, _Running] = {}
        self._inbox: deque[tuple[TaskToRun, ExecutorEvent]] = deque()
        self._group_size = SliceSize(OUTCOMES_MAX, first=OUTCOMES_FIRST, least=OUTCOMES_FIRST)
        self._group_max = OUTCOMES_MAX  # less while a refused outcome is looked for
        self._look_at = 0.0
        self._dispatch_at = 0.0  # when tasks may be waiting for workers; infinity: none are
        self._endless_at = 0.0  # the same of endless tasks, even if no worker of the pool is free
        self._dispatch_in_doubt = False  # the last one raised: it may have dispatched tasks that no worker got
        self._is_draining = False
        self._has_changed_triggers = False  # in this step
        self._handled: dict[TriggerId, int] = {}  # events of streams, by trigger, until `take_handled`
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
        self._scheduler.notify_signals()
        self._listeners.notify()

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
            self._store_some(epoch, now)
            for token, answer in self._listeners.step(now):
                self._executor.answer(token, answer)
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
        asks = [self._look_at if self._running else math.inf, self._listeners.wake_at()]
        if self._inbox:
            asks.append(0.0)
        if not self._is_draining:
            asks += [self._scheduler.wake_at(), self._files.wake_at(), self._decisions.wake_at()]
        if self._dispatch_in_doubt:
            asks.append(0.0)  # find its tasks at once
        elif not self._is_draining:
            asks += [self._dispatch_at] if self._places().most else []
            asks += [self._endless_at] if self._executor.endless_room() else []
        late = min((run.ends_at for run in self._running.values() if not run.is_ending), default=math.inf)
        return min(late, self._executor.wake_at(), max(min(asks), self._retry.at))

    def take_handled(self) -> dict[TriggerId, int]:
        """Return the number of events of each stream, by its trigger, that were handled since the last call."""
        handled, self._handled = self._handled, {}
        return handled

    def take_expanded(self) -> bool:
        """Return whether instances of mapped tasks were made since the last call."""
        has_expanded, self._has_expanded = self._has_expanded, False
        return has_expanded

    def running(self) -> list[TryName]:
        """Return the names of the tasks that an executor has."""
        return [run.task.name for run in self._running.values()]

    def drain(self, now: float) -> bool:
        """Dispatch nothing more; return whether nothing runs any more and all outcomes are stored.

        Endless tasks are not waited for: they are ended here, and begin elsewhere.
        """
        self._is_draining = True
        for token, run in self._running.items():
            if run.task.is_endless and not run.is_ending:
                run.is_ending = run.is_shut_down = True
                self._executor.end(token, "lost", "its supervisor was asked to stop")
        return self._executor.drain(now) and not self._inbox

    def end_all(self, reason: str) -> None:
        """End all steps that still run: their tries fail, with this reason."""
        for token, run in self._running.items():
            run.is_ending = run.is_shut_down = True
            self._executor.end(token, "lost", reason)

    def abandon(self) -> None:
        """End all steps and store nothing: the lease is lost, and others own the tasks."""
        self._is_draining = True
        self._inbox.clear()
        self._running.clear()
        self._listeners.clear()
        self.close()

    def close(self) -> None:
        """Leave no process behind."""
        self._executor.close()
        self._files.close()
        self._decisions.close()

    # --- outcomes ---------------------------------------------------------------------------------

    def _receive(self, event: ExecutorEvent) -> None:
        run = self._running.get(event.token)
        if run is None:
            return  # an executor that reports a step twice changes nothing
        if not isinstance(event, StepQuery):
            del self._running[event.token]
            self._listeners.forget(event.token)
        if isinstance(event, StepEnded):
            self._step_times.note(run.task.kind, event.took_s)
            self._figures.observe(catalogue.STEP_SECONDS, event.took_s)
        task = run.task
        if isinstance(event, StepLost) and run.is_shut_down:
            task, event = steps.without_events(task), msgspec.structs.replace(event, is_blameless=True)
        self._inbox.append((task, event))

    def _store_some(self, epoch: Epoch, now: float) -> None:
        stored = 0
        while self._inbox and stored < STORED_A_STEP_MAX:
            stored += not _is_for_value(self._inbox[0][1])  # its answer takes no transaction that writes
            self._store_next(epoch, now)

    def _store_next(self, epoch: Epoch, now: float) -> None:
        """Answer the oldest query, or store the oldest outcomes. What an exception leaves is still the oldest."""
        task, event = self._inbox[0]
        if isinstance(event, StepQuery):
            answer = self._answer(epoch, task, event, now)
            self._inbox.popleft()
            if answer is not None:
                self._executor.answer(event.token, answer)
            if isinstance(event.query, CreateRun | EmitElements):
                self._scheduler.notify()
            elif isinstance(event.query, SendSignals):
                self.notify_signals()
            return
        group = self._oldest_ends()
        marks.reach("tasks.before_outcome")
        begun_at = self._clock()
        try:
            self._store_group(epoch, group)
        except (ValueRefused, RowsRefused) as refused:
            # The worker could not check this. One of them is to blame: by halving it is found.
            if len(group) > 1:
                self._group_max = len(group) // 2
                return
            self._store_refused(epoch, group[0], refused)
        except DATABASE_UNUSABLE:
            self._group_size.failed(len(group), self._clock() - begun_at)
            raise
        self._group_max = OUTCOMES_MAX
        self._group_size.stored(len(group), self._clock() - begun_at)
        marks.reach("tasks.outcome_stored")
        self._drop_oldest(len(group))
        self._scheduler.notify()
        self._dispatch_at = 0.0  # slots of a pool are free
        if any(end.task.is_endless for end in group):
            self._endless_at = 0.0

    def _oldest_ends(self) -> list[End]:
        """Return the ends of steps that are stored next: the oldest ones, up to the next query that writes.

        Queries for values are passed over: each instance of a mapped task sends some, and would part all outcomes. They
        are answered later, after what came before them is stored.
        """
        ends: list[End] = []
        for task, event in self._inbox:
            if _is_for_value(event):
                continue
            if isinstance(event, StepQuery) or len(ends) >= min(self._group_max, self._group_size.items):
                break
            ends.append(end_of(task, event))
        return ends

    def _drop_oldest(self, count: int) -> None:
        """Forget the oldest ends of steps: they are stored."""
        passed_over = list[tuple[TaskToRun, ExecutorEvent]]()
        while count:
            oldest = self._inbox.popleft()
            if _is_for_value(oldest[1]):
                passed_over.append(oldest)
            else:
                count -= 1
        self._inbox.extendleft(reversed(passed_over))

    def _store_group(self, epoch: Epoch, group: Sequence[End]) -> None:
        ends = [step_end_of(end) for end in group]
        states = self._store.store_ends(epoch, ends, healthy_s=self._times.healthy_s)
        if any(end.signals for end in ends):
            self.notify_signals()
        for end, state in zip(group, states, strict=True):
            self._figures.add(catalogue.STEPS_ENDED, steps.kind_of(end.outcome))
            if isinstance(end.outcome, NotBegun):
                continue
            # A step that has only handled events leaves its trigger as it is; any other end of one ends it.
            ends_stream = end.task.stream is not None and not isinstance(end.outcome, StepHandled)
            self._has_changed_triggers |= ends_stream or isinstance(end.outcome, StepDeferred)
            if end.task.stream_trigger is not None and (handled := handled_by(end.outcome)):
                before = self._handled.get(end.task.stream_trigger, 0)
                self._handled[end.task.stream_trigger] = before + handled
            self._log_end(end.task, state, *steps.words_of(end.outcome, is_moved=state is TaskState.SCHEDULED))
        self._logs.flush()

    def _store_refused(self, epoch: Epoch, end: End, refused: ValueRefused | RowsRefused) -> None:
        """Fail a task with the error for which its outcome cannot be stored; it keeps none of its XComs."""
        (state,) = self._store.store_ends(epoch, [StepEnd(end.task.id, end.task.token, StepFailed(str(refused)))])
        self._figures.add(catalogue.STEPS_ENDED, "failed")
        self._has_changed_triggers |= end.task.stream is not None
        self._log_end(end.task, state, "the outcome cannot be stored", {"error": str(refused)})
        self._logs.flush()

    def _log_end(self, task: TaskToRun, state: TaskState | None, event: str, fields: Mapping[str, object]) -> None:
        if state is None:
            event = f"{event}, which came too late: the task was cleared or marked meanwhile"
        level = "error" if "error" in fields else "info"
        known = {name: value for name, value in fields.items() if value}
        self._logs.say(task.name, level, event, state=None if state is None else state.value, **known)

    def _answer(self, epoch: Epoch, task: TaskToRun, asked: StepQuery, now: float) -> Response | None:
        """Return the answer to a query; None if it waits, or if its step has ended."""
        try:
            if isinstance(asked.query, ListenSignals):
                is_running = asked.token in self._running
                return self._listeners.hear(asked, asked.query, task.dag_run_id, now) if is_running else None
            if isinstance(asked.query, EmitElements):
                room = self._store.emit(epoch, task.id, task.token, Emitted(*msgspec.structs.astuple(asked.query)))
                return Response(asked.id, room, error="the task was cleared or marked" if room is None else "")
            if isinstance(asked.query, SendSignals):
                signals = sending.news_of(asked.query.signals, sender_of(task), task.dag_run_id)
                sent = self._store.send_signals(epoch, task.id, task.token, signals)
                if sent is None:
                    return Response(asked.id, error="the task was cleared or marked")
                return Response(asked.id, SignalsSent(tuple(sent)))
            if isinstance(asked.query, GetStartSignals):
                return Response(asked.id, self._store.start_signals(task.id))
            return Response(asked.id, self._answers.answer(asked.query, dag_run_id=task.dag_run_id))
        except (QueryRefused, RowsRefused, ValueRefused) as refused:
            # If the database is away this raises: the query waits, as an outcome would.
            return Response(asked.id, error=str(refused))

    # --- running tasks ----------------------------------------------------------------------------

    def _end_late_steps(self, now: float) -> None:
        for token, run in self._running.items():
            if now >= run.ends_at and not run.is_ending:
                run.is_ending = True
                self._executor.end(token, "timeout", EXECUTION_TIMEOUT_OVER)

    def _check_running(self, epoch: Epoch, now: float) -> None:
        """End steps of tasks that users have cleared or marked; begin those of a dispatch in doubt."""
        if self._dispatch_in_doubt:
            self._find_dispatched(epoch, now)
        elif now < self._look_at or not self._running:
            return
        owned = {task.token: task.state for task in self._store.owned(epoch)}
        for token, run in self._running.items():
            if not run.is_ending and owned.get(token) is not TaskState.RUNNING:
                run.is_ending = True
                self._logs.say(run.task.name, "warning", "a user has cleared or marked the task: its worker is ended")
                self._executor.end(token, "user", "a user has cleared or marked the task")
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
        return self._running.keys() | {task.token for task, _ in self._inbox}

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
        if result.in_triggers or result.timed_out or result.removed:
            self._has_changed_triggers = True
        for task in result.adopted:
            if task.error:  # its own supervisor cannot log it
                self._logs.say(task.name, "error", "the worker was lost", state=task.state.value, error=task.error)

    def _places(self) -> Places:
        """Return the places for further steps. A worker whose outcome is not stored yet counts as busy."""
        unstored = sum(not isinstance(event, StepQuery) for _, event in self._inbox)
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
            self._inbox.append((task, StepEnded(task.token, failure)))
            return
        time_s = steps.time_of(task)
        if time_s <= 0:  # it has waited for a worker until the end of its try
            self._say_begun(task)
            self._inbox.append((task, StepEnded(task.token, StepFailed(EXECUTION_TIMEOUT_OVER))))
            return
        if not self._running:
            self._look_at = now + self._times.look_s  # it was ours a moment ago
        self._running[task.token] = _Running(task, now + time_s)
        step = steps.step_of(task, None if time_s == math.inf else now + time_s)
        self._executor.submit(step, self._step_times.of(task.kind), is_endless=task.is_endless)

    def _say_begun(self, task: TaskToRun) -> None:
        """Say in the log of a task that it has begun, though no worker does: for those the executor says it."""
        self._logs.begun(task.name, task.next_method)


def _is_for_value(event: ExecutorEvent) -> bool:
    return isinstance(event, StepQuery) and isinstance(event.query, VALUE_QUERIES)
