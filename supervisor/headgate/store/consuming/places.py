"""The place of a consumer: locked for a batch, looked at, and moved."""

from __future__ import annotations

import difflib
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import bindparam, literal_column, null, select, update

from headgate.store.consuming.reading import START, Cursor, Page
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import DatabaseNow, TransactionBegan, read
from headgate.store.db.transaction import Tx
from headgate.store.errors import NoSuchRow, StoreError
from headgate.store.tables import consumer

CONSUMERS_LISTED_MAX = 1_000


class BatchEnded(StoreError):
    """The block of a batch has ended its transaction itself, or its connection was used after it.

    Nothing of the block was committed, or nothing of what came after it. What the block has committed by itself, with
    SQL as text, is. The end of the block commits the rows and the consumer's place together. For a part that may fail
    by itself use ``batch.connection.begin_nested()``.
    """

    def __init__(
        self, problem: str = "a batch is committed by the end of its block: the block must not call commit or rollback"
    ) -> None:
        super().__init__(problem)


class StatementFailed(StoreError):
    """A statement in the block of a batch has failed, and the block has hidden the error; nothing was committed.

    PostgreSQL takes nothing more in such a transaction. It counts as a failure of the events, as the error would have.
    """

    def __init__(self) -> None:
        super().__init__(
            "a statement in the block has failed, and the block has caught its error: PostgreSQL commits nothing "
            "then. Put what may fail into `with batch.connection.begin_nested()`"
        )


class Place(msgspec.Struct, frozen=True):
    """A consumer, its place, and its trouble with the next events: see the columns of its table.

    ``id`` is that of its row, which is locked if the place comes from `lock`, by the transaction that ``began`` names.
    """

    id: int
    began: Any
    name: str
    watcher: str
    cursor: Cursor
    max_deliveries: int
    failures: int
    careful_to: Cursor
    taken_to: Cursor
    taken_at: datetime | None
    aside_in_a_row: int
    has_redeliveries: bool

    @property
    def is_careful(self) -> bool:
        """Whether one of the next events may be bad, so that they are handed over one by one."""
        return self.failures > 0 or self.cursor < self.careful_to


_COLUMNS = (
    *(consumer.c.id, consumer.c.watcher, consumer.c.trigger_id, consumer.c.event_id, consumer.c.max_deliveries),
    *(consumer.c.failures, consumer.c.careful_to, consumer.c.taken_to, consumer.c.taken_at),
    *(consumer.c.aside_in_a_row, consumer.c.has_redeliveries, TransactionBegan()),
)
_IS_SAME = (consumer.c.id == bindparam("of_id"), TransactionBegan() == bindparam("began"))
# FOR NO KEY UPDATE: of several workers one has a batch; the others wait, and see the place that it has left.
_LOCK = Prepared(select(*_COLUMNS).where(consumer.c.name == bindparam("of_name")).with_for_update(key_share=True))
_LOOK = Prepared(select(*_COLUMNS).where(consumer.c.name == bindparam("of_name")))
_MOVE = Prepared(
    update(consumer)
    .where(*_IS_SAME)
    .values(
        trigger_id=bindparam("to_trigger"),
        event_id=bindparam("to_event"),
        handed_over=consumer.c.handed_over + bindparam("events"),
        moved_at=DatabaseNow(),
        failures=literal_column("0"),
        careful_to=bindparam("still_careful_to"),
        taken_to=null(),
        taken_at=null(),
        aside_in_a_row=literal_column("0"),
    )
)


_COUNT = Prepared(
    update(consumer).where(*_IS_SAME).values(handed_over=consumer.c.handed_over + 1, moved_at=DatabaseNow())
)


def lock(tx: Tx, name: str) -> Place:
    """Lock a consumer until the transaction ends; return its place. Waits for another worker. Raises `NoSuchRow`."""
    return _place(tx, name, _LOCK)


def look(tx: Tx, name: str) -> Place:
    """Return the place of a consumer. Raises `NoSuchRow`."""
    return _place(tx, name, _LOOK)


def move(tx: Tx, place: Place, page: Page) -> None:
    """Move a locked consumer behind the events of a page, which it has taken.

    Raises `BatchEnded` if the transaction is another one than that which has locked it.
    """
    moved = _MOVE.run(
        tx.connection,
        of_id=place.id,
        began=place.began,
        to_trigger=page.cursor.trigger_id,
        to_event=page.cursor.event_id,
        events=len(page.events),
        still_careful_to=str(place.careful_to) if page.cursor < place.careful_to else None,
    )
    if moved.rowcount != 1:
        raise BatchEnded


def count_redelivery(tx: Tx, place: Place) -> None:
    """Count an event that a locked consumer has taken, which stays where it is. Raises `BatchEnded` as `move` does."""
    if _COUNT.run(tx.connection, of_id=place.id, began=place.began).rowcount != 1:
        raise BatchEnded


def _place(tx: Tx, name: str, statement: Prepared) -> Place:
    row = statement.run(tx.connection, of_name=name).fetchone()
    if row is None:
        raise no_such(tx, name)
    (
        id_,
        watcher,
        trigger_id,
        event_id,
        max_deliveries,
        failures,
        careful_to,
        taken_to,
        taken_at,
        in_a_row,
        redeliver,
        began,
    ) = row
    return Place(
        id=id_,
        began=began,
        name=name,
        watcher=watcher,
        cursor=Cursor(trigger_id, event_id),
        max_deliveries=max_deliveries,
        failures=failures,
        careful_to=START if careful_to is None else Cursor.parse(careful_to),
        taken_to=START if taken_to is None else Cursor.parse(taken_to),
        taken_at=None if taken_at is None else read(tx.connection, taken_at),
        aside_in_a_row=in_a_row,
        has_redeliveries=bool(redeliver),
    )


def no_such(tx: Tx, name: str) -> NoSuchRow:
    """Return the error for a name that no consumer has."""
    names = list(tx.connection.execute(select(consumer.c.name).limit(CONSUMERS_LISTED_MAX)).scalars())
    return NoSuchRow("consumer", name, near=difflib.get_close_matches(name, names))
