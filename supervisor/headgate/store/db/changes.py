"""Whether others may have written to the database since the last look, at next to no cost.

A supervisor has to hear of the changes of users and other supervisors: triggers added and removed, runs begun, tasks
cleared. A query for them costs a transaction, and nearly always its answer is that there are none. So a supervisor
queries rarely, and looks often: on PostgreSQL at the notifications of those who write, on SQLite at its counter of the
commits of other connections. A look may find changes that do not matter, and in the worst case it finds none (a
connection pool in between does not pass notifications on). It only brings forward a query that comes anyway.
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

CHANNEL = "headgate_triggers"  # of PostgreSQL's notifications: a trigger may be claimable now, or was removed


class ChangeListener(Protocol):
    """Looks for the changes of others by one connection."""

    def has_changes(self) -> bool:
        """Whether others may have written since the last call. Raises the driver's errors."""
        ...


def notify(connection: Connection) -> None:
    """Have the listeners of others see a change, once the transaction is committed."""
    if connection.dialect.name == "postgresql":
        driver_of(connection).execute(f"NOTIFY {CHANNEL}")


def listen(engine: Engine, connection: Connection) -> ChangeListener:
    """Begin to look for changes by this connection; the first answer is yes."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        return _Notifications(cast("psycopg.Connection[Any]", driver))
    if is_in_memory(engine):
        return _Counter(lambda: driver.total_changes)  # all of its stores share the one connection
    # It changes with every commit of another connection, and with none of this one. The times of files do not tell
    # the two apart: a commit of another right after one of ours would be taken for ours.
    return _Counter(lambda: driver.execute("PRAGMA data_version").fetchone())


class _Counter:
    """Compares a count of changes with its last value."""

    def __init__(self, count: Callable[[], object]) -> None:
        self._count = count
        self._last: object = None

    def has_changes(self) -> bool:
        last, self._last = self._last, self._count()
        return last != self._last


class _Notifications:
    """Reads the notifications that have arrived; they come with other answers of the server, or alone.

    The server sends a connection its own as well. They are no changes of others, and as many as there are steps of
    tasks.
    """

    def __init__(self, driver: psycopg.Connection[Any]) -> None:
        self._driver = driver
        self._has_changes = True
        self._own_pid = driver.info.backend_pid
        driver.add_notify_handler(self._note)
        before, driver.autocommit = driver.autocommit, True
        driver.execute(f"LISTEN {CHANNEL}")
        driver.autocommit = before

    def _note(self, notification: psycopg.Notify) -> None:
        self._has_changes = self._has_changes or notification.pid != self._own_pid

    def has_changes(self) -> bool:
        connection = self._driver.pgconn
        connection.consume_input()  # does not wait
        while (notification := connection.notifies()) is not None:
            self._has_changes = self._has_changes or notification.be_pid != self._own_pid
        found, self._has_changes = self._has_changes, False
        return found
