"""What a step prints: lines of ``sys.stdout`` and ``sys.stderr`` become log records, and no byte of them is lost.

What goes past Python, to the descriptors themselves, is read by the supervisor from the pipe that they are.
"""

from __future__ import annotations

import ctypes
import io
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from headgate.runner.logs import Channel, names_now, render
from headgate.worker.stops import Stops

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A longer line becomes several records, all but the last with ``more``. JSON needs 6 bytes for some: with the names of
# the step this is what a record holds without being cut (`RECORD_BYTES_MAX`).
PIECE_BYTES_MAX: Final = 8000


class LineWriter(io.RawIOBase):
    """Takes bytes, and puts a record into the channel for each line. May be used by several threads at once."""

    def __init__(self, name: str, descriptor: int, channel: Channel, stops: Stops) -> None:
        super().__init__()
        self.name = name
        self._descriptor = descriptor
        self._channel = channel
        self._stops = stops
        self._lock = threading.RLock()  # a record's own making may print
        self._rest = bytearray()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """The descriptor that a child would inherit in this stream's place: the pipe."""
        return self._descriptor

    def write(self, data: ReadableBuffer, /) -> int:
        with self._stops.held(), self._lock:
            given = bytes(data)
            start = 0
            while (end := given.find(b"\n", start)) >= 0:
                self._rest += given[start:end]
                self._tell_rest()
                start = end + 1
            self._rest += given[start:]
            self._tell_pieces()
            return len(given)

    def end_line(self) -> None:
        """Tell what was written since the last line end, if anything."""
        with self._stops.held(), self._lock:
            if self._rest:
                self._tell_rest()

    def _tell_rest(self) -> None:
        self._tell_pieces()
        line = bytes(self._rest)
        self._rest.clear()
        self._tell(line, more=False)

    def _tell_pieces(self) -> None:
        """Tell what is too long for one record, and leave one record's worth at most."""
        start = 0
        while len(self._rest) - start > PIECE_BYTES_MAX:
            end = _end_of_piece(self._rest, start + PIECE_BYTES_MAX)
            self._tell(bytes(self._rest[start:end]), more=True)
            start = end
        del self._rest[:start]

    def _tell(self, line: bytes, *, more: bool) -> None:
        record: dict[str, object] = {
            "event": line.decode("utf-8", "backslashreplace"),
            "level": "info",
            "logger": self.name,
            "timestamp": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            **names_now(),
        }
        self._channel.put(render(record | {"more": True} if more else record))


def _end_of_piece(data: bytearray, end: int) -> int:
    """Return where to cut, at ``end`` or just before: in a character all bytes but the first are 10xxxxxx."""
    for back in range(4):
        if data[end - back] & 0xC0 != 0x80:
            return end - back
    return end  # it is no UTF-8


class Output:
    """This process's ``sys.stdout`` and ``sys.stderr``."""

    def __init__(self, channel: Channel, stops: Stops) -> None:
        self._writers = [
            LineWriter("stdout", 1, channel, stops),
            LineWriter("stderr", 2, channel, stops),
        ]
        self._streams = [_text(writer) for writer in self._writers]
        self._libc = ctypes.CDLL(None)

    def take(self) -> None:
        """Be standard output and error from now on, whatever a step has put in their place."""
        sys.stdout, sys.stderr = self._streams

    def end_step(self) -> None:
        """See to it that all that was printed so far is on its way, then be standard output and error again."""
        for stream in {id(s): s for s in (sys.stdout, sys.stderr, *self._streams)}.values():
            try:
                stream.flush()
            except Exception:  # a stream of the author's own may be closed, or be anything
                continue
        for index, writer in enumerate(self._writers):
            if self._streams[index].closed:
                self._writers[index] = LineWriter(writer.name, writer.fileno(), writer._channel, writer._stops)
                self._streams[index] = _text(self._writers[index])
            writer.end_line()
        self._libc.fflush(None)  # what C code has printed waits in a buffer of its library's
        self.take()


def _text(writer: LineWriter) -> io.TextIOWrapper:
    # Written through: what was printed is a record at once, however the process ends.
    return io.TextIOWrapper(writer, encoding="utf-8", errors="backslashreplace", write_through=True)
