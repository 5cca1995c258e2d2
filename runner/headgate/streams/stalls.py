"""Stalls: why a stream pulls nothing at this moment, which triggers cause it, and a warning if it lasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from headgate.protocol.messages.runner import StallReason
from headgate.streams.subscription import Subscription

STALL_REPORT_S = 10.0  # a stream that is stalled for the same reason for so long is reported
STALL_REPORT_AGAIN_S = 300.0  # and then again at this interval, for as long as it lasts
ABSENCE_REPORT_AGAIN_S = 60.0  # the same for an absent subscriber: only a person may be able to end that wait


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a stream does not pull its next event, and the triggers that cause it. ``stream`` is ``repr(key)``.

    ``full queue``: these have as many raw events waiting as they may (back-pressure). ``absent subscriber``: these
    failed or are not started, and are waited for (`AbsentSubscribers`). ``unresolved events``: too many events are
    broadcast and not advanced; these are the triggers that still have to resolve the oldest of them. ``broker away``:
    the producer has no connection, because of ``error``.

    ``since``: by the manager's clock, for a full queue: when it became full, if nothing was pulled from it afterwards.
    """

    stream: str
    reason: StallReason
    trigger_ids: tuple[int, ...]
    since: float | None = field(default=None, compare=False)
    error: str = field(default="", compare=False)


def find_stall(
    name: str,
    absent: Sequence[int],
    online: Mapping[int, Subscription],
    *,
    is_at_limit: bool,
    trouble: str | None = None,
) -> Stall | None:
    """Return why a stream is stalled, None if it is not; ``trouble``: why its producer has no connection."""
    if absent:
        return Stall(name, "absent subscriber", tuple(absent))
    if trouble is not None:
        return Stall(name, "broker away", (), error=trouble)
    full = {id_: each.full_since for id_, each in online.items() if each.full_since is not None}
    if full:
        return Stall(name, "full queue", tuple(full), since=min(full.values()))
    if not is_at_limit:
        return None
    accounts = {id_: each.account for id_, each in online.items() if each.account is not None}
    deadlines = {id_: account.earliest_deadline() for id_, account in accounts.items()}
    oldest = min((deadline for deadline in deadlines.values() if deadline is not None), default=None)
    owing = tuple(id_ for id_, at in deadlines.items() if at is not None and at == oldest)
    return Stall(name, "unresolved events", owing)


class StallReports:
    """Logs a stall that lasts, and its end. Called with all stalls a few times a minute, at the times of one clock."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger) -> None:
        self._log = log
        self._lasting: dict[str, _Lasting] = {}

    def lasting(self) -> dict[str, tuple[Stall, float]]:
        """Return the stalls of the last `update`, and since when each lasts, by the name of its stream."""
        return {stream: (lasting.stall, lasting.began_at) for stream, lasting in self._lasting.items()}

    def update(self, stalls: Iterable[Stall], now: float) -> None:
        """Compare the stalls of this moment with the earlier ones; log those that last or have ended."""
        current = {stall.stream: stall for stall in stalls}
        for stream in [stream for stream in self._lasting if stream not in current]:
            lasting = self._lasting.pop(stream)
            if lasting.reported_at is not None:
                self._log.info("a shared stream continues", stream=stream, waited_s=round(now - lasting.began_at, 1))
        for stream, stall in current.items():
            before = self._lasting.get(stream)
            if before is None or before.stall.reason != stall.reason or before.stall.since != stall.since:
                # Also if a queue is full again: its subscriber pulled in the meantime, so it is slow, but alive.
                self._lasting[stream] = _Lasting(stall, now if stall.since is None else stall.since)
            self._report(self._lasting[stream], now)

    def _report(self, lasting: _Lasting, now: float) -> None:
        if lasting.stall.reason == "broker away":
            return  # the producer logs each attempt
        before, is_absence = lasting.reported_at, lasting.stall.reason == "absent subscriber"
        again_s = ABSENCE_REPORT_AGAIN_S if is_absence else STALL_REPORT_AGAIN_S
        if now - lasting.began_at >= STALL_REPORT_S if before is None else now - before >= again_s:
            lasting.reported_at = now
            report = self._log.error if is_absence else self._log.warning
            report(
                "a shared stream stands still until subscribers that are absent are back, paused or removed"
                if is_absence
                else "a shared stream waits for its subscribers",
                stream=lasting.stall.stream,
                reason=lasting.stall.reason,
                trigger_ids=list(lasting.stall.trigger_ids),
                waited_s=round(now - lasting.began_at, 1),
            )


@dataclass(slots=True)
class _Lasting:
    stall: Stall
    began_at: float
    reported_at: float | None = None
