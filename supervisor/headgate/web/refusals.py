"""The audit of acts that users may not do: one row for many, however often somebody asks.

The first refusal of an act is written at once. Those that follow are counted, and added to its row every now and then,
so that a loop of them neither fills the table nor keeps others from writing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from headgate.store.access.audit import Action, Actor, Written
from headgate.store.errors import StoreError
from headgate.web.writing import Writer

log = structlog.get_logger(__name__)

PAUSE_S = 60.0  # between two changes of a row
ROW_S = 3600.0  # after which another row is begun
ROWS_MAX = 1000  # that are remembered; the one that was refused longest ago goes first


class _Row:
    """What is known of one user and one act."""

    def __init__(self) -> None:
        self.written: Written | None = None
        self.times = 0  # that are not in the row yet
        self.began_at = self.next_at = float("-inf")


class Refusals:
    """Writes the refusals of one process. May be used by several threads."""

    def __init__(self, writer: Writer, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, Action], _Row] = {}

    def note(self, actor: Actor, action: Action, subject: str) -> None:
        """Note that a user may not do this. The user is refused even if that cannot be written now."""
        with self._lock:
            key = (actor.name, action)
            row = self._rows.pop(key, None) or _Row()
            self._rows[key] = row
            while len(self._rows) > ROWS_MAX:
                del self._rows[next(iter(self._rows))]
            row.times += 1
            now = self._clock()
            if now < row.next_at:
                return
            row.next_at = now + PAUSE_S
            if now >= row.began_at + ROW_S:
                row.written, row.began_at = None, now
            times, row.times, last = row.times, 0, row.written
        try:
            with self._writer.store(actor, wait_s=0) as store:
                written = store.access.note_refusal(action, subject, times, last)
        except StoreError as error:
            log.warning("a refusal could not be written to the audit", user=actor.name, action=action, error=str(error))
            with self._lock:
                row.times += times
            return
        with self._lock:
            row.written = written
