"""Points in time as the database holds them: aware, in UTC, to the microsecond, by the database's own clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeAlias

from sqlalchemy import Connection, DateTime, Text, select
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from headgate.store.db.prepared import Prepared

Clock: TypeAlias = Callable[[], datetime]


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC: ``timestamptz`` on PostgreSQL, sortable text on SQLite.

    SQLite has no type for times. The text always has six digits after the second, because texts of different
    lengths would not sort and compare like the times.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the type of the column."""
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Raise `ValueError` for a naive datetime, because its moment is unknown."""
        return None if value is None else _bound(value, dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Return an aware datetime in UTC."""
        return None if value is None else _read(value, dialect)


def _bound(value: datetime, dialect: Dialect) -> Any:
    if value.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")
    value = value.astimezone(UTC)
    return value.replace(tzinfo=None).isoformat(" ", "microseconds") if dialect.name == "sqlite" else value


def _read(value: Any, dialect: Dialect) -> datetime:
    if dialect.name == "sqlite":
        return datetime.fromisoformat(f"{value}+00:00")  # several times as fast as to replace the zone afterwards
    assert isinstance(value, datetime)
    return value.astimezone(UTC)


def bound(connection: Connection, value: datetime) -> Any:
    """Return the time in the driver's form, for a `Prepared` statement. Raises `ValueError` if it is naive."""
    return _bound(value, connection.dialect)


def read(connection: Connection, value: Any) -> datetime:
    """Return a time that the driver returned, from a `Prepared` statement: aware, in UTC."""
    return _read(value, connection.dialect)


class DatabaseNow(FunctionElement[datetime]):
    """The database's own clock, at the moment the statement runs (not when its transaction began)."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(DatabaseNow, "postgresql")
def _now_postgresql(element: DatabaseNow, compiler: SQLCompiler, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(DatabaseNow, "sqlite")
def _now_sqlite(element: DatabaseNow, compiler: SQLCompiler, **kw: Any) -> str:
    # %f gives milliseconds; the zeros bring it to the six digits that all our times have.
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"


class TransactionBegan(FunctionElement[Any]):
    """The moment at which the transaction of a statement began, which tells transactions apart on PostgreSQL.

    It is in the form of the driver. On SQLite it is the same for all.
    """

    inherit_cache = True


@compiles(TransactionBegan, "postgresql")
def _began_postgresql(element: TransactionBegan, compiler: SQLCompiler, **kw: Any) -> str:
    return "transaction_timestamp()"


@compiles(TransactionBegan, "sqlite")
def _began_sqlite(element: TransactionBegan, compiler: SQLCompiler, **kw: Any) -> str:
    return "1"  # its driver knows whether it is in one


_NOW = Prepared(select(DatabaseNow()))


def read_clock(connection: Connection, clock: Clock | None) -> datetime:
    """Return the time of the database's clock, or of the one the store was given for a simulation."""
    if clock is not None:
        return clock().astimezone(UTC)
    return read(connection, _NOW.run(connection).fetchone()[0])
