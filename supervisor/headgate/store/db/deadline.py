"""A limit on how long a connection may take to answer, held from outside of it.

The limits a server is given hold only as long as it lives and is heard. One that was suspended, or a network
that went quiet, would keep the supervisor waiting, and with it heartbeats and signals. So a thread watches:
when a transaction has taken too long, the socket under it is shut down, the driver sees a broken connection,
and the caller gets `DatabaseAway` like for any other.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class Deadline:
    """Shuts the socket of a transaction down that takes longer than ``limit_s`` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._ends_at: float | None = None
        self._descriptor = -1
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, descriptor: int) -> Generator[None]:
        """Watch the transaction that runs within this block, over the socket with this descriptor."""
        with self._changed:
            self._descriptor = descriptor
            self._ends_at = time.monotonic() + self._limit_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="headgate database deadline", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                # Under the lock: the descriptor is not closed, and given to somebody else, while it is shut down.
                self._ends_at = None

    def _watch(self) -> None:
        with self._changed:
            while True:
                if self._ends_at is None:
                    # Nobody tells of a beginning, which would cost every transaction a switch of threads.
                    self._changed.wait(self._limit_s / 2)
                elif (left_s := self._ends_at - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    self._ends_at = None
                    _shut_down(self._descriptor)


def _shut_down(descriptor: int) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed already, which is what was wanted
