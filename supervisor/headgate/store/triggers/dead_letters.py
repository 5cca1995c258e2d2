"""Dead letters: events and messages that cannot be stored as they are, kept with the reason as any database takes it.

This is the last resort, so it must not fail for the reason that made the event unstorable. Text is escaped and cut,
numbers are brought into range, and no column refers to another table. Changed coordinates get a digest of the original,
so that two events never get the same ones.

The letter of a message that its trigger is passed over (`headgate.store.triggers.strikes`) has the error of the last
strike.

**One letter for each message** until it is resolved (redriven or discarded): if the message is refused again meanwhile,
only its ``deliveries`` grow. After that it gets another letter, because nobody has decided about this delivery yet,
with one exception: an event that was redriven is in the event log, so the same event, refused again, is a redelivery;
and so is a message that was redriven, which the broker delivers to a run that is still passed over it.
The same report, which is repeated if it is unknown whether its commit arrived, never makes a second letter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import BindParameter, and_, bindparam, literal_column, or_, select, update

from headgate.protocol import marks
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    PASSED_OVER_POSITION,
    REFUSED_HEAD_BYTES_MAX,
    EventKind,
    FiredEvent,
    LetterContent,
    RefusedEvent,
)
from headgate.store.db.bulk import Kind, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import Tx
from headgate.store.tables import dead_letter as letters
from headgate.store.tables import strike

_NAMES = ("trigger_id", "trigger_run_id", "sequence_index", "key", "position")  # the fields of `Coordinates`
# What a letter keeps. It is replaced as one if a letter without its whole payload gets it.
_PAYLOAD = (
    "payload",
    "payload_head",
    "payload_bytes",
    "payload_kept",
    "reason",
    "content",
    "kind",
    "is_last",
    "traceback",
    "state",
)
_LETTER = Kind(
    letters, (*_NAMES, *_PAYLOAD[:5], "stored_at", *_PAYLOAD[5:-1], "deliveries", "state")
)  # in the table's order

_OF: dict[str, BindParameter[Any]] = {name: bindparam(f"of_{name}") for name in _NAMES}
_IS_OF_EVENT = or_(
    *(
        and_(*(letters.c[name] == _OF[name] for name in rule))
        for rule in (("trigger_run_id", "sequence_index"), ("trigger_id", "key", "position"))
    )
)
_UNRESOLVED = letters.c.resolved_at.is_(None)
_ADD_PAYLOAD = Prepared(
    update(letters)
    .where(
        _UNRESOLVED,
        _IS_OF_EVENT,
        letters.c.payload_kept.is_(False),
    )
    .values({name: bindparam(name) for name in _PAYLOAD})
)

# The same report, because it was unknown whether its commit arrived, is no other delivery.
_IS_ANOTHER_REPORT = or_(
    letters.c.trigger_run_id != _OF["trigger_run_id"], letters.c.sequence_index != _OF["sequence_index"]
)
_COUNT_DELIVERY = Prepared(
    update(letters)
    .where(
        _UNRESOLVED,
        *(letters.c[name] == _OF[name] for name in ("trigger_id", "key", "position")),
        _IS_ANOTHER_REPORT,
    )
    .values(deliveries=letters.c.deliveries + literal_column("1"))
)
_OPEN_OF_EVENT = Prepared(
    select(letters.c.id).where(
        _IS_OF_EVENT,
        letters.c.position >= literal_column("0"),
        letters.c.state == literal_column("'open'"),
        letters.c.content == literal_column("'event'"),
    )
)
_COUNT_REDELIVERY = Prepared(
    update(letters)
    .where(
        *(letters.c[name] == _OF[name] for name in ("trigger_id", "key", "position")),
        letters.c.resolved_at.is_not(None),  # as the index says; a redriven letter has been
        letters.c.state.in_([literal_column("'redriven'"), literal_column("'stored_meanwhile'")]),
        letters.c.content == bindparam("content"),
        letters.c.kind == bindparam("kind"),
        letters.c.payload == bindparam("payload"),
        _IS_ANOTHER_REPORT,
    )
    .values(deliveries=letters.c.deliveries + literal_column("1"))
)
_LAST_STRIKE = Prepared(
    select(strike.c.strikes, strike.c.last_error).where(
        strike.c.trigger_id == _OF["trigger_id"], strike.c.key == _OF["key"]
    )
)

INT_MIN, INT_MAX = -(2**63), 2**63 - 1  # the range of a BIGINT


class Coordinates(msgspec.Struct, frozen=True):
    """The identity of an event, and of the message it derives from, in storable form."""

    trigger_id: int
    trigger_run_id: str
    sequence_index: int
    key: str | None
    position: int


def storable_text(text: str, chars_max: int) -> str:
    """Escape characters that a database refuses (NUL, lone surrogates), and cut to ``chars_max`` characters."""
    return text.replace("\0", r"\x00").encode("utf-8", "backslashreplace").decode("utf-8")[:chars_max]


def _storable_number(number: int) -> int:
    return min(max(number, INT_MIN), INT_MAX)


def storable_name(name: str, *others: int) -> str:
    """Return ``name`` if it and the ``others`` can be stored, else a storable name with a digest of all of them."""
    storable = storable_text(name, KEY_CHARS_MAX)
    if storable == name and all(_storable_number(other) == other for other in others):
        return name
    digest = hashlib.sha256(repr((name, others)).encode()).hexdigest()
    return f"{storable[: KEY_CHARS_MAX - len(digest) - 1]}#{digest}"


def coordinates(event: FiredEvent | RefusedEvent) -> Coordinates:
    """Return the coordinates of ``event``, unchanged if they can be stored."""
    key = None if event.key is None else storable_name(event.key, event.trigger_id, event.position)
    return Coordinates(
        trigger_id=_storable_number(event.trigger_id),
        trigger_run_id=storable_name(event.trigger_run_id, event.sequence_index),
        sequence_index=_storable_number(event.sequence_index),
        key=key,
        position=_storable_number(event.position),
    )


def dead_letter(tx: Tx, event: FiredEvent, reason: str, traceback: str = "") -> None:
    """Record an event with its whole payload. Repeating it changes nothing; see `dead_letter_refused`."""
    payload = msgspec.structs.replace(_payload(event, reason), traceback=traceback)
    _add(tx, [(coordinates(event), payload)])


def dead_letter_many(tx: Tx, events: Sequence[tuple[FiredEvent, str]]) -> None:
    """Record events with their whole payloads, each with its reason, unless there is a letter of it already."""
    _insert(tx, [(coordinates(event), _payload(event, reason)) for event, reason in events])


def dead_letter_refused(tx: Tx, events: Sequence[RefusedEvent]) -> None:
    """Record events that the runner refused, and messages that a trigger does not get. Repeating it changes nothing.

    If there is a letter of the same event or message that has only the head of the payload, and this one is whole, it
    gets the whole, because the caller confirms to the broker that the payload is kept.
    """
    _add(tx, [(names, _refused(tx, event, names)) for event in events for names in [coordinates(event)]])
    if any(event.position == PASSED_OVER_POSITION for event in events):
        marks.reach("letters.passed_over")


def open_letters_of(tx: Tx, events: Iterable[FiredEvent | RefusedEvent]) -> dict[int, int]:
    """Return the open letters that hold these events themselves, by trigger; not those that hold their messages."""
    found: dict[int, int] = {}
    for event in events:
        of = {f"of_{name}": value for name, value in msgspec.structs.asdict(coordinates(event)).items()}
        for (letter,) in _OPEN_OF_EVENT.run(tx.connection, **of).fetchall():
            found[event.trigger_id] = letter
    return found


def _refused(tx: Tx, event: RefusedEvent, names: Coordinates) -> _Payload:
    payload = _Payload(
        data=event.payload_head,
        data_bytes=_storable_number(event.payload_bytes),
        is_kept=event.is_whole,
        reason=event.reason,
        content=event.content,
        kind=event.kind,
        is_last=event.is_last,
        traceback=event.traceback,
    )
    if event.position != PASSED_OVER_POSITION:
        return payload
    last = _LAST_STRIKE.run(tx.connection, of_trigger_id=names.trigger_id, of_key=names.key).fetchone()
    if last is None:
        return payload
    strikes, error = last
    reason, _, traceback = error.partition("\n\n")
    return msgspec.structs.replace(payload, reason=reason, traceback=traceback, deliveries=strikes)


class _Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What a letter keeps besides its coordinates. ``data`` is all of the payload if it ``is_kept``, else its head."""

    data: bytes
    data_bytes: int
    is_kept: bool
    reason: str
    content: LetterContent = "event"
    kind: EventKind = "event"
    is_last: bool = False
    traceback: str = ""
    deliveries: int = 1

    def columns(self) -> tuple[Any, ...]:
        """Return the values of the columns `_PAYLOAD`."""
        return (
            self.data if self.is_kept else None,
            self.data[:REFUSED_HEAD_BYTES_MAX],
            self.data_bytes,
            self.is_kept,
            storable_text(self.reason, ERROR_CHARS_MAX),
            self.content,
            self.kind,
            self.is_last,
            storable_text(self.traceback, ERROR_CHARS_MAX),
            "open" if self.is_kept else "at_broker",
        )


