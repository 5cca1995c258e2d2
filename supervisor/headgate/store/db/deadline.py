"""A limit on the duration of a transaction that holds even if the server does not answer.

A server applies its own timeouts only while it runs and can be reached. If it is suspended, or the network drops
packets, the supervisor would wait, and neither renew its lease nor react to signals. So a thread watches: if a
transaction takes too long, it shuts the socket down, the driver sees a broken connection, and the caller gets
`DatabaseAway` as for any other.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class Deadline:
    """Shuts down the socket of a transaction that takes longer than ``limit_s`` seconds."""

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
                # Under the lock, so that the descriptor is not closed and reused while it is shut down.
                self._ends_at = None

    def _watch(self) -> None:
        with self._changed:
            while True:
                if self._ends_at is None:
                    # Transactions do not wake this thread when they begin: that would cost each a switch of threads.
                    self._changed.wait(self._limit_s / 2)
                    if self._ends_at is None:
                        self._thread = None  # the next transaction starts another: an unused database has none
                        return
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
        pass  # it is closed already, as intended
