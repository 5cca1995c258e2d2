"""State of one partition of a file log: which lines are handed out, the offset to commit, the offset to rewind to.

Pure and synchronous: no file, no clock, no trio. The idea, in offsets of one partition's file::

      0 ........ committed ...... failed ................ position ....... end of file
      │ resolved │ handed out,    │ handed out, but will  │ not read yet
      │ for good │ unresolved     │ be handed out again   │

Outcomes arrive in the order in which lines were handed out (a lane's contract, I3). As long as they are accepted or
rejected, ``committed`` follows them. The first failed one stops it: the position goes back to that line, and the
partition's **generation** is incremented. Lines handed out before carry an older generation, and their outcomes are
ignored: those lines are handed out again, and events already stored are recognised by their keys (I2). So
``committed`` never passes an offset that is unresolved or failed.

A partition is read file by file: if its file is renamed and another one begins under its name, the first is read to
its end before the second. `LogFile` is one file of a partition, with all that identifies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headgate.brokers.filelogs.reading import BadLine, Chunk, Found, Known, Line, seal_of
from headgate.brokers.filelogs.storage import PARTITION_SUFFIX, FileEntry, FileLogError, Seal

if TYPE_CHECKING:
    from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome

REWIND_DELAY_S = 0.1  # a line that fails is handed out again after this long, then after twice as long, ...
REWIND_DELAY_MAX_S = 30.0  # ... up to this: one line that always fails costs next to nothing


class FileLogPosition(msgspec.Struct, frozen=True):
    """Identifies one line that was handed out: the ``broker_payload`` of the stream. Offsets in bytes.

    ``file`` is the id of the file, ``crc`` the CRC-32 of the end of the line.
    """

    partition: str
    offset: int
    end_offset: int
    generation: int
    file: str = ""
    crc: int = 0


class Rejection(NamedTuple):
    """One line that every subscriber resolved and at least one rejected."""

    position: FileLogPosition
    outcome: AdvanceOutcome


class Verdict(NamedTuple):
    """Result of `Partition.judge`: what to commit, to record and to rewind.

    ``commit_to`` is the offset that may be committed once ``rejections`` are recorded. ``failed_at`` is the offset
    to rewind to, or None. ``resolved`` counts the items of the current generation that need no further delivery.
    """

    commit_to: int
    rejections: list[Rejection]
    failed_at: int | None
    resolved: int


class Partition:
    """One file of a partition, as one producer reads it."""

    def __init__(
        self,
        name: str,
        committed: int,
        *,
        rewind_delay_s: float = REWIND_DELAY_S,
        rewind_delay_max_s: float = REWIND_DELAY_MAX_S,
    ) -> None:
        self.name = name
        self.committed = committed
        self.position = committed
        self.generation = 0
        self.in_flight = 0
        # Set by the reader, and kept between two reads.
        self.dirty = True
        self.not_before = float("-inf")
        self.scanned_to = 0
        self._rewind_delay_s = rewind_delay_s
        self._rewind_delay_max_s = rewind_delay_max_s
        self._rewound_to: int | None = None
        self._rewinds_there = 0

    def hand_out(self, offset: int, end_offset: int) -> FileLogPosition:
        """Count one line as in flight and move the reading position past it."""
        self.position = end_offset
        self.in_flight += 1
        return FileLogPosition(self.name, offset, end_offset, self.generation)

    def judge(self, batch: Sequence[AdvanceItem]) -> Verdict:
        """Decide what to commit, to record and to rewind for a batch of outcomes; nothing changes.

        A line counts as failed, and is delivered again, if a subscriber failed on it or if it had no subscriber. It
        counts as rejected if a subscriber rejected it and none failed. Raises FileLogError if the batch does not start
        at the end of the last one, because committing it could skip a line.
        """
        commit_to = self.committed
        rejections: list[Rejection] = []
        resolved = 0
        for position, outcome in batch:
            if position.generation != self.generation:
                continue
            if position.offset != commit_to:
                raise FileLogError(
                    f"partition {self.name!r}: expected the outcome for offset {commit_to:,}, got the one for "
                    f"{position.offset:,}; committing it would skip a line"
                )
            if outcome.failed or not (outcome.acked or outcome.rejected):
                return Verdict(commit_to, rejections, position.offset, resolved)
            if outcome.rejected:
                rejections.append(Rejection(position, outcome))
            resolved += 1
            commit_to = position.end_offset
        return Verdict(commit_to, rejections, None, resolved)

    def rewind(self, offset: int, now: float) -> None:
        """Continue reading at ``offset``, after a delay that doubles each time the same line fails.

        ``now`` and ``not_before`` are in seconds of the caller's clock.
        """
        self._rewinds_there = self._rewinds_there + 1 if offset == self._rewound_to else 1
        self._rewound_to = offset
        # The exponent is bounded, because 2.0**1024 raises OverflowError.
        delay = self._rewind_delay_s * 2.0 ** min(self._rewinds_there - 1, 64)
        self.not_before = now + min(delay, self._rewind_delay_max_s)
        self.position = offset
        self.scanned_to = 0
        self.generation += 1
        self.in_flight = 0
        self.dirty = True

    def commit(self, offset: int) -> None:
        """Set the committed offset, which is stored durably now."""
        if offset < self.committed:
            raise FileLogError(f"partition {self.name!r}: a commit went back from {self.committed:,} to {offset:,}")
        self.committed = offset


class LogFile(Partition):
    """One file of a partition: its books, and all by which it is found again.

    ``key_prefix``: the beginning of the event keys of its lines. ``has_ended``: the last read found no further whole
    line. ``is_suspect``: another look must find it before it is read again.
    """

    def __init__(self, entry: FileEntry, key_prefix: str, *, rewind_delay_s: float, rewind_delay_max_s: float) -> None:
        super().__init__(
            entry.partition, entry.offset, rewind_delay_s=rewind_delay_s, rewind_delay_max_s=rewind_delay_max_s
        )
        self.entry = entry  # as it is stored
        self.file_name = entry.name
        self.inode = entry.inode
        self.seen = entry.seen
        self.mtime = entry.mtime
        self.size = -1  # at the last read
        self.length = 0  # at the last read or look
        self.is_rotated = entry.is_rotated
        self.is_suspect = True
        self.has_ended = False
        self.id = entry.id
        self.key_prefix = key_prefix
        self._last_committed = self._start = entry.last
        self._last_taken: Line | BadLine | None = None  # since the reader has begun at the line after ``_start``

    @property
    def is_at_home(self) -> bool:
        """Whether the file is under the name of its partition."""
        return self.file_name == self.name + PARTITION_SUFFIX

    @property
    def is_settled(self) -> bool:
        """Whether all its lines were read and committed."""
        return self.has_ended and not self.dirty and self.committed == self.position

    def take(self, line: Line | BadLine) -> FileLogPosition:
        """Hand one line out, as `hand_out` does."""
        offset, end_offset, crc = line[:3]
        self.position = end_offset
        self.in_flight += 1
        self._last_taken = line
        return FileLogPosition(self.name, offset, end_offset, self.generation, self.id, crc)

    def note_read(self, chunk: Chunk) -> None:
        """Remember what a read from the reading position has found."""
        self.scanned_to = chunk.scanned_to
        self.dirty = self.dirty or not chunk.at_end
        self.has_ended = chunk.at_end
        self.size, self.mtime = chunk.size, chunk.mtime
        self.length = chunk.size
        end = chunk.lines[-1].end_offset if chunk.lines else self.position
        # A last line without a newline may be taken back by its writer.
        self.seen = end if chunk.at_end else max(self.seen, chunk.size)

    def place(self, found: Found) -> None:
        """Take note of where a look has found it."""
        if found.name != self.file_name or found.status.inode != self.inode or self.is_suspect:
            self.dirty = True
        self.file_name, self.inode = found.name, found.status.inode
        self.is_suspect = False
        self.length = found.status.size
        if found.status.size != self.size:
            self.dirty = True

    def known(self) -> Known:
        """Return what a look needs to find it again."""
        return Known(
            self.id,
            self.name,
            self.file_name,
            self.inode,
            self.entry.head,
            self.position,
            self.seal(),
            self.seen,
            self.mtime,
            self.is_rotated,
            self.is_suspect,
            is_done=self.committed >= self.seen,
        )

    def seal(self) -> Seal:
        """Return the seal of the line before the reading position."""
        last = self._last_taken
        return self._start if last is None else seal_of(*last[:3])

    def entry_at(self, offset: int, last: Seal) -> FileEntry:
        """Return what is stored if ``offset`` is committed, and ``last`` is the seal of the line before it."""
        return msgspec.structs.replace(
            self.entry,
            name=self.file_name,
            inode=self.inode,
            offset=offset,
            last=last,
            seen=self.seen,
            mtime=self.mtime,
            is_rotated=self.is_rotated,
        )

    def committed_entry(self) -> FileEntry:
        """Return what is stored."""
        return self.entry_at(self.committed, self._last_committed)

    def seal_before(self, offset: int, batch: Sequence[AdvanceItem]) -> Seal:
        """Return the seal of the line before ``offset``: one of the batch, or that before the committed offset."""
        for position, _ in reversed(batch):
            if position.end_offset == offset and position.generation == self.generation:
                return seal_of(position.offset, offset, position.crc)
        return self._last_committed

    def rewind_to(self, offset: int, last: Seal, now: float) -> None:
        """Continue reading at ``offset``, like `rewind`; ``last`` is the seal of the line before it."""
        self.rewind(offset, now)
        self._last_taken, self._start = None, last

    def commit_to(self, offset: int, last: Seal) -> None:
        """Set the committed offset, like `commit`; ``last`` is the seal of the line before it."""
        self.commit(offset)
        self._last_committed = last
