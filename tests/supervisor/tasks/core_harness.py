"""A `TaskCore` whose executor, scheduler, files and logs a test plays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from tests.store.harness import QUEUES, Query
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.messages import queries
from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.queries import EncodedValue, QueryResult, Response
from headgate.protocol.messages.steps import StepDeferred, StepNotBegun, StepOutcome
from headgate.protocol.messages.worker import Step, StepEnded
from headgate.protocol.values import encode_value
from headgate.scheduling.bundles import Room, StepTimes
from headgate.store.errors import DatabaseAway
from headgate.store.ids import Epoch, TryName
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.executors.base import EndReason, ExecutorEvent, StepLost, StepReturned
from headgate.supervisor.executors.deciders import Deciders
from headgate.supervisor.logs.task_logs import TaskLogs
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.queries import QueryHandler
from headgate.supervisor.tasks.core import TaskCore, TaskTimes
from headgate.supervisor.tasks.dag_files import DagFiles
from headgate.supervisor.tasks.decisions import Decisions
from headgate.supervisor.tasks.scheduler import Scheduler, SchedulerStep

DEFER = StepDeferred("a.Trigger", encode_value({}, where="k"), "resume", encode_value({"n": 1}, where="k"))


class FakeExecutor:
    """Has room for so many steps, and reports what it is told to."""

    def __init__(self, room: int) -> None:
        self.workers = room
        self.endless = 0  # room for steps of endless tasks
        self.behind: list[Room] = []  # what busy workers may be given
        self.expected: dict[str, float | None] = {}  # by token
        self.steps: dict[str, Step] = {}
        self.ended: list[tuple[str, EndReason]] = []
        self.answers: list[tuple[str, Response]] = []
        self.pending: list[ExecutorEvent] = []
        self.is_closed = False

    def room(self) -> int:
        return max(0, self.workers - len(self.steps))

    def rooms(self) -> list[Room]:
        return self.behind

    def endless_room(self) -> int:
        return self.endless

    def submit(self, step: Step, expected_s: float | None = None, *, is_endless: bool = False) -> None:
        assert self.room() > 0 or self.behind or expected_s is not None or is_endless
        self.steps[step.token] = step
        self.expected[step.token] = expected_s

    def end(self, token: str, why: EndReason, text: str) -> None:
        self.ended.append((token, why))
        self.lose(token, text)

    def answer(self, token: str, answer: Response) -> None:
        self.answers.append((token, answer))

    def events(self, now: float) -> Sequence[ExecutorEvent]:
        pending, self.pending = self.pending, []
        return pending

    def wake_at(self) -> float:
        return 0.0 if self.pending else math.inf

    def drain(self, now: float) -> bool:
        return not self.steps

    def close(self) -> None:
        self.is_closed = True

    # --- what the test says ---

    def finish(self, outcome: StepOutcome, token: str | None = None, *, took_s: float = 1.0) -> str:
        token = token or next(iter(self.steps))
        del self.steps[token]
        self.pending.append(StepEnded(token, outcome, took_s=took_s))
        return token

    def give_back(self, token: str) -> None:
        del self.steps[token]
        self.pending.append(StepReturned(token))

    def give_up(self, token: str, reason: str) -> None:
        del self.steps[token]
        self.pending.append(StepEnded(token, StepNotBegun(reason)))

    def lose(self, token: str, reason: str) -> None:
        del self.steps[token]
        self.pending.append(StepLost(token, reason))


class QuietScheduler(Scheduler):
    """Never has anything to do; counts what it is told."""

    def __init__(self) -> None:
        self.notices = 0
        self.signals = 0
        self.news = SchedulerStep()

    def notify(self) -> None:
        self.notices += 1

    def notify_ended(self) -> None:
        self.notices += 1

    def notify_signals(self) -> None:
        self.signals += 1

    def notify_fenced(self) -> None:
        self.notices += 1

    def step(self, epoch: Epoch, now: float) -> SchedulerStep:
        news, self.news = self.news, SchedulerStep()
        return news

    def wake_at(self) -> float:
        return math.inf


class Answers:
    """Answers every query with the number one."""

    def answer(self, query: queries.Query, *, dag_run_id: int | None, asker: str | None = None) -> QueryResult:
        assert dag_run_id is not None
        return EncodedValue(b"1")


def no_decisions() -> Decisions:
    """Decisions about signals, of which none is asked for."""
    return Decisions(cast(Any, None), Deciders(cast(Any, None)), cast(Any, None))


class NoFiles(DagFiles):
    """A folder without DAG files."""

    def __init__(self) -> None:
        pass

    def step(self, epoch: Epoch, now: float) -> bool:
        return False

    def wake_at(self) -> float:
        return math.inf

    def close(self) -> None:
        pass


class Logs(TaskLogs):
    """Keeps what the supervisor says about tries."""

    def __init__(self) -> None:
        self.said: list[tuple[TryName, str, str, dict[str, object]]] = []

    def say(self, name: TryName, level: str, event: str, **fields: object) -> None:
        self.said.append((name, level, event, fields))

    def flush(self, within_s: float = 0.0) -> bool:
        return True

    def events(self) -> list[str]:
        return [event for _, _, event, _ in self.said]


class Scene:
    """A run with tasks that are scheduled, and a core that has a worker for each of ``workers``."""

    def __init__(
        self,
        store: Store,
        query: Query,
        *names: str,
        workers: int = 4,
        step_times: StepTimes | None = None,
        answers: QueryHandler | None = None,
        **options: Any,
    ) -> None:
        self.tasks = Tasks(store, query, tasks=tuple(TaskSpec(name, "Op", **options) for name in names or ("a",)))
        self.store = Flaky(store)
        self.executor = FakeExecutor(workers)
        self.scheduler = QuietScheduler()
        self.logs = Logs()
        self.figures = Figures()
        self.core = TaskCore(
            cast(Any, self.store),
            self.executor,
            self.scheduler,
            answers or Answers(),
            NoFiles(),
            no_decisions(),
            self.logs,
            queues=QUEUES,
            times=TaskTimes(),
            retry=DatabaseRetry("tasks", 1.0, 10.0),
            step_times=step_times,
            figures=self.figures,
        )
        self.tasks.plan()

    def step(self, now: float = 0.0) -> bool:
        return self.core.step(self.tasks.epoch, now)

    def steps_ended(self, *outcomes: str) -> list[float]:
        """Return how many steps have ended in each of these ways."""
        counts = self.figures.counts()
        return [counts[catalogue.STEPS_ENDED.name, (outcome,)] for outcome in outcomes]

    def begin(self, now: float = 0.0) -> str:
        """Have the first task run; return the token of its step."""
        self.step(now)
        return next(iter(self.executor.steps))


class Flaky:
    """The store's verbs for tasks; the next call of ``fails`` raises, after the verb was done or without it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fails: str | None = None
        self.is_done_first = False

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.store.tasks, name)
        if name != self.fails:
            return verb

        def failing(*arguments: Any, **options: Any) -> Any:
            self.fails = None
            if self.is_done_first:
                verb(*arguments, **options)
            raise DatabaseAway("db", "the test says so")

        return failing
