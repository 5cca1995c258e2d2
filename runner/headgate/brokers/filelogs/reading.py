"""Reading the files of a file log: their lines, and which file is which.

A group remembers a file by its inode, its first line, the last line it has read, its size and the time of its last
change (`headgate.brokers.filelogs.storage.FileEntry`). None of them is enough by itself: inodes are used again, change
when a log is copied to another machine, and stay the same when a file is truncated; first lines may be headers. `look`
finds each file again, in this order:

1. under the name that it had, if the inode is the same and it is no shorter;
2. under any name in the folder, if inode and content agree: it was renamed;
3. under the name of its partition, if the content agrees: it was restored, copied, or replaced by an editor;
4. under any name but that of another partition, if the content agrees and it is no older: it was copied, and then
   truncated.

The content agrees if the first line and the last line read are where they were, and if the file is no shorter than it
was. A file found under another name is read to its end; then the file that has taken its name in the meantime is the
next one of the partition. A file that is not found is an error.

Every read checks the inode, the size and the last line read, so a file that is truncated and written again is noticed
at the next read, unless the line that ends at the same offset is the same.

Everything here is synchronous, may block, and only reads; the producer calls it in threads.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headgate.brokers.filelogs import storage
from headgate.brokers.filelogs.storage import PARTITION_SUFFIX, FileLogError, FileLogRewritten, Seal

READ_BYTES_MAX = 64 * 1024  # one ordinary read: some hundred lines, so that one thread hop serves them all
READ_LINES_MAX = 1000  # lines of one read: bounds the work that a rewind discards, and how long parsing holds the GIL
REJECTED_HEAD_BYTES_MAX = 4096  # the part that is kept of a rejected line longer than the limit
SEAL_BYTES_MAX = 4096  # of a line; a longer one is recognised by its end, the first one of a file by its beginning
MTIME_SLACK_NS = 2_000_000_000  # the coarsest time stamps of file systems in use


NOTHING = Seal(0, 0)  # of no bytes


class FileMoved(Exception):
    """The file under this name is not the one that was read, or not as it was; ``problem`` says why."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class Line(NamedTuple):
    """One line that is a JSON value; offsets in bytes, ``end_offset`` past its newline; the CRC-32 of its end."""

    offset: int
    end_offset: int
    crc: int
    value: Any


class BadLine(NamedTuple):
    """One line that is not a JSON value or is too long; ``head`` is the whole line or its beginning."""

    offset: int
    end_offset: int
    crc: int
    reason: str
    head: bytes


class Chunk(NamedTuple):
    """Result of one read of a file.

    ``at_end``: the file held no further whole line. ``scanned_to``: the offset up to which a line that is longer than
    the limit was searched for its newline, 0 if there is no such line. ``size`` and ``mtime`` are those of the file.
    """

    lines: list[Line | BadLine]
    at_end: bool
    scanned_to: int
    size: int
    mtime: int


class FileStatus(NamedTuple):
    """A file of the folder: inode, size in bytes, time of the last change in nanoseconds."""

    inode: int
    size: int
    mtime: int


class Known(NamedTuple):
    """A file that a group has read up to ``position``, and is to be found again. Like a `storage.FileEntry`.

    ``is_suspect``: a name and an inode are not enough to recognise it. ``is_done``: all that was seen is committed.
    """

    id: str
    partition: str
    name: str
    inode: int
    head: Seal
    position: int
    last: Seal
    seen: int
    mtime: int
    is_rotated: bool
    is_suspect: bool
    is_done: bool


class Found(NamedTuple):
    """Where a known file is now."""

    name: str
    status: FileStatus


class NewFile(NamedTuple):
    """A file of a partition that is none of the known ones.

    ``is_twin``: the partition's file before it holds the same lines, as far as it was read.
    """

    status: FileStatus
    head: Seal
    is_twin: bool


class Look(NamedTuple):
    """What is in the folder: known files by id, None for one that is gone and need not be there; new ones."""

    found: dict[str, Found | None]
    new: dict[str, NewFile]


# --- finding files -------------------------------------------------------------------------------


def look(folder: str, known: Sequence[Known], advice: str) -> Look:
    """Find the known files, and the files of partitions that are none of them and have a first line.

    ``advice`` is the end of the error. Raises FileLogRewritten if a known file is not found, FileLogError if the folder
    was removed, or if the name of a partition cannot be stored because it is not UTF-8.
    """
    files = scan(folder)
    found: dict[str, Found | None] = {}
    for each in known:
        status = files.get(each.name)
        if status and not each.is_suspect and status.inode == each.inode and status.size >= each.seen:
            found[each.id] = Found(each.name, status)
    taken = {place.name for place in found.values() if place is not None}
    for each in known:
        if each.id in found:
            continue
        name = _find(folder, each, files, taken)
        if name is not None:
            taken.add(name)
            found[each.id] = Found(name, files[name])
        elif each.is_rotated and each.is_done:
            found[each.id] = None
        else:
            raise _lost(folder, each, advice)
    return Look(found, _new_files(folder, known, files, taken))


