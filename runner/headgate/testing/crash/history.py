"""The checker: compares the events that a broker handed out and forgot with those that are stored.

It is independent of the code under test: it imports nothing of headgate, and a history is read from the broker's
own files, from the database, and from a journal of ``advance`` calls. A history is a sequence of records, in the
order in which they were *seen*. Each look from outside reads in this order, and writes its records in the same::

    forgotten by the broker  ->  the journal  ->  the database  ->  `Looked`

So every event that a look finds advanced or forgotten must be found stored by the same look (I1), independent of
clocks. Tasks have a checker of their own, `tests.proof.history.task_history`. The findings:

- ``lost``: forgotten by the broker, or missing at the end, and never stored for a subscriber that should have it
- ``stored twice``: two rows of one event, for one subscriber, at one position (I2)
- ``advanced before stored``: stored, but only after a look that found it acknowledged (I1)
- ``out of lane order``: a reader did not advance the events of a lane in order and without a gap (I3)
- ``commit past a failed offset``: forgotten although it failed or was never resolved (I3)
- ``never handed out again``: failed, still held by the broker, and at rest not handed out since (I13)

::

    python -m headgate.testing.crash.history FILE     the history as JSON lines; exit code 1 if there are findings
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar, assert_never, get_args

import msgspec

FINDINGS_SHOWN_MAX = 50  # in the text of a report; more would tell a reader nothing new

Kind = Literal[
    "lost",
    "stored twice",
    "advanced before stored",
    "out of lane order",
    "commit past a failed offset",
    "never handed out again",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


# --- the records of a history ----------------------------------------------------------------------


class _Record(msgspec.Struct, frozen=True, tag_field="what", omit_defaults=True):
    """Base of all records. ``at`` is any text that helps a reader, for example a time or the name of a kill."""


class Subscribed(_Record, frozen=True, tag="subscribed"):
    """From here on this subscriber should have every event that is published."""

    subscriber: str


class Published(_Record, frozen=True, tag="published"):
    """The broker holds an event: its name, its lane, and its place in the order of the lane.

    ``subscribers`` are those that should store it, if not all that subscribed before. The list is empty for an event
    that every filter skips.
    """

    event: str
    lane: str
    order: int
    subscribers: tuple[str, ...] | None = None


class HandedOut(_Record, frozen=True, tag="handed_out"):
    """The journal of a reader (one producer in one process): it yielded an event to its stream."""

    event: str
    lane: str
    reader: str
    at: str = ""


class AdvancedItem(msgspec.Struct, frozen=True, array_like=True):
    """One event of an advance, and how its subscribers resolved it."""

    event: str
    acked: int
    failed: int
    rejected: int

    @property
    def is_clean(self) -> bool:
        """Whether the broker may forget it."""
        return not self.failed and bool(self.acked or self.rejected)


class Advanced(_Record, frozen=True, tag="advanced"):
    """The journal of a reader: ``advance`` is called for these events. Written before the producer acts on it."""

    lane: str
    reader: str
    items: tuple[AdvancedItem, ...]
    at: str = ""


class Committed(_Record, frozen=True, tag="committed"):
    """The broker has forgotten every event of the lane whose order is less than ``before``."""

    lane: str
    before: int
    at: str = ""


class Forgotten(_Record, frozen=True, tag="forgotten"):
    """The broker has forgotten this one event; for brokers that acknowledge message by message."""

    event: str
    at: str = ""


class Stored(_Record, frozen=True, tag="stored"):
    """A row of the database. ``position`` counts the events that one subscriber derives from one."""

    event: str
    subscriber: str
    row: str
    position: int = 0
    at: str = ""


class PutAside(_Record, frozen=True, tag="put_aside"):
    """The database or the broker holds the event for this subscriber elsewhere, as a dead letter: it is not lost."""

    event: str
    subscriber: str
    at: str = ""


class Looked(_Record, frozen=True, tag="looked"):
    """A look is complete: all that was stored before it has a record above. ``at_rest``: nothing will change."""

    at: str = ""
    at_rest: bool = False


Record = Subscribed | Published | HandedOut | Advanced | Committed | Forgotten | Stored | PutAside | Looked

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: msgspec.Struct) -> bytes:
    """Return a record as one JSON line."""
    return msgspec.json.encode(record) + b"\n"


def decode_lines(data: bytes, *, where: str = "history") -> Iterator[Record]:
    """Yield the records of whole lines; a last line that a kill cut off is ignored. Raises `ValueError`."""
    return decode_records(_decoder, data, where=where)


RecordT = TypeVar("RecordT")


def decode_records(decoder: msgspec.json.Decoder[RecordT], data: bytes, *, where: str = "history") -> Iterator[RecordT]:
    """Yield the records of whole lines, like `decode_lines`, with the decoder of another kind of records."""
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{where}, line {number}: {error}") from error


# --- findings ----------------------------------------------------------------------------------------


class Finding(msgspec.Struct, frozen=True):
    """One violation. The story has its records in the order in which they were seen."""

    kind: Kind
    event: str
    subscriber: str = ""
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        whose = f" for {self.subscriber}" if self.subscriber else ""
        return "\n    ".join((f"{self.kind}: {self.event}{whose}", *self.story))


class Report(msgspec.Struct, frozen=True):
    """Result of checking a history. ``redelivered`` counts events that were handed out again."""

    findings: tuple[Finding, ...]
    published: int
    stored: int
    redelivered: int
    advances: int
    looks: int

    def count(self, kind: Kind) -> int:
        """Return the number of findings of one kind."""
        return sum(finding.kind == kind for finding in self.findings)

    def __str__(self) -> str:
        counts = (
            f"{self.published:,} events, {self.stored:,} rows, {self.advances:,} advances, {self.looks:,} looks, "
            f"{self.redelivered:,} redelivered"
        )
        return summary(counts, KINDS, self.findings)


class _HasKind(Protocol):
    """A finding of any checker; its text tells its story."""

    @property
    def kind(self) -> str: ...


def summary(counts: str, kinds: Sequence[str], findings: Sequence[_HasKind]) -> str:
    """Return a report as text: what was counted, how many findings there are of each kind, and the first of them."""
    if not findings:
        return f"{counts}: nothing is wrong"
    found = Counter(finding.kind for finding in findings)
    head = ", ".join(f"{found[kind]:,} {kind}" for kind in kinds if found[kind])
    shown = [str(finding) for finding in findings[:FINDINGS_SHOWN_MAX]]
    if len(findings) > FINDINGS_SHOWN_MAX:
        shown.append(f"... and {len(findings) - FINDINGS_SHOWN_MAX:,} more")
    return "\n".join([f"{counts}: {head}", *shown])


# --- the checker -------------------------------------------------------------------------------------


class _Event:
    """State of one event."""

    __slots__ = (
        "expected",
        "forgotten",
        "handed_out",
        "lane",
        "order",
        "resolved_by",
        "resolved_clean",
        "rows",
        "seen_early",
        "story",
    )

    def __init__(self, lane: str, order: int, expected: frozenset[str]) -> None:
        self.lane = lane
        self.order = order
        self.expected = expected
        self.handed_out = 0
        self.resolved_clean: bool | None = None  # by its last advance; None before the first
        self.resolved_by: str | None = None  # the reader of its last advance, until it is handed out again
        self.forgotten = False
        self.rows: Counter[tuple[str, int]] = Counter()  # by subscriber and position
        self.seen_early: set[str] = set()  # subscribers without it at a look that found it acknowledged
        self.story: list[str] = []

    @property
    def is_stuck(self) -> bool:
        """Whether it has failed, and is neither forgotten nor handed out again."""
        return self.resolved_clean is False and self.resolved_by is not None and not self.forgotten

    def missing(self) -> frozenset[str]:
        """Return the subscribers that should have stored it and have not."""
        return self.expected - {subscriber for subscriber, _ in self.rows}


class Checker:
    """Takes a history record by record; `report` may be asked for at any time, and again later.

    Raises `ValueError` for a record that speaks of an event that was never published.
    """

    def __init__(self, history: Iterable[Record] = ()) -> None:
        self._subscribers: list[str] = []
        self._events: dict[str, _Event] = {}
        self._lanes: defaultdict[str, list[str]] = defaultdict(list)  # events by order
        self._forgotten_to: Counter[str] = Counter()  # an index into the lane
        self._to_advance: defaultdict[tuple[str, str], list[str]] = defaultdict(list)  # by reader and lane
        self._advanced_to: Counter[tuple[str, str]] = Counter()  # an index into the list above
        self._passed_over: set[str] = set()  # events with the finding "commit past a failed offset"
        self._disordered: set[tuple[str, str]] = set()  # with a finding; more would only follow from it
        self._unproven: set[str] = set()  # acknowledged or forgotten, and not yet seen stored for all
        self._found: list[Finding] = []
        self._rows = self._advances = self._looks = 0
        self._at_rest = False
        self.extend(history)

    def extend(self, history: Iterable[Record]) -> None:
        """Take more records."""
        for record in history:
            self.add(record)

    def add(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case Subscribed():
                self._subscribers.append(record.subscriber)
            case Published():
                self._publish(record)
            case HandedOut():
                self._hand_out(record)
            case Advanced():
                self._advance(record)
            case Committed():
                self._commit(record)
            case Forgotten():
                self._forget(record.event, f"the broker forgot it{_when(record.at)}")
            case Stored():
                self._store(record)
            case PutAside():
                event = self._event(record.event)
                event.rows[record.subscriber, -1] = 1
                event.story.append(f"put aside for {record.subscriber}{_when(record.at)}")
            case Looked():
                self._look(record)
            case _:
                assert_never(record)

    def report(self) -> Report:
        """Return the findings and counts of the history so far."""
        return Report(
            findings=tuple(self._findings()),
            published=len(self._events),
            stored=self._rows,
            redelivered=sum(max(0, event.handed_out - 1) for event in self._events.values()),
            advances=self._advances,
            looks=self._looks,
        )

    # --- records ----------------------------------------------------------------------------------

    def _event(self, name: str) -> _Event:
        event = self._events.get(name)
        if event is None:
            raise ValueError(f"the history speaks of the event {name!r}, which was never published")
        return event

    def _publish(self, record: Published) -> None:
        if record.event in self._events:
            raise ValueError(f"the event {record.event!r} is published twice: names must tell events apart")
        lane = self._lanes[record.lane]
        if lane and self._events[lane[-1]].order >= record.order:
            raise ValueError(f"the lane {record.lane!r} is not published in order at {record.event!r}")
        expected = self._subscribers if record.subscribers is None else record.subscribers
        self._events[record.event] = event = _Event(record.lane, record.order, frozenset(expected))
        event.story.append(f"published in lane {record.lane} at {record.order}")
        lane.append(record.event)
        self._at_rest = False

    def _hand_out(self, record: HandedOut) -> None:
        event = self._event(record.event)
        event.handed_out += 1
        event.resolved_by = None
        again = f", for the {_nth(event.handed_out)} time" if event.handed_out > 1 else ""
        event.story.append(f"handed out by reader {record.reader}{again}{_when(record.at)}")
        self._to_advance[record.reader, record.lane].append(record.event)

    def _advance(self, record: Advanced) -> None:
        self._advances += 1
        where = (record.reader, record.lane)
        for item in record.items:
            event = self._event(item.event)
            outcome = f"acked {item.acked}, failed {item.failed}, rejected {item.rejected}"
            event.story.append(f"advanced by reader {record.reader}: {outcome}{_when(record.at)}")
            event.resolved_clean = item.is_clean
            event.resolved_by = record.reader
            if item.is_clean and not item.rejected:
                self._unproven.add(item.event)
            elif item.is_clean:
                event.expected = frozenset()  # refused for good: it may be stored, and need not be
            self._follow_order(where, item.event)

    def _follow_order(self, where: tuple[str, str], name: str) -> None:
        handed_out, index = self._to_advance[where], self._advanced_to[where]
        self._advanced_to[where] += 1
        if where in self._disordered or (index < len(handed_out) and handed_out[index] == name):
            return
        self._disordered.add(where)
        due = handed_out[index] if index < len(handed_out) else "nothing"
        story = (*self._event(name).story, f"reader {where[0]} advanced it in lane {where[1]}, but {due} was due")
        self._found.append(Finding("out of lane order", name, story=story))

    def _commit(self, record: Committed) -> None:
        lane = self._lanes[record.lane]
        index = self._forgotten_to[record.lane]
        while index < len(lane) and self._events[lane[index]].order < record.before:
            self._forget(
                lane[index], f"the broker forgot all of lane {record.lane} before {record.before}{_when(record.at)}"
            )
            index += 1
        self._forgotten_to[record.lane] = index

    def _forget(self, name: str, words: str) -> None:
        event = self._event(name)
        if event.forgotten:
            return
        event.forgotten = True
        event.story.append(words)
        self._unproven.add(name)

    def _store(self, record: Stored) -> None:
        event = self._event(record.event)
        self._rows += 1
        place = (record.subscriber, record.position)
        event.rows[place] += 1
        event.story.append(f"stored for {record.subscriber} as row {record.row}{_when(record.at)}")
        if event.rows[place] == 2:
            self._found.append(Finding("stored twice", record.event, record.subscriber))

    def _look(self, record: Looked) -> None:
        self._looks += 1
        self._at_rest = record.at_rest
        for name in sorted(self._unproven):
            event = self._events[name]
            missing = event.missing()
            if missing:
                event.seen_early |= missing
                event.story.append(
                    f"not stored for {', '.join(sorted(missing))} at look {self._looks}{_when(record.at)}"
                )
            if event.forgotten and not event.resolved_clean and name not in self._passed_over:
                self._pass_over(name, event)
        self._unproven = {name for name in self._unproven if self._events[name].missing()}

    def _pass_over(self, name: str, event: _Event) -> None:
        """Report an event that is forgotten without a clean advance. The look is complete, so none is still unread."""
        if event.resolved_clean is None and not self._advances:
            return  # there is no journal
        self._passed_over.add(name)
        event.story.append(f"it {'was never resolved' if event.resolved_clean is None else 'failed'}, and is forgotten")
        self._found.append(Finding("commit past a failed offset", name))

    # --- findings ---------------------------------------------------------------------------------

    def _findings(self) -> Iterator[Finding]:
        for finding in self._found:
            # The story of the event as it is now; it may have grown since the finding.
            yield finding if finding.story else msgspec.structs.replace(finding, story=self._story(finding.event))
        for name, event in self._events.items():
            if self._at_rest and event.is_stuck:
                story = (*event.story, f"it failed, and reader {event.resolved_by} has not handed it out again")
                yield Finding("never handed out again", name, story=story)
            missing = event.missing()
            acknowledged = event.forgotten or event.resolved_clean
            for subscriber in sorted(event.expected):
                if subscriber in missing and (self._at_rest or (acknowledged and subscriber in event.seen_early)):
                    yield Finding("lost", name, subscriber, self._story(name))
                elif subscriber in event.seen_early and subscriber not in missing:
                    yield Finding("advanced before stored", name, subscriber, self._story(name))

    def _story(self, name: str) -> tuple[str, ...]:
        return tuple(self._event(name).story)


def check(history: Iterable[Record]) -> Report:
    """Check a whole history. Raises `ValueError` for one that contradicts itself."""
    return Checker(history).report()


def _when(at: str) -> str:
    return f" ({at})" if at else ""


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def main(arguments: Sequence[str]) -> int:
    """Check the history in a file; return the exit code: 0 nothing found, 1 something, 2 no history."""
    if len(arguments) != 1:
        print("usage: python -m headgate.testing.crash.history FILE", file=sys.stderr)
        return 2
    try:
        report = check(decode_lines(Path(arguments[0]).read_bytes(), where=arguments[0]))
    except (OSError, ValueError) as error:
        print(f"history: {error}", file=sys.stderr)
        return 2
    try:
        print(report, flush=True)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; buffered output must not be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
