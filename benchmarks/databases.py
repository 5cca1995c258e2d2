"""The databases of the benchmarks: a new one for every run, filled with triggers in one go, and the bare drivers.

The bare driver is the baseline: the same table with the same indexes and the same durability, without any other code
of headgate between the rows and the database.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psycopg
from cryptography.fernet import Fernet
from psycopg import sql
from sqlalchemy import Engine, insert, select, text
from sqlalchemy.engine import make_url

from headgate.protocol.values import encode_value
from headgate.store.db import schema, transaction
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.tables import asset_watcher, trigger

POSTGRES_URL = os.environ.get("HEADGATE_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
CONNECT_TIMEOUT_S = 5
KEYS = Fernet.generate_key().decode()  # of all databases of this process

EVENT_COLUMNS = (
    "trigger_id",
    "trigger_run_id",
    "sequence_index",
    "key",
    "position",
    "kind",
    "payload",
    "is_last",
    "stored_at",
)
EventRow = tuple[Any, ...]  # the values of these columns, in the driver's form


class Database(NamedTuple):
    """A database with tables, of one run; ``folder`` is empty but for SQLite's files."""

    kind: str
    url: str
    folder: Path

    def engine(self) -> Engine:
        """Return an engine as headgate opens it."""
        return open_engine(self.url)

    def count(self, table: str) -> int:
        """Return how many rows a table has."""
        engine = self.engine()
        with engine.connect() as connection:
            rows = connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
        engine.dispose()
        return int(rows)


@contextlib.contextmanager
def fresh(kind: str) -> Generator[Database]:
    """Yield a new database with tables and without rows; it is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as name:
        folder = Path(name)
        if kind == "sqlite":
            path = folder / "headgate.db"
            shutil.copy(_sqlite_template(), path)
            yield Database(kind, f"sqlite:///{path}", folder)
            return
        url, made = make_url(POSTGRES_URL), f"headgate_bench_{secrets.token_hex(6)}"
        with _administrator() as server:
            server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(made)))
        try:
            whole = url.set(database=made).render_as_string(hide_password=False)
            schema.upgrade(open_engine(whole))
            yield Database(kind, whole, folder)
        finally:
            with _administrator() as server:
                server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(made)))


@cache
def _template_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="headgate-bench-")


@cache
def _sqlite_template() -> Path:
    path = Path(_template_folder().name) / "template.db"
    engine = open_engine(f"sqlite:///{path}")
    schema.upgrade(engine)
    engine.dispose()
    return path


def _administrator() -> psycopg.Connection[Any]:
    return psycopg.connect(POSTGRES_URL, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S)


@cache
def postgresql_answers() -> bool:
    """Whether a PostgreSQL server answers."""
    try:
        _administrator().close()
    except psycopg.OperationalError:
        return False
    return True


def postgresql_version() -> str:
    """Return the version of the server, as a short text; empty if none answers."""
    if not postgresql_answers():
        return ""
    with _administrator() as server:
        row = server.execute("SHOW server_version").fetchone()
    return str(row[0]).split()[0] if row else ""


# --- triggers ------------------------------------------------------------------------------------


def add_triggers(database: Database, classpath: str, all_kwargs: Sequence[dict[str, Any]]) -> float:
    """Add a watcher for each of ``all_kwargs`` in a transaction that supervisors notice; return when its commit began.

    They may have noticed before the commit has returned here.
    """
    now = datetime.now(UTC)
    encrypted: dict[bytes, str] = {}
    keys = Secrets([KEYS], source="the benchmarks")
    rows = []
    for kwargs in all_kwargs:
        encoded = encode_value(kwargs, where="kwargs")
        if encoded not in encrypted:
            encrypted[encoded] = keys.encrypt(encoded)
        rows.append({"classpath": classpath, "kwargs": encrypted[encoded], "created_date": now, "queue": "default"})
    unnamed = select(text("'w' || id"), trigger.c.id, trigger.c.created_date)
    unnamed = unnamed.where(trigger.c.id.not_in(select(asset_watcher.c.trigger_id)))
    writer = transaction.Database(database.engine(), keys, None)
    with writer.writing() as tx:
        tx.connection.execute(insert(trigger), rows)
        tx.connection.execute(insert(asset_watcher).from_select(["name", "trigger_id", "created_date"], unnamed))
        tx.notify()
        commits_at = time.monotonic()
    writer.close()
    writer.engine.dispose()
    return commits_at


# --- the bare drivers ----------------------------------------------------------------------------


class BareDriver(Protocol):
    """A connection of a driver, without headgate."""

    def store(self, rows: Sequence[EventRow]) -> None:
        """Store rows of the event log in one durable commit."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def _insert(place: str) -> str:
    return f"INSERT INTO trigger_event ({', '.join(EVENT_COLUMNS)}) VALUES ({', '.join([place] * len(EVENT_COLUMNS))})"


class _BareSqlite:
    _INSERT = _insert("?")

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            self._connection.execute(f"PRAGMA {pragma}")

    def store(self, rows: Sequence[EventRow]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(self._INSERT, rows)
        self._connection.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()


class _BarePostgresql:
    _INSERT = _insert("%s").encode()

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url)
        self._connection.execute("SET synchronous_commit = on")
        self._connection.commit()

    def store(self, rows: Sequence[EventRow]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(self._INSERT, rows)
        self._connection.commit()

    def close(self) -> None:
        self._connection.close()


def bare_driver(database: Database) -> BareDriver:
    """Open the database with its driver alone, as durable as headgate opens it."""
    if database.kind == "sqlite":
        path = make_url(database.url).database
        assert path is not None
        return _BareSqlite(path)
    return _BarePostgresql(database.url)


def moment(kind: str) -> Any:
    """Return the current time in the form of this kind's driver, for a column of times."""
    now = datetime.now(UTC)
    return now if kind == "postgresql" else now.replace(tzinfo=None).isoformat(" ", "microseconds")
