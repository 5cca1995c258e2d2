"""The files of a file log: their paths, their formats, and how each is written so that a kill never corrupts it.

A log is a folder::

    <folder>/<partition>.jsonl               one JSON value a line, append-only; any file name stem is a partition
    <folder>/.log-id                         8 hexadecimal digits and a newline: which log this is
    <folder>/.groups/<group>.json            {"log": "3f2a9c41", "offsets": {"orders": 1234}}
    <folder>/.groups/<group>.rejected.jsonl  lines the group passed over without accepting them
    <folder>/.groups/<group>.lock            holds the group's exclusive lock; contains the holder's pid

These formats are stable: tools may read them, and fields may be added, never changed.

- An offset counts bytes from the start of the partition's file and always points to the start of a line. All lines
  before a committed offset were accepted or rejected by every subscriber of the group (I1, I3). A partition that is
  missing from ``offsets`` is at 0.
- A rejected line is ``{"key", "partition", "offset", "end_offset", "reason", "text"}``, where ``key`` is the event key.
  It is written before the offset that passes over it. A reader that starts again does not repeat the last records.
- The identity in ``.log-id`` is random and created once for a folder. It is the first part of every event key, so if
  a log is deleted and created again, its lines are never taken for redeliveries of the old one (I2).

Everything here is synchronous and may block; the producer calls it in threads. Nothing here imports trio.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NamedTuple

import msgspec

from headgate.protocol import marks

LINE_BYTES_MAX = 1024 * 1024  # as EVENT_BYTES_MAX of the protocol: a longer line could not become an event anyway
READ_BYTES_MAX = 64 * 1024  # one ordinary read: some hundred lines, so that one thread hop serves them all
READ_LINES_MAX = 1000  # lines of one read: bounds the work that a rewind discards, and how long parsing holds the GIL
RECORDED_BYTES_MAX = 4 * 1024 * 1024  # end of the rejected lines, read at the start; earlier ones may be repeated
REJECTED_HEAD_BYTES_MAX = 4096  # the part that is kept of a rejected line longer than the limit

PARTITION_SUFFIX = ".jsonl"
GROUPS_FOLDER = ".groups"
LOG_ID_FILE = ".log-id"
PARTITION_BYTES_MAX = 240  # with its suffix a partition must still be a file name (255 bytes on Linux)

_GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_LOG_ID = re.compile(rb"[0-9a-f]{8}\n")


class FileLogError(Exception):
    """A file log cannot be read or written."""


class FileLogBusy(FileLogError):
    """Another process reads this log for the same group, and did not end in time."""

    def __init__(self, folder: str, group: str, holder_pid: int | None) -> None:
        holder = "an unknown process" if holder_pid is None else f"process {holder_pid}"
        super().__init__(f"group {group!r} of the file log {folder} is in use by {holder}")
        self.folder = folder
        self.group = group
        self.holder_pid = holder_pid


class FileLogRewritten(FileLogError):
    """A partition was shortened, replaced or removed: a file log is append-only."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"{path} {problem}; a file log is append-only. To start afresh, remove the whole folder with its "
            f"{LOG_ID_FILE} and {GROUPS_FOLDER}"
        )
        self.path = path
        self.problem = problem


