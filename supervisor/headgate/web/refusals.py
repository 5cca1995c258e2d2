"""The audit of acts that users may not do: one row for many, however often somebody asks.

The first refusal of an act is written at once. Those that follow are counted, and added to its row every now and then,
so that a loop of them neither fills the table nor keeps others from writing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import structlog
from starlette.concurrency import run_in_threadpool

from headgate.store.access.audit import Action, Actor, Written
from headgate.store.errors import StoreError
from headgate.web.writing import Writer

log = structlog.get_logger(__name__)

PAUSE_S = 60.0  # between two changes of a row
ROW_S = 3600.0  # after which another row is begun
ROWS_MAX = 1000  # that are remembered; the one that was refused longest ago goes first
WRITE_EVERY_S = 10.0  # those that wait are looked for
WRITE_S_MAX = 1.0  # of those that wait, at a time: a process that ends waits for no more


class _Row:
    """What is known of one user and one act, with the last who was refused, and what."""

    def __init__(self, actor: Actor, action: Action, subject: str) -> None:
        self.actor = actor
        self.action: Action = action
        self.subject = subject
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
            row = self._rows.pop(key, None) or _Row(actor, action, subject)
            row.actor, row.subject = actor, subject
            self._rows[key] = row
            while len(self._rows) > ROWS_MAX:
                del self._rows[next(iter(self._rows))]
            row.times += 1
        self._write(row)

    def write_waiting(self, *, is_end: bool = False) -> None:
        """Write what was counted and is not in a row yet, if it is time for that; ``is_end``: all of it."""
        ends_at = self._clock() + WRITE_S_MAX
        with self._lock:
            rows = list(self._rows.values())
        for row in rows:
            if self._clock() > ends_at:
                break
            self._write(row, is_end=is_end)

    async def write_on(self) -> None:
        """Write what waits every now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await run_in_threadpool(self.write_waiting)

    def _write(self, row: _Row, *, is_end: bool = False) -> None:
        with self._lock:
            now = self._clock()
            if not row.times or (now < row.next_at and not is_end):
                return
            row.next_at = now + PAUSE_S
            if now >= row.began_at + ROW_S:
                row.written, row.began_at = None, now
            times, row.times, last = row.times, 0, row.written
            actor, action = row.actor, row.action
        try:
            with self._writer.store(actor, wait_s=0) as store:
                written = store.access.note_refusal(action, row.subject, times, last)
        except StoreError as error:
            log.warning("a refusal could not be written to the audit", user=actor.name, action=action, error=str(error))
            with self._lock:
                row.times += times
            return
        with self._lock:
            row.written = written
