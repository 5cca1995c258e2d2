"""Insert and find many rows at a time, in the way that is fast on each database.

SQLite runs in this process, so a statement costs little, and most of the time is spent in Python, per row. There an
insert has one parameter per value, in one of a few sizes, and a lookup is one statement per row. On PostgreSQL every
statement is a round trip, and the driver would spend more time on the text of a long one than the server on its rows.
There every column is sent as one array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnClause,
    Connection,
    Table,
    and_,
    bindparam,
    column,
    func,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.selectable import TableValuedAlias

from headgate.store.db.prepared import Prepared, driver_of

ROWS_PER_STATEMENT_MAX = 500  # times 12 columns: far below SQLite's limit of 32,766 parameters
IDS_PER_STATEMENT_MAX = 1000  # the same for ids in one IN (...)
# Sizes of the prepared inserts on SQLite, in rows, largest first. Each is parsed once per connection. Any number of
# rows is a sum of them.
_SIZES = (256, 64, 16, 4, 1)

_INDEX = "index_in_rows"  # the place of a row among those that are looked for

Item = TypeVar("Item")
Rows = Sequence[tuple[Any, ...]]
Insert = sqlite.Insert | postgresql.Insert


class Kind(NamedTuple):
    """A table, and the columns that the rows have, in order. Hashable: compiled statements are cached by it."""

    table: Table
    columns: tuple[str, ...]

    def all_columns(self) -> list[Column[Any]]:
        """Return the columns themselves."""
        return [self.table.c[name] for name in self.columns]


def chunks(items: Sequence[Item], items_max: int = IDS_PER_STATEMENT_MAX) -> Iterator[Sequence[Item]]:
    """Yield slices that are small enough for one statement."""
    for start in range(0, len(items), items_max):
        yield items[start : start + items_max]


def insert_into(connection: Connection, table: Table) -> Insert:
    """Return the INSERT of the connection's dialect, because SQLAlchemy's generic one has no ON CONFLICT."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def insert_new(connection: Connection, kind: Kind, rows: Rows, *, returning: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Insert the rows that violate no unique constraint; return the columns ``returning`` of those inserted.

    If rows conflict with one another, the first is inserted. Values are in the driver's form (see
    `headgate.store.db.times`).
    """
    inserted: list[tuple[Any, ...]] = []
    driver = driver_of(connection)
    if connection.dialect.name == "sqlite":
        for some in _in_sizes(rows):
            text = _insert_new_values(kind, returning, len(some)).text(connection.dialect)
            flat = some[0] if len(some) == 1 else [value for row in some for value in row]
            inserted += driver.execute(text, flat).fetchall()
        return inserted
    for some in chunks(rows, ROWS_PER_STATEMENT_MAX):
        statement = _insert_new_arrays(kind, returning)
        inserted += statement.run(connection, **_arrays(kind.columns, some)).fetchall()
    return inserted


def insert_or_replace(connection: Connection, kind: Kind, rows: Rows, *, add: str = "") -> None:
    """Insert rows; if the primary key exists already, replace the other columns, but add to the column ``add``.

    No two rows have the same primary key.
    """
    if connection.dialect.name == "sqlite":
        _insert_or_replace_values(kind, add).run_many(
            connection, (dict(zip(kind.columns, row, strict=True)) for row in rows)
        )
        return
    for some in chunks(rows, ROWS_PER_STATEMENT_MAX):
        _insert_or_replace_arrays(kind, add).run(connection, **_arrays(kind.columns, some))


def find(connection: Connection, kind: Kind, rows: Rows, *, returning: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return the columns ``returning`` of all rows whose values of ``kind.columns`` are in ``rows``."""
    found: list[tuple[Any, ...]] = []
    if connection.dialect.name == "sqlite":
        statement = _find_values(kind, returning)
        for row in rows:
            found += statement.run(connection, **dict(zip(kind.columns, row, strict=True))).fetchall()
        return found
    for some in chunks(rows, ROWS_PER_STATEMENT_MAX):
        found += _find_arrays(kind, returning).run(connection, **_arrays(kind.columns, some)).fetchall()
    return found


def compare(
    connection: Connection, kind: Kind, rows: Rows, *, keys: int, returning: tuple[str, ...]
) -> list[tuple[Any, ...]]:
    """Find rows by the first ``keys`` values of ``kind.columns``, and compare the other values.

    Return, for each of ``rows`` that has one in the table: its index in ``rows``, the columns ``returning`` of the one
    in the table, and whether the other values are equal. The keys are unique in the table.
    """
    compared: list[tuple[Any, ...]] = []
    if connection.dialect.name == "sqlite":
        statement = _compare_values(kind, keys, returning)
        for index, row in enumerate(rows):
            found = statement.run(connection, **dict(zip(kind.columns, row, strict=True))).fetchall()
            compared += [(index, *values) for values in found]
        return compared
    statement = _compare_arrays(kind, keys, returning)
    for some in chunks(list(enumerate(rows)), ROWS_PER_STATEMENT_MAX):
        columns = _arrays(kind.columns, [row for _, row in some])
        compared += statement.run(connection, **columns, **{_INDEX: [index for index, _ in some]}).fetchall()
    return compared


