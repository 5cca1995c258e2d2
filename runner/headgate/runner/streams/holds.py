"""Who holds whom: why a stream pulls nothing at this moment, and saying so when it lasts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

import structlog

HOLD_REPORT_S = 10.0  # a stream that waits for the same reason for so long is reported
HOLD_REPORT_AGAIN_S = 300.0  # and then again this often, for as long as it lasts


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a stream waits before it pulls its next event, and for which triggers.

    ``full queue``: these have as many raw events waiting as they may (back-pressure). ``absent subscriber``: these
    failed, and are expected back (`Seats`). ``unresolved events``: too many events are broadcast and not advanced;
    these are the triggers that owe the oldest of them.
    """

    stream: Hashable
    reason: Literal["full queue", "absent subscriber", "unresolved events"]
    trigger_ids: tuple[int, ...]


class HoldReports:
    """Logs a hold that lasts, and its end. Told of all holds a few times a minute, at the times of one clock."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger) -> None:
        self._log = log
        self._since: dict[Hashable, tuple[float, Hold]] = {}
        self._reported_at: dict[Hashable, float] = {}

    def note(self, holds: Iterable[Hold], now: float) -> None:
        """Take what holds now."""
        current = {hold.stream: hold for hold in holds}
        for stream in [stream for stream in self._since if stream not in current]:
            since, hold = self._since.pop(stream)
            if self._reported_at.pop(stream, None) is not None:
                self._log.info("a shared stream goes on", stream=repr(stream), waited_s=round(now - since, 1))
        for stream, hold in current.items():
            since, before = self._since.get(stream, (now, hold))
            if before.reason != hold.reason:
                since = now
            self._since[stream] = since, hold
            reported_at = self._reported_at.get(stream)
            is_due = now - since >= HOLD_REPORT_S if reported_at is None else now - reported_at >= HOLD_REPORT_AGAIN_S
            if is_due:
                self._reported_at[stream] = now
                self._log.warning(
                    "a shared stream waits for its subscribers",
                    stream=repr(stream),
                    reason=hold.reason,
                    trigger_ids=list(hold.trigger_ids),
                    waited_s=round(now - since, 1),
                )
