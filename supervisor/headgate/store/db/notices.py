"""Whether anybody else may have written to the database lately, at next to no cost.

A supervisor has to hear of what users and other supervisors do: triggers added and removed, runs begun, tasks cleared.
Asking costs a transaction each time, and nearly always the answer is no. So it asks rarely, and looks often: on
PostgreSQL at the notifications of those who write, on SQLite at the counter it keeps of what other connections have
committed. A notice may come for nothing and, in the worst case, not at all (a connection pool in between does not hand
notifications on). It only ever brings forward a question that is asked anyway.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from sqlalchemy import Connection, Engine

from headgate.store.db.engine import is_in_memory
from headgate.store.db.prepared import driver_of

if TYPE_CHECKING:
    import psycopg

CHANNEL = "headgate_triggers"  # of PostgreSQL's notifications: some trigger may be claimable now, or was removed


class Notices(Protocol):
    """What one connection of a store notices."""

    def has_news(self) -> bool:
        """Whether anybody else may have written since this was asked last. Raises what the driver raises."""
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
        return _Seen(lambda: driver.total_changes)  # all of its stores share the one connection
    # It changes with every commit of another connection, and with none of one's own. The times of files do not tell
    # the two apart: what another wrote right after us would be taken for ours.
    return _Seen(lambda: driver.execute("PRAGMA data_version").fetchone())


class _Seen:
    """Compares a count of changes with what it was before."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._before: object = None

    def has_news(self) -> bool:
        before, self._before = self._before, self._look()
        return before != self._before


class _Notified:
    """Reads the notifications that have arrived; they come with whatever else the server says, or alone.

    The server sends us our own as well: those are no news, and as many as there are steps of tasks.
    """

    def __init__(self, driver: psycopg.Connection[Any]) -> None:
        self._driver = driver
        self._has_news = True
        self._own_pid = driver.info.backend_pid
        driver.add_notify_handler(self._note)
        before, driver.autocommit = driver.autocommit, True
        driver.execute(f"LISTEN {CHANNEL}")
        driver.autocommit = before

    def _note(self, notification: psycopg.Notify) -> None:
        self._has_news = self._has_news or notification.pid != self._own_pid

    def has_news(self) -> bool:
        connection = self._driver.pgconn
        connection.consume_input()  # does not wait
        while (notification := connection.notifies()) is not None:
            self._has_news = self._has_news or notification.be_pid != self._own_pid
        found, self._has_news = self._has_news, False
        return found
