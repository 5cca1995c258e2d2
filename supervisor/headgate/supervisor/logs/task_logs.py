"""Writes the logs of tasks, one for each try, in a thread: a slow disk delays no acknowledgement.

Records go into the bounded queue of a `LogWriter`, whose thread writes all lines of one file at once. A disk that
refuses holds up nothing but the logs: lines that could not be written are held, up to a limit, and tried again; the
beginning and the end of this are logged once. Lines beyond these limits are dropped, newest first, and counted in the
log that lacks them.

Written lines are with the kernel, so they survive this process. For the place and the format of the files see
`headgate.supervisor.logs.task_log_files`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from headgate.store.ids import TryName
from headgate.supervisor.config import TASK_LOG_BYTES_MAX
from headgate.supervisor.logs.log_writer import LogWriter
from headgate.supervisor.logs.task_log_deletion import delete_tries_before
from headgate.supervisor.logs.task_log_files import (
    BEFORE_FIELD,
    SEGMENT_SHARE_BYTES_MAX,
    file_of,
    folder_of_try,
    parts_in,
    record_of,
    segment_mark,
    segment_of,
)

log = structlog.get_logger(__name__)

END_BYTES_MAX: Final = 1024 * 1024  # of each of the files that hold the end
TRIES_KEPT: Final = 200  # of one task in one run, which a task that starts every minute makes in some hours
ENDS_KEPT: Final = 2  # of these files: the last one may be nearly empty, and the one before it is full
WRITE_BYTES_MAX: Final = 1024 * 1024  # in one call, which may have to be taken back
RECORDS_WAITING_MAX: Final = 200_000  # records that wait for the thread: one task's flood of 100,000 lines fits
BYTES_WAITING_MAX: Final = 64 * 1024 * 1024  # of these records
HELD_BYTES_MAX: Final = 16 * 1024 * 1024  # of lines that the disk refused, of all tries together
OPEN_FILES_MAX: Final = 128  # descriptors; the one that was not written for the longest time is closed for another
SHARES_MAX: Final = 1000  # tries of which it is known how much they have in a segment; others begin anew
LOSSES_MAX: Final = 1000  # tries with refused lines; of others only the number of lost records is known
RETRY_WAIT_S: Final = 5.0  # before a disk that refused is tried again
TROUBLE_CHARS_MAX: Final = 300  # of its error, which is published
FLUSH_WAIT_S: Final = 0.05  # how long the end of a step waits for its log: a healthy disk takes a thousandth of this

# Of a task's record, to be in the supervisor's log as well.
LEVELS_FOR_ALL: Final = ("warning", "error", "critical")

_encode = msgspec.json.Encoder(enc_hook=repr).encode
_NAMES: Final = frozenset(TryName.__struct_fields__)  # the folder says it


_Key = tuple[int, TryName]  # epoch and try


class TaskLogs:
    """The logs that one supervisor writes, in files of its ``epoch``, which is set before there is anything to log."""

    def __init__(self, folder: Path, *, bytes_max: int = TASK_LOG_BYTES_MAX) -> None:
        self.epoch = 0
        self._files = _Files(folder, bytes_max)
        self._writer: LogWriter[_Key, bytes] = LogWriter(
            "headgate task logs",
            self._write_lines,
            lambda dropped: _note("records were dropped: too many came at once", dropped),
            lines_max=RECORDS_WAITING_MAX,
            bytes_max=BYTES_WAITING_MAX,
            wake_in_s=lambda: self._files.retry_in_s(time.monotonic()),
        )

    def write(self, name: TryName, record: Mapping[str, Any], *, source: str = "task") -> None:
        """Add a record that a child made, with the usual fields filled in; never waits, never raises."""
        kept = {key: value for key, value in record.items() if key not in _NAMES}
        line = _line_of(
            {
                "timestamp": kept.pop("timestamp", None) or now_text(),
                "level": kept.pop("level", "info"),
                "event": kept.pop("event", ""),
                "logger": kept.pop("logger", ""),
                "source": kept.pop("source", source),
                **kept,
            }
        )
        self._writer.put((self.epoch, name), line)

    def output(self, name: TryName, line: str) -> None:
        """Add a line from the pipe of a worker: output of C code, or of a process that the task started."""
        self.write(name, {"event": line, "logger": "pipe"}, source="output")

    def say(self, name: TryName, level: str, event: str, **fields: object) -> None:
        """Add a record of the supervisor's own about a task."""
        self.write(name, {"level": level, "event": event, "logger": "headgate", **fields}, source="supervisor")

    def begun(self, name: TryName, method: str | None) -> None:
        """Add the record that a step has begun, with its method; None is ``execute``."""
        self.say(name, "info", "begun", method=method or "execute")

    def flush(self, within_s: float = FLUSH_WAIT_S) -> bool:
        """Wait until the records added before are written, at most ``within_s``; return whether they are.

        Does not wait for a disk that refuses at the moment, nor for one that has been slow until now.
        """
        is_written = self._writer.flush(within_s, is_stuck=lambda: self._files.is_refused)
        return is_written and not self._files.is_refused

    @property
    def trouble(self) -> str:
        """Why lines cannot be written at the moment, in at most `TROUBLE_CHARS_MAX` characters; "" if they can."""
        return self._files.trouble[:TROUBLE_CHARS_MAX]

    def close(self) -> None:
        """Write what is queued, for at most `headgate.supervisor.logs.log_writer.CLOSE_WAIT_S` seconds."""
        if self._writer.close():
            self._files.close()

    def _write_lines(self, lines: Sequence[tuple[_Key, bytes]], is_last: bool) -> None:
        batches: dict[_Key, list[bytes]] = {}
        for key, line in lines:
            batches.setdefault(key, []).append(line)
        try:
            self._files.write(batches, time.monotonic(), is_last=is_last)
        except Exception:  # a bug of ours; the next records may fare better, and the supervisor goes on
            log.exception("logs of tasks were lost", records=len(lines))


