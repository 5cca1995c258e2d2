"""Engines for the supported databases: a committed transaction is on the disk, and nothing waits for ever.

Limits are set on every connection. On PostgreSQL they matter most if a supervisor is stopped in the middle of a
transaction (SIGSTOP, a suspended machine): the server then ends the transaction, so its locks do not block the
supervisors that take over.
"""

from __future__ import annotations

import os
import select
import sqlite3
import time
from functools import partial
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, Dialect, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool, StaticPool

from headgate.store.db.deadline import LOGGED_IN
from headgate.store.db.prepared import driver_of
from headgate.store.errors import DatabaseFault, UnsupportedDatabase

SQLITE_BUSY_TIMEOUT_S = 5.0  # waiting for another process's transaction; all of headgate's are far shorter
SQLITE_RETRY_WAIT_S = 0.01  # between tries to switch to WAL, for which SQLite does not wait by itself
SQLITE_VERSION_MIN = (3, 35, 0)  # the first with RETURNING
CONNECT_TIMEOUT_S = 5  # a server that does not answer by then counts as away
LOCK_TIMEOUT_S = 5  # waiting for a row; a transaction that holds it for longer is stuck
STATEMENT_TIMEOUT_S = 30  # the heartbeat limit: a supervisor that waits longer has lost its triggers anyway
IDLE_IN_TRANSACTION_MAX_S = 10  # a stopped supervisor's locks are released before others miss its heartbeat
KEEPALIVE_IDLE_S = 10  # a server that vanished without closing is noticed after
KEEPALIVE_INTERVAL_S = 5  # KEEPALIVE_IDLE_S + KEEPALIVE_PROBES_MAX * KEEPALIVE_INTERVAL_S seconds,
KEEPALIVE_PROBES_MAX = 3  # which is within the heartbeat limit
TCP_UNACKED_MAX_S = 20  # the same, for data that was sent and never acknowledged
LOOK_S_MAX = 2.0  # of a statement of a session that cannot write: a person waits for it, and asks again
SQLITE_STEPS_PER_LOOK = 10_000  # of its machine, between two looks at the clock: below a millisecond


# What the driver takes beside the parameters of a connection. It could not use the text that a URL gives, or would
# change what the store relies on.
OF_THE_DRIVER = {"autocommit", "context", "cursor_factory", "prepare_threshold", "row_factory"}

SUPPORTED = "use sqlite:///path/to/file.db or postgresql://user@host/database"
READS_ONLY = "headgate_reads_only"  # execution option of a connection whose next transaction writes nothing


def open_engine(url: str, *, reads_only: bool = False, creates: bool = True) -> Engine:
    """Return an engine for ``sqlite:///path``, ``sqlite://`` (in memory) or ``postgresql://...``.

    With ``reads_only`` its sessions cannot write, whatever they are asked to, and a statement may take `LOOK_S_MAX`
    seconds (on SQLite: a transaction). A file of SQLite that is missing is made by its first connection, unless it
    reads only, or not ``creates``. Nothing is connected yet. Raises `UnsupportedDatabase` for other schemes, and
    for text that is not a URL.
    """
    try:
        url.encode()  # as it is given to drivers, and shown
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # a port that is not a number, a bracket that is not closed, no UTF-8
        # The text may hold a password, so it is not shown.
        raise UnsupportedDatabase(f"the database URL cannot be read: {SUPPORTED}") from None
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return _open_sqlite(parsed.set(drivername="sqlite+pysqlite"), reads_only=reads_only, creates=creates)
    if "@" in (parsed.host or ""):  # it is the end of the password, which would be shown as the host
        raise UnsupportedDatabase("the database URL has more than one @: write %40 for one in a password")
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return _open_postgresql(parsed.set(drivername="postgresql+psycopg"), reads_only=reads_only)
    raise UnsupportedDatabase(f"headgate has no support for {parsed.drivername!r} databases: {SUPPORTED}")


def database_name(engine: Engine) -> str:
    """Return the URL for people to read: without password, and without parameters, which may hold one."""
    shown = engine.url.set(query={}, drivername=engine.url.get_backend_name())
    return shown.render_as_string(hide_password=True)


def is_in_memory(engine: Engine) -> bool:
    """Whether the database is in memory, and so ends with its connection."""
    return engine.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:")


def is_cut(connection: Connection) -> bool:
    """Whether the server of PostgreSQL has ended a connection on which no transaction is open, as far as is known here.

    Nothing else comes on such a connection, but for notices; if it listens, for notifications.
    """
    if connection.dialect.name != "postgresql":
        return False
    if connection.closed or connection.invalidated:
        return True
    driver: Any = connection.connection.driver_connection
    if driver.closed:
        return True
    ready = select.poll()
    ready.register(driver.fileno(), select.POLLIN)
    return bool(ready.poll(0))


# --- SQLite --------------------------------------------------------------------------------------


