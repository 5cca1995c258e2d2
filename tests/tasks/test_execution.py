"""One step of a task: whatever the author's code does, there is an outcome, and a deferral goes on where it said."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headgate.protocol.messages.dags import XCOM_BYTES_MAX, XCOMS_PER_STEP_MAX
from headgate.protocol.messages.runner import ERROR_CHARS_MAX, TriggerSpec
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSkipped, StepSucceeded, XCom
from headgate.protocol.values import decode_value, encode_value
from headgate.runner.loading import load_trigger
from headgate.tasks import (
    DAG,
    BaseOperator,
    PythonOperator,
    SensorTimeout,
    TaskDeferred,
    TaskFailed,
    TaskSkipped,
)
from headgate.tasks.context import make_context
from headgate.tasks.errors import FAIL_METHOD, REASON_FAILURE, REASON_TIMEOUT
from headgate.tasks.execution import Resumption, run_step
from headgate.testing import TriggerFailed, run_trigger
from headgate.triggers.base import BaseTrigger
from headgate.triggers.temporal import DateTimeTrigger, TimeDeltaTrigger

MOMENT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def step(operator: BaseOperator, resumption: Resumption | None = None, **context: Any) -> StepOutcome:
    return run_step(operator, make_context(operator, run_id="run-1", **context), resumption)


def of(function: Any, **options: Any) -> PythonOperator:
    return PythonOperator(task_id="call", python_callable=function, **options)


def raising(error: BaseException) -> StepOutcome:
    def call() -> None:
        raise error

    return step(of(call))


def fire(deferred: StepOutcome) -> Resumption:
    """Run the trigger of a deferral as a runner does, and return what the task is resumed with."""
    assert isinstance(deferred, StepDeferred)
    spec = TriggerSpec(1, "run", "trigger", deferred.classpath, deferred.kwargs)
    (event,) = run_trigger(load_trigger(spec), events=1)
    return Resumption(deferred.next_method, deferred.next_kwargs, encode_value(event.payload, where="payload"))


class Waits(BaseOperator):
    """Defers twice: at once, and again in the first method it is resumed in."""

    def execute(self, context: Any) -> None:
        context["ti"].xcom_push("began", True)
        self.attribute = "of the first instance"
        self.defer(
            trigger=DateTimeTrigger(MOMENT), method_name="first", kwargs={"count": 1}, timeout=timedelta(minutes=5)
        )

    def first(self, context: Any, event: Any, count: int) -> None:
        assert not hasattr(self, "attribute")
        self._deep_down([event], count)

    def _deep_down(self, events: list[Any], count: int) -> None:
        raise TaskDeferred(
            trigger=TimeDeltaTrigger(timedelta(hours=3)),
            method_name="second",
            kwargs={"events": events, "count": count + 1},
        )

    def second(self, context: Any, event: Any, events: list[Any], count: int) -> dict[str, Any]:
        return {"events": [*events, type(event).__name__], "count": count}


# --- deferral ------------------------------------------------------------------------------------


def test_a_task_defers_is_resumed_defers_again_and_ends() -> None:
    deferred = step(Waits(task_id="wait"))
    assert isinstance(deferred, StepDeferred)
    assert deferred.classpath == "headgate.triggers.temporal.DateTimeTrigger"
    assert decode_value(deferred.kwargs) == {"moment": MOMENT}
    assert (deferred.next_method, decode_value(deferred.next_kwargs)) == ("first", {"count": 1})
    assert deferred.timeout_s == 300.0
    assert deferred.xcoms == (XCom("began", b"true"),)

    again = step(Waits(task_id="wait"), fire(deferred))
    assert isinstance(again, StepDeferred)
    assert (again.next_method, again.timeout_s, again.xcoms) == ("second", None, ())

    end = step(Waits(task_id="wait"), fire(again))
    assert isinstance(end, StepSucceeded)
    (value,) = end.xcoms
    assert (value.key, decode_value(value.value)) == ("return_value", {"events": [MOMENT, "datetime"], "count": 2})


def test_a_deferral_passes_an_except_clause_for_errors() -> None:
    class Careless(BaseOperator):
        def execute(self, context: Any) -> None:
            try:
                self.defer(trigger=DateTimeTrigger(MOMENT), method_name="resumed")
            except Exception:
                return

        def resumed(self, context: Any, event: Any) -> None:
            """End."""

    assert isinstance(step(Careless(task_id="wait")), StepDeferred)


def test_a_deferral_that_was_caught_fails_the_task_and_says_so() -> None:
    class Swallows(BaseOperator):
        def execute(self, context: Any) -> None:
            try:
                self.defer(trigger=DateTimeTrigger(MOMENT), method_name="resumed")
            except BaseException:
                return

        def resumed(self, context: Any, event: Any) -> None:
            """End."""

    outcome = step(Swallows(task_id="wait"))
    assert isinstance(outcome, StepFailed)
    assert "the deferral in 'wait' was caught by an except clause" in outcome.error


def test_a_function_defers_by_hand_and_is_called_again_with_the_event() -> None:
    def wait(event: Any, run_id: str, round: int = 0) -> str:
        if event is None:
            raise TaskDeferred(trigger=DateTimeTrigger(MOMENT), method_name="execute", kwargs={"round": 1})
        return f"{run_id} {round} {event:%Y}"

    deferred = step(of(wait))
    end = step(of(wait), fire(deferred))
    assert end == StepSucceeded(xcoms=(XCom("return_value", b'"run-1 1 2026"'),))


def test_kwargs_that_cannot_be_stored_fail_the_step_with_dag_task_and_path() -> None:
    class Bad(Waits):
        def execute(self, context: Any) -> None:
            self.defer(trigger=DateTimeTrigger(MOMENT), method_name="first", kwargs={"count": [{"f": print}]})

    dag = DAG("orders")
    outcome = step(Bad(task_id="wait", dag=dag))
    assert isinstance(outcome, StepFailed)
    assert "DAG 'orders', task 'wait': " in outcome.error
    assert "kwargs['count'][0]['f'] is a builtin_function_or_method" in outcome.error


class Unstorable(BaseTrigger):
    """Its serialize gives what it was made with."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def serialize(self) -> Any:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    async def run(self) -> Any:
        yield


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (("a.T", {"lock": object()}), r"Unstorable kwargs['lock'] is an object"),
        (("a.T", {"text": "x" * 2**20}), "Unstorable kwargs needs 1,048,"),
        (("T", {}), "'T' is not of the form package.module.Class"),
        (("a.f.<locals>.T", {}), "a.f.<locals>.T is defined inside a function"),
        (("headgate_dag_files.orders_1.T", {}), "is defined in a DAG file, which no runner imports"),
        (("a.T", None), "Unstorable.serialize() must return (classpath, kwargs), not ('a.T', None)"),
        (ZeroDivisionError("in serialize"), "ZeroDivisionError: in serialize"),
    ],
)
def test_a_trigger_that_cannot_be_stored_fails_the_step(said: Any, problem: str) -> None:
    outcome = raising(TaskDeferred(trigger=Unstorable(said), method_name="execute"))
    assert isinstance(outcome, StepFailed)
    assert problem in outcome.error


