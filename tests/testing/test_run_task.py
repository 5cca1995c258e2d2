"""`run_task`: what it runs is what production runs, and what would fail there fails here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import trio

from headgate.tasks import (
    DAG,
    BaseOperator,
    BaseSensorOperator,
    Connection,
    DateTimeSensor,
    FileSensor,
    PythonOperator,
    StartTriggerArgs,
    TaskDeferralError,
    TaskDeferred,
    TaskFailed,
    TaskSkipped,
    TriggerDagRunOperator,
    Variable,
    task,
)
from headgate.testing import (
    CreatedRun,
    LeftBehind,
    LoopBlocked,
    Misbehaved,
    RoundTripFailed,
    TaskNeverEnds,
    TaskNotSuccessful,
    run_task,
    run_trigger,
)
from headgate.triggers.base import (
    BaseTrigger,
    TaskFailedEvent,
    TaskSkippedEvent,
    TaskSuccessEvent,
    TriggerEvent,
)
from headgate.triggers.temporal import TimeDeltaTrigger

HOUR = timedelta(hours=1)
KILLED: list[str] = []


class Behaving(BaseTrigger):
    """Does what its kwargs say."""

    def __init__(self, how: str, value: Any = None) -> None:
        self.how = how
        self.value = value

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Behaving", {"how": self.how, "value": self.value}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.sleep(3600)
        match self.how:
            case "event":
                yield TriggerEvent(self.value)
                await trio.sleep_forever()
            case "success":
                yield TaskSuccessEvent(xcoms=self.value)
            case "failed":
                yield TaskFailedEvent(xcoms=self.value)
            case "skipped":
                yield TaskSkippedEvent()
            case "variable":
                yield TriggerEvent(await self.get_variable(self.value))
            case "connection":
                yield TriggerEvent((await self.get_connection(self.value)).host)
            case "blocks":
                time.sleep(0.5)  # noqa: ASYNC251 - this is the offence
                yield TriggerEvent()
            case _:
                raise ValueError(self.value)

    async def cleanup(self) -> None:
        if self.how == "event" and self.value == "unclean":
            raise RuntimeError("cleanup")

    async def on_kill(self) -> None:
        KILLED.append(self.how)


class Waits(BaseOperator):
    """Defers to a `Behaving`, and returns how it went on."""

    def __init__(self, how: str = "event", value: Any = None, timeout: timedelta | None = None, **options: Any) -> None:
        super().__init__(**{"task_id": "waits", **options})
        self.how, self.value, self.timeout = how, value, timeout
        self.seen: list[str] = []

    def execute(self, context: Any) -> None:
        self.seen.append("execute")
        self.local = "lost"
        context["ti"].xcom_push("before", 1)
        self.defer(
            trigger=Behaving(self.how, self.value),
            method_name="resume",
            kwargs={"since": datetime.now(UTC), "of": (1, 2)},
            timeout=self.timeout,
        )

    def resume(self, context: Any, event: Any, since: datetime, of: tuple[int, int]) -> dict[str, Any]:
        waited = round((datetime.now(UTC) - since) / HOUR)
        return {"event": event, "of": of, "seen": self.seen, "local": hasattr(self, "local"), "waited": waited}


# --- the round ------------------------------------------------------------------------------------


def test_a_task_defers_and_is_resumed_as_a_new_instance() -> None:
    result = run_task(Waits(value={"rows": {3, 4}}))
    assert result.value == {"event": {"rows": {3, 4}}, "of": (1, 2), "seen": [], "local": False, "waited": 1}
    assert result.xcoms["before"] == 1
    (deferral,) = result.deferrals
    assert (deferral.classpath, deferral.trigger_kwargs) == (
        f"{__name__}.Behaving",
        {"how": "event", "value": {"rows": {3, 4}}},
    )
    assert (deferral.method_name, deferral.kwargs["of"], deferral.event) == ("resume", (1, 2), {"rows": {3, 4}})
    assert result.waited == HOUR


def test_a_step_has_what_the_step_before_has_left() -> None:
    class Remembers(Waits):
        def resume(self, context: Any, event: Any, since: datetime, of: tuple[int, int]) -> Any:
            own = context["ti"].xcom_pull(task_ids=self.task_id, key="before")
            return own, context["ti"].xcom_pull(task_ids=self.task_id, key="other")

    assert run_task(Remembers()).value == (1, None)


def test_the_operator_that_was_given_is_not_touched_and_a_factory_is_called_for_each_step() -> None:
    operator = Waits()
    assert run_task(operator).value["seen"] == []
    assert operator.seen == []
    made: list[Waits] = []

    def make() -> Waits:
        made.append(Waits())
        return made[-1]

    assert run_task(make).state == "success"
    assert [each.seen for each in made] == [[], ["execute"], []]  # the first is looked at: it may start in its trigger


def test_what_cannot_be_copied_is_shared() -> None:
    operator = Waits()
    operator.lock = threading.RLock()  # type: ignore[attr-defined]
    assert run_task(operator).state == "success"


def test_no_wait_is_a_users_kill() -> None:
    KILLED.clear()
    run_task(Waits())
    assert KILLED == []


@pytest.mark.parametrize(
    ("how", "value", "state", "xcoms"),
    [
        ("success", {"n": 1}, "success", {"before": 1, "n": 1}),
        ("success", None, "success", {"before": 1}),
        ("failed", {"n": 2}, "failed", {"before": 1, "n": 2}),
        ("skipped", None, "skipped", {"before": 1}),
    ],
)
def test_an_event_can_end_the_task(how: str, value: Any, state: str, xcoms: dict[str, Any]) -> None:
    result = run_task(Waits(how, value))
    assert (result.state, result.xcoms) == (state, xcoms)
    assert len(result.deferrals) == 1


def test_a_trigger_that_fails_resumes_the_task_to_fail() -> None:
    result = run_task(Waits("raises", "no luck"))
    assert result.state == "failed"
    assert result.error.startswith("TaskDeferralError: ValueError: no luck")
    assert "in run\n" in result.error
    assert result.deferrals[0].failure == "ValueError: no luck"
    with pytest.raises(TaskNotSuccessful, match="the task is failed: TaskDeferralError: ValueError: no luck"):
        _ = result.value


def test_a_task_may_catch_the_failure_of_its_trigger() -> None:
    class Catches(Waits):
        def resume_execution(self, next_method: str, next_kwargs: Any, event: Any, context: Any) -> Any:
            try:
                return super().resume_execution(next_method, next_kwargs, event, context)
            except TaskDeferralError as error:
                return error.error

    assert run_task(Catches("raises", "no luck")).value == "ValueError: no luck"


def test_a_deferrals_timeout_is_over_before_the_trigger_has_fired() -> None:
    result = run_task(Waits(timeout=timedelta(minutes=30)))
    assert result.error.startswith("TriggerTimeout: ")
    assert result.waited == timedelta(minutes=30)
    assert run_task(Waits(timeout=timedelta(minutes=90))).state == "success"


def test_a_task_that_waits_for_ever_is_an_error_of_the_test() -> None:
    with pytest.raises(TaskNeverEnds, match=r"the trigger of 'waits', .*Behaving, has fired nothing within 0:30:00"):
        run_task(Waits(), within=timedelta(minutes=30))


def test_what_is_no_task_and_no_list_of_signals_is_refused() -> None:
    @task
    def train() -> None:
        """Do nothing."""

    with pytest.raises(TypeError, match=r"train makes a task: give the task itself, dag.tasks\[...\]"):
        run_task(train)
    signals: Any
    for signals, problem in (
        (["a"], r"signals are given as lists of values by key, as .*, not \['a'\]"),
        ({"a": 1}, "the signals of 'a' are given as a list of values, not 1"),
        ({"a": "text"}, "the signals of 'a' are given as a list of values, not 'text'"),
    ):
        with pytest.raises(TypeError, match=problem):
            run_task(Waits(), signals=signals)


def test_what_cannot_be_stored_fails_the_task_with_its_path() -> None:
    result = run_task(Waits(value=object()))
    assert result.state == "failed"
    assert "Behaving kwargs['value'] is an object" in result.error


class Forgets(Behaving):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Forgets", {"how": self.how, "wrong": 1}


def test_a_trigger_that_cannot_be_made_again_is_found() -> None:
    def call() -> None:
        raise TaskDeferred(trigger=Forgets("event"), method_name="execute")

    with pytest.raises(RoundTripFailed, match=r"Forgets cannot be constructed from its kwargs \(how, wrong\)"):
        run_task(PythonOperator(task_id="t", python_callable=call))


def test_a_trigger_that_blocks_or_misbehaves_is_found() -> None:
    with pytest.raises(LoopBlocked):
        run_task(Waits("blocks"))
    with pytest.raises(Misbehaved, match="a hook failed"):
        run_task(Waits(value="unclean"))


class Leaves(Behaving):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.socket = socket.socket()
        LEFT.append(self.socket)
        yield TriggerEvent()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Leaves", {"how": self.how}


LEFT: list[Any] = []


def test_what_a_trigger_leaves_behind_is_found() -> None:
    def call() -> None:
        raise TaskDeferred(trigger=Leaves("event"), method_name="execute")

    with pytest.raises(LeftBehind):
        run_task(PythonOperator(task_id="t", python_callable=call))
    LEFT.pop().close()


def test_a_task_that_starts_in_its_trigger_runs_no_execute() -> None:
    class Starts(Waits):
        start_from_trigger = True
        start_trigger_args = StartTriggerArgs(
            f"{__name__}.Behaving", "resume", {"how": "event", "value": 7}, {"since": datetime.now(UTC), "of": (0, 0)}
        )

    result = run_task(Starts())
    assert result.value["event"] == 7
    assert "before" not in result.xcoms


# --- sensors, functions, other ends ---------------------------------------------------------------


class Counts(BaseSensorOperator):
    """Pokes as often as the list of its class says."""

    pokes: list[int] = []  # noqa: RUF012 - shared on purpose: the world outside

    def poke(self, context: Any) -> bool:
        self.pokes.append(1)
        return len(self.pokes) >= 3


@pytest.mark.parametrize("mode", ["deferrable", "poke"])
def test_a_sensors_pokes_and_timeout_are_in_skipped_time(mode: Any) -> None:
    Counts.pokes.clear()
    result = run_task(Counts(task_id="s", mode=mode))
    assert (result.state, len(Counts.pokes), result.waited) == ("success", 3, timedelta(minutes=2))
    assert len(result.deferrals) == (2 if mode == "deferrable" else 0)
    Counts.pokes.clear()
    timed_out = run_task(Counts(task_id="s", mode=mode, timeout=timedelta(seconds=30)))
    assert timed_out.error == "SensorTimeout: the sensor 's' has waited for 0:00:30: its timeout of 0:00:30 is over"
    assert not timed_out.may_retry


class WaitsItsOwnWay(BaseSensorOperator):
    """Defers with a timeout that is not the sensor's."""

    def execute(self, context: Any, event: Any = None, waiting_since: Any = None) -> None:
        self.defer(trigger=TimeDeltaTrigger(HOUR), method_name="execute", timeout=timedelta(seconds=1))


