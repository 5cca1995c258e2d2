"""A worker's log records and output streams: the printed lines of a step become log records (`headgate.child.output`).

A record is sent by the thread that logs it, so a step that logs faster than the supervisor reads has to wait, but loses
no line. Output that bypasses Python goes to the descriptors 1 and 2, a pipe that the supervisor reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import socket
import sys
import threading

from headgate.child.logs import Channel
from headgate.child.output import captured, end_lines_of
from headgate.protocol.messages.worker import STEP_LINE
from headgate.worker.stops import Stops


class RecordSocket:
    """The worker's end of the log socket. A record is in the kernel's buffer when `put` returns."""

    def __init__(self, sock: socket.socket, stops: Stops) -> None:
        self._socket = sock
        self._stops = stops
        self._lock = threading.Lock()
        # A fork of the step may log too, but the thread that held the lock does not exist in it.
        os.register_at_fork(after_in_child=self._unlock)

    def put(self, record: bytes) -> None:
        """Send one or more records; blocks while the supervisor reads slowly."""
        # If this fails, the supervisor has died, and this process ends too.
        with self._stops.held(), self._lock, contextlib.suppress(OSError):
            # One record at a time: the kernel takes it as a whole, so that records of a fork are not mixed in.
            for each in record.split(b"\n"):
                self._socket.sendall(each + b"\n")

    def _unlock(self) -> None:
        self._lock = threading.Lock()


class Output:
    """This process's ``sys.stdout`` and ``sys.stderr``."""

    def __init__(self, channel: Channel, stops: Stops) -> None:
        self._channel = channel
        self._stops = stops
        self._streams = [self._captured("stdout"), self._captured("stderr")]
        self._libc = ctypes.CDLL(None)
        self._pipe = os.dup(1)  # a step may put something else there

    def take(self) -> None:
        """Install the streams as standard output and error, also after a step has replaced them."""
        sys.stdout, sys.stderr = self._streams

    def end_step(self) -> None:
        """Flush everything printed so far, then install the streams again."""
        for stream in {id(s): s for s in (sys.stdout, sys.stderr)}.values():
            if stream in self._streams:
                continue
            try:
                stream.flush()
            except Exception:  # a stream of the author's may be closed, or be any object
                continue
        for index, name in enumerate(("stdout", "stderr")):
            end_lines_of(self._streams[index])
            try:
                self._streams[index].reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
            except ValueError:  # the step has detached it
                self._streams[index] = self._captured(name)
        self._libc.fflush(None)  # C code writes to a buffer of its library
        self.take()

    def mark_step(self, token: str) -> None:
        """Say in the pipe that all that follows is of this step."""
        with contextlib.suppress(OSError):  # the supervisor is gone, and this process with it
            os.write(self._pipe, STEP_LINE + token.encode() + b"\n")

    def _captured(self, name: str) -> io.TextIOWrapper:
        return captured(name, {"stdout": 1, "stderr": 2}[name], self._channel, self._stops.held)
