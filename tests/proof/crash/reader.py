"""Reading the database of a crash test by the bare drivers: cheap enough to be asked a hundred times a second."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any, Protocol

import psycopg
from sqlalchemy import make_url

SQLITE_TIMEOUT_S = 30.0  # waiting for a database that is being recovered after a kill
CONNECT_TIMEOUT_S = 5


class Reader(Protocol):
    """Asks one database. A statement has its parameters as ``:name``."""

    def ask(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Return all rows."""
        ...

    def close(self) -> None:
        """Keep nothing open."""
        ...


def open_reader(url: str) -> Reader:
    """Return the reader of a database, by the URL that headgate has."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        assert parsed.database
        return _SqliteReader(parsed.database)
    return _PostgresReader(parsed.render_as_string(hide_password=False))


class _SqliteReader:
    """Keeps no connection: one that stayed open would spare a successor of the dead its recovery."""

    def __init__(self, path: str) -> None:
        self._path = path

    def ask(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._path, timeout=SQLITE_TIMEOUT_S)) as connection:
            return connection.execute(statement, parameters).fetchall()

    def close(self) -> None:
        pass


class _PostgresReader:
    """Keeps one connection, which ``ALLOW_CONNECTIONS false`` leaves alone, and makes another after a restart."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[Any] | None = None

    def ask(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        text = statement
        for name in parameters:
            text = text.replace(f":{name}", f"%({name})s")
        try:
            return self._connected().execute(text.encode(), parameters or None).fetchall()
        except psycopg.OperationalError:
            if self._connection is not None and not self._connection.closed:
                raise
            self._connection = None
            return self._connected().execute(text.encode(), parameters or None).fetchall()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, application_name="the crash tests"
            )
        return self._connection
