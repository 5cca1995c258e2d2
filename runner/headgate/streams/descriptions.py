"""How far a stream is: its broker is asked once, for people, beside the producer that reads it.

A second producer is made for the question, so that the first one is not disturbed, and so that a stream can be asked
about that has failed and is not open at this moment. Both sides of the comparison are told, and in an order that makes
it true although messages are advanced meanwhile: the producer's confirmed positions are read before the broker is
asked, and those that it may have asked for after that. If only headgate commits, what the broker says lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import trio

from headgate.child.error_text import describe_error, storable
from headgate.child.queries import secrets
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import (
    CANNOT_TELL,
    DESCRIBED_BYTES_MAX,
    KEY_CHARS_MAX,
    LANE_CHARS_MAX,
    LANES_DESCRIBED_MAX,
    POSITION_PARTS_MAX,
    STREAM_ERROR_CHARS_MAX,
    DescribedLane,
    DescribedStream,
    LaneProgress,
    Position,
)
from headgate.streams import checks
from headgate.streams.contract import LanePosition, SourceMissing
from headgate.streams.group import Group
from headgate.streams.group_settings import PRODUCER_CLOSE_TIMEOUT_S, GroupSettings, StreamRecord

DESCRIBE_S = 20.0  # of a broker
# A broker may say that it has given out messages which are still on their way to the producer: a second look tells.
SECOND_LOOK_S = 1.0


async def describe_stream(
    digest: str,
    record: StreamRecord,
    group: Callable[[], Group | None],
    wall: Callable[[float], float],
    settings: GroupSettings,
) -> DescribedStream:
    """Ask the broker of a stream. Raises nothing that an author's code raises; ``group`` is the open stream, if any."""
    before = _by_name(group())
    found: Sequence[LanePosition] = ()
    try:
        with trio.move_on_after(DESCRIBE_S) as scope:
            found = await _ask(record)
        if scope.cancelled_caught:
            return DescribedStream(digest, error=f"its broker has not answered within {DESCRIBE_S:g} s")
        lanes = [_checked(position) for position in found[:LANES_DESCRIBED_MAX]]
    except BaseException as raised:
        failure, cancelled = checks.split_cancelled(raised)
        if cancelled is not None:
            if trio.current_effective_deadline() == -math.inf:
                raise cancelled from None
            failure = failure or checks.leaked(cancelled)
        assert failure is not None
        text = secrets.hide((describe_error(failure)[0].splitlines() or [""])[0])[:STREAM_ERROR_CHARS_MAX]
        return DescribedStream(digest, error=text, is_missing=isinstance(failure, SourceMissing))
    if not lanes:
        return DescribedStream(digest, error=CANNOT_TELL)
    after = _by_name(group())
    if any(_is_beyond(lane.committed, after.get(lane.lane)) for lane in lanes):
        await trio.sleep(SECOND_LOOK_S)
        after = _by_name(group())
    oldest = _oldest(group(), wall, settings.ack_timeout_s)
    return DescribedStream(
        digest,
        tuple(_fitting(_described(lane, before.get(lane.lane), after.get(lane.lane), oldest) for lane in lanes)),
        len(found),
        progress=tuple(after.values()),
    )


async def _ask(record: StreamRecord) -> Sequence[LanePosition]:
    if record.source is None or not checks.has_producer(record.source.trigger_class):
        return ()
    producer = checks.new_producer(record.source.trigger_class, dict(record.source.kwargs))
    try:
        return list(await producer.describe())
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + PRODUCER_CLOSE_TIMEOUT_S):
            await producer.aclose()


def _by_name(group: Group | None) -> dict[str, LaneProgress]:
    lanes = checks.progress_of(None if group is None else group.producer)
    return {lane.lane: lane for lane in lanes if lane.begun_at}


def _is_beyond(committed: Position | None, lane: LaneProgress | None) -> bool:
    return committed is not None and lane is not None and committed > lane.asked


def _checked(position: LanePosition) -> LanePosition:
    """Return what an author's code has returned, if it can be told. Raises `TypeError` or `ValueError`."""
    if not isinstance(position, LanePosition):
        raise TypeError(f"describe must return LanePositions, not {checks.shape(position)}")
    for place in (position.end, position.first, position.committed):
        if place is not None and not checks.is_position(place):
            raise ValueError(f"a position is a tuple of up to {POSITION_PARTS_MAX} numbers below 2**64, not {place!r}")
    if not isinstance(position.lane, str):
        raise TypeError(f"the name of a lane is a str, not {checks.shape(position.lane)}")
    if len(position.lane) > LANE_CHARS_MAX:
        raise ValueError(f"the name of a lane has at most {LANE_CHARS_MAX} characters, not {len(position.lane):,}")
    return position._replace(
        lane=storable(position.lane)[:LANE_CHARS_MAX],
        lag=None if position.lag is None else _count(position.lag),
        missing=_count(position.missing),
        is_shared=bool(position.is_shared),
        deliveries=_count(position.deliveries),
    )


def _count(amount: int) -> int:
    return max(0, min(int(amount), 2**63 - 1))


def _fitting(lanes: Iterable[DescribedLane]) -> Iterator[DescribedLane]:
    """Yield as many of the first lanes as an answer may have bytes."""
    room = DESCRIBED_BYTES_MAX
    for lane in lanes:
        room -= len(encode_message(lane))
        if room < 0:
            return
        yield lane


def _oldest(
    group: Group | None, wall: Callable[[float], float], ack_timeout_s: float
) -> Mapping[str, tuple[str | None, float]]:
    """Return the key of the oldest message that is not advanced, and since when, by the names of lanes."""
    if group is None or group.ledger is None:
        return {}
    found: dict[str, tuple[str | None, float]] = {}
    for value, event in group.ledger.oldest_events():
        name = _name_of(value)
        at = wall(event.deadline - ack_timeout_s)
        if name not in found or at < found[name][1]:
            found[name] = (event.key, at)
    return found


def _name_of(value: Any) -> str:
    # Lanes of single messages, and those by a field of them, belong to the one lane that their broker knows.
    return str(value) if type(value) is int else ""


def _described(
    lane: LanePosition,
    before: LaneProgress | None,
    after: LaneProgress | None,
    oldest: Mapping[str, tuple[str | None, float]],
) -> DescribedLane:
    is_same = before is not None and after is not None and before.begun_at == after.begun_at
    key, at = oldest.get(lane.lane, oldest.get("", (None, None)) if lane.lane == "" else (None, None))
    return DescribedLane(
        lane.lane,
        end=lane.end,
        first=lane.first,
        committed=lane.committed,
        lag=lane.lag,
        missing=lane.missing,
        is_shared=lane.is_shared,
        before=before.advanced if before is not None and is_same else None,
        after=None if after is None else after.asked,
        oldest_key=None if key is None else key[:KEY_CHARS_MAX],
        oldest_at=at,
        deliveries=lane.deliveries,
        before_deliveries=before.deliveries if before is not None and is_same else 0,
    )