def _new_files(
    folder: str, known: Sequence[Known], files: Mapping[str, FileStatus], taken: set[str]
) -> dict[str, NewFile]:
    newest = {each.partition: each for each in known if not each.is_rotated}
    new = {}
    for name, status in files.items():
        if not name.endswith(PARTITION_SUFFIX) or name in taken:
            continue
        partition = name.removesuffix(PARTITION_SUFFIX)
        head = read_head(os.path.join(folder, name))
        if head is not None:
            before = newest.get(partition)
            is_twin = before is not None and difference(folder, name, before) is None
            new[partition] = NewFile(status, head, is_twin)
    return new


def scan(folder: str) -> dict[str, FileStatus]:
    """Return the visible files of a log's folder.

    Raises FileLogError if the folder was removed, or if the name of a partition cannot be stored because it is not
    UTF-8.
    """
    files = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                try:
                    status = entry.stat()
                except FileNotFoundError:  # removed during the scan, or a dangling link
                    continue
                if stat.S_ISREG(status.st_mode):
                    if entry.name.endswith(PARTITION_SUFFIX):
                        storage.partition_path(folder, entry.name.removesuffix(PARTITION_SUFFIX))
                    files[entry.name] = FileStatus(status.st_ino, status.st_size, status.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileLogError(f"{folder} is not a folder any more: it was removed or replaced") from error
    except ValueError as error:
        raise FileLogError(f"{folder}: {error}") from error
    return files


def _find(folder: str, known: Known, files: Mapping[str, FileStatus], taken: set[str]) -> str | None:
    """Return the name of a known file; None if it is not in the folder."""
    home = (known.name, known.partition + PARTITION_SUFFIX)[: 1 if known.is_rotated else 2]
    free = [name for name in dict.fromkeys((*home, *files)) if name in files and name not in taken]
    by_inode = (name for name in free if files[name].inode == known.inode)
    by_name = (name for name in home if name in free)
    copies = [
        name
        for name in free
        if not name.endswith(PARTITION_SUFFIX) and files[name].mtime >= known.mtime - MTIME_SLACK_NS
    ]
    copies.sort(key=lambda name: files[name].size, reverse=True)
    for name in (*by_inode, *by_name, *copies):
        if difference(folder, name, known) is None:
            return name
    return None


def difference(folder: str, name: str, known: Known) -> str | None:
    """Return how the content of a file differs from that of a known one, as far as that was seen; None if it agrees."""
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
    except FileNotFoundError:
        return "was removed"
    try:
        size = os.fstat(fd).st_size
        if size < known.position:
            return f"has {size:,} bytes, but was read up to {known.position:,}"
        if size < known.seen:
            return f"has {size:,} bytes, but had {known.seen:,} at the last look"
        if not _is_sealed(fd, known.head.size, known.head):
            return "has another first line than before"
        if not _is_sealed(fd, known.position, known.last):
            return f"has another line before {known.position:,} than the one that was read"
        return None
    finally:
        os.close(fd)


def read_head(path: str) -> Seal | None:
    """Return the seal of a file's first line; None if it has none yet, or does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        data = os.pread(fd, SEAL_BYTES_MAX, 0)
    finally:
        os.close(fd)
    end = data.find(b"\n") + 1
    if end:
        data = data[:end]
    elif len(data) < SEAL_BYTES_MAX:
        return None
    return Seal(len(data), zlib.crc32(data))


def _lost(folder: str, known: Known, advice: str) -> FileLogRewritten:
    path = os.path.join(folder, known.name)
    problem = difference(folder, known.name, known) or "was replaced by another file"
    where = (
        f"what was read as partition {known.partition!r} up to {known.position:,} of at least {known.seen:,} bytes is "
        f"under no name in the folder"
    )
    return FileLogRewritten(path, f"{problem}, and {where}", advice)


def _is_sealed(fd: int, end: int, seal: Seal) -> bool:
    return zlib.crc32(os.pread(fd, seal.size, end - seal.size)) == seal.crc


# --- reading lines -------------------------------------------------------------------------------


def read_lines(
    path: str,
    position: int,
    last: Seal,
    *,
    inode: int,
    line_bytes_max: int,
    head: Seal = NOTHING,
    seen: int = 0,
    scanned_to: int = 0,
) -> Chunk:
    """Read whole lines from ``position`` on, as many as one read holds; a last line without a newline is left.

    ``last`` is the seal of the line before ``position``, ``head`` that of the first line, ``seen`` the size that the
    file had, and ``scanned_to`` that of the previous `Chunk`, 0 at first. Raises FileMoved if the path is another file
    now, is shorter than it was, or has another line before ``position`` (at its start: another first line).
    """
    fd = _open(path)
    try:
        status = os.fstat(fd)
        if status.st_ino != inode:
            raise FileMoved("was replaced by another file")
        if status.st_size < position:
            raise FileMoved(f"has {status.st_size:,} bytes, but was read up to {position:,}")
        if status.st_size < seen:
            raise FileMoved(f"has {status.st_size:,} bytes, but had {seen:,} at the last look")
        asked = READ_BYTES_MAX
        data = os.pread(fd, last.size + asked, position - last.size)
        if zlib.crc32(data[: last.size]) != last.crc:
            raise FileMoved(f"has another line before {position:,} than the one that was read")
        data = data[last.size :]
        if not position and zlib.crc32(data[: head.size]) != head.crc:
            raise FileMoved("has another first line than before")
        # If a line does not fit the ordinary read, a second one fetches as much as the longest line can need.
        if b"\n" not in data and len(data) == asked <= line_bytes_max:
            asked = line_bytes_max + 1
            data = os.pread(fd, asked, position)
        if b"\n" in data:
            lines, taken = _split(data, position, line_bytes_max)
            # The limit of lines may have left whole lines in the data; if the read was full, the file may continue.
            at_end = len(data) < asked and b"\n" not in data[taken:]
            return Chunk(lines, at_end, 0, status.st_size, status.st_mtime_ns)
        if len(data) <= line_bytes_max:
            return Chunk([], True, 0, status.st_size, status.st_mtime_ns)
        beginning = data[:REJECTED_HEAD_BYTES_MAX]
        end, scanned_to = _find_line_end(fd, max(scanned_to, position + len(data)))
        if end is None:
            return Chunk([], True, scanned_to, status.st_size, status.st_mtime_ns)
        crc = zlib.crc32(_line_end(fd, position, end))
        bad = _too_long(position, end, crc, line_bytes_max, beginning)
        return Chunk([bad], False, 0, status.st_size, status.st_mtime_ns)
    finally:
        os.close(fd)


def seal_of(offset: int, end_offset: int, crc: int) -> Seal:
    """Return the seal of a line that was read."""
    return Seal(min(end_offset - offset, SEAL_BYTES_MAX), crc)


def read_text(path: str, offset: int, end_offset: int, crc: int, *, bytes_max: int) -> str:
    """Return the text of one line without its newline; bytes that are not UTF-8 are written as ``\\xff``.

    If the line has more than ``bytes_max`` bytes, only its beginning. Raises FileMoved if another line is there.
    """
    size = end_offset - offset
    fd = _open(path)
    try:
        end = _line_end(fd, offset, end_offset)
        line = os.pread(fd, size if size <= bytes_max else REJECTED_HEAD_BYTES_MAX, offset)
    finally:
        os.close(fd)
    if not end.endswith(b"\n") or zlib.crc32(end) != crc:
        raise FileMoved(f"has another line at {offset:,} than the one that was read")
    return storage.text_of(line)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise FileMoved("was removed") from error


def _split(data: bytes, position: int, line_bytes_max: int) -> tuple[list[Line | BadLine], int]:
    """Parse the whole lines of ``data``; return them and their size in bytes."""
    lines: list[Line | BadLine] = []
    start = 0
    # The last piece follows the last newline taken: it is empty, a torn line, or the lines beyond the limit.
    for text in data.split(b"\n", READ_LINES_MAX)[:-1]:
        end = start + len(text) + 1
        crc = zlib.crc32(data[max(start, end - SEAL_BYTES_MAX) : end])
        lines.append(_parse(text, position + start, position + end, crc, line_bytes_max))
        start = end
    return lines, start


def _parse(text: bytes, offset: int, end_offset: int, crc: int, line_bytes_max: int) -> Line | BadLine:
    if len(text) > line_bytes_max:
        return _too_long(offset, end_offset, crc, line_bytes_max, text[:REJECTED_HEAD_BYTES_MAX])
    try:
        return Line(offset, end_offset, crc, msgspec.json.decode(text))
    except (ValueError, RecursionError) as error:
        return BadLine(offset, end_offset, crc, f"not a JSON value: {error}", text)


def _too_long(offset: int, end_offset: int, crc: int, line_bytes_max: int, head: bytes) -> BadLine:
    reason = f"{end_offset - offset - 1:,} bytes long; the limit is {line_bytes_max:,}"
    return BadLine(offset, end_offset, crc, reason, head)


def _line_end(fd: int, offset: int, end_offset: int) -> bytes:
    start = max(offset, end_offset - SEAL_BYTES_MAX)
    return os.pread(fd, end_offset - start, start)


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
