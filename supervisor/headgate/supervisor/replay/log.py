"""A captured log as a replay reads it: frames in order, cut into the lives of the supervisors that wrote them.

A folder of captures may hold several *sittings*: each supervisor that was started on it begins with a file of
part 0 and counts on as its files rotate. Of a log whose first files were rotated away, the conversation that was
under way is passed over: it is taken up at the first `Hello`.

`look_ahead` reads the log once before it is replayed. Whoever replays has to know a few things earlier than
they were said: which triggers a runner is going to be given, and whether a round nobody lived to answer was stored.
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
    """The files are not one whole log: one is missing in the middle, or two supervisors wrote them at once."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. ``number`` counts all frames of the log from 1, ``sitting`` the supervisors from 0."""

    number: int
    path: Path
    sitting: int
    record: Record
    message: Message


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that is not what was written; ``record`` is None where not even its CRC holds."""

    number: int
    path: Path
    offset: int
    record: Record | None
    problem: str


@dataclass(slots=True)
class Passed:
    """What a pass over the log left out, and why: ``skipped`` frames before the first `Hello`, ``torn`` records."""

    skipped: int = 0
    torn: int = 0


@dataclass(slots=True)
class Outlook:
    """What is known of a log before it is replayed.

    ``first_created`` holds, for each incarnation of each sitting, what the first complete `StateSync` that started
    triggers started. ``shown`` holds the events that answers to `LastEvent` showed, each with the number of the
    last frame that did. ``runs`` are the trigger runs the log shows the start of.
    """

    frames: int = 0
    sittings: int = 0
    settings: dict[int, RunnerSettings] = field(default_factory=dict)
    drain_s: dict[int, float] = field(default_factory=dict)
    first_created: dict[tuple[int, int], tuple[TriggerSpec, ...]] = field(default_factory=dict)
    shown: dict[EventName, int] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)


def read_log(paths: Sequence[Path], passed: Passed) -> Iterator[Frame | Unreadable]:
    """Yield the frames of the files, which are in the order they were written; ends with the first `Unreadable`.

    Torn ends of files, which a crash leaves behind, are counted in ``passed``. Raises `FrameLogError` for a file
    that is no frame log, `LogIncomplete`, and OSError.
    """
    number = 0
    sitting = -1
    part_before: int | None = None
    within = False  # in the middle of a conversation whose beginning is not in the log
    for path in paths:
        part = read_part(path) or 0
        if part == 0:
            sitting, within = sitting + 1, False
        elif part_before is None:
            sitting, within = sitting + 1, True
        elif part != part_before + 1:
            raise LogIncomplete(f"{path} is part {part} of a log, and the file before it is part {part_before}")
        part_before = part
        for item in read_frames(path):
            if isinstance(item, Torn):
                passed.torn += 1
                continue
            number += 1
            if isinstance(item, Damaged):
                yield Unreadable(number, path, item.offset, None, item.problem)
                return
            try:
                message = item.message()
            except RemoteProtocolError as error:
                # What cannot be decoded is never recorded: somebody has changed it since.
                yield Unreadable(number, path, item.offset, item, str(error))
                return
            within = within and not isinstance(message, Hello)
            if within:
                passed.skipped += 1
            else:
                yield Frame(number, path, sitting, item, message)


def look_ahead(paths: Sequence[Path]) -> Outlook:
    """Read the log once. Raises as `read_log` does."""
    outlook = Outlook()
    # The pieces of a StateSync too long for one frame, as far as they were read: of which incarnation, and what.
    open_sync: tuple[tuple[int, int], list[TriggerSpec]] | None = None
    for item in read_log(paths, Passed()):
        outlook.frames = item.number
        if isinstance(item, Unreadable):
            break
        outlook.sittings = item.sitting + 1
        if item.record.direction is Direction.FROM_RUNNER:
            continue
        match item.message:
            case Welcome():
                outlook.settings.setdefault(item.sitting, item.message.settings)
            case Drain():
                outlook.drain_s.setdefault(item.sitting, item.message.deadline_s)
            case Response(result=StoredEvent() as event):
                outlook.shown[event.trigger_run_id, event.sequence_index] = item.number
            case StateSync():
                outlook.runs.update(spec.trigger_run_id for spec in item.message.to_create)
                where = (item.sitting, item.record.incarnation)
                if open_sync is None or open_sync[0] != where:
                    open_sync = (where, [])
                open_sync[1].extend(item.message.to_create)
                if not item.message.more:
                    if open_sync[1]:
                        outlook.first_created.setdefault(where, tuple(open_sync[1]))
                    open_sync = None
            case _:
                pass
    return outlook
