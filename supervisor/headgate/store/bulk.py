"""Many rows in one statement, in the way that is fast on each database.

On SQLite a statement with a parameter a value is the fast way. On PostgreSQL the driver would spend more time
on the text of such a statement than the server on its rows; there every column travels as one array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import Column, ColumnElement, Connection, Table, column, func, literal, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.selectable import TableValuedAlias

ROWS_PER_STATEMENT_MAX = 500  # times 12 columns: far below the 32,766 parameters that SQLite takes
IDS_PER_STATEMENT_MAX = 1000  # the same for ids in one IN (...)

Item = TypeVar("Item")
Insert = sqlite.Insert | postgresql.Insert


def chunks(items: Sequence[Item], items_max: int = IDS_PER_STATEMENT_MAX) -> Iterator[Sequence[Item]]:
    """Cut into pieces that one statement can take."""
    for start in range(0, len(items), items_max):
        yield items[start : start + items_max]


def insert_into(connection: Connection, table: Table) -> Insert:
    """Return the INSERT of the connection's dialect, because ON CONFLICT is not in the common one."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def insert_new(
    connection: Connection, table: Table, rows: Sequence[dict[str, Any]], *, returning: Sequence[Column[Any]]
) -> list[tuple[Any, ...]]:
    """Insert the rows that meet no unique rule; return the columns ``returning`` of those that went in.

    All rows have the same keys. Rows may meet one another: the first goes in.
    """
    inserted: list[tuple[Any, ...]] = []
    for some in chunks(rows, ROWS_PER_STATEMENT_MAX):
        if connection.dialect.name == "sqlite":
            result = connection.execute(_insert_new_sqlite(table, tuple(returning)), some)
        else:
            statement = insert_into(connection, table)
            columns = [table.c[name] for name in some[0]]
            source = _unnested(columns, [tuple(row.values()) for row in some])
            statement = statement.from_select([c.name for c in columns], select(source))
            result = connection.execute(statement.on_conflict_do_nothing().returning(*returning))
        inserted += [tuple(row) for row in result]
    return inserted


@cache
def _insert_new_sqlite(table: Table, returning: tuple[Column[Any], ...]) -> ReturningInsert[tuple[Any, ...]]:
    """Return the one statement there is for these, built once: building takes longer than inserting a few rows."""
    return sqlite.insert(table).on_conflict_do_nothing().returning(*returning)


def insert_or_add(connection: Connection, table: Table, rows: Sequence[dict[str, Any]], *, add: Column[Any]) -> None:
    """Insert rows; where the primary key is there already, add to the column ``add`` and replace the others.

    No two rows have the same primary key, and all have the same keys.
    """
    for some in chunks(rows, ROWS_PER_STATEMENT_MAX):
        statement = insert_into(connection, table)
        replaced = {
            name: add + statement.excluded[name] if name == add.name else statement.excluded[name]
            for name in some[0]
            if name not in table.primary_key.columns
        }
        keys = list(table.primary_key.columns)
        if connection.dialect.name == "sqlite":
            connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=replaced), some)
        else:
            columns = [table.c[name] for name in some[0]]
            source = _unnested(columns, [tuple(row.values()) for row in some])
            statement = statement.from_select([c.name for c in columns], select(source))
            connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=replaced))


def is_one_of(
    connection: Connection, columns: Sequence[Column[Any]], rows: Sequence[tuple[Any, ...]]
) -> ColumnElement[bool]:
    """Return the condition that ``columns`` together are one of ``rows``: at most `ROWS_PER_STATEMENT_MAX` of them."""
    assert len(rows) <= ROWS_PER_STATEMENT_MAX
    if connection.dialect.name == "sqlite":
        return tuple_(*columns).in_(rows)
    return tuple_(*columns).in_(select(_unnested(columns, rows)))


def _unnested(columns: Sequence[Column[Any]], rows: Sequence[tuple[Any, ...]]) -> TableValuedAlias:
    """Return ``rows`` as a table with the names and types of ``columns``."""
    arrays = [
        literal(list(values), postgresql.ARRAY(c.type))
        for c, values in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    return func.unnest(*arrays).table_valued(*[column(c.name, c.type) for c in columns]).render_derived()
