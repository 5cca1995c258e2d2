"""Letters of consumers: events that were set aside, and are handed over again, or discarded, if a user says so.

A letter refers to its event, which is kept until the letter is resolved. Asked for again, the event is handed over in
a batch of its own, without moving the place, and the letter is resolved in the transaction of that batch: so the event
is used exactly once. One request is one try: the letter is open again before the batch begins, and stays so if it
fails. All of this is done with the row of the consumer locked.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, delete, false, select, true, update

from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.store.access.audit import Action
from headgate.store.consuming import places, reading
from headgate.store.consuming.places import Place
from headgate.store.consuming.reading import Event
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, acting
from headgate.store.db.verbs import reading as reading_verb
from headgate.store.errors import NotSetAside
from headgate.store.ids import ConsumerLetterState
from headgate.store.tables import consumer, consumer_letter
from headgate.store.triggers.dead_letters import storable_text

LETTERS_LISTED_MAX = 1_000
_C = consumer_letter.c


class ConsumerLetter(msgspec.Struct, frozen=True):
    """An event that a consumer could not take: ``deliveries`` times, the last time for the reason ``error``."""

    event_id: int
    trigger_id: int
    deliveries: int
    error: str
    traceback: str
    set_aside_at: datetime
    state: ConsumerLetterState
    resolved_at: datetime | None


class Redelivery(msgspec.Struct, frozen=True):
    """An event that is handed over again. ``deliveries`` counts this one."""

    letter_id: int
    event: Event
    deliveries: int


def add(tx: Tx, place: Place, event: Event, deliveries: int, error: str, traceback: str) -> None:
    """Set an event aside, for a locked consumer that moves past it in the same transaction."""
    values: dict[str, Any] = {
        "consumer_id": place.id,
        "trigger_id": event.trigger_id,
        "event_id": event.id,
        "deliveries": deliveries,
    }
    values |= {"error": error, "traceback": traceback, "set_aside_at": tx.now}
    tx.connection.execute(consumer_letter.insert().values(**values))


def take(tx: Tx, place: Place) -> Redelivery | None:
    """Return the next event that a user wants handed over again, and open its letter; None if there is none.

    The consumer is locked, and so is the batch that follows.
    """
    found = wanted(tx, place)
    if found is None:
        tx.connection.execute(update(consumer).where(consumer.c.id == place.id).values(has_redeliveries=false()))
        return None
    values: dict[str, Any] = {"state": "open", "deliveries": found.deliveries}
    tx.connection.execute(update(consumer_letter).where(_C.id == found.letter_id).values(**values))
    return found


def wanted(tx: Tx, place: Place) -> Redelivery | None:
    """Return the next event that a user wants handed over again; None if there is none."""
    if not place.has_redeliveries:
        return None
    oldest = select(_C.id, _C.trigger_id, _C.event_id, _C.deliveries)
    oldest = oldest.where(_C.consumer_id == place.id, _C.state == "redeliver").order_by(_C.event_id).limit(1)
    row = tx.connection.execute(oldest).first()
    if row is None:
        return None
    event = reading.read_event(tx, place.watcher, row.trigger_id, row.event_id)
    return Redelivery(row.id, event, row.deliveries + 1)


def is_due(tx: Tx, redelivery: Redelivery) -> bool:
    """Whether nobody has handed the event over, discarded it or asked for it again since it was taken."""
    return tx.connection.execute(select(_C.id).where(*_is_same(redelivery))).first() is not None


def hand_over(tx: Tx, place: Place, redelivery: Redelivery) -> None:
    """Resolve the letter of an event that its locked consumer has taken. Raises `places.BatchEnded`."""
    done: dict[str, Any] = {"state": "handed_over", "resolved_at": tx.now}
    tx.connection.execute(update(consumer_letter).where(*_is_same(redelivery)).values(**done))
    places.count_redelivery(tx, place)


def fail(tx: Tx, redelivery: Redelivery, error: str, traceback: str) -> None:
    """Note that the event was not taken again; its letter stays open."""
    values = {"error": storable_text(error, ERROR_CHARS_MAX), "traceback": storable_text(traceback, ERROR_CHARS_MAX)}
    tx.connection.execute(update(consumer_letter).where(*_is_same(redelivery)).values(**values))


def _is_same(redelivery: Redelivery) -> tuple[ColumnElement[bool], ...]:
    return _C.id == redelivery.letter_id, _C.state == "open", _C.deliveries == redelivery.deliveries


class SetAsideVerbs(Verbs):
    """The verbs of users on events that a consumer has set aside."""

    @reading_verb
    def letters(self, tx: Tx, name: str, *, resolved: bool = False) -> list[ConsumerLetter]:
        """Return the newest letters of a consumer, the oldest first, at most `LETTERS_LISTED_MAX`.

        Those that are ``resolved``, too, if asked for. Raises `NoSuchRow`.
        """
        found = _letters(tx, name).where(true() if resolved else _C.resolved_at.is_(None))
        rows = tx.connection.execute(found.order_by(_C.id.desc()).limit(LETTERS_LISTED_MAX)).all()
        return [ConsumerLetter(**row._mapping) for row in rows][::-1]

    @reading_verb
    def some_letters(self, tx: Tx, name: str, *, beyond_event: int | None = None, limit: int) -> list[ConsumerLetter]:
        """Return the unresolved letters of a consumer, those of the newest events first, from one event downwards.

        Raises `NoSuchRow`.
        """
        found = _letters(tx, name).where(_C.resolved_at.is_(None)).order_by(_C.event_id.desc()).limit(limit)
        if beyond_event is not None:
            found = found.where(_C.event_id < beyond_event)
        return [ConsumerLetter(**row._mapping) for row in tx.connection.execute(found)]

    @acting
    def redeliver(self, tx: Tx, name: str, event_id: int | None = None) -> int:
        """Have an event that was set aside, or all of them, handed over with the next batches; return how many.

        Repeating it changes nothing. Raises `NoSuchRow`, `NotSetAside`, and `DatabaseAway` if a batch is handed over
        for longer than a lock is waited for.
        """
        count = _change(tx, name, event_id, state="redeliver")
        tx.connection.execute(update(consumer).where(consumer.c.name == name).values(has_redeliveries=true()))
        tx.notify_readers([])
        _tell(tx, "consumers redeliver", name, event_id, count)
        return count

    @acting
    def discard(self, tx: Tx, name: str, event_id: int | None = None) -> int:
        """Resolve the letter of an event, or all that are unresolved, without handing it over; return how many.

        Raises the errors of `redeliver`.
        """
        count = _change(tx, name, event_id, state="discarded", resolved_at=tx.now)
        _tell(tx, "consumers discard", name, event_id, count)
        return count


def _letters(tx: Tx, name: str) -> Select[Any]:
    columns = [_C[field] for field in ConsumerLetter.__struct_fields__]
    return select(*columns).where(_C.consumer_id == places.look(tx, name).id)


def _tell(tx: Tx, action: Action, name: str, event_id: int | None, count: int) -> None:
    which = {} if event_id is None else {"event": event_id}
    tx.act(action, f"consumer {name}", after={**which, "events": count}, changed=count > 0)


def _change(tx: Tx, name: str, event_id: int | None, **values: object) -> int:
    place = places.lock(tx, name)
    which = [_C.consumer_id == place.id, _C.resolved_at.is_(None)]
    if event_id is not None:
        which.append(_C.event_id == event_id)
    changed = tx.connection.execute(update(consumer_letter).where(*which).values(**values)).rowcount
    if event_id is not None and not changed:
        state = select(_C.state).where(_C.consumer_id == place.id, _C.event_id == event_id)
        raise NotSetAside(name, event_id, tx.connection.execute(state).scalar_one_or_none())
    return int(changed)


def remove(tx: Tx, consumer_id: int) -> None:
    """Delete the letters of a consumer."""
    tx.connection.execute(delete(consumer_letter).where(_C.consumer_id == consumer_id))
