"""Whether others may have written to the database since the last check, at almost no cost.

A supervisor has to hear of the changes of users and other supervisors: triggers added and removed, runs begun, tasks
cleared. A query for them costs a transaction, and nearly always finds none. So a supervisor queries rarely, and checks
often: on PostgreSQL for notifications of the processes that write, on SQLite by its counter of the commits of other
connections. A check may report changes that do not matter, or miss some (a connection pool in between does not pass
notifications on). It only makes the next query earlier, which would be made in any case.

**Readers of events** wait in the same way, over a channel of their own, whose notifications name the triggers that have
new events. A supervisor sends them only if there is a reader that waits: such a reader holds an advisory lock, which
ends with its connection, and a supervisor that stores events looks for it once in `FOLLOWERS_LOOK_S`. So without a
reader a slice costs nothing more, and an idle reader runs no statement. On SQLite readers look at that counter.
"""

from __future__ import annotations

import select
import sqlite3
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, cast

from sqlalchemy import Connection, Engine

from headgate.store.db.engine import is_in_memory
from headgate.store.db.prepared import driver_of

if TYPE_CHECKING:
    import psycopg

CHANNEL = "headgate_triggers"  # of PostgreSQL's notifications: a trigger may be claimable now, or was removed

EVENTS_CHANNEL = "headgate_events"  # of PostgreSQL's notifications: the triggers that have new events, or nothing: any
FOLLOWERS_LOCK = 0x68676576  # "hgev": the advisory lock of PostgreSQL that readers share while they listen
FOLLOWERS_LOOK_S = 1.0  # a new reader gets no notification for so long, so it looks by itself meanwhile
TRIGGERS_NAMED_MAX = 350  # in one notification, which has room for 8,000 bytes: an id has at most 20, with its comma
SQLITE_LOOK_S = 0.015  # a reader looks so often for commits: some microseconds each, without a transaction


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


# --- events ---------------------------------------------------------------------------------------

_HAS_FOLLOWERS = f"""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = 0 AND objid = {FOLLOWERS_LOCK}
               AND objsubid = 1 AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


class Followers:
    """Whether readers wait for events, as one supervisor knows it; ``clock`` counts its seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = 0.0
        self._are_there = False

    def tell(self, connection: Connection, trigger_ids: Collection[int]) -> None:
        """Report new events of these triggers to the readers that wait, once the transaction is committed."""
        if connection.dialect.name != "postgresql":
            return
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + FOLLOWERS_LOOK_S
            (self._are_there,) = driver_of(connection).execute(_HAS_FOLLOWERS).fetchone()
        if self._are_there:
            notify_events(connection, trigger_ids)


def notify_events(connection: Connection, trigger_ids: Collection[int]) -> None:
    """Report new events of these triggers to readers, whether there are any or not."""
    if connection.dialect.name == "postgresql":
        named = ",".join(map(str, sorted(trigger_ids))) if len(trigger_ids) <= TRIGGERS_NAMED_MAX else ""
        driver_of(connection).execute("SELECT pg_notify(%s, %s)", (EVENTS_CHANNEL, named))


class EventListener(Protocol):
    """Waits over one connection, outside of transactions, for new events."""

    def wait(self, timeout_s: float, concerns: Callable[[int], bool]) -> bool:
        """Wait until there may be new events of a trigger that ``concerns`` the caller; False after ``timeout_s``."""
        ...


def listen_for_events(engine: Engine, connection: Connection) -> EventListener:
    """Begin to listen for new events over this connection; what is stored before the return may go unnoticed."""
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        return _Commits(listen(engine, connection))
    return _EventNotifications(cast("psycopg.Connection[Any]", driver))


class _Commits:
    """SQLite: any commit of another connection may have stored events."""

    def __init__(self, changes: ChangeListener) -> None:
        self._changes = changes
        changes.has_changes()  # the first answer is yes

    def wait(self, timeout_s: float, concerns: Callable[[int], bool]) -> bool:
        ends_at = time.monotonic() + timeout_s
        while not self._changes.has_changes():
            left = ends_at - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, SQLITE_LOOK_S))
        return True


class _EventNotifications:
    """PostgreSQL: notifications, which are read from the socket when it has some."""

    def __init__(self, driver: psycopg.Connection[Any]) -> None:
        self._driver = driver
        self._payloads: list[str] = []
        driver.add_notify_handler(lambda notification: self._note(notification.channel, notification.payload))
        before, driver.autocommit = driver.autocommit, True
        driver.execute(f"LISTEN {EVENTS_CHANNEL}")
        driver.execute("SELECT pg_advisory_lock_shared(%s::bigint)", (FOLLOWERS_LOCK,))
        driver.autocommit = before

    def _note(self, channel: str, payload: str) -> None:
        if channel == EVENTS_CHANNEL:
            self._payloads.append(payload)

    def wait(self, timeout_s: float, concerns: Callable[[int], bool]) -> bool:
        ends_at = time.monotonic() + timeout_s
        while True:
            payloads, self._payloads = self._payloads, []
            if any(not payload or any(concerns(int(id_)) for id_ in payload.split(",")) for payload in payloads):
                return True
            left = ends_at - time.monotonic()
            if left <= 0:
                return False
            select.select([self._driver.fileno()], [], [], left)
            connection = self._driver.pgconn
            connection.consume_input()
            while (notification := connection.notifies()) is not None:
                self._note(notification.relname.decode(), notification.extra.decode())


# --- changes --------------------------------------------------------------------------------------


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