def now_text() -> str:
    """Return the time in the form of all our records."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _line_of(record: Mapping[str, Any]) -> bytes:
    try:
        return _encode(record) + b"\n"
    except Exception:  # a lone surrogate, a number beyond 64 bits, a key that is not text, a repr that raises
        return _encode({str(key): _as_text(value) for key, value in record.items()}) + b"\n"


def _as_text(value: object) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as exc:
        text = f"<{type(value).__name__} whose repr raised {type(exc).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()


def _note(event: str, records: int) -> bytes:
    fields = {"level": "warning", "event": event, "logger": "headgate", "source": "supervisor", "records": records}
    return _line_of({"timestamp": now_text(), **fields})


# --- the files -----------------------------------------------------------------------------------


class _File:
    """The file that is written for one epoch and try, or a part of its end."""

    __slots__ = ("bytes", "descriptor", "part", "records", "records_before")

    def __init__(self, path: Path, part: int) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.bytes = os.fstat(self.descriptor).st_size
        self.part = part
        self.records = 0  # of this part of an end
        self.records_before = 0  # of the parts of the end before this one

    def append(self, data: bytes) -> None:
        """Append whole lines. Raises `OSError`, and the file is as it was."""
        try:
            written = 0
            while written < len(data):
                written += os.write(self.descriptor, data[written:] if written else data)
        except OSError:
            # Only we write this file: take back the part of a line. Readers wait for the end of a line anyway.
            os.ftruncate(self.descriptor, self.bytes)
            raise
        self.bytes += len(data)


class _Refused:
    """The lines of one try that the disk refused: the first ones, and the number of those dropped after them."""

    __slots__ = ("dropped", "lines")

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.dropped = 0


class _Files:
    """Appends lines to files, and holds those that the disk refuses. Used by the writer's thread only."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._open: OrderedDict[_Key, _File] = OrderedDict()
        self._segments: OrderedDict[Path, _File] = OrderedDict()
        self._shares: OrderedDict[_Key, int] = OrderedDict()  # bytes of a try in its segment
        self._refused: dict[_Key, _Refused] = {}
        self._held_bytes = 0
        self._lost = 0  # records of tries beyond `LOSSES_MAX`
        self._retry_at = 0.0
        self.trouble = ""  # from the first refusal until nothing is refused any more: the error of the first

    @property
    def is_refused(self) -> bool:
        """Whether lines that the disk refused are not written yet."""
        return bool(self.trouble)  # also while they are being written: another thread may ask

    def retry_in_s(self, now: float) -> float | None:
        """Return the seconds until refused lines are tried again; None if there are none."""
        return max(0.0, self._retry_at - now) if self._refused else None

    def write(self, batches: Mapping[_Key, list[bytes]], now: float, *, is_last: bool = False) -> None:
        """Write the lines of each try; hold those that the disk refuses, and try them again when it is time."""
        is_due = is_last or now >= self._retry_at
        for key in list(self._refused) if is_due else ():
            if key not in batches:
                self._write(key, [], now)
        for key, lines in batches.items():
            if is_due or key not in self._refused:
                self._write(key, lines, now)
            else:
                self._hold(key, lines)  # behind those that are held already
        if self.trouble and not self._refused:
            self.trouble = ""
            log.info("logs of tasks can be written again", records_lost=self._lost)
            self._lost = 0

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._close_oldest(self._open)
        while self._segments:
            self._close_oldest(self._segments)

    def _write(self, key: _Key, lines: list[bytes], now: float) -> None:
        """Write the held lines of this try, and then these lines; hold those that the disk refuses."""
        held = self._refused.pop(key, None) or _Refused()
        self._held_bytes -= sum(map(len, held.lines))
        dropped = held.dropped
        error = self._append(key, held.lines)
        if error is None and dropped:
            error = self._append(key, [_note("records were lost: the disk refused them", dropped)])
            dropped = dropped if error is not None else 0
        if error is None:
            error = self._append(key, lines)
        if error is None:
            return
        self._retry_at = now + RETRY_WAIT_S
        if not self.trouble:
            self.trouble = str(error)
            log.error("logs of tasks cannot be written; trying again", error=self.trouble, retry_in_s=RETRY_WAIT_S)
        self._hold(key, [*held.lines, *lines], dropped)

    def _hold(self, key: _Key, lines: list[bytes], dropped: int = 0) -> None:
        if key not in self._refused and len(self._refused) >= LOSSES_MAX:
            self._lost += len(lines) + dropped
            return
        refused = self._refused.setdefault(key, _Refused())
        for line in lines:
            if refused.dropped or self._held_bytes + len(line) > HELD_BYTES_MAX:
                refused.dropped += 1
            else:
                refused.lines.append(line)
                self._held_bytes += len(line)
        refused.dropped += dropped

    def _append(self, key: _Key, lines: list[bytes]) -> OSError | None:
        """Append lines to their file, or to its end; remove the written ones from the list."""
        done = 0
        try:
            done = self._append_to_segment(key, lines)
            while done < len(lines):
                file = self._file_with_room(key, len(lines[done]))
                limit = END_BYTES_MAX if file.part else self._bytes_max
                end, size = done + 1, len(lines[done])
                while end < len(lines) and size < WRITE_BYTES_MAX and file.bytes + size + len(lines[end]) <= limit:
                    size += len(lines[end])
                    end += 1
                file.append(b"".join(lines[done:end]))
                file.records += end - done
                done = end
        except OSError as exc:
            return exc
        finally:
            del lines[:done]
        return None

    def _append_to_segment(self, key: _Key, lines: list[bytes]) -> int:
        """Append to the segment of an instance as many lines as its try may have there; return their number."""
        epoch, name = key
        if name.map_index < 0 or not lines:
            return 0
        mark, share = segment_mark(name), self._shares.get(key, 0)
        data, done = bytearray(), 0
        for line in lines:
            if share + len(data) + len(mark) + len(line) > SEGMENT_SHARE_BYTES_MAX:
                share = SEGMENT_SHARE_BYTES_MAX  # all that follows is in a file of its own
                break
            data += mark + line[1:]
            done += 1
        if data:
            path = segment_of(self._folder, name, epoch)
            file = self._segments.get(path)
            if file is None:
                if len(self._segments) >= OPEN_FILES_MAX:
                    self._close_oldest(self._segments)
                file = self._segments[path] = _opened(path, 0)
            self._segments.move_to_end(path)
            file.append(bytes(data))
        self._shares[key] = max(share, min(share + len(data), SEGMENT_SHARE_BYTES_MAX))
        self._shares.move_to_end(key)
        if len(self._shares) > SHARES_MAX:
            self._shares.popitem(last=False)
        return done

    def _file_with_room(self, key: _Key, line_bytes: int) -> _File:
        file = self._open.get(key)
        if file is None:
            file = self._open_file(key)
        else:
            self._open.move_to_end(key)
        limit = END_BYTES_MAX if file.part else self._bytes_max
        if file.bytes and file.bytes + line_bytes > limit:
            file = self._begin_part(key, file)
        return file

    def _open_file(self, key: _Key) -> _File:
        if len(self._open) >= OPEN_FILES_MAX:
            self._close_oldest(self._open)
        epoch, name = key
        folder = folder_of_try(self._folder, name)
        path = file_of(self._folder, name, epoch)
        file = _opened(path, 0)
        if name.try_number > TRIES_KEPT and not file.bytes:
            # One that is left is deleted with a later try, or with the run: it must not cost this one its log.
            with contextlib.suppress(OSError):
                delete_tries_before(folder.parent, name.try_number - TRIES_KEPT + 1)
        if file.bytes >= self._bytes_max // 2 and (part := max(parts_in(folder)[epoch])) > 0:
            # It had been closed to open another: continue where it was.
            os.close(file.descriptor)
            path = file_of(self._folder, name, epoch, part)
            file = _File(path, part)
            head, *lines = path.read_bytes().splitlines() or [b"{}"]
            file.records_before, file.records = int(record_of(head).get(BEFORE_FIELD, 0)), len(lines)
        self._open[key] = file
        return file

    def _begin_part(self, key: _Key, full: _File) -> _File:
        """Begin the next file of the end, and delete the one before the last."""
        epoch, name = key
        path = file_of(self._folder, name, epoch, full.part + 1)
        file = _File(path, full.part + 1)
        try:
            if full.part:
                file.records_before = full.records_before + full.records
            if not file.bytes:
                event = f"the log is longer than {self._bytes_max:,} bytes: of the rest only the end is kept"
                head = {"timestamp": now_text(), "event": event, BEFORE_FIELD: file.records_before}
                file.append(_line_of(head))
            with contextlib.suppress(FileNotFoundError):
                if file.part > ENDS_KEPT:
                    file_of(self._folder, name, epoch, file.part - ENDS_KEPT).unlink()
        except OSError:
            os.close(file.descriptor)
            raise
        os.close(full.descriptor)
        self._open[key] = file
        return file

    @staticmethod
    def _close_oldest(files: OrderedDict[Any, _File]) -> None:
        _, file = files.popitem(last=False)
        with contextlib.suppress(OSError):  # a network's file system may complain only now
            os.close(file.descriptor)


def _opened(path: Path, part: int) -> _File:
    try:
        return _File(path, part)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _File(path, part)