def test_a_sensor_says_how_long_it_has_waited_and_which_timeout_is_over() -> None:
    result = run_task(WaitsItsOwnWay(task_id="s"))
    assert result.error == "SensorTimeout: the sensor 's' has waited for 0:00:01: the timeout of its deferral is over"
    assert not result.may_retry
    assert run_task(WaitsItsOwnWay(task_id="s", soft_fail=True)).state == "skipped"


class WaitsFiveHours(BaseOperator):
    """Waits for an hour, five times; ``begun`` are the steps."""

    begun: list[int] = []  # noqa: RUF012 - shared on purpose: the world outside

    def execute(self, context: Any, event: Any = None, waits: int = 0) -> str:
        self.begun.append(waits)
        if waits < 5:
            self.defer(trigger=TimeDeltaTrigger(HOUR), method_name="execute", kwargs={"waits": waits + 1})
        return "done"


def test_the_execution_timeout_is_over_during_the_third_wait() -> None:
    WaitsFiveHours.begun.clear()
    result = run_task(WaitsFiveHours(task_id="a", execution_timeout=timedelta(minutes=150)))
    assert (result.state, result.waited, result.may_retry) == ("failed", timedelta(minutes=150), True)
    assert result.error.startswith("TaskDeferralError: its execution_timeout is over")
    assert WaitsFiveHours.begun == [0, 1, 2]


