"""Whether others may have written to the database, at almost no cost.

A supervisor has to hear of the changes of users and other supervisors: triggers added and removed, runs begun, tasks
cleared. A query for them costs a transaction, and nearly always finds none. So a supervisor queries rarely, and at once
when a **bell** has rung: on PostgreSQL a notification, on SQLite a byte sent to a socket beside the file
(`headgate.store.db.bells`). The transaction that writes has it rung when it is committed (`Tx.notify`). A bell may ring
for changes that do not matter, or stay silent (a connection pool in between does not pass notifications on). It only
makes the next query earlier, which would be made in any case.

Where no bell can be hung up, SQLite's counter of the commits of other connections is looked at every now and then.

**Readers of events** wait in the same way, for bells of their own; the notifications of PostgreSQL name the triggers
that have new events. A supervisor sends these only if there is a reader that waits: such a reader holds an advisory
lock, which ends with its connection, and a supervisor that stores events looks for it once in `FOLLOWERS_LOOK_S`. So
without a reader a slice costs nothing more, and an idle reader runs no statement. **Listeners to signals** wait in the
same way; their notifications name the keys, and are always sent, because who sends a signal wakes supervisors as well.
"""

from __future__ import annotations

import select
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, LiteralString, Protocol, cast

from sqlalchemy import Connection

from headgate.store.db.bells import Bell, Bells, Kind
from headgate.store.db.prepared import driver_of

if TYPE_CHECKING:
    import psycopg

CHANNEL = "headgate_triggers"  # of PostgreSQL's notifications: a trigger may be claimable now, or was removed

News = Literal["events", "signals"]  # what readers wait for: events of triggers, or versions of signals

EVENTS_CHANNEL = "headgate_events"  # of PostgreSQL's notifications: the triggers that have new events, or nothing: any
SIGNALS_CHANNEL = "headgate_signals"  # the same of the keys that have new versions
_CHANNELS: Final[dict[Kind, LiteralString]] = {
    "changes": CHANNEL,
    "events": EVENTS_CHANNEL,
    "signals": SIGNALS_CHANNEL,
}
_NOTIFY: Final = [f"SELECT {', '.join(['pg_notify(%s, %s)'] * count)}" for count in range(len(_CHANNELS) + 1)]
FOLLOWERS_LOCK = 0x68676576  # "hgev": the advisory lock of PostgreSQL that readers share while they listen
FOLLOWERS_LOOK_S = 1.0  # a new reader gets no notification for so long, so it looks by itself meanwhile
IDS_NAMED_MAX = 350  # in one notification, which has room for 8,000 bytes: an id has at most 20, with its comma
COMMITS_LOOK_S = 5.0  # a reader on SQLite looks so often for commits whose bell it has missed
NO_BELL_LOOK_S = 0.05  # the same without a bell: a look into shared memory, some microseconds
IN_MEMORY = "the database is in memory"


class ChangeListener:
    """Finds out whether others have made changes.

    ``no_bell`` is the reason why it has to be asked every now and then; None if its descriptor says when.
    """

    no_bell: str | None = None

    def fileno(self) -> int:
        """Return the descriptor that is readable when there may be changes."""
        raise NotImplementedError

    def has_changes(self) -> bool:
        """Whether others may have written since the last call. Raises the driver's errors."""
        raise NotImplementedError

    def is_lost(self) -> bool:
        """Whether it may hear nothing more, so that another has to be made."""
        return False

    def close(self) -> None:
        """Listen no more."""


class Doorbell:
    """One descriptor, which is readable while a listener's is, whichever connection that one is on."""

    def __init__(self) -> None:
        self._ready = select.epoll()
        self._hung: int | None = None

    def fileno(self) -> int:
        """Return the descriptor, the same until this is closed."""
        return self._ready.fileno()

    def hang(self, listener: ChangeListener) -> None:
        """Ring with this listener from now on."""
        self.unhang()
        if listener.no_bell is None:
            self._hung = listener.fileno()
            self._ready.register(self._hung, select.EPOLLIN)

    def unhang(self) -> None:
        """Ring no more."""
        if self._hung is not None:
            with suppress(OSError):  # a descriptor that was closed is gone from the set
                self._ready.unregister(self._hung)
            self._hung = None

    def close(self) -> None:
        """Close the descriptor."""
        self._ready.close()


def notify(connection: Connection, rings: Mapping[Kind, Collection[int]]) -> None:
    """PostgreSQL: report changes to the listeners of others, once the transaction is committed.

    ``rings`` has the ids that have news, the triggers with new events and the keys with new versions; none: any may.
    """
    if rings and connection.dialect.name == "postgresql":
        told: list[str] = []
        for kind, ids in rings.items():
            told += _CHANNELS[kind], ",".join(map(str, sorted(ids))) if len(ids) <= IDS_NAMED_MAX else ""
        driver_of(connection).execute(_NOTIFY[len(rings)], told)