class FileLogCorrupt(FileLogError):
    """The file of the log's identity or of a group's committed offsets is malformed."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem


class Line(NamedTuple):
    """One line that is a JSON value; offsets in bytes, ``end_offset`` past its newline."""

    offset: int
    end_offset: int
    value: Any


class BadLine(NamedTuple):
    """One line that is not a JSON value or is too long; ``head`` is the whole line or its beginning."""

    offset: int
    end_offset: int
    reason: str
    head: bytes


class Chunk(NamedTuple):
    """Result of one read of a partition.

    ``at_end``: the file held no further whole line. ``scanned_to``: the offset up to which a line that is longer than
    the limit was searched for its newline, 0 if there is no such line. ``inode`` identifies the file.
    """

    lines: list[Line | BadLine]
    at_end: bool
    scanned_to: int
    inode: int


class RejectedLine(msgspec.Struct, frozen=True):
    """One record of ``<group>.rejected.jsonl``."""

    key: str
    partition: str
    offset: int
    end_offset: int
    reason: str
    text: str


class _OffsetsFile(msgspec.Struct, frozen=True):
    log: str
    offsets: dict[str, Annotated[int, msgspec.Meta(ge=0)]]


def partition_path(folder: str, partition: str) -> str:
    """Return the path of a partition's file.

    Raises ValueError for a name that cannot be a visible file in the folder.
    """
    try:
        size = len(partition.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= PARTITION_BYTES_MAX or partition.startswith(".") or "/" in partition or "\0" in partition:
        raise ValueError(f"{partition!r} cannot be the name of a partition")
    return os.path.join(folder, partition + PARTITION_SUFFIX)


def group_path(folder: str, group: str, suffix: str) -> str:
    """Return the path of one of a group's files, by its suffix: ``.json``, ``.rejected.jsonl`` or ``.lock``.

    Raises ValueError for a group name with anything but ASCII letters, digits, ``_``, ``.`` and ``-``, that starts
    with ``.`` or ``-``, or that has more than 100 characters.
    """
    if not _GROUP_NAME.fullmatch(group):
        raise ValueError(
            f"{group!r} cannot be the name of a group: letters, digits, '_', '.' and '-' only, 100 at most"
        )
    return os.path.join(folder, GROUPS_FOLDER, group + suffix)


def event_key(log_id: str, partition: str, offset: int) -> str:
    """Return the key that identifies one line of one log (I2), for example ``3f2a9c41/orders.jsonl:1234``."""
    return f"{log_id}/{partition}{PARTITION_SUFFIX}:{offset}"


# --- the log's identity --------------------------------------------------------------------------


def ensure_log_id(folder: str) -> str:
    """Return the identity of the log in this folder; create it on first use.

    If several processes create it at once, one wins, and all return the same. Raises FileLogError if the folder
    is missing, FileLogCorrupt if the file does not contain an identity.
    """
    if not os.path.isdir(folder):
        raise FileLogError(f"{folder} is not a folder: the writer of a file log creates its folder")
    path = os.path.join(folder, LOG_ID_FILE)
    if not os.path.exists(path):
        draft = f"{path}.{secrets.token_hex(8)}"
        # A link to a complete and synced file appears whole or not at all, and never replaces another file.
        try:
            _write_synced(draft, secrets.token_hex(4).encode() + b"\n")
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)
        sync_folder(folder)
    with open(path, "rb") as file:
        content = file.read(64)
    if not _LOG_ID.fullmatch(content):
        raise FileLogCorrupt(path, "does not contain 8 hexadecimal digits and a newline")
    return content.strip().decode()


# --- committed offsets ---------------------------------------------------------------------------


def load_offsets(folder: str, group: str, log_id: str) -> dict[str, int]:
    """Return the committed offsets of a group by partition, in bytes; empty for a new group.

    Raises FileLogCorrupt if the file is not an offsets file, or belongs to another log.
    """
    path = group_path(folder, group, ".json")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return {}
    try:
        stored = msgspec.json.decode(content, type=_OffsetsFile)
    except (ValueError, RecursionError) as error:
        raise FileLogCorrupt(path, f"is not a file of committed offsets: {error}") from error
    if stored.log != log_id:
        raise FileLogCorrupt(
            path,
            f"holds offsets of the log {stored.log}, but this folder holds the log {log_id}; "
            f"remove it to read this log from its start",
        )
    return stored.offsets


def store_offsets(folder: str, group: str, log_id: str, offsets: dict[str, int]) -> None:
    """Replace the committed offsets of a group atomically; they are durable when this returns."""
    path = group_path(folder, group, ".json")
    draft = path + ".tmp"
    _write_synced(draft, msgspec.json.encode(_OffsetsFile(log_id, offsets), order="sorted") + b"\n")
    marks.reach("filelog.draft_written")
    os.replace(draft, path)
    marks.reach("filelog.renamed")
    sync_folder(os.path.dirname(path))


# --- rejected lines ------------------------------------------------------------------------------


def append_rejected(folder: str, group: str, records: Iterable[RejectedLine]) -> None:
    """Append to the rejected lines of a group; they are durable when this returns."""
    path = group_path(folder, group, ".rejected.jsonl")
    data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            # A crash tore the last record. A newline ends it, so that the first new record stays readable.
            data = b"\n" + data
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    if not size:
        sync_folder(os.path.dirname(path))


def recorded_keys(folder: str, group: str) -> set[str]:
    """Return the keys of the last rejected lines of a group; they include every one that is not committed yet."""
    keys: set[str] = set()
    with suppress(FileNotFoundError), open(group_path(folder, group, ".rejected.jsonl"), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - RECORDED_BYTES_MAX))
        for line in file:
            with suppress(msgspec.DecodeError):  # torn by a crash, or cut off because the read began inside it
                keys.add(msgspec.json.decode(line, type=RejectedLine).key)
    return keys


def read_text(path: str, offset: int, end_offset: int) -> str:
    """Return the text of one line without its newline; bytes that are not UTF-8 are written as ``\\xff``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return text_of(os.pread(fd, end_offset - offset, offset))
    finally:
        os.close(fd)


def text_of(line: bytes) -> str:
    """Return a line as text that every JSON reader accepts."""
    return line.rstrip(b"\n").decode(errors="backslashreplace")


# --- reading partitions --------------------------------------------------------------------------


def scan(folder: str) -> dict[str, int]:
    """Return the partitions of a log and the sizes of their files in bytes.

    Raises FileLogError if the folder was removed, or if the name of a partition cannot be stored because it is not
    UTF-8.
    """
    sizes = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.endswith(PARTITION_SUFFIX):
                    continue
                try:
                    status = entry.stat()
                except FileNotFoundError:  # removed during the scan, or a dangling link
                    continue
                if stat.S_ISREG(status.st_mode):
                    partition = entry.name.removesuffix(PARTITION_SUFFIX)
                    partition_path(folder, partition)
                    sizes[partition] = status.st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileLogError(f"{folder} is not a folder any more: it was removed or replaced") from error
    except ValueError as error:
        raise FileLogError(f"{folder}: {error}") from error
    return sizes


