"""Rejoin grace: a stream waits for a subscriber that failed and will be started again.

The subscribers of an event are fixed when it is broadcast, so an absent subscriber misses the events broadcast in the
meantime, and the broker forgets them. A trigger that failed is usually started again within seconds. Until it has
rejoined, or has been absent for too long, the stream it left pulls nothing. One failure thus costs the other
subscribers a pause, and costs the failed one no event.

The wait is counted from the moment at which the supervisor has stored the failure: before that the trigger cannot be
started again, however long the database is away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import structlog


class RejoinWaits:
    """The subscribers that each stream waits for, with their deadlines by the clock ``now``, in seconds."""

    def __init__(
        self, *, rejoin_wait_s: float, now: Callable[[], float], log: structlog.typing.FilteringBoundLogger
    ) -> None:
        self._rejoin_wait_s = rejoin_wait_s
        self._now = now
        self._log = log
        self._deadlines: dict[Hashable, dict[int, float]] = {}

    def expect(self, key: Hashable, trigger_id: int) -> None:
        """Expect a subscriber that failed to rejoin; without a deadline until `start`."""
        if self._rejoin_wait_s > 0:
            self._deadlines.setdefault(key, {}).setdefault(trigger_id, math.inf)

    def start(self, trigger_id: int) -> set[Hashable]:
        """Start the wait for a trigger whose failure is stored; return the keys of the streams concerned."""
        keys = self._keys_of(trigger_id)
        for key in keys:
            self._deadlines[key][trigger_id] = self._now() + self._rejoin_wait_s
        return keys

    def cancel(self, trigger_id: int) -> set[Hashable]:
        """Stop waiting for a trigger that has rejoined or never will; return the keys of the streams concerned."""
        keys = self._keys_of(trigger_id)
        for key in keys:
            self._remove(key, trigger_id)
        return keys

    def wait_until(self, key: Hashable) -> float | None:
        """Return the time until which the stream has to wait, None if it need not.

        Waits that have run out end here, with an error in the log that names the trigger.
        """
        if not self._deadlines or key not in self._deadlines:  # the first test is the whole cost of most events
            return None
        now = self._now()
        for trigger_id, deadline in list(self._deadlines[key].items()):
            if deadline <= now:
                self._remove(key, trigger_id)
                self._log.error(
                    "a trigger did not rejoin its shared stream in time; the stream continues without it, "
                    "and the trigger misses the messages broadcast until it rejoins",
                    stream=repr(key),
                    trigger_id=trigger_id,
                    waited_s=self._rejoin_wait_s,
                )
        return min(self._deadlines[key].values()) if key in self._deadlines else None

    def absent(self, key: Hashable) -> list[int]:
        """Return the ids of the triggers that the stream waits for."""
        return list(self._deadlines.get(key, ()))

    def _keys_of(self, trigger_id: int) -> set[Hashable]:
        return {key for key, absent in self._deadlines.items() if trigger_id in absent}

    def _remove(self, key: Hashable, trigger_id: int) -> None:
        del self._deadlines[key][trigger_id]
        if not self._deadlines[key]:
            del self._deadlines[key]
