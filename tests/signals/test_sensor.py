"""`SignalSensor`: what its author writes, what its spec says, and what `run_task` makes of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import StartTrigger, check_dag
from headgate.protocol.messages.signals import SIGNAL_TRIGGER, Predicate, SignalWait
from headgate.signals import at_least, field
from headgate.tasks import DAG, SignalSensor, task
from headgate.testing import TaskNeverEnds, run_task


def start_of(**options: Any) -> StartTrigger | None:
    return SignalSensor(task_id="wait", **options).to_spec().start_trigger


def test_a_sensor_waits_in_the_database_from_its_begin() -> None:
    start = start_of(key="labels", timeout=timedelta(hours=1))
    signal = SignalWait("labels")
    assert start == StartTrigger(SIGNAL_TRIGGER, b"{}", "execute", b"{}", 3600.0, signal=signal)
    start = start_of(key="labels", value={"n": 1}, namespace="mine", since="latest")
    assert start is not None
    assert start.signal == SignalWait("labels", "mine", b'{"n":1}', "latest")
    start = start_of(key="labels", value=None)
    assert start is not None
    assert start.signal == SignalWait("labels", value=b"null")
    with DAG("d") as dag:
        SignalSensor(task_id="wait", key="labels")
    check_dag(dag.to_spec())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"key": ""}, "the key of a signal '' must have 1..512 characters"),
        ({"key": 7}, "the key must be a str, not 7"),
        ({"key": "a", "namespace": ""}, "the namespace '' must have 1..100"),
        ({"key": "a", "value": object()}, "value is a"),
        ({"key": "a", "value": "x" * 50_000}, "value"),
        ({"key": "a", "predicate": 3}, r"the predicate must be made by a function as at_least\(\)"),
        ({"key": "a", "predicate": at_least(3), "value": 3}, "without a value"),
        ({"key": "a", "since": "ever"}, "since must be 'run' or 'latest', not 'ever'"),
        ({"key": "a", "mode": "poke"}, "mode is not for a SignalSensor"),
        ({"key": "a", "start_from_trigger": False}, "start_from_trigger is not for a SignalSensor"),
    ],
)
def test_what_cannot_be_waited_for_is_refused_when_the_file_is_parsed(options: Any, problem: str) -> None:
    with pytest.raises(DagMalformed, match=problem):
        SignalSensor(task_id="wait", **options)


def test_a_sensor_cannot_be_mapped_nor_wait_for_what_another_task_leaves() -> None:
    with pytest.raises(DagMalformed, match="cannot begin in its trigger: the key must be a str"), DAG("d"):
        SignalSensor.partial(task_id="each").expand(key=["a", "b"])

    @task
    def key() -> str:
        return "a"

    with pytest.raises(DagMalformed, match="the key must be a str"), DAG("d"):
        SignalSensor(task_id="wait", key=key())  # type: ignore[arg-type]


def test_run_task_ends_a_sensor_with_the_first_signal_that_fits() -> None:
    sensor = SignalSensor(task_id="wait", key="labels", value={"a": 1, "b": 2})
    result = run_task(sensor, signals={"labels": [1, {"b": 2, "a": 1}, 3]})
    assert (result.value, result.xcoms["version"], result.waited) == ({"a": 1, "b": 2}, 2, timedelta(0))
    assert run_task(SignalSensor(task_id="wait", key="labels"), signals={"labels": [None]}).xcoms == {"version": 1}


def test_run_task_lets_a_sensor_time_out() -> None:
    result = run_task(SignalSensor(task_id="wait", key="labels", timeout=timedelta(hours=2)), signals={"other": [1]})
    assert (result.state, result.may_retry, result.waited) == ("failed", False, timedelta(hours=2))
    assert "its timeout of 2:00:00 is over" in result.error
    skipped = run_task(SignalSensor(task_id="wait", key="labels", timeout=timedelta(hours=2), soft_fail=True))
    assert skipped.state == "skipped"
    with pytest.raises(TaskNeverEnds):
        run_task(SignalSensor(task_id="wait", key="labels"))


def test_a_sensor_waits_for_what_meets_a_predicate() -> None:
    start = start_of(key="labels", predicate=field("n", at_least(3)))
    assert start is not None
    assert start.signal == SignalWait("labels", predicate=Predicate("at_least", b"3", ("n",)))
    sensor = SignalSensor(task_id="wait", key="labels", predicate=field("n", at_least(3)))
    assert run_task(sensor, signals={"labels": [{"n": 2}, 5, {"n": 3}, {"n": 4}]}).value == {"n": 3}
    with pytest.raises(DagMalformed, match="at_least is for numbers and text, not None"), DAG("d"):
        SignalSensor(task_id="wait", key="labels", predicate=at_least(None))  # type: ignore[arg-type]
