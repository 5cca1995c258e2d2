"""The API of trigger authors: base classes, and the events that a trigger can fire.

The names and signatures are those of ``airflow.triggers.base``, except where a docstring says so. Triggers are trio
code.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headgate.child import queries
from headgate.protocol.messages.queries import GetConnection, GetVariable, StoredEvent
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE
from headgate.protocol.messages.task_streams import HANDLER_METHOD, PoisonRule
from headgate.protocol.values import decode_value
from headgate.signals.service import query_of, versions_of
from headgate.signals.versions import Signal, SignalVersion
from headgate.triggers.named_values import REQUIRED, Connection, connection_of, variable_json, variable_text

if TYPE_CHECKING:
    from headgate.streams.contract import SharedStreamProducer

__all__ = [
    "BaseEventTrigger",
    "BaseTrigger",
    "LastEventUnknown",
    "StartTriggerArgs",
    "TaskFailedEvent",
    "TaskSkippedEvent",
    "TaskSuccessEvent",
    "TriggerEvent",
]


class LastEventUnknown(Exception):
    """The supervisor did not answer which event of the trigger is the newest."""


class TriggerEvent:
    """An event, which a trigger fires when its condition is met.

    ``payload`` is any value that `headgate.protocol.values` can encode. ``key`` identifies the event, for a
    trigger outside a shared stream: a second event of the same trigger with the same key is counted as a
    redelivery and not stored again (I2). In a shared stream whose producer names its messages
    (``event_key``), that name is the key, and this one is not used. Raises ValueError for an empty one.

    ``is_last``: the trigger will fire no other, so the stream of its task is over with this one. The code behind the
    ``yield`` still runs, for as long as a cancelled trigger may take to end; an event that it fires is an error in the
    log, and is not stored.
    """

    __slots__ = ("is_last", "key", "payload")

    kind: ClassVar[Literal["event", "success", "failed", "skipped"]] = "event"

    def __init__(self, payload: Any = None, *, key: str | None = None, is_last: bool = False) -> None:
        if key is not None and not isinstance(key, str):
            raise TypeError(f"key must be a str or None, not {type(key).__name__}")
        if key == "":
            raise ValueError("key must not be empty: an event without a key has None")
        if not isinstance(is_last, bool):
            raise TypeError(f"is_last must be a bool, not {type(is_last).__name__}")
        self.payload = payload
        self.key = key
        self.is_last = is_last

    def __repr__(self) -> str:
        key = "" if self.key is None else f", key={self.key!r}"
        last = ", is_last=True" if self.is_last and self.kind == "event" else ""
        return f"{type(self).__name__}({self.payload!r}{key}{last})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return (self.payload, self.key, self.is_last) == (other.payload, other.key, other.is_last)

    __hash__ = None  # type: ignore[assignment]  # a payload need not be hashable


class _EndOfTask(TriggerEvent):
    """Ends the waiting task without a worker; the trigger ends too."""

    __slots__ = ("xcoms",)

    def __init__(self, *, xcoms: dict[str, Any] | None = None, key: str | None = None) -> None:
        super().__init__(None if xcoms is None else {"xcoms": xcoms}, key=key, is_last=True)
        self.xcoms = xcoms


class TaskSuccessEvent(_EndOfTask):
    """Fired to end the task successfully. ``xcoms`` are pushed for it."""

    __slots__ = ()
    kind = "success"


class TaskFailedEvent(_EndOfTask):
    """Fired to end the task as failed; its retries count. ``xcoms`` are pushed for it."""

    __slots__ = ()
    kind = "failed"


class TaskSkippedEvent(_EndOfTask):
    """Fired to end the task as skipped. ``xcoms`` are pushed for it."""

    __slots__ = ()
    kind = "skipped"


@dataclass
class StartTriggerArgs:
    """The trigger that a task starts with, in the trigger runner and without a worker.

    ``stream``, ``ahead`` and ``poison`` are those of `headgate.tasks.TaskDeferred`.
    """

    trigger_cls: str
    next_method: str = HANDLER_METHOD
    trigger_kwargs: dict[str, Any] | None = None
    next_kwargs: dict[str, Any] | None = None
    timeout: timedelta | None = None
    stream: Any = None  # True, Each(), Batch() or Latest(); checked when the DAG is
    ahead: int | None = None
    poison: PoisonRule = "fail"


class ClassLogger:
    """A class attribute that is the logger of the class it is read from; an attribute of an instance hides it."""

    def __get__(self, instance: object, owner: type) -> logging.Logger:
        return logging.getLogger(f"{owner.__module__}.{owner.__qualname__}")


class BaseTrigger(abc.ABC):
    """A small async wait that is stored as ``(classpath, kwargs)`` and can be run anywhere, any number of times.

    A trigger may be moved to another process, restarted, or run twice at any time, so its only state is its
    arguments, and what `last_event` returns of an earlier run::

        # countdown.py
        import trio

        from headgate.triggers.base import BaseTrigger, TriggerEvent


        class Countdown(BaseTrigger):
            def __init__(self, seconds):
                self.seconds = seconds

            def serialize(self):
                return "countdown.Countdown", {"seconds": self.seconds}

            async def run(self):
                for left in range(self.seconds, 0, -1):
                    await trio.sleep(1)
                    yield TriggerEvent(left - 1)
    """

    log = ClassLogger()

    # Set by the host of a running trigger.
    _ask_last_event: Callable[[], Awaitable[StoredEvent | None]] | None = None

    @abc.abstractmethod
    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return ``(classpath, kwargs)`` from which an equal trigger can be constructed."""

    @abc.abstractmethod
    def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield events; written as ``async def`` with ``yield``.

        Raising is an error, and so is returning before the first event, except if an earlier run of the trigger has
        fired, or a task takes its events as a stream; both are reported with the traceback.
        """

    async def last_event(self) -> TriggerEvent | None:
        """Return the newest stored event of this trigger, from this run or an earlier one; None before the first.

        A poller continues from there after a restart. Raises `RuntimeError` outside a trigger runner, and
        `LastEventUnknown` when the database does not answer.
        """
        if self._ask_last_event is None:
            raise RuntimeError("last_event() works in a running trigger only")
        stored = await self._ask_last_event()
        return None if stored is None else TriggerEvent(decode_value(stored.payload), key=stored.key or None)

    async def get_variable(self, name: str, default: Any = REQUIRED) -> Any:
        """Return the text of a variable, ``default`` if there is none; see `headgate.tasks.Variable`.

        Each call asks the supervisor again, because the value may have changed: do not keep it in an attribute. Raises
        `VariableMissing` if there is no default either, `NoQueryHandler` outside of a trigger runner, `QueryFailed`.
        """
        return variable_text(name, await queries.send_query_from_trigger(GetVariable(name)), default)

    async def get_variable_json(self, name: str, default: Any = REQUIRED) -> Any:
        """Return what the text of a variable says as JSON. Raises as `get_variable`, and ValueError for no JSON."""
        return variable_json(name, await queries.send_query_from_trigger(GetVariable(name)), default)

    async def get_connection(self, name: str) -> Connection:
        """Return a connection; see `headgate.tasks.Connection`.

        Raises `ConnectionMissing`, ValueError for a stored text that is not a URI, `NoQueryHandler`, and `QueryFailed`.
        """
        return connection_of(name, await queries.send_query_from_trigger(GetConnection(name)))

    async def send_signal(
        self, key: str, value: Any = None, *, dedup: str | None = None, namespace: str = DEFAULT_NAMESPACE
    ) -> SignalVersion:
        """Send a signal; return its version. It is sent at once, whatever becomes of the trigger's events.

        A trigger may be started anew at any time, and sends its signals again: ``dedup`` makes the second one the same
        version as the first. If the database does not answer, `QueryFailed` is raised, and the signal may have been
        sent. Raises as `headgate.signals.SignalService.send_signal`.
        """
        signal = Signal(key, value, dedup)
        answer = await queries.send_query_from_trigger(query_of(signal, namespace, self._classpath()))
        return versions_of([signal], answer, namespace)[0]

    @classmethod
    def _classpath(cls) -> str:
        """The path under which a runner imports this class, for `serialize`."""
        return f"{cls.__module__}.{cls.__qualname__}"

    async def cleanup(self) -> None:  # noqa: B027 - a hook: doing nothing is the default
        """Release resources. Called at every end except the death of the process, within a time limit (I14)."""

    async def on_kill(self) -> None:  # noqa: B027 - a hook: doing nothing is the default
        """Stop remote work. Called only when a user cancels the trigger, not on shutdown, timeout or a move (I14)."""


class BaseEventTrigger(BaseTrigger):
    """A trigger that watches for events without a task; several may share one stream.

    Triggers whose `shared_stream_key` is equal and not None share one poll. The stream is opened with the
    kwargs of the first of them, either by `open_shared_stream` (nothing to acknowledge) or by
    `create_shared_stream_producer` (ack mode: the broker is advanced only after the events are stored).
    Each of them then turns raw events into its own with `filter_shared_stream`, the same in both modes::

        # orders.py
        from inbox import Inbox

        from headgate.triggers.base import BaseEventTrigger, TriggerEvent


        class BigOrders(BaseEventTrigger):
            def __init__(self, folder, least):
                self.folder, self.least = folder, least

            def serialize(self):
                return "orders.BigOrders", {"folder": self.folder, "least": self.least}

            def shared_stream_key(self):
                return "inbox", self.folder

            @classmethod
            def create_shared_stream_producer(cls, kwargs):
                return Inbox(kwargs["folder"])

            async def filter_shared_stream(self, shared_stream):
                async for order in shared_stream:
                    if order["amount"] >= self.least:
                        yield TriggerEvent(order)
    """

    def shared_stream_key(self) -> Hashable | None:
        """Return the identity of the shared stream; None (the default): the trigger has a `run` of its own."""
        return None

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Raise RuntimeError: a trigger with a shared stream is not run. Override it in one without."""
        problem = "reads a shared stream: it has a filter_shared_stream, not a run"
        if self.shared_stream_key() is None:
            problem = "has neither a shared_stream_key nor a run of its own"
        raise RuntimeError(f"{type(self).__name__} {problem}")
        yield

    @classmethod
    def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        """Yield raw events for all subscribers, for as long as the group lives; nothing is acknowledged."""
        raise NotImplementedError(
            f"{cls.__name__} has a shared_stream_key but overrides neither open_shared_stream "
            f"nor create_shared_stream_producer"
        )

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Return the producer that owns the broker connection. Overriding it puts the stream in ack mode."""
        raise NotImplementedError(f"{cls.__name__} does not override create_shared_stream_producer")

    @classmethod
    def shared_stream_arguments(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return those of the kwargs that the stream is opened with; by default none is known to be one.

        A trigger that would open it with others than it was opened with reads it all the same, and is warned of.
        """
        return {}

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Turn raw events into this trigger's events; by default every raw event is one event.

        Yield each event before pulling the next raw event: that is how the manager knows what it derives from.
        """
        async for raw_event in shared_stream:
            yield TriggerEvent(raw_event)