def _payload(event: FiredEvent, reason: str) -> _Payload:
    return _Payload(
        data=event.payload,
        data_bytes=len(event.payload),
        is_kept=True,
        reason=reason,
        kind=event.kind,
        is_last=event.is_last,
    )


def _insert(tx: Tx, new: Sequence[tuple[Coordinates, _Payload]]) -> set[tuple[str, int]]:
    """Insert the letters that are not there yet; return the run and the index of each of these.

    An event that has been redriven, and is refused again, is a redelivery: it is counted and left out.
    """
    new = [(names, payload) for names, payload in new if not _is_redelivery(tx, names, payload)]
    stored_at = bound(tx.connection, tx.now)
    rows = []
    for names, payload in new:
        columns = payload.columns()
        rows.append(
            (*msgspec.structs.astuple(names), *columns[:5], stored_at, *columns[5:-1], payload.deliveries, columns[-1])
        )
    return set(insert_new(tx.connection, _LETTER, rows, returning=("trigger_run_id", "sequence_index")))


def _is_redelivery(tx: Tx, names: Coordinates, payload: _Payload) -> bool:
    """Count the delivery of what was redriven from a letter with the same names and payload, if it was.

    Not of a message whose event is refused: that one is not stored.
    """
    is_event = payload.content == "event"
    if names.key is None or not payload.is_kept or is_event == (names.position == PASSED_OVER_POSITION):
        return False
    of = {f"of_{name}": getattr(names, name) for name in _NAMES}
    return (
        _COUNT_REDELIVERY.run(
            tx.connection, content=payload.content, kind=payload.kind, payload=payload.data, **of
        ).rowcount
        > 0
    )


def _add(tx: Tx, new: Sequence[tuple[Coordinates, _Payload]]) -> None:
    """Insert letters; those that are there already are counted, and get their whole payload if they have not got it."""
    inserted = _insert(tx, new)
    for names, payload in new:
        if (names.trigger_run_id, names.sequence_index) in inserted:
            continue
        of = {f"of_{name}": value for name, value in msgspec.structs.asdict(names).items()}
        _COUNT_DELIVERY.run(tx.connection, **of)
        if payload.is_kept:
            _ADD_PAYLOAD.run(tx.connection, **dict(zip(_PAYLOAD, payload.columns(), strict=True)), **of)
