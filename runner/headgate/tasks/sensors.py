"""Sensors: tasks that wait for something, without a worker unless ``mode="poke"``."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from typing import Any, ClassVar, Final, Literal, NoReturn, Required, Unpack, cast

import msgspec
import trio

from headgate.child import queries
from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.dags import StartTrigger
from headgate.protocol.messages.queries import QueryResult, TriggerQuery
from headgate.protocol.messages.signals import (
    DEFAULT_NAMESPACE,
    SIGNAL_BYTES_MAX,
    SIGNAL_TRIGGER,
    Predicate,
    SignalWait,
    Since,
    wait_problem,
)
from headgate.protocol.values import encode_value
from headgate.signals.cron import read_zone
from headgate.tasks.context import Context
from headgate.tasks.errors import SensorTimeout, TaskFailed, TaskSkipped, TriggerTimeout
from headgate.tasks.graph import DAG
from headgate.tasks.operator import BaseOperator
from headgate.tasks.options import TaskOptions
from headgate.triggers.base import BaseTrigger, TriggerEvent
from headgate.triggers.file import POKE_INTERVAL_S, FileTrigger
from headgate.triggers.temporal import DateTimeTrigger, TimeDeltaTrigger, utc_now

__all__ = [
    "BaseSensorOperator",
    "DateTimeSensor",
    "FileSensor",
    "PokeReturnValue",
    "SignalSensor",
    "TimeSensor",
    "TriggerSensor",
]

TIMEOUT = timedelta(days=7)

Mode = Literal["poke", "deferrable"]


class SensorOptions(TaskOptions, total=False):
    """The options of all sensors; see `BaseSensorOperator`."""

    task_id: Required[str]
    dag: DAG | None
    mode: Mode
    poke_interval: timedelta
    timeout: timedelta
    soft_fail: bool


class PokeReturnValue:
    """A result of `BaseSensorOperator.poke` with a value: ``xcom_value`` becomes the XCom ``return_value``."""

    def __init__(self, is_done: bool, xcom_value: Any = None) -> None:
        self.is_done = is_done
        self.xcom_value = xcom_value

    def __bool__(self) -> bool:
        return self.is_done


class BaseSensorOperator(BaseOperator):
    """Waits until `poke`, called every ``poke_interval``, returns a true value.

    ``poke_interval`` is a minute by default. ``mode="deferrable"`` (the default) releases the worker between two pokes,
    ``"poke"`` keeps it. ``timeout`` after the first poke of a try (or after the start, with ``start_from_trigger``) the
    task fails without another try (`SensorTimeout`), and so it does if the timeout of a deferral of its own is over.
    With ``soft_fail`` it is skipped instead, and also if `poke`, or the method in which it resumes, raises
    `TaskFailed`; any other error, and the failure of a trigger, fails the try.
    """

    poke_interval_default: ClassVar[timedelta] = timedelta(seconds=60)

    def __init__(
        self,
        *,
        mode: Mode = "deferrable",
        poke_interval: timedelta | None = None,
        timeout: timedelta = TIMEOUT,
        soft_fail: bool = False,
        task_id: str,
        dag: DAG | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(task_id=task_id, dag=dag, **options)
        if mode not in ("poke", "deferrable"):
            raise self._malformed(f"mode must be 'poke' or 'deferrable', not {mode!r:.100}")
        poke_interval = self.poke_interval_default if poke_interval is None else poke_interval
        for name, wait in (("poke_interval", poke_interval), ("timeout", timeout)):
            if not isinstance(wait, timedelta) or wait <= timedelta(0):
                raise self._malformed(f"{name} must be a timedelta of more than 0, not {wait!r:.100}")
        self.mode: Mode = mode
        self.poke_interval = poke_interval
        self.timeout = timeout
        self.soft_fail = soft_fail

    def poke(self, context: Context) -> bool | PokeReturnValue:
        """Return whether the condition is met."""
        raise NotImplementedError(f"{type(self).__name__} does not override poke")

    def execute(self, context: Context, event: Any = None, waiting_since: datetime | None = None) -> Any:
        """Poke until the condition is met; ``waiting_since`` is the time of the first poke of this try."""
        since = waiting_since or self._now()
        while True:
            try:
                found = self.poke(context)
            except TaskFailed as error:
                self._fail_softly(error)
            if found:
                return found.xcom_value if isinstance(found, PokeReturnValue) else None
            left = since + self.timeout - self._now()
            if left <= timedelta(0):
                self._give_up(self._now() - since)
            # The last poke is when the timeout is over, not before.
            pause = min(self.poke_interval, left)
            if self.mode == "deferrable":
                # The deferral needs no timeout: the wait is short, and the sensor checks its own timeout after it.
                self.defer(
                    trigger=TimeDeltaTrigger(pause, clock=self._now),
                    method_name="execute",
                    kwargs={"waiting_since": since},
                )
            self._pause(pause.total_seconds())

    def _start_trigger(self) -> StartTrigger:
        start = super()._start_trigger()
        timeout_s = self.timeout.total_seconds()
        if start.timeout_s is not None:
            timeout_s = min(timeout_s, start.timeout_s)
        return msgspec.structs.replace(start, timeout_s=timeout_s)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any], event: Any, context: Context) -> Any:
        """Resume as every task does, but treat the timeout of a deferral as the sensor's, and heed ``soft_fail``."""
        try:
            return super().resume_execution(next_method, next_kwargs, event, context)
        except TriggerTimeout as error:
            self._give_up(error.waited, error)
        except TaskFailed as error:
            self._fail_softly(error)

    # Overridden in tests, which do not wait.

    def _now(self) -> datetime:
        return utc_now()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _give_up(self, waited: timedelta | None, cause: Exception | None = None) -> NoReturn:
        """Give up after a wait that has lasted for ``waited``, None if that is not known."""
        if waited is None or waited >= self.timeout - timedelta(milliseconds=1):  # it is stored in whole ones
            which = f"its timeout of {self.timeout} is over"
        else:
            which = "the timeout of its deferral is over"
        so_long = "" if waited is None else f" has waited for {_in_whole_seconds(waited)}:"
        self._fail_softly(SensorTimeout(f"the sensor {self.task_id!r}{so_long or ':'} {which}"), cause)

    def _fail_softly(self, error: TaskFailed, cause: Exception | None = None) -> NoReturn:
        """Raise the error, or skip the task because of it with ``soft_fail``."""
        if self.soft_fail:
            raise TaskSkipped(str(error)) from error
        if cause is None:
            raise error
        raise error from cause


