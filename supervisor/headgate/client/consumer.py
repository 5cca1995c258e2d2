"""`Consumer`: hands over each event of a watcher exactly once, into a transaction of the user."""

from __future__ import annotations

import sqlite3
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import msgspec
from sqlalchemy import Connection, event

from headgate.client.waiting import check_seconds, wait_for_page
from headgate.protocol import marks
from headgate.protocol.errors import sentence_of
from headgate.store.consuming import failures, places, reading, set_aside
from headgate.store.consuming.failures import Recorded
from headgate.store.consuming.places import BatchEnded, Place, StatementFailed
from headgate.store.consuming.reading import BATCH_EVENTS, Cursor, Event, Page
from headgate.store.consuming.set_aside import Redelivery
from headgate.store.db.engine import LOCK_TIMEOUT_S
from headgate.store.db.prepared import driver_of
from headgate.store.db.transaction import Database, Tx
from headgate.store.errors import ConsumerBusy, StoreError


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


class _Handed(msgspec.Struct, frozen=True):
    """The events of a batch, from a place that is locked, or one event that is handed over again."""

    place: Place
    page: Page
    redelivery: Redelivery | None

    @property
    def events(self) -> tuple[Event, ...]:
        return self.page.events

    @property
    def cursor(self) -> Cursor:
        return self.page.cursor

    def finish(self, tx: Tx) -> None:
        """Record that the events are taken, in the transaction of the batch."""
        if self.redelivery is not None:
            set_aside.hand_over(tx, self.place, self.redelivery)
        elif self.events:
            places.move(tx, self.place, self.page)

    def count_failure(self, tx: Tx, error: str, lines: str) -> None:
        """Record that they are not, in a transaction of its own after the rollback."""
        if self.redelivery is not None:
            set_aside.fail(tx, self.redelivery, error, lines)
        elif self.events:
            failures.count_failure(tx, self.place, self.cursor, error, lines)


