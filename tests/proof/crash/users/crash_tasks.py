"""A user's tasks and their trigger, which keep one journal of what they do, and a DAG of them.

Each line is one write to a file opened with O_APPEND, before the act that it tells of: it survives a SIGKILL, and
stands below what it was caused by.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import msgspec
import trio
from tests.proof.history.task_records import (
    XCOM_OF_TRIGGER,
    Began,
    Deferred,
    Ended,
    Fired,
    Fires,
    StepEnd,
    Waited,
    encode,
    name_of,
    xcom_key,
)

from headgate.tasks import DAG, BaseOperator, Context, StartTriggerArgs, TaskFailed, TaskSkipped
from headgate.tasks.errors import FAIL_METHOD
from headgate.tasks.options import TaskOptions
from headgate.triggers.base import BaseTrigger, TaskFailedEvent, TaskSkippedEvent, TaskSuccessEvent, TriggerEvent

RETRIES = 100  # more than faults of a campaign: none of its tasks ends because it has no try left
RACE_S = 0.2  # a trigger that fires when its time is over


def note(journal: str, record: msgspec.Struct) -> None:
    """Add a record to the journal."""
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, encode(record))
    finally:
        os.close(fd)


def new_name() -> str:
    """Return a name that nothing else has."""
    return f"{os.getpid()}-{time.monotonic_ns()}"


def now() -> str:
    """Return the time, for whoever reads the history."""
    return f"{time.time():.6f}"


def begin(journal: str, context: Any) -> str:
    """Journal that the execution of a task without deferrals begins; return its name, which it leaves as an XCom."""
    execution, instance = new_name(), context["ti"]
    name = name_of(f"{context['dag_id']}/{context['run_id']}/{context['task_id']}", instance.map_index)
    note(journal, Began(name, context["try_number"], execution, os.getpid(), at=now()))
    instance.xcom_push(xcom_key(0), execution)
    return execution


class CrashWait(BaseTrigger):
    """Fires after ``wait_s``; where it ``fires`` nothing, never. ``deferral`` is empty where a task begins in it."""

    def __init__(self, *, journal: str, deferral: str, fires: Fires | None = "event", wait_s: float = 0.0) -> None:
        self.journal = journal
        self.deferral = deferral
        self.fires = fires
        self.wait_s = wait_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "crash_tasks.CrashWait", dict(vars(self))

    async def run(self) -> AsyncIterator[TriggerEvent]:
        name = self.deferral or f"begun-{new_name()}"
        note(self.journal, Waited(name, at=now()))
        if self.fires is None:
            await trio.sleep_forever()
        await trio.sleep(self.wait_s)
        note(self.journal, Fired(name, self.fires, at=now()))
        match self.fires:
            case "event":
                yield TriggerEvent(name)
            case "success":
                yield TaskSuccessEvent(xcoms={XCOM_OF_TRIGGER: name})
            case "skipped":
                yield TaskSkippedEvent()
            case "failed":
                yield TaskFailedEvent()
            case "error":
                raise RuntimeError(f"{name} fails, as it was to")


class Steps(BaseOperator):
    """Defers so many times, and then comes to an end; each step leaves the name of its execution.

    ``fires`` is what the last of its triggers fires, in the first try alone where it is ``failed``; None: it times out.
    ``fails_first``: the first try fails in its last step. ``timeout_s`` is of each deferral.
    """

    def __init__(
        self,
        *,
        journal: str,
        deferrals: int = 0,
        end: StepEnd = "success",
        fires: Fires | None = "event",
        fails_first: bool = False,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.journal = journal
        self.deferrals = deferrals
        self.end = end
        self.fires = fires
        self.fails_first = fails_first
        self.wait_s = wait_s
        self.timeout = None if timeout_s is None else timedelta(seconds=timeout_s)

    def execute(self, context: Context) -> None:
        """Begin a try."""
        self._step(context, 0)

    def go_on(self, context: Context, event: Any, *, number: int, deferral: str) -> None:
        """Go on after a deferral; the event is its name, or it is another's."""
        self._step(context, number, after=deferral, event=event if isinstance(event, str) else repr(event))

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any], event: Any, context: Context) -> Any:
        """Go on after a failure as well: it is always that of the last trigger."""
        if next_method == FAIL_METHOD:
            return self._step(context, self.deferrals)
        return super().resume_execution(next_method, next_kwargs, event, context)

    def _step(self, context: Context, number: int, *, after: str = "", event: str = "") -> None:
        execution, instance = new_name(), context["ti"]
        began = Began(
            f"{context['dag_id']}/{context['run_id']}/{context['task_id']}",
            context["try_number"],
            execution,
            os.getpid(),
            number=number,
            after=after,
            event=event,
            is_resumed=number > 0,
            at=now(),
        )
        note(self.journal, began)
        instance.xcom_push(xcom_key(number), execution)
        is_first = context["try_number"] == 1
        if number < self.deferrals:
            self._defer(execution, number + 1, is_first)
        end: StepEnd = "failed" if self.fails_first and is_first else self.end
        note(self.journal, Ended(execution, end, at=now()))
        match end:
            case "skipped":
                raise TaskSkipped("as it was to")
            case "failed":
                raise RuntimeError("as it was to")
            case "failed for good":
                raise TaskFailed("as it was to")
            case "success":
                pass

    def _defer(self, execution: str, number: int, is_first: bool) -> None:
        deferral = f"d{number}-{execution}"
        fires: Fires | None = self.fires if number == self.deferrals else "event"
        if fires == "failed" and not is_first:
            fires = "success"
        note(self.journal, Deferred(execution, deferral, at=now()))
        self.defer(
            trigger=CrashWait(journal=self.journal, deferral=deferral, fires=fires, wait_s=self.wait_s),
            method_name="go_on",
            kwargs={"number": number, "deferral": deferral},
            timeout=self.timeout,
        )


