"""The embedded broker: append-only JSON-lines files in a folder, read by groups that commit offsets.

Nothing to install and nothing to run: `FileLogWriter` (or any program that appends whole lines) writes, a
`FileLogTrigger` reads. `headgate.brokers.filelogs.storage` documents the files and their formats.

The promises of `FileLogProducer`:

- A line is handed out when its newline is there; a last line without one is left until it is complete.
- A partition is a lane: its lines are handed out in order, and partitions do not wait for one another.
- The committed offset follows the lines that every subscriber accepted or rejected, and never passes one that is
  unresolved or failed (I1, I3). A failed line is handed out again, with all that follow it, after a delay that grows
  as long as the same line fails. The same holds for a line that had no subscriber.
- A line that a subscriber rejected, and none failed, is recorded in ``<group>.rejected.jsonl`` first and then passed.
- A line that is not a JSON value, or longer than the limit, is handed out as `Undecodable`: it becomes a dead letter of
  each subscriber, and never stops the log. Of a line longer than the limit both the letter and the record have only the
  beginning.
- One process reads for one group at a time.
- A file that was renamed within its folder is read to its end under its new name, then the next one is begun. So is
  one that was copied within the folder and then truncated. `headgate.brokers.filelogs.reading` says how it is found.
- A file that was read in part and cannot be found is an error, never a silent restart.

If the kernel does not report a change (network file systems, partitions that are symbolic links), the next scan of
the folder finds it, at most ``rescan_interval_s`` later.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog
import trio
from inotify_simple import INotify, flags  # type: ignore[import-untyped]

from headgate.brokers.filelog_writer import FileLogWriter
from headgate.brokers.filelogs import reading, storage
from headgate.brokers.filelogs.partition import (
    REWIND_DELAY_MAX_S,
    REWIND_DELAY_S,
    FileLogPosition,
    LogFile,
    Verdict,
)
from headgate.brokers.filelogs.reading import BadLine, FileMoved, Line, NewFile
from headgate.brokers.filelogs.storage import (
    LINE_BYTES_MAX,
    FileEntry,
    FileLogBusy,
    FileLogCorrupt,
    FileLogError,
    FileLogRewritten,
    RejectedLine,
    Seal,
)
from headgate.protocol import marks
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.shared_stream import AdvanceItem, Lag, SharedStreamProducer, Undecodable

__all__ = [
    "FileLogBusy",
    "FileLogCorrupt",
    "FileLogError",
    "FileLogPosition",
    "FileLogProducer",
    "FileLogRewritten",
    "FileLogTrigger",
    "FileLogWriter",
]

LOCK_TIMEOUT_S = 10.0  # a runner that is being replaced has this long to exit
LOCK_POLL_S = 0.1  # to await flock would need a dedicated thread, so it is tried this often
IN_FLIGHT_MAX = 10_000  # lines of one partition handed out and unresolved: bounds the memory that the stream needs
RESCAN_INTERVAL_S = 30.0  # the delay until a change that inotify did not report is seen; a scan costs one scandir
THREADS_MAX = 2  # one reads, one commits; a file system that hangs blocks no threads of other code

_WATCHED = (
    flags.CREATE
    | flags.MODIFY
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.DELETE
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)

_T = TypeVar("_T")

_log = structlog.get_logger("headgate.filelog")


class FileLogProducer(SharedStreamProducer):
    """Tails all partitions of one file log for one group, from the group's committed offsets.

    The raw event is the parsed JSON value of a line. The limits: ``line_bytes_max`` bytes of one line without its
    newline; ``lock_timeout_s`` seconds to wait for another holder of the group; ``in_flight_max`` lines of one
    partition handed out and unresolved (a read under way may exceed it by its own lines); ``rewind_delay_s`` to
    ``rewind_delay_max_s`` seconds between two deliveries of a failed line; ``rescan_interval_s`` as the module says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: str,
        *,
        line_bytes_max: int = LINE_BYTES_MAX,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        in_flight_max: int = IN_FLIGHT_MAX,
        rewind_delay_s: float = REWIND_DELAY_S,
        rewind_delay_max_s: float = REWIND_DELAY_MAX_S,
        rescan_interval_s: float = RESCAN_INTERVAL_S,
    ) -> None:
        self._folder = os.fspath(path)
        self._group = group
        self._line_bytes_max = line_bytes_max
        self._lock_timeout_s = lock_timeout_s
        self._in_flight_max = in_flight_max
        self._rewind_delay_s = rewind_delay_s
        self._rewind_delay_max_s = rewind_delay_max_s
        self._rescan_interval_s = rescan_interval_s
        storage.group_path(self._folder, group, ".json")  # refuses a bad name of a group at once
        self._log_id = ""
        self._recorded: set[str] = set()
        self._files: dict[str, LogFile] = {}  # by id, those of one partition in the order in which they are read
        self._given_up: dict[str, FileEntry] = {}  # by partition
        self._inotify: INotify | None = None
        self._lock_fd: int | None = None
        self._nap: trio.CancelScope | None = None
        self._rescan_due = True
        self._rescan_at = float("-inf")
        # The reader stores too, when files are renamed or begin; two calls must not write the same draft file at once.
        self._committing = trio.Lock()
        self._threads = trio.CapacityLimiter(THREADS_MAX)

    async def open_stream(self) -> AsyncGenerator[tuple[Any, FileLogPosition], None]:
        """Yield ``(value, position)`` for every line after the committed offsets, then for each new one, without end.

        Raises FileLogBusy if another process keeps the group's lock, FileLogRewritten if the log is not what was
        read before, FileLogCorrupt if its bookkeeping is not readable, FileLogError if the folder is missing.
        """
        await self._open()
        while True:
            self._take_notices()
            if self._rescan_due or trio.current_time() >= self._rescan_at:
                await self._rescan()
            ready = self._ready_files()
            if not ready and not self._rescan_due:
                await self._wait_for_change()
            for partition in ready:
                # While the partitions before it were read, it may have been rewound, and its delay may not be over.
                if not self._is_ready(partition):
                    continue
                generation = partition.generation
                for line in await self._read(partition):
                    # While a line was with the subscribers, an outcome may have rewound the partition.
                    if partition.generation != generation:
                        break
                    marks.reach("filelog.handed_out")
                    value = line.value if isinstance(line, Line) else _undecodable(line)
                    yield value, partition.take(line)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Commit the batch up to its first failed line; if there is one, rewind to it."""
        async with self._committing:
            partition = self._files[batch[0].broker_payload.file]
            verdict = partition.judge(batch)
            last = partition.seal_before(verdict.commit_to, batch)
            was_full = partition.in_flight >= self._in_flight_max
            if verdict.failed_at is not None:
                # Before the commit, so that lines behind the failed one are not handed out in vain while it runs.
                partition.rewind_to(verdict.failed_at, last, trio.current_time())
                _log.warning("line failed, partition rewound", **self._named(partition), offset=verdict.failed_at)
            else:
                partition.in_flight -= verdict.resolved
            if verdict.rejections:
                await self._in_thread(partial(self._record_rejections, verdict))
            await self._commit(partition, verdict.commit_to, last)
        self._look_for_next(partition)
        if was_full or verdict.failed_at is not None:
            self._wake()

    def get_advance_lane(self, broker_payload: FileLogPosition) -> str:
        """Return the file: its lines are committed in order; partitions do not wait for one another."""
        return broker_payload.file

    def event_key(self, broker_payload: FileLogPosition) -> str:
        """Return log, partition, file, offset and checksum, which always identify the same line (I2)."""
        return f"{self._files[broker_payload.file].key_prefix}{broker_payload.offset}:{broker_payload.crc:x}"

    def known_lag(self) -> Lag:
        """Return the bytes after the committed offsets, as long as the files were when they were last looked at."""
        return Lag(sum(max(0, file.length - file.committed) for file in self._files.values()), "bytes")

    async def aclose(self) -> None:
        """Stop watching and release the group's lock; may be called twice."""
        inotify, self._inotify = self._inotify, None
        if inotify is not None:
            trio.lowlevel.notify_closing(inotify.fileno())
            inotify.close()
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is not None:
            storage.release_lock(lock_fd)

    # --- opening -----------------------------------------------------------------------------

    async def _open(self) -> None:
        self._log_id = await self._in_thread(partial(storage.ensure_log_id, self._folder))
        await self._lock()
        # Only the holder of the lock may read the offsets: until then, another process may still commit.
        entries = await self._in_thread(partial(storage.load_offsets, self._folder, self._group, self._log_id))
        self._given_up.update({entry.partition: entry for entry in entries if not entry.name})
        self._files.update({entry.id: self._log_file(entry) for entry in entries if entry.name})
        self._recorded = await self._in_thread(partial(storage.recorded_keys, self._folder, self._group))
        # The watch begins before the first scan of the folder, so that no change between the two is missed.
        self._inotify = await self._in_thread(self._watch)

    async def _lock(self) -> None:
        deadline = trio.current_time() + self._lock_timeout_s
        while True:
            self._lock_fd = await self._in_thread(partial(storage.try_lock, self._folder, self._group))
            if self._lock_fd is not None:
                return
            if trio.current_time() >= deadline:
                holder = await self._in_thread(partial(storage.lock_holder, self._folder, self._group))
                raise FileLogBusy(self._folder, self._group, holder)
            await trio.sleep(LOCK_POLL_S)

    def _watch(self) -> INotify:
        try:
            inotify = INotify(nonblocking=True)
        except OSError as error:
            raise FileLogError(
                f"{self._folder} cannot be watched ({error}): see the sysctls fs.inotify.max_user_instances "
                f"and fs.inotify.max_user_watches"
            ) from error
        try:
            inotify.add_watch(self._folder, _WATCHED)
        except BaseException:
            inotify.close()
            raise
        return inotify

    # --- reading -----------------------------------------------------------------------------

    def _take_notices(self) -> None:
        """Mark the files that inotify reports; anything but growth of a known file requires a rescan."""
        assert self._inotify is not None
        files = {file.file_name: file for file in self._files.values()}
        for event in self._inotify.read(timeout=0):
            file = files.get(event.name)
            if event.mask & flags.MODIFY and file is not None:
                file.dirty = True
            elif not event.name or file is not None or event.name.endswith(storage.PARTITION_SUFFIX):
                # An event without a name is about the folder itself, or says that the kernel's queue overflowed.
                self._rescan_due = True

    async def _rescan(self) -> None:
        """Find the known files and new ones. The look is a pure read; meanwhile outcomes may commit and rewind."""
        self._rescan_due = False
        known = [file.known() for file in self._files.values()]
        try:
            look = await self._in_thread(partial(reading.look, self._folder, known, self._advice()), abandon=True)
        except FileLogRewritten:
            async with self._committing:
                await self._store()  # what was seen, so that the next reader does not settle for less
            raise
        changed = False
        for file_id, found in look.found.items():
            if found is None:
                del self._files[file_id]
            else:
                changed = changed or self._files[file_id].file_name != found.name
                self._files[file_id].place(found)
        for partition, new in sorted(look.new.items()):
            changed = self._begin(partition, new) or changed
        if changed:
            # Before any line of a new file is handed out: it is known that it was there, whatever becomes of it.
            async with self._committing:
                await self._store()
        self._rescan_at = trio.current_time() + self._rescan_interval_s

    def _begin(self, partition: str, new: NewFile) -> bool:
        """Begin a file of a partition, unless the one before it is not at its end yet; return whether it is begun."""
        name = partition + storage.PARTITION_SUFFIX
        before = next((f for f in self._files.values() if f.name == partition and not f.is_rotated), None)
        if before is not None:
            if not before.is_settled:
                return False
            if new.is_twin:
                problem = (
                    f"holds the same {before.seen:,} bytes as {before.file_name}, which is the file that was read: "
                    f"either is the copy of the other. If {name} goes on with this log, remove {before.file_name} from "
                    f"the folder"
                )
                raise FileLogRewritten(os.path.join(self._folder, name), problem, f"else {self._advice()}")
            before.is_rotated = True
            if before.size > before.seen:
                _log.warning("a file ends in a line without a newline", **self._named(before), bytes=before.size)
            _log.info("partition goes on in a new file", **self._named(before), old=before.file_name)
        given_up = self._given_up.pop(partition, None)
        chain = before.id if before is not None else given_up.id if given_up is not None else ""
        file_id = storage.file_id(chain, partition, new.status.inode, new.head)
        self._files[file_id] = self._log_file(
            FileEntry(
                id=file_id,
                partition=partition,
                name=name,
                inode=new.status.inode,
                head=new.head,
                offset=0,
                last=storage.Seal(0, 0),
                seen=new.status.size,
                mtime=new.status.mtime,
            )
        )
        self._files[file_id].is_suspect = False
        return True

    def _log_file(self, entry: FileEntry) -> LogFile:
        prefix = storage.key_prefix(self._log_id, entry.partition, entry.id)
        return LogFile(entry, prefix, rewind_delay_s=self._rewind_delay_s, rewind_delay_max_s=self._rewind_delay_max_s)

    def _look_for_next(self, file: LogFile) -> None:
        """Look for the next file of a partition if this one is at its end and its name is free for another."""
        if not file.is_at_home and not file.is_rotated and file.is_settled:
            self._rescan_due = True
            self._wake()

    def _ready_files(self) -> list[LogFile]:
        return [file for file in self._files.values() if self._is_ready(file)]

    def _is_ready(self, file: LogFile) -> bool:
        return self._is_wanted(file) and file.not_before <= trio.current_time()

    def _is_wanted(self, file: LogFile) -> bool:
        return file.dirty and not file.is_suspect and file.in_flight < self._in_flight_max

    async def _wait_for_change(self) -> None:
        """Wait until inotify reports a change, a rewound partition or a rescan is due, or `_wake` is called."""
        assert self._inotify is not None
        deadline = self._rescan_at
        for partition in self._files.values():
            if self._is_wanted(partition):
                deadline = min(deadline, partition.not_before)
        with trio.CancelScope(deadline=deadline) as self._nap:
            await trio.lowlevel.wait_readable(self._inotify.fileno())
        self._nap = None

    def _wake(self) -> None:
        if self._nap is not None:
            self._nap.cancel()

    async def _read(self, file: LogFile) -> Sequence[Line | BadLine]:
        generation = file.generation
        file.dirty = False
        try:
            chunk = await self._in_thread(
                partial(
                    reading.read_lines,
                    os.path.join(self._folder, file.file_name),
                    file.position,
                    file.seal(),
                    inode=file.inode,
                    head=file.entry.head,
                    seen=file.seen,
                    line_bytes_max=self._line_bytes_max,
                    scanned_to=file.scanned_to,
                ),
                abandon=True,
            )
        except FileMoved as moved:
            _log.info("a file is to be found again", **self._named(file), problem=moved.problem)
            file.is_suspect = self._rescan_due = True
            return ()
        if file.generation != generation:
            return ()  # rewound during the read; the rewind has marked it for another read
        file.note_read(chunk)
        if not chunk.lines:
            self._look_for_next(file)
        return chunk.lines

    # --- committing (in the _committing lock) --------------------------------------------------

    async def _commit(self, file: LogFile, offset: int, last: Seal) -> None:
        if offset == file.committed:
            return
        await self._store({file.id: file.entry_at(offset, last)})
        file.commit_to(offset, last)

    async def _store(self, new: Mapping[str, FileEntry] | None = None) -> None:
        """Store the committed offsets as they are, except for the entries ``new``."""
        entries = [*self._given_up.values()]
        entries += [(new or {}).get(file.id) or file.committed_entry() for file in self._files.values()]
        await self._in_thread(partial(storage.store_offsets, self._folder, self._group, self._log_id, entries))

    def _record_rejections(self, verdict: Verdict) -> None:
        records = []
        for position, outcome in verdict.rejections:
            path = os.path.join(self._folder, self._files[position.file].file_name)
            try:
                text = reading.read_text(
                    path, position.offset, position.end_offset, position.crc, bytes_max=self._line_bytes_max + 1
                )
            except FileMoved as moved:
                # It cannot be recorded, so it must not be passed; the reader finds the file when it is opened again.
                raise FileLogRewritten(path, moved.problem, "the rejected line is delivered again") from moved
            total = outcome.acked + outcome.rejected
            reason = f"rejected by {outcome.rejected} of {total} subscribers"
            records.append(
                RejectedLine(
                    self.event_key(position), position.partition, position.offset, position.end_offset, reason, text
                )
            )
        self._record(records)

    def _record(self, lines: Iterable[RejectedLine]) -> None:
        """Append to the rejected lines, except those that an earlier reader has recorded and not committed."""
        if new := [line for line in lines if line.key not in self._recorded]:
            storage.append_rejected(self._folder, self._group, new)

    def _advice(self) -> str:
        command = f"python -m headgate.brokers.filelog_offsets {self._folder} {self._group} --restart PARTITION"
        return f"to give up what is left of the file, and begin with the next one of its partition: {command}"

    def _named(self, partition: LogFile) -> dict[str, str]:
        return {"path": self._folder, "partition": partition.name, "group": self._group}

    async def _in_thread(self, call: Callable[[], _T], *, abandon: bool = False) -> _T:
        """Run a blocking call. Only pure reads may be abandoned: a commit that continues after the lock was released
        could overwrite a newer one."""
        return await trio.to_thread.run_sync(call, abandon_on_cancel=abandon, limiter=self._threads)


