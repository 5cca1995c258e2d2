"""Named consumers: their places in the events of a watcher are rows, moved in the transaction that hands events over.

So the user's rows and the new place are committed together or not at all, and each event is handed over exactly once,
in commit order, whenever a process dies. Workers of one consumer take turns: a batch locks the consumer's row first.
"""

from __future__ import annotations

import difflib
from datetime import datetime

import msgspec
from sqlalchemy import ColumnElement, Row, and_, bindparam, delete, exists, func, or_, select, update

from headgate.store.consuming import reading
from headgate.store.consuming.reading import START, Cursor, Page
from headgate.store.db.bulk import insert_into
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, writing
from headgate.store.db.verbs import reading as reading_verb
from headgate.store.errors import ConsumerExists, NoSuchRow
from headgate.store.tables import asset_watcher, consumer, trigger_event
from headgate.store.triggers.watchers import check_name

CONSUMERS_LISTED_MAX = 1_000
BEHIND_COUNTED_MAX = 10_000  # events that a consumer has not got yet: beyond that, a list says that there are more


class ConsumerRow(msgspec.Struct, frozen=True):
    """One consumer. ``handed_over`` counts the events that it has got, ``moved_at`` is the time of the last of them.

    ``behind``: how many stored events it has not got yet, at most `BEHIND_COUNTED_MAX` + 1.
    """

    id: int
    name: str
    watcher: str
    trigger_id: int
    event_id: int
    handed_over: int
    created_date: datetime
    moved_at: datetime | None
    behind: int = 0

    @property
    def cursor(self) -> Cursor:
        """The place after the last event that it has got."""
        return Cursor(self.trigger_id, self.event_id)


class Place(msgspec.Struct, frozen=True):
    """A consumer whose row is locked, and its place."""

    id: int
    watcher: str
    cursor: Cursor


def is_unread() -> ColumnElement[bool]:
    """Return the condition that a consumer has yet to get an event: such events are not cleaned away."""
    is_after = or_(
        consumer.c.trigger_id < trigger_event.c.trigger_id,
        and_(consumer.c.trigger_id == trigger_event.c.trigger_id, consumer.c.event_id < trigger_event.c.id),
    )
    watched = consumer.join(asset_watcher, asset_watcher.c.name == consumer.c.watcher)
    return exists().select_from(watched).where(asset_watcher.c.trigger_id == trigger_event.c.trigger_id, is_after)


# FOR NO KEY UPDATE: of several workers one has a batch; the others wait, and see the place that it has left.
_LOCK = Prepared(
    select(consumer.c.id, consumer.c.watcher, consumer.c.trigger_id, consumer.c.event_id)
    .where(consumer.c.name == bindparam("of_name"))
    .with_for_update(key_share=True)
)
_LOOK = Prepared(
    select(consumer.c.id, consumer.c.watcher, consumer.c.trigger_id, consumer.c.event_id).where(
        consumer.c.name == bindparam("of_name")
    )
)
_MOVE = Prepared(
    update(consumer)
    .where(consumer.c.id == bindparam("of_id"))
    .values(
        trigger_id=bindparam("to_trigger"),
        event_id=bindparam("to_event"),
        handed_over=consumer.c.handed_over + bindparam("events"),
        moved_at=bindparam("now"),
    )
)


def lock(tx: Tx, name: str) -> Place:
    """Lock a consumer until the transaction ends; return its place. Waits for another worker. Raises `NoSuchRow`."""
    return _place(tx, name, _LOCK)


def look(tx: Tx, name: str) -> Place:
    """Return the place of a consumer. Raises `NoSuchRow`."""
    return _place(tx, name, _LOOK)


def move(tx: Tx, place: Place, page: Page) -> None:
    """Move a locked consumer behind the events of a page."""
    _MOVE.run(
        tx.connection,
        of_id=place.id,
        to_trigger=page.cursor.trigger_id,
        to_event=page.cursor.event_id,
        events=len(page.events),
        now=bound(tx.connection, tx.now),
    )


def _place(tx: Tx, name: str, statement: Prepared) -> Place:
    row = statement.run(tx.connection, of_name=name).fetchone()
    if row is None:
        raise _no_such(tx, name)
    id_, watcher, trigger_id, event_id = row
    return Place(id_, watcher, Cursor(trigger_id, event_id))


def _no_such(tx: Tx, name: str) -> NoSuchRow:
    names = list(tx.connection.execute(select(consumer.c.name).limit(CONSUMERS_LISTED_MAX)).scalars())
    return NoSuchRow("consumer", name, near=difflib.get_close_matches(name, names))


class ConsumerVerbs(Verbs):
    """The verbs of consumers, except the hand-over itself (`headgate.client.consumer`)."""

    @writing
    def add(self, tx: Tx, name: str, watcher: str, after: Cursor = START) -> ConsumerRow:
        """Add a consumer of a watcher, which gets the events after a cursor: by default all that are stored.

        If there is one of this name and this watcher, it is left where it is, so that every start of a process may call
        this. Raises `ConsumerExists` if it is of another watcher, `NoSuchWatcher`, `CursorRefused` and `BadName`.
        """
        check_name(name, "the name of a consumer")
        reading.check_cursor(tx, watcher, after)
        new = insert_into(tx.connection, consumer).values(
            name=name, watcher=watcher, trigger_id=after.trigger_id, event_id=after.event_id, created_date=tx.now
        )
        tx.connection.execute(new.on_conflict_do_nothing())
        found = tx.connection.execute(select(consumer).where(consumer.c.name == name)).one()
        if found.watcher != watcher:
            raise ConsumerExists(name, found.watcher)
        return ConsumerRow(**found._mapping)

    @writing
    def remove(self, tx: Tx, name: str) -> None:
        """Remove a consumer, and with it its place. A batch of it in flight is waited for. Raises `NoSuchRow`."""
        if tx.connection.execute(delete(consumer).where(consumer.c.name == name)).rowcount == 0:
            raise _no_such(tx, name)

    @reading_verb
    def consumer(self, tx: Tx, name: str) -> ConsumerRow:
        """Return a consumer. Raises `NoSuchRow`."""
        row = tx.connection.execute(select(consumer).where(consumer.c.name == name)).first()
        if row is None:
            raise _no_such(tx, name)
        return _shown(tx, row)

    @reading_verb
    def all(self, tx: Tx) -> list[ConsumerRow]:
        """Return the consumers by name, at most `CONSUMERS_LISTED_MAX`."""
        rows = tx.connection.execute(select(consumer).order_by(consumer.c.name).limit(CONSUMERS_LISTED_MAX)).all()
        return [_shown(tx, row) for row in rows]


def _shown(tx: Tx, row: Row[tuple[object, ...]]) -> ConsumerRow:
    named = select(asset_watcher.c.trigger_id).where(asset_watcher.c.name == row.watcher)
    later = and_(trigger_event.c.trigger_id > row.trigger_id, trigger_event.c.trigger_id.in_(named))
    here = and_(trigger_event.c.trigger_id == row.trigger_id, trigger_event.c.id > row.event_id)
    behind = 0
    for which in (here, later):
        some = select(trigger_event.c.id).where(which).limit(BEHIND_COUNTED_MAX + 1 - behind).subquery()
        behind += tx.connection.execute(select(func.count()).select_from(some)).scalar_one()
    return ConsumerRow(**row._mapping, behind=behind)