def _open_sqlite(url: URL, *, reads_only: bool, creates: bool) -> Engine:
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        needed = ".".join(map(str, SQLITE_VERSION_MIN))
        raise UnsupportedDatabase(f"this Python has SQLite {sqlite3.sqlite_version}; headgate needs {needed}")
    if url.query:
        raise UnsupportedDatabase(f"a sqlite URL takes no parameters here: {SUPPORTED}")
    if url.host:
        raise UnsupportedDatabase(f"a sqlite URL has no host, so three slashes come before its path: {SUPPORTED}")
    in_memory = url.database in (None, "", ":memory:")
    if reads_only and in_memory:
        raise UnsupportedDatabase(f"a database in memory cannot be opened to read alone: {SUPPORTED}")
    mode = "ro" if reads_only else "rwc" if creates else "rw"
    engine = create_engine(
        url,
        # In memory there is one connection, which is the database; a file is opened for each use.
        poolclass=StaticPool if in_memory else NullPool,
        connect_args={"isolation_level": None, "timeout": SQLITE_BUSY_TIMEOUT_S},
        hide_parameters=True,  # errors end up in logs, and parameters are users' data
        **({"creator": partial(_connect_to_file, str(url.database), mode)} if not in_memory and mode != "rwc" else {}),
    )

    @event.listens_for(engine, "connect")
    def set_pragmas(dbapi_connection: sqlite3.Connection, record: Any) -> None:
        if not reads_only:
            _set_pragmas(dbapi_connection, database_name(engine))

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # The driver would begin the transaction late, with a read lock. Its later upgrade to a write lock may fail, and
        # waiting does not help then. So the write lock is taken at once.
        is_read = reads_only or connection.get_execution_options().get(READS_ONLY, False)
        if reads_only:
            _limit(connection.connection.driver_connection)
        driver_of(connection).execute("BEGIN" if is_read else "BEGIN IMMEDIATE")

    return engine


def _connect_to_file(path: str, mode: str) -> sqlite3.Connection:
    """Open a file that is there; with the mode ``ro``, not ``rw``, SQLite itself refuses to write.

    One thread at a time uses it, not always the same.
    """
    uri = f"file:{quote(os.path.abspath(path))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=SQLITE_BUSY_TIMEOUT_S, check_same_thread=False)


def _limit(driver: Any) -> None:
    """Have the next transaction interrupted after `LOOK_S_MAX`."""
    ends_at = time.monotonic() + LOOK_S_MAX
    driver.set_progress_handler(lambda: time.monotonic() > ends_at, SQLITE_STEPS_PER_LOOK)


def _set_pragmas(connection: sqlite3.Connection, database: str) -> None:
    """Set the pragmas that durability needs, and read them back, because SQLite ignores some without an error."""
    journal_mode = _switch_to_wal(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
    (foreign_keys,) = connection.execute("PRAGMA foreign_keys").fetchone()
    if journal_mode not in ("wal", "memory"):
        raise DatabaseFault(database, f"its journal mode stays {journal_mode!r} and must be WAL (a network folder?)")
    if synchronous != 2 or not foreign_keys:
        raise DatabaseFault(database, "this build of SQLite does not do synchronous=FULL or foreign keys")


def _switch_to_wal(connection: sqlite3.Connection) -> str:
    deadline = time.monotonic() + SQLITE_BUSY_TIMEOUT_S
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return str(mode)
        except sqlite3.OperationalError as error:
            # Two processes open a new file at once: SQLite foresees a deadlock, and does not wait.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(SQLITE_RETRY_WAIT_S)


# --- PostgreSQL ----------------------------------------------------------------------------------

_CONNECT_ARGS = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives": 1,
    "keepalives_idle": KEEPALIVE_IDLE_S,
    "keepalives_interval": KEEPALIVE_INTERVAL_S,
    "keepalives_count": KEEPALIVE_PROBES_MAX,
    "tcp_user_timeout": TCP_UNACKED_MAX_S * 1000,
    "application_name": "headgate",
}

# Fencing relies on READ COMMITTED: a statement that waited for a row sees its newest version (I10).
# A role or a database may set synchronous_commit to a weaker value than on, which would break I1; stronger is fine.
# The six before the last say how values are written, and are what the driver and headgate can read. A connection is
# kept while nothing happens, so the last takes the limit on that away; servers before 14 do not have it.
_SESSION = f"""
SELECT set_config('lock_timeout', '{LOCK_TIMEOUT_S}s', false),
       set_config('statement_timeout', '{STATEMENT_TIMEOUT_S}s', false),
       set_config('idle_in_transaction_session_timeout', '{IDLE_IN_TRANSACTION_MAX_S}s', false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('synchronous_commit', CASE current_setting('synchronous_commit')
                  WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false),
       set_config('client_encoding', 'UTF8', false),
       set_config('datestyle', 'ISO, MDY', false),
       set_config('intervalstyle', 'postgres', false),
       set_config('timezone', 'UTC', false),
       set_config('extra_float_digits', '1', false),
       set_config('bytea_output', 'hex', false),
       CASE WHEN current_setting('idle_session_timeout', true) IS NOT NULL
            THEN set_config('idle_session_timeout', '0', false) END
"""

_READS_ONLY = f"""
SELECT set_config('default_transaction_read_only', 'on', false),
       set_config('statement_timeout', '{int(LOOK_S_MAX * 1000)}ms', false)
"""


def _open_postgresql(url: URL, *, reads_only: bool) -> Engine:
    if refused := OF_THE_DRIVER.intersection(url.query):
        raise UnsupportedDatabase(
            f"{min(refused)} is not a parameter that the URL of a PostgreSQL database may have here"
        )
    engine = create_engine(
        url,
        poolclass=NullPool,
        # Parameters of the URL override our defaults.
        connect_args={name: value for name, value in _CONNECT_ARGS.items() if name not in url.query},
        hide_parameters=True,
    )

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Dialect, record: Any, arguments: Any, named: Any) -> Any:
        connection: Any = dialect.connect(*arguments, **named)
        if (watch := LOGGED_IN.get()) is not None:
            watch(connection.fileno())
        return connection

    @event.listens_for(engine, "connect")
    def set_limits(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.autocommit = True
        dbapi_connection.execute(_SESSION)
        if reads_only:
            dbapi_connection.execute(_READS_ONLY)
        dbapi_connection.autocommit = False

    return engine