def _in_whole_seconds(waited: timedelta) -> timedelta:
    """Return a time without the fraction of a second, unless it is all there is."""
    return timedelta(seconds=int(waited.total_seconds())) if waited >= timedelta(seconds=1) else waited


class TriggerSensor(BaseSensorOperator):
    """A sensor that waits with a trigger: it defers once, and returns the payload of the event.

    A subclass overrides `make_trigger`. ``mode="poke"`` runs the same trigger on the worker. If the trigger fails, the
    try fails.
    """

    def make_trigger(self, context: Context) -> BaseTrigger:
        """Return the trigger to wait with."""
        raise NotImplementedError(f"{type(self).__name__} does not override make_trigger")

    def _check_trigger(self, prefix: str = "") -> None:
        """Raise `DagMalformed` if the trigger refuses its arguments; for triggers that need nothing of the context."""
        try:
            self.make_trigger(cast(Context, {}))
        except (TypeError, ValueError) as error:
            raise self._malformed(f"{prefix}{error}") from None

    def poke(self, context: Context) -> NoReturn:
        """Not used: the trigger waits."""
        raise NotImplementedError(f"{type(self).__name__} waits with a trigger, and has no poke")

    def execute(self, context: Context, event: Any = None, waiting_since: datetime | None = None) -> Any:
        """Defer to the trigger, or run it on the worker."""
        trigger = self.make_trigger(context)
        if self.mode == "deferrable":
            self.defer(trigger=trigger, method_name="execute_complete", timeout=self.timeout)
        try:
            fired = trio.run(first_event_here, trigger, self.timeout.total_seconds())
        except trio.TooSlowError as error:
            self._give_up(self.timeout, error)
        return self._complete_here(fired, context)

    def execute_complete(self, context: Context, event: Any = None) -> Any:
        """Return the event's payload."""
        return event

    def _complete_here(self, fired: TriggerEvent, context: Context) -> Any:
        """Handle the event as the supervisor does for a deferred task."""
        if fired.kind == "event":
            return self.execute_complete(context, event=fired.payload)
        for key, value in ((fired.payload or {}).get("xcoms") or {}).items():
            context["ti"].xcom_push(key, value)
        if fired.kind == "skipped":
            raise TaskSkipped(f"{self.task_id!r}: its trigger fired a TaskSkippedEvent")
        if fired.kind == "failed":
            raise RuntimeError(f"{self.task_id!r}: its trigger fired a TaskFailedEvent")
        return None


class DateTimeSensor(TriggerSensor):
    """Waits until ``target_time``, an aware datetime or the ISO text of one. Returns it in UTC."""

    def __init__(self, *, target_time: datetime | str, **options: Unpack[SensorOptions]) -> None:
        super().__init__(**options)
        try:
            moment = datetime.fromisoformat(target_time) if isinstance(target_time, str) else target_time
            self.target_time = DateTimeTrigger(moment).moment
        except (TypeError, ValueError) as error:
            raise self._malformed(f"target_time: {error}") from None

    def make_trigger(self, context: Context) -> BaseTrigger:
        """Return a `DateTimeTrigger` for the moment."""
        return DateTimeTrigger(self.target_time, clock=self._now)


