"""Stubs for the supervisor in tests: variables, connections, XComs, and the states of runs of other DAGs.

An instance of a mapped group sees the XComs of tasks of its group at its own index, so they are given as such
(`OfIndex`); those of other mapped tasks are given as lists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypedDict, assert_never

import trio

from headgate.child import queries
from headgate.protocol.encoded_values import count_items
from headgate.protocol.messages import maps
from headgate.protocol.messages.maps import Available, Counted, Elements, Worklist
from headgate.protocol.messages.queries import (
    XCOMS_PER_PAGE_MAX,
    CreateRun,
    ElementRoom,
    EmitElements,
    EncodedValue,
    GetConnection,
    GetStartSignals,
    GetTaskStates,
    GetVariable,
    GetXCom,
    GetXComs,
    ListenSignals,
    ListSignals,
    Query,
    QueryResult,
    RunCreated,
    SecretText,
    SendSignals,
    SignalPage,
    SignalsHeard,
    SignalsSent,
    StartSignal,
    StartSignals,
    TaskState,
    TaskStates,
    TriggerQuery,
    XComPage,
)
from headgate.protocol.messages.rules import SignalRule, is_met
from headgate.protocol.messages.runner import CancelReason, FinishedTrigger, FiredEvent
from headgate.protocol.messages.schedules import SignalSchedule
from headgate.protocol.messages.signals import (
    AUTOMATIC,
    DEFAULT_NAMESPACE,
    SIGNAL_BYTES_MAX,
    SIGNALS_PER_PAGE_MAX,
    Predicate,
    SentSignal,
    SignalSend,
    SignalWait,
    StoredSignal,
)
from headgate.protocol.messages.steps import Emitted
from headgate.protocol.values import decode_value, encode_value
from headgate.signals import SignalAction, SignalOperator, SignalVersion
from headgate.signals.listening import NothingMore
from headgate.signals.outgoing import encoded
from headgate.signals.rules import decide
from headgate.signals.versions import value_of
from headgate.tasks.context import RETURN_VALUE, make_context
from headgate.tasks.operator import BaseOperator
from headgate.testing.clock import SkippingClock

_UNFINISHED = frozenset({"none", "scheduled", "running", "deferred", "up_for_retry", "restarting"})

StubRun: TypeAlias = str | Mapping[str, str] | None
"""A run's state, or the states of its tasks by task id; None if the run does not exist yet."""


class StubLoop(TypedDict, total=False):
    """The iteration that a task of a loop is in, the result of the one before, and, for the gate, that of this one."""

    index: int
    previous: Any
    result: Any


@dataclass(frozen=True)
class OfIndex:
    """The place of an instance of a mapped task in a test.

    ``beside`` are the tasks of its mapped group, ``results`` what is given of iterations of its loop, by index, and
    ``result_of`` the task that leaves them. ``appended`` are the values that were appended to the task ``appended_to``.
    """

    index: int
    beside: Collection[str] = ()
    result_of: str | None = None
    results: Mapping[int, Any] = field(default_factory=dict[int, Any])
    appended_to: str | None = None
    appended: Sequence[Any] = ()


@dataclass(frozen=True)
class CreatedRun:
    """A run that a task has created."""

    dag_id: str
    run_id: str
    conf: Any
    logical_date: datetime | None


