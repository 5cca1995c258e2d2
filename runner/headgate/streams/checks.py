"""Checks of the values and exceptions that come out of authors' stream code: they may be anything."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Any, Final

import msgspec
import structlog
import trio

from headgate.child.error_text import storable
from headgate.child.keys import storable_key
from headgate.protocol.messages.runner import (
    KEY_CHARS_MAX,
    LANE_CHARS_MAX,
    LANES_TOLD_MAX,
    POSITION_PARTS_MAX,
    STREAM_ERROR_CHARS_MAX,
    LagUnit,
    LaneProgress,
)
from headgate.streams.contract import Lag, SharedStreamProducer
from headgate.triggers.base import BaseEventTrigger


def has_producer(trigger_class: type[BaseEventTrigger]) -> bool:
    """Whether the class overrides create_shared_stream_producer, which is what asks for ack mode."""
    for cls in trigger_class.__mro__:
        if "create_shared_stream_producer" in cls.__dict__:
            return cls is not BaseEventTrigger
    return False


def new_producer(trigger_class: type[BaseEventTrigger], kwargs: dict[str, Any]) -> SharedStreamProducer:
    """Return a producer of a class that has them; raises `TypeError` if what it makes is none."""
    producer = trigger_class.create_shared_stream_producer(kwargs)
    if not isinstance(producer, SharedStreamProducer):
        discard_coroutine(producer)
        raise TypeError(
            f"{trigger_class.__name__}.create_shared_stream_producer must return a SharedStreamProducer, "
            f"not {type(producer).__name__}"
        )
    return producer


def iterator(stream: Any, name: str) -> AsyncIterator[Any]:
    """Return the async iterator of ``stream``; raises `TypeError`, with the method's ``name``, if it has none."""
    if not hasattr(stream, "__aiter__"):
        discard_coroutine(stream)
        raise TypeError(f"{name} must be an async generator (async def with yield), it returned {stream!r}")
    found: AsyncIterator[Any] = aiter(stream)
    return found


def pair(item: Any, producer: object) -> tuple[Any, Any]:
    """Return the raw event and the broker payload that ``open_stream`` yielded; raises `TypeError` if it did not."""
    if not isinstance(item, tuple) or len(item) != 2:
        name = type(producer).__name__
        raise TypeError(f"{name}.open_stream must yield (raw_event, broker_payload), not {shape(item)}")
    return item


def hashable(lane: Any, producer: object) -> Hashable:
    """Return the lane that ``get_advance_lane`` returned; raises `TypeError` if it is not hashable."""
    try:
        hash(lane)
    except TypeError as error:
        name = type(producer).__name__
        raise TypeError(f"{name}.get_advance_lane must return a hashable value: {error}") from error
    found: Hashable = lane
    return found


_PROGRESS: Final = msgspec.msgpack.Decoder(LaneProgress)


def is_position(place: object) -> bool:
    """Whether an author's value is a place in a lane that can be sent."""
    if not isinstance(place, tuple) or len(place) > POSITION_PARTS_MAX:
        return False
    return all(type(part) is int and 0 <= part < 2**64 for part in place)


def is_progress(lane: object) -> bool:
    """Whether an author's value is a `LaneProgress` that can be sent and stored.

    msgspec checks no type when one is made. One that is decoded as it was encoded has the right ones.
    """
    return (
        type(lane) is LaneProgress
        and _PROGRESS.decode(msgspec.msgpack.encode(lane)) == lane
        and all(len(text) <= LANE_CHARS_MAX and storable(text) == text for text in (lane.lane, lane.cursor))
        and all(map(is_position, (lane.began, lane.advanced, lane.asked, lane.dropped)))
        and is_position((lane.missing, lane.began_deliveries, lane.deliveries))
        and all(math.isfinite(at) for at in (lane.begun_at, lane.committed_at or 0.0))
    )


def progress_of(producer: SharedStreamProducer | None) -> tuple[LaneProgress, ...]:
    """Return what the producer says of its lanes, if it is well-formed."""
    with suppress(BaseException):  # these await nothing, so it is no cancellation
        lanes = () if producer is None else tuple(producer.progress()[:LANES_TOLD_MAX])
        if all(map(is_progress, lanes)):
            return lanes
    return ()


def lag_of(producer: SharedStreamProducer | None) -> Lag | None:
    """Return what the producer says, if it is a number: what an author's code raises or returns harms nothing."""
    with suppress(BaseException):
        lag = None if producer is None else producer.known_lag()
        if lag is not None and lag.unit in ("messages", "bytes"):
            unit: LagUnit = "bytes" if lag.unit == "bytes" else "messages"  # and no object of the author's
            return Lag(max(0, min(int(lag.amount), 2**63 - 1)), unit)
    return None


def trouble_of(producer: SharedStreamProducer | None) -> str | None:
    """Return why the producer has no connection, if it says so in a text that can be told."""
    with suppress(BaseException):
        trouble = None if producer is None else producer.known_trouble()
        return None if trouble is None else storable(str(trouble))[:STREAM_ERROR_CHARS_MAX] or "it does not say why"
    return None


def message_key(key: object, producer: object) -> str | None:
    """Return the key of a message as it can be stored: its publisher may have given it any text.

    Raises `TypeError` or `ValueError` if ``event_key`` returned something that is not a key.
    """
    if key is None:
        return None
    if not isinstance(key, str):
        raise TypeError(f"{type(producer).__name__}.event_key must return a str or None, not {shape(key)}")
    if not key:
        # Taken for a name, it would make of all messages without one a single message.
        raise ValueError(f"{type(producer).__name__}.event_key returned '': a message without a name has None")
    if len(key) > KEY_CHARS_MAX:
        raise ValueError(
            f"{type(producer).__name__}.event_key returned {len(key):,} characters; the limit is {KEY_CHARS_MAX:,}"
        )
    return storable_key(key)


def shape(value: Any) -> str:
    """Describe a value without showing it: it may be long, and it may be secret."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a value of type {type(value).__name__}"


def discard_coroutine(value: Any) -> None:
    """Close a coroutine that will not be awaited, so that only the error that follows is reported, not a warning."""
    if inspect.iscoroutine(value):
        value.close()


async def close(
    aclose: Callable[[], Awaitable[object]],
    scope: trio.CancelScope,
    log: structlog.typing.FilteringBoundLogger,
    problem: str,
) -> None:
    """Close what belongs to an author. What that raises is logged; only the cancellation of ``scope`` propagates."""
    try:
        await aclose()
    except BaseException as raised:
        failure, cancelled = split_cancelled(raised)
        if failure is not None:
            log.warning(problem, exc_info=failure)
        if cancelled is not None and scope.cancel_called:
            raise cancelled from None


def split_cancelled(raised: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Split an exception of a producer into its own failure and trio's cancellation, which has to propagate."""
    if isinstance(raised, trio.Cancelled):
        return None, raised
    if isinstance(raised, BaseExceptionGroup):
        cancelled, failure = raised.split(trio.Cancelled)
        if cancelled is not None:  # otherwise split has made a copy, and the producer's own object is better
            return failure, cancelled
    return raised, None


def leaked(cancelled: BaseException) -> RuntimeError:
    """Return the failure of a producer that let a cancellation of its own escape."""
    error = RuntimeError("the producer was cancelled by a scope of its own")
    error.__cause__ = cancelled
    return error
