"""A captured log played again: does this headgate say, and store, what that one said and stored?

The runner's side of the log is given to a fresh supervisor core on a fresh database. Every answer is compared with the
recorded one, and every row with what the runner had reported. So a log that was taken in production is a test.

What a log cannot tell is not compared: times, the grouping of what came after different waits, whether a round was
stored that nobody lived to answer. A payload that was changed in the log, with its CRC put right, makes another log
that is as good as the first: nothing in it contradicts the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headgate.protocol.framelog.log import Record, describe
from headgate.protocol.link.runner_dialect import Direction
from headgate.protocol.link.wire import encode_message
from headgate.supervisor.replay.database import DatabaseNotFresh, ReplayStore, open_replay_store
from headgate.supervisor.replay.log import Frame, LogIncomplete, Outlook, Passed, Unreadable, look_ahead, read_log
from headgate.supervisor.replay.rows import Rows
from headgate.supervisor.replay.sitting import Differs, ReplayStuck, Sitting

__all__ = [
    "DatabaseNotFresh",
    "Difference",
    "LogIncomplete",
    "Outlook",
    "ReplayStore",
    "ReplayStuck",
    "Replayed",
    "look_ahead",
    "open_replay_store",
    "replay",
]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay first differs from its log.

    ``frame`` counts from 1; ``recorded`` is that frame, and ``replayed`` what the replay said in its place, each
    as `headgate.protocol.framelog.log.describe` shows it. None: there is nothing to show.
    """

    frame: int
    path: str
    offset: int
    problem: str
    recorded: str | None
    replayed: str | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay. ``frames`` were played; ``skipped`` ones came before the first `Hello`.

    ``sittings`` are supervisors, ``runners`` incarnations, ``torn`` records that a crash cut off. ``rows`` are in
    the database, ``redelivered`` events came again, ``dead_letters`` could not be stored. Without a ``difference``
    the log replays clean.
    """

    frames: int
    skipped: int
    torn: int
    sittings: int
    runners: int
    rows: int
    redelivered: int
    dead_letters: int
    difference: Difference | None

    @property
    def is_clean(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None


def replay(
    paths: Sequence[Path],
    store: ReplayStore,
    *,
    outlook: Outlook | None = None,
    until: int | None = None,
    on_frame: Callable[[int], object] | None = None,
) -> Replayed:
    """Replay the files of one log, in the order they were written, on a fresh store.

    It ends at the first difference, or behind frame ``until``, with the database as it is then. ``on_frame`` is
    called with the number of each frame played. Raises `FrameLogError` for a file that is no frame log,
    `LogIncomplete`, `ReplayStuck`, `StoreError` and OSError.
    """
    return _Replay(store, look_ahead(paths) if outlook is None else outlook).run(paths, until, on_frame)


class _Replay:
    def __init__(self, store: ReplayStore, outlook: Outlook) -> None:
        self._store = store
        self._outlook = outlook
        self._rows = Rows(store)
        self._run_ids: dict[str, str] = {}
        self._sitting: Sitting | None = None
        self._sitting_number = -1
        self._runners: set[tuple[int, int]] = set()
        self._passed = Passed()
        self._frames = 0
        self._sittings = 0

    def run(self, paths: Sequence[Path], until: int | None, on_frame: Callable[[int], object] | None) -> Replayed:
        last: Frame | None = None
        for item in read_log(paths, self._passed):
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
            return self._result(None)
        try:
            self._end_sitting()
            problem = self._rows.check_totals()
            if problem is not None:
                raise Differs(problem)
        except Differs as differs:
            return self._result(_difference(last, differs))
        return self._result(None)

    def _follow(self, frame: Frame) -> None:
        self._store.time = frame.record.time
        if frame.sitting != self._sitting_number:
            self._end_sitting()
            self._sitting_number = frame.sitting
            self._sittings += 1
            self._sitting = Sitting(frame.sitting, self._store, self._rows, self._outlook, self._run_ids)
        assert self._sitting is not None
        self._runners.add((frame.sitting, frame.record.incarnation))
        self._frames += 1
        self._sitting.follow(frame)

    def _end_sitting(self) -> None:
        if self._sitting is not None:
            self._sitting.end()
            self._sitting = None

    def _result(self, difference: Difference | None) -> Replayed:
        return Replayed(
            frames=self._frames,
            skipped=self._passed.skipped,
            torn=self._passed.torn,
            sittings=self._sittings,
            runners=len(self._runners),
            rows=self._rows.stored,
            redelivered=self._rows.redelivered,
            dead_letters=self._rows.buried,
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