def _values_by_key(signals: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
    """Return what a test gives as the signals sent before. Raises TypeError."""
    if not isinstance(signals, Mapping):
        raise TypeError(f"signals are given as lists of values by key, as {{'labels': [1, 2]}}, not {signals!r:.100}")
    for key, values in signals.items():
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise TypeError(f"the signals of {key!r} are given as a list of values, not {values!r:.100}")
    return signals


class StubSignals:
    """Signals, as a supervisor keeps them. ``sent`` are those of the task or trigger, without what was there before."""

    def __init__(self, before: Mapping[str, Sequence[Any]]) -> None:
        self.sent: list[SignalVersion] = []
        self._versions: dict[tuple[str, str], list[SignalSend]] = {}
        for key, values in _values_by_key(before).items():
            for value in values:
                self._add(encoded(key, value, dedup=None, namespace=DEFAULT_NAMESPACE))

    def send(self, signal: SignalSend) -> SentSignal:
        """Send a signal, unless its key has one with its dedup."""
        known = self._versions.get((signal.namespace, signal.key), [])
        for version, other in enumerate(known, start=1):
            if other.dedup == signal.dedup:
                return SentSignal(version, is_new=False)
        version = self._add(signal)
        dedup = None if signal.dedup.startswith(AUTOMATIC) else signal.dedup
        value = value_of(signal.value)
        self.sent.append(SignalVersion(signal.key, value, dedup, version, namespace=signal.namespace))
        return SentSignal(version, is_new=True)

    def listed(
        self, key: str, namespace: str, *, after: int, limit: int, version: int | None
    ) -> tuple[StoredSignal, ...]:
        """Return versions of a key."""
        known = self._versions.get((namespace, key), [])
        rows = [StoredSignal(number, one.value, "", 0.0, one.is_of_run) for number, one in enumerate(known, start=1)]
        if version is not None:
            return tuple(row for row in rows if row.version == version)
        return tuple([row for row in rows if row.version > after][:limit])

    def heard(self, key: str, namespace: str, after: int | None) -> SignalsHeard:
        """Return what a task hears, which is all that there is; raise `NothingMore` after that.

        What was there before is sent as soon as the task listens, if it does not say after which version.
        """
        if after is None:
            return SignalsHeard((), 0)
        found = self.listed(key, namespace, after=after, limit=SIGNALS_PER_PAGE_MAX, version=None)
        if not found:
            raise NothingMore
        return SignalsHeard(found, found[-1].version)

    def first(self, wait: SignalWait) -> StoredSignal | None:
        """Return the first version that ends a wait; all of them were sent since the run was created."""
        for row in self.listed(wait.key, wait.namespace, after=0, limit=SIGNALS_PER_PAGE_MAX, version=None):
            if is_met(wait.predicate if wait.value is None else Predicate("equal", wait.value), row.value):
                return row
        return None

    def started(self, operator: BaseOperator) -> StartSignals:
        """Return the signals that start a task by its rules: the newest that meets each of them; and those of its run.

        A run has all that meet the schedule of its DAG; with `Latest` the newest of them, which was given last.
        """
        found: list[StartSignal] = []
        for signal in operator.signals():
            if isinstance(rule := signal.to_rule(), SignalRule):
                found += self._meeting(rule)[-1:]
        schedule = None if operator.dag is None else operator.dag.schedule
        of_run: list[StartSignal] = []
        if isinstance(schedule, SignalSchedule):
            of_run = [signal for rule in schedule.rules for signal in self._meeting(rule)]
            if schedule.contract == "latest":
                of_run = of_run[-1:]
        return StartSignals(tuple(found), of_run=tuple(of_run))

    def _meeting(self, rule: SignalRule) -> list[StartSignal]:
        versions = self._versions.get((rule.namespace, rule.key), [])
        return [
            StartSignal(rule.key, rule.namespace, version, one.value)
            for version, one in enumerate(versions, start=1)
            if is_met(rule.predicate, one.value)
        ]

    def _add(self, signal: SignalSend) -> int:
        versions = self._versions.setdefault((signal.namespace, signal.key), [])
        versions.append(signal)
        return len(versions)


def run_on_signal(operator: SignalOperator, signals: Mapping[str, Sequence[Any]]) -> list[SignalAction]:
    """Return what an operator decides about signals, given as values by key: of those that meet a rule of it, in order.

    Raises what its ``on_signal`` raises, TypeError for what is no action, and `ValueNotSerializable`.
    """
    rules = [rule for one in operator.signals() if isinstance(rule := one.to_rule(), SignalRule)]
    decided: list[SignalAction] = []
    for key, values in _values_by_key(signals).items():
        for version, value in enumerate(values, start=1):
            data = encode_value(value, where=f"the signal {key!r}", bytes_max=SIGNAL_BYTES_MAX)
            for rule in rules:
                if (rule.namespace, rule.key) == (DEFAULT_NAMESPACE, key) and is_met(rule.predicate, data):
                    decided.append(decide(operator, SignalVersion(key, value_of(data), version=version)))
    return decided


class SignalSource:
    """Stands for a wait for a signal: fires if it was sent, or lets the time pass."""

    finished: FinishedTrigger | None = None

    def __init__(self, signals: StubSignals, wait: SignalWait, clock: SkippingClock) -> None:
        self.fired: list[FiredEvent] = []
        self._signals = signals
        self._wait = wait
        self._clock = clock

    def wait(self, events: int, within_s: float) -> None:
        """Fire what ends the task, or skip the time."""
        found = self._signals.first(self._wait)
        if found is None:
            self._clock.sleep(within_s)
            return
        left = {"version": found.version, RETURN_VALUE: decode_value(found.value)}
        payload = encode_value(
            {"xcoms": {key: value for key, value in left.items() if value is not None}}, where="xcoms"
        )
        self.fired.append(FiredEvent(1, "signal", 0, 0, payload, kind="success", is_last=True))

    def end(self, reason: CancelReason) -> None:
        """Do nothing."""


class Stubs:
    """Answers what users' code asks. ``created`` are the runs it has begun so far.

    The keys of ``xcoms`` are task ids or (task id, key). ``runs`` gives the state of the run of a DAG, or a list with
    one state for each look, the last of which stays. ``signals`` are those that were sent before, by their keys.
    """

    def __init__(
        self,
        *,
        variables: Mapping[str, str] | None = None,
        connections: Mapping[str, str] | None = None,
        xcoms: Mapping[str | tuple[str, str], Any] | None = None,
        runs: Mapping[str, StubRun | Sequence[StubRun]] | None = None,
        signals: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._variables = dict(variables or {})
        self._connections = dict(connections or {})
        self.own_xcoms: dict[tuple[str, str, int], bytes] = {}  # by task, key and index
        self._xcoms = {
            (key, RETURN_VALUE) if isinstance(key, str) else key: encode_value(value, where=f"xcoms[{key!r}]")
            for key, value in (xcoms or {}).items()
        }
        self._runs: dict[str, list[StubRun]] = {
            dag_id: [states] if states is None or isinstance(states, str | Mapping) else list(states)
            for dag_id, states in (runs or {}).items()
        }
        for dag_id, looks in self._runs.items():
            if not looks:
                raise ValueError(f"runs[{dag_id!r}] is empty: give the state of the run")
        self.created: list[CreatedRun] = []
        self.elements: list[Any] = []  # that the task has emitted
        self.emitted = 0  # how often it did; the same key more than once is one element
        self.element_keys: set[bytes] = set()
        self.of_index: OfIndex | None = None
        self.signals = StubSignals(signals or {})

    def answer(self, query: Query) -> QueryResult:
        """Answer as the supervisor would. Raises `QueryFailed`."""
        match query:
            case GetVariable(name):
                return SecretText(self._variables.get(name))
            case GetConnection(name):
                return SecretText(self._connections.get(name))
            case GetXCom(task_id, key, map_index):
                return EncodedValue(self.read_xcom(task_id, key, map_index))
            case GetXComs():
                return self.read_xcoms(query)
            case EmitElements(first, values, keys):
                self.emit(Emitted(first, values, keys))
                return ElementRoom(XCOMS_PER_PAGE_MAX)
            case GetTaskStates():
                return self._task_states(query)
            case CreateRun():
                return self._create_run(query)
            case SendSignals(signals):
                return SignalsSent(tuple(map(self.signals.send, signals)))
            case ListSignals(key, namespace, after, limit, version):
                return SignalPage(self.signals.listed(key, namespace, after=after, limit=limit, version=version))
            case ListenSignals(key, namespace, after):
                return self.signals.heard(key, namespace, after)
            case GetStartSignals():
                return StartSignals()  # the context has them
            case _:
                assert_never(query)

    def emit(self, emitted: Emitted) -> None:
        """Take what a step has emitted."""
        self.emitted = emitted.first + len(emitted.values)
        if not emitted.keys:
            self.elements[emitted.first :] = map(decode_value, emitted.values)
        for value, key in zip(emitted.values, emitted.keys, strict=False):
            if key not in self.element_keys:
                self.element_keys.add(key)
                self.elements.append(decode_value(value))

    def read_xcom(self, task_id: str, key: str, map_index: int = -1) -> bytes | None:
        """Return the encoded XCom of another task; of an instance, from the list that is given for its task.

        Of the task itself it is what an earlier step has left, if that has left one.
        Of a task of the same mapped group it is given itself. Raises ValueError for what a test has to give.
        """
        if (own := self.own_xcoms.get((task_id, key, map_index))) is not None:
            return own
        of = self.of_index
        if map_index < 0:
            return self._xcoms.get((task_id, key))
        if of is None or task_id not in of.beside:
            return dict(self.read_xcoms(GetXComs(task_id, key)).values).get(map_index)
        if task_id == of.result_of and map_index in of.results:
            return encode_value(of.results[map_index], where="loop")
        if map_index != of.index:
            raise ValueError(
                f"the result of iteration {map_index} is not given: run_task(..., loop={{'previous': ...}})"
            )
        return self._xcoms.get((task_id, key))

    def read_xcoms(self, query: GetXComs) -> XComPage:
        """Return the XComs of a mapped task, or elements, given as a list."""
        task_id, key = query.task_id, query.key
        if key is None and self.of_index is not None and self.of_index.appended_to == task_id:
            values = list(self.of_index.appended)
        else:
            encoded = self._xcoms.get((task_id, key or RETURN_VALUE))
            values = [] if encoded is None else decode_value(encoded)
        if not isinstance(values, list):
            raise ValueError(f"xcoms[{task_id!r}] must be a list: the task is mapped, and each instance leaves a value")
        page = [(index, encode_value(value, where=f"xcoms[{task_id!r}]")) for index, value in enumerate(values)]
        part = tuple(page[query.after + 1 + query.offset :][: query.limit])
        return XComPage(part, len(values) if query.is_counted else 0, 0)

    async def answer_trigger(self, query: TriggerQuery) -> QueryResult:
        """Answer a trigger."""
        await trio.lowlevel.checkpoint()
        return self.answer(query)

    def _task_states(self, query: GetTaskStates) -> TaskStates:
        looks = self._runs.get(query.dag_id)
        begun = [run.run_id for run in self.created if run.dag_id == query.dag_id]
        if looks is None:
            return TaskStates(run_id=begun[-1], run_state="running") if begun else TaskStates(has_dag=False)
        state = looks.pop(0) if len(looks) > 1 else looks[0]
        if state is None:
            return TaskStates()
        run_id = query.run_id or (begun[-1] if begun else "the run")
        if isinstance(state, str):
            return TaskStates(run_id=run_id, run_state=state, missing=tuple(sorted(query.task_ids)))
        wanted = set(query.task_ids) or set(state)
        return TaskStates(
            run_id=run_id,
            run_state=_run_state(state),
            tasks=tuple((task_id, TaskState(state[task_id])) for task_id in sorted(wanted & state.keys())),
            missing=tuple(sorted(wanted - state.keys())),
        )

    def _create_run(self, query: CreateRun) -> RunCreated:
        if any((run.dag_id, run.run_id) == (query.dag_id, query.run_id) for run in self.created):
            return RunCreated(is_new=False)
        if self._runs and query.dag_id not in self._runs:
            raise queries.QueryFailed(f"there is no DAG named {query.dag_id!r}")
        conf = None if query.params is None else decode_value(query.params)
        moment = None if query.logical_date_s is None else datetime.fromtimestamp(query.logical_date_s, UTC)
        self.created.append(CreatedRun(query.dag_id, query.run_id, conf, moment))
        return RunCreated(is_new=True)


# --- instances of mapped tasks -------------------------------------------------------------------


def find_place(
    stubs: Stubs, map_index: int | None, loop: StubLoop | None, appended: Sequence[Any], operator: BaseOperator
) -> int:
    """Have the stubs answer one instance of a mapped task; return its index, -1 if the task is not mapped.

    Raises ValueError if the test does not say which instance, or over what the task is expanded, or if there is none.
    """
    name = f"the task {operator.task_id!r}"
    spec = operator.to_spec().map
    if spec is None:
        if map_index is not None:
            raise ValueError(f"{name} is not mapped: it has no instance {map_index}")
        _refuse_loop(name, loop)
        _refuse_appended(name, appended)
        return -1
    mapping, source = operator.mapping, spec.source
    beside = () if mapping is None else mapping.task_ids
    if isinstance(source, Worklist) and source.is_loop:
        _refuse_appended(name, appended)
        index = _iteration(map_index, loop or {})
        context = make_context(operator, run_id="", map_index=index)
        assert context["loop"] is not None, "it is in a loop"
        stubs.of_index = OfIndex(index, beside, context["loop"].result_of, _results(index, loop or {}))
    else:
        _refuse_loop(name, loop)
        if not isinstance(source, Worklist):
            _refuse_appended(name, appended)
        if map_index is None:
            raise ValueError(f"{name} is mapped: say which instance is run, with map_index=")
        index = map_index
        appended_to = source.task_id if isinstance(source, Worklist) else None
        stubs.of_index = OfIndex(index, beside, appended_to=appended_to, appended=list(appended))
    length = maps.available(source, lambda output: _count(output, operator, stubs)).length
    if not 0 <= index < length:
        given = "appended=" if isinstance(source, Worklist) and not source.is_loop else "these xcoms"
        whole = (
            f"{length} iterations, from 0 on" if loop is not None else f"{length} instances, from 0 on, with {given}"
        )
        raise ValueError(f"{name} has {whole}; there is none {index}")
    return index


def _iteration(map_index: int | None, loop: StubLoop) -> int:
    """Return the iteration that a test wants to run: the first one, or if it says what was left before, the second."""
    if unknown := sorted(loop.keys() - StubLoop.__annotations__.keys()):
        there = ", ".join(StubLoop.__annotations__)
        raise ValueError(f"loop has no {unknown[0]!r}; it may have {there}")
    index = loop.get("index", map_index)
    if index is None:
        index = 1 if "previous" in loop else 0
    if not isinstance(index, int) or map_index not in (None, index):
        raise ValueError(f"loop['index'] is {index!r:.100}, and map_index= is {map_index}: give one of them, an int")
    if index == 0 and loop.get("previous") is not None:
        raise ValueError("loop['previous'] is given, and the iteration 0 has none before it")
    return index


def _results(index: int, loop: StubLoop) -> dict[int, Any]:
    found = {index - 1: loop["previous"]} if "previous" in loop else {}
    return found | ({index: loop["result"]} if "result" in loop else {})


def _refuse_loop(name: str, loop: StubLoop | None) -> None:
    if loop is not None:
        raise ValueError(f"{name} is in no loop: leave out loop=")


def _refuse_appended(name: str, appended: Sequence[Any]) -> None:
    if appended:
        raise ValueError(f"{name} is expanded over no worklist: leave out appended=")


def _count(output: Counted, operator: BaseOperator, stubs: Stubs) -> Available:
    """Return how many values a test gives. Raises ValueError if it gives none, or no list or dict."""
    name = f"the task {operator.task_id!r}"
    if isinstance(output, Worklist):
        appended = 0 if stubs.of_index is None else len(stubs.of_index.appended)
        return Available(output.length_max if output.is_loop else output.given + appended, is_complete=True)
    key = RETURN_VALUE if isinstance(output, Elements) else output.key
    source = output.task_id if key == RETURN_VALUE else (output.task_id, key)
    data = stubs.read_xcom(output.task_id, key)
    if data is None:
        raise ValueError(f"{name} is expanded over an XCom that is not given: xcoms={{{source!r}: [...]}}")
    is_mapped = operator.dag is not None and operator.dag.tasks[output.task_id].is_mapped
    if is_mapped or isinstance(output, Elements):
        return Available(stubs.read_xcoms(GetXComs(output.task_id, key)).count, is_complete=True)
    if (items := count_items(data)) is None:
        raise ValueError(f"{name} is expanded over xcoms[{source!r}], which must be a list or a dict")
    return Available(items, is_complete=True)


def _run_state(tasks: Mapping[str, str]) -> str:
    states = set(tasks.values())
    if states & _UNFINISHED:
        return "running"
    return "failed" if states & {"failed", "upstream_failed"} else "success"
