"""What executors report of steps: their ends, which are stored, and their queries, which are answered.

Reports are queued, in order, until they are stored. As long as one is not stored its worker gets no other step, so the
queue is never longer than the bundles of all workers, and what was put aside. All ends that have come in meanwhile are
stored in one transaction, as far as that takes no longer than storing a slice of events may. If one of them is
refused, the group is halved until the bad one stands alone and fails its task; its neighbours lose nothing. If not even
that can be stored it is put aside for a while, and the others go on. An end that is stored a second time changes
nothing, because its token then matches no row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog

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
from headgate.protocol.messages.steps import Emitted, StepDeferred, StepFailed, StepHandled
from headgate.store.errors import BLAMELESS, DATABASE_UNUSABLE, RowsRefused, StoreError, ValueRefused, described
from headgate.store.ids import Epoch, TriggerId, TryName, instance_name
from headgate.store.signals import sending
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import NotBegun, StepEnd
from headgate.supervisor.backoff import Waits
from headgate.supervisor.executors.base import ExecutorEvent, StepQuery
from headgate.supervisor.logs.task_logs import TaskLogs
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.queries import QueryHandler, QueryRefused
from headgate.supervisor.slice_size import SliceSize
from headgate.supervisor.tasks import steps
from headgate.supervisor.tasks.faults import TOLD_CHARS_MAX, WAIT_MAX_S, WAIT_S
from headgate.supervisor.tasks.listeners import Listeners
from headgate.supervisor.tasks.scheduler import Scheduler
from headgate.supervisor.tasks.steps import End, end_of, handled_by, sender_of, step_end_of

log = structlog.get_logger(__name__)

OUTCOMES_MAX = 64  # of steps, stored in one transaction
OUTCOMES_FIRST = 4  # of the first groups, before the speed of the database is known
# Groups and answers to queries before other duties run. Each is a transaction; one evaluation of their runs and one
# dispatch serve all of them.
STORED_A_STEP_MAX = 4
ASIDE_MAX = 1000  # ends that are put aside; if there are more, the database refuses everything


class Stored(msgspec.Struct):
    """What has followed from ends that were stored: slots are free, of endless tasks too, or triggers have changed."""

    has_ends: bool = False
    has_endless: bool = False
    has_changed_triggers: bool = False


class Aside(NamedTuple):
    """The end of a step that could not be stored, not even as a failure, and is stored again at ``until``."""

    task: TaskToRun
    event: ExecutorEvent
    error: str
    failures: int
    until: float  # infinity while it is in the queue again


class Reports:
    """The reports of one supervisor's executor that are not stored yet. ``answer`` takes the token of a step."""

    def __init__(
        self,
        store: TaskVerbs,
        scheduler: Scheduler,
        answers: QueryHandler,
        logs: TaskLogs,
        answer: Callable[[str, Response], None],
        *,
        healthy_s: float,
        clock: Callable[[], float],
        figures: Figures,
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._answers = answers
        self._logs = logs
        self._answer_step = answer
        self._healthy_s = healthy_s
        self._clock = clock
        self._figures = figures
        self._listeners = Listeners(answers, store)
        self._inbox: deque[tuple[TaskToRun, ExecutorEvent]] = deque()
        self._group_size = SliceSize(OUTCOMES_MAX, first=OUTCOMES_FIRST, least=OUTCOMES_FIRST)
        self._group_max = OUTCOMES_MAX  # less while a refused outcome is looked for
        self._aside: dict[str, Aside] = {}  # by token
        self._waits = Waits(WAIT_S, WAIT_MAX_S)
        self._stored = Stored()  # until `take_stored`
        self._handled: dict[TriggerId, int] = {}  # events of streams, by trigger, until `take_handled`

    def __bool__(self) -> bool:
        return bool(self._inbox)

    def add(self, task: TaskToRun, event: ExecutorEvent) -> None:
        """Queue the report of a step of this task."""
        if not isinstance(event, StepQuery):
            self._listeners.forget(event.token)
        self._inbox.append((task, event))

    def clear(self) -> None:
        """Forget all reports and queries: nothing of them is stored any more."""
        self._inbox.clear()
        self._aside.clear()
        self._listeners.clear()

    def tokens(self) -> set[str]:
        """Return the tokens of the steps whose reports wait."""
        return {task.token for task, _ in self._inbox} | self._aside.keys()

    def ends(self) -> int:
        """Return how many workers are busy with a step that has ended, because its end is not stored."""
        ends = (task.token for task, event in self._inbox if not isinstance(event, StepQuery))
        return sum(token not in self._aside for token in ends)

    def retry_aside(self) -> None:
        """Store at once, one more time, what is put aside: nothing is stored later."""
        for aside in list(self._aside.values()):
            if aside.until < math.inf:
                self._queue_again(aside)

    def troubles(self) -> list[tuple[str, str]]:
        """Return the tasks whose ends are put aside, and why."""
        return [(f"task {_words(aside.task.name)}", aside.error) for aside in self._aside.values()]

    def notify_signals(self) -> None:
        """Look soon for tasks that wait for signals, or listen to them: some may have been sent."""
        self._scheduler.notify_signals()
        self._listeners.notify()

    def step(self, epoch: Epoch, now: float) -> None:
        """Store some reports, and answer those who listen. Raises as the store does: then what is left is kept."""
        due = next((aside for aside in self._aside.values() if aside.until <= now), None)
        if due is not None:  # one a step: if they cannot be stored either, they must not hold up the others
            self._queue_again(due)
        stored = 0
        while self._inbox and stored < STORED_A_STEP_MAX:
            stored += not _is_for_value(self._inbox[0][1])  # its answer takes no transaction that writes
            self._store_next(epoch, now)
        for token, answer in self._listeners.step(now):
            self._answer_step(token, answer)

    def wake_at(self) -> float:
        """Return the time at which `step` must be called even if nothing happens."""
        if self._inbox:
            return 0.0
        return min((self._listeners.wake_at(), *(aside.until for aside in self._aside.values())))

    def take_stored(self) -> Stored:
        """Return what has followed from the ends that were stored since the last call."""
        stored, self._stored = self._stored, Stored()
        return stored

    def take_handled(self) -> dict[TriggerId, int]:
        """Return the number of events of each stream, by its trigger, that were handled since the last call."""
        handled, self._handled = self._handled, {}
        return handled

    # --- inside ----------------------------------------------------------------------------------

    def _store_next(self, epoch: Epoch, now: float) -> None:
        """Answer the oldest query, or store the oldest outcomes. What an exception leaves is still the oldest."""
        task, event = self._inbox[0]
        if isinstance(event, StepQuery):
            answer = self._answer(epoch, task, event, now)
            self._inbox.popleft()
            if answer is not None:
                self._answer_step(event.token, answer)
            if isinstance(event.query, CreateRun | EmitElements):
                self._scheduler.notify()
            elif isinstance(event.query, SendSignals):
                self.notify_signals()
            return
        group = self._oldest_ends()
        marks.reach("tasks.before_outcome")
        begun_at = self._clock()
        ends, states = list[StepEnd](), list[TaskState | None]()
        try:
            ends = [step_end_of(end) for end in group]
            states = self._store.store_ends(epoch, ends, healthy_s=self._healthy_s)
        except DATABASE_UNUSABLE:
            self._group_size.failed(len(group), self._clock() - begun_at)
            raise
        except BLAMELESS:
            raise
        except Exception as error:
            # The worker could not check this, or nobody foresaw it. One of them is to blame: by halving it is found.
            if len(group) > 1:
                self._group_max = len(group) // 2
                return
            try:
                self._store_refused(epoch, group[0], error)
            except BLAMELESS:
                raise
            except Exception as still:
                self._put_aside(group[0], still, now)
                return
        self._group_max = OUTCOMES_MAX
        self._group_size.stored(len(group), self._clock() - begun_at)
        marks.reach("tasks.outcome_stored")
        self._drop_oldest(len(group))
        for end in group:
            self._aside.pop(end.task.token, None)
        if states:
            self._tell_stored(group, ends, states)
        self._note_free(group)

    def _note_free(self, group: Sequence[End]) -> None:
        """Note that the workers of these have no step any more."""
        self._scheduler.notify_ended()
        self._stored.has_ends = True
        self._stored.has_endless |= any(end.task.is_endless for end in group)

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

    def _drop_oldest(self, count: int) -> list[tuple[TaskToRun, ExecutorEvent]]:
        """Take the oldest ends of steps out of the queue; return them."""
        passed_over, dropped = list[tuple[TaskToRun, ExecutorEvent]](), list[tuple[TaskToRun, ExecutorEvent]]()
        while len(dropped) < count:
            oldest = self._inbox.popleft()
            (passed_over if _is_for_value(oldest[1]) else dropped).append(oldest)
        self._inbox.extendleft(reversed(passed_over))
        return dropped

    def _tell_stored(self, group: Sequence[End], ends: Sequence[StepEnd], states: Sequence[TaskState | None]) -> None:
        """Have happen what follows from ends that are stored, and write them to the logs of their tasks."""
        if any(end.signals for end in ends):
            self.notify_signals()
        for end, state in zip(group, states, strict=True):
            self._figures.add(catalogue.STEPS_ENDED, steps.kind_of(end.outcome))
            if isinstance(end.outcome, NotBegun) and not end.outcome.reason:
                continue
            # A step that has only handled events leaves its trigger as it is; any other end of one ends it.
            ends_stream = end.task.stream is not None and not isinstance(end.outcome, StepHandled)
            self._stored.has_changed_triggers |= ends_stream or isinstance(end.outcome, StepDeferred)
            if end.task.stream_trigger is not None and (handled := handled_by(end.outcome)):
                before = self._handled.get(end.task.stream_trigger, 0)
                self._handled[end.task.stream_trigger] = before + handled
            if not steps.is_taken_away(end.outcome):  # that was said when its worker was told to end
                self._log_end(end.task, state, *steps.words_of(end.outcome, is_moved=state is TaskState.SCHEDULED))
        self._logs.flush()

    def _store_refused(self, epoch: Epoch, end: End, error: Exception) -> None:
        """Fail a task with the error for which its outcome cannot be stored; it keeps none of its XComs."""
        reason = str(error)
        if not isinstance(error, ValueRefused | RowsRefused):
            reason = f"headgate cannot store the outcome: {described(error)}"
            log.error("the outcome of a step cannot be stored", task=end.task.name.task, exc_info=error)
        failed = step_end_of(end._replace(outcome=StepFailed(reason)))
        (state,) = self._store.store_ends(epoch, [failed], healthy_s=self._healthy_s)
        self._figures.add(catalogue.STEPS_ENDED, "failed")
        self._stored.has_changed_triggers |= end.task.stream is not None
        self._log_end(end.task, state, "the outcome cannot be stored", {"error": reason})
        self._logs.flush()

    def _queue_again(self, aside: Aside) -> None:
        self._aside[aside.task.token] = aside._replace(until=math.inf)
        self._inbox.append((aside.task, aside.event))

    def _put_aside(self, end: End, error: Exception, now: float) -> None:
        """Keep the oldest end for later, so that others go on: its task stays as it is, and no worker has it."""
        before, reason = self._aside.get(end.task.token), described(error)
        if before is None and len(self._aside) >= ASIDE_MAX:
            raise RowsRefused(reason) from error
        failures = 1 if before is None else before.failures + 1
        wait_s = self._waits.after(failures)
        log.error(
            "the end of a task cannot be stored, nor that it has failed; the others go on",
            task=_words(end.task.name),
            failures=failures,
            again_in_s=round(wait_s, 1),
            exc_info=None if isinstance(error, StoreError) else error,  # behind that is the driver's, with rows
            error=reason,
        )
        ((task, event),) = self._drop_oldest(1)
        self._aside[task.token] = Aside(task, event, reason[:TOLD_CHARS_MAX], failures, now + wait_s)
        self._group_max = OUTCOMES_MAX
        self._note_free([end])

    def _log_end(self, task: TaskToRun, state: TaskState | None, event: str, fields: Mapping[str, object]) -> None:
        if state is None:
            event = f"{event}, which came too late: the task was cleared, marked or stopped meanwhile"
        level = "error" if "error" in fields else "info"
        known = {name: value for name, value in fields.items() if value}
        self._logs.say(task.name, level, event, state=None if state is None else state.value, **known)

    def _answer(self, epoch: Epoch, task: TaskToRun, asked: StepQuery, now: float) -> Response | None:
        """Return the answer to a query; None if it waits, or if its step has ended."""
        try:
            if isinstance(asked.query, ListenSignals):
                has_ended = any(
                    asked.token == of.token and not isinstance(event, StepQuery) for of, event in self._inbox
                )
                return None if has_ended else self._listeners.hear(asked, asked.query, task.dag_run_id, now)
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
            return Response(
                asked.id, self._answers.answer(asked.query, dag_run_id=task.dag_run_id, asker=task.name.task)
            )
        except (QueryRefused, RowsRefused, ValueRefused) as refused:
            return Response(asked.id, error=str(refused))
        except BLAMELESS:
            raise  # the query waits, as an outcome would
        except Exception as error:
            log.error("a query of a task cannot be answered", task=task.name.task, exc_info=error)
            return Response(asked.id, error=f"headgate cannot answer this: {described(error)}")


def _words(name: TryName) -> str:
    """Return a task as commands take it."""
    return f"{name.dag_id} {name.run_id} {instance_name(name.task_id, name.map_index)}"


def _is_for_value(event: ExecutorEvent) -> bool:
    return isinstance(event, StepQuery) and isinstance(event.query, VALUE_QUERIES)