class BegunInTrigger(Steps):
    """Begins in its trigger, which has no name for the deferral but one of its own."""

    def __init__(self, *, journal: str, **options: Any) -> None:
        start = StartTriggerArgs(
            trigger_cls="crash_tasks.CrashWait",
            trigger_kwargs={"journal": journal, "deferral": ""},
            next_method="go_on",
            next_kwargs={"number": 1, "deferral": ""},
        )
        super().__init__(journal=journal, deferrals=1, start_trigger_args=start, start_from_trigger=True, **options)


def crash_dag(name: str, journal: str) -> DAG:
    """Return a DAG with every way through a deferral."""
    options: TaskOptions = {"retries": RETRIES, "retry_delay": timedelta(0)}
    with DAG(name, default_args=options, max_active_runs=100) as dag:
        Steps(task_id="plain", journal=journal)
        once = Steps(task_id="once", journal=journal, deferrals=1)
        once >> Steps(task_id="after", journal=journal)
        Steps(task_id="thrice", journal=journal, deferrals=3)
        Steps(task_id="again", journal=journal, deferrals=1, fails_first=True)
        Steps(task_id="gives_up", journal=journal, deferrals=1, end="failed for good")
        Steps(task_id="times_out", journal=journal, deferrals=1, fires=None, timeout_s=RACE_S)
        Steps(task_id="races", journal=journal, deferrals=2, wait_s=RACE_S, timeout_s=RACE_S * 1.1)
        Steps(task_id="breaks", journal=journal, deferrals=1, fires="error")
        Steps(task_id="ended", journal=journal, deferrals=2, fires="success")
        Steps(task_id="skipped", journal=journal, deferrals=1, fires="skipped")
        Steps(task_id="failed", journal=journal, deferrals=1, fires="failed")
        BegunInTrigger(task_id="begun_in_trigger", journal=journal)
    return dag
