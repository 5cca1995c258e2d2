"""`Client`: the events of watchers, as a program of a user reads them, and signals."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate.client.consumer import Consumer
from headgate.client.signals import ClientSignals
from headgate.client.waiting import check_seconds, wait_for_page
from headgate.store.consuming import reading
from headgate.store.consuming.consumers import ConsumerVerbs
from headgate.store.consuming.failures import MAX_DELIVERIES
from headgate.store.consuming.reading import BATCH_EVENTS, START, Cursor, Event, Page
from headgate.store.db import schema
from headgate.store.db.engine import database_name, is_in_memory, open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Database
from headgate.store.errors import DatabaseFault


@contextmanager
def open_client(url: str) -> Generator[Client]:
    """Open the database of headgate, for one thread; ``url`` is ``sqlite:///FILE`` or ``postgresql://...``.

    Open it after a fork, not before. Every method may raise `DatabaseAway`; call it again later. Raises
    `UnsupportedDatabase`, `DatabaseAway`, `DatabaseFault` if there is no such file, and `SchemaOutOfDate` if the
    database has to be upgraded by ``headgate db upgrade`` first.
    """
    engine = open_engine(url)
    if engine.dialect.name == "sqlite" and not is_in_memory(engine) and not Path(engine.url.database or "").exists():
        # Opening it would create it, and leave an empty file if a name was misspelt.
        raise DatabaseFault(database_name(engine), "there is no such file; `headgate db upgrade` makes it")
    schema.require_current(engine)
    database = Database(engine, Secrets.none(), None)
    try:
        yield Client(database)
    finally:
        database.close()
        engine.dispose()


class Client(ClientSignals):
    """An open database of headgate. It is used by one thread, and has one connection."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._consumers = ConsumerVerbs(database)

    def events(self, watcher: str, *, after: Cursor = START, limit: int = BATCH_EVENTS) -> list[Event]:
        """Return up to ``limit`` stored events of a watcher, in commit order, from the place after a cursor on.

        Begin with `START`, and go on with the `Event.cursor` of the last event; an empty list means that there are no
        more now. ``watcher`` is a name: if a watcher was removed and added again, those of both are read, the older
        first. ``limit`` is at most `BATCH_EVENTS_MAX`; each event may have a payload of 1 MiB.

        Raises `NoSuchWatcher`, `ValueRefused` for a ``limit`` out of range, and `CursorRefused` for a cursor that is
        negative, beyond the end, or of another watcher or database.
        """
        reading.check_limit(limit)
        with self._database.reading() as tx:
            reading.check_cursor(tx, watcher, after)
            return list(reading.read_page(tx, watcher, after, limit).events)

    def follow(self, watcher: str, *, after: Cursor = START, idle_s: float | None = None) -> Iterator[Event]:
        """Iterate over the events of a watcher after a cursor, in commit order, and wait for those to come.

        It ends after ``idle_s`` seconds without a new event, and never by itself if that is None. While it waits, it
        runs no statement except a look every few minutes: it is woken by the supervisor. On SQLite it also looks every
        5 s whether anything was committed. Raises the errors of `events`, and ValueError for an ``idle_s`` below 0.
        """
        check_seconds("idle_s", idle_s)
        with self._database.reading() as tx:
            reading.check_cursor(tx, watcher, after)
        return self._follow(watcher, after, idle_s)

    def _follow(self, watcher: str, after: Cursor, idle_s: float | None) -> Iterator[Event]:
        cursor = after

        def look() -> Page:
            with self._database.reading() as tx:
                return reading.read_page(tx, watcher, cursor, BATCH_EVENTS)

        while (page := wait_for_page(self._database, look, idle_s)).events:
            for event in page.events:
                cursor = event.cursor
                yield event

    def newest(self, watcher: str) -> Cursor:
        """Return the place after all events of a watcher that are stored now. Raises `NoSuchWatcher`."""
        with self._database.reading() as tx:
            return reading.newest_cursor(tx, watcher)

    def add_consumer(
        self, name: str, watcher: str, *, after: Cursor = START, max_deliveries: int = MAX_DELIVERIES
    ) -> Consumer:
        """Return the consumer of this name, which is added if there is none yet.

        A new one gets the events after the cursor, by default all that are stored; one that is there already stays
        where it is, and as it is. ``max_deliveries``: how often an event is handed over alone before it is set aside;
        0: always again. Raises `ConsumerExists` if it reads another watcher, `NoSuchWatcher`, `CursorRefused`,
        `ValueRefused` for a negative number, and `BadName` for a name that cannot be stored and shown safely.
        """
        self._consumers.add(name, watcher, after, max_deliveries)
        return Consumer(self._database, name)

    def consumer(self, name: str) -> Consumer:
        """Return the consumer of this name. Raises `NoSuchRow` if there is none: it would begin anew otherwise."""
        self._consumers.consumer(name)
        return Consumer(self._database, name)

    def remove_consumer(self, name: str) -> None:
        """Remove a consumer, its place and its letters. Raises `NoSuchRow`."""
        self._consumers.remove(name)
