"""Replays a captured log: does this version of headgate answer and store the same as the one that was captured?

The runner's frames are given to a new supervisor core on an empty database. Every answer is compared with the recorded
one, and every row with the event that the runner reported. So a log that was captured in production is a test.

Facts that a log does not show are not compared: times, the grouping of messages after different waits, whether a round
was stored that was never answered. A payload that was changed in the log, with its CRC put right, is not noticed:
nothing else in the log contradicts the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headgate.protocol.framelog.log import Record, describe
from headgate.protocol.link.runner_dialect import Direction
from headgate.protocol.link.wire import encode_message
from headgate.supervisor.replay.compare import Differs
from headgate.supervisor.replay.database import Act, DatabaseNotFresh, ReplayStore, open_replay_store
from headgate.supervisor.replay.log import (
    Frame,
    LogIncomplete,
    SkippedFrames,
    Unreadable,
    read_log,
)
from headgate.supervisor.replay.look_ahead import LogIndex, look_ahead
from headgate.supervisor.replay.rows import Rows
from headgate.supervisor.replay.supervisor_run import ReplayStuck, SupervisorRun

__all__ = [
    "DatabaseNotFresh",
    "Difference",
    "LogIncomplete",
    "LogIndex",
    "ReplayStore",
    "ReplayStuck",
    "Replayed",
    "look_ahead",
    "open_replay_store",
    "replay",
]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place in which a replay differs from its log.

    ``frame`` counts from 1; ``recorded`` is that frame, and ``replayed`` the message that the replay sent instead, each
    as `headgate.protocol.framelog.log.describe` shows it. None if there is nothing to show.
    """

    frame: int
    path: str
    offset: int
    problem: str
    recorded: str | None
    replayed: str | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay.

    ``frames`` were played, ``skipped`` ones came before the first `Hello`, ``torn`` records were cut off by a crash.
    ``supervisors`` and ``runners`` (incarnations) are counted, as are the ``rows`` in the database, ``redelivered``
    events and ``dead_letters``. ``acts`` are those of users and of other supervisors that were taken from the log, by
    kind: somebody paused, changed or removed a trigger, for example. Without a ``difference`` the log replays clean.
    """

    frames: int
    skipped: int
    torn: int
    supervisors: int
    runners: int
    rows: int
    redelivered: int
    dead_letters: int
    acts: dict[Act, int]
    difference: Difference | None

    @property
    def is_clean(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None


def replay(
    paths: Sequence[Path],
    store: ReplayStore,
    *,
    index: LogIndex | None = None,
    until: int | None = None,
    on_frame: Callable[[int], object] | None = None,
) -> Replayed:
    """Replay the files of one log, in the order they were written, on a fresh store.

    It ends at the first difference, or after frame ``until``, with the database as it is then. ``on_frame`` is called
    with the number of each frame. Raises `FrameLogError` for a file that is not a frame log,
    `LogIncomplete`, `ReplayStuck`, `StoreError` and OSError.
    """
    return _Replay(store, look_ahead(paths) if index is None else index).run(paths, until, on_frame)


class _Replay:
    def __init__(self, store: ReplayStore, index: LogIndex) -> None:
        self._store = store
        self._index = index
        self._rows = Rows(store)
        self._run_ids: dict[str, str] = {}
        self._supervisor: SupervisorRun | None = None
        self._supervisor_number = -1
        self._runners: set[tuple[int, int]] = set()
        self._skipped = SkippedFrames()
        self._frames = 0
        self._supervisors = 0

    def run(self, paths: Sequence[Path], until: int | None, on_frame: Callable[[int], object] | None) -> Replayed:
        last: Frame | None = None
        for item in read_log(paths, self._skipped):
            if until is not None and item.number > until:
                return self._result(None)
            if isinstance(item, Unreadable):
                return self._result(_unreadable(item))
            try:
                self._follow(item)
            except Differs as differs:
                return self._result(_difference(item, differs))
            last = item
            if on_frame is not None:
                on_frame(item.number)
        if last is None:
            if skipped := self._skipped.skipped:
                raise LogIncomplete(f"all of its {skipped:,} frames come before the first Hello: its beginning is gone")
            return self._result(None)
        try:
            self._end_supervisor()
            problem = self._rows.check_totals()
            if problem is not None:
                raise Differs(problem)
        except Differs as differs:
            return self._result(_difference(last, differs))
        return self._result(None)

    def _follow(self, frame: Frame) -> None:
        self._store.time = frame.record.time
        if frame.supervisor != self._supervisor_number:
            self._end_supervisor()
            self._supervisor_number = frame.supervisor
            self._supervisors += 1
            self._supervisor = SupervisorRun(frame.supervisor, self._store, self._rows, self._index, self._run_ids)
        assert self._supervisor is not None
        self._runners.add((frame.supervisor, frame.record.incarnation))
        self._frames += 1
        self._supervisor.follow(frame)

    def _end_supervisor(self) -> None:
        if self._supervisor is not None:
            self._supervisor.end()
            self._supervisor = None

    def _result(self, difference: Difference | None) -> Replayed:
        return Replayed(
            frames=self._frames,
            skipped=self._skipped.skipped,
            torn=self._skipped.torn,
            supervisors=self._supervisors,
            runners=len(self._runners),
            rows=self._rows.stored,
            redelivered=self._rows.redelivered,
            dead_letters=self._rows.dead_letters,
            acts=dict(sorted(self._store.acts.items())),
            difference=difference,
        )


def _difference(frame: Frame, differs: Differs) -> Difference:
    replayed = None
    if differs.replayed is not None:
        record = frame.record
        body = encode_message(differs.replayed)
        as_recorded = Record(record.offset, record.time, Direction.FROM_SUPERVISOR, record.incarnation, body)
        replayed = describe(as_recorded)
    return Difference(
        frame.number, str(frame.path), frame.record.offset, differs.problem, describe(frame.record), replayed
    )


def _unreadable(item: Unreadable) -> Difference:
    shown = None if item.record is None else describe(item.record)
    return Difference(item.number, str(item.path), item.offset, item.problem, shown, None)
