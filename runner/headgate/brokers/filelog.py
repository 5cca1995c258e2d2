"""The embedded broker: append-only JSON-lines files in a folder, read by groups that commit offsets.

Nothing to install and nothing to run: `FileLogWriter` (or any program that appends whole lines) writes, a
`FileLogTrigger` reads. `headgate.brokers.filelog_storage` documents the files and their formats.

The promises of `FileLogProducer`:

- A line is handed out when its newline is there; a last line without one is left until it is complete.
- A partition is a lane: its lines are handed out in order, and partitions do not wait for one another.
- The committed offset follows the lines that every subscriber accepted or rejected, and never passes one that is
  unresolved or failed (I1, I3). A failed line is handed out again, with all that follow it, after a delay that grows
  as long as the same line fails. The same holds for a line that had no subscriber.
- A line that a subscriber rejected, and none failed, is recorded in ``<group>.rejected.jsonl`` first and then passed.
- A line that is not a JSON value, or longer than the limit, is recorded there too and then passed over. It is never
  handed out, and it never stops the log.
- One process reads for one group at a time.
- A log that was shortened or replaced is an error, never a silent restart.

If the kernel does not report a change (network file systems, partitions that are symbolic links), the next scan of
the folder finds it, at most ``rescan_interval_s`` later.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog
import trio
from inotify_simple import INotify, flags  # type: ignore[import-untyped]

from headgate.brokers import filelog_storage as storage
from headgate.brokers.filelog_partition import (
    REWIND_DELAY_MAX_S,
    REWIND_DELAY_S,
    FileLogPosition,
    Partition,
    Verdict,
)
from headgate.brokers.filelog_storage import (
    LINE_BYTES_MAX,
    BadLine,
    FileLogBusy,
    FileLogCorrupt,
    FileLogError,
    FileLogRewritten,
    RejectedLine,
)
from headgate.brokers.filelog_writer import FileLogWriter
from headgate.protocol import marks
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.shared_stream import AdvanceItem, SharedStreamProducer

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
        self._offsets: dict[str, int] = {}
        self._recorded: set[str] = set()
        self._partitions: dict[str, Partition] = {}
        self._inotify: INotify | None = None
        self._lock_fd: int | None = None
        self._nap: trio.CancelScope | None = None
        self._rescan_due = True
        self._rescan_at = float("-inf")
        # The reader commits too, when it passes over bad lines; two commits must not write the same draft file at once.
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
            ready = self._ready_partitions()
            if not ready:
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
                    if isinstance(line, BadLine):
                        partition.pass_over(line.end_offset)
                    else:
                        marks.reach("filelog.handed_out")
                        yield line.value, partition.hand_out(line.offset, line.end_offset)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Commit the batch up to its first failed line; if there is one, rewind to it."""
        async with self._committing:
            partition = self._partitions[batch[0].broker_payload.partition]
            verdict = partition.judge(batch)
            was_full = partition.in_flight >= self._in_flight_max
            if verdict.failed_at is not None:
                # Before the commit, so that lines behind the failed one are not handed out in vain while it runs.
                partition.rewind(verdict.failed_at, trio.current_time())
                _log.warning("line failed, partition rewound", **self._named(partition), offset=verdict.failed_at)
            else:
                partition.in_flight -= verdict.resolved
            if verdict.rejections:
                await self._in_thread(partial(self._record_rejections, verdict))
            await self._commit(partition, verdict.commit_to)
        if was_full or verdict.failed_at is not None:
            self._wake()

    def get_advance_lane(self, broker_payload: FileLogPosition) -> str:
        """Return the partition: the lines of one file are committed in order; files do not wait for one another."""
        return broker_payload.partition

    def event_key(self, broker_payload: FileLogPosition) -> str:
        """Return the log's identity, the file and the byte offset, which always identify the same line (I2)."""
        return storage.event_key(self._log_id, broker_payload.partition, broker_payload.offset)

    async def aclose(self) -> None:
        """Stop watching and release the group's lock; may be called twice."""
        inotify, self._inotify = self._inotify, None
        if inotify is not None:
            trio.lowlevel.notify_closing(inotify.fileno())
            inotify.close()
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is not None:
            os.close(lock_fd)

    # --- opening -----------------------------------------------------------------------------

    async def _open(self) -> None:
        self._log_id = await self._in_thread(partial(storage.ensure_log_id, self._folder))
        await self._lock()
        # Only the holder of the lock may read the offsets: until then, another process may still commit.
        self._offsets = await self._in_thread(partial(storage.load_offsets, self._folder, self._group, self._log_id))
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
        """Mark the partitions that inotify reports; anything but growth of a known partition requires a rescan."""
        assert self._inotify is not None
        for event in self._inotify.read(timeout=0):
            partition = self._partitions.get(event.name.removesuffix(storage.PARTITION_SUFFIX))
            if event.mask & flags.MODIFY and event.name.endswith(storage.PARTITION_SUFFIX) and partition is not None:
                partition.dirty = True
            elif not event.name or event.name.endswith(storage.PARTITION_SUFFIX):
                # An event without a name is about the folder itself, or says that the kernel's queue overflowed.
                self._rescan_due = True

    async def _rescan(self) -> None:
        self._rescan_due = False
        sizes = await self._in_thread(partial(storage.scan, self._folder), abandon=True)
        for name, partition in list(self._partitions.items()):
            if name not in sizes and partition.position == partition.generation == 0:
                del self._partitions[name]  # none of its lines was ever handed out
            elif sizes.get(name) != partition.position:
                partition.dirty = True  # if the file was removed or shortened, the read raises the error
        for name in sorted((sizes.keys() | self._offsets.keys()) - self._partitions.keys()):
            self._partitions[name] = Partition(
                name,
                self._offsets.get(name, 0),
                rewind_delay_s=self._rewind_delay_s,
                rewind_delay_max_s=self._rewind_delay_max_s,
            )
        self._rescan_at = trio.current_time() + self._rescan_interval_s

    def _ready_partitions(self) -> list[Partition]:
        return [partition for partition in self._partitions.values() if self._is_ready(partition)]

    def _is_ready(self, partition: Partition) -> bool:
        return self._is_wanted(partition) and partition.not_before <= trio.current_time()

    def _is_wanted(self, partition: Partition) -> bool:
        return partition.dirty and partition.in_flight < self._in_flight_max

    async def _wait_for_change(self) -> None:
        """Wait until inotify reports a change, a rewound partition or a rescan is due, or `_wake` is called."""
        assert self._inotify is not None
        deadline = self._rescan_at
        for partition in self._partitions.values():
            if self._is_wanted(partition):
                deadline = min(deadline, partition.not_before)
        with trio.CancelScope(deadline=deadline) as self._nap:
            await trio.lowlevel.wait_readable(self._inotify.fileno())
        self._nap = None

    def _wake(self) -> None:
        if self._nap is not None:
            self._nap.cancel()

    async def _read(self, partition: Partition) -> Sequence[storage.Line | BadLine]:
        generation = partition.generation
        partition.dirty = False
        chunk = await self._in_thread(
            partial(
                storage.read_lines,
                storage.partition_path(self._folder, partition.name),
                partition.position,
                line_bytes_max=self._line_bytes_max,
                scanned_to=partition.scanned_to,
                inode=partition.inode,
            ),
            abandon=True,
        )
        partition.inode = chunk.inode
        if partition.generation != generation:
            return ()  # rewound during the read; the rewind has marked it for another read
        partition.scanned_to = chunk.scanned_to
        partition.dirty = partition.dirty or not chunk.at_end
        bad = [line for line in chunk.lines if isinstance(line, BadLine) and not partition.is_recorded(line.offset)]
        if bad:
            await self._pass_over(partition, bad)
            if partition.generation != generation:
                return ()
        return chunk.lines

    async def _pass_over(self, partition: Partition, lines: list[BadLine]) -> None:
        async with self._committing:
            await self._in_thread(partial(self._record_bad_lines, partition.name, lines))
            partition.open_gaps((line.offset, line.end_offset) for line in lines)
            bad = lines[0]
            _log.warning(
                "bad lines passed over",
                **self._named(partition),
                lines=len(lines),
                offset=bad.offset,
                reason=bad.reason,
            )
            await self._commit(partition, partition.past_gaps(partition.committed))

    # --- committing (in the _committing lock) --------------------------------------------------

    async def _commit(self, partition: Partition, offset: int) -> None:
        if offset == partition.committed:
            return
        offsets = {**self._offsets, partition.name: offset}
        await self._in_thread(partial(storage.store_offsets, self._folder, self._group, self._log_id, offsets))
        self._offsets = offsets
        partition.commit(offset)

    def _record_rejections(self, verdict: Verdict) -> None:
        records = []
        for position, outcome in verdict.rejections:
            path = storage.partition_path(self._folder, position.partition)
            text = storage.read_text(path, position.offset, position.end_offset)
            total = outcome.acked + outcome.rejected
            reason = f"rejected by {outcome.rejected} of {total} subscribers"
            records.append(self._rejected(position.partition, position.offset, position.end_offset, reason, text))
        self._record(records)

    def _record_bad_lines(self, partition: str, lines: list[BadLine]) -> None:
        self._record(
            self._rejected(partition, line.offset, line.end_offset, line.reason, storage.text_of(line.head))
            for line in lines
        )

    def _record(self, lines: Iterable[RejectedLine]) -> None:
        """Append to the rejected lines, except those that an earlier reader has recorded and not committed."""
        if new := [line for line in lines if line.key not in self._recorded]:
            storage.append_rejected(self._folder, self._group, new)

    def _rejected(self, partition: str, offset: int, end_offset: int, reason: str, text: str) -> RejectedLine:
        key = storage.event_key(self._log_id, partition, offset)
        return RejectedLine(key, partition, offset, end_offset, reason, text)

    def _named(self, partition: Partition) -> dict[str, str]:
        return {"path": self._folder, "partition": partition.name, "group": self._group}

    async def _in_thread(self, call: Callable[[], _T], *, abandon: bool = False) -> _T:
        """Run a blocking call. Only pure reads may be abandoned: a commit that continues after the lock was released
        could overwrite a newer one."""
        return await trio.to_thread.run_sync(call, abandon_on_cancel=abandon, limiter=self._threads)


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
        limits = {name: kwargs[name] for name in ("line_bytes_max", "lock_timeout_s") if name in kwargs}
        return FileLogProducer(kwargs["path"], kwargs["group"], **limits)
