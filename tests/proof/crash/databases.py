"""Empty, migrated databases for campaigns: files of SQLite, and databases that are emptied and used again."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url
from tests.postgres import Server, url_for_tests
from tests.proof.crash.reader import CONNECT_TIMEOUT_S

from headgate.store.db import schema
from headgate.store.db.engine import open_engine
from headgate.store.tables import metadata

MIGRATING = threading.Lock()  # alembic has one migration under way in a process, whatever the database

_END_OTHERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"


class Databases:
    """Gives each campaign a database of its own. `close` it: it drops what it made, and stops its servers.

    Those of PostgreSQL are on the server of all tests, but for campaigns that need a server of their own.
    """

    def __init__(self, folder: Path) -> None:
        self._migrated = folder / "migrated.db"
        _migrate(f"sqlite:///{self._migrated}")
        self._lock = threading.Lock()
        self._made: list[_Database] = []
        self._free: dict[bool, list[_Database]] = {False: [], True: []}  # by whether the server is our own

    def close(self) -> None:
        """Leave nothing behind."""
        for database in self._made:
            database.close()
        self._migrated.unlink()

    @contextmanager
    def one(self, dialect: str, folder: Path, *, needs_server: bool = False) -> Iterator[tuple[str, Server | None]]:
        """Give the URL of a database for a campaign in ``folder``, and its server where one may restart that."""
        if dialect == "sqlite":
            shutil.copy(self._migrated, folder / "headgate.db")
            yield f"sqlite:///{folder}/headgate.db", None
            return
        database = self._take(needs_server)
        yield database.url, database.server
        # Not after a failure: what state it is in nobody knows.
        database.empty()
        with self._lock:
            self._free[needs_server].append(database)

    def _take(self, needs_server: bool) -> _Database:
        with self._lock:
            if self._free[needs_server]:
                return self._free[needs_server].pop()
            number = len(self._made) + 1
            server = Server() if needs_server else None
            url = url_for_tests() if server is None else server.url
            self._made.append(_Database(url, number, server))
            return self._made[-1]


class _Database:
    """One database of PostgreSQL, with tables and without rows."""

    def __init__(self, admin_url: str, number: int, server: Server | None) -> None:
        self.server = server
        self._admin_url = admin_url
        self._name = f"headgate_crash_{os.getpid()}_{number}"
        with self._admin() as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._name)))
        self.url = make_url(admin_url).set(database=self._name).render_as_string(hide_password=False)
        _migrate(self.url)

    def empty(self) -> None:
        """Have no connection and no row."""
        with psycopg.connect(self.url, connect_timeout=CONNECT_TIMEOUT_S) as connection:
            connection.execute(_END_OTHERS, [self._name])
            # Deleting some rows is much faster than truncating, which makes new files.
            for table in reversed(metadata.sorted_tables):
                connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table.name)))

    def close(self) -> None:
        """Drop it, with the server where that is our own."""
        if self.server is not None:
            self.server.close()
            return
        with self._admin() as admin:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(self._name)))

    def _admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._admin_url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S)


def _migrate(url: str) -> None:
    engine = open_engine(url)
    with MIGRATING:
        schema.upgrade(engine)
    engine.dispose()