# --- SQLite: one parameter per value -------------------------------------------------------------


def _in_sizes(rows: Rows) -> Iterator[Rows]:
    start = 0
    for size in _SIZES:
        while len(rows) - start >= size:
            yield rows[start : start + size]
            start += size


@cache
def _insert_new_values(kind: Kind, returning: tuple[str, ...], rows: int) -> Prepared:
    names: list[dict[str, Any]] = [
        {name: bindparam(f"{name}_{number}") for name in kind.columns} for number in range(rows)
    ]
    statement = sqlite.insert(kind.table).values(names).on_conflict_do_nothing()
    prepared = Prepared(statement.returning(*[kind.table.c[name] for name in returning]))
    # The values are passed row by row, so the statement must have its parameters in this order.
    in_order = [f"{name}_{number}" for number in range(rows) for name in kind.columns]
    assert list(prepared.places(sqlite.dialect())) == in_order
    return prepared


@cache
def _insert_or_replace_values(kind: Kind, add: str) -> Prepared:
    statement = sqlite.insert(kind.table).values({name: bindparam(name) for name in kind.columns})
    return Prepared(_or_replace(kind, statement, add))


@cache
def _find_values(kind: Kind, returning: tuple[str, ...]) -> Prepared:
    same = [column == bindparam(column.name) for column in kind.all_columns()]
    return Prepared(select(*[kind.table.c[name] for name in returning]).where(*same))


@cache
def _compare_values(kind: Kind, keys: int, returning: tuple[str, ...]) -> Prepared:
    same = [column == bindparam(column.name) for column in kind.all_columns()]
    columns = [kind.table.c[name] for name in returning]
    return Prepared(select(*columns, and_(*same[keys:])).where(*same[:keys]))


# --- PostgreSQL: one array per column ------------------------------------------------------------


@cache
def _insert_new_arrays(kind: Kind, returning: tuple[str, ...]) -> Prepared:
    statement = postgresql.insert(kind.table).from_select(kind.columns, select(_unnested(kind)))
    statement = statement.on_conflict_do_nothing()
    return Prepared(statement.returning(*[kind.table.c[name] for name in returning]), binary=True)


@cache
def _insert_or_replace_arrays(kind: Kind, add: str) -> Prepared:
    statement = postgresql.insert(kind.table).from_select(kind.columns, select(_unnested(kind)))
    return Prepared(_or_replace(kind, statement, add), binary=True)


@cache
def _find_arrays(kind: Kind, returning: tuple[str, ...]) -> Prepared:
    wanted = tuple_(*kind.all_columns()).in_(select(_unnested(kind)))
    return Prepared(select(*[kind.table.c[name] for name in returning]).where(wanted), binary=True)


@cache
def _compare_arrays(kind: Kind, keys: int, returning: tuple[str, ...]) -> Prepared:
    given = _unnested(kind, column(_INDEX, BigInteger))
    same = [column == given.c[column.name] for column in kind.all_columns()]
    columns = [kind.table.c[name] for name in returning]
    found = given.join(kind.table, and_(*same[:keys]))
    return Prepared(select(given.c[_INDEX], *columns, and_(*same[keys:])).select_from(found), binary=True)


def _unnested(kind: Kind, *others: ColumnClause[Any]) -> TableValuedAlias:
    """Return the rows as a table with the names and types of their columns, from one array parameter per column."""
    columns = [*kind.all_columns(), *others]
    arrays = [bindparam(c.name, type_=postgresql.ARRAY(c.type)) for c in columns]
    return func.unnest(*arrays).table_valued(*[column(c.name, c.type) for c in columns]).render_derived()


def _arrays(columns: tuple[str, ...], rows: Rows) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in zip(columns, zip(*rows, strict=True), strict=True)}


# --- both ----------------------------------------------------------------------------------------


def _or_replace(kind: Kind, statement: Insert, add: str) -> Insert:
    keys = list(kind.table.primary_key.columns)
    replaced = {
        name: kind.table.c[name] + statement.excluded[name] if name == add else statement.excluded[name]
        for name in kind.columns
        if name not in kind.table.primary_key.columns
    }
    return statement.on_conflict_do_update(index_elements=keys, set_=replaced)
