"""Reads a captured log for a replay: its frames in order, and the supervisor that wrote each of them.

One folder may hold the captures of several supervisors: each begins with a file of part 0 and counts on as its files
rotate. If the first files of a log were rotated away, the frames before the first `Hello` are skipped.

`headgate.supervisor.replay.look_ahead` reads the log once before it is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.framelog.file import read_part
from headgate.protocol.framelog.log import Damaged, Record, Torn, read_frames
from headgate.protocol.link.runner_dialect import Message
from headgate.protocol.messages.runner import Hello


class LogIncomplete(Exception):
    """The files are not one complete log.

    One is missing in the middle, two supervisors wrote them at once, or all frames were of a beginning that is missing.
    """


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
