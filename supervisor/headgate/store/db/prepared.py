"""Statements that are compiled once, and from then on passed to the driver as text.

For a small statement on SQLite, SQLAlchemy takes about fifteen times as long as SQLite itself, because it looks up the
compiled form and converts every parameter and every result. The store's hot verbs repeat the same few statements. So
these are built with SQLAlchemy's expressions, from the one definition of the tables, but compiled only once. Parameters
and results are in the driver's form: times are converted by `times.bound` and `times.read`.

Errors are the driver's, too; `headgate.store.db.driver_errors` translates them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

from sqlalchemy import ClauseElement, Connection, Executable
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.compiler import SQLCompiler

_PSYCOPG_PARAMETER = re.compile(r"%\((\w+)\)s")


class Cursor(Protocol):
    """The attributes that the cursors of both drivers have."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Driver(Protocol):
    """The attributes of both drivers' connections; ``closed`` and a settable ``autocommit`` are psycopg's alone."""

    autocommit: bool

    @property
    def closed(self) -> bool: ...
    def execute(self, text: Any, parameters: Any = ..., /) -> Cursor: ...


def driver_of(connection: Connection) -> Driver:
    """Return the driver's connection of one of SQLAlchemy's, which must be in a transaction."""
    return cast(Driver, connection.connection.driver_connection)


class _Compiled:
    """A statement in the form that the driver of one dialect expects."""

    def __init__(self, statement: Executable, dialect: Dialect, *, binary: bool) -> None:
        assert isinstance(statement, ClauseElement)
        compiled = statement.compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler)
        self.text = str(compiled)
        if binary:
            self.text = _PSYCOPG_PARAMETER.sub(r"%(\1)b", self.text)
        self.names = None if compiled.positiontup is None else tuple(compiled.positiontup)
        self.fixed = {name: bind.value for name, bind in compiled.binds.items() if not bind.required}

    def arranged(self, parameters: dict[str, Any]) -> Any:
        """Return the parameters as the driver expects them: by position, or by name."""
        values = {**self.fixed, **parameters} if self.fixed else parameters
        return values if self.names is None else tuple([values[name] for name in self.names])


class Prepared:
    """A statement with named parameters. It must not contain a list (``IN``), whose text differs with its length.

    ``binary``: psycopg sends the parameters in PostgreSQL's binary format, which for arrays is twice as fast as text.
    """

    def __init__(self, statement: Executable, *, binary: bool = False) -> None:
        self._statement = statement
        self._binary = binary
        self._compiled: dict[str, _Compiled] = {}

    def run(self, connection: Connection, **parameters: Any) -> Cursor:
        """Execute it. Every parameter that has no value in the statement itself must be given."""
        compiled = self._for(connection.dialect)
        return driver_of(connection).execute(compiled.text, compiled.arranged(parameters))

    def run_each(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> list[list[tuple[Any, ...]]]:
        """Execute it for each row of parameters, and return the results of each."""
        compiled = self._for(connection.dialect)
        arranged = [compiled.arranged(row) for row in rows]
        driver = connection.connection.driver_connection
        if isinstance(driver, sqlite3.Connection) or len(arranged) < 2:
            return [driver_of(connection).execute(compiled.text, row).fetchall() for row in arranged]
        assert driver is not None
        with driver.cursor() as cursor:
            cursor.executemany(compiled.text, arranged, returning=True)
            results = [cursor.fetchall()]
            while cursor.nextset():
                results.append(cursor.fetchall())
            cursor.execute("SELECT 1")  # as in `run_many`
        return results

    def run_many(self, connection: Connection, rows: Iterable[dict[str, Any]]) -> None:
        """Execute it for each row of parameters, without results."""
        compiled = self._for(connection.dialect)
        arranged = [compiled.arranged(row) for row in rows]
        driver = connection.connection.driver_connection
        if isinstance(driver, sqlite3.Connection):
            driver.executemany(compiled.text, arranged)
        elif driver is not None:
            if len(arranged) == 1:
                driver_of(connection).execute(compiled.text, arranged[0])
                return
            with driver.cursor() as cursor:
                # One after the other in psycopg's pipeline. After a pipeline the server does not apply its limit on
                # idle transactions (seen with PostgreSQL 15), so the locks of a supervisor that is stopped there would
                # be held for ever. After a separate statement the limit applies again.
                cursor.executemany(compiled.text, arranged)
                cursor.execute("SELECT 1")

    def places(self, dialect: Dialect) -> Sequence[str]:
        """Return the names of the parameters by position, for dialects with positional parameters."""
        names = self._for(dialect).names
        assert names is not None, f"{dialect.name} names its parameters"
        return names

    def text(self, dialect: Dialect) -> str:
        """Return the text of the statement for the driver."""
        return self._for(dialect).text

    def _for(self, dialect: Dialect) -> _Compiled:
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            compiled = self._compiled[dialect.name] = _Compiled(self._statement, dialect, binary=self._binary)
        return compiled
