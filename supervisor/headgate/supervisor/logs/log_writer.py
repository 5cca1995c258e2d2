"""A thread that writes the lines of a log, so that a slow reader or a slow disk does not delay other threads.

A pipe that is not read, or a disk that hangs, blocks only this thread, which has a bounded queue. If the queue is full,
lines are dropped and counted; a note with their number takes their place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import Generic, TypeVar

KEYS_DROPPED_MAX = 1000  # keys for which dropped lines are counted
CLOSE_WAIT_S = 2.0  # how long the last lines may take

Key = TypeVar("Key")
Line = TypeVar("Line", bound=Sized)


class LogWriter(Generic[Key, Line]):
    """Passes lines to ``write`` in order, many at a time, in a thread of its own.

    Each line has a key, such as the file it is for. ``note`` makes the line that says how many lines of one key were
    dropped. ``lines_max`` and ``bytes_max`` bound the queue; as many again may be in the hands of ``write``, which is
    called with ``is_last`` when the writer is being closed. ``wake_in_s`` says when to call it even without lines.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[tuple[Key, Line]], bool], None],
        note: Callable[[int], Line],
        *,
        lines_max: int,
        bytes_max: int,
        wake_in_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._write = write
        self._note = note
        self._lines_max = lines_max
        self._bytes_max = bytes_max
        self._wake_in_s = wake_in_s
        self._lines: deque[tuple[Key, Line]] = deque()
        self._bytes = 0
        self._dropped: dict[Key, int] = {}
        self._queued = self._written = 0  # lines, since the beginning
        self._late_until = 0  # the number of lines that a flush did not see written in its time
        self._is_closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, key: Key, line: Line) -> None:
        """Queue a line, or count it as dropped. Never waits for `write`."""
        with self._wake:
            if len(self._lines) >= self._lines_max or self._bytes >= self._bytes_max:
                if key in self._dropped or len(self._dropped) < KEYS_DROPPED_MAX:
                    self._dropped[key] = self._dropped.get(key, 0) + 1
                return
            self._queue_notes()
            self._queue(key, line)
            self._wake.notify_all()

    def flush(self, within_s: float, *, is_stuck: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the lines queued before are written, at most ``within_s``; return whether they are.

        Does not wait if ``is_stuck`` returns true, nor while lines are unwritten for which a flush has waited in vain.
        """
        with self._wake:
            queued = self._queued
            if self._written >= self._late_until:
                self._wake.wait_for(lambda: self._written >= queued or is_stuck(), within_s)
            if self._written < queued:
                self._late_until = queued
            return self._written >= queued

    def close(self) -> bool:
        """Write the queued lines, for at most `CLOSE_WAIT_S` seconds; return whether all of it was written."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join(CLOSE_WAIT_S)
        return not self._thread.is_alive()

    def _queue(self, key: Key, line: Line) -> None:
        self._lines.append((key, line))
        self._bytes += len(line)
        self._queued += 1

    def _queue_notes(self) -> None:
        for key, count in self._dropped.items():
            self._queue(key, self._note(count))
        self._dropped.clear()

    def _run(self) -> None:
        is_closing = False
        while not is_closing or self._lines:
            with self._wake:
                self._wake.wait_for(lambda: self._lines or self._dropped or self._is_closing, self._wake_in_s())
                self._queue_notes()
                lines, self._lines = self._lines, deque()
                self._bytes = 0
                is_closing = self._is_closing
            self._write(lines, is_closing)
            with self._wake:
                self._written += len(lines)
                self._wake.notify_all()