def _undecodable(line: BadLine) -> Undecodable:
    try:
        content: str | bytes = line.head.decode()
    except UnicodeDecodeError:
        content = line.head
    size = line.end_offset - line.offset - 1
    is_whole = len(line.head) == size
    return Undecodable(line.reason, content, is_whole, None if is_whole else size)


class FileLogTrigger(BaseEventTrigger):
    """Fires an event for every line of a file log; all triggers of one log and group share one reader.

    To select or transform lines, subclass it and override ``filter_shared_stream``. A subclass that overrides
    ``__init__`` overrides ``serialize`` too. The limits are those of `FileLogProducer`; the values given by the first
    trigger of a group apply to all of them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: str,
        *,
        line_bytes_max: int = LINE_BYTES_MAX,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        self.path = os.fspath(path)
        self.group = group
        self.line_bytes_max = line_bytes_max
        self.lock_timeout_s = lock_timeout_s
        storage.group_path(self.path, group, ".json")  # refuses a bad name of a group at once

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class of this instance, so that a subclass is restored as itself."""
        return self._classpath(), {
            "path": self.path,
            "group": self.group,
            "line_bytes_max": self.line_bytes_max,
            "lock_timeout_s": self.lock_timeout_s,
        }

    def shared_stream_key(self) -> tuple[str, str, str]:
        """Return the folder, links resolved, and the group: two paths to one folder are one log."""
        return ("filelog", os.path.realpath(self.path), self.group)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> FileLogProducer:
        """Return the producer; kwargs that only a subclass knows are ignored."""
        return FileLogProducer(kwargs["path"], kwargs["group"], **cls.shared_stream_arguments(kwargs))

    @classmethod
    def shared_stream_arguments(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the limits."""
        return {name: kwargs[name] for name in ("line_bytes_max", "lock_timeout_s") if name in kwargs}
