"""What people are told of shared streams: how far behind each is, who holds it up since when, and how it ended.

Nothing of the runner depends on it. It is put together from what is known anyway, at most once a second
(`headgate.runner.figures`); the only thing that is counted for it are the outcomes of advances.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from headgate.child.error_text import describe_error, storable
from headgate.child.queries import secrets
from headgate.protocol.messages.runner import (
    HOLDERS_TOLD_MAX,
    LANES_TOLD_IN_ALL_MAX,
    LANES_TOLD_MAX,
    STREAM_ERROR_CHARS_MAX,
    STREAM_NAME_CHARS_MAX,
    STREAMS_TOLD_MAX,
    LagUnit,
    LaneProgress,
    RunnerFigures,
    StreamFigures,
)
from headgate.streams import checks
from headgate.streams.absence import AbsentSubscribers
from headgate.streams.contract import AdvanceItem, Lag, SharedStreamProducer
from headgate.streams.identity import StreamIdentity
from headgate.triggers.base import BaseEventTrigger

if TYPE_CHECKING:
    from headgate.streams.group import Group
    from headgate.streams.stalls import Stall

RECORDS_MAX = 1_000  # of streams that are there and of those that have ended
CLOCK_STEP_S = 1.0  # a difference of two clocks that has changed by less is the same


class Source(NamedTuple):
    """What a producer of a stream is made of: the first subscriber's class and kwargs."""

    trigger_class: type[BaseEventTrigger]
    kwargs: dict[str, Any]

    def is_like(self, other: Source | None) -> bool:
        """Whether the producers of both are the same, or that cannot be found out."""
        with suppress(BaseException):  # the values are an author's objects
            return bool(self == other)
        return True


@dataclass(slots=True)
class StreamRecord:
    """The outcomes of one stream since the runner started, however often it has ended and was opened again."""

    acked: int = 0
    failed: int = 0
    rejected: int = 0
    ended: int = 0
    last_error: str = ""
    last_error_at: float | None = None  # by the manager's clock
    source: Source | None = None  # of its producer

    def note_advanced(self, batch: Sequence[AdvanceItem]) -> None:
        """Count the messages of an advance that has returned."""
        failed = rejected = 0
        for _, outcome in batch:
            if outcome.failed or not (outcome.acked or outcome.rejected):
                failed += 1
            elif outcome.rejected:
                rejected += 1
        self.acked += len(batch) - failed - rejected
        self.failed += failed
        self.rejected += rejected

    def note_end(self, cause: BaseException, now: float) -> None:
        """Note that the stream has ended by an error."""
        self.ended += 1
        lines = describe_error(cause)[0].splitlines() or [""]
        self.last_error, self.last_error_at = secrets.hide(lines[0])[:STREAM_ERROR_CHARS_MAX], now


