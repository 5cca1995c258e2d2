"""The files of the tasks' logs: their place, their format, reading and deleting them.

::

    <log_folder>/<dag_id>/<run_id>/<task_id>/<try_number>/<epoch>.jsonl
                                                          <epoch>.end-<number>.jsonl
                                             map/<map_index // 1000>/<epoch>.jsonl
                                             map/<map_index // 1000>/<map_index>/<try_number>/...

The last two forms are those of the instances of a mapped task. A thousand of them share a *segment*, of which each try
takes `SEGMENT_SHARE_BYTES_MAX` bytes, because to make a file costs more than all that most of them log. Its lines begin
with the instance and the try. What a try logs beyond that is in a folder of its own. So is all of any other task: there
is one folder for each try, and in it one file for
each supervisor that handled the try. Each supervisor has an epoch of its own, so no two processes ever write one file,
and many machines may share the folder. A file that has reached its limit is followed by others, of which only the last
two are kept: they hold the end of the log.

Each line is a JSON object: ``timestamp`` (UTC, ISO 8601), ``level``, ``event``, ``logger``, ``source`` (``task``,
``trigger``, ``output`` or ``supervisor``), and the other fields of the record. An event too long for one record is
split: all parts but the last have ``more: true``, and ``part`` counts them.

Readers merge the files of a try by time. The order within a file is never changed: it is that of arrival.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import os
import re
import select
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import inotify_simple  # type: ignore[import-untyped]
import msgspec

from headgate.store.ids import TryName

Record = dict[str, Any]

# --- names ---------------------------------------------------------------------------------------

FILE_NAME_BYTES_MAX: Final = 255  # of every file system that we know of
MAP_FOLDER: Final = "map"  # beside the tries of a task, which are numbers
INSTANCES_PER_FOLDER: Final = 1000
SEGMENT_SHARE_BYTES_MAX: Final = 64 * 1024  # of the segment, for one try
KEPT_BYTES_MAX: Final = 160  # of a name too long for a file, before the hash that stands for the rest
_READABLE: Final = ":+=@, "  # characters of run ids that every file system of Linux takes

_FILE_NAME: Final = re.compile(r"([0-9]+)(?:\.end-([0-9]+))?\.jsonl", re.ASCII)
BEFORE_FIELD: Final = "records_before"  # of the first line of a file of an end: records since the limit was reached


def file_name_of(name: str) -> str:
    """Return a file name for any text, different for different texts, and the text itself if that is possible.

    Other characters are percent-encoded. A name that is too long then is cut, and ends in ``%-`` and a hash.
    """
    encoded = quote(name, safe=_READABLE, errors="surrogatepass")
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]  # neither this folder, nor its parent, nor hidden
    if len(encoded) > FILE_NAME_BYTES_MAX:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        # Encoding never makes "%-".
        encoded = f"{encoded[:KEPT_BYTES_MAX].rsplit('%', 1)[0]}%-{digest}"
    return encoded or "%-"


def folder_of_run(folder: Path, dag_id: str, run_id: str) -> Path:
    """Return the folder of the logs of a run, with a folder for each task."""
    return folder.joinpath(*map(file_name_of, (dag_id, run_id)))


@lru_cache(maxsize=256)
def folder_of_task(folder: Path, dag_id: str, run_id: str, task_id: str) -> Path:
    """Return the folder of the logs of a task, with a folder for each try."""
    return folder_of_run(folder, dag_id, run_id) / file_name_of(task_id)


def folder_of_try(folder: Path, name: TryName) -> Path:
    """Return the folder of the log of a try."""
    return folder_of_instance(folder, name) / str(name.try_number)


def folder_of_instance(folder: Path, name: TryName) -> Path:
    """Return the folder of the tries of a task, or of one instance of a mapped task: a thousand of these share one."""
    of_task = folder_of_task(folder, name.dag_id, name.run_id, name.task_id)
    if name.map_index < 0:
        return of_task
    return of_task / MAP_FOLDER / str(name.map_index // INSTANCES_PER_FOLDER) / str(name.map_index)


def folder_of_segments(folder: Path, name: TryName) -> Path:
    """Return the folder of the segments to which an instance of a mapped task belongs."""
    return folder_of_instance(folder, name).parent


def segment_of(folder: Path, name: TryName, epoch: int) -> Path:
    """Return the segment that a supervisor writes for the try of an instance."""
    return folder_of_segments(folder, name) / f"{epoch}.jsonl"


def segment_mark(name: TryName) -> bytes:
    """Return with what the lines of a try begin in a segment, in place of the first brace of the record."""
    return b'{"of":"%d.%d",' % (name.map_index, name.try_number)


def _segments_of(folder: Path, name: TryName) -> list[Path]:
    return [] if name.map_index < 0 else [part[0] for part in parts_in(folder_of_segments(folder, name)).values()]


def _of_instance(lines: Iterable[bytes], name: TryName) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an instance in those of a segment, as they would be in a file of its own, with their tries."""
    of_instance = segment_mark(name).partition(b".")[0] + b"."
    for line in lines:
        if line.startswith(of_instance):
            number, _, rest = line[len(of_instance) :].partition(b'",')
            if number.isdigit():
                yield int(number), b"{" + rest


