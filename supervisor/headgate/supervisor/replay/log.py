"""Reads a captured log for a replay: its frames in order, and the supervisor that wrote each of them.

One folder may hold the captures of several supervisors: each begins with a file of part 0 and counts on as its files
rotate. If the first files of a log were rotated away, the frames before the first `Hello` are skipped.

`look_ahead` reads the log once before it is replayed, because a replay has to know some facts before the frame that
shows them: which triggers a runner will be given, and whether a round that was never answered was stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.framelog.file import read_part
from headgate.protocol.framelog.log import Damaged, Record, Torn, read_frames
from headgate.protocol.link.runner_dialect import Direction, Message
from headgate.protocol.messages.queries import Response, StoredEvent
from headgate.protocol.messages.runner import Drain, Hello, RunnerSettings, StateSync, TriggerSpec, Welcome

EventName = tuple[str, int]  # trigger_run_id and sequence_index


class LogIncomplete(Exception):
    """The files are not one complete log: one is missing in the middle, or two supervisors wrote them at once."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. ``number`` counts all frames of the log from 1, ``supervisor`` the supervisors from 0."""

    number: int
    path: Path
    supervisor: int
    record: Record
    message: Message


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that was changed after it was written; ``record`` is None if its CRC is wrong."""

    number: int
    path: Path
    offset: int
    record: Record | None
    problem: str


@dataclass(slots=True)
class SkippedFrames:
    """Counts of frames that `read_log` did not yield: ``skipped`` before the first `Hello`, and ``torn`` by a crash."""

    skipped: int = 0
    torn: int = 0


@dataclass(slots=True)
class LogIndex:
    """Facts about a whole log, collected before it is replayed.

    ``first_created`` holds, for each incarnation of each supervisor, the triggers of the first complete `StateSync`
    that started any. ``shown`` holds the events in responses to `LastEvent`, each with the number of the last frame
    that shows it. ``runs`` are the trigger runs whose start is in the log.
    """

    frames: int = 0
    supervisors: int = 0
    settings: dict[int, RunnerSettings] = field(default_factory=dict)
    drain_s: dict[int, float] = field(default_factory=dict)
    first_created: dict[tuple[int, int], tuple[TriggerSpec, ...]] = field(default_factory=dict)
    shown: dict[EventName, int] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)


def read_log(paths: Sequence[Path], skipped: SkippedFrames) -> Iterator[Frame | Unreadable]:
    """Yield the frames of the files, which are in the order they were written; ends with the first `Unreadable`.

    Torn ends of files, which a crash leaves behind, are counted in ``skipped``. Raises `FrameLogError` for a file
    that is not a frame log, `LogIncomplete`, and OSError.
    """
    number = 0
    supervisor = -1
    part_before: int | None = None
    within = False  # in the middle of a conversation whose beginning is not in the log
    for path in paths:
        part = read_part(path) or 0
        if part == 0:
            supervisor, within = supervisor + 1, False
        elif part_before is None:
            supervisor, within = supervisor + 1, True
        elif part != part_before + 1:
            raise LogIncomplete(f"{path} is part {part} of a log, and the file before it is part {part_before}")
        part_before = part
        for item in read_frames(path):
            if isinstance(item, Torn):
                skipped.torn += 1
                continue
            number += 1
            if isinstance(item, Damaged):
                yield Unreadable(number, path, item.offset, None, item.problem)
                return
            try:
                message = item.message()
            except RemoteProtocolError as error:
                # A frame that cannot be decoded is never recorded: this one was changed later.
                yield Unreadable(number, path, item.offset, item, str(error))
                return
            within = within and not isinstance(message, Hello)
            if within:
                skipped.skipped += 1
            else:
                yield Frame(number, path, supervisor, item, message)


def look_ahead(paths: Sequence[Path]) -> LogIndex:
    """Read the log once. Raises as `read_log` does."""
    index = LogIndex()
    # The pieces, so far, of a StateSync that is too long for one frame: its incarnation, and the triggers in it.
    open_sync: tuple[tuple[int, int], list[TriggerSpec]] | None = None
    for item in read_log(paths, SkippedFrames()):
        index.frames = item.number
        if isinstance(item, Unreadable):
            break
        index.supervisors = item.supervisor + 1
        if item.record.direction is Direction.FROM_RUNNER:
            continue
        match item.message:
            case Welcome():
                index.settings.setdefault(item.supervisor, item.message.settings)
            case Drain():
                index.drain_s.setdefault(item.supervisor, item.message.deadline_s)
            case Response(result=StoredEvent() as event):
                index.shown[event.trigger_run_id, event.sequence_index] = item.number
            case StateSync():
                index.runs.update(spec.trigger_run_id for spec in item.message.to_create)
                where = (item.supervisor, item.record.incarnation)
                if open_sync is None or open_sync[0] != where:
                    open_sync = (where, [])
                open_sync[1].extend(item.message.to_create)
                if not item.message.more:
                    if open_sync[1]:
                        index.first_created.setdefault(where, tuple(open_sync[1]))
                    open_sync = None
            case _:
                pass
    return index