def test_no_step_begins_when_the_execution_timeout_is_over_and_none_outlasts_it() -> None:
    WaitsFiveHours.begun.clear()
    assert run_task(WaitsFiveHours(task_id="a", execution_timeout=6 * HOUR)).value == "done"

    def sleep_too_long() -> str:
        time.sleep(100.0)
        return "too late"

    sleeper = PythonOperator(task_id="a", python_callable=sleep_too_long, execution_timeout=timedelta(seconds=60))
    result = run_task(sleeper)
    assert (result.state, result.error, result.xcoms) == ("failed", "its execution_timeout is over", {})


class EndsInItsTrigger(BaseOperator):
    """Has no method to resume in."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.how = how

    def execute(self, context: Any) -> None:
        self.defer(trigger=Behaving(self.how), method_name=None)


def test_a_deferral_without_a_method_is_ended_by_its_trigger() -> None:
    assert run_task(EndsInItsTrigger("success", task_id="a")).state == "success"
    failed = run_task(EndsInItsTrigger("event", task_id="a"))
    assert failed.state == "failed"
    assert "an event that does not end the task, and the deferral has no method_name" in failed.error


def test_sensors_that_come_ready_made(tmp_path: Any) -> None:
    moment = datetime.now(UTC) + timedelta(days=3)
    assert run_task(DateTimeSensor(task_id="s", target_time=moment), within=timedelta(days=4)).value == moment
    result = run_task(FileSensor(task_id="s", filepath=tmp_path / "none", poke_interval=HOUR / 60, timeout=HOUR))
    assert result.error.startswith("SensorTimeout")
    assert result.waited == HOUR
    assert (
        run_task(
            FileSensor(task_id="s", filepath=tmp_path / "none", poke_interval=HOUR / 60, timeout=HOUR, soft_fail=True)
        ).state
        == "skipped"
    )


def test_a_task_of_a_decorated_function_in_a_dag() -> None:
    with DAG("d"):

        @task
        def first() -> int:
            return 1

        @task
        def second(n: int, ti: Any, event: Any = None) -> list[Any]:
            if event is None:
                raise TaskDeferred(trigger=TimeDeltaTrigger(HOUR), method_name="execute")
            return [n, ti.dag_id, ti.run_id, type(event).__name__]

        output = second(first())
    assert run_task(output, xcoms={"first": 5}).value == [5, "d", "test", "datetime"]
    assert run_task(output).value == [None, "d", "test", "datetime"], "as if the first had returned None"


def test_other_ends_and_what_a_context_holds() -> None:
    def ends(error: BaseException) -> Any:
        def call() -> None:
            raise error

        return run_task(PythonOperator(task_id="t", python_callable=call))

    assert (ends(TaskSkipped("enough")).state, ends(TaskSkipped("enough")).error) == ("skipped", "enough")
    assert (ends(TaskFailed("no")).may_retry, ends(ValueError("no")).may_retry) == (False, True)
    assert "raise error" in ends(ValueError("no")).traceback

    def call(params: Any, logical_date: Any, try_number: Any, ti: Any) -> list[Any]:
        return [params, logical_date, try_number, ti.xcom_pull("other", "k")]

    moment = datetime(2026, 1, 1, tzinfo=UTC)
    operator = PythonOperator(task_id="t", python_callable=call)
    result = run_task(operator, params={"a": 1}, logical_date=moment, try_number=2, xcoms={("other", "k"): {1}})
    assert result.value == [{"a": 1}, moment, 2, {1}]


# --- what it asks ---------------------------------------------------------------------------------


def test_tasks_and_triggers_find_the_variables_and_connections_given() -> None:
    def call() -> list[Any]:
        connection = Connection.get("db")
        return [Variable.get("region"), Variable.get_json("cfg"), connection.password, Variable.get("no", default=None)]

    operator = PythonOperator(task_id="t", python_callable=call)
    given: Any = {
        "variables": {"region": "north", "cfg": '{"a": [1]}'},
        "connections": {"db": "pg://me:hunter22@somewhere/x"},
    }
    assert run_task(operator, **given).value == ["north", {"a": [1]}, "hunter22", None]
    assert "there is no connection 'db'" in run_task(operator, variables=given["variables"]).error
    assert run_task(Waits("variable", "region"), **given).value["event"] == "north"
    assert run_task(Waits("connection", "db"), **given).value["event"] == "somewhere"
    assert "there is no variable 'region'" in run_task(Waits("variable", "region")).error
    (event,) = run_trigger(Behaving("variable", "region"), events=1, variables={"region": "south"})
    assert event.payload == "south"


def test_secrets_of_one_test_hide_nothing_in_the_next() -> None:
    def call() -> None:
        raise ValueError("it is hunter22 " + Variable.get("password", default="unknown"))

    operator = PythonOperator(task_id="t", python_callable=call)
    assert run_task(operator, variables={"password": "hunter22"}).error == "ValueError: it is *** ***"
    assert run_task(operator).error == "ValueError: it is hunter22 unknown"


def test_runs_that_a_task_begins_are_told() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    operator = TriggerDagRunOperator(
        task_id="t", trigger_dag_id="other", conf={"n": {1}}, logical_date=moment, wait_for_completion=True
    )
    result = run_task(operator, runs={"other": [None, "running", "success"]})
    assert result.created_runs == [CreatedRun("other", result.value, {"n": {1}}, moment)]
    assert result.xcoms["trigger_run_id"] == result.value
    assert result.waited == timedelta(seconds=10)
    with pytest.raises(TaskNeverEnds):
        run_task(operator, within=HOUR)
    assert "there is no DAG named 'other'" in run_task(operator, runs={"another": "success"}).error


@pytest.mark.parametrize(
    ("timeout", "start_timeout", "waited"),
    [(HOUR, None, HOUR), (None, None, timedelta(days=7)), (HOUR, 2 * HOUR, HOUR), (2 * HOUR, HOUR, HOUR)],
)
def test_a_sensor_that_starts_in_its_trigger_has_its_timeout(
    tmp_path: Any, timeout: timedelta | None, start_timeout: timedelta | None, waited: timedelta
) -> None:
    kwargs = {"path": str(tmp_path / "none"), "poke_interval_s": 1800.0}
    start = StartTriggerArgs("headgate.triggers.file.FileTrigger", "execute_complete", kwargs, timeout=start_timeout)
    make = partial(FileSensor, task_id="s", filepath=tmp_path / "none", start_from_trigger=True)
    sensor = make(start_trigger_args=start) if timeout is None else make(start_trigger_args=start, timeout=timeout)
    result = run_task(sensor, within=timedelta(days=8))
    assert result.error.startswith("SensorTimeout: the sensor 's' has waited for")
    assert (result.waited, result.may_retry) == (waited, False)