def _in_segments(folder: Path, name: TryName) -> Iterator[Iterator[tuple[int, bytes]]]:
    for segment in _segments_of(folder, name):
        with contextlib.suppress(FileNotFoundError), segment.open("rb") as lines:
            yield _of_instance((line.removesuffix(b"\n") for line in lines), name)


def tries(folder: Path, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> list[int]:
    """Return the tries of a task, or of an instance of a mapped one, that have a log."""
    name = TryName(dag_id, run_id, task_id, 0, map_index)
    found = _numbers_in(folder_of_instance(folder, name))
    return sorted(found.union(number for lines in _in_segments(folder, name) for number, _ in lines))


def is_try_folder(name: str) -> bool:
    """Whether a folder of a task may be that of a try."""
    return name.isascii() and name.isdecimal()


def is_log_file(name: str) -> bool:
    """Whether a file in the folder of a try is part of its log."""
    return _FILE_NAME.fullmatch(name) is not None


def _numbers_in(folder: Path) -> set[int]:
    try:
        return {int(name) for name in os.listdir(folder) if is_try_folder(name)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def file_of(folder: Path, name: TryName, epoch: int, part: int = 0) -> Path:
    """Return the file of a supervisor: part 0 is the log, the others are those of its end."""
    return folder_of_try(folder, name) / (f"{epoch}.end-{part}.jsonl" if part else f"{epoch}.jsonl")


def parts_in(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the files in the folder of a try by epoch and part, in this order."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if (match := _FILE_NAME.fullmatch(name)) is not None:
                found.append((int(match[1]), int(match[2] or 0), folder / name))
    parts: dict[int, dict[int, Path]] = {}
    for epoch, part, path in sorted(found):
        parts.setdefault(epoch, {})[part] = path
    return parts


# --- reading -------------------------------------------------------------------------------------

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def read(
    folder: Path, dag_id: str, run_id: str, task_id: str, try_number: int | None = None, *, map_index: int = -1
) -> Iterator[Record]:
    """Yield the records of one try, merged by time; if none is given, those of all tries, one after the other.

    Each record has its ``try_number``. A line that is not a record, for example one that was torn by a full disk, is
    yielded as far as it is there, with ``damaged: true``. Raises `OSError` for a log that cannot be read.
    """
    for number in tries(folder, dag_id, run_id, task_id, map_index) if try_number is None else [try_number]:
        name = TryName(dag_id, run_id, task_id, number, map_index)
        # Segments first: of what a try has logged at one time, this was before what is in a file of its own.
        files = [
            iter([record_of(line) for of_try, line in lines if of_try == number])
            for lines in _in_segments(folder, name)
        ]
        files += [_records_of_epoch(paths.values()) for paths in parts_in(folder_of_try(folder, name)).values()]
        for record in _merged(files):
            yield record | {"try_number": number}


def _records_of_epoch(paths: Iterable[Path]) -> Iterator[Record]:
    # All are open before the first is read, because a part of an end may be deleted at any time.
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                files.append(stack.enter_context(path.open("rb")))
        has_begun = False
        for line in chain.from_iterable(files):
            record = record_of(line.removesuffix(b"\n"))
            if BEFORE_FIELD in record:
                if has_begun or (note := _note_of_gap(record)) is None:
                    continue
                record = note
                has_begun = True
            yield record


def record_of(line: bytes) -> Record:
    """Return the record of a line; a line that is not one becomes a record with ``damaged: true``."""
    try:
        return _decode(line)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors, as is bad UTF-8
        text = line.decode("utf-8", "backslashreplace")
        return {"level": "warning", "event": text, "source": "supervisor", "damaged": True}


def _note_of_gap(head: Record) -> Record | None:
    before = head[BEFORE_FIELD]
    if not before:
        return None
    return {**head, "level": "warning", "source": "supervisor", "event": f"{before:,} records are left out here"}


def _merged(files: list[Iterator[Record]]) -> Iterator[Record]:
    """Merge by time; a record with a time earlier than that of one before it in its file goes right after that one."""

    def timed(number: int, records: Iterator[Record]) -> Iterator[tuple[str, int, int, Record]]:
        latest = ""
        for index, record in enumerate(records):
            latest = max(latest, _sortable(record.get("timestamp")))
            yield latest, number, index, record

    for *_, record in heapq.merge(*(timed(number, records) for number, records in enumerate(files))):
        yield record


def _sortable(timestamp: object) -> str:
    """Return a time as text whose order is that of time: with or without a fraction, its zone left out."""
    if not isinstance(timestamp, str):
        return ""
    return timestamp.removesuffix("Z").removesuffix("+00:00")


# --- following -----------------------------------------------------------------------------------

# The longest wait of a follower: changes made on another machine do not wake it.
LOOK_INTERVAL_S: Final = 1.0
OFFSET_DIGITS_MAX: Final = 18  # in a cursor: no file is longer, and no system call takes more
TRIES_READ_MAX: Final = 10  # the newest of a task: a page is read as a whole, and its cursor names them all
FOLLOW_READ_BYTES_MAX: Final = 4 * 1024 * 1024  # of one file in one look
_CHANGES = inotify_simple.flags.CREATE | inotify_simple.flags.MODIFY | inotify_simple.flags.MOVED_TO


def follow(
    folder: Path,
    dag_id: str,
    run_id: str,
    task_id: str,
    try_number: int | None = None,
    *,
    map_index: int = -1,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Record]:
    """Yield the records that `read` yields, and then new ones, until ``is_over`` returns true.

    The log need not exist yet. ``is_over`` is called whenever there is nothing new, at least once in
    `LOOK_INTERVAL_S`. After it has returned true, all that was written until then is still yielded. If the last line is
    incomplete, its end is waited for.
    """
    name = TryName(dag_id, run_id, task_id, 0, map_index)
    task = folder_of_instance(folder, name)
    read_files: dict[Path, _Followed] = {}
    with _Watch(folder) as watch:
        is_last_look = False
        while True:
            watch.watch(task)
            watch.watch(folder_of_segments(folder, name))
            in_segments, is_anything_new = _new_in_segments(folder, name, read_files)
            numbers = sorted(_numbers_in(task) | in_segments.keys()) if try_number is None else [try_number]
            for number in numbers:
                watch.watch(task / str(number))
                parts = parts_in(task / str(number))
                for record in _merged(_new_records(parts, read_files, in_segments.get(number, ()))):
                    is_anything_new = True
                    yield record | {"try_number": number}
            if is_anything_new:
                continue
            if is_last_look:
                return
            is_last_look = is_over()
            if not is_last_look:
                watch.wait()


class _Followed:
    """One file, read as far as its lines are complete, up to ``bytes_max`` at a time from ``offset`` on.

    ``is_whole``: one look is at all of it, piece by piece. A segment may be far longer than what is held of it.
    """

    def __init__(self, offset: int = 0, bytes_max: int = FOLLOW_READ_BYTES_MAX, *, is_whole: bool = False) -> None:
        self.offset = offset
        self.is_whole = is_whole
        self._bytes_max = bytes_max

    @classmethod
    def at_end(cls, path: Path, bytes_max: int) -> _Followed:
        """Return the file at the first line that begins within its last ``bytes_max``."""
        try:
            size = path.stat().st_size
            if size <= bytes_max:
                return cls(0, bytes_max)
            with open(path, "rb", buffering=0, opener=_opened) as file:
                data = os.pread(file.fileno(), bytes_max, size - bytes_max)
        except FileNotFoundError:
            return cls(0, bytes_max)
        return cls(size - len(data) + data.find(b"\n") + 1, bytes_max)

    def read(self, path: Path) -> list[bytes]:
        """Return the new lines; none if the file is gone."""
        try:
            with open(path, "rb", buffering=0, opener=_opened) as file:
                data = os.pread(file.fileno(), self._bytes_max, self.offset)
        except FileNotFoundError:  # a part of an end that was deleted
            return []
        complete, end, _ = data.rpartition(b"\n")
        if not end and len(data) == self._bytes_max:
            complete = data  # a line longer than any of ours
        self.offset += len(complete) + len(end)
        return complete.split(b"\n") if complete else []


def _opened(path: str, flags: int) -> int:
    """Open a log for pages, which others may read who cannot read what a link leads to; a pipe is not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_on(folder: Path, name: TryName, cursor: str | None, *, bytes_max: int) -> tuple[list[Record], str]:
    """Return the records of the tries of a task that follow a cursor, and the cursor behind them.

    Without a cursor, those within the last ``bytes_max`` of each file of its newest `TRIES_READ_MAX` tries, and all in
    segments. ``name`` is that of any try. A cursor says for each file up to which byte it was read:
    ``1/4.jsonl=1200,2/5.jsonl=80``. If more tries have followed than are read at once, there are more behind the
    cursor that is returned. Raises `ValueError` for another text, and `OSError` for a log that cannot be read.
    """
    task = folder_of_instance(folder, name)
    offsets = _offsets_of(cursor) if cursor else {}
    read_files: dict[Path, _Followed] = {}
    found = []
    for path in _segments_of(folder, name):  # all of them: most is of others, and each try has little there
        offset = offsets.get(f"{MAP_FOLDER}/{path.name}", 0)
        read_files[path] = _Followed(offset, FOLLOW_READ_BYTES_MAX, is_whole=True)
    segments = set(read_files)
    in_segments, _ = _new_in_segments(folder, name, read_files)
    in_files = _tries_behind(offsets, sorted(_numbers_in(task)))
    for number in sorted({*in_files, *in_segments}):
        parts = parts_in(task / str(number)) if number in in_files else {}
        for path in (path for paths in parts.values() for path in paths.values()):
            offset = offsets.get(f"{number}/{path.name}", 0)
            read_files[path] = _Followed(offset, bytes_max) if cursor else _Followed.at_end(path, bytes_max)
        for record in _merged(_new_records(parts, read_files, in_segments.get(number, ()))):
            found.append(record | {"try_number": number})
    kept = {*segments, *(path for path in read_files if path.parent.name in map(str, in_files[-TRIES_READ_MAX:]))}
    behind = (
        f"{MAP_FOLDER if path in segments else path.parent.name}/{path.name}={followed.offset}"
        for path, followed in read_files.items()
        if path in kept
    )
    return found, ",".join(behind)


def _tries_behind(offsets: Mapping[str, int], numbers: list[int]) -> list[int]:
    """Return the tries that are read behind a cursor: those that it has, and as many new ones; the newest without it.

    A cursor has the newest `TRIES_READ_MAX` that were read: earlier ones have ended, and log nothing more.
    """
    known = [int(folder) for folder in (name.partition("/")[0] for name in offsets) if folder != MAP_FOLDER]
    if not known:
        return numbers[-TRIES_READ_MAX:]
    return [number for number in numbers if number >= min(known)][: 2 * TRIES_READ_MAX]


def _offsets_of(cursor: str) -> dict[str, int]:
    offsets = {}
    for place in cursor.split(","):
        name, _, offset = place.partition("=")
        folder, _, file = name.partition("/")
        if not (
            (is_try_folder(folder) or folder == MAP_FOLDER)
            and is_log_file(file)
            and offset.isascii()
            and offset.isdecimal()
            and len(offset) <= OFFSET_DIGITS_MAX
        ):
            raise ValueError(f"a cursor of logs is 1/4.jsonl=1200, or several of these; got {place!r}")
        offsets[name] = int(offset)
    return offsets


def _new_in_segments(
    folder: Path, name: TryName, read_files: dict[Path, _Followed]
) -> tuple[dict[int, list[list[bytes]]], bool]:
    """Return the new lines of an instance in its segments, by try, and whether there were any, of others as well."""
    found: dict[int, list[list[bytes]]] = {}
    has_read = False
    for path in _segments_of(folder, name):
        followed = read_files.setdefault(path, _Followed())
        of_segment: dict[int, list[bytes]] = {}
        while lines := followed.read(path):
            has_read = True
            for number, line in _of_instance(lines, name):
                of_segment.setdefault(number, []).append(line)
            if not followed.is_whole:
                break
        for number, some in of_segment.items():
            found.setdefault(number, []).append(some)
    return found, has_read


def _new_records(
    parts: Mapping[int, Mapping[int, Path]],
    read_files: dict[Path, _Followed],
    in_segments: Iterable[list[bytes]] = (),
) -> list[Iterator[Record]]:
    of_files: list[Iterable[bytes]] = [
        chain.from_iterable(read_files.setdefault(path, _Followed()).read(path) for path in paths.values())
        for paths in parts.values()
    ]
    return [
        iter([record for record in map(record_of, lines) if BEFORE_FIELD not in record])
        for lines in (*in_segments, *of_files)
    ]


class _Watch:
    """Waits for changes in the folders of a task, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._watched: set[Path] = set()
        self._inotify: inotify_simple.INotify | None = None

    def __enter__(self) -> _Watch:
        with contextlib.suppress(OSError):  # too many are in use: then the follower looks in intervals
            self._inotify = inotify_simple.INotify()
        return self

    def __exit__(self, *_: object) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def watch(self, folder: Path) -> None:
        """Watch a folder, and all above it, from the root down."""
        # A folder made after its parent is watched wakes us; one made before exists when its turn comes.
        above = [each for each in folder.parents if each.is_relative_to(self._root)]
        for each in (*reversed(above), folder):
            if self._inotify is None or each in self._watched:
                continue
            try:
                self._inotify.add_watch(each, _CHANGES)
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.ENOSPC):
                    raise
                return
            self._watched.add(each)

    def wait(self) -> None:
        """Return when something has happened since the last time, or the interval is over."""
        timeout_ms = int(LOOK_INTERVAL_S * 1000)
        if self._inotify is not None:
            self._inotify.read(timeout=timeout_ms)
        else:
            select.select([], [], [], LOOK_INTERVAL_S)
