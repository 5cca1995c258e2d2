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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from headgate.child import queries
from headgate.protocol.encoded_values import set_items
from headgate.protocol.messages.runner import FiredEvent, TriggerSpec
from headgate.protocol.messages.signals import SignalWait
from headgate.protocol.messages.steps import (
    EXECUTION_TIMEOUT_OVER,
    StepDeferred,
    StepFailed,
    StepHandled,
    StepOutcome,
    StepSkipped,
    StepSucceeded,
)
from headgate.protocol.messages.task_streams import StreamPart
from headgate.protocol.values import decode_value, encode_value
from headgate.signals import SignalVersion
from headgate.tasks.context import RETURN_VALUE, Context, TaskStream, make_context
from headgate.tasks.decorators import TaskFunction
from headgate.tasks.errors import FAIL_METHOD, REASON_EXECUTION_TIMEOUT, REASON_FAILURE, REASON_TIMEOUT
from headgate.tasks.execution import Resumption, run_step
from headgate.tasks.graph import Arrows
from headgate.tasks.groups.groups import GroupResult, TaskGroup
from headgate.tasks.maps.operators import MappedOperator
from headgate.tasks.operator import BaseOperator
from headgate.testing.clock import SkippingClock, skipped_wall_clock
from headgate.testing.failures import TaskNeverEnds, TaskNotSuccessful
from headgate.testing.round_trip import check_round_trip, check_start, digest_of, loaded
from headgate.testing.running import (
    BLOCKED_AFTER,
    EVENTS_MAX,
    TRIGGER_ID,
    WITHIN,
    HostedRun,
    check_left,
    check_log,
    hosted_run,
)
from headgate.testing.stubs import CreatedRun, SignalSource, StubLoop, StubRun, Stubs, find_place
from headgate.testing.task_streams import FedSource, Source, TrialStream
from headgate.triggers import temporal

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
    time. ``handled`` are the payloads of the events of its stream that the task has handled, in this try and those
    before it, ``elements`` are what it has emitted, and ``stream_state`` is the state that it has left; ``stream`` is
    for ``run_task(after=)``. ``map_name`` is the name of the instance of a mapped task, None if it has none.
    ``appended`` are the values that it has appended to its worklist, each with its key; the gate of a loop appends one
    if there is to be another iteration. ``signals`` are those that the task has sent, at once or with its outcomes.
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
    handled: list[Any] = field(default_factory=list[Any])
    stream_state: dict[str, Any] | None = None
    elements: list[Any] = field(default_factory=list[Any])
    signals: list[SignalVersion] = field(default_factory=list[SignalVersion])
    stream: TrialStream | None = field(default=None, repr=False, compare=False)
    map_name: str | None = None
    appended: list[tuple[Any, str | None]] = field(default_factory=list[tuple[Any, "str | None"]])
    _element_keys: frozenset[bytes] = field(default=frozenset(), repr=False, compare=False)

    @property
    def value(self) -> Any:
        """The value that the task returned. Raises `TaskNotSuccessful` if the task failed or was skipped."""
        if self.state != "success":
            raise TaskNotSuccessful(f"the task is {self.state}: {self.error}\n{self.traceback}".rstrip())
        return self.xcoms.get(RETURN_VALUE)


