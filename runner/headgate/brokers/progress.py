"""How far a producer has come in its lanes: what the report of drift is made of (``headgate streams drift``).

A producer's thread writes it, trio's thread reads it. Nothing of the producer depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from headgate.protocol.messages.runner import LANES_TOLD_MAX, LaneProgress, Position


@dataclass(slots=True)
class _Lane:
    """A lane as it was begun, and where it is now; some producers note each message."""

    begun: LaneProgress
    asked: Position
    advanced: Position
    deliveries: int


_NOTHING: tuple[Position, int] = ((), 0)  # was dropped


class Progress:
    """The lanes of one producer, by name. Only the lanes that it has begun with are known."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._dropped: dict[str, tuple[Position, int]] = {}
        self._given_up: str | None = None  # the lane that was given up last

    def begin(
        self,
        lane: str,
        committed: Position,
        *,
        is_ours: bool | None = None,
        committed_at: float | None = None,
        cursor: str = "",
        deliveries: int = 0,
    ) -> None:
        """Begin with a lane, maybe once more: the broker has ``committed``, () for nothing (`LaneProgress`)."""
        begun = LaneProgress(lane, committed, time.time(), is_ours, committed_at, cursor, began_deliveries=deliveries)
        self._lanes[lane] = _Lane(begun, committed, committed, deliveries)

    def note_asked(self, lane: str, position: Position) -> None:
        """Note, before the broker is asked, that it may have everything up to this as committed."""
        if (known := self._lanes.get(lane)) is not None and position > known.asked:
            known.asked = position

    def note_advanced(self, lane: str, position: Position) -> None:
        """Note that the broker has confirmed that everything up to this is committed."""
        if (known := self._lanes.get(lane)) is not None and position > known.advanced:
            known.advanced = position

    def note(self, lane: str, position: Position, deliveries: int = 0) -> None:
        """Note both: the broker has given out this message, so it has been asked, and has confirmed it.

        ``deliveries``: how many it has counted up to this one, if it counts.
        """
        # The count first: a place is never told with a count that is older than it.
        if (known := self._lanes.get(lane)) is not None:
            known.deliveries = max(known.deliveries, deliveries)
        self.note_asked(lane, position)
        self.note_advanced(lane, position)

    def note_dropped(self, lane: str, mark: Position, missing: int) -> None:
        """Note that the broker has dropped messages that were not read: ``missing`` at most, if ``mark`` has grown."""
        self._dropped[lane] = (mark, missing)

    def give_up(self, lanes: Collection[str]) -> None:
        """Forget lanes that others may read from now on."""
        for lane in lanes:
            self._dropped.pop(lane, None)
            if self._lanes.pop(lane, None) is not None:
                self._given_up = lane

    def lanes(self) -> tuple[LaneProgress, ...]:
        """Return the first `LANES_TOLD_MAX` lanes; if all were given up, one of these, with 0 as its beginning."""
        # What is confirmed is read first: what was asked for, and the count, are never behind it.
        lanes = tuple(
            replace(
                lane.begun,
                advanced=lane.advanced,
                asked=lane.asked,
                dropped=dropped,
                missing=missing,
                deliveries=lane.deliveries,
            )
            for name, lane in islice(list(self._lanes.items()), LANES_TOLD_MAX)
            for dropped, missing in (self._dropped.get(name, _NOTHING),)
        )
        return lanes if lanes or self._given_up is None else (LaneProgress(self._given_up),)
