"""`run_task`: one try of a task with all its deferrals, without a supervisor and without waiting.

Between two steps the same happens as in production: the trigger's kwargs, the deferral's kwargs and the event are
encoded and decoded, the trigger is constructed again and run by the runner's own host, and the task resumes in a new
operator.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

import msgspec

from headgate.child import queries
from headgate.protocol.messages.runner import FiredEvent, TriggerSpec
from headgate.protocol.messages.steps import (
    EXECUTION_TIMEOUT_OVER,
    StepDeferred,
    StepFailed,
    StepSkipped,
    StepSucceeded,
    XCom,
)
from headgate.protocol.values import decode_value, encode_value
from headgate.tasks.context import RETURN_VALUE, Context, make_context
from headgate.tasks.errors import FAIL_METHOD, REASON_EXECUTION_TIMEOUT, REASON_FAILURE, REASON_TIMEOUT
from headgate.tasks.execution import Resumption, run_step
from headgate.tasks.operator import Arrows, BaseOperator
from headgate.testing.clock import SkippingClock, skipped_wall_clock
from headgate.testing.failures import TaskNeverEnds, TaskNotSuccessful
from headgate.testing.round_trip import check_round_trip, digest_of, loaded
from headgate.testing.running import BLOCKED_AFTER, TRIGGER_ID, WITHIN, check_left, check_log, run_hosted
from headgate.testing.stubs import CreatedRun, StubRun, Stubs
from headgate.triggers import temporal
from headgate.triggers.base import BaseTrigger

DEFERRALS_MAX = 10_000  # a sensor that pokes every minute for a week

State: TypeAlias = Literal["success", "skipped", "failed"]


@dataclass(frozen=True)
class Deferral:
    """One wait of a task, and its result.

    ``event`` is the payload that the task resumed with, or that ended it. ``failure`` is the trigger's error, or that
    the deferral's timeout was over; '' if the trigger fired.
    """

    classpath: str
    trigger_kwargs: dict[str, Any]
    method_name: str
    kwargs: dict[str, Any]
    timeout: timedelta | None
    event: Any = None
    failure: str = ""


@dataclass(frozen=True)
class TaskResult:
    """Result of one try of a task.

    ``error`` and ``traceback`` are those of a failure; ``error`` is also the reason of a skip. ``may_retry`` is False
    for a failure without another try. ``skips`` are downstream tasks that are not to run. ``waited`` is the skipped
    time.
    """

    state: State
    xcoms: dict[str, Any]
    deferrals: list[Deferral]
    error: str = ""
    traceback: str = ""
    may_retry: bool = True
    skips: frozenset[str] = frozenset()
    created_runs: list[CreatedRun] = field(default_factory=list[CreatedRun])
    waited: timedelta = timedelta(0)

    @property
    def value(self) -> Any:
        """The value that the task returned. Raises `TaskNotSuccessful` if the task failed or was skipped."""
        if self.state != "success":
            raise TaskNotSuccessful(f"the task is {self.state}: {self.error}\n{self.traceback}".rstrip())
        return self.xcoms.get(RETURN_VALUE)


def run_task(
    task: Arrows | Callable[[], BaseOperator],
    *,
    variables: Mapping[str, str] | None = None,
    connections: Mapping[str, str] | None = None,
    xcoms: Mapping[str | tuple[str, str], Any] | None = None,
    runs: Mapping[str, StubRun | Sequence[StubRun]] | None = None,
    params: Mapping[str, Any] | None = None,
    logical_date: datetime | None = None,
    data_interval: tuple[datetime, datetime] | None = None,
    run_id: str = "test",
    try_number: int = 1,
    within: timedelta = WITHIN,
    blocked_after: timedelta = BLOCKED_AFTER,
) -> TaskResult:
    """Run one try of a task to its end, with every trigger it defers to; return its result::

        # test_report.py
        from report import ReadReport

        from headgate.testing import run_task


        def test_a_report_is_read(tmp_path):
            (tmp_path / "report").write_text("all is well")
            result = run_task(ReadReport(task_id="read", path=str(tmp_path / "report")))
            assert result.value == "all is well"
            assert len(result.deferrals) == 1

    ``task`` is an operator, the result of calling a ``@task`` function, or a function that creates the operator. Each
    step gets its own operator, created by that function or copied before the first step, so that attributes set on
    ``self`` do not reach the next step. A task that starts from its trigger does so here.

    Time is skipped as in `run_trigger`, and also for ``time.sleep()``, in the modules that define the operator's class
    and the function it calls. ``execution_timeout`` counts over the whole try, in skipped time; a step that exceeds it
    is not interrupted, but the try fails. ``variables`` and ``connections`` (URIs) answer the task's queries. ``xcoms``
    are those of other tasks, by task id or (task id, key). ``runs`` are the states of runs of other DAGs: a state, the
    states of tasks, or a list of these, one for each look.

    A task that fails is not an error here, but a result. Raises `TaskNeverEnds` if it waits for longer than ``within``
    (a day by default) or defers too often; `RoundTripFailed`, `LoopBlocked`, `Misbehaved` and `LeftBehind` as
    `run_trigger` does.
    """
    stubs = Stubs(variables=variables, connections=connections, xcoms=xcoms, runs=runs)
    with queries.secrets.apart(), queries.queries_handled_by(stubs.answer):
        trial_run = _Trial(_maker(task), stubs, within.total_seconds(), blocked_after.total_seconds())
        return trial_run.run(
            functools.partial(
                make_context,
                run_id=run_id,
                try_number=try_number,
                logical_date=logical_date,
                data_interval=data_interval,
                params=params,
                read_xcom=stubs.read_xcom,
            )
        )


class _Trial:
    def __init__(self, make: Callable[[], BaseOperator], stubs: Stubs, within_s: float, blocked_after_s: float) -> None:
        self._make = make
        self._stubs = stubs
        self._clock = SkippingClock()
        self._within_s = within_s
        self._blocked_after_s = blocked_after_s
        self._xcoms: dict[str, Any] = {}
        self._deferrals: list[Deferral] = []
        self._ends_at_s = math.inf  # the execution_timeout

    def run(self, context_of: Callable[[BaseOperator], Context]) -> TaskResult:
        """Run steps and waits until the task ends."""
        first = self._make()
        if first.execution_timeout is not None:
            self._ends_at_s = self._clock.now_s + first.execution_timeout.total_seconds()
        resumption: Resumption | None = None
        waiting = _start_of(first)
        while True:
            if waiting is None:
                is_failing = resumption is not None and resumption.next_method == FAIL_METHOD
                if self._left_s <= 0 and not is_failing:
                    return self._ended("failed", error=EXECUTION_TIMEOUT_OVER)
                operator = self._make()
                modules = _modules_of(operator)
                with skipped_wall_clock(type(operator), self._clock, *modules, skips_sleep=True):
                    outcome = run_step(operator, context_of(operator), resumption)
                if self._left_s < 0 and not is_failing:
                    return self._ended("failed", error=EXECUTION_TIMEOUT_OVER)
                self._take(outcome.xcoms)
                if not isinstance(outcome, StepDeferred):
                    return self._result(outcome)
                waiting = outcome
            if len(self._deferrals) >= DEFERRALS_MAX:
                raise TaskNeverEnds(f"the task {first.task_id!r} has deferred {DEFERRALS_MAX:,} times and does not end")
            ended = self._wait(first.task_id, waiting)
            waiting = None
            if isinstance(ended, TaskResult):
                return ended
            resumption = ended

    @property
    def _left_s(self) -> float:
        """The time that is left until the end of the execution_timeout."""
        return self._ends_at_s - self._clock.now_s

    def _take(self, xcoms: Sequence[XCom]) -> None:
        self._xcoms.update((xcom.key, decode_value(xcom.value)) for xcom in xcoms)

    def _result(self, outcome: StepSucceeded | StepSkipped | StepFailed) -> TaskResult:
        match outcome:
            case StepSucceeded():
                return self._ended("success", skips=frozenset(outcome.skips))
            case StepSkipped():
                return self._ended("skipped", error=outcome.reason)
            case StepFailed():
                may_retry = outcome.may_retry
                return self._ended("failed", error=outcome.error, traceback=outcome.traceback, may_retry=may_retry)

    def _ended(self, state: State, **fields: Any) -> TaskResult:
        return TaskResult(
            state=state,
            xcoms=self._xcoms,
            deferrals=self._deferrals,
            created_runs=self._stubs.created,
            waited=timedelta(seconds=self._clock.now_s),
            **fields,
        )

    # --- the wait ---------------------------------------------------------------------------------

    def _wait(self, task_id: str, deferred: StepDeferred) -> Resumption | TaskResult:
        """Run the trigger until its first event, failure or timeout; return the resumption, or the result."""
        name = f"the trigger of {task_id!r}"
        spec = TriggerSpec(TRIGGER_ID, "run-1", name, deferred.classpath, deferred.kwargs, takes_one_event=True)
        trigger = loaded(spec)
        spec = msgspec.structs.replace(spec, stream=digest_of(trigger))
        check_round_trip(trigger)
        left_s, try_left_s, began_s = self._within_s - self._clock.now_s, self._left_s, self._clock.now_s
        timeout_s = math.inf if deferred.timeout_s is None else deferred.timeout_s
        event, failure = self._first_event(spec, trigger, min(left_s, timeout_s, try_left_s))
        if event is not None:
            return self._fired(deferred, event)
        if failure is None:
            if min(timeout_s, try_left_s) > left_s:
                raise TaskNeverEnds(
                    f"{name}, {deferred.classpath}, has fired nothing within {timedelta(seconds=self._within_s)}"
                )
            if try_left_s <= timeout_s:
                over = f"{EXECUTION_TIMEOUT_OVER}: the trigger that it waited for had not fired"
                failure = (over, "", REASON_EXECUTION_TIMEOUT)
            else:
                over = "the trigger had not fired when the timeout of the deferral was over"
                failure = (over, "", REASON_TIMEOUT)
        error, trace, reason = failure
        self._note(deferred, failure=error)
        kwargs = {"error": error, "traceback": trace, "reason": reason, "waited_s": self._clock.now_s - began_s}
        return Resumption(FAIL_METHOD, encode_value(kwargs, where="kwargs"))

    def _fired(self, deferred: StepDeferred, event: FiredEvent) -> Resumption | TaskResult:
        payload = decode_value(event.payload)
        self._note(deferred, event=payload)
        if event.kind == "event":
            return Resumption(deferred.next_method, deferred.next_kwargs, event.payload)
        self._xcoms.update((payload or {}).get("xcoms") or {})
        if event.kind == "success":
            return self._ended("success")
        if event.kind == "skipped":
            return self._ended("skipped", error="its trigger fired a TaskSkippedEvent")
        return self._ended("failed", error="its trigger fired a TaskFailedEvent")

    def _note(self, deferred: StepDeferred, **came: Any) -> None:
        timeout = None if deferred.timeout_s is None else timedelta(seconds=deferred.timeout_s)
        kwargs, next_kwargs = decode_value(deferred.kwargs), decode_value(deferred.next_kwargs)
        self._deferrals.append(Deferral(deferred.classpath, kwargs, deferred.next_method, next_kwargs, timeout, **came))

    def _first_event(
        self, spec: TriggerSpec, trigger: BaseTrigger, within_s: float
    ) -> tuple[FiredEvent | None, tuple[str, str, str] | None]:
        hosted, records, left = run_hosted(
            trigger,
            spec,
            self._clock,
            events=1,
            within_s=within_s,
            blocked_after_s=self._blocked_after_s,
            stubs=self._stubs,
            reason="timeout",  # nothing waits for it any more, and no user acted on it
        )
        check_log(records)
        check_left(spec.name, left)
        fired, finished = hosted.fired[TRIGGER_ID], hosted.finished.get(TRIGGER_ID)
        if fired:
            return fired[0], None
        if finished is not None and finished.outcome == "failed":
            return None, (finished.error, finished.traceback, REASON_FAILURE)
        return None, None


def _maker(task: Arrows | Callable[[], BaseOperator]) -> Callable[[], BaseOperator]:
    """Return a function that creates the operator of a step."""
    if not isinstance(task, Arrows):
        return task
    pristine = _copied(task._operator())
    return lambda: _copied(pristine)


def _copied(operator: BaseOperator) -> BaseOperator:
    """Return a deep copy that shares only the DAG, and objects that cannot be copied, such as locks."""
    shared: list[object] = [] if operator.dag is None else [operator.dag, *operator.dag.tasks.values()]
    again = copy.copy(operator)
    for name, value in vars(operator).items():
        memo = {id(each): each for each in shared}
        with suppress(Exception):  # an author's object may raise anything when it is copied
            setattr(again, name, copy.deepcopy(value, memo))
    return again


def _start_of(operator: BaseOperator) -> StepDeferred | None:
    """Return the first wait of a task that starts in its trigger."""
    start = operator.to_spec().start_trigger
    if start is None:
        return None
    return StepDeferred(start.classpath, start.kwargs, start.next_method, start.next_kwargs, start.timeout_s)


def _modules_of(operator: BaseOperator) -> tuple[str, ...]:
    """Return the modules in which time is skipped, besides those of the operator's class."""
    function = getattr(operator, "python_callable", None)
    module = None if function is None else getattr(inspect.unwrap(function), "__module__", None)
    return (temporal.__name__, *([module] if isinstance(module, str) else []))
