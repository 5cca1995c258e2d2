"""Emitting: what goes with the outcome of a step, what is sent before it, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.tasks.test_streaming import part

from headgate.child import queries
from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.maps import Elements, MapSpec, Output
from headgate.protocol.messages.queries import ElementRoom, EmitElements, GetXComs, Query, QueryResult, XComPage
from headgate.protocol.messages.steps import Emitted, StepFailed, StepHandled, StepOutcome, StepSucceeded, XCom
from headgate.protocol.values import decode_value
from headgate.tasks import DAG, BaseOperator, BranchPythonOperator, TriggerOperator, XComArg, task
from headgate.tasks.context import make_context
from headgate.tasks.execution import Resumption, run_step
from headgate.tasks.maps import elements
from headgate.tasks.maps.elements import Emissions
from headgate.testing import run_task
from headgate.triggers.temporal import TimeDeltaTrigger

SECOND = timedelta(seconds=1)


class Supervisor:
    """Takes elements as a supervisor does, and has room as it is told."""

    def __init__(self, *rooms: int) -> None:
        self.sent: list[EmitElements] = []
        self._rooms = list(rooms)
        self.heard, self.awaited, self.refused = threading.Event(), 0, 0  # elements

    def answer(self, query: Query) -> QueryResult:
        assert isinstance(query, EmitElements)
        self.sent.append(query)
        if self.awaited and len(self.values) >= self.awaited:
            self.heard.set()
        if self.refused and len(self.values) >= self.refused:
            raise queries.QueryFailed("no")
        return ElementRoom(self._rooms.pop(0) if self._rooms else 1000)

    @property
    def values(self) -> list[Any]:
        found: list[Any] = []
        for query in self.sent:
            assert query.first == len(found) + self.sent[0].first, "no gap"
            found += map(decode_value, query.values)
        return found


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    taking = Supervisor()
    with queries.queries_handled_by(taking.answer):
        yield taking


class Load(BaseOperator):
    """Emits the numbers of each event, and fails on a text."""

    emits = True

    def execute(self, context: Any) -> str:
        for number in range(3):
            self.emit(number)
        return "done"

    def handle_trigger_events(self, events: Any, context: Any, count: int = 0) -> dict[str, int]:
        for event in events:
            for number in event.payload:
                self.emit(number)
            self.handled(event, count=count + 1)
            if event.payload == [7]:
                raise ValueError("no 7")
        return {"count": count}

    def stream_ended(self, context: Any, count: int = 0) -> None:
        self.emit("the end")


class Stream(Load):
    """The same, of a stream."""

    def execute(self, context: Any) -> Any:
        self.defer(trigger=TimeDeltaTrigger(SECOND), stream=True)


def step(operator: BaseOperator, *, given: Any = None, emitted: int = 0) -> StepOutcome:
    resumption = None if given is None else Resumption("handle_trigger_events", b"{}")
    return run_step(operator, make_context(operator, run_id="r"), resumption, given, emitted=emitted)


# --- with the outcome ----------------------------------------------------------------------------


def test_what_execute_emits_goes_with_its_outcome_behind_that_of_earlier_steps() -> None:
    outcome = step(Load(task_id="load"), emitted=5)
    assert outcome == StepSucceeded((XCom("return_value", b'"done"'),), emitted=Emitted(5, (b"0", b"1", b"2")))


def test_what_a_handler_emits_goes_with_the_events_that_are_handled() -> None:
    outcome = step(Load(task_id="load"), given=part([1, 2], [3]))
    assert isinstance(outcome, StepHandled)
    assert outcome.emitted == Emitted(0, (b"1", b"2", b"3"))
    failed = step(Load(task_id="load"), given=part([1], [7], [8]))
    assert isinstance(failed, StepFailed)
    assert (failed.handled is not None and failed.handled.count) == 2
    assert failed.emitted == Emitted(0, (b"1", b"7")), "what was emitted for events that are handled"


def test_what_is_emitted_for_an_event_that_is_not_handled_is_left_out() -> None:
    class Fails(Load):
        def handle_trigger_events(self, events: Any, context: Any) -> None:  # type: ignore[override]
            self.emit(1)
            self.handled(events[0])
            self.emit(2)
            raise ValueError("boom")

    outcome = step(Fails(task_id="load"), given=part([1], [2]))
    assert outcome.emitted == Emitted(0, (b"1",))


def test_the_end_of_a_stream_may_emit() -> None:
    outcome = step(Load(task_id="load"), given=part([1], is_over=True))
    assert isinstance(outcome, StepSucceeded)
    assert outcome.emitted == Emitted(0, (b"1", b'"the end"'))


def test_a_step_that_fails_leaves_nothing_of_what_it_has_not_sent() -> None:
    class Fails(Load):
        def execute(self, context: Any) -> str:
            super().execute(context)
            raise ValueError("boom")

    assert step(Fails(task_id="load")).emitted == Emitted(0, ())


def test_execute_may_not_emit_again_if_the_stream_goes_on() -> None:
    operator = Load(task_id="load")
    outcome = run_step(operator, make_context(operator, run_id="r"), None, part(handled=3), emitted=6)
    assert isinstance(outcome, StepFailed)
    assert "emitted in an earlier try" in outcome.error
    assert isinstance(run_step(operator, make_context(operator, run_id="r"), None, part()), StepSucceeded)


# --- before the outcome --------------------------------------------------------------------------


def generated(function: Callable[[], Any]) -> BaseOperator:
    with DAG("d"):
        return task(function)().operator


def test_a_generator_sends_what_it_yields_and_returns_its_result(supervisor: Supervisor) -> None:
    def numbers() -> Generator[int, None, str]:
        yield 1
        assert supervisor.values == [1], "sent before it goes on"
        yield from (2, 3)
        return "all"

    outcome = step(generated(numbers), emitted=4)
    assert isinstance(outcome, StepSucceeded)
    assert outcome.xcoms == (XCom("return_value", b'"all"'),)
    assert outcome.emitted is not None
    assert supervisor.values + [decode_value(value) for value in outcome.emitted.values] == [1, 2, 3]
    assert supervisor.sent[0].first == 4
    assert outcome.emitted.first + len(outcome.emitted.values) == 7


def in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first element take 50 ms, so that for as long the next ones are not sent with each."""
    times = [0.0, 0.0]
    monkeypatch.setattr(time, "monotonic", lambda: times.pop(0) if times else 0.05)


