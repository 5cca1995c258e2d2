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

Lines that are not JSON are never handed out. Once they are recorded they are *gaps*, which ``committed`` jumps over
when it reaches them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headgate.brokers.filelog_storage import FileLogError

if TYPE_CHECKING:
    from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome

REWIND_DELAY_S = 0.1  # a line that fails is handed out again after this long, then after twice as long, ...
REWIND_DELAY_MAX_S = 30.0  # ... up to this: one line that always fails costs next to nothing


class FileLogPosition(msgspec.Struct, frozen=True):
    """Identifies one line that was handed out: the ``broker_payload`` of the stream. Offsets in bytes."""

    partition: str
    offset: int
    end_offset: int
    generation: int


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
    """One partition, as one producer reads it."""

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
        self.rewinds = 0
        # Set by the reader, and kept between two reads.
        self.dirty = True
        self.not_before = float("-inf")
        self.scanned_to = 0
        self.inode = 0
        self._rewind_delay_s = rewind_delay_s
        self._rewind_delay_max_s = rewind_delay_max_s
        self._rewound_to: int | None = None
        self._rewinds_there = 0
        self._recorded_to = 0
        self._gaps: OrderedDict[int, int] = OrderedDict()

    def hand_out(self, offset: int, end_offset: int) -> FileLogPosition:
        """Count one line as in flight and move the reading position past it."""
        self.position = end_offset
        self.in_flight += 1
        return FileLogPosition(self.name, offset, end_offset, self.generation)

    def pass_over(self, end_offset: int) -> None:
        """Move the reading position past a bad line."""
        self.position = max(self.position, end_offset)

    def is_recorded(self, offset: int) -> bool:
        """Return whether the bad line at this offset is recorded already: after a rewind it is read again."""
        return offset < self._recorded_to

    def open_gaps(self, spans: Iterable[tuple[int, int]]) -> None:
        """Let ``committed`` pass over these spans from now on: the bad lines in them are durably recorded."""
        for offset, end_offset in spans:
            last = next(reversed(self._gaps), None)
            # Adjacent gaps are merged, so that there are never more gaps than lines in flight between them.
            start = last if last is not None and self._gaps[last] == offset else offset
            self._gaps[start] = end_offset
            self._recorded_to = end_offset

    def past_gaps(self, offset: int) -> int:
        """Return the offset to commit for all before ``offset``: the end of the gap, if one begins there."""
        return self._gaps.get(offset, offset)

    def judge(self, batch: Sequence[AdvanceItem]) -> Verdict:
        """Decide what to commit, to record and to rewind for a batch of outcomes; nothing changes.

        A line counts as failed, and is delivered again, if a subscriber failed on it or if it had no subscriber. It
        counts as rejected if a subscriber rejected it and none failed. Raises FileLogError if the batch does not start
        at the end of the last one, because committing it could skip a line.
        """
        commit_to = self.past_gaps(self.committed)
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
            commit_to = self.past_gaps(position.end_offset)
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
        self.rewinds += 1
        self.dirty = True

    def commit(self, offset: int) -> None:
        """Set the committed offset, which is stored durably now."""
        if offset < self.committed:
            raise FileLogError(f"partition {self.name!r}: a commit went back from {self.committed:,} to {offset:,}")
        self.committed = offset
        # After a rewind, a commit may jump over gaps that were not read again yet. Only gaps lie in between.
        self.pass_over(offset)
        while self._gaps and next(iter(self._gaps)) < offset:
            self._gaps.popitem(last=False)
