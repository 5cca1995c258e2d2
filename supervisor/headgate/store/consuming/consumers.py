"""Named consumers: their places in the events of a watcher are rows, moved in the transaction that hands events over.

So the user's rows and the new place are committed together or not at all, and each event is handed over exactly once,
in commit order, whenever a process dies. Workers of one consumer take turns: a batch locks the consumer's row first.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Row,
    ScalarSelect,
    Select,
    and_,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    update,
)

from headgate.store.access.audit import Detail
from headgate.store.access.tables import ONE
from headgate.store.consuming import places, reading, set_aside
from headgate.store.consuming.failures import MAX_DELIVERIES
from headgate.store.consuming.places import CONSUMERS_LISTED_MAX
from headgate.store.consuming.reading import START, Cursor
from headgate.store.consuming.set_aside import SetAsideVerbs
from headgate.store.db.bulk import insert_into
from headgate.store.db.times import UtcDateTime
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import acting
from headgate.store.db.verbs import reading as reading_verb
from headgate.store.errors import ConsumerExists
from headgate.store.tables import asset_watcher, consumer, consumer_letter, trigger_event
from headgate.store.triggers.watchers import check_max_deliveries, check_name

BEHIND_COUNTED_MAX = 10_000  # events that a consumer has not got yet: beyond that, a list says that there are more

BEHIND_ON_PAGE_MAX = 1_000  # the same for a page, which has many consumers, and is to be made at once


class ConsumerRow(msgspec.Struct, frozen=True):
    """One consumer. ``handed_over`` counts the events that it has got, ``moved_at`` is the time of the last of them.

    ``max_deliveries``: how often an event is handed over alone before it is set aside; 0: always again. ``failures``:
    how often the next event has failed alone, at ``failed_at`` for the last time. ``last_error`` may be of an earlier
    one. ``aside_in_a_row``: how many events were set aside since one was taken. ``behind``: how many stored events it
    has not got yet, at most `BEHIND_COUNTED_MAX` + 1, and ``oldest_at``: when the first of them was stored.
    ``set_aside``: how many letters are unresolved.
    """

    id: int
    name: str
    watcher: str
    trigger_id: int
    event_id: int
    handed_over: int
    created_date: datetime
    moved_at: datetime | None
    max_deliveries: int
    failures: int
    last_error: str | None
    failed_at: datetime | None
    aside_in_a_row: int
    behind: int = 0
    oldest_at: datetime | None = None
    set_aside: int = 0

    @property
    def cursor(self) -> Cursor:
        """The place after the last event that it has got."""
        return Cursor(self.trigger_id, self.event_id)


def is_unread() -> ColumnElement[bool]:
    """Return the condition that a consumer has yet to get an event: such events are not cleaned away."""
    is_after = or_(
        consumer.c.trigger_id < trigger_event.c.trigger_id,
        and_(consumer.c.trigger_id == trigger_event.c.trigger_id, consumer.c.event_id < trigger_event.c.id),
    )
    watched = consumer.join(asset_watcher, asset_watcher.c.name == consumer.c.watcher)
    return exists(ONE).select_from(watched).where(asset_watcher.c.trigger_id == trigger_event.c.trigger_id, is_after)


def is_needed() -> ColumnElement[bool]:
    """Return the condition that a consumer has yet to get an event, or has set it aside."""
    refers = and_(consumer_letter.c.event_id == trigger_event.c.id, consumer_letter.c.resolved_at.is_(None))
    return or_(is_unread(), exists(ONE).where(refers))


_SHOWN = [consumer.c[name] for name in ConsumerRow.__struct_fields__ if name in consumer.c]


class ConsumerVerbs(SetAsideVerbs):
    """The verbs of consumers, except the hand-over itself (`headgate.client.consumer`)."""

    @acting
    def add(
        self, tx: Tx, name: str, watcher: str, after: Cursor = START, max_deliveries: int = MAX_DELIVERIES
    ) -> ConsumerRow:
        """Add a consumer of a watcher, which gets the events after a cursor: by default all that are stored.

        If there is one of this name and this watcher, it is left where it is, so that every start of a process may call
        this. Raises `ConsumerExists` if it is of another watcher, `NoSuchWatcher`, `CursorRefused`,
        `ValueRefused` for ``max_deliveries`` out of range, and `BadName`.
        """
        check_name(name, "the name of a consumer")
        check_max_deliveries(max_deliveries)
        reading.check_is_cursor(after)
        known = select(consumer.c.id).where(consumer.c.name == name, consumer.c.watcher == watcher)
        if tx.connection.execute(known).first() is None:  # its watcher may be gone, and all of its rows
            reading.check_cursor(tx, watcher, after)
        new = insert_into(tx.connection, consumer).values(
            name=name,
            watcher=watcher,
            trigger_id=after.trigger_id,
            event_id=after.event_id,
            created_date=tx.now,
            max_deliveries=max_deliveries,
        )
        is_new = tx.connection.execute(new.on_conflict_do_nothing()).rowcount > 0
        told: Detail = {"watcher": watcher, "max_deliveries": max_deliveries}
        tx.act("consumers add", f"consumer {name}", after=told, changed=is_new)
        found = tx.connection.execute(select(*_SHOWN).where(consumer.c.name == name)).one()
        if found.watcher != watcher:
            raise ConsumerExists(name, found.watcher)
        return ConsumerRow(**found._mapping)

    @acting
    def remove(self, tx: Tx, name: str) -> None:
        """Remove a consumer, its place and its letters. A batch of it in flight is waited for. Raises `NoSuchRow`."""
        place = places.lock(tx, name)
        set_aside.remove(tx, place.id)
        tx.connection.execute(delete(consumer).where(consumer.c.id == place.id))
        tx.act("consumers remove", f"consumer {name}")

    @acting
    def set_max_deliveries(self, tx: Tx, name: str, max_deliveries: int) -> None:
        """Say how often an event is handed over alone before it is set aside; 0: always again. Raises `NoSuchRow`."""
        check_max_deliveries(max_deliveries)
        changed = update(consumer).where(consumer.c.name == name).values(max_deliveries=max_deliveries)
        if tx.connection.execute(changed).rowcount == 0:
            raise places.no_such(tx, name)
        tx.act("consumers set", f"consumer {name}", after={"max_deliveries": max_deliveries})

    @reading_verb
    def consumer(self, tx: Tx, name: str) -> ConsumerRow:
        """Return a consumer. Raises `NoSuchRow`."""
        row = tx.connection.execute(_FULLY.where(consumer.c.name == name)).first()
        if row is None:
            raise places.no_such(tx, name)
        return _shown(row)

    @reading_verb
    def all(self, tx: Tx) -> list[ConsumerRow]:
        """Return the consumers by name, at most `CONSUMERS_LISTED_MAX`."""
        found = _FULLY.order_by(consumer.c.name).limit(CONSUMERS_LISTED_MAX)
        return [_shown(row) for row in tx.connection.execute(found)]

    @reading_verb
    def oldest(self, tx: Tx, *, limit: int) -> dict[str, float]:
        """Return the age in seconds of the oldest event that each consumer has yet to get, 0 if it has all.

        Of more consumers than ``limit`` those are told whose events are the oldest.
        """
        oldest_at = OLDEST_AT.label("oldest_at")
        found = select(consumer.c.name, oldest_at).order_by(oldest_at.asc().nulls_last(), consumer.c.name).limit(limit)
        rows = tx.connection.execute(found)
        return {name: 0.0 if at is None else max(0.0, (tx.now - at).total_seconds()) for name, at in rows}

    @reading_verb
    def some(self, tx: Tx, *, beyond: str | None = None, limit: int) -> list[ConsumerRow]:
        """Return consumers by name, those beyond a name. All counts are at most `BEHIND_ON_PAGE_MAX`."""
        found = _ON_PAGE.order_by(consumer.c.name).limit(limit)
        if beyond is not None:
            found = found.where(consumer.c.name > beyond)
        return [_shown(row, BEHIND_ON_PAGE_MAX) for row in tx.connection.execute(found)]


# An event of its own trigger is behind a consumer by its id; any of a later trigger of its watcher is.
_EVENT = trigger_event.c
_NAMED = select(asset_watcher.c.trigger_id).where(asset_watcher.c.name == consumer.c.watcher).correlate(consumer)
_HERE = (_EVENT.trigger_id == consumer.c.trigger_id, _EVENT.id > consumer.c.event_id)
_LATER = (_EVENT.trigger_id > consumer.c.trigger_id, _EVENT.trigger_id.in_(_NAMED))


def _counted(most: int, *where: ColumnElement[bool]) -> ScalarSelect[int]:
    some = select(literal(1)).where(*where).limit(most).correlate(consumer)
    return select(func.count()).select_from(some.subquery()).scalar_subquery()


def _oldest_at() -> ColumnElement[datetime]:
    """Return when the first event was stored that a consumer has yet to get.

    The triggers are looked at one by one, each by the index of its events: a join might read those of all others.
    """
    in_order = select(_EVENT.stored_at).order_by(_EVENT.trigger_id, _EVENT.id).limit(1)
    here = in_order.where(*_HERE).correlate(consumer).scalar_subquery()
    later, beyond = asset_watcher.alias("later"), trigger_event.alias("beyond")
    first = select(beyond.c.stored_at).where(beyond.c.trigger_id == later.c.trigger_id).order_by(beyond.c.id).limit(1)
    first_at = first.correlate(later).scalar_subquery()
    is_later = (later.c.name == consumer.c.watcher, later.c.trigger_id > consumer.c.trigger_id, first_at.is_not(None))
    first_later = select(first_at).where(*is_later).order_by(later.c.trigger_id).limit(1).correlate(consumer)
    return func.coalesce(here, first_later.scalar_subquery(), type_=UtcDateTime)


OLDEST_AT = _oldest_at()


def _with_counts(behind_max: int, letters_max: int) -> Select[Any]:
    """Return the statement for consumers."""
    letters = consumer_letter.c
    behind = _counted(behind_max, *_HERE) + _counted(behind_max, *_LATER)
    aside = _counted(letters_max, letters.consumer_id == consumer.c.id, letters.resolved_at.is_(None))
    return select(*_SHOWN, behind.label("behind"), OLDEST_AT.label("oldest_at"), aside.label("set_aside"))


_FULLY = _with_counts(BEHIND_COUNTED_MAX + 1, set_aside.LETTERS_LISTED_MAX)
_ON_PAGE = _with_counts(BEHIND_ON_PAGE_MAX, BEHIND_ON_PAGE_MAX)


def _shown(row: Row[Any], behind_max: int = BEHIND_COUNTED_MAX + 1) -> ConsumerRow:
    return ConsumerRow(**dict(row._mapping) | {"behind": min(row.behind, behind_max)})
