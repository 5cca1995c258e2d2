"""Lines of the log, written by a thread: a reader that has stopped reading must not stop the supervisor.

A pipe that nobody empties blocks whoever writes to it. Here that is a thread with a bounded queue; when the
queue is full, lines are dropped and counted, and the next one that gets through is preceded by their number.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

LINES_WAITING_MAX = 10_000  # lines
BYTES_WAITING_MAX = 16 * 1024 * 1024  # characters of these lines: what an unread log may cost in memory
CLOSE_WAIT_S = 2.0  # how long the last lines may take


class LogWriter:
    """Calls ``write`` with one line after the other, in a thread of its own."""

    def __init__(self, write: Callable[[str], None], dropped: Callable[[int], str]) -> None:
        self._write = write
        self._tell_dropped = dropped
        self._lines: deque[str] = deque()
        self._chars = 0
        self._dropped = 0
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="headgate log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line, or count it as dropped. Never waits for the reader of the log."""
        with self._wake:
            if len(self._lines) >= LINES_WAITING_MAX or self._chars >= BYTES_WAITING_MAX:
                self._dropped += 1
                return
            if self._dropped:
                self._lines.append(self._tell_dropped(self._dropped))
                self._dropped = 0
            self._lines.append(line)
            self._chars += len(line)
            self._wake.notify()

    def close(self) -> None:
        """Write what is queued, for at most `CLOSE_WAIT_S` seconds."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._is_closing:
                    self._wake.wait()
                if not self._lines:
                    return
                line = self._lines.popleft()
                self._chars -= min(len(line), self._chars)
            self._write(line)
