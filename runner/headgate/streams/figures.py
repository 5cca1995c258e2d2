"""What people are told of shared streams: how far behind each is, who holds it up since when, and how it ended.

Nothing of the runner depends on it. It is put together from what is known anyway, at most once a second
(`headgate.runner.figures`); the only thing that is counted for it are the outcomes of advances.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from heapq import nlargest
from time import time

from msgspec.structs import replace

from headgate.child.queries import secrets
from headgate.protocol.messages.runner import (
    HOLDERS_TOLD_MAX,
    LANES_TOLD_IN_ALL_MAX,
    STREAM_ERROR_CHARS_MAX,
    STREAM_NAME_CHARS_MAX,
    STREAMS_TOLD_MAX,
    RunnerFigures,
    StreamFigures,
)
from headgate.streams import checks
from headgate.streams.absence import AbsentSubscribers
from headgate.streams.group import Group
from headgate.streams.group_settings import StreamRecord
from headgate.streams.identity import StreamIdentity
from headgate.streams.stalls import Stall

RECORDS_MAX = 1_000  # of streams that are there and of those that have ended
ENDED_TOLD_S = 600.0  # since its end by an error: one that ends as soon as it is opened is hardly ever there
CLOCK_STEP_S = 1.0  # a difference of two clocks that has changed by less is the same


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
        """Return the figures of the streams of these groups, and of those that have ended by an error of late.

        ``holds`` are the stalls that last, and since when, by name. While nothing happens they are equal, however often
        it is asked.
        """
        ahead_s = time() - self._now()
        if abs(ahead_s - self._ahead_s) >= CLOCK_STEP_S:
            self._ahead_s = ahead_s
        streams: list[StreamFigures] = []
        ended = {id(record): (key, record) for key, record in self._records.items() if self._has_just_ended(record)}
        for group in groups:
            ended.pop(id(group.record), None)
            with suppress(BaseException):  # the key is the author's object: if its hash fails, the others are told
                streams.append(self._measured(group, holds))
        for key, record in ended.values():
            with suppress(BaseException):
                streams.append(self._told(key, record))
        told = streams
        if len(streams) > STREAMS_TOLD_MAX:
            told = nlargest(STREAMS_TOLD_MAX, streams, key=lambda each: (each.held is not None, each.in_flight))
        return RunnerFigures(tuple(_fitting(told)), len(streams))

    def _has_just_ended(self, record: StreamRecord) -> bool:
        return record.last_error_at is not None and self._now() - record.last_error_at < ENDED_TOLD_S

    def _told(self, key: Hashable, record: StreamRecord) -> StreamFigures:
        """Return what is known of a stream whether it is there or not."""
        identity = key if isinstance(key, StreamIdentity) else StreamIdentity("", repr(key))
        return StreamFigures(
            stream=identity.digest,
            name=secrets.hide(identity.name)[:STREAM_NAME_CHARS_MAX],
            absent=len(self._absent.of(key)),
            acked=record.acked,
            failed=record.failed,
            rejected=record.rejected,
            ended=record.ended,
            last_error=record.last_error,
            last_error_at=self._wall(record.last_error_at),
        )

    def _measured(self, group: Group, holds: Mapping[str, tuple[Stall, float]]) -> StreamFigures:
        told = self._told(group.key, group.record)
        stall, since = holds.get(group.name, (None, None))
        ledger, lag = group.ledger, checks.lag_of(group.producer)
        away = secrets.hide(stall.error)[:STREAM_ERROR_CHARS_MAX] if stall is not None and stall.error else None
        due_at = None if ledger is None else ledger.oldest_deadline()
        return replace(
            told,
            in_flight=group.outstanding,
            queued=group.queued,
            lanes=0 if ledger is None else ledger.lanes,
            online=group.subscribers,
            lag=None if lag is None else lag.amount,
            lag_unit="messages" if lag is None else lag.unit,
            held=None if stall is None else stall.reason,
            held_since=self._wall(since),
            held_by=() if stall is None else stall.trigger_ids[:HOLDERS_TOLD_MAX],
            oldest_at=self._wall(None if due_at is None else due_at - self._ack_timeout_s),
            last_error=told.last_error if away is None else away,
            last_error_at=told.last_error_at if away is None else self._wall(since),
            progress=checks.progress_of(group.producer),
        )

    def _wall(self, at: float | None) -> float | None:
        return None if at is None else round(at + self._ahead_s, 1)


def _fitting(streams: Iterable[StreamFigures]) -> Iterator[StreamFigures]:
    """Yield figures, from some stream on without lanes if there are too many: a stream has all it tells, or none."""
    room = LANES_TOLD_IN_ALL_MAX
    for stream in streams:
        room -= len(stream.progress)
        yield stream if room >= 0 else replace(stream, progress=())
