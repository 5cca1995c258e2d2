"""What users' code prints: each line becomes a log record of whoever printed it.

`captured` makes streams that stand for ``sys.stdout`` and ``sys.stderr``, once for the life of a runner or a worker,
because a handler that a library makes keeps the stream it found. They are text streams as any other: with
``buffer``, ``reconfigure`` and ``fileno``, which is still that of the process. A record carries the names that
`headgate.child.logs` puts on those of loggers, ``source: output``, and the stream as its ``logger``. Nobody pays
anything while nobody prints.

Nothing is cut and nothing is dropped here. A line longer than `PIECE_BYTES_MAX` comes in pieces: all but the last have
``more: true``, and ``part`` counts them. So does a line that was flushed before it ended. Bytes that are not UTF-8
become backslash escapes.

What bypasses Python's streams, such as C code and the processes that users' code starts, goes on to the descriptors.
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
OPEN_LINES_MAX: Final = (
    1000  # lines that were begun and not ended, of as many triggers or threads; the oldest gives way
)


class _Line:
    """A line that has not ended: what is still to be said of it, and how many pieces were said before."""

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
        """The descriptor of the process, for whoever hands it to a process of its own."""
        return self._descriptor

    def close(self) -> None:
        """Do nothing but flush: others print here, too."""
        self.flush()

    def write(self, data: ReadableBuffer, /) -> int:
        """Say the lines that are complete now, and keep the rest."""
        with self._held():
            return self._write(bytes(data))

    def flush(self) -> None:
        """Say what there is of this thread's line; what follows goes on with it."""
        with self._held():
            line = self._open.get((id(trigger_names.get()), threading.get_ident()))
            if line is not None:
                self._say_unfinished(line)

    def end_lines(self, names: Mapping[str, object] | None = None) -> None:
        """Say what is left of all lines, or of those with these very ``names``; nothing goes on with it."""
        with self._held():
            for key, line in list(self._open.items()):
                if names is None or line.names is names:
                    self._open.pop(key, None)
                    if line.data:
                        self._say(line)

    def _write(self, written: bytes) -> int:
        names = trigger_names.get()
        # The entry keeps the names, so that nobody else's can come to have this id.
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
        """Say so much of a line that no more than a piece is left."""
        if len(line.data) > PIECE_BYTES_MAX and secrets:
            line.data = secrets.hide_in_bytes(line.data)  # now: no piece may hold one half of a secret (I12)
        data, begin = line.data, 0
        while len(data) - begin > PIECE_BYTES_MAX:
            end = _end_of_piece(data, begin)
            self._put(line, data[begin:end], more=True)
            begin = end
        line.data = data[begin:]

    def _say_unfinished(self, line: _Line) -> None:
        if line.data:
            data, line.data = line.data, b""
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
    """Return where a piece that begins there ends, so that no character of UTF-8 is torn."""
    end = begin + PIECE_BYTES_MAX
    for torn in range(4):
        if data[end - torn] & 0xC0 != 0x80:  # no continuation byte: a character, or something else, begins here
            return end - torn
    return end  # this is no UTF-8 anyway


def captured(name: str, descriptor: int, channel: Channel, held: Held = nullcontext) -> io.TextIOWrapper:
    """Return a stream whose lines leave by the channel as records of the logger ``name``.

    ``descriptor`` is what a process that inherits the stream is to have. ``held`` is entered wherever an exception that
    a signal handler raises would tear a line.
    """
    buffer = RecordBuffer(name, descriptor, channel, held)
    # All text has some form in it, and each write is seen at once.
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)


_captured: list[io.TextIOWrapper] = []


def capture_output(channel: LogChannel) -> None:
    """Send what the runner prints from now on through the channel. To be called once."""
    sys.stdout = captured("stdout", sys.stdout.fileno(), channel)
    sys.stderr = captured("stderr", sys.stderr.fileno(), channel)
    _captured.extend([sys.stdout, sys.stderr])
    os.register_at_fork(after_in_child=lambda: _go_on_in_fork(channel))


def end_lines_of(stream: TextIO, names: Mapping[str, object] | None = None) -> None:
    """Say what is left of a captured stream's lines that were never ended: all, or those of these very ``names``."""
    with contextlib.suppress(ValueError):  # somebody has detached it
        if isinstance(buffer := stream.buffer, RecordBuffer):
            buffer.end_lines(names)


def end_lines(names: Mapping[str, object] | None = None) -> None:
    """Do so for both streams of the runner."""
    for stream in _captured:
        end_lines_of(stream, names)


def _go_on_in_fork(channel: LogChannel) -> None:
    """In a fork nobody reads the channel's queue: what it prints and logs goes to the descriptors it has inherited."""
    _captured.clear()
    channel.write_to_stderr()
    for name in ("stdout", "stderr"):
        original: io.TextIOWrapper | None = getattr(sys, f"__{name}__")
        if original is not None:
            original.reconfigure(line_buffering=True)  # many a fork ends without flushing
            setattr(sys, name, original)
