"""`run_task` of a mapped task: one instance is run, and the test says which."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import trio

from headgate.tasks import DAG, BaseOperator, PythonOperator, XComArg, task
from headgate.testing import RoundTripFailed, run_task
from headgate.triggers.base import BaseTrigger, StartTriggerArgs, TriggerEvent

HOUR = timedelta(hours=1)


@task
def source() -> list[int]:
    return [1, 2]


@task(retries=1)
def double(value: Any, ti: Any) -> list[Any]:
    return [value * 2, ti.map_index]


class Counts(BaseTrigger):
    """Fires numbers, an hour apart."""

    def __init__(self, upto: int) -> None:
        self.upto = upto

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Counts", {"upto": self.upto}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        for number in range(self.upto):
            await trio.sleep(3600)
            yield TriggerEvent(number, is_last=number == self.upto - 1)


class Dates(BaseOperator):
    """Returns how long it has waited."""

    def __init__(self, *, upto: int, **options: Any) -> None:
        super().__init__(**options)
        self.upto = upto

    def execute(self, context: Any) -> None:
        self.defer(trigger=Counts(self.upto), method_name="resume", kwargs={"since": datetime.now()})

    def resume(self, context: Any, event: Any, since: datetime) -> int:
        return round((datetime.now() - since) / HOUR)


class Begins(BaseOperator):
    """Begins in its trigger, and returns what that fired last, and what it was made with."""

    start_from_trigger = True

    def __init__(self, *, upto: int, **options: Any) -> None:
        super().__init__(**options)
        self.upto = upto
        upto = upto.days if isinstance(upto, timedelta) else upto
        self.start_trigger_args = StartTriggerArgs(
            trigger_cls=f"{__name__}.Counts", trigger_kwargs={"upto": upto}, next_method="resume"
        )

    def execute(self, context: Any) -> None:
        raise AssertionError("no worker begins it")

    def resume(self, context: Any, event: Any) -> Any:
        return [event, self.upto, context["ti"].map_index, context["ti"].map_name]


class Handles(BaseOperator):
    """Sums up the events of a stream."""

    def __init__(self, *, upto: int, fails_at: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.upto, self.fails_at = upto, fails_at

    def execute(self, context: Any) -> None:
        self.defer(trigger=Counts(self.upto), stream=True, kwargs={"total": 0})

    def handle_trigger_events(self, events: Any, context: Any, total: int) -> dict[str, int]:
        for event in events:
            if event.payload == self.fails_at and context["try_number"] == 1:
                raise ValueError(self.fails_at)
            total += event.payload
            self.handled(event, total=total)
        return {"total": total}

    def stream_ended(self, context: Any, total: int) -> list[int]:
        return [total, context["ti"].map_index]


def test_an_instance_gets_its_value_of_the_xcoms_of_its_source() -> None:
    with DAG("d"):
        output = double.expand(value=source())
    assert run_task(output, map_index=1, xcoms={"source": [5, 6]}).value == [12, 1]
    assert run_task(output.operator, map_index=0, xcoms={"source": {"k": "v"}}).value == [("k", "v") * 2, 0]


def test_a_function_may_make_the_task_anew_for_each_step() -> None:
    def make() -> XComArg:
        with DAG("d"):
            return double.expand(value=[3])

    assert run_task(make, map_index=0).value == [6, 0]
    assert run_task(lambda: PythonOperator(task_id="a", python_callable=lambda: 1)).value == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "the task 'double' is mapped: say which instance is run, with map_index="),
        ({"map_index": 0}, r"expanded over an XCom that is not given: xcoms={'source': \[\.\.\.\]}"),
        ({"map_index": 0, "xcoms": {("source", "k"): [1]}}, "expanded over an XCom that is not given: xcoms={'source'"),
        ({"map_index": 0, "xcoms": {"source": 5}}, r"over xcoms\['source'\], which must be a list or a dict"),
        (
            {"map_index": 2, "xcoms": {"source": [1, 2]}},
            "has 2 instances, from 0 on, with these xcoms; there is no",
        ),
        ({"map_index": -1, "xcoms": {"source": [1, 2]}}, "has 2 instances, .* there is none -1"),
        ({"map_index": 0, "xcoms": {"source": []}}, "has 0 instances, .* there is none 0"),
    ],
)
def test_a_test_that_does_not_say_enough_is_told_what_to_say(given: dict[str, Any], problem: str) -> None:
    with DAG("d"):
        output = double.expand(value=source())
    with pytest.raises(ValueError, match=problem):
        run_task(output, **given)


def test_a_source_under_another_key_and_one_that_is_mapped_are_named_as_they_are_given() -> None:
    with DAG("d"):
        first = double.expand(value=[1, 2])
        keyed = double.expand(value=XComArg(source().operator, "k"))
        second = double.expand(value=first.batch(2))
    with pytest.raises(ValueError, match=r"xcoms={\('source', 'k'\): \[\.\.\.\]}"):
        run_task(keyed, map_index=0)
    with pytest.raises(ValueError, match=r"xcoms\['double'\] must be a list: the task is mapped"):
        run_task(second, map_index=0, xcoms={"double": {"a": 1}})
    assert run_task(second, map_index=1, xcoms={"double": [1, 2, 3]}).value == [[3, 3], 1]


def test_elements_of_a_task_that_emits_are_given_as_a_list() -> None:
    def emits() -> Any:
        yield 1

    with DAG("d"):
        output = double.expand(value=task(emits)())
    assert run_task(output, map_index=1, xcoms={"emits": [5, 6]}).value == [12, 1]
    with pytest.raises(ValueError, match=r"not given: xcoms={'emits'"):
        run_task(output, map_index=1)


def test_a_task_that_is_not_mapped_has_no_instances() -> None:
    with DAG("d"):
        output = source()
    with pytest.raises(ValueError, match="the task 'source' is not mapped: it has no instance 0"):
        run_task(output, map_index=0)


def test_time_is_skipped_and_counts_in_the_functions_of_an_instance() -> None:
    def sleeps(value: int) -> float:
        began = datetime.now()
        time.sleep(value * 3600)
        return (datetime.now() - began) / HOUR

    with DAG("d"):
        output = task(execution_timeout=2 * HOUR)(sleeps).expand(value=[1, 3])
        classic = PythonOperator.partial(task_id="b", python_callable=sleeps).expand(op_args=[[5]])
    assert round(run_task(output, map_index=0).value) == 1
    late = run_task(output, map_index=1)
    assert (late.state, late.error) == ("failed", "its execution_timeout is over")
    assert round(run_task(classic, map_index=0).value) == 5


def test_time_is_skipped_in_the_module_of_the_operator_that_is_mapped() -> None:
    with DAG("d"):
        output = Dates.partial(task_id="g").expand(upto=[2])
    assert run_task(output, map_index=0).value == 1


def test_an_instance_handles_a_stream_of_its_own_and_goes_on_in_its_next_try() -> None:
    with DAG("d"):
        output = Handles.partial(task_id="h", fails_at=3).expand(upto=[3, 5], map_index_name=lambda upto: f"to {upto}")
    assert run_task(output, map_index=0).value == [3, 0]
    failed = run_task(output, map_index=1)
    assert (failed.state, failed.handled, failed.map_name) == ("failed", [0, 1, 2], "to 5")
    again = run_task(output, map_index=1, try_number=2, events=[TriggerEvent(4, is_last=True)], after=failed)
    assert (again.value, again.handled, again.map_name) == ([10, 1], [0, 1, 2, 3, 4], "to 5")


def test_an_instance_begins_in_a_trigger_that_has_its_value() -> None:
    with DAG("d"):
        of_list = Begins.partial(task_id="a").expand(upto=[3, 1], map_index_name=lambda upto: f"to {upto}")
        of_source = Begins.partial(task_id="b").expand(upto=source())
    result = run_task(of_list, map_index=1)
    assert result.value == [0, 1, 1, "to 1"]
    assert [(one.classpath, one.trigger_kwargs) for one in result.deferrals] == [(f"{__name__}.Counts", {"upto": 1})]
    assert run_task(of_source, map_index=0, xcoms={"source": [2, 5]}).deferrals[0].trigger_kwargs == {"upto": 2}


def test_a_constructor_that_makes_something_of_the_value_after_all_is_found() -> None:
    with DAG("d"):
        output = Begins.partial(task_id="a").expand(upto=[timedelta(days=2)])
    with pytest.raises(RoundTripFailed, match=r"begins with upto=datetime.*, and its constructor makes 2 of the value"):
        run_task(output, map_index=0)