def test_a_generator_that_fails_has_sent_what_it_has_yielded(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_moment(monkeypatch)

    def numbers() -> Iterator[int]:
        yield from (1, 2, 3)
        assert supervisor.values == [1]
        raise ValueError("boom")

    outcome = step(generated(numbers))
    assert isinstance(outcome, StepFailed)
    assert "boom" in outcome.error
    assert (supervisor.values, outcome.emitted) == ([1, 2, 3], Emitted(3, ()))


def test_what_came_too_fast_is_sent_while_a_generator_works_on_the_next(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_moment(monkeypatch)

    def numbers() -> Iterator[int]:
        yield from (1, 2, 3)
        assert supervisor.heard.wait(10.0)
        assert supervisor.values == [1, 2, 3]

    supervisor.awaited = 3
    outcome = step(generated(numbers))
    assert isinstance(outcome, StepSucceeded), "it was not sent only because the generator has failed"
    assert (outcome.emitted, [len(query.values) for query in supervisor.sent]) == (Emitted(3, ()), [1, 2])


def test_a_rest_that_is_refused_fails_the_step(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_moment(monkeypatch)

    def numbers() -> Iterator[int]:
        yield from (1, 2)
        assert supervisor.heard.wait(10.0)

    supervisor.awaited = supervisor.refused = 2
    outcome = step(generated(numbers))
    assert isinstance(outcome, StepFailed)
    assert "QueryFailed: no" in outcome.error


def test_so_much_is_sent_at_once_and_no_more(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "SENT_MAX", 10)
    monkeypatch.setattr(elements, "SENT_BYTES_MAX", 1000)
    emissions = Emissions(0)
    for number in range(25):
        emissions.add(number)
    assert [len(query.values) for query in supervisor.sent] == [10, 10]
    for _ in range(3):
        emissions.add("x" * 400)
    assert [len(query.values) for query in supervisor.sent[2:]] == [7]
    assert supervisor.values == [*range(25), "x" * 400, "x" * 400]


def test_who_is_far_ahead_waits_and_goes_on_when_there_is_room_or_it_takes_too_long() -> None:
    slept: list[float] = []
    taking = Supervisor(0, -5, 3)
    with queries.queries_handled_by(taking.answer):
        emissions = Emissions(0, slept.append)
        emissions.add(1)
        emissions.send()
        assert (slept, taking.values) == ([elements.ROOM_LOOK_S] * 2, [1])
        slept.clear()
        taking._rooms = [0] * 1000
        emissions.add(2)
        emissions.send()
        assert sum(slept) == elements.ROOM_WAIT_S
        assert taking.values == [1, 2]
        for number in range(elements.REGARDLESS):
            emissions.add(number)
        emissions.send()
        assert sum(slept) == 2 * elements.ROOM_WAIT_S, "it has waited once for all of these"
        assert len(taking.values) == elements.REGARDLESS + 2


# --- what is refused -----------------------------------------------------------------------------


def test_an_element_has_a_key_or_none_has(supervisor: Supervisor) -> None:
    class Keyed(BaseOperator):
        emits = True

        def __init__(self, pairs: Any, **options: Any) -> None:
            super().__init__(**options)
            self.pairs = pairs

        def execute(self, context: Any) -> None:
            for number, key in self.pairs:
                self.emit(number, key=key)

    def emitted(*pairs: tuple[Any, Any]) -> StepOutcome:
        with DAG("d"):
            keyed = Keyed(pairs, task_id="t")
        return run_step(keyed, make_context(keyed, run_id="r"))

    once, again = emitted((1, "a"), (2, "b")), emitted((3, "b"))
    assert isinstance(once, StepSucceeded)
    assert isinstance(again, StepSucceeded)
    assert once.emitted is not None
    assert again.emitted is not None
    assert (once.emitted.values, once.emitted.keys[1:]) == ((b"1", b"2"), again.emitted.keys)
    for pairs, error in (
        (((1, "a"), (2, None)), "KeysMixed: elements are emitted with keys and without"),
        (((1, 2),), "TypeError: the key of an element must be a str, not 2"),
        (((1, ""),), "ValueError: the key of an element must have 1..8192 characters, not 0"),
    ):
        refused = emitted(*pairs)
        assert isinstance(refused, StepFailed)
        assert refused.error.startswith(error)


def test_run_task_knows_elements_by_their_keys() -> None:
    class Keyed(BaseOperator):
        emits = True

        def execute(self, context: Any) -> None:
            for key in "abab":
                self.emit(key.upper(), key=key)

    with DAG("d"):
        keyed = Keyed(task_id="t")
    assert run_task(keyed).elements == ["A", "B"]


def test_only_who_says_that_it_emits_may() -> None:
    class Silent(Load):
        emits = False

    outcome = step(Silent(task_id="load"))
    assert isinstance(outcome, StepFailed)
    assert "Silent emits: it needs the attribute emits = True" in outcome.error
    with pytest.raises(RuntimeError, match=r"emit\(\) is for the methods that a step calls"):
        Load(task_id="load").emit(1)


def test_a_value_that_cannot_be_stored_is_named_by_its_position() -> None:
    class Odd(Load):
        def execute(self, context: Any) -> str:
            self.emit(1)
            self.emit(object())
            return ""

    outcome = step(Odd(task_id="load"), emitted=3)
    assert isinstance(outcome, StepFailed)
    assert "element 4" in outcome.error


def test_a_handler_that_emits_too_much_for_one_outcome_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "OUTCOME_BYTES_MAX", 10)
    outcome = step(Load(task_id="load"), given=part(list(range(20))))
    assert isinstance(outcome, StepFailed)
    assert "handle fewer events at a time, with stream=Batch(count=...)" in outcome.error


# --- in tests ------------------------------------------------------------------------------------


def test_run_task_tells_what_a_task_has_emitted() -> None:
    def numbers() -> Iterator[int]:
        yield from range(2500)

    assert run_task(lambda: generated(numbers)).elements == list(range(2500))
    result = run_task(Stream(task_id="load"), events=[[1, 2], [3]])
    assert (result.value, result.elements, result.handled) == (None, [1, 2, 3, "the end"], [[1, 2], [3]])
    failed = run_task(Stream(task_id="load"), events=[[1, 2], [7], [8]])
    assert (failed.state, failed.elements) == ("failed", [1, 2, 7])
    again = run_task(Stream(task_id="load"), events=[[9]], after=failed)
    assert (again.state, again.elements) == ("success", [1, 2, 7, 8, 9, "the end"])


def test_a_trigger_operator_emits_what_its_trigger_fires() -> None:
    pages = {"trigger_cls": "headgate.triggers.temporal.TimeDeltaTrigger", "trigger_kwargs": {"delta": SECOND}}
    with DAG("d") as dag:
        operator = TriggerOperator(task_id="pages", **pages)  # type: ignore[arg-type]
    (spec,) = dag.to_spec().tasks
    assert spec.emits
    assert spec.start_trigger is not None
    assert spec.start_trigger.stream is not None
    result = run_task(operator, events=["a", {"b": 1}])
    assert (result.state, result.elements) == ("success", ["a", {"b": 1}])
    assert spec.start_trigger.stream.elements == "event"
    with DAG("d") as dag:
        operator = TriggerOperator(task_id="pages", elements="each", **pages)  # type: ignore[arg-type]
    (start,) = (spec.start_trigger for spec in dag.to_spec().tasks)
    assert start is not None
    assert start.stream is not None
    assert start.stream.elements == "each"
    result = run_task(operator, events=[{"rows": [1, 2]}, (3,)])
    assert (result.state, result.elements) == ("success", [1, 2, 3])
    failed = run_task(operator, events=[[1], "x"])
    assert (failed.state, failed.elements, failed.may_retry) == ("failed", [1], False)
    assert failed.error == "TaskFailed: event 1 is no list, and no page with a list of rows: 'x'"
    with pytest.raises(DagMalformed, match="elements must be 'event' or 'each', not 'all'"), DAG("d"):
        TriggerOperator(task_id="pages", elements="all", **pages)  # type: ignore[arg-type]


# --- in a DAG ------------------------------------------------------------------------------------


def test_the_output_of_a_task_that_emits_are_its_elements() -> None:
    with DAG("d") as dag:
        load = Load(task_id="load")

        @task
        def each(x: Any) -> Any:
            return x

        @task
        def total(loaded: Any, returned: Any) -> list[Any]:
            return [list(loaded), loaded[1], returned]

        each.expand(x=load.output)
        each.expand(x=XComArg(load, "other"))
        sums = total(load.output, 5).operator
    specs = {spec.task_id: spec for spec in dag.to_spec().tasks}
    assert specs["load"].emits
    assert specs["each"].map == MapSpec(Elements("load"))
    assert specs["each__1"].map == MapSpec(Output("load", "other"))

    def read(asked: GetXComs) -> XComPage:
        assert (asked.task_id, asked.key) == ("load", None)
        return XComPage(tuple(enumerate((b"10", b"11", b"12")))[asked.after + 1 + asked.offset :][: asked.limit], 3, 0)

    context = make_context(sums, run_id="r", read_xcom=lambda *_: None, read_xcoms=read)
    assert run_step(sums, context) == StepSucceeded((XCom("return_value", b"[[10,11,12],11,5]"),))
    instance = dag.tasks["each"]
    context = make_context(instance, run_id="r", map_index=2, read_xcom=lambda *_: None, read_xcoms=read)
    assert run_step(instance, context) == StepSucceeded((XCom("return_value", b"12"),))


def test_a_branch_does_not_emit_and_a_mapped_task_does_not() -> None:
    def names(n: int = 0) -> Iterator[str]:
        yield "a"

    with (
        DAG("d"),
        pytest.raises(DagMalformed, match="it cannot be a generator function"),
    ):
        BranchPythonOperator(task_id="b", python_callable=names)
    with DAG("d"), pytest.raises(DagMalformed, match="is mapped, and cannot emit"):
        task(names).expand(n=[1])


def test_the_page_of_elements_is_asked_for_by_no_key() -> None:
    assert GetXComs("t", None).key is None