def listen(connection: Connection, bells: Bells | None) -> ChangeListener:
    """Begin to listen over this connection, or by one of the ``bells`` of its database; the first answer is yes."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        return _Notifications(cast("psycopg.Connection[Any]", driver))
    if bells is None:
        return _Counter(lambda: driver.total_changes, IN_MEMORY)  # all of its stores share the one connection
    try:
        return _Rings(bells.hang("changes"))
    except OSError as error:
        return _commits(driver, f"{bells.folder}: {error.strerror or error}")


def _commits(driver: sqlite3.Connection, no_bell: str) -> _Counter:
    # It changes with every commit of another connection, and with none of this one.
    return _Counter(lambda: driver.execute("PRAGMA data_version").fetchone(), no_bell)


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

    def are_there(self, connection: Connection) -> bool:
        """Whether readers may wait for events; SQLite does not know."""
        if connection.dialect.name != "postgresql":
            return True
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + FOLLOWERS_LOOK_S
            (self._are_there,) = driver_of(connection).execute(_HAS_FOLLOWERS).fetchone()
        return self._are_there


class NewsListener:
    """Waits over one connection, outside of transactions, for new events or signals."""

    def wait(self, timeout_s: float, concerns: Callable[[int], bool], until: int | None = None) -> bool:
        """Wait until there may be news of an id that ``concerns`` the caller.

        False after ``timeout_s``, and as soon as the descriptor ``until`` is readable.
        """
        raise NotImplementedError

    def is_lost(self) -> bool:
        """Whether it may hear nothing more, so that another has to be made."""
        return False

    def close(self) -> None:
        """Listen no more."""


def listen_for(connection: Connection, bells: Bells | None, news: News) -> NewsListener:
    """Begin to listen for news over this connection; what is stored before the return may go unnoticed."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        return _NewsNotifications(cast("psycopg.Connection[Any]", driver), news)
    if bells is None:
        return _Commits(listen(connection, None), None)
    bell = None
    with suppress(OSError):
        bell = bells.hang(news)
    return _Commits(_commits(driver, ""), bell)


class _HasDescriptor(Protocol):
    """What can be waited for."""

    def fileno(self) -> int: ...


def _wait_readable(news: _HasDescriptor | None, timeout_s: float, until: int | None) -> bool:
    """Wait for the one or the other descriptor; return whether ``until`` is readable."""
    ready = select.poll()
    for descriptor in (news, until):
        if descriptor is not None:
            ready.register(descriptor, select.POLLIN)
    return any(found == until for found, _ in ready.poll(timeout_s * 1000))


class _Commits(NewsListener):
    """SQLite: any commit of another connection may have stored news; the ``bell`` says when to look for one."""

    def __init__(self, commits: ChangeListener, bell: Bell | None) -> None:
        self._commits = commits
        self._bell = bell
        commits.has_changes()  # the first answer is yes

    def wait(self, timeout_s: float, concerns: Callable[[int], bool], until: int | None = None) -> bool:
        ends_at = time.monotonic() + timeout_s
        while not self._commits.has_changes():
            left = ends_at - time.monotonic()
            if left <= 0:
                return False
            if _wait_readable(self._bell, min(left, NO_BELL_LOOK_S if self._bell is None else COMMITS_LOOK_S), until):
                return False
            if self._bell is not None:
                self._bell.has_rung()
        return True

    def is_lost(self) -> bool:
        return self._bell is not None and self._bell.is_lost()

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()


class _NewsNotifications(NewsListener):
    """PostgreSQL: notifications, which are read from the socket when it has some.

    Those of the other kind that are read meanwhile are dropped: who waits for them looks before each wait.
    """

    def __init__(self, driver: psycopg.Connection[Any], news: News) -> None:
        self._driver = driver
        self._channel = _CHANNELS[news]
        self._payloads: list[str] = []
        driver.add_notify_handler(lambda notification: self._note(notification.channel, notification.payload))
        before, driver.autocommit = driver.autocommit, True
        driver.execute(f"LISTEN {self._channel}")
        if news == "events":
            driver.execute("SELECT pg_advisory_lock_shared(%s::bigint)", (FOLLOWERS_LOCK,))
        driver.autocommit = before

    def _note(self, channel: str, payload: str) -> None:
        if channel == self._channel:
            self._payloads.append(payload)

    def wait(self, timeout_s: float, concerns: Callable[[int], bool], until: int | None = None) -> bool:
        ends_at = time.monotonic() + timeout_s
        while True:
            payloads, self._payloads = self._payloads, []
            if any(not payload or any(concerns(int(id_)) for id_ in payload.split(",")) for payload in payloads):
                return True
            left = ends_at - time.monotonic()
            if left <= 0:
                return False
            if _wait_readable(self._driver, left, until):
                return False
            connection = self._driver.pgconn
            connection.consume_input()
            while (notification := connection.notifies()) is not None:
                self._note(notification.relname.decode(), notification.extra.decode())


# --- changes --------------------------------------------------------------------------------------


class _Counter(ChangeListener):
    """Compares a count of changes with its last value, because there is ``no_bell``."""

    def __init__(self, count: Callable[[], object], no_bell: str) -> None:
        self.no_bell = no_bell
        self._count = count
        self._last: object = None

    def has_changes(self) -> bool:
        last, self._last = self._last, self._count()
        return last != self._last


class _Rings(ChangeListener):
    """SQLite: a bell, which others ring."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._is_first = True
        self.fileno, self.is_lost, self.close = bell.fileno, bell.is_lost, bell.close  # type: ignore[method-assign]

    def has_changes(self) -> bool:
        is_first, self._is_first = self._is_first, False
        return self._bell.has_rung() or is_first


class _Notifications(ChangeListener):
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

    def fileno(self) -> int:
        return self._driver.fileno()

    def _note(self, notification: psycopg.Notify) -> None:
        self._has_changes = self._has_changes or notification.pid != self._own_pid

    def has_changes(self) -> bool:
        connection = self._driver.pgconn
        connection.consume_input()  # does not wait
        while (notification := connection.notifies()) is not None:
            self._has_changes = self._has_changes or notification.be_pid != self._own_pid
        found, self._has_changes = self._has_changes, False
        return found
