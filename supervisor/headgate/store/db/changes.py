"""Whether others may have written to the database since the last check, at almost no cost.

A supervisor has to hear of the changes of users and other supervisors: triggers added and removed, runs begun, tasks
cleared. A query for them costs a transaction, and nearly always finds none. So a supervisor queries rarely, and checks
often: on PostgreSQL for notifications of the processes that write, on SQLite by its counter of the commits of other
connections. A check may report changes that do not matter, or miss some (a connection pool in between does not pass
notifications on). It only makes the next query earlier, which would be made in any case.
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
    """Finds out over one connection whether others have made changes."""

    def has_changes(self) -> bool:
        """Whether others may have written since the last call. Raises the driver's errors."""
        ...


def notify(connection: Connection) -> None:
    """Report a change to the listeners of others, once the transaction is committed."""
    if connection.dialect.name == "postgresql":
        driver_of(connection).execute(f"NOTIFY {CHANNEL}")


def listen(engine: Engine, connection: Connection) -> ChangeListener:
    """Begin to listen over this connection; the first answer is yes."""
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

    The server sends a connection its own as well. These are not changes of others, and there are as many as
    steps of tasks, so they are ignored.
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