class TimeSensor(TriggerSensor):
    """Waits until ``target_time`` on the day on which the try begins; does not wait if that has passed.

    The time is in its own zone if it has one, else in the DAG's. Of a time that occurs twice on that day it is the
    first; a time that does not occur is the moment at which the clock skips it. Returns the moment in UTC.
    """

    def __init__(self, *, target_time: time_of_day, **options: Unpack[SensorOptions]) -> None:
        super().__init__(**options)
        if not isinstance(target_time, time_of_day):
            raise self._malformed(f"target_time must be a datetime.time, not {target_time!r:.100}")
        self.target_time = target_time

    def make_trigger(self, context: Context) -> BaseTrigger:
        """Return a `DateTimeTrigger` for that time today."""
        zone = self.target_time.tzinfo or (UTC if self.dag is None else read_zone(self.dag.timezone))
        today = self._now().astimezone(zone).date()
        return DateTimeTrigger(datetime.combine(today, self.target_time, tzinfo=zone), clock=self._now)


class FileSensor(TriggerSensor):
    """Waits for a file or a folder at ``filepath``, which may be a pattern. Returns the payload of `FileTrigger`."""

    poke_interval_default = timedelta(seconds=POKE_INTERVAL_S)
    template_fields = ("filepath",)

    def __init__(self, *, filepath: str | os.PathLike[str], **options: Unpack[SensorOptions]) -> None:
        super().__init__(**options)
        self.filepath = filepath
        self._check_trigger("filepath: ")

    def make_trigger(self, context: Context) -> BaseTrigger:
        """Return a `FileTrigger` for the path."""
        return FileTrigger(self.filepath, poke_interval_s=self.poke_interval.total_seconds())


class _Any:
    def __repr__(self) -> str:
        return "<any value>"


ANY: Final = _Any()  # means that no value was given, because None may be one


class SignalSensor(BaseSensorOperator):
    """Waits for a signal under ``key`` with this ``value``, or one that meets a ``predicate``. Returns its value.

    It waits in the database: it has no worker and no trigger, and neither when it ends. Its XCom ``version`` is the
    version of the signal. Signals count that were sent since the run was created; with ``since="latest"`` the newest
    one before that counts as well. A signal for another run alone never does. Values are equal as `==` says of their
    JSON form, so the order of the keys in a dict does not matter; predicates are those of `headgate.signals.On`.

    After ``timeout`` it fails as every sensor, on a worker; with ``soft_fail`` it is skipped.
    """

    start_from_trigger = True

    def __init__(
        self,
        *,
        key: str,
        value: Any = ANY,
        namespace: str = DEFAULT_NAMESPACE,
        since: Since = "run",
        predicate: Predicate | None = None,
        **options: Unpack[SensorOptions],
    ) -> None:
        super().__init__(**options)
        for name in ("mode", "poke_interval", "start_from_trigger", "start_trigger_args"):
            if name in options:
                raise self._malformed(f"{name} is not for a SignalSensor, which waits in the database alone")
        for name, text in (("key", key), ("namespace", namespace)):
            if not isinstance(text, str):
                raise self._malformed(f"the {name} must be a str, not {text!r:.100}")
        if since not in ("run", "latest"):
            raise self._malformed(f"since must be 'run' or 'latest', not {since!r:.100}")
        if predicate is not None and not (isinstance(predicate, Predicate) and isinstance(value, _Any)):
            raise self._malformed(
                f"the predicate must be made by a function as at_least(), without a value: {predicate!r:.100}"
            )
        encoded = None
        try:
            if not isinstance(value, _Any):
                encoded = encode_value(value, where="value", bytes_max=SIGNAL_BYTES_MAX)
        except ProtocolError as error:
            raise self._malformed(str(error)) from None
        self.signal = SignalWait(key, namespace, encoded, since, predicate)
        if (problem := wait_problem(self.signal)) is not None:
            raise self._malformed(problem)

    def poke(self, context: Context) -> NoReturn:
        """Not used: the database waits."""
        raise NotImplementedError(f"{type(self).__name__} waits in the database, and has no poke")

    def _start_trigger(self) -> StartTrigger:
        timeout_s = self.timeout.total_seconds()
        return StartTrigger(SIGNAL_TRIGGER, b"{}", "execute", b"{}", timeout_s, signal=self.signal)


async def first_event_here(trigger: BaseTrigger, timeout_s: float) -> TriggerEvent:
    """Run a trigger on this loop until its first event; its queries are sent by the step.

    Raises `trio.TooSlowError`, and all exceptions of the trigger.
    """
    with queries.trigger_queries_handled_by(_send_as_step):
        events = trigger.run()
        try:
            with trio.fail_after(timeout_s):
                async for event in events:
                    return event
        finally:
            with trio.CancelScope(shield=True):
                if (close := getattr(events, "aclose", None)) is not None:
                    await close()
                await trigger.cleanup()
    raise TaskFailed(f"{type(trigger).__name__} returned before its first event")


async def _send_as_step(query: TriggerQuery) -> QueryResult:
    await trio.lowlevel.checkpoint()
    return queries.send_query(query)  # it blocks this loop, on which nothing else runs
