"""Signals as authors send and list them: at once, with the outcome of a step, from a trigger, and in own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest
import trio

from headgate.child import queries
from headgate.child.queries import NoQueryHandler, trigger_queries_handled_by
from headgate.protocol.errors import ValueNotSerializable, ValueTooLong
from headgate.protocol.messages.queries import (
    Query,
    QueryResult,
    RunCreated,
    SendSignals,
    StartSignal,
    StartSignals,
    TriggerQuery,
)
from headgate.protocol.messages.signals import SENDS_BYTES_MAX, SentSignal
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSkipped, StepSucceeded
from headgate.signals import Signal, SignalService, SignalVersion, TooManySignals, UnreadableValue
from headgate.signals.outgoing import NoStep
from headgate.tasks import DAG, BaseOperator, TaskSkipped, task
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step
from headgate.testing import run_task, run_trigger
from headgate.testing.stubs import Stubs
from headgate.triggers.base import BaseTrigger, TriggerEvent
from headgate.triggers.temporal import TimeDeltaTrigger


@pytest.fixture
def supervisor() -> Iterator[Stubs]:
    stubs = Stubs(signals={"labels": ["a", "b"]})
    with queries.queries_handled_by(stubs.answer):
        yield stubs


def test_a_signal_that_is_sent_has_the_next_version_of_its_key(supervisor: Stubs) -> None:
    service = SignalService()
    assert service.send_signal("labels", "c") == SignalVersion("labels", "c", None, 3)
    sent = service.send_signals([Signal("labels", "d", "x"), Signal("model"), Signal("labels", "e", "x")])
    assert [(one.key, one.version, one.is_new) for one in sent] == [
        ("labels", 4, True),
        ("model", 1, True),
        ("labels", 4, False),
    ]
    assert service.send_signals([]) == []
    assert [one.value for one in service.list_signals("labels", after=1)] == ["b", "c", "d"]
    assert [one.value for one in service.list_signals("labels", after=1, limit=1)] == ["b"]
    assert [(one.value, one.version) for one in service.list_signals("labels", 2)] == [("b", 2)]
    assert SignalService("other").list_signals("labels") == []


def test_each_signal_without_a_dedup_has_one_of_its_own() -> None:
    asked: list[SendSignals] = []

    def answer(query: Query) -> QueryResult:
        assert isinstance(query, SendSignals)
        asked.append(query)
        return RunCreated(True)

    with queries.queries_handled_by(answer), pytest.raises(queries.QueryFailed, match="answered with RunCreated"):
        SignalService("n").send_signals([Signal("a"), Signal("a"), Signal("a", 1, "d")], of_run=True)
    first, second, third = asked[0].signals
    assert len({first.dedup, second.dedup, "d"}) == 3
    assert (third.dedup, third.namespace, third.is_of_run, third.value) == ("d", "n", True, b"1")


@pytest.mark.parametrize(
    ("signal", "error", "problem"),
    [
        (Signal(""), ValueError, "the key of a signal '' must have 1..512 characters"),
        (Signal("a\0"), ValueError, "must not contain"),
        (Signal(7), TypeError, "the key of a signal must be a str, not int"),  # type: ignore[arg-type]
        (Signal("a", 1, 7), TypeError, "the dedup of a signal must be a str, not int"),  # type: ignore[arg-type]
        (Signal("a", 1, ""), ValueError, "the dedup of the signal 'a'"),
        (Signal("a", object()), ValueNotSerializable, "signal 'a'"),
        (Signal("a", "x" * 50_000), ValueTooLong, "signal 'a'"),
    ],
)
@pytest.mark.usefixtures("supervisor")
def test_a_malformed_signal_is_refused_where_it_is_sent(signal: Signal, error: type[Exception], problem: str) -> None:
    for options in ({}, {"with_outcome": True}):
        with pytest.raises(error, match=problem):
            SignalService().send_signals([signal], **options)
    with pytest.raises(ValueError, match="the namespace"):
        SignalService("").list_signals("a")


@pytest.mark.parametrize("signals", ["abc", [("a", 1)], [Signal("a"), None], [SignalService]])
def test_what_is_no_signal_is_refused(supervisor: Stubs, signals: Any) -> None:
    for options in ({}, {"with_outcome": True}):
        with pytest.raises(TypeError, match=r"signals are sent as Signal\(key, value\), not as "):
            SignalService().send_signals(signals, **options)
    assert supervisor.signals.sent == []


def test_signals_may_come_one_by_one(supervisor: Stubs) -> None:
    sent = SignalService().send_signals(Signal("a", number) for number in range(3))
    assert [(one.version, one.value) for one in sent] == [(1, 0), (2, 1), (3, 2)]


def test_too_many_signals_at_once_are_refused(supervisor: Stubs) -> None:
    with pytest.raises(TooManySignals, match="1,001 signals are sent at once; the limit is 1,000"):
        SignalService().send_signals([Signal("a") for _ in range(1001)])
    big = [Signal("a", "x" * 40_000) for _ in range(SENDS_BYTES_MAX // 40_000 + 1)]
    with pytest.raises(TooManySignals, match="the limit is 1,048,576"):
        SignalService().send_signals(big)
    assert supervisor.signals.sent == []


def test_outside_of_a_step_nothing_can_be_sent() -> None:
    with pytest.raises(NoQueryHandler):
        SignalService().send_signal("a")
    with pytest.raises(NoStep, match="with_outcome=True is for a step of a task"):
        SignalService().send_signal("a", with_outcome=True)


class Sends(BaseOperator):
    """Sends signals, and ends as it was told."""

    def __init__(self, *, end: str, **options: Any) -> None:
        super().__init__(**options)
        self.end = end

    def execute(self, context: Any) -> None:
        service = SignalService()
        assert service.send_signal("a", 1, dedup="d", with_outcome=True) is None
        service.send_signals([Signal("b"), Signal("a", 2)], with_outcome=True, of_run=True)
        if self.end == "skip":
            raise TaskSkipped("no")
        if self.end == "fail":
            raise ValueError("no")
        if self.end == "defer":
            self.defer(trigger=TimeDeltaTrigger(timedelta(seconds=1)), method_name="resume")

    def resume(self, context: Any, event: Any) -> None:
        SignalService().send_signal("resumed", with_outcome=True)


def outcome_of(end: str) -> StepOutcome:
    operator = Sends(task_id="s", end=end)
    return run_step(operator, make_context(operator, run_id="r"))


@pytest.mark.parametrize(("end", "kind"), [("", StepSucceeded), ("skip", StepSkipped), ("defer", StepDeferred)])
def test_signals_go_with_the_outcome_of_a_step(end: str, kind: type[Any]) -> None:
    outcome = outcome_of(end)
    assert isinstance(outcome, StepSucceeded | StepSkipped | StepDeferred)
    assert isinstance(outcome, kind)
    assert [(one.key, one.value, one.is_of_run) for one in outcome.signals] == [
        ("a", b"1", False),
        ("b", b"null", True),
        ("a", b"2", True),
    ]
    assert outcome.signals[0].dedup == "d"


def test_a_step_that_fails_sends_none_with_its_outcome() -> None:
    assert isinstance(outcome_of("fail"), StepFailed)
    assert not hasattr(outcome_of("fail"), "signals")


def test_too_many_signals_with_one_outcome_fail_the_step() -> None:
    @task
    def send() -> None:
        for _ in range(1001):
            SignalService().send_signal("a", with_outcome=True)

    with DAG("d"):
        sending = send()
    assert "1,001 signals are sent with the outcome of one step" in run_task(sending).error


def test_run_task_tells_what_was_sent_and_answers_what_is_listed() -> None:
    @task
    def count() -> int:
        service = SignalService()
        service.send_signal("seen", len(service.list_signals("labels")), dedup="d")
        return len(service.list_signals("seen"))

    with DAG("d"):
        counting = count()
    result = run_task(counting, signals={"labels": [1, 2, 3]})
    assert (result.value, result.signals) == (1, [SignalVersion("seen", 3, "d", 1)])
    deferred = run_task(Sends(task_id="s", end="defer"))
    assert [one.key for one in deferred.signals] == ["a", "b", "a", "resumed"]
    assert run_task(Sends(task_id="s", end="fail")).signals == []


# --- triggers -------------------------------------------------------------------------------------


class Offsets(BaseTrigger):
    """Sends a signal for each of its events."""

    def __init__(self, count: int) -> None:
        self.count = count

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Offsets", {"count": self.count}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        for number in range(self.count):
            sent = await self.send_signal("offset", number, dedup=str(number))
            yield TriggerEvent(sent.version)


async def test_a_trigger_sends_signals() -> None:
    asked: list[SendSignals] = []

    async def answer(query: TriggerQuery) -> QueryResult:
        await trio.lowlevel.checkpoint()
        assert isinstance(query, SendSignals)
        asked.append(query)
        return queries.result_of(query, stubs_response(query))

    with trigger_queries_handled_by(answer):
        sent = await Offsets(1).send_signal("offset", {"n": 17}, dedup="17", namespace="n")
    assert (sent.version, sent.value, sent.is_new) == (1, {"n": 17}, True)
    ((signal,),) = [query.signals for query in asked]
    assert (signal.key, signal.value, signal.dedup, signal.namespace) == ("offset", b'{"n":17}', "17", "n")
    assert asked[0].sender == f"{__name__}.Offsets"
    with pytest.raises(NoQueryHandler):
        await Offsets(1).send_signal("offset")


def stubs_response(query: SendSignals) -> Any:
    from headgate.protocol.messages.queries import Response, SignalsSent

    return Response(1, SignalsSent(tuple(SentSignal(1, True) for _ in query.signals)))


def test_run_trigger_answers_what_is_sent() -> None:
    assert [event.payload for event in run_trigger(Offsets(3))] == [1, 2, 3]


def test_a_task_starts_though_a_signal_before_cannot_be_read() -> None:
    unreadable = StartSignal("labels", "default", 1, b'{"$":"users.Type","v":1}')
    signals = StartSignals((StartSignal("labels", "default", 2, b"2"),), previous=(unreadable,))
    context = make_context(Sends(task_id="t", end="returns"), run_id="r", signals=signals)
    assert [one.value for one in context["signals"]] == [2]
    (before,) = context["previous_signals"]
    assert isinstance(before.value, UnreadableValue)
    assert before.value.data == unreadable.value
