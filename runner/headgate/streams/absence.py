"""Absent subscribers: a stream waits for each that failed, or is not started, until it joins or is cancelled.

The subscribers of an event are fixed when it is broadcast, so an absent one would miss the events broadcast in the
meantime, and the broker would forget them. Therefore nothing is broadcast without it: one failure costs the other
subscribers a pause, and costs the failed one no event. There is no time limit. A trigger that fails again and again on
one message is passed over by its supervisor (`headgate.streams.subscription.PassOver`); for any other reason a user has
to mend, pause or remove it, and until then the log says which trigger is waited for (`headgate.streams.stalls`).
"""

from __future__ import annotations

from collections.abc import Hashable


class AbsentSubscribers:
    """The triggers that each stream waits for, by the key of the stream."""

    def __init__(self) -> None:
        self._of: dict[Hashable, dict[int, None]] = {}  # the inner ones for their order

    def add(self, key: Hashable, trigger_id: int) -> None:
        """Wait for a trigger. A stream of that key need not exist yet."""
        self._of.setdefault(key, {})[trigger_id] = None

    def remove(self, trigger_id: int) -> list[Hashable]:
        """Stop waiting for a trigger, which has joined or never will; return the keys of the streams concerned."""
        keys = [key for key, absent in self._of.items() if trigger_id in absent]
        for key in keys:
            del self._of[key][trigger_id]
            if not self._of[key]:
                del self._of[key]
        return keys

    def of(self, key: Hashable) -> tuple[int, ...]:
        """Return the triggers that the stream waits for."""
        if not self._of:  # the whole cost of most events
            return ()
        return tuple(self._of.get(key, ()))
