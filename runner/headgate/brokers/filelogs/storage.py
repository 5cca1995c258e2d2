"""The files of a file log: their paths, their formats, and how each is written so that a kill never corrupts it.

A log is a folder::

    <folder>/<partition>.jsonl               one JSON value a line, append-only; any file name stem is a partition
    <folder>/.log-id                         8 hexadecimal digits and a newline: which log this is
    <folder>/.groups/<group>.json            {"log": "3f2a9c41", "offsets": {"orders": 1234}, "files": [...]}
    <folder>/.groups/<group>.rejected.jsonl  lines that a subscriber rejected
    <folder>/.groups/<group>.lock            holds the group's exclusive lock; contains the holder's pid

These formats are stable: tools may read them, and fields may be added, never changed.

- An offset counts bytes from the start of a file and always points to the start of a line. All lines before a committed
  offset were accepted or rejected by every subscriber of the group (I1, I3). ``offsets`` has the offset in the newest
  file of each partition. It is for tools; headgate itself goes by ``files``, and refuses the file if the two disagree.
- ``files`` has a `FileEntry` for each file that the group has seen a line in: which file it is, and how far it is
  committed. `headgate.brokers.filelogs.reading` finds the file again, under whatever name.
- An event key is ``<log>/<partition>.jsonl@<file>:<offset>:<crc>``. ``<file>`` is derived from the partition, the
  inode, the first line, and the id of the file before it in the partition; ``<crc>`` is the line's CRC-32. So one key
  never names two different lines, whatever is done to the files (I2).
- A line is rejected if a filter called ``reject_shared_stream_event()``, or if not all of it fits a dead letter.
  A rejected line is ``{"key", "partition", "offset", "end_offset", "reason", "text"}``, where ``key`` is the event key.
  It is written before the offset that passes over it. A reader that starts again does not repeat the last records.
- The identity in ``.log-id`` is random and created once for a folder, so if a log is deleted and created again, its
  lines are never taken for redeliveries of the old one (I2).

Everything here is synchronous and may block; the producer calls it in threads. Nothing here imports trio.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, NamedTuple

import msgspec

from headgate.child.forks import close_cut_off, cut_off_forks
from headgate.protocol import marks

LINE_BYTES_MAX = 1024 * 1024  # as EVENT_BYTES_MAX of the protocol: a longer line could not become an event anyway
RECORDED_BYTES_MAX = 4 * 1024 * 1024  # end of the rejected lines, read at the start; earlier ones may be repeated

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
    """The file that a group has read in part cannot be found any more: it was shortened, replaced or removed."""

    def __init__(self, path: str, problem: str, advice: str) -> None:
        super().__init__(f"{path} {problem}; {advice}")
        self.path = path
        self.problem = problem


class FileLogCorrupt(FileLogError):
    """The file of the log's identity or of a group's committed offsets is malformed."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem


class Seal(NamedTuple):
    """Number and CRC-32 of the bytes before an offset, or of the first bytes of a file; recognises a file (I2)."""

    size: int
    crc: int


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a group's ``files``, as it was at the last look.

    ``id`` is the file's part of the event keys, and ``partition`` the name under which it was seen first. ``name`` is
    its name in the folder now, ``""`` for a file that was given up: the next one of the partition is new. ``head`` is
    the seal of its first line, ``last`` the one of the last line before ``offset``, and ``seen`` its size; offsets and
    sizes are in bytes, ``mtime`` is in nanoseconds. ``is_rotated``: another file is the partition's newest.
    """

    id: str
    partition: str
    name: str
    inode: int
    head: Seal
    offset: Annotated[int, msgspec.Meta(ge=0)]
    last: Seal
    seen: int
    mtime: int
    is_rotated: bool = False


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
    files: list[FileEntry]


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


def key_prefix(log_id: str, partition: str, file_id: str) -> str:
    """Return the beginning of the event keys of one file; offset and CRC-32 follow, as ``1234:c4a11f2`` (I2)."""
    return f"{log_id}/{partition}{PARTITION_SUFFIX}@{file_id}:"


def file_id(before: str, partition: str, inode: int, head: Seal) -> str:
    """Return the id of a file, 8 hexadecimal digits; ``before`` is the id of the partition's file before it, or ``""``.

    It is derived, so that a group whose offsets were removed names the lines of a log that was never rotated as before.
    """
    parts = "\0".join((before, partition, str(inode), str(head.size), str(head.crc)))
    return hashlib.blake2s(parts.encode(), digest_size=4).hexdigest()


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


def load_offsets(folder: str, group: str, log_id: str) -> list[FileEntry]:
    """Return the files of a group and their committed offsets; empty for a new group.

    Raises FileLogCorrupt if the file is not an offsets file, or belongs to another log.
    """
    path = group_path(folder, group, ".json")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return []
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
    if stored.offsets != _newest(stored.files):
        raise FileLogCorrupt(path, "was edited: its 'offsets' and 'files' disagree; see filelog_offsets --help")
    return stored.files


def store_offsets(folder: str, group: str, log_id: str, files: Sequence[FileEntry]) -> None:
    """Replace the committed offsets of a group atomically; they are durable when this returns."""
    path = group_path(folder, group, ".json")
    draft = path + ".tmp"
    stored = _OffsetsFile(log_id, _newest(files), list(files))
    _write_synced(draft, msgspec.json.encode(stored, order="sorted") + b"\n")
    marks.reach("filelog.draft_written")
    os.replace(draft, path)
    marks.reach("filelog.renamed")
    sync_folder(os.path.dirname(path))


def _newest(files: Iterable[FileEntry]) -> dict[str, int]:
    return {file.partition: file.offset for file in files if not file.is_rotated}


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


def text_of(line: bytes) -> str:
    """Return a line as text that every JSON reader accepts."""
    return line.rstrip(b"\n").decode(errors="backslashreplace")


# --- the lock of a group -------------------------------------------------------------------------


def try_lock(folder: str, group: str) -> int | None:
    """Try to take the exclusive lock of a group. Return its file descriptor, or None if another process holds it.

    `release_lock` releases it, and so does the kernel, however its holder dies. Forks of the holder have no copy of the
    lock. The file is never removed: otherwise two processes could hold locks on two files of the same name.
    """
    path = group_path(folder, group, ".lock")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    cut_off_forks(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        close_cut_off(fd)
        return None
    except BaseException:
        close_cut_off(fd)
        raise
    return fd


def release_lock(fd: int) -> None:
    """Release the lock of a group, by the descriptor that `try_lock` has returned, and close that."""
    close_cut_off(fd)


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
