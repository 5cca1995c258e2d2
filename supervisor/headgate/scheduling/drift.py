"""Drift: whether what a broker has as handled is what headgate has handled. Pure: the verdicts, from what both say.

Somebody may move the offset of a group, make a consumer anew, or restore a database: then a broker goes on where
headgate has never been, and what lies between is lost without an error, or comes again. Two comparisons find it. Where
a producer *begins* is compared with how far the database knows that headgate had come; that finds what was done while
nobody read. And while it reads, the broker is asked by a user, and its answer is compared with what the producer says.

What the database knows may be some seconds old, so a beginning beyond it is no drift by itself. It is if the broker
says that somebody else has put it there (`LaneProgress.is_ours`, `LaneProgress.cursor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from headgate.protocol.messages.runner import DescribedLane, DescribedStream, LaneProgress, Position

LOG_NEWER_S = 300.0  # commits of headgate that are so much later than what the database knows: it is an old copy

Verdict = Literal[
    "ok",
    "behind",
    "went back",
    "dropped unread",
    "moved by others",
    "log newer than the database",
    "unknown to the broker",
    "cannot be told",
]
LOSS: Final = 3
# What a metric says of them.
LEVELS: Final[Mapping[Verdict, int]] = {
    "ok": 0,
    "cannot be told": 0,
    "behind": 1,
    "went back": 2,
    "dropped unread": LOSS,
    "moved by others": LOSS,
    "log newer than the database": LOSS,
    "unknown to the broker": LOSS,
}
# The worst last.
_ORDER: Final[tuple[Verdict, ...]] = (
    *("ok", "cannot be told", "behind", "went back", "dropped unread", "moved by others"),
    *("log newer than the database", "unknown to the broker"),
)


class KnownLane(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a producer that had begun at ``begun_at`` had come in a lane, as the database knows it.

    ``dropped`` and ``deliveries`` are those of `LaneProgress`: what the former stands for was found already.
    """

    lane: str
    at: Position = ()
    cursor: str = ""
    begun_at: float = 0.0
    dropped: Position = ()
    deliveries: int = 0


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A drift that was found in a lane, from ``was`` to ``now``, at ``at`` (seconds since 1970). A user accepts it.

    Of messages that were dropped unread it has only their number, at most: ``missing``.
    """

    lane: str
    verdict: Verdict
    was: Position
    now: Position
    at: float
    missing: int = 0


class LaneReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One lane of a report; `DescribedLane` has the meanings. ``finding`` is what was found and not accepted."""

    lane: str
    verdict: Verdict
    end: Position | None = None
    first: Position | None = None
    committed: Position | None = None
    advanced: Position | None = None
    lag: int | None = None
    missing: int = 0
    oldest_key: str | None = None
    oldest_at: float | None = None
    finding: Finding | None = None


class StreamReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was found of a stream when its broker was asked. ``error``: why that could not be asked."""

    verdict: Verdict
    lanes: tuple[LaneReport, ...] = ()
    lanes_in_all: int = 0
    error: str = ""


def known_of(progress: Iterable[LaneProgress]) -> tuple[KnownLane, ...]:
    """Return what the database is to know of lanes."""
    return tuple(
        KnownLane(lane.lane, lane.advanced, lane.cursor, lane.begun_at, lane.dropped, lane.deliveries)
        for lane in progress
    )


def _has_counted_on(was: int, now: int) -> bool:
    """Whether a broker that counts deliveries has gone on counting: then nobody has set it back.

    A server of NATS before 2.10.14 takes one from the sequence number of a consumer by itself, though it has given that
    message out: whenever a message is to be delivered again, and the request that it was to answer is of a client that
    has gone. Its count of deliveries goes on. It begins anew if a consumer is made anew or reset, and is an old one if
    its files are.
    """
    return 0 < was <= now


def judge_beginning(known: KnownLane, known_at: float, lane: LaneProgress) -> Verdict | None:
    """Return what is wrong with where a producer began; None: nothing, as far as it can be told.

    ``known_at`` (seconds since 1970): up to when the database would know more if headgate had come further. A producer
    that the database knows already has been judged.
    """
    if lane.begun_at == known.begun_at or lane.began == known.at:
        return None
    is_same = lane.cursor == known.cursor
    if lane.began < known.at:
        return None if is_same and _has_counted_on(known.deliveries, lane.began_deliveries) else "went back"
    is_ours = lane.is_ours if is_same else False
    if is_ours is False:
        return "moved by others"
    if lane.committed_at is not None and lane.committed_at > known_at + LOG_NEWER_S:
        return "log newer than the database"
    return None


def judge_losses(known: KnownLane, lane: LaneProgress) -> Verdict | None:
    """Return that a broker has dropped messages since the database knows of it; None if it has not."""
    return "dropped unread" if lane.cursor == known.cursor and lane.dropped > known.dropped else None


def judge_lane(lane: DescribedLane) -> Verdict:
    """Return the verdict on a lane whose broker was asked."""
    if lane.committed is not None and lane.after is not None and lane.committed > lane.after and not lane.is_shared:
        return "moved by others"
    if lane.missing:
        return "dropped unread"
    if lane.committed is not None and lane.before is not None and lane.committed < lane.before:
        if not _has_counted_on(lane.before_deliveries, lane.deliveries):
            return "went back"
    return "behind" if lane.lag else "ok"


def report_of(
    described: DescribedStream, findings: Sequence[Finding], at: float, known: Iterable[KnownLane] = ()
) -> tuple[StreamReport, tuple[Finding, ...]]:
    """Return the report on a stream at ``at``, and all that is found by now: ``findings`` are those of before.

    If the database already knows of messages that were dropped in a lane, they have been found, and a user may have
    accepted that; a broker may tell of them for ever.
    """
    by_lane = {finding.lane: finding for finding in findings}
    told = {lane.lane for lane in known if lane.dropped}
    for lane in described.lanes:
        verdict = judge_lane(lane)
        if verdict in ("moved by others", "went back") and lane.lane not in by_lane:
            was = lane.after if verdict == "moved by others" else lane.before
            by_lane[lane.lane] = Finding(lane.lane, verdict, was or (), lane.committed or (), at)
    lanes = tuple(_reported(lane, by_lane.get(lane.lane), is_told=lane.lane in told) for lane in described.lanes)
    verdicts: list[Verdict] = [*(lane.verdict for lane in lanes), *(each.verdict for each in by_lane.values())]
    if described.error:
        verdicts.append("unknown to the broker" if described.is_missing else "cannot be told")
    report = StreamReport(worst(verdicts), lanes, described.lanes_in_all, described.error)
    return report, tuple(by_lane.values())


def _reported(lane: DescribedLane, finding: Finding | None, *, is_told: bool) -> LaneReport:
    verdict = judge_lane(replace(lane, missing=0) if is_told else lane)
    return LaneReport(
        lane.lane,
        verdict if finding is None else worst([verdict, finding.verdict]),
        end=lane.end,
        first=lane.first,
        committed=lane.committed,
        advanced=lane.before,
        lag=lane.lag,
        missing=lane.missing,
        oldest_key=lane.oldest_key,
        oldest_at=lane.oldest_at,
        finding=finding,
    )


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in the order in which people are to see them: losses, and what is new, before the others."""
    return sorted(findings, key=lambda one: (-_ORDER.index(one.verdict), -one.at))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of these; "ok" if there is none."""
    found: list[Verdict] = ["ok", *verdicts]
    return max(found, key=_ORDER.index)
