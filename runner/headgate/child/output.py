"""Output of users' code: each printed line becomes a log record of the trigger or step that printed it.

`captured` makes the streams that replace ``sys.stdout`` and ``sys.stderr``, once for the life of a runner or a worker,
because a handler of a library keeps the stream that it found. They are ordinary text streams with ``buffer``,
``reconfigure`` and ``fileno``, which is still that of the process. A record carries the names that
`headgate.child.logs` puts on the records of loggers, ``source: output``, and the stream as its ``logger``. A process
that prints nothing pays nothing.

Nothing is cut and nothing is dropped here. A line longer than `PIECE_BYTES_MAX` is sent in pieces: all but the last
have ``more: true``, and ``part`` counts them. The same holds for a line that was flushed before it ended; the beginning
of a secret at its end is kept back until the line goes on or ends (I12). Bytes that are not UTF-8 become backslash
escapes.

Output that bypasses Python's streams, for example of C code and of processes that users' code starts, still goes to
the descriptors.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TextIO, TypeAlias

from headgate.child.logs import Channel, LogChannel, names_with, render_lines, trigger_names
from headgate.child.queries import secrets

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIECE_BYTES_MAX: Final = 8 * 1024  # of a line in one record: JSON makes six bytes of one at most, and takes 60,000
OPEN_LINES_MAX: Final = 1000  # lines that have not ended, each of one trigger or thread; beyond it the oldest is sent


class _Line:
    """A line that has not ended: the bytes not yet sent, and the number of pieces sent before."""

    __slots__ = ("data", "names", "parts")

    def __init__(self, names: Mapping[str, object]) -> None:
        self.names = names
        self.data = b""
        self.parts = 0


Held: TypeAlias = Callable[[], AbstractContextManager[object]]


class RecordBuffer(io.BufferedIOBase):
    """The ``buffer`` of a captured stream. Each trigger and each thread writes lines of its own.

    There is no lock: an entry is only touched by the thread it belongs to, and a signal handler may print as well.
    """

    def __init__(self, name: str, descriptor: int, channel: Channel, held: Held) -> None:
        self._descriptor = descriptor
        self._name = name
        self._channel = channel
        self._held = held
        self._open: dict[tuple[int, int], _Line] = {}

    @property
    def name(self) -> str:
        """``<stdout>`` or ``<stderr>``, as of any such stream."""
        return f"<{self._name}>"

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor of the process, for code that passes it to a subprocess."""
        return self._descriptor

    def close(self) -> None:
        """Only flush: other code prints here, too."""
        self.flush()

    def write(self, data: ReadableBuffer, /) -> int:
        """Send the lines that are complete now, and keep the rest."""
        with self._held():
            return self._write(bytes(data))

    def flush(self) -> None:
        """Send the beginning of this thread's line; later output continues it."""
        with self._held():
            line = self._open.get((id(trigger_names.get()), threading.get_ident()))
            if line is not None:
                self._say_unfinished(line)

    def end_lines(self, names: Mapping[str, object] | None = None) -> None:
        """Send the rest of all lines, or of those with this very ``names`` object, as if they had ended."""
        with self._held():
            for key, line in list(self._open.items()):
                if names is None or line.names is names:
                    self._open.pop(key, None)
                    if line.data:
                        self._say(line)

    def _write(self, written: bytes) -> int:
        names = trigger_names.get()
        # The entry keeps the names alive, so that no other object can get this id.
        key = (id(names), threading.get_ident())
        line = self._open.pop(key, None) or _Line(names)
        *ended, rest = (line.data + written).split(b"\n") if line.data else written.split(b"\n")
        for whole in ended:
            line.data = whole
            self._say(line)
            line = _Line(names)
        line.data = rest
        self._say_pieces(line)
        if line.data or line.parts:
            self._open[key] = line
            if len(self._open) > OPEN_LINES_MAX:
                self._say_oldest()
        return len(written)

    def _say_oldest(self) -> None:
        with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread has made room meanwhile
            self._say_unfinished(self._open.pop(next(iter(self._open))))

    def _say(self, line: _Line) -> None:
        self._say_pieces(line)
        self._put(line, line.data, more=False)

    def _say_pieces(self, line: _Line) -> None:
        """Send so much of a line that at most one piece is left."""
        if len(line.data) > PIECE_BYTES_MAX and secrets:
            line.data = secrets.hide_in_bytes(line.data)  # before it is cut: no piece may hold half of a secret (I12)
        data, begin = line.data, 0
        while len(data) - begin > PIECE_BYTES_MAX:
            end = _end_of_piece(data, begin)
            self._put(line, data[begin:end], more=True)
            begin = end
        line.data = data[begin:]

    def _say_unfinished(self, line: _Line) -> None:
        kept = secrets.begun_at_end(line.data) if secrets else 0
        data, line.data = line.data[: len(line.data) - kept], line.data[len(line.data) - kept :]
        if data:
            self._put(line, data, more=True)

    def _put(self, line: _Line, data: bytes, *, more: bool) -> None:
        record: dict[str, object] = {
            "timestamp": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": "info",
            "event": data.decode("utf-8", "backslashreplace"),
            "logger": self._name,
            "source": "output",
        }
        if more or line.parts:
            line.parts += 1
            record["part"] = line.parts
            if more:
                record["more"] = True
        self._channel.put(render_lines(record | names_with(line.names)))


def _end_of_piece(data: bytes, begin: int) -> int:
    """Return the end of a piece that begins at ``begin``, so that no UTF-8 character is split."""
    end = begin + PIECE_BYTES_MAX
    for torn in range(4):
        if data[end - torn] & 0xC0 != 0x80:  # no continuation byte: a character, or something else, begins here
            return end - torn
    return end  # this is not UTF-8


def captured(name: str, descriptor: int, channel: Channel, held: Held = nullcontext) -> io.TextIOWrapper:
    """Return a stream whose lines go through the channel as records of the logger ``name``.

    ``descriptor`` is the one that a process which inherits the stream gets. ``held`` is entered in all places in which
    an exception raised by a signal handler would split a line.
    """
    buffer = RecordBuffer(name, descriptor, channel, held)
    # With backslashreplace every text can be written; each write passes through at once.
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)


_captured: list[io.TextIOWrapper] = []


def capture_output(channel: LogChannel) -> None:
    """Send the runner's output through the channel from now on. Call it once."""
    sys.stdout = captured("stdout", sys.stdout.fileno(), channel)
    sys.stderr = captured("stderr", sys.stderr.fileno(), channel)
    _captured.extend([sys.stdout, sys.stderr])
    os.register_at_fork(after_in_child=lambda: _go_on_in_fork(channel))


def end_lines_of(stream: TextIO, names: Mapping[str, object] | None = None) -> None:
    """Call `RecordBuffer.end_lines` of a captured stream."""
    with contextlib.suppress(ValueError):  # users' code has detached it
        if isinstance(buffer := stream.buffer, RecordBuffer):
            buffer.end_lines(names)


def end_lines(names: Mapping[str, object] | None = None) -> None:
    """Call `RecordBuffer.end_lines` of both streams of the runner."""
    for stream in _captured:
        end_lines_of(stream, names)


def _go_on_in_fork(channel: LogChannel) -> None:
    """In a fork no thread empties the channel's queue, so its output and records go to the inherited descriptors."""
    _captured.clear()
    channel.write_to_stderr()
    for name in ("stdout", "stderr"):
        original: io.TextIOWrapper | None = getattr(sys, f"__{name}__")
        if original is not None:
            original.reconfigure(line_buffering=True)  # many a fork ends without flushing
            setattr(sys, name, original)
