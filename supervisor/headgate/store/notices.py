"""Whether anybody else may have written to the database lately, without asking it.

A supervisor has to hear of triggers that users add and remove. Asking costs a statement each time, and nearly always
the answer is no. So it asks rarely, and looks often: on PostgreSQL at the notifications of those who write, on SQLite
at its files, which every writer changes. A notice may come for nothing and, in the worst case, not at all (a
connection pool in between does not hand notifications on; two writes within one tick of the file system's clock look
like one). It only ever brings forward a question that is asked anyway.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from sqlalchemy import Connection, Engine

from headgate.store.engine import is_in_memory
from headgate.store.prepared import driver_of

if TYPE_CHECKING:
    import psycopg

CHANNEL = "headgate_triggers"  # of PostgreSQL's notifications: some trigger may be claimable now, or was removed


class Notices(Protocol):
    """What one connection of a store notices."""

    def has_news(self) -> bool:
        """Whether anybody else may have written since this was asked last. Raises what the driver raises."""
        ...

    def own_write_begins(self) -> None:
        """A transaction of our own has begun: nobody else writes until it has ended."""
        ...

    def own_write_ended(self) -> None:
        """It has ended."""
        ...


def tell(connection: Connection) -> None:
    """Have the others notice, once the transaction is committed."""
    if connection.dialect.name == "postgresql":
        driver_of(connection).execute(f"NOTIFY {CHANNEL}")


def listen(engine: Engine, connection: Connection) -> Notices:
    """Begin to notice what others write; the first answer is yes."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        return _Notified(cast("psycopg.Connection[Any]", driver))
    if is_in_memory(engine):
        return _Seen(lambda: driver.total_changes, ignores_own=False)
    path = os.path.realpath(engine.url.database or "")  # the -wal lies beside the file, not beside a link to it
    return _Seen(lambda: (_stat(f"{path}-wal"), _stat(f"{path}")), ignores_own=True)


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None  # not there, or not to be reached: the next statement will say so, better
    return status.st_ino, status.st_size, status.st_mtime_ns


class _Seen:
    """Compares what is there now with what was there before: the sizes and times of files, or a count of changes."""

    def __init__(self, look: Callable[[], object], *, ignores_own: bool) -> None:
        self._look = look
        self._ignores_own = ignores_own
        self._before: object = None
        self._has_news = True

    def has_news(self) -> bool:
        now = self._look()
        found, self._has_news = self._has_news or now != self._before, False
        self._before = now
        return found

    def own_write_begins(self) -> None:
        if self._ignores_own:
            self._has_news = self._has_news or self._look() != self._before

    def own_write_ended(self) -> None:
        if self._ignores_own:
            self._before = self._look()


class _Notified:
    """Reads the notifications that have arrived; they come with whatever else the server says, or alone."""

    def __init__(self, driver: psycopg.Connection[Any]) -> None:
        self._driver = driver
        self._has_news = True
        driver.add_notify_handler(self._note)
        before, driver.autocommit = driver.autocommit, True
        driver.execute(f"LISTEN {CHANNEL}")
        driver.autocommit = before

    def _note(self, _notification: psycopg.Notify) -> None:
        self._has_news = True

    def has_news(self) -> bool:
        connection = self._driver.pgconn
        connection.consume_input()  # does not wait
        while connection.notifies() is not None:
            self._has_news = True
        found, self._has_news = self._has_news, False
        return found

    def own_write_begins(self) -> None:
        pass

    def own_write_ended(self) -> None:
        pass
