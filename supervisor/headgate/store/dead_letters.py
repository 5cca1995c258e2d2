"""What could not be stored as it is: kept with the reason, in a form that any database takes.

Burying is the last resort, so it must not fail on the very thing that made the event unstorable. Text is
escaped and cut, numbers are brought into range, and nothing refers to another table. What had to be changed
to name the event gets a digest of what it was, so that two events never become one by that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime

import msgspec
from sqlalchemy import Connection, and_, or_, update

from headgate.protocol.messages import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    REFUSED_HEAD_BYTES_MAX,
    FiredEvent,
    RefusedEvent,
)
from headgate.store.bulk import insert_into, insert_new
from headgate.store.tables import dead_letter

INT_MIN, INT_MAX = -(2**63), 2**63 - 1  # what a BIGINT holds


class Coordinates(msgspec.Struct, frozen=True):
    """What names an event, and the message it derives from, in storable form."""

    trigger_id: int
    trigger_run_id: str
    sequence_index: int
    key: str | None
    position: int


def storable_text(text: str, chars_max: int) -> str:
    """Escape what a database's text cannot hold (NUL, lone surrogates) and cut to ``chars_max`` characters."""
    return text.replace("\0", r"\x00").encode("utf-8", "backslashreplace").decode("utf-8")[:chars_max]


def _storable_number(number: int) -> int:
    return min(max(number, INT_MIN), INT_MAX)


def _storable_name(name: str, *others: int) -> str:
    """Return ``name`` as it is where all of it can be stored, else a storable one that is as unique."""
    storable = storable_text(name, KEY_CHARS_MAX)
    if storable == name and all(_storable_number(other) == other for other in others):
        return name
    digest = hashlib.sha256(repr((name, others)).encode()).hexdigest()
    return f"{storable[: KEY_CHARS_MAX - len(digest) - 1]}#{digest}"


def coordinates(event: FiredEvent | RefusedEvent) -> Coordinates:
    """Return what names ``event``, unchanged wherever it can be stored."""
    key = None if event.key is None else _storable_name(event.key, event.trigger_id, event.position)
    return Coordinates(
        trigger_id=_storable_number(event.trigger_id),
        trigger_run_id=_storable_name(event.trigger_run_id, event.sequence_index),
        sequence_index=_storable_number(event.sequence_index),
        key=key,
        position=_storable_number(event.position),
    )


def bury(connection: Connection, now: datetime, event: FiredEvent, reason: str) -> None:
    """Record an event with its whole payload. Doing it again changes nothing.

    A dead letter of the same event or the same message, of which only the head was known, gets the payload:
    the caller tells the broker that it is kept.
    """
    payload = {
        "payload": event.payload,
        "payload_head": event.payload[:REFUSED_HEAD_BYTES_MAX],
        "payload_bytes": len(event.payload),
        "payload_kept": True,
        "reason": storable_text(reason, ERROR_CHARS_MAX),
    }
    names = coordinates(event)
    row = {**msgspec.structs.asdict(names), **payload, "stored_at": now}
    statement = insert_into(connection, dead_letter).values(row).on_conflict_do_nothing()
    if connection.execute(statement.returning(dead_letter.c.id)).first() is not None:
        return
    same_event = and_(
        dead_letter.c.trigger_run_id == names.trigger_run_id, dead_letter.c.sequence_index == names.sequence_index
    )
    same_message = and_(
        dead_letter.c.trigger_id == names.trigger_id,
        dead_letter.c.key == names.key,
        dead_letter.c.position == names.position,
    )
    only_head = dead_letter.c.payload_kept.is_(False)
    connection.execute(update(dead_letter).where(or_(same_event, same_message), only_head).values(payload))


def bury_refused(connection: Connection, now: datetime, events: Sequence[RefusedEvent]) -> None:
    """Record events that the runner refused, with the head of their payload. Doing it again changes nothing."""
    rows = [
        {
            **msgspec.structs.asdict(coordinates(event)),
            "payload": None,
            "payload_head": event.payload_head[:REFUSED_HEAD_BYTES_MAX],
            "payload_bytes": _storable_number(event.payload_bytes),
            "payload_kept": False,
            "reason": storable_text(event.reason, ERROR_CHARS_MAX),
            "stored_at": now,
        }
        for event in events
    ]
    insert_new(connection, dead_letter, rows, returning=[dead_letter.c.id])