class Consumer:
    """A named consumer of the events of one watcher. Its place is stored by headgate.

    Any number of processes may be workers of one consumer: they take turns. It is used by one thread.
    """

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self.name = name
        self._is_trusted = False  # the last batch was taken, so the next one is not recorded
        self._recorded: Recorded | None = None  # by this process, and not handed over yet
        self._guarded: Connection | None = None

    @contextmanager
    def batch(self, limit: int = BATCH_EVENTS) -> Generator[Batch]:
        """Hand over the next events, at most ``limit``, in a transaction that ends with the block.

        The end of the block commits what was done on ``batch.connection``, and the consumer's place, together; an
        exception rolls back both, is passed on as it is, and the same events are handed over again. If there are no new
        events, the batch is empty.

        After a batch has failed, its events are handed over one by one. One that has failed alone as often as the
        ``max_deliveries`` of the consumer is set aside, and the consumer goes on with the next; see docs/consuming.md.

        While another worker of this consumer has a batch, this waits for it. On SQLite nobody else writes while a batch
        is open. On PostgreSQL a batch must end within 35 s, and may not leave its connection idle for 10 s: the server
        would end its transaction.

        ``batch.connection`` refuses everything after the block with `BatchEnded`.

        Raises `ConsumerBusy` if another worker keeps its batch for longer than 5 s (`DatabaseAway` on SQLite, which
        does not tell who writes), `NoSuchRow` if the consumer was removed, `BatchEnded` if the block has committed or
        rolled back, `StatementFailed` if it has hidden an error of PostgreSQL's, and `DatabaseAway` if it is unknown
        whether the commit arrived: it did or did not for both the rows and the place, so simply go on with the next
        batch.
        """
        reading.check_limit(limit)
        failed: BaseException | None = None
        handed: _Handed | None = None
        is_cut = False
        try:
            with self._open(limit) as (tx, handed):
                self._guard(tx.connection)
                with _committed_by_us(tx.connection):
                    try:
                        yield Batch(handed.events, tx.connection, handed.cursor)
                        if _transaction_status(tx.connection) == _IN_ERROR:
                            raise StatementFailed
                    except BaseException as error:
                        failed = error  # not ours: it is neither translated nor hidden
                        is_cut = _is_cut(tx.connection)
                        raise _RolledBack from None
                marks.reach("consumer.block_done")
                handed.finish(tx)
                marks.reach("consumer.place_moved")
            marks.reach("consumer.committed")
            self._is_trusted = self._is_trusted or bool(handed.events)
        except (_RolledBack, StoreError):
            self._is_trusted = False
            self._database.close()  # whatever the block has done to the connection, the next batch has another
            if failed is None:
                raise
        if failed is None:
            return
        if handed is not None and isinstance(failed, Exception) and not is_cut and not isinstance(failed, BatchEnded):
            self._count(handed, failed)
        raise failed

    def _guard(self, connection: Connection) -> None:
        """Have the connection begin transactions of ours alone: nobody would commit one that begins after a block."""

        def refuse(_: Connection) -> None:
            if not self._database.is_beginning:
                raise BatchEnded("the transaction of the batch has ended: what is written belongs into its block")

        if self._guarded is not connection:
            self._guarded = connection
            event.listen(connection, "begin", refuse)

    @contextmanager
    def _open(self, limit: int) -> Generator[tuple[Tx, _Handed]]:
        """Begin the transaction of a batch, after it was recorded in another one, if that is needed."""
        is_recorded = False
        redelivery: Redelivery | None = None
        while True:
            with self._database.writing() as tx:
                place = self._lock(tx)
                if is_recorded or (self._is_trusted and not place.is_careful and not place.has_redeliveries):
                    if redelivery is not None and not set_aside.is_due(tx, redelivery):
                        redelivery = None
                    if redelivery is None:
                        page = reading.read_page(tx, place.watcher, place.cursor, 1 if place.is_careful else limit)
                    else:
                        page = Page((redelivery.event,), place.cursor)
                    marks.reach("consumer.batch_read")
                    self._recorded = None
                    yield tx, _Handed(place, page, redelivery)
                    return
                if place.has_redeliveries:
                    redelivery = set_aside.take(tx, place)
                if redelivery is None:
                    self._recorded = failures.record(tx, place, limit, self._recorded)
                is_recorded = True
            marks.reach("consumer.batch_recorded")

    def _count(self, handed: _Handed, failed: Exception) -> None:
        """Count that the block of a batch has raised. If the database is away, it is not counted."""
        marks.reach("consumer.rolled_back")
        lines = "".join(traceback.format_exception(failed))
        try:
            with self._database.writing() as tx:
                handed.count_failure(tx, sentence_of(failed), lines)
                marks.reach("consumer.failure_counted")
        except StoreError as error:
            failed.add_note(f"headgate has not counted this failure: {error}")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there are events to hand over; return False if there are none within ``timeout_s`` seconds.

        It waits as `headgate.client.Client.follow` does. Another worker may be faster: the next batch may be empty.
        Raises ValueError for a ``timeout_s`` below 0.
        """
        check_seconds("timeout_s", timeout_s)

        def look() -> Page:
            with self._database.reading() as tx:
                place = places.look(tx, self.name)
                page = reading.read_page(tx, place.watcher, place.cursor, 1)
                redelivery = set_aside.wanted(tx, place)
                return page if redelivery is None else msgspec.structs.replace(page, events=(redelivery.event,))

        return bool(wait_for_page(self._database, look, timeout_s).events)

    def _lock(self, tx: Tx) -> Place:
        try:
            return places.lock(tx, self.name)
        except Exception as error:
            if getattr(error, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
                raise ConsumerBusy(self.name, LOCK_TIMEOUT_S) from error
            raise


_IDLE, _IN_ERROR = 0, 3  # libpq's PQTRANS_IDLE and PQTRANS_INERROR
_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's code: a lock was not available in time


def _is_cut(connection: Connection) -> bool:
    """Whether the connection is gone: then an error says nothing about the events."""
    return connection.closed or connection.invalidated or bool(getattr(driver_of(connection), "closed", False))


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
    is_ours = transaction is not None and transaction.is_active and connection.get_transaction() is transaction
    if not is_ours or not _is_in_transaction(connection):
        raise BatchEnded


def _is_in_transaction(connection: Connection) -> bool:
    """Whether the driver is: SQL that is passed to it as text may have ended what SQLAlchemy has begun."""
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        return driver.in_transaction
    return _transaction_status(connection) != _IDLE


def _transaction_status(connection: Connection) -> int | None:
    """Return what libpq says of the transaction; None if it does not, or if the block has closed the connection."""
    if connection.closed or connection.invalidated:
        return None
    status = getattr(getattr(connection.connection.driver_connection, "info", None), "transaction_status", None)
    return None if status is None else int(status)
