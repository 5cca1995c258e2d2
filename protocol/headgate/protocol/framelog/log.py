"""The content of a frame log: each frame as a line, and a check of the order of all frames.

The files are read and written by `headgate.protocol.framelog.file`, whose names can be imported from here, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, assert_never

from headgate.protocol.errors import FrameLogError, RemoteProtocolError
from headgate.protocol.framelog.file import (
    FILE_BYTES_MAX,
    FILES_MAX,
    Damaged,
    FrameLogWriter,
    Record,
    Torn,
    encode_record,
    mask,
    read_frames,
    read_part,
)
from headgate.protocol.link.runner_dialect import TRANSITIONS, Direction, Message
from headgate.protocol.link.session import State
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.queries import (
    GetConnection,
    GetTaskStates,
    GetVariable,
    LastEvent,
    Query,
    Request,
    Response,
    SecretText,
    StoredEvent,
    TaskStates,
)
from headgate.protocol.messages.runner import Drain, Hello, StateChanges, StateSync, Welcome

__all__ = [
    "FILES_MAX",
    "FILE_BYTES_MAX",
    "Damaged",
    "Finding",
    "FrameLogError",
    "FrameLogWriter",
    "Record",
    "Torn",
    "Verification",
    "describe",
    "encode_record",
    "mask",
    "read_frames",
    "verify",
]

SHOWN_CHARS_MAX = 60  # the part of a payload, a key or an error that `describe` shows
SHOWN_ELEMENTS_MAX = 3  # elements of a list that `describe` shows
FINDINGS_MAX = 1000  # findings kept of one file; the rest is only counted


# --- verifying -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault in a frame log, found at the record at ``offset``.

    A ``warning`` has causes other than a bug of headgate, for example a crash while writing or a clock set back.
    """

    offset: int
    severity: Literal["error", "warning"]
    problem: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`. ``started`` and ``ended`` are the times of the first and the last frame."""

    path: str
    frames: int
    incarnations: tuple[int, ...]
    started: float | None
    ended: float | None
    findings: tuple[Finding, ...]
    findings_left_off: int

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings are allowed."""
        return not self.findings_left_off and all(finding.severity != "error" for finding in self.findings)


def verify(path: str | os.PathLike[str]) -> Verification:
    """Check the CRCs of a frame log, and that its frames could have been sent in this order.

    Errors:

    - a record whose CRC does not match, or a body that cannot be decoded;
    - an incarnation lower than one before it, or a handshake of another incarnation;
    - a message that is illegal in the state of its session, for example one before the handshake;
    - rounds that do not count 1, 2, 3, ... in each incarnation;
    - a `StateSync` that answers a round that was not sent, was answered before, or is not the next to be answered.

    Warnings: a torn last record, times that go backwards within an incarnation. The first frame is not checked against
    earlier ones if the file begins in the middle of a conversation, or after damage.

    Raises as `read_frames` does.
    """
    checker = _Checker(begins_within=bool(read_part(path)))
    for item in read_frames(path):
        match item:
            case Record():
                checker.frame(item)
            case Torn():
                checker.add(item.offset, "warning", f"the last record is torn: {item.torn_bytes:,} bytes are skipped")
            case Damaged():
                checker.add(item.offset, "error", item.problem)
                checker.lose_track()
            case _:
                assert_never(item)
    return Verification(
        path=os.fspath(path),
        frames=checker.frames,
        incarnations=tuple(checker.incarnations),
        started=checker.started,
        ended=checker.ended,
        findings=tuple(checker.findings),
        findings_left_off=checker.findings_left_off,
    )


class _Checker:
    """Follows the frames of one file and collects findings."""

    def __init__(self, *, begins_within: bool) -> None:
        self.frames = 0
        self.incarnations: list[int] = []
        self.started: float | None = None
        self.ended: float | None = None
        self.findings: list[Finding] = []
        self.findings_left_off = 0
        self._conversation: _Conversation | None = None
        self._joins_within = begins_within

    def add(self, offset: int, severity: Literal["error", "warning"], problem: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(offset, severity, problem))
        else:
            self.findings_left_off += 1

    def lose_track(self) -> None:
        """Do not check the next frame against the one before it, because that one is not known."""
        self._joins_within = True

    def frame(self, record: Record) -> None:
        self.frames += 1
        self._check_incarnation_and_time(record)
        try:
            message = record.message()
        except RemoteProtocolError as error:
            self.add(record.offset, "error", str(error))
            self.lose_track()
            return
        if self._joins_within or self._conversation is None or self._conversation.incarnation != record.incarnation:
            self._conversation = _Conversation(record.incarnation, joined_within=self._joins_within)
            self._joins_within = False
        for problem in self._conversation.follow(record.direction.sender, message):
            self.add(record.offset, "error", problem)

    def _check_incarnation_and_time(self, record: Record) -> None:
        known = self.incarnations[-1] if self.incarnations else None
        if known != record.incarnation:
            if known is not None and record.incarnation < known:
                problem = f"a frame of incarnation {record.incarnation} follows one of incarnation {known}"
                self.add(record.offset, "error", problem)
            self.incarnations.append(record.incarnation)
        elif self.ended is not None and record.time < self.ended:
            problem = f"the time goes backwards by {self.ended - record.time:.6f} s"
            self.add(record.offset, "warning", problem)
        self.started = record.time if self.started is None else self.started
        self.ended = record.time


class _Conversation:
    """Checks the order of the frames of one incarnation. None means: not known."""

    def __init__(self, incarnation: int, *, joined_within: bool) -> None:
        self.incarnation = incarnation
        self._state = None if joined_within else State.OPENING
        self._round = None if joined_within else 0
        self._round_open = False  # the last StateChanges had `more`
        self._answered = None if joined_within else 0
        self._sync_open: int | None = None  # the round of a StateSync that had `more`

    def follow(self, sender: Role, message: Message) -> list[str]:
        """Take one frame and return its faults."""
        problems = self._follow_state(sender, message)
        match message:
            case Hello() | Welcome():
                if message.incarnation != self.incarnation:
                    name = type(message).__name__
                    problems.append(f"{name} carries incarnation {message.incarnation}, not {self.incarnation}")
                if isinstance(message, Hello):
                    self._round, self._answered = 0, 0
            case StateChanges():
                problems += self._follow_changes(message)
            case StateSync():
                problems += self._follow_sync(message)
            case Request() | Response() | Drain():
                pass
            case _:
                assert_never(message)
        return problems

    def _follow_state(self, sender: Role, message: Message) -> list[str]:
        event = (sender, type(message))
        if self._state is not None and event in TRANSITIONS[self._state]:
            self._state = TRANSITIONS[self._state][event]
            return []
        problem = None if self._state is None else f"{type(message).__name__} in state {self._state.name}"
        # Continue in a state in which the message is legal, so that one fault gives one finding.
        self._state = next(table[event] for table in TRANSITIONS.values() if event in table)
        return [] if problem is None else [f"the {sender.value} sent {problem}"]

    def _follow_changes(self, message: StateChanges) -> list[str]:
        before, self._round = self._round, message.round
        was_open, self._round_open = self._round_open, message.more
        if before is None:
            return []
        due = before if was_open else before + 1
        return [] if message.round == due else [f"round {message.round} was sent, but round {due} was due"]

    def _follow_sync(self, message: StateSync) -> list[str]:
        number = message.round
        within, self._sync_open = self._sync_open, number if message.more else None
        problems = []
        if within is not None and within != number:
            problems.append(f"StateSync of round {number} was sent before that of round {within} was complete")
        if number == 0:
            return problems
        due = number if self._answered is None else self._answered + 1
        if self._round is not None and (number > self._round or (number == self._round and self._round_open)):
            problems.append(f"StateSync answers round {number}, which was not sent before it")
        elif number != due:
            problems.append(f"StateSync answers round {number}, but round {due} was due")
        self._answered = number - 1 if message.more else number
        return problems


# --- showing ---------------------------------------------------------------------------------------


def describe(record: Record) -> str:
    """Return the record as one readable line: time (UTC), incarnation, direction, message and its main fields.

    Payloads, keys and errors are truncated; control characters are escaped.
    """
    arrow = "->" if record.direction is Direction.FROM_RUNNER else "<-"
    try:
        text = _describe_message(record.message())
    except RemoteProtocolError as error:
        text = f"undecodable: {_cut(str(error))}"
    return (
        f"{_describe_time(record.time)} #{record.incarnation} runner {arrow} supervisor  {text}  {len(record.body)} B"
    )


def _describe_time(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    except (ValueError, OverflowError, OSError):
        return f"time {time!r}"


def _describe_message(message: Message) -> str:
    name = type(message).__name__
    match message:
        case Hello():
            fields = [f"version={message.protocol_version}", f"pid={message.pid}", _cut(message.headgate_version)]
        case Welcome():
            fields = [f"version={message.protocol_version}", f"incarnation={message.incarnation}"]
        case StateChanges():
            fields = [f"round={message.round}", *_describe_changes(message)]
        case StateSync():
            fields = [f"round={message.round}", *_describe_sync(message)]
        case Request():
            fields = [f"id={message.id}", _describe_query(message.query)]
        case Response():
            fields = [f"id={message.id}", *_describe_response(message)]
        case Drain():
            fields = [f"deadline={message.deadline_s:g}s"]
        case _:
            assert_never(message)
    return " ".join([name, *fields])


def _describe_changes(message: StateChanges) -> list[str]:
    events = [
        f"{e.trigger_id}/{e.sequence_index} seq={e.seq} key={'-' if e.key is None else _cut(e.key)} {_cut(e.payload)}"
        for e in message.events[:SHOWN_ELEMENTS_MAX]
    ]
    refused = [
        f"{r.trigger_id}/{r.sequence_index} {r.payload_bytes} B {_cut(r.reason)}"
        for r in message.refused[:SHOWN_ELEMENTS_MAX]
    ]
    finished = [
        f"{f.trigger_id} {f.outcome}{' ' + _cut(f.error) if f.error else ''}"
        for f in message.finished[:SHOWN_ELEMENTS_MAX]
    ]
    redriven = [f"{r.trigger_id} letter {r.letter_id} {r.outcome}" for r in message.redriven[:SHOWN_ELEMENTS_MAX]]
    return [
        *_listed("events", len(message.events), events),
        *_listed("refused", len(message.refused), refused),
        *_listed("finished", len(message.finished), finished),
        *_listed("redriven", len(message.redriven), redriven),
        *_listed("stuck", len(message.stuck), [str(id_) for id_ in message.stuck[:SHOWN_ELEMENTS_MAX]]),
        *(["more"] if message.more else []),
        *([f"figures of {message.figures.streams_in_all} streams"] if message.figures else []),
    ]


def _describe_sync(message: StateSync) -> list[str]:
    persisted = [str(seq) for seq in message.persisted[:SHOWN_ELEMENTS_MAX]]
    refused = [f"{r.seq} {_cut(r.reason)}" for r in message.refused[:SHOWN_ELEMENTS_MAX]]
    to_create = [f"{s.trigger_id} {_cut(s.name)} {_cut(s.classpath)}" for s in message.to_create[:SHOWN_ELEMENTS_MAX]]
    to_cancel = [f"{c.trigger_id} {c.reason}" for c in message.to_cancel[:SHOWN_ELEMENTS_MAX]]
    absent = [str(subscriber.trigger_id) for subscriber in message.absent[:SHOWN_ELEMENTS_MAX]]
    redeliveries = [
        f"{r.trigger_id} letter {r.letter_id} key={_cut(r.key)} {_cut(r.message)}"
        for r in message.redeliveries[:SHOWN_ELEMENTS_MAX]
    ]
    credits_ = [f"{c.trigger_id} up to {c.events}" for c in message.credits[:SHOWN_ELEMENTS_MAX]]
    return [
        *_listed("persisted", len(message.persisted), persisted),
        *_listed("refused", len(message.refused), refused),
        *_listed("to_create", len(message.to_create), to_create),
        *_listed("to_cancel", len(message.to_cancel), to_cancel),
        *_listed("absent", len(message.absent), absent),
        *_listed("redeliveries", len(message.redeliveries), redeliveries),
        *_listed("credits", len(message.credits), credits_),
        *(["more"] if message.more else []),
        *(["lease lost"] if message.lease_lost else []),
    ]


def _describe_query(query: Query | LastEvent) -> str:
    match query:
        case LastEvent():
            return f"last event of trigger {query.trigger_id}"
        case GetVariable():
            return f"variable {_cut(query.name)}"
        case GetConnection():
            return f"connection {_cut(query.name)}"
        case GetTaskStates():
            return f"states of DAG {_cut(query.dag_id)}"
        case other:
            return type(other).__name__


def _describe_response(response: Response) -> list[str]:
    if response.error:
        return [f"error={_cut(response.error)}"]
    match response.result:
        case None:
            return ["none"]
        case StoredEvent(payload=payload):
            return [f"payload={_cut(payload)}"]
        case SecretText(value=value):
            return ["none" if value is None else "a secret"]
        case TaskStates() as states:
            found = "none" if states.run_id is None else _cut(states.run_id)
            return [f"run={found}", states.run_state, *_listed("tasks", len(states.tasks), [])]
        case other:
            return [type(other).__name__]


def _listed(name: str, count: int, shown: list[str]) -> list[str]:
    if not count:
        return []
    return [f"{name}={count}[{', '.join(shown)}{', ...' if count > len(shown) else ''}]"]


def _cut(content: str | bytes) -> str:
    text = content[: 4 * SHOWN_CHARS_MAX].decode("utf-8", "backslashreplace") if isinstance(content, bytes) else content
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: SHOWN_CHARS_MAX + 1])
    return shown if len(shown) <= SHOWN_CHARS_MAX else shown[: SHOWN_CHARS_MAX - 3] + "..."
