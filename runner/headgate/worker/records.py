"""A worker's log records: written where they are made, so that whoever logs waits rather than loses a line."""

from __future__ import annotations

import contextlib
import socket
import threading

from headgate.worker.stops import Stops


class RecordSocket:
    """The worker's end of the log socket. What was put is with the kernel when `put` returns."""

    def __init__(self, sock: socket.socket, stops: Stops) -> None:
        self._socket = sock
        self._stops = stops
        self._lock = threading.Lock()

    def put(self, record: bytes) -> None:
        """Send one record, as long as that takes; the step has to wait for a supervisor that reads slowly."""
        # The supervisor is gone where this fails, and this process with it.
        with self._stops.held(), self._lock, contextlib.suppress(OSError):
            self._socket.sendall(record + b"\n")
