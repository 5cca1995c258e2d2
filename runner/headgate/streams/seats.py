"""Seats kept for subscribers that failed and are expected back.

The audience of an event is frozen when it is broadcast (seed 000), so a subscriber that is away misses what
is broadcast meanwhile, and the broker forgets it. A trigger that failed is started again in a moment; until
it has rejoined, or has been away for too long, the stream it left pulls nothing. So one failure costs the
others a pause, and costs the one that failed no event.

The time of a seat begins to run when the supervisor has stored that the trigger failed: before that nobody
can start it again, however long the database is away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import structlog


class Seats:
    """Who is expected back in which stream, and until when (by the clock ``now``, in seconds)."""

    def __init__(
        self, *, rejoin_wait_s: float, now: Callable[[], float], log: structlog.typing.FilteringBoundLogger
    ) -> None:
        self._rejoin_wait_s = rejoin_wait_s
        self._now = now
        self._log = log
        self._kept: dict[Hashable, dict[int, float]] = {}

    def keep(self, key: Hashable, trigger_id: int) -> None:
        """Keep a seat for a subscriber that failed, for as long as its time does not run."""
        if self._rejoin_wait_s > 0:
            self._kept.setdefault(key, {}).setdefault(trigger_id, math.inf)

    def start_clock(self, trigger_id: int) -> set[Hashable]:
        """The failure is stored, and the trigger can be started again; return the streams concerned."""
        keys = {key for key, absent in self._kept.items() if trigger_id in absent}
        for key in keys:
            self._kept[key][trigger_id] = self._now() + self._rejoin_wait_s
        return keys

    def give_up(self, trigger_id: int) -> set[Hashable]:
        """Give up a trigger's seats, because it has come back or will not; return the streams concerned."""
        keys = {key for key, absent in self._kept.items() if trigger_id in absent}
        for key in keys:
            self._forget(key, trigger_id)
        return keys

    def wait_until(self, key: Hashable) -> float | None:
        """Return until when the stream has to wait for somebody, None if for nobody.

        Seats whose time is over are given up here, with a warning that names the trigger.
        """
        if not self._kept or key not in self._kept:  # the first is all that an event costs as a rule
            return None
        now = self._now()
        for trigger_id, deadline in list(self._kept[key].items()):
            if deadline <= now:
                self._forget(key, trigger_id)
                self._log.error(
                    "a trigger has not come back to its shared stream, which goes on without it; "
                    "it will not get what is broadcast until it does",
                    stream=repr(key),
                    trigger_id=trigger_id,
                    waited_s=self._rejoin_wait_s,
                )
        return min(self._kept[key].values()) if key in self._kept else None

    def absent(self, key: Hashable) -> list[int]:
        """Return the triggers that the stream waits for."""
        return list(self._kept.get(key, ()))

    def _forget(self, key: Hashable, trigger_id: int) -> None:
        del self._kept[key][trigger_id]
        if not self._kept[key]:
            del self._kept[key]
