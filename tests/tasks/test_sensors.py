"""Sensors: each gives up its worker to the right trigger, comes back with what it found, and ends in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.runner import TriggerSpec
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSkipped, StepSucceeded
from headgate.protocol.values import decode_value, encode_value
from headgate.runner.loading import load_trigger
from headgate.tasks import (
    DAG,
    BaseOperator,
    BaseSensorOperator,
    DateTimeSensor,
    FileSensor,
    HttpSensor,
    PokeReturnValue,
    TimeSensor,
    TriggerSensor,
)
from headgate.tasks.context import make_context
from headgate.tasks.errors import FAIL_METHOD, REASON_FAILURE, REASON_TIMEOUT, TaskFailed, TaskSkipped
from headgate.tasks.execution import Resumption, run_step
from headgate.testing import run_trigger
from headgate.triggers.base import (
    BaseTrigger,
    TaskFailedEvent,
    TaskSkippedEvent,
    TaskSuccessEvent,
    TriggerEvent,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
FAR = datetime(2200, 1, 1, tzinfo=UTC)
NO_TIME = timedelta(microseconds=1)


def step(operator: BaseOperator, resumption: Resumption | None = None) -> StepOutcome:
    return run_step(operator, make_context(operator, run_id="run-1"), resumption)


def trigger_of(deferred: StepOutcome) -> BaseTrigger:
    assert isinstance(deferred, StepDeferred), deferred
    return load_trigger(TriggerSpec(1, "run", "trigger", deferred.classpath, deferred.kwargs))


def resumed(deferred: StepOutcome, payload: Any) -> Resumption:
    assert isinstance(deferred, StepDeferred)
    return Resumption(deferred.next_method, deferred.next_kwargs, encode_value(payload, where="payload"))


def returned(outcome: StepOutcome) -> Any:
    assert isinstance(outcome, StepSucceeded), outcome
    return decode_value(outcome.xcoms[0].value) if outcome.xcoms else None


def timed_out() -> Resumption:
    kwargs = {
        "error": "the trigger had not fired in time",
        "traceback": "",
        "reason": REASON_TIMEOUT,
        "waited_s": 604_800.0,
    }
    return Resumption(FAIL_METHOD, encode_value(kwargs, where="kwargs"))


class Raising(BaseSensorOperator):
    """Its poke raises."""

    def __init__(self, error: Exception, **options: Any) -> None:
        super().__init__(task_id="sense", **options)
        self.error = error

    def poke(self, context: Any) -> bool:
        raise self.error

    def complete(self, context: Any, event: Any = None) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "soft_fail", "outcome"),
    [
        (TaskFailed("never"), True, StepSkipped),
        (TaskFailed("never"), False, StepFailed),
        (ValueError("oops"), True, StepFailed),
        (TaskSkipped("not today"), False, StepSkipped),
    ],
)
def test_soft_fail_skips_for_a_task_failed_of_poke_or_of_the_method_it_resumes_in_and_for_no_other_error(
    error: Exception, soft_fail: bool, outcome: type
) -> None:
    sensor = Raising(error, soft_fail=soft_fail)
    for resumption in (None, Resumption("complete", b"{}")):
        found = step(sensor, resumption)
        assert isinstance(found, outcome)
        if isinstance(found, StepFailed):
            assert found.may_retry is isinstance(error, ValueError)


class Clock:
    """The clock of a sensor that does not wait: each pause moves it on."""

    def __init__(self) -> None:
        self.now = NOW
        self.pauses: list[float] = []


class Third(BaseSensorOperator):
    """Finds what it waits for at the third poke; the clock and the pokes outlive its instances, as the world does."""

    def __init__(self, clock: Clock, *, needed: int = 3, **options: Any) -> None:
        super().__init__(task_id="sense", **options)
        self.the_clock = clock
        self.needed = needed

    def _now(self) -> datetime:
        return self.the_clock.now

    def _pause(self, seconds: float) -> None:
        self.the_clock.pauses.append(seconds)
        self.the_clock.now += timedelta(seconds=seconds)

    def poke(self, context: Any) -> PokeReturnValue:
        self.needed -= 1
        return PokeReturnValue(self.needed == 0, xcom_value="found")


# --- sensors that poke ---------------------------------------------------------------------------


def test_a_poking_sensor_holds_its_worker_until_it_finds() -> None:
    clock = Clock()
    assert returned(step(Third(clock, mode="poke"))) == "found"
    assert clock.pauses == [60.0, 60.0]


def test_a_poking_sensor_gives_up_at_its_timeout_after_a_last_poke() -> None:
    clock = Clock()
    outcome = step(Third(clock, mode="poke", needed=99, timeout=timedelta(seconds=90)))
    assert clock.pauses == [60.0, 30.0]
    assert isinstance(outcome, StepFailed)
    assert outcome.error == "SensorTimeout: the sensor 'sense' has waited for 0:01:30: its timeout of 0:01:30 is over"
    assert not outcome.may_retry


def test_a_sensor_that_fails_softly_skips() -> None:
    outcome = step(Third(Clock(), mode="poke", needed=99, timeout=timedelta(seconds=90), soft_fail=True))
    assert isinstance(outcome, StepSkipped)
    assert "has waited for 0:01:30" in outcome.reason


def test_a_sensor_gives_up_its_worker_between_two_pokes_and_counts_its_timeout_over_them() -> None:
    clock = Clock()
    outcome = step(Third(clock, needed=99, timeout=timedelta(seconds=90)))
    waits = []
    while isinstance(outcome, StepDeferred):
        assert outcome.timeout_s is None
        assert decode_value(outcome.next_kwargs) == {"waiting_since": NOW}
        moment = decode_value(outcome.kwargs)["moment"]
        waits.append((moment - clock.now).total_seconds())
        clock.now = moment
        outcome = step(Third(clock, needed=99, timeout=timedelta(seconds=90)), resumed(outcome, moment))
    assert waits == [60.0, 30.0]
    assert isinstance(outcome, StepFailed)
    assert outcome.error.startswith("SensorTimeout: ")


def test_a_sensor_that_was_resumed_finds() -> None:
    clock = Clock()
    deferred = step(Third(clock))
    assert returned(step(Third(clock, needed=1), resumed(deferred, NOW))) == "found"
    assert clock.pauses == []


def test_a_bare_bool_is_enough_to_find_and_leaves_nothing() -> None:
    class Finds(BaseSensorOperator):
        def poke(self, context: Any) -> bool:
            return True

    assert step(Finds(task_id="sense")) == StepSucceeded()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": "reschedule"}, "mode must be 'poke' or 'deferrable', not 'reschedule'"),
        ({"timeout": 60}, "timeout must be a timedelta of more than 0, not 60"),
        ({"poke_interval": timedelta(0)}, "poke_interval must be a timedelta of more than 0"),
    ],
)
def test_bad_options_of_a_sensor_are_refused(options: dict[str, Any], problem: str) -> None:
    with DAG("orders"), pytest.raises(DagMalformed, match=f"DAG 'orders', task 'sense': {problem}"):
        Third(Clock(), **options)


# --- sensors that wait with a trigger ------------------------------------------------------------


def test_a_moment_is_waited_for_by_a_trigger() -> None:
    target = NOW.astimezone(timezone(timedelta(hours=2)))
    sensor = DateTimeSensor(task_id="sense", target_time=target.isoformat(), timeout=timedelta(hours=1))
    deferred = step(sensor)
    assert isinstance(deferred, StepDeferred)
    assert (deferred.next_method, deferred.timeout_s) == ("execute_complete", 3600.0)
    (event,) = run_trigger(trigger_of(deferred))
    assert event.payload == NOW
    again = DateTimeSensor(task_id="sense", target_time=target)
    assert returned(step(again, resumed(deferred, event.payload))) == NOW


@pytest.mark.parametrize("target", ["2026-01-01T00:00", "soon", 7])
def test_a_moment_that_is_none_is_refused(target: Any) -> None:
    with DAG("orders"), pytest.raises(DagMalformed, match="DAG 'orders', task 'sense': target_time: "):
        DateTimeSensor(task_id="sense", target_time=target)


@pytest.mark.parametrize(
    ("target", "zone", "moment"),
    [
        (time(6), "Europe/Berlin", datetime(2026, 3, 1, 5, tzinfo=UTC)),
        (time(22, 30), None, datetime(2026, 3, 1, 22, 30, tzinfo=UTC)),
        (time(6, tzinfo=timezone(timedelta(hours=13))), "Europe/Berlin", datetime(2026, 3, 1, 17, tzinfo=UTC)),
    ],
)
def test_a_time_of_day_is_that_of_today_on_its_own_clock_or_that_of_the_dag(
    target: time, zone: str | None, moment: datetime
) -> None:
    class AtNoon(TimeSensor):
        def _now(self) -> datetime:
            return NOW

    sensor = AtNoon(task_id="sense", target_time=target, dag=DAG("orders", timezone=zone))
    deferred = step(sensor)
    assert isinstance(deferred, StepDeferred)
    assert decode_value(deferred.kwargs) == {"moment": moment}


def test_a_time_of_day_that_is_none_is_refused() -> None:
    not_one: Any = "06:00"
    with pytest.raises(DagMalformed, match=r"target_time must be a datetime.time, not '06:00'"):
        TimeSensor(task_id="sense", target_time=not_one)


def test_a_file_is_waited_for_by_a_trigger(tmp_path: Path) -> None:
    def sensor() -> FileSensor:
        return FileSensor(task_id="sense", filepath=tmp_path / "in-*.csv", poke_interval=timedelta(seconds=2))

    deferred = step(sensor())
    assert isinstance(deferred, StepDeferred)
    assert decode_value(deferred.kwargs) == {"path": str(tmp_path / "in-*.csv"), "poke_interval_s": 2.0}
    (tmp_path / "in-1.csv").write_text("a,b")
    (event,) = run_trigger(trigger_of(deferred))
    found = returned(step(sensor(), resumed(deferred, event.payload)))
    assert (found["path"], found["size"]) == (str(tmp_path / "in-1.csv"), 3)


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(DagMalformed, match="task 'sense': filepath: '' is not a path"):
        FileSensor(task_id="sense", filepath="")


@pytest.fixture
def url() -> Iterator[str]:
    """A server that has nothing at the first request, and an answer from the second on."""
    codes = [404, 200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes.pop(0) if len(codes) > 1 else codes[0])
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"ready")

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/job"
        server.shutdown()
        thread.join()


def test_an_answer_is_waited_for_by_a_trigger(url: str) -> None:
    def sensor() -> HttpSensor:
        return HttpSensor(task_id="sense", url=url, headers={"Accept": "text/plain"}, tries_max=2)

    deferred = step(sensor())
    assert isinstance(deferred, StepDeferred)
    kwargs = decode_value(deferred.kwargs)
    assert (kwargs["url"], kwargs["headers"], kwargs["tries_max"]) == (url, {"Accept": "text/plain"}, 2)
    assert (kwargs["poll_interval_s"], kwargs["timeout_s"]) == (5.0, 10.0)
    (event,) = run_trigger(trigger_of(deferred))
    found = returned(step(sensor(), resumed(deferred, event.payload)))
    assert (found["status"], found["body"]) == (200, "ready")


def test_a_request_that_is_none_is_refused() -> None:
    with pytest.raises(DagMalformed, match="task 'sense': url must start with http"):
        HttpSensor(task_id="sense", url="ftp://example.org")


def test_a_deferral_that_timed_out_is_the_sensors_timeout() -> None:
    failed = step(DateTimeSensor(task_id="sense", target_time=FAR), timed_out())
    assert isinstance(failed, StepFailed)
    assert (
        failed.error
        == "SensorTimeout: the sensor 'sense' has waited for 7 days, 0:00:00: its timeout of 7 days, 0:00:00 is over"
    )
    assert not failed.may_retry
    skipped = step(DateTimeSensor(task_id="sense", target_time=FAR, soft_fail=True), timed_out())
    assert isinstance(skipped, StepSkipped)


def test_a_trigger_that_failed_is_an_error_even_where_a_timeout_skips() -> None:
    kwargs = {"error": "no route", "traceback": "", "reason": REASON_FAILURE}
    resumption = Resumption(FAIL_METHOD, encode_value(kwargs, where="kwargs"))
    outcome = step(DateTimeSensor(task_id="sense", target_time=FAR, soft_fail=True), resumption)
    assert isinstance(outcome, StepFailed)
    assert (outcome.error, outcome.may_retry) == ("TaskDeferralError: no route", True)


# --- the same triggers on the worker -------------------------------------------------------------


def test_a_sensor_can_wait_on_the_worker_with_the_same_trigger(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    found = returned(step(FileSensor(task_id="sense", filepath=tmp_path / "here", mode="poke")))
    assert found["path"] == str(tmp_path / "here")
    past = DateTimeSensor(task_id="sense", target_time=NOW - timedelta(days=365), mode="poke")
    assert returned(step(past)) == NOW - timedelta(days=365)


def test_waiting_on_the_worker_ends_in_time() -> None:
    failed = step(DateTimeSensor(task_id="sense", target_time=FAR, mode="poke", timeout=NO_TIME))
    assert isinstance(failed, StepFailed)
    assert failed.error.startswith("SensorTimeout: ")
    skipped = step(DateTimeSensor(task_id="sense", target_time=FAR, mode="poke", timeout=NO_TIME, soft_fail=True))
    assert isinstance(skipped, StepSkipped)


class Fires(BaseTrigger):
    """Fires what it was made with, and notes that it was cleaned up."""

    def __init__(self, *events: TriggerEvent) -> None:
        self.events = events
        self.cleaned = 0

    def serialize(self) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError

    async def run(self) -> Any:
        for event in self.events:
            yield event

    async def cleanup(self) -> None:
        self.cleaned += 1


class Runs(TriggerSensor):
    """Waits with the trigger it is given."""

    def __init__(self, trigger: BaseTrigger) -> None:
        super().__init__(task_id="sense", mode="poke")
        self.trigger = trigger

    def make_trigger(self, context: Any) -> BaseTrigger:
        return self.trigger


def test_an_event_that_ends_the_task_ends_it_on_the_worker_too() -> None:
    xcoms = {"rows": 3}
    done = step(Runs(Fires(TaskSuccessEvent(xcoms=xcoms), TriggerEvent("never read"))))
    assert isinstance(done, StepSucceeded)
    assert [(xcom.key, xcom.value) for xcom in done.xcoms] == [("rows", b"3")]
    failed = step(Runs(Fires(TaskFailedEvent(xcoms=xcoms))))
    assert isinstance(failed, StepFailed)
    assert (failed.may_retry, len(failed.xcoms)) == (True, 1)
    skipped = step(Runs(Fires(TaskSkippedEvent())))
    assert isinstance(skipped, StepSkipped)
    assert skipped.xcoms == ()


def test_a_trigger_on_the_worker_is_cleaned_up_and_must_fire() -> None:
    trigger = Fires()
    outcome = step(Runs(trigger))
    assert isinstance(outcome, StepFailed)
    assert "Fires returned before its first event" in outcome.error
    assert trigger.cleaned == 1
