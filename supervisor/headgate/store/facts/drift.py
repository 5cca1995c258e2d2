"""How far headgate has come at the brokers of streams, and what is wrong with that (`headgate.scheduling.drift`).

Each stream has at most one row of ``stream_drift``. Its supervisor writes it when a stream has gone on, every few
seconds at most, and a user to have the broker asked: then the supervisor finds ``asked_at`` by its next poll, has its
runner ask, and stores the answer. Nothing that headgate does depends on these rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import Boolean, Text, func, literal_column, or_, select, update

from headgate.protocol.messages.runner import DescribedStream, LaneProgress
from headgate.scheduling.drift import (
    Finding,
    KnownLane,
    StreamReport,
    Verdict,
    judge_beginning,
    judge_losses,
    known_of,
    report_of,
    worst,
)
from headgate.store.db.bulk import chunks, insert_into
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, acting, leased
from headgate.store.errors import NoSuchRow
from headgate.store.tables import stream, stream_drift, triggerer

ASKED: Final = "asked "  # before a digest, where a poll says what is to be done
FINDINGS_MAX = 1000  # of one stream: as many as lanes are described
HAS_FOUND: Final = literal_column("stream_drift.found <> '[]'", Boolean())  # as text, as its index has it

T = TypeVar("T")
U = TypeVar("U")
_Lanes = Sequence[LaneProgress]
_ENCODER: Final = msgspec.json.Encoder()
_KNOWN: Final[msgspec.json.Decoder[tuple[KnownLane, ...]]] = msgspec.json.Decoder(tuple[KnownLane, ...])
_FOUND: Final[msgspec.json.Decoder[tuple[Finding, ...]]] = msgspec.json.Decoder(tuple[Finding, ...])
_REPORT: Final = msgspec.json.Decoder(StreamReport)


class StreamDrift(msgspec.Struct, frozen=True):
    """What is known of the drift of a stream.

    ``asked_at``: its broker is to be asked, and has not answered yet. ``report`` is the last answer, of
    ``answered_at``. ``known`` are the lanes as they are stored, and ``found`` is what nobody has accepted.
    """

    stream_id: int
    asked_at: datetime | None = None
    answered_at: datetime | None = None
    report: StreamReport | None = None
    known: tuple[KnownLane, ...] = ()
    found: tuple[Finding, ...] = ()


class DriftVerbs(Verbs):
    """The verbs about drift."""

    @acting
    def ask_drift(
        self, tx: Tx, stream_ids: Sequence[int], *, accepts: bool = False, up_to: float = math.inf
    ) -> tuple[Finding, ...]:
        """Have the brokers of these streams asked by the supervisors that run them. Raises `NoSuchRow`.

        With ``accepts`` what was found of them before is forgotten, but for what was found later than ``up_to``
        (seconds since 1970); return what is forgotten. A report that tells of it goes as well.
        """
        tx.notify()
        accepted: list[Finding] = []
        for ids in chunks(sorted(stream_ids)):
            names = select(stream.c.id).where(stream.c.id.in_(ids))
            if missing := set(ids) - set(tx.connection.execute(names).scalars()):
                raise NoSuchRow("stream", str(min(missing)))
            _make_rows(tx, ids)
            rows = update(stream_drift)
            tx.connection.execute(rows.where(stream_drift.c.stream_id.in_(ids)).values(asked_at=tx.now))
            for row in tx.connection.execute(_locked(ids)).all() if accepts else ():
                found = _read(_FOUND, row.found, ())
                kept = tuple(finding for finding in found if finding.at > up_to)
                accepted += [finding for finding in found if finding.at <= up_to]
                forgotten = {"found": _ENCODER.encode(kept).decode(), "report": None, "answered_at": None}
                tx.connection.execute(rows.where(stream_drift.c.stream_id == row.stream_id).values(forgotten))
        subject = f"stream {stream_ids[0]}" if len(stream_ids) == 1 else "streams"
        tx.act("streams drift", subject, counts={"asked": len(stream_ids), "accepted": len(accepted)})
        return tuple(accepted)

    @leased
    def note_drift(
        self, tx: LeasedTx, progress: Mapping[str, _Lanes], described: Mapping[str, DescribedStream]
    ) -> dict[str, Verdict]:
        """Store how far streams have come, and what their brokers have answered; both by digest.

        Return what was found of each and not accepted, the worst. Streams that the epoch does not own are passed over:
        their owner knows better.
        """
        verdicts: dict[str, Verdict] = {}
        for digests in chunks(sorted(progress.keys() | described.keys())):
            mine = select(stream.c.id, stream.c.digest).where(stream.c.digest.in_(digests))
            # Locked, or a stream could be deleted before its row is made.
            rows = mine.where(stream.c.triggerer_id == tx.epoch).order_by(stream.c.id)
            owned = tx.connection.execute(rows.with_for_update(read=True, key_share=True)).all()
            digest_of = {row.id: row.digest for row in owned}
            _make_rows(tx, list(digest_of))
            for row in tx.connection.execute(_locked(sorted(digest_of))).all():
                digest = digest_of[row.stream_id]
                verdicts[digest] = _note(tx, row, progress.get(digest), described.get(digest))
        return verdicts


def drift_of(tx: Tx, stream_ids: Collection[int]) -> dict[int, StreamDrift]:
    """Return what is known of the drift of these streams, by id; those of which nothing is known are left out."""
    found = {}
    for ids in chunks(sorted(stream_ids)):
        for row in tx.connection.execute(select(stream_drift).where(stream_drift.c.stream_id.in_(ids))):
            found[row.stream_id] = StreamDrift(
                row.stream_id,
                row.asked_at,
                row.answered_at,
                None if row.report is None else _read(_REPORT, row.report, None),
                _read(_KNOWN, row.progress, ()),
                _read(_FOUND, row.found, ()),
            )
    return found


def is_asked(tx: Tx, stream_ids: Collection[int]) -> bool:
    """Whether the broker of one of these streams is to be asked, and has not answered yet."""
    asked = tx.connection.execute(select(stream_drift.c.stream_id).where(stream_drift.c.asked_at.is_not(None)))
    return not set(stream_ids).isdisjoint(asked.scalars())


def drifted(tx: Tx, *, limit: int) -> list[tuple[int, str, Verdict]]:
    """Return id, name and worst verdict of streams of which something was found that nobody has accepted."""
    rows = (
        select(stream.c.id, stream.c.name, stream_drift.c.found)
        .select_from(stream_drift.join(stream, stream.c.id == stream_drift.c.stream_id))
        .where(HAS_FOUND)
        .order_by(stream_drift.c.stream_id)
        .limit(limit)
    )
    found = [(row.id, row.name, _read(_FOUND, row.found, ())) for row in tx.connection.execute(rows)]
    # What another version has written, and this one cannot read, is told all the same.
    return [(id_, name, worst(one.verdict for one in some) if some else "cannot be told") for id_, name, some in found]


def asked_of(mine: Any) -> Any:
    """Return the SELECT of the digests, behind `ASKED`, of streams of an epoch whose brokers are to be asked."""
    of = stream_drift.join(stream, stream.c.id == stream_drift.c.stream_id)
    asked = select(stream.c.id, literal_column(f"'{ASKED}'", Text()).concat(stream.c.digest)).select_from(of)
    return asked.where(stream_drift.c.asked_at.is_not(None), stream.c.triggerer_id == mine)


def _read(decoder: msgspec.json.Decoder[T], text: str, unreadable: U) -> T | U:
    """Return what a text says, or ``unreadable`` if another version of headgate has written it."""
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError:
        return unreadable


def _make_rows(tx: Tx, stream_ids: Sequence[int]) -> None:
    for ids in chunks(sorted(stream_ids)):
        rows = select(stream_drift.c.stream_id).where(stream_drift.c.stream_id.in_(ids))
        have = set(tx.connection.execute(rows).scalars())
        if new := [{"stream_id": id_} for id_ in ids if id_ not in have]:
            tx.connection.execute(insert_into(tx.connection, stream_drift).on_conflict_do_nothing(), new)


def _locked(stream_ids: Sequence[int]) -> Any:
    rows = select(stream_drift).where(stream_drift.c.stream_id.in_(stream_ids)).order_by(stream_drift.c.stream_id)
    return rows.with_for_update(key_share=True)


def _note(tx: LeasedTx, row: Any, progress: _Lanes | None, described: DescribedStream | None) -> Verdict:
    values: dict[str, Any] = {}
    found, now_s = _read(_FOUND, row.found, ()), tx.now.timestamp()
    known = _read(_KNOWN, row.progress, ())
    if progress is not None:
        found, known = _judged(tx, row, known, progress, found), known_of(progress)
        values |= {"progress": _ENCODER.encode(known).decode(), "progress_at": tx.now}
    if described is not None:
        report, found = report_of(described, found, now_s, known)
        values |= {"report": _ENCODER.encode(report).decode(), "answered_at": tx.now, "asked_at": None}
    found = found[:FINDINGS_MAX]
    values["found"] = _ENCODER.encode(found).decode()
    tx.connection.execute(update(stream_drift).where(stream_drift.c.stream_id == row.stream_id).values(values))
    return worst(finding.verdict for finding in found)


def _judged(
    tx: LeasedTx, row: Any, known: Iterable[KnownLane], progress: _Lanes, found: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    """Return what was found before, what is wrong with where the producer has begun, and what was dropped unread."""
    of_lane = {lane.lane: lane for lane in known}
    by_lane = {finding.lane: finding for finding in found}
    now_s, known_at = tx.now.timestamp(), None
    for lane in progress:
        was = of_lane.get(lane.lane)
        if was is None:
            continue
        if was.begun_at != lane.begun_at:
            known_at = known_at or max(row.progress_at, _alive_until(tx, row.progress_at)).timestamp()
            if (verdict := judge_beginning(was, known_at, lane)) is not None:
                by_lane[lane.lane] = Finding(lane.lane, verdict, was.at, lane.began, now_s)
                continue
        if (verdict := judge_losses(was, lane)) is not None:
            before = by_lane.get(lane.lane)
            if before is None or worst([before.verdict, verdict]) == verdict:
                by_lane[lane.lane] = Finding(lane.lane, verdict, (), (), now_s, lane.missing)
    return tuple(by_lane.values())


def _alive_until(tx: LeasedTx, known_at: datetime) -> datetime:
    """Return when a supervisor has written last that may have stored what was known at ``known_at``.

    A stream at rest is not written, so ``known_at`` alone may be long ago. In an old copy of a database that was put in
    its place, all that were there then have been silent since.
    """
    over = or_(triggerer.c.stopped_at.is_not(None), triggerer.c.fenced_at.is_not(None))
    of_then = or_(over, triggerer.c.started_at <= known_at)
    latest = tx.connection.execute(select(func.max(triggerer.c.latest_heartbeat)).where(of_then)).scalar_one()
    return known_at if latest is None else latest
