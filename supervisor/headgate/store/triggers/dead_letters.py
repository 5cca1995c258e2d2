"""Dead letters: events that cannot be stored as they are, kept with the reason in a form that any database takes.

This is the last resort, so it must not fail for the reason that made the event unstorable. Text is escaped and cut,
numbers are brought into range, and no column refers to another table. Changed coordinates get a digest of the original,
so that two events never get the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import BindParameter, and_, bindparam, or_, update

from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    REFUSED_HEAD_BYTES_MAX,
    FiredEvent,
    RefusedEvent,
)
from headgate.store.db.bulk import Kind, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import Tx
from headgate.store.tables import dead_letter as letters

_NAMES = ("trigger_id", "trigger_run_id", "sequence_index", "key", "position")  # the fields of `Coordinates`
_PAYLOAD = ("payload", "payload_head", "payload_bytes", "payload_kept", "reason")
_LETTER = Kind(letters, (*_NAMES, *_PAYLOAD, "stored_at"))

_OF: dict[str, BindParameter[Any]] = {name: bindparam(f"of_{name}") for name in _NAMES}
_ADD_PAYLOAD = Prepared(
    update(letters)
    .where(
        or_(
            *(
                and_(*(letters.c[name] == _OF[name] for name in rule))
                for rule in (("trigger_run_id", "sequence_index"), ("trigger_id", "key", "position"))
            )
        ),
        letters.c.payload_kept.is_(False),
    )
    .values({name: bindparam(name) for name in _PAYLOAD})
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


def _storable_name(name: str, *others: int) -> str:
    """Return ``name`` if it and the ``others`` can be stored, else a storable name with a digest of all of them."""
    storable = storable_text(name, KEY_CHARS_MAX)
    if storable == name and all(_storable_number(other) == other for other in others):
        return name
    digest = hashlib.sha256(repr((name, others)).encode()).hexdigest()
    return f"{storable[: KEY_CHARS_MAX - len(digest) - 1]}#{digest}"


def coordinates(event: FiredEvent | RefusedEvent) -> Coordinates:
    """Return the coordinates of ``event``, unchanged if they can be stored."""
    key = None if event.key is None else _storable_name(event.key, event.trigger_id, event.position)
    return Coordinates(
        trigger_id=_storable_number(event.trigger_id),
        trigger_run_id=_storable_name(event.trigger_run_id, event.sequence_index),
        sequence_index=_storable_number(event.sequence_index),
        key=key,
        position=_storable_number(event.position),
    )


def dead_letter(tx: Tx, event: FiredEvent, reason: str) -> None:
    """Record an event with its whole payload. Repeating it changes nothing.

    If there is a dead letter of the same event or message that has only the head of the payload, it gets the whole,
    because the caller confirms to the broker that the payload is kept.
    """
    names = coordinates(event)
    payload = (
        event.payload,
        event.payload[:REFUSED_HEAD_BYTES_MAX],
        len(event.payload),
        True,
        storable_text(reason, ERROR_CHARS_MAX),
    )
    row = (*msgspec.structs.astuple(names), *payload, bound(tx.connection, tx.now))
    if insert_new(tx.connection, _LETTER, [row], returning=("id",)):
        return
    columns = dict(zip(_PAYLOAD, payload, strict=True))
    _ADD_PAYLOAD.run(
        tx.connection, **columns, **{f"of_{name}": value for name, value in msgspec.structs.asdict(names).items()}
    )


def dead_letter_refused(tx: Tx, events: Sequence[RefusedEvent]) -> None:
    """Record events that the runner refused, with the head of their payload. Repeating it changes nothing."""
    stored_at = bound(tx.connection, tx.now)
    rows = [
        (
            *msgspec.structs.astuple(coordinates(event)),
            None,
            event.payload_head[:REFUSED_HEAD_BYTES_MAX],
            _storable_number(event.payload_bytes),
            False,
            storable_text(event.reason, ERROR_CHARS_MAX),
            stored_at,
        )
        for event in events
    ]
    insert_new(tx.connection, _LETTER, rows, returning=("id",))
