"""Stores for the threads that answer requests: they cannot write, and have no key to decrypt with.

They are kept, and closed before they are used again if a new one would read another database, as the file of SQLite was
replaced by a backup, or if the server has cut their connections, as it does when it begins anew.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import structlog

from headgate.store.db.engine import database_name, open_engine
from headgate.store.db.schema import require_current
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway, DatabaseBusy
from headgate.store.store import Store

log = structlog.get_logger(__name__)

STORES_MAX = 8  # connections, and so pages that are made at a time
WAIT_S_MAX = 5.0  # for one of them; every statement ends within `LOOK_S_MAX`


class Stores:
    """Up to `STORES_MAX` stores on one database, each used by one thread at a time. `close` them."""

    def __init__(self, url: str) -> None:
        """Nothing is connected yet. Raises `UnsupportedDatabase`."""
        self.engine = open_engine(url, reads_only=True)
        self._free = threading.BoundedSemaphore(STORES_MAX)
        self._idle: list[Store] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def check(self) -> None:
        """Raise `SchemaOutOfDate` unless the database has the tables of this headgate, `DatabaseAway` if it is away."""
        require_current(self.engine)

    @contextmanager
    def one(self) -> Generator[Store]:
        """Lend a store for one request. Raises `DatabaseBusy` if all are in use for too long."""
        if not self._free.acquire(timeout=WAIT_S_MAX):
            raise DatabaseBusy(database_name(self.engine), f"{STORES_MAX} pages are being made already")
        try:
            store = self._current() or Store(self.engine, secrets=Secrets.none())
            try:
                yield store
            finally:
                self._take_back(store)
        finally:
            self._free.release()

    def _current(self) -> Store | None:
        """Return an idle store that reads what a new one would; those that do not are closed."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                store = self._idle.pop()
            if self._is_current(store):
                return store
            why = "it was cut, or the file was replaced"
            log.info("a connection is opened anew", why=why, database=database_name(self.engine))
            store.close()

    def _take_back(self, store: Store) -> None:
        keeps = self._is_current(store)  # this notes its log, too, which is open by now
        with self._lock:
            keeps = keeps and not self._is_closed
            if keeps:
                self._idle.append(store)
        if not keeps:
            store.close()

    @staticmethod
    def _is_current(store: Store) -> bool:
        try:
            return store.database.is_as_opened()
        except DatabaseAway:  # the next statement says so
            return False

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for store in idle:
            store.close()
        self.engine.dispose()
