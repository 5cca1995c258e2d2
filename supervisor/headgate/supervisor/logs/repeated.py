"""What may happen again and again, at the will of whoever calls: the log must not grow with that."""

from __future__ import annotations

import math
import threading
from typing import Any

TOLD_EVERY_S = 60.0  # between two lines


class Repeated:
    """Logs what has happened at once, and then at most one line in `TOLD_EVERY_S`, with how often it has happened.

    ``log`` is that of the module, ``counted`` the name of the number in a line. May be used by several threads.
    """

    def __init__(self, log: Any, event: str, *, counted: str = "count") -> None:
        self.count = 0  # that no line tells of
        self._log = log
        self._event = event
        self._counted = counted
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {}
        self._told_at = -math.inf

    def note(self, now: float, **fields: Any) -> None:
        """Count once more, at a moment of any monotonic clock; the fields of the last time are in the line."""
        with self._lock:
            self.count, self._fields = self.count + 1, fields
            if now >= self._told_at + TOLD_EVERY_S:
                self._told_at = now
                self._tell()

    def tell_rest(self) -> None:
        """Log how often it has happened since the last line, if it has."""
        with self._lock:
            if self.count:
                self._tell()

    def _tell(self) -> None:
        self._log.warning(self._event, **{self._counted: self.count}, **self._fields)
        self.count = 0
