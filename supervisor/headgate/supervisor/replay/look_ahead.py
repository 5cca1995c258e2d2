"""Facts about a whole log that a replay has to know before the frame that shows them.

Which triggers a runner will be given; whether a round that was never answered was stored; why a trigger was cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from headgate.protocol.link.runner_dialect import Direction
from headgate.protocol.messages.queries import Response, StoredEvent
from headgate.protocol.messages.runner import Drain, RunnerSettings, StateChanges, StateSync, TriggerSpec, Welcome
from headgate.supervisor.replay.log import Frame, SkippedFrames, Unreadable, read_log

EventName = tuple[str, int]  # trigger_run_id and sequence_index


class RunnerName(NamedTuple):
    """One runner of a log: the number of its supervisor, and its incarnation."""

    supervisor: int
    incarnation: int


@dataclass(slots=True)
class LogIndex:
    """Facts about a whole log, collected before it is replayed.

    ``first_starts`` holds, for each runner, the first complete `StateSync` that started triggers, unless one before it
    named absent subscribers. ``changed`` holds, by the number of the frame that ended its run and by its id, each
    trigger that a user has changed or restarted, as it was started next. ``named`` is the number of the last frame in
    which the supervisor started, cancelled or awaited a trigger. ``elsewhere`` are the runs of triggers that were left
    to another supervisor when their stream was described. ``shown`` holds the events in responses to `LastEvent`, each
    with the number of the last frame that shows it. ``runs`` are the trigger runs whose start is in the log.
    """

    frames: int = 0
    supervisors: int = 0
    settings: dict[int, RunnerSettings] = field(default_factory=dict)
    drain_s: dict[int, float] = field(default_factory=dict)
    first_starts: dict[RunnerName, StateSync] = field(default_factory=dict)
    changed: dict[tuple[int, int], TriggerSpec] = field(default_factory=dict)
    named: dict[int, int] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    shown: dict[EventName, int] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)


def look_ahead(paths: Sequence[Path]) -> LogIndex:
    """Read the log once. Raises as `headgate.supervisor.replay.log.read_log` does."""
    index = LogIndex()
    pieces = Pieces()
    reassigned = _Reassigned(index)
    described = _Described(index)
    has_begun: set[RunnerName] = set()  # runners with a `StateSync` that starts triggers or names absent ones
    for item in read_log(paths, SkippedFrames()):
        index.frames = item.number
        if isinstance(item, Unreadable):
            break
        index.supervisors = item.supervisor + 1
        runner = RunnerName(item.supervisor, item.record.incarnation)
        if item.record.direction is Direction.FROM_RUNNER:
            if isinstance(item.message, StateChanges):
                reassigned.report(runner, item.message)
                described.report(runner, item.message)
            continue
        match item.message:
            case Welcome():
                index.settings.setdefault(item.supervisor, item.message.settings)
            case Drain():
                index.drain_s.setdefault(item.supervisor, item.message.deadline_s)
            case Response(result=StoredEvent() as event):
                index.shown[event.trigger_run_id, event.sequence_index] = item.number
            case StateSync():
                _take_names(index, item, item.message)
                sync = pieces.join(runner, item.message)
                if sync is None:
                    continue
                reassigned.sync(runner, item.number, sync)
                described.sync(runner, sync)
                if runner not in has_begun and (sync.to_create or sync.absent):
                    has_begun.add(runner)
                    if sync.to_create:
                        index.first_starts[runner] = sync
            case _:
                pass
    described.end()
    return index


def _take_names(index: LogIndex, frame: Frame, sync: StateSync) -> None:
    index.runs.update(spec.trigger_run_id for spec in sync.to_create)
    for parts in (sync.to_create, sync.to_cancel, sync.absent):
        index.named.update((part.trigger_id, frame.number) for part in parts)


class Pieces:
    """Joins the pieces of each `StateSync` that is too long for one frame."""

    def __init__(self) -> None:
        self._runner: RunnerName | None = None
        self.open: StateSync | None = None  # the pieces so far of one that is not complete

    def join(self, runner: RunnerName, sync: StateSync) -> StateSync | None:
        """Return the whole message, None if more pieces are to come. Pieces of another runner are dropped."""
        before = self.open if runner == self._runner else None
        if before is not None:
            lists = {name: getattr(before, name) for name in sync.__struct_fields__}
            joined = {name: old + getattr(sync, name) for name, old in lists.items() if isinstance(old, tuple)}
            sync = msgspec.structs.replace(sync, **joined)
        self._runner = runner
        self.open = sync if sync.more else None
        return None if sync.more else sync


class _Cancelled(msgspec.Struct):
    """A trigger whose run was cancelled as "reassigned".

    Its next start is due with the answer to the ``round`` that reported its end, or with the start of another runner.
    """

    frame: int
    runner: RunnerName
    is_awaited: bool  # its stream waits for it
    round: int | None = None
    is_due: bool = False


class _Reassigned:
    """Finds those cancelled triggers that were started again as soon as their run had ended: a user has changed them.

    One that a user has paused is cancelled in the same way, and started later, or never. If its stream waits for it, no
    user has paused it, and so its next start counts however late it is: the stream may wait for other triggers, too.
    """

    def __init__(self, index: LogIndex) -> None:
        self._index = index
        self._cancelled: dict[int, _Cancelled] = {}

    def report(self, runner: RunnerName, changes: StateChanges) -> None:
        """Take a round, which may report the ends of runs."""
        ended = [run.trigger_id for run in changes.finished] + [run.trigger_id for run in changes.described]
        for trigger_id in ended:
            cancelled = self._cancelled.get(trigger_id)
            if cancelled is not None and cancelled.runner == runner and cancelled.round is None:
                cancelled.round = changes.round

    def sync(self, runner: RunnerName, frame: int, sync: StateSync) -> None:
        """Take a message of the supervisor that is complete."""
        for spec in sync.to_create:
            cancelled = self._cancelled.pop(spec.trigger_id, None)
            if cancelled is not None and (cancelled.is_awaited or cancelled.is_due or cancelled.runner != runner):
                self._index.changed[cancelled.frame, spec.trigger_id] = spec
        self._forget_late(runner, sync)
        if not sync.lease_lost:
            absent = {subscriber.trigger_id for subscriber in sync.absent}
            for cancel in sync.to_cancel:
                self._cancelled.pop(cancel.trigger_id, None)
                if cancel.reason == "reassigned":
                    is_awaited = cancel.trigger_id in absent
                    self._cancelled[cancel.trigger_id] = _Cancelled(frame, runner, is_awaited)

    def _forget_late(self, runner: RunnerName, sync: StateSync) -> None:
        """Forget those that were not started when their start was due."""
        for trigger_id, cancelled in list(self._cancelled.items()):
            if cancelled.runner != runner:
                is_late = bool(sync.to_create)
            else:
                is_late = cancelled.is_due and sync.round != 0
                cancelled.is_due = cancelled.is_due or (sync.round != 0 and sync.round == cancelled.round)
            if is_late and not cancelled.is_awaited:
                del self._cancelled[trigger_id]


class _Left(msgspec.Struct):
    """A trigger whose stream was described in a ``round``, and that has not been started since."""

    run: str
    stream: str
    round: int
    rounds_since: int = 0  # that were answered after that one


class _Described:
    """Finds the triggers that were not started after their description, because another supervisor owns their stream.

    Either they are not started again by this supervisor, or it claims their whole stream later, with others of it.
    """

    def __init__(self, index: LogIndex) -> None:
        self._index = index
        self._supervisor = 0
        self._left: dict[int, _Left] = {}
        self._started: set[int] = set()  # by this supervisor

    def report(self, runner: RunnerName, changes: StateChanges) -> None:
        """Take a round, which may describe triggers."""
        self._follow(runner)
        for one in changes.described:
            if one.stream:
                self._left[one.trigger_id] = _Left(one.trigger_run_id, one.stream, changes.round)

    def sync(self, runner: RunnerName, sync: StateSync) -> None:
        """Take a message of the supervisor that is complete."""
        self._follow(runner)
        claimed = {spec.stream for spec in sync.to_create if spec.trigger_id not in self._started}
        for spec in sync.to_create:
            left = self._left.pop(spec.trigger_id, None)
            if left is not None and left.stream == spec.stream and spec.stream in claimed:
                self._index.elsewhere.add(left.run)
        self._started.update(spec.trigger_id for spec in sync.to_create)
        for cancel in sync.to_cancel:
            self._left.pop(cancel.trigger_id, None)
        for left in self._left.values():
            left.rounds_since += sync.round not in (0, left.round)

    def end(self) -> None:
        """Take the end of a supervisor. If it came soon after a description, it says nothing."""
        self._index.elsewhere.update(left.run for left in self._left.values() if left.rounds_since > 1)
        self._left.clear()
        self._started.clear()

    def _follow(self, runner: RunnerName) -> None:
        if runner.supervisor != self._supervisor:
            self.end()
            self._supervisor = runner.supervisor
