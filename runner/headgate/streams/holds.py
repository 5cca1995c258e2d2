"""Who holds whom: why a stream pulls nothing at this moment, and saying so when it lasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import structlog

from headgate.streams.subscription import Subscription

HOLD_REPORT_S = 10.0  # a stream that waits for the same reason for so long is reported
HOLD_REPORT_AGAIN_S = 300.0  # and then again this often, for as long as it lasts


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a stream waits before it pulls its next event, and for which triggers. ``stream`` is its key as text.

    ``full queue``: these have as many raw events waiting as they may (back-pressure). ``absent subscriber``: these
    failed, and are expected back (`Seats`). ``unresolved events``: too many events are broadcast and not advanced;
    these are the triggers that owe the oldest of them.
    """

    stream: str
    reason: Literal["full queue", "absent subscriber", "unresolved events"]
    trigger_ids: tuple[int, ...]
    since: float | None = field(default=None, compare=False)  # by the manager's clock, where it is known: when a queue
    # was filled that nothing was pulled from since


def find_hold(
    name: str, absent: Sequence[int], online: Mapping[int, Subscription], *, is_at_limit: bool
) -> Hold | None:
    """Return who holds a stream up, None for nobody: those it waits for, full queues, or, at the limit, debtors."""
    if absent:
        return Hold(name, "absent subscriber", tuple(absent))
    full = {id_: each.full_since for id_, each in online.items() if each.full_since is not None}
    if full:
        return Hold(name, "full queue", tuple(full), since=min(full.values()))
    if not is_at_limit:
        return None
    accounts = {id_: each.account for id_, each in online.items() if each.account is not None}
    owed = {id_: account.earliest_deadline() for id_, account in accounts.items()}
    oldest = min((deadline for deadline in owed.values() if deadline is not None), default=None)
    return Hold(name, "unresolved events", tuple(id_ for id_, at in owed.items() if at is not None and at == oldest))


class HoldReports:
    """Logs a hold that lasts, and its end. Told of all holds a few times a minute, at the times of one clock."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger) -> None:
        self._log = log
        self._lasting: dict[str, _Lasting] = {}

    def note(self, holds: Iterable[Hold], now: float) -> None:
        """Take what holds now."""
        current = {hold.stream: hold for hold in holds}
        for stream in [stream for stream in self._lasting if stream not in current]:
            lasting = self._lasting.pop(stream)
            if lasting.reported_at is not None:
                self._log.info("a shared stream goes on", stream=stream, waited_s=round(now - lasting.began_at, 1))
        for stream, hold in current.items():
            before = self._lasting.get(stream)
            if before is None or before.hold.reason != hold.reason or before.hold.since != hold.since:
                # Also where a queue is full again: somebody pulled from it meanwhile, and is slow, but alive.
                self._lasting[stream] = _Lasting(hold, now if hold.since is None else hold.since)
            self._report(self._lasting[stream], now)

    def _report(self, lasting: _Lasting, now: float) -> None:
        before = lasting.reported_at
        if now - lasting.began_at >= HOLD_REPORT_S if before is None else now - before >= HOLD_REPORT_AGAIN_S:
            lasting.reported_at = now
            self._log.warning(
                "a shared stream waits for its subscribers",
                stream=lasting.hold.stream,
                reason=lasting.hold.reason,
                trigger_ids=list(lasting.hold.trigger_ids),
                waited_s=round(now - lasting.began_at, 1),
            )


@dataclass(slots=True)
class _Lasting:
    hold: Hold
    began_at: float
    reported_at: float | None = None
