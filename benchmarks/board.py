"""A file that several processes map: named numbers, and three moments of every event.

The measured work happens in other processes than the benchmark. They write here which step they took and when, which
takes well under a microsecond, and the benchmark reads it. Moments are `time.monotonic`, which is the same clock in all
processes of a machine. Each number has one writer at a time.
"""

from __future__ import annotations

import mmap
import os
import time
from functools import cache

SLOTS = (
    "running",  # triggers that have begun to run, over all runners
    "running_at",  # when the last of them did
    "subscribed",  # subscribers that have begun to read their stream
    "first_at",  # when the first event was handed out
    "advanced",  # events advanced on the broker
    "advanced_at",  # when the last of them was
    "acked",  # outcomes of these events, over all subscribers
    "failed",
    "statements",  # that the supervisor sent to the database
)
SLOTS_MAX = 32
NUMBER_BYTES = 8
EVENT_MOMENTS = 3  # handed out, stored, advanced


class Board:
    """One such file. ``handed_at``, ``stored_at`` and ``advanced_at`` are the moments by the event's number."""

    def __init__(self, path: str, events: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = max(os.fstat(descriptor).st_size, (SLOTS_MAX + EVENT_MOMENTS * events) * NUMBER_BYTES)
            os.ftruncate(descriptor, size)
            numbers = memoryview(mmap.mmap(descriptor, size)).cast("d")
        finally:
            os.close(descriptor)
        self.path = path
        self._slots = numbers[:SLOTS_MAX]
        moments = numbers[SLOTS_MAX:]
        third = len(moments) // EVENT_MOMENTS
        self.handed_at = moments[:third]
        self.stored_at = moments[third : 2 * third]
        self.advanced_at = moments[2 * third :]

    def __getitem__(self, slot: str) -> float:
        return self._slots[_places()[slot]]

    def __setitem__(self, slot: str, value: float) -> None:
        self._slots[_places()[slot]] = value

    def add(self, slot: str, number: float = 1) -> None:
        """Add to a number."""
        self._slots[_places()[slot]] += number

    def mark(self, slot: str) -> None:
        """Set a number to this moment."""
        self._slots[_places()[slot]] = time.monotonic()


@cache
def _places() -> dict[str, int]:
    return {slot: place for place, slot in enumerate(SLOTS)}


@cache
def open_board(path: str) -> Board:
    """Return the board that another process made; in this process all callers share it."""
    return Board(path, 0)
