"""`Consumer`: hands over each event of a watcher exactly once, into a transaction of the user."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import msgspec
from sqlalchemy import Connection, event

from headgate.client.waiting import wait_for_page
from headgate.store.consuming import consumers, reading
from headgate.store.consuming.reading import BATCH_EVENTS, Cursor, Event, Page
from headgate.store.db.engine import LOCK_TIMEOUT_S
from headgate.store.db.transaction import Database, Tx
from headgate.store.errors import ConsumerBusy, StoreError


class BatchEnded(StoreError):
    """The block of a batch has ended its transaction itself; nothing of it was committed.

    The end of the block commits the rows and the consumer's place together. For a part that may fail by itself use
    ``batch.connection.begin_nested()``.
    """

    def __init__(self) -> None:
        super().__init__("a batch is committed by the end of its block: the block must not call commit or rollback")


class Batch(msgspec.Struct, frozen=True):
    """Events that are handed over, and the open transaction in which they are.

    ``connection`` is a connection of SQLAlchemy in this transaction, on the database of headgate. ``cursor`` is the
    place after the last of the ``events``.
    """

    events: tuple[Event, ...]
    connection: Connection
    cursor: Cursor

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


class Consumer:
    """A named consumer of the events of one watcher. Its place is stored by headgate.

    Any number of processes may be workers of one consumer: they take turns. It is used by one thread.
    """

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self.name = name

    @contextmanager
    def batch(self, limit: int = BATCH_EVENTS) -> Generator[Batch]:
        """Hand over the next events, at most ``limit``, in a transaction that ends with the block.

        The end of the block commits what was done on ``batch.connection``, and the consumer's place, together; an
        exception rolls back both, is passed on as it is, and the same events are handed over again. If there are no new
        events, the batch is empty.

        While another worker of this consumer has a batch, this waits for it. On SQLite nobody else writes while a batch
        is open. On PostgreSQL a batch must end within 35 s, and may not leave its connection idle for 10 s: the server
        would end its transaction.

        Raises `ConsumerBusy` if another worker keeps its batch for longer than 5 s (`DatabaseAway` on SQLite, which
        does not tell who writes), `NoSuchRow` if the consumer was removed, `BatchEnded` if the block has committed or
        rolled back, and `DatabaseAway` if it is unknown whether the commit arrived: it did or did not for both the rows
        and the place, so simply go on with the next batch.
        """
        reading.check_limit(limit)
        failed: BaseException | None = None
        try:
            with self._database.writing() as tx:
                place = self._lock(tx)
                page = reading.read_page(tx, place.watcher, place.cursor, limit)
                batch = Batch(page.events, tx.connection, page.cursor)
                with _committed_by_us(tx.connection):
                    try:
                        yield batch
                    except BaseException as error:
                        failed = error  # not ours: it is neither translated nor hidden
                        raise _RolledBack from None
                if page.events:
                    consumers.move(tx, place, page)
        except (_RolledBack, StoreError):
            self._database.close()  # whatever the block has done to the connection, the next batch has another
            if failed is None:
                raise
        if failed is not None:
            raise failed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there are events to hand over; return False if there are none within ``timeout_s`` seconds.

        It waits as `headgate.client.Client.follow` does. Another worker may be faster: the next batch may be empty.
        """

        def look() -> Page:
            with self._database.reading() as tx:
                place = consumers.look(tx, self.name)
                return reading.read_page(tx, place.watcher, place.cursor, 1)

        return bool(wait_for_page(self._database, look, timeout_s).events)

    def _lock(self, tx: Tx) -> consumers.Place:
        try:
            return consumers.lock(tx, self.name)
        except Exception as error:
            if getattr(error, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
                raise ConsumerBusy(self.name, LOCK_TIMEOUT_S) from error
            raise


_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's code: a lock was not available in time


class _RolledBack(Exception):
    """The block of a batch has raised: its transaction is rolled back."""


@contextmanager
def _committed_by_us(connection: Connection) -> Generator[None]:
    """Raise `BatchEnded` if the block within commits or rolls back: its rows would be committed without the place."""
    transaction = connection.get_transaction()

    def refuse(_: Connection) -> None:
        raise BatchEnded

    event.listen(connection, "commit", refuse)
    try:
        yield
    finally:
        event.remove(connection, "commit", refuse)
    if transaction is None or not transaction.is_active or connection.get_transaction() is not transaction:
        raise BatchEnded
