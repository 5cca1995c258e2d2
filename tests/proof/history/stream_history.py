"""The checker for the streams of tasks: each event is handled once and in order, by steps that are committed (I20-I22).

The events of a stream are the numbers from 0 on, so it is known what is right at each place. The state that a task
carries from step to step is how many it has handled, and a chain of hashes over them (`link`). Each step leaves a value
in the database that says what it has handled (`Part`): it is there only if the step is committed. Like
`tests.proof.history.task_history`, the checker knows nothing of the code under test, and takes records in the order in
which they were *seen*. The findings:

- ``handled twice``: two committed steps have handled one event, or the place of the stream has gone back, or a later
  try began in front of it, or a step got an event that lies in front of its place
- ``event left out``: at rest no committed step has handled it, or a step got the event behind it instead
- ``out of order``: a step got events in another order than that in which they were fired
- ``state of another history``: a step got, or the task ended with, a state that is not that of its place
- ``beyond its credit``: more events were stored and not handled than the task lets wait
- ``trigger left behind``: a trigger is open, and its task has ended

A step may run, and be repeated: what is not committed is not promised.

::

    python -m tests.proof.history.stream_history FILE     the history as JSON lines; exit code 1 if there are findings
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, assert_never, get_args

import msgspec
from tests.proof.history import findings
from tests.proof.history.findings import Finding, judge_file

from headgate.testing.crash import history
from headgate.testing.crash.history import encode as encode

Kind = Literal[
    "handled twice",
    "event left out",
    "out of order",
    "state of another history",
    "beyond its credit",
    "trigger left behind",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

TOTAL: Final = 12  # events of each stream of a crash test
PART: Final = "part "  # what the key of a `Part` begins with; the name of an execution follows


def link(chain: str, number: int) -> str:
    """Return the chain behind one more event."""
    return hashlib.sha256(f"{chain} {number}".encode()).hexdigest()[:16]


def chain_of(count: int) -> str:
    """Return the chain over the first ``count`` events."""
    chain = ""
    for number in range(count):
        chain = link(chain, number)
    return chain


# --- records ---------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True):
    """The value that a step leaves: it has handled the events ``first`` to ``end - 1``, and got to this chain."""

    first: int
    end: int
    chain: str


class _Record(msgspec.Struct, frozen=True, tag_field="what", omit_defaults=True):
    """Base of all records. ``at`` is any text that helps a reader."""


class Made(_Record, frozen=True, tag="made"):
    """A task was made that has a stream of ``total`` events."""

    task: str
    total: int
    at: str = ""


class Handling(_Record, frozen=True, tag="handling"):
    """The journal of a worker: a step is about to handle events, these ``numbers``.

    ``count`` and ``chain`` are its state, ``place`` is how many events were handled before, as headgate says.
    """

    task: str
    try_number: int
    execution: str
    place: int
    count: int
    chain: str
    numbers: tuple[int, ...]
    at: str = ""


class Row(_Record, frozen=True, tag="row"):
    """A task and its stream as the database has them; ``waiting`` events are stored and not handled.

    ``parts`` are by the names of executions, and ``result`` is the task's: both are read at rest only.
    """

    task: str
    state: str
    try_number: int
    handled: int = 0
    waiting: int = 0
    ahead: int = 0
    parts: Mapping[str, Part] = {}
    result: Any = None
    at: str = ""


class LeftBehind(_Record, frozen=True, tag="left_behind"):
    """An open trigger that no unfinished task has."""

    trigger: str
    at: str = ""


class Looked(_Record, frozen=True, tag="looked"):
    """A look is complete. ``at_rest``: nothing will change."""

    at: str = ""
    at_rest: bool = False


Record = Made | Handling | Row | LeftBehind | Looked

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


# Yields the records of whole lines; a last line that a kill tore off is left out. Raises `ValueError`.
decode_lines = partial(history.decode_records, _decoder)


# --- findings --------------------------------------------------------------------------------------


class Report(findings.Report[Kind], frozen=True):
    """The judgement. ``steps`` are calls of handlers; ``repeated`` events were handled by steps that nobody committed.

    ``events`` are those that the database says are handled.
    """

    streams: int
    events: int
    steps: int
    repeated: int
    looks: int

    def __str__(self) -> str:
        counts = (
            f"{self.streams:,} streams, {self.events:,} events handled in {self.steps:,} steps, "
            f"{self.repeated:,} repeated, {self.looks:,} looks"
        )
        return self.text(counts, KINDS)


# --- the checker -----------------------------------------------------------------------------------


class _Stream:
    """What is known of the stream of one task."""

    __slots__ = ("row", "story", "taken", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.row: Row | None = None
        self.taken = 0  # events that were given to steps
        self.story: list[str] = []


class Checker(findings.Checker[Record]):
    """Takes a history record by record; `report` may be asked for at any time, and again later.

    Raises `ValueError` for a record about a task that was never made.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._streams: dict[str, _Stream] = {}
        self._found: dict[tuple[Kind, str, str], None] = {}
        self._left_behind: dict[str, str] = {}
        self._steps = 0
        self._looks = 0
        self._at_rest = False
        self.extend(records)

    def add(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case Made():
                self._streams[record.task] = _Stream(record.total)
                self._at_rest = False
            case Handling():
                self._handle(record)
            case Row():
                self._see(record)
            case LeftBehind():
                self._left_behind.setdefault(record.trigger, record.at)
            case Looked():
                self._looks += 1
                self._at_rest = record.at_rest
            case _:
                assert_never(record)

    def report(self) -> Report:
        """Return the judgement on the history so far."""
        events = sum(stream.row.handled for stream in self._streams.values() if stream.row is not None)
        return Report(
            findings=tuple(self._findings()),
            streams=len(self._streams),
            events=events,
            steps=self._steps,
            repeated=max(0, sum(stream.taken for stream in self._streams.values()) - events),
            looks=self._looks,
        )

    def _stream(self, task: str) -> _Stream:
        stream = self._streams.get(task)
        if stream is None:
            raise ValueError(f"the history speaks of the task {task!r}, which was never made")
        return stream

    def _find(self, kind: Kind, task: str, why: str) -> None:
        self._found[kind, task, why] = None

    # --- records ----------------------------------------------------------------------------------

    def _handle(self, record: Handling) -> None:
        stream = self._stream(record.task)
        self._steps += 1
        stream.taken += len(record.numbers)
        who = f"{record.execution} of try {record.try_number}"
        stream.story.append(
            f"{who} gets {record.numbers} at {record.place}, with a state of {record.count}{_at(record)}"
        )
        if (record.count, record.chain) != (record.place, chain_of(record.place)):
            self._find("state of another history", record.task, f"{who}, at {record.place}")
        row = stream.row
        # A step of an earlier try, or of the same one, may begin late: its worker stood still. It is not committed.
        if row is not None and record.try_number > row.try_number and record.place < row.handled:
            why = f"{who} begins at {record.place}, and {row.handled} events were handled before"
            self._find("handled twice", record.task, why)
        numbers = record.numbers
        rising = sorted(set(numbers))
        if numbers == tuple(range(record.place, record.place + len(numbers))):
            return
        if len(rising) < len(numbers) or rising[0] < record.place:
            self._find("handled twice", record.task, f"{who} gets {numbers} at {record.place}")
        elif rising != list(numbers):
            self._find("out of order", record.task, f"{who} gets {numbers} at {record.place}")
        else:
            self._find("event left out", record.task, f"{who} gets {numbers} at {record.place}")

    def _see(self, record: Row) -> None:
        stream = self._stream(record.task)
        before, stream.row = stream.row, record
        stream.story.append(
            f"the database says: {record.state}, try {record.try_number}, {record.handled} handled, "
            f"{record.waiting} wait{_at(record)}"
        )
        if before is not None and record.handled < before.handled:
            self._find("handled twice", record.task, f"its place was {before.handled}, and {record.handled} later")
        if record.waiting > record.ahead:
            why = f"{record.waiting} events wait, and no more than {record.ahead} may"
            self._find("beyond its credit", record.task, why)

    # --- findings ---------------------------------------------------------------------------------

    def _findings(self) -> Iterator[Finding[Kind]]:
        for kind, about, why in self._found:
            yield self._finding(kind, about, why)
        for trigger, at in self._left_behind.items():
            yield Finding("trigger left behind", trigger, "no task that goes on has it", (f"seen {at}",))
        if self._at_rest:
            for name, stream in self._streams.items():
                for kind, why in _judge_end(stream):
                    yield self._finding(kind, name, why)

    def _finding(self, kind: Kind, task: str, why: str) -> Finding[Kind]:
        return Finding(kind, task, why, tuple(self._streams[task].story))


def _judge_end(stream: _Stream) -> Iterator[tuple[Kind, str]]:
    """Judge what a stream at rest has come to: the parts of its committed steps, end to end, are all of its events."""
    row, total = stream.row, stream.total
    if row is None or row.state != "success":
        state = "not in the database" if row is None else f"{row.state}, with {row.handled} of {total} handled"
        yield "event left out", f"it is {state}"
        return
    at = 0
    for execution, part in sorted(row.parts.items(), key=lambda named: (named[1].first, named[1].end)):
        if part.first < at:
            yield "handled twice", f"events {part.first} to {min(at, part.end) - 1}, last by {execution}"
        elif part.first > at:
            yield "event left out", f"events {at} to {part.first - 1}, in front of {execution}"
        if part.chain != chain_of(part.end):
            yield "state of another history", f"{execution} has left its own at {part.end}"
        at = max(at, part.end)
    if at < total:
        yield "event left out", f"events {at} to {total - 1}, the last ones"
    elif at > total:
        yield "handled twice", f"{at} events are handled, and only {total} are different"
    if row.handled != at:
        yield "state of another history", f"its place is {row.handled}, and its committed steps have come to {at}"
    if row.result != [total, chain_of(total)]:
        yield "state of another history", f"its result is {row.result}"


def _at(record: Handling | Row) -> str:
    return f" ({record.at})" if record.at else ""


def check(records: Iterable[Record]) -> Report:
    """Check a whole history. Raises `ValueError` for one that contradicts itself."""
    return Checker(records).report()


if __name__ == "__main__":
    sys.exit(judge_file(sys.argv[1:], "tests.proof.history.stream_history", decode_lines, check))