def run_task(
    task: Arrows | Callable[[], Arrows],
    *,
    variables: Mapping[str, str] | None = None,
    connections: Mapping[str, str] | None = None,
    xcoms: Mapping[str | tuple[str, str], Any] | None = None,
    runs: Mapping[str, StubRun | Sequence[StubRun]] | None = None,
    signals: Mapping[str, Sequence[Any]] | None = None,
    params: Mapping[str, Any] | None = None,
    logical_date: datetime | None = None,
    data_interval: tuple[datetime, datetime] | None = None,
    run_id: str = "test",
    try_number: int = 1,
    map_index: int | None = None,
    loop: StubLoop | None = None,
    appended: Sequence[Any] = (),
    events: Sequence[Any] | None = None,
    after: TaskResult | None = None,
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
    is not interrupted, but the try fails. ``variables``, ``connections`` (URIs), ``xcoms`` (by task id, or that and a
    key), ``signals`` (values sent before, by key; they meet the task's rules) and ``runs`` (of each other DAG a state,
    the states of its tasks, or a list of these, one for each look) answer the task's queries. Of a mapped task the
    instance ``map_index`` is run. ``xcoms`` has what it is expanded over, as a list if that is mapped or emitted, and
    of tasks of its own group the values at its index. ``appended`` are earlier values of its worklist, ``loop`` is an
    iteration. Raises ValueError for an instance that there is not, or is not given.

    A task that defers with ``stream=`` takes the events of its trigger as they are fired, and so does the next try of
    one that has failed, if the result of the failed try is given as ``after``: what was handled is not handled again.
    ``events`` stand for the trigger: payloads, `TriggerEvent` objects, last perhaps its error. No rule for poison.

    A task that fails is not an error here, but a result. Raises `TaskNeverEnds` if it waits for longer than ``within``
    (a day by default) or defers too often; `RoundTripFailed`, `LoopBlocked`, `Misbehaved` and `LeftBehind` as
    `run_trigger` does.
    """
    stubs = Stubs(variables=variables, connections=connections, xcoms=xcoms, runs=runs, signals=signals)
    with queries.secrets.apart(), queries.queries_handled_by(stubs.answer):
        trial_run = _Trial(_maker(task), stubs, within.total_seconds(), blocked_after.total_seconds(), events, after)
        context_of = functools.partial(
            _context_of,
            stubs,
            run_id=run_id,
            try_number=try_number,
            logical_date=logical_date,
            data_interval=data_interval,
            params=params,
        )
        return trial_run.run(functools.partial(find_place, stubs, map_index, loop, appended), context_of)


def _context_of(stubs: Stubs, operator: BaseOperator, **of_step: Any) -> Context:
    reading: Any = {"read_xcom": stubs.read_xcom, "read_xcoms": stubs.read_xcoms}
    return make_context(operator, signals=stubs.signals.started(operator), **reading, **of_step)


class _Patience(NamedTuple):
    """The limits of a wait, in seconds: those of the test, of the deferral, and of the try."""

    within_s: float
    timeout_s: float
    try_s: float


class _Trial:
    def __init__(
        self,
        make: Callable[[], BaseOperator],
        stubs: Stubs,
        within_s: float,
        blocked_after_s: float,
        events: Sequence[Any] | None = None,
        after: TaskResult | None = None,
    ) -> None:
        self._make = make
        self._stubs = stubs
        self._clock = SkippingClock()
        self._within_s = within_s
        self._blocked_after_s = blocked_after_s
        self._xcoms: dict[str, Any] = {}
        self._deferrals: list[Deferral] = []
        self._ends_at_s = math.inf  # the execution_timeout
        self._given_events = events
        self._stream: TrialStream | None = None
        self._is_stream_over = False
        self._map_name: str | None = None
        self._appended: list[tuple[Any, str | None]] = []
        if after is not None and after.stream is not None:
            self._stream = after.stream
            if after.stream.handled:
                self._xcoms = dict(after.xcoms)
                stubs.elements += after.elements
                stubs.emitted = len(after.elements)
                stubs.element_keys |= after._element_keys

    def run(self, place_of: Callable[[BaseOperator], int], context_of: Callable[..., Context]) -> TaskResult:
        """Run steps and waits until the task ends. Raises ValueError for an instance that it does not have."""
        first = self._make()
        self._context_of = functools.partial(context_of, map_index=place_of(first))
        if first.execution_timeout is not None:
            self._ends_at_s = self._clock.now_s + first.execution_timeout.total_seconds()
        resumption: Resumption | None = None
        waiting, self._signal = self._start_of(first)
        while True:
            if waiting is None:
                stream = None if self._is_stream_over else self._stream
                outcome = self._step(resumption, None if stream is None else stream.part(self._clock))
                if not isinstance(outcome, StepDeferred):
                    return outcome if isinstance(outcome, TaskResult) else self._result(outcome)
                waiting = outcome
            if len(self._deferrals) >= DEFERRALS_MAX:
                raise TaskNeverEnds(f"the task {first.task_id!r} has deferred {DEFERRALS_MAX:,} times and does not end")
            name = f"the trigger of {first.task_id!r}"
            ended = self._wait(name, waiting) if waiting.stream is None else self._take_stream(name, waiting)
            if isinstance(ended, TaskResult):
                return ended
            waiting, resumption = (ended, None) if isinstance(ended, StepDeferred) else (None, ended)

    def _start_of(self, operator: BaseOperator) -> tuple[StepDeferred | None, SignalWait | None]:
        """Return the first wait of a task that starts in its trigger, and the signal that it waits for, if it does."""
        start = operator.to_spec().start_trigger
        if start is None:
            return None, None
        kwargs = start.kwargs
        if start.own is not None:
            assert isinstance(operator, MappedOperator)
            context = self._context_of(operator, stream=None)
            value = encode_value(operator.own_value(context), where="the value of the instance")
            kwargs = set_items(kwargs, dict.fromkeys(start.own.names, value))
            check_start(operator, context, kwargs)
        shared = (start.classpath, kwargs, start.next_method, start.next_kwargs, start.timeout_s)
        return StepDeferred(*shared, stream=start.stream), start.signal

    def _step(self, resumption: Resumption | None, part: StreamPart | None) -> StepOutcome | TaskResult:
        """Run one step; return its outcome, or the result of a try whose time is over."""
        is_failing = resumption is not None and resumption.next_method == FAIL_METHOD
        if self._left_s <= 0 and not is_failing:
            return self._ended("failed", error=EXECUTION_TIMEOUT_OVER)
        operator = self._make()
        kind = operator.kind if isinstance(operator, MappedOperator) else type(operator)
        with skipped_wall_clock(kind, self._clock, *_modules_of(operator), skips_sleep=True):
            context = self._context_of(operator, stream=TaskStream.of(part))
            outcome = run_step(operator, context, resumption, part, emitted=self._stubs.emitted)
        self._map_name = context["ti"].map_name or self._map_name
        if self._left_s < 0 and not is_failing:
            return self._ended("failed", error=EXECUTION_TIMEOUT_OVER)
        self._xcoms.update((xcom.key, decode_value(xcom.value)) for xcom in outcome.xcoms)
        for xcom in outcome.xcoms:
            self._stubs.own_xcoms[operator.task_id, xcom.key, context["ti"].map_index] = xcom.value
        if self._stream is not None:
            self._stream.move(outcome.handled)
        if not isinstance(outcome, StepFailed | StepDeferred) and outcome.appended is not None:
            for value, key in context["ti"].appended_pairs():
                if key is None or all(key != other for _, other in self._appended):
                    self._appended.append((decode_value(value), key))
            of_index, limit = self._stubs.of_index, outcome.appended.length_max
            before = 0 if of_index is None else len(of_index.appended)
            if before + len(self._appended) > limit:
                more = f"it appends {len(self._appended):,} values to the {before:,} that are appended to"
                return self._ended("failed", error=f"{more} {outcome.appended.task_id!r}; the limit is {limit:,}")
        if outcome.emitted is not None:
            self._stubs.emit(outcome.emitted)
        if not isinstance(outcome, StepFailed):
            for signal in outcome.signals:
                self._stubs.signals.send(signal)
        return outcome

    @property
    def _left_s(self) -> float:
        """The time that is left until the end of the execution_timeout."""
        return self._ends_at_s - self._clock.now_s

    def _result(self, outcome: StepSucceeded | StepSkipped | StepFailed | StepHandled) -> TaskResult:
        match outcome:
            case StepSucceeded():
                return self._ended("success", skips=frozenset(outcome.skips))
            case StepSkipped():
                return self._ended("skipped", error=outcome.reason)
            case StepFailed():
                may_retry = outcome.may_retry
                return self._ended("failed", error=outcome.error, traceback=outcome.traceback, may_retry=may_retry)
            case StepHandled():
                raise AssertionError("a step without a stream has handled events")

    def _ended(self, state: State, **fields: Any) -> TaskResult:
        if self._stream is not None:
            left = self._stream.state
            fields |= {"handled": self._stream.payloads, "stream": self._stream}
            fields["stream_state"] = None if left is None else decode_value(left)
        return TaskResult(
            state=state,
            xcoms=self._xcoms,
            deferrals=self._deferrals,
            created_runs=self._stubs.created,
            elements=list(self._stubs.elements),
            _element_keys=frozenset(self._stubs.element_keys),
            signals=list(self._stubs.signals.sent),
            waited=timedelta(seconds=self._clock.now_s),
            map_name=self._map_name,
            appended=self._appended,
            **fields,
        )

    # --- the wait ---------------------------------------------------------------------------------

    @contextmanager
    def _started(self, name: str, deferred: StepDeferred) -> Generator[Source]:
        """Start the trigger of a deferral, or what stands for it; end it when the ``with`` block is left."""
        if self._signal is not None:
            yield SignalSource(self._stubs.signals, self._signal, self._clock)
            return
        takes_one = deferred.stream is None
        spec = TriggerSpec(
            TRIGGER_ID,
            "run-1",
            name,
            deferred.classpath,
            deferred.kwargs,
            takes_one_event=takes_one,
            credit=None if takes_one else EVENTS_MAX,
        )
        trigger = loaded(spec)
        spec = msgspec.structs.replace(spec, stream=digest_of(trigger))
        check_round_trip(trigger)
        if self._given_events is not None:
            yield FedSource(spec, self._given_events)
            return
        last_event = None if takes_one or self._stream is None else self._stream.last_event
        running = hosted_run(
            trigger,
            spec,
            self._clock,
            blocked_after_s=self._blocked_after_s,
            stubs=self._stubs,
            last_event=last_event,
        )
        with running as run:
            yield run
            run.end("timeout")  # nothing waits for it any more, and no user acted on it
        check_log(run.records)
        check_left(name, run.left)

    def _wait(self, name: str, deferred: StepDeferred) -> Resumption | TaskResult:
        """Run the trigger until its first event, failure or timeout; return the resumption, or the result."""
        patience = self._patience(deferred)
        with self._started(name, deferred) as source:
            source.wait(1, min(patience))
        if source.fired:
            return self._fired(deferred, source.fired[0])
        return self._failed(name, deferred, source, patience)

    def _patience(self, deferred: StepDeferred) -> _Patience:
        timeout_s = math.inf if deferred.timeout_s is None else deferred.timeout_s
        return _Patience(self._within_s - self._clock.now_s, timeout_s, self._left_s)

    def _failed(self, name: str, deferred: StepDeferred, source: Source, patience: _Patience) -> Resumption:
        """Return how a task goes on whose trigger has failed, or has not fired in time. Raises `TaskNeverEnds`."""
        trace = ""
        if source.finished is not None and source.finished.outcome == "failed":
            error, trace, reason = source.finished.error, source.finished.traceback, REASON_FAILURE
        elif patience.within_s < min(patience.timeout_s, patience.try_s):
            raise TaskNeverEnds(
                f"{name}, {deferred.classpath}, has fired nothing within {timedelta(seconds=self._within_s)}"
            )
        elif patience.try_s <= patience.timeout_s:
            error = f"{EXECUTION_TIMEOUT_OVER}: what it waited for had not come"
            reason = REASON_EXECUTION_TIMEOUT
        else:
            error, reason = "what it waited for had not come when the timeout of the deferral was over", REASON_TIMEOUT
        self._note(deferred, failure=error)
        began_s = self._within_s - patience.within_s
        kwargs = {"error": error, "traceback": trace, "reason": reason, "waited_s": self._clock.now_s - began_s}
        return Resumption(FAIL_METHOD, encode_value(kwargs, where="kwargs"))

    def _take_stream(self, name: str, deferred: StepDeferred) -> Resumption | TaskResult | StepDeferred:
        """Hand the events of the trigger to steps until the stream is over; return how the task goes on, or ends."""
        assert deferred.stream is not None
        stream = self._stream = TrialStream() if self._stream is None else self._stream.copy()
        resumption = Resumption(deferred.next_method, deferred.next_kwargs)
        with self._started(name, deferred) as source:
            while len(stream.payloads) < EVENTS_MAX:
                patience = self._patience(deferred)
                is_ready = stream.wait(source, deferred.stream, self._clock, min(patience))
                if not is_ready:
                    return self._failed(name, deferred, source, patience)
                if stream.waiting and stream.waiting[0].kind != "event":
                    return self._fired(deferred, stream.waiting[0])
                part = stream.part(self._clock, deferred.stream, source)
                with source.hosted.snapshot.not_counting() if isinstance(source, HostedRun) else nullcontext():
                    outcome = self._step(resumption, part)
                if not isinstance(outcome, StepHandled):
                    self._is_stream_over = True
                    self._note(deferred)
                    return outcome if isinstance(outcome, TaskResult | StepDeferred) else self._result(outcome)
        raise TaskNeverEnds(f"the task has handled {EVENTS_MAX:,} events of {name} and does not end")

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


def _maker(task: Arrows | Callable[[], Arrows]) -> Callable[[], BaseOperator]:
    """Return a function that creates the operator of a step."""
    if isinstance(task, TaskFunction):
        raise TypeError(f"{task.__name__} makes a task: give the task itself, dag.tasks[...]")
    if not isinstance(task, Arrows):
        return lambda: _only_task(task())
    pristine = _copied(_only_task(task))
    return lambda: _copied(pristine)


def _only_task(task: Arrows) -> BaseOperator:
    """Return the operator to run. Raises ValueError for a task group: the test has to say which of its tasks."""
    group = task.group if isinstance(task, GroupResult) else task
    if isinstance(group, TaskGroup):
        names = ", ".join(repr(one.task_id) for one in group.tasks)
        raise ValueError(f"the task group {group.group_id!r} has the tasks {names}: give one of them, dag.tasks[...]")
    return task.first_tasks()[0]


def _copied(operator: BaseOperator) -> BaseOperator:
    """Return a deep copy that shares only the DAG, and objects that cannot be copied, such as locks."""
    shared: list[object] = [] if operator.dag is None else [operator.dag, *operator.dag.tasks.values()]
    again = copy.copy(operator)
    for name, value in vars(operator).items():
        memo = {id(each): each for each in shared}
        with suppress(Exception):  # an author's object may raise anything when it is copied
            setattr(again, name, copy.deepcopy(value, memo))
    return again


def _modules_of(operator: BaseOperator) -> tuple[str, ...]:
    """Return the modules in which time is skipped, besides those of the operator's class."""
    function = getattr(operator, "python_callable", None)
    module = None if function is None else getattr(inspect.unwrap(function), "__module__", None)
    return (temporal.__name__, *([module] if isinstance(module, str) else []))