def read_lines(path: str, position: int, *, line_bytes_max: int, scanned_to: int = 0, inode: int = 0) -> Chunk:
    """Read whole lines from ``position`` on, as many as one read holds; a last line without a newline is left.

    ``scanned_to`` and ``inode`` are those of the previous `Chunk`, 0 at first. Raises FileLogRewritten if the file is
    shorter than ``position``, is another file than before, or has no line that starts at ``position``.
    """
    fd = _open_partition(path)
    try:
        status = os.fstat(fd)
        _check_append_only(fd, path, position, inode, status)
        asked = READ_BYTES_MAX
        data = os.pread(fd, asked, position)
        # If a line does not fit the ordinary read, a second one fetches as much as the longest line can need.
        if b"\n" not in data and len(data) == asked <= line_bytes_max:
            asked = line_bytes_max + 1
            data = os.pread(fd, asked, position)
        if b"\n" in data:
            lines, taken = _split(data, position, line_bytes_max)
            # The limit of lines may have left whole lines in the data; if the read was full, the file may continue.
            at_end = len(data) < asked and b"\n" not in data[taken:]
            return Chunk(lines, at_end, 0, status.st_ino)
        if len(data) <= line_bytes_max:
            return Chunk([], True, 0, status.st_ino)
        head = data[:REJECTED_HEAD_BYTES_MAX]
        end, scanned_to = _find_line_end(fd, max(scanned_to, position + len(data)))
        if end is None:
            return Chunk([], True, scanned_to, status.st_ino)
        return Chunk([_too_long(position, end, line_bytes_max, head)], False, 0, status.st_ino)
    finally:
        os.close(fd)


def _open_partition(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise FileLogRewritten(path, "was removed") from error


def _check_append_only(fd: int, path: str, position: int, inode: int, status: os.stat_result) -> None:
    if inode and status.st_ino != inode:
        raise FileLogRewritten(path, "was replaced by another file")
    if status.st_size < position:
        raise FileLogRewritten(path, f"has {status.st_size:,} bytes, but was read up to {position:,}")
    if position and os.pread(fd, 1, position - 1) != b"\n":
        raise FileLogRewritten(path, f"has no line that starts at {position:,}, where the last one ended")


def _split(data: bytes, position: int, line_bytes_max: int) -> tuple[list[Line | BadLine], int]:
    """Parse the whole lines of ``data``; return them and their size in bytes."""
    lines: list[Line | BadLine] = []
    start = 0
    # The last piece follows the last newline taken: it is empty, a torn line, or the lines beyond the limit.
    for text in data.split(b"\n", READ_LINES_MAX)[:-1]:
        end = start + len(text) + 1
        lines.append(_parse(text, position + start, position + end, line_bytes_max))
        start = end
    return lines, start


def _parse(text: bytes, offset: int, end_offset: int, line_bytes_max: int) -> Line | BadLine:
    if len(text) > line_bytes_max:
        return _too_long(offset, end_offset, line_bytes_max, text[:REJECTED_HEAD_BYTES_MAX])
    try:
        return Line(offset, end_offset, msgspec.json.decode(text))
    except (ValueError, RecursionError) as error:
        return BadLine(offset, end_offset, f"not a JSON value: {error}", text)


def _too_long(offset: int, end_offset: int, line_bytes_max: int, head: bytes) -> BadLine:
    reason = f"{end_offset - offset - 1:,} bytes long; the limit is {line_bytes_max:,}"
    return BadLine(offset, end_offset, reason, head)


def _find_line_end(fd: int, start: int) -> tuple[int | None, int]:
    """Return the offset past the next newline at or after ``start``, or None and the offset searched up to."""
    while True:
        data = os.pread(fd, READ_BYTES_MAX, start)
        found = data.find(b"\n")
        if found >= 0:
            return start + found + 1, 0
        if not data:
            return None, start
        start += len(data)


# --- the lock of a group -------------------------------------------------------------------------


def try_lock(folder: str, group: str) -> int | None:
    """Try to take the exclusive lock of a group. Return its file descriptor, or None if another process holds it.

    Closing the descriptor releases the lock, and the kernel closes it however its holder dies. The file is never
    removed: otherwise two processes could hold locks on two files of the same name.
    """
    path = group_path(folder, group, ".lock")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_holder(folder: str, group: str) -> int | None:
    """Return the pid in the lock file of a group, None if the file holds none (yet)."""
    try:
        with open(group_path(folder, group, ".lock"), "rb") as file:
            return int(file.read(32))
    except (FileNotFoundError, ValueError):
        return None


@contextmanager
def appending(fd: int) -> Generator[None]:
    """Hold the writers' lock on a partition's file, so that batches of several processes do not interleave."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


# --- writing -------------------------------------------------------------------------------------


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``; one system call does, unless the disk is nearly full."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write_synced(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable: a new or renamed file may be lost in a crash until its folder is synced."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
