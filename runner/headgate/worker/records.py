"""A worker's log records: written where they are made, so that whoever logs waits rather than loses a line."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from headgate.worker.stops import Stops


class RecordSocket:
    """The worker's end of the log socket. What was put is with the kernel when `put` returns."""

    def __init__(self, sock: socket.socket, stops: Stops) -> None:
        self._socket = sock
        self._stops = stops
        self._lock = threading.Lock()
        # A fork of the step's may log, too, and whoever held the lock is not in it.
        os.register_at_fork(after_in_child=self._unlock)

    def put(self, record: bytes) -> None:
        """Send one record or more, as long as that takes; the step has to wait for a supervisor that reads slowly."""
        # The supervisor is gone where this fails, and this process with it.
        with self._stops.held(), self._lock, contextlib.suppress(OSError):
            # One at a time: so much the kernel takes as a whole, and nothing of a fork's gets in between.
            for each in record.split(b"\n"):
                self._socket.sendall(each + b"\n")

    def _unlock(self) -> None:
        self._lock = threading.Lock()