class StreamRecords:
    """The records of all streams of a runner; beyond `RECORDS_MAX` those that were opened longest ago are forgotten."""

    def __init__(self, now: Callable[[], float], absent: AbsentSubscribers, *, ack_timeout_s: float) -> None:
        self._now = now
        self._absent = absent
        self._ack_timeout_s = ack_timeout_s
        self._records: dict[Hashable, StreamRecord] = {}
        self._ahead_s = 0.0  # the wall clock, of the manager's

    def of(self, key: Hashable) -> StreamRecord:
        """Return the record of a stream, to which the caller adds."""
        record = self._records.pop(key, None) or StreamRecord()
        self._records[key] = record
        if len(self._records) > RECORDS_MAX:
            del self._records[next(iter(self._records))]
        return record

    def find(self, digest: str) -> tuple[Hashable, StreamRecord] | None:
        """Return the key and the record of a stream by its digest; None if it is not known any more."""
        for key, record in self._records.items():
            if isinstance(key, StreamIdentity) and key.digest == digest:
                return key, record
        return None

    def wall(self, at: float) -> float:
        """Return a moment of the manager's clock in seconds since 1970."""
        return round(at + time() - self._now(), 1)

    def figures(self, groups: Iterable[Group], holds: Mapping[str, tuple[Stall, float]]) -> RunnerFigures:
        """Return the figures of the streams of these groups; ``holds``: the stalls that last, and since when, by name.

        While nothing happens they are equal, however often it is asked.
        """
        ahead_s = time() - self._now()
        if abs(ahead_s - self._ahead_s) >= CLOCK_STEP_S:
            self._ahead_s = ahead_s
        streams: list[StreamFigures] = []
        for group in groups:
            with suppress(BaseException):  # the key is the author's object: if its hash fails, the others are told
                streams.append(self._measured(group, holds))
        told = streams
        if len(streams) > STREAMS_TOLD_MAX:
            told = nlargest(STREAMS_TOLD_MAX, streams, key=lambda each: (each.held is not None, each.in_flight))
        return RunnerFigures(tuple(_fitting(told)), len(streams))

    def _measured(self, group: Group, holds: Mapping[str, tuple[Stall, float]]) -> StreamFigures:
        key, record = group.key, group.record
        identity = key if isinstance(key, StreamIdentity) else StreamIdentity("", repr(key))
        stall, since = holds.get(group.name, (None, None))
        ledger, lag = group.ledger, _lag_of(group.producer)
        away = secrets.hide(stall.error)[:STREAM_ERROR_CHARS_MAX] if stall is not None and stall.error else None
        due_at = None if ledger is None else ledger.oldest_deadline()
        return StreamFigures(
            stream=identity.digest,
            name=secrets.hide(identity.name)[:STREAM_NAME_CHARS_MAX],
            in_flight=group.outstanding,
            queued=group.queued,
            lanes=0 if ledger is None else ledger.lanes,
            online=group.subscribers,
            absent=len(self._absent.of(key)),
            lag=None if lag is None else lag.amount,
            lag_unit="messages" if lag is None else lag.unit,
            held=None if stall is None else stall.reason,
            held_since=self._wall(since),
            held_by=() if stall is None else stall.trigger_ids[:HOLDERS_TOLD_MAX],
            oldest_at=self._wall(None if due_at is None else due_at - self._ack_timeout_s),
            acked=record.acked,
            failed=record.failed,
            rejected=record.rejected,
            ended=record.ended,
            last_error=record.last_error if away is None else away,
            last_error_at=self._wall(record.last_error_at if away is None else since),
            progress=progress_of(group.producer),
        )

    def _wall(self, at: float | None) -> float | None:
        return None if at is None else round(at + self._ahead_s, 1)


def progress_of(producer: SharedStreamProducer | None) -> tuple[LaneProgress, ...]:
    """Return what the producer says of its lanes, if it is well-formed."""
    with suppress(BaseException):  # these await nothing, so it is no cancellation
        lanes = () if producer is None else tuple(producer.progress()[:LANES_TOLD_MAX])
        if all(map(checks.is_progress, lanes)):
            return lanes
    return ()


def _fitting(streams: Iterable[StreamFigures]) -> Iterator[StreamFigures]:
    """Yield figures, from some stream on without lanes if there are too many: a stream has all it tells, or none."""
    room = LANES_TOLD_IN_ALL_MAX
    for stream in streams:
        room -= len(stream.progress)
        yield stream if room >= 0 else replace(stream, progress=())


def trouble_of(producer: SharedStreamProducer | None) -> str | None:
    """Return why the producer has no connection, if it says so in a text that can be told."""
    with suppress(BaseException):
        trouble = None if producer is None else producer.known_trouble()
        return None if trouble is None else storable(str(trouble))[:STREAM_ERROR_CHARS_MAX] or "it does not say why"
    return None


def _lag_of(producer: SharedStreamProducer | None) -> Lag | None:
    """Return what the producer says, if it is a number: what an author's code raises or returns harms nothing."""
    with suppress(BaseException):
        lag = None if producer is None else producer.known_lag()
        if lag is not None and lag.unit in ("messages", "bytes"):
            unit: LagUnit = "bytes" if lag.unit == "bytes" else "messages"  # and no object of the author's
            return Lag(max(0, min(int(lag.amount), 2**63 - 1)), unit)
    return None