@pytest.mark.parametrize(
    ("method_name", "kwargs", "problem"),
    [
        ("gone", {}, "Waits has no method 'gone' to resume in"),
        ("first", {}, "Waits.first cannot be called with (context, event=..., kwargs): missing a required argument"),
        ("first", {"count": 1, "more": 2}, "got an unexpected keyword argument 'more'"),
        ("execute", {}, "got an unexpected keyword argument 'event'"),
    ],
)
def test_a_deferral_to_a_method_that_cannot_take_it_fails_now_and_not_after_the_wait(
    method_name: str, kwargs: dict[str, Any], problem: str
) -> None:
    class Bad(Waits):
        def execute(self, context: Any) -> None:
            self.defer(trigger=DateTimeTrigger(MOMENT), method_name=method_name, kwargs=kwargs)

    Bad.__name__ = "Waits"
    outcome = step(Bad(task_id="wait"))
    assert isinstance(outcome, StepFailed)
    assert problem in outcome.error


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ({"method_name": ""}, ValueError, "must be the name of a method, not ''"),
        ({"method_name": FAIL_METHOD}, ValueError, "must be the name of a method, not '__fail__'"),
        ({"kwargs": {"event": 1, "context": 2}}, ValueError, "kwargs may not have context, event"),
        ({"kwargs": [1]}, TypeError, "kwargs must be a dict, not list"),
        ({"timeout": 60}, TypeError, "timeout must be a timedelta, not int"),
        ({"timeout": timedelta(0)}, ValueError, "timeout must be more than 0"),
    ],
)
def test_a_deferral_with_bad_arguments_is_an_error_where_it_is_made(
    arguments: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        TaskDeferred(**{"trigger": DateTimeTrigger(MOMENT), "method_name": "resumed", **arguments})


def test_what_is_no_trigger_is_nothing_to_wait_for() -> None:
    not_one: Any = "a trigger"
    outcome = raising(TaskDeferred(trigger=not_one, method_name="execute"))
    assert isinstance(outcome, StepFailed)
    assert "the trigger is a str, not a headgate.triggers.base.BaseTrigger" in outcome.error


# --- resumption ----------------------------------------------------------------------------------


def failure(reason: str, **more: str) -> Resumption:
    kwargs = {"error": "it broke", "traceback": "Traceback: line 3", "reason": reason, **more}
    return Resumption(FAIL_METHOD, encode_value(kwargs, where="kwargs"))


def test_a_trigger_that_failed_fails_the_task_with_its_error_and_traceback() -> None:
    outcome = step(Waits(task_id="wait"), failure(REASON_FAILURE))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "TaskDeferralError: it broke\nTraceback: line 3"
    assert "Traceback: line 3" in outcome.traceback
    assert outcome.may_retry


def test_a_deferral_that_timed_out_fails_the_task() -> None:
    outcome = step(Waits(task_id="wait"), failure(REASON_TIMEOUT, traceback=""))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "TriggerTimeout: it broke"


def test_the_error_of_a_real_trigger_reaches_the_task() -> None:
    class FailsNow(Waits):
        def execute(self, context: Any) -> None:
            self.defer(trigger=BrokenTrigger(), method_name="first", kwargs={"count": 1})

    deferred = step(FailsNow(task_id="wait"))
    with pytest.raises(TriggerFailed) as raised:
        fire(deferred)
    kwargs = {"error": str(raised.value), "traceback": "", "reason": REASON_FAILURE}
    outcome = step(FailsNow(task_id="wait"), Resumption(FAIL_METHOD, encode_value(kwargs, where="kwargs")))
    assert isinstance(outcome, StepFailed)
    assert "the service is gone" in outcome.error


class BrokenTrigger(BaseTrigger):
    """Raises at once."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__qualname__}", {}

    async def run(self) -> Any:
        raise ConnectionError("the service is gone")
        yield


@pytest.mark.parametrize(
    ("resumption", "problem"),
    [
        (Resumption("gone", b"{}"), "task 'wait': Unresumable: Waits has no method 'gone'"),
        (Resumption("first", b'{"renamed":1}'), "Unresumable: Waits.first cannot be called"),
        (Resumption("first", b"[1]"), "Unresumable: the kwargs of the resumption are a list, not a dict"),
        (Resumption("first", b"not json"), "task 'wait': ValueMalformed: this is not the JSON of a value"),
    ],
)
def test_a_resumption_that_fits_no_more_fails_the_task(resumption: Resumption, problem: str) -> None:
    outcome = step(Waits(task_id="wait"), resumption)
    assert isinstance(outcome, StepFailed)
    assert problem in outcome.error


def test_a_type_error_of_the_authors_own_is_not_taken_for_a_bad_resumption() -> None:
    class Bad(Waits):
        def first(self, context: Any, event: Any, count: int) -> None:
            len(count)  # type: ignore[arg-type]

    outcome = step(Bad(task_id="wait"), Resumption("first", b'{"count":1}'))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "TypeError: object of type 'int' has no len()"


# --- how a task ends -----------------------------------------------------------------------------


def test_what_is_returned_and_pushed_is_left_for_others() -> None:
    def push(ti: Any) -> list[Any]:
        ti.xcom_push("a", 1)
        ti.xcom_push("a", {2})
        return [timedelta(1)]

    outcome = step(of(push))
    assert isinstance(outcome, StepSucceeded)
    assert {xcom.key: decode_value(xcom.value) for xcom in outcome.xcoms} == {"a": {2}, "return_value": [timedelta(1)]}


def test_none_is_nothing_to_leave() -> None:
    assert step(of(lambda: None)) == StepSucceeded()


def test_a_task_skips_itself_and_keeps_what_it_pushed() -> None:
    def skip(ti: Any) -> None:
        ti.xcom_push("seen", 3)
        raise TaskSkipped("no orders\0 today")

    assert step(of(skip)) == StepSkipped(reason="no orders\\x00 today", xcoms=(XCom("seen", b"3"),))


def test_an_error_fails_the_try_with_its_traceback() -> None:
    outcome = raising(ValueError("bad order"))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "ValueError: bad order"
    assert "raise error" in outcome.traceback
    assert outcome.may_retry


@pytest.mark.parametrize("error", [TaskFailed("no use"), SensorTimeout("too late")])
def test_a_task_may_say_that_another_try_is_of_no_use(error: Exception) -> None:
    outcome = raising(error)
    assert isinstance(outcome, StepFailed)
    assert not outcome.may_retry


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()])
def test_what_is_no_exception_of_the_common_kind_is_a_failure_too(error: BaseException) -> None:
    outcome = raising(error)
    assert isinstance(outcome, StepFailed)
    assert outcome.error.startswith(type(error).__name__)


def test_an_interrupt_is_for_whoever_runs_the_step() -> None:
    with pytest.raises(KeyboardInterrupt):
        raising(KeyboardInterrupt())


def test_an_endless_recursion_is_a_failure() -> None:
    def call() -> None:
        call()

    limit = sys.getrecursionlimit()
    outcome = step(of(call))
    assert isinstance(outcome, StepFailed)
    assert outcome.error.startswith("RecursionError")
    assert len(outcome.traceback) <= ERROR_CHARS_MAX
    assert sys.getrecursionlimit() == limit


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


class MuteSkip(TaskSkipped):
    """A skip that cannot say why."""

    __str__ = Mute.__str__


def test_an_error_that_cannot_be_told_is_told_nonetheless() -> None:
    failed, skipped = raising(Mute()), raising(MuteSkip())
    assert isinstance(failed, StepFailed)
    assert failed.error == "Mute, whose text cannot be shown: its __str__ raised RuntimeError"
    assert isinstance(skipped, StepSkipped)
    assert skipped.reason == "MuteSkip, whose text cannot be shown: its __str__ raised RuntimeError"


def test_text_is_cut_to_its_limit() -> None:
    failed, skipped = raising(ValueError("x" * 2 * ERROR_CHARS_MAX)), raising(TaskSkipped("x" * 2 * ERROR_CHARS_MAX))
    assert isinstance(failed, StepFailed)
    assert isinstance(skipped, StepSkipped)
    assert (len(failed.error), len(failed.traceback), len(skipped.reason)) == (ERROR_CHARS_MAX,) * 3


# --- XComs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("x" * XCOM_BYTES_MAX, "xcom 'return_value' needs 49,154 bytes; the limit is 49,152"),
        ([print], "xcom 'return_value'[0] is a builtin_function_or_method"),
    ],
)
def test_a_value_that_cannot_be_left_fails_the_task_with_the_limit_or_the_path(value: Any, problem: str) -> None:
    outcome = step(of(lambda: value))
    assert isinstance(outcome, StepFailed)
    assert "task 'call'" in outcome.error
    assert problem in outcome.error


def test_a_step_pushes_no_more_than_its_share() -> None:
    def push(ti: Any) -> None:
        for index in range(XCOMS_PER_STEP_MAX + 1):
            ti.xcom_push(f"key-{index}", index)

    outcome = step(of(push))
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "ValueError: 'key-100' is one XCom too many: a step of a task may push 100"
    assert len(outcome.xcoms) == XCOMS_PER_STEP_MAX


def test_a_task_reads_what_others_have_left() -> None:
    left = {("extract", "return_value"): b"[1,2]", ("extract", "count"): b"2"}

    def read(ti: Any) -> list[Any]:
        return [ti.xcom_pull("extract"), ti.xcom_pull("extract", "count"), ti.xcom_pull("other", default="none")]

    outcome = step(of(read), read_xcom=lambda task_id, key, map_index: left.get((task_id, key)))
    assert outcome == StepSucceeded(xcoms=(XCom("return_value", b'[[1,2],2,"none"]'),))


def test_the_log_warns_of_a_read_from_a_task_that_the_dag_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    with DAG("orders"):
        PythonOperator(task_id="extract", python_callable=dict)
        read = PythonOperator(
            task_id="read", python_callable=lambda ti: [ti.xcom_pull(name) for name in ("extract", "read", "extrakt")]
        )
    outcome = step(read, read_xcom=lambda task_id, key, map_index: None)
    assert outcome == StepSucceeded(xcoms=(XCom("return_value", b"[null,null,null]"),))
    assert caplog.messages == [
        "xcom_pull('extrakt') finds nothing: the DAG orders has no such task; it has extract, read"
    ]


def test_reading_where_nobody_knows_the_run_is_an_error() -> None:
    outcome = step(of(lambda ti: ti.xcom_pull("extract")))
    assert isinstance(outcome, StepFailed)
    assert "xcom_pull('extract') needs a running DAG" in outcome.error


def test_outputs_passed_to_a_function_are_the_values_the_tasks_have_left() -> None:
    with DAG("orders"):
        extract = PythonOperator(task_id="extract", python_callable=dict)
        sums = PythonOperator(
            task_id="sums",
            python_callable=lambda first, rest, run_id: [first, rest, run_id],
            op_args=[extract.output],
            op_kwargs={"rest": {"deep": (extract.output, [extract.output])}},
        )
    outcome = step(sums, read_xcom=lambda task_id, key, map_index: b"7")
    assert isinstance(outcome, StepSucceeded)
    assert decode_value(outcome.xcoms[0].value) == [7, {"deep": (7, [7])}, "run-1"]
    returned_none = step(sums, read_xcom=lambda task_id, key, map_index: None)
    assert isinstance(returned_none, StepSucceeded)
    assert decode_value(returned_none.xcoms[0].value) == [None, {"deep": (None, [None])}, "run-1"]


# --- what a function is called with --------------------------------------------------------------


def test_a_function_gets_what_it_has_a_parameter_for() -> None:
    def one(try_number: int, *, params: Any, other: str = "default") -> list[Any]:
        return [try_number, params, other]

    def two(task_id: str, *args: Any, **context: Any) -> list[Any]:
        return [task_id, list(args), sorted(context)]

    first = step(of(one), try_number=3, params={"a": 1})
    assert first == StepSucceeded(xcoms=(XCom("return_value", b'[3,{"a":1},"default"]'),))
    second = step(of(two, op_args=["mine", 5]))
    assert isinstance(second, StepSucceeded)
    task_id, args, names = decode_value(second.xcoms[0].value)
    assert (task_id, args) == ("mine", [5])
    assert {"ti", "run_id", "event"} < set(names)
    assert "task_id" not in names


def test_a_function_without_a_signature_gets_its_arguments_alone() -> None:
    outcome = step(of(dict, op_args=[[("a", 1)]]))
    assert outcome == StepSucceeded(xcoms=(XCom("return_value", b'{"a":1}'),))
