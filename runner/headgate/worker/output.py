"""The streams of a worker: what a step prints becomes log records (`headgate.child.output`).

What goes past Python, to the descriptors themselves, is read by the supervisor from the pipe that they are.
"""

from __future__ import annotations

import ctypes
import io
import sys

from headgate.child.logs import Channel
from headgate.child.output import captured, end_lines_of
from headgate.worker.stops import Stops


class Output:
    """This process's ``sys.stdout`` and ``sys.stderr``."""

    def __init__(self, channel: Channel, stops: Stops) -> None:
        self._channel = channel
        self._stops = stops
        self._streams = [self._captured("stdout"), self._captured("stderr")]
        self._libc = ctypes.CDLL(None)

    def take(self) -> None:
        """Be standard output and error from now on, whatever a step has put in their place."""
        sys.stdout, sys.stderr = self._streams

    def end_step(self) -> None:
        """See to it that all that was printed so far is on its way, then be standard output and error again."""
        for stream in {id(s): s for s in (sys.stdout, sys.stderr)}.values():
            if stream in self._streams:
                continue
            try:
                stream.flush()
            except Exception:  # a stream of the author's own may be closed, or be anything
                continue
        for index, name in enumerate(("stdout", "stderr")):
            end_lines_of(self._streams[index])
            try:
                self._streams[index].reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
            except ValueError:  # the step has detached it
                self._streams[index] = self._captured(name)
        self._libc.fflush(None)  # what C code has printed waits in a buffer of its library's
        self.take()

    def _captured(self, name: str) -> io.TextIOWrapper:
        return captured(name, {"stdout": 1, "stderr": 2}[name], self._channel, self._stops.held)
