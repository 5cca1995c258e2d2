"""A table that is read as a queue: what the server says of it, and the statements that read and empty it.

Names of columns are those of the server, exactly; the name of a table is as in SQL. The ids of rows pass as texts and
are converted by the server, so that a column of any type with an order will do.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from headgate.brokers.broker_errors import BrokerMisconfigured, BrokerSourceMissing
from headgate.brokers.clients.postgres_client import PostgresClient

TIMES: Final = ("timestamp with time zone", "timestamp without time zone", "date")


class Table(NamedTuple):
    """What the user says: names, and a condition in SQL. ``body``, ``lane`` and ``mark`` may be empty."""

    name: str
    id: str
    body: str  # the column that has the event as JSON; empty: the row is it
    lane: str  # the column by which order is kept; empty: by none
    mark: str  # the column that is set when a row is handled; empty: the row is deleted
    where: str | None
    dead_letter: str | None

    @property
    def done(self) -> str:
        """What is done with a row that is handled."""
        return "marked" if self.mark else "deleted"


class Column(NamedTuple):
    """A column as the server has it; ``sql`` is its name as in a statement with parameters."""

    sql: str
    type: str
    is_not_null: bool
    is_generated: bool


class FoundTable(NamedTuple):
    """A table as the server has it."""

    oid: int
    sql: str  # its name, as in a statement with parameters
    is_partitioned: bool
    columns: dict[str, Column]
    rejected_sql: str  # the name of the table for rejected rows; empty: none
    dangers: tuple[str, ...]  # with which it loses rows
    warnings: tuple[str, ...]


class Statements(NamedTuple):
    """The statements, with ``%(name)s`` for parameters.

    ``read`` and ``read_after`` return id, xmin, oid, lane, size in bytes, and body of rows. ``acknowledge`` and
    ``reject`` return whether the session has the token, and how many rows are done; ``still_there`` returns ids, and
    ``lag`` a count.
    """

    read: str
    read_after: str
    acknowledge: str
    reject: str
    still_there: str
    lag: str


def find_table(client: PostgresClient, table: Table, where: str) -> FoundTable:
    """Return what the server has under a name. Raises `BrokerMisconfigured` for what cannot be read as a queue."""
    found = client.rows(
        "SELECT oid::bigint, oid::regclass::text, relkind::text, relpersistence::text, row_security_active(oid), "
        "EXISTS (SELECT FROM pg_inherits WHERE inhparent = pg_class.oid), "
        "EXISTS (SELECT FROM pg_constraint WHERE confrelid = pg_class.oid AND confdeltype IN ('a', 'r')) "
        "FROM pg_class WHERE oid = to_regclass(%(name)s)",
        {"name": table.name},
    )
    if not found:
        raise BrokerSourceMissing(f"{where}: it does not exist (any more), or its schema is not in the search path")
    ((oid, sql, kind, persistence, hides_rows, has_children, is_referred_to),) = found
    if kind not in ("r", "p"):
        raise BrokerMisconfigured(f"{where}: it is a view or something else, and must be a table")
    if has_children and kind == "r":
        raise BrokerMisconfigured(f"{where}: other tables inherit from it, so its ids are not unique")
    columns = _columns_of(client, oid)
    _check_columns(table, columns, where)
    if not _is_unique(client, oid, table.id) or not columns[table.id].is_not_null:
        raise BrokerMisconfigured(
            f"{where}: the column {table.id!r} must be its primary key, or be unique by itself and NOT NULL: without "
            f"that two rows may be taken for one"
        )
    dangers = ("it is UNLOGGED: a crash of the server empties it",) if persistence == "u" else ()
    warnings = []
    if hides_rows:
        warnings.append("row security is active for this user: rows that it hides are not read")
    if is_referred_to and not table.mark:
        warnings.append("a foreign key refers to it: a row that is referred to cannot be deleted, and ends the stream")
    rejected_sql = _rejected_table(client, table, columns, where) if table.dead_letter is not None else ""
    return FoundTable(oid, _escaped(sql), kind == "p", columns, rejected_sql, dangers, tuple(warnings))


def _columns_of(client: PostgresClient, oid: int) -> dict[str, Column]:
    rows = client.rows(
        "SELECT attname, quote_ident(attname), format_type(atttypid, NULL), attnotnull, attgenerated <> '' "
        "FROM pg_attribute WHERE attrelid = %(oid)s::oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        {"oid": oid},
    )
    return {name: Column(_escaped(sql), *more) for name, sql, *more in rows}


def _escaped(sql: str) -> str:
    """Double each %, which would be taken for the beginning of a parameter."""
    return sql.replace("%", "%%")


def _check_columns(table: Table, columns: dict[str, Column], where: str) -> None:
    for name in (table.id, table.body, table.lane, table.mark):
        if name and name not in columns:
            raise BrokerMisconfigured(f"{where}: it has no column {name!r}; it has {', '.join(columns)}")
    if table.mark and (kind := columns[table.mark].type) not in (*TIMES, "boolean"):
        raise BrokerMisconfigured(f"{where}: the column {table.mark!r} must be a time or a boolean, and is {kind}")


def _is_unique(client: PostgresClient, oid: int, column: str) -> bool:
    rows = client.rows(
        "SELECT FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0] "
        "WHERE indrelid = %(oid)s::oid AND attname = %(column)s AND indisunique AND indisvalid AND indimmediate "
        "AND indnkeyatts = 1 AND indpred IS NULL AND indexprs IS NULL",
        {"oid": oid, "column": column},
    )
    return bool(rows)


def _rejected_table(client: PostgresClient, table: Table, columns: dict[str, Column], where: str) -> str:
    found = client.rows(
        "SELECT oid::bigint, oid::regclass::text FROM pg_class WHERE oid = to_regclass(%(name)s)",
        {"name": table.dead_letter},
    )
    if not found:
        raise BrokerMisconfigured(f"{where}: dead_letter {table.dead_letter} does not exist")
    ((oid, sql),) = found
    has = _columns_of(client, oid)
    copied = [name for name, column in columns.items() if not column.is_generated]
    if missing := [name for name in copied if name not in has]:
        raise BrokerMisconfigured(f"{where}: dead_letter {table.dead_letter} has no column {missing[0]!r}")
    own = [name for name, column in has.items() if name not in copied and not column.is_generated]
    _check_keys(client, oid, own, f"{where}: dead_letter {table.dead_letter}")
    return _escaped(sql)


def _check_keys(client: PostgresClient, oid: int, own: list[str], where: str) -> None:
    """Refuse a unique key of what is copied, which ``own`` columns are not.

    A row that is put back and rejected again may have changed since: neither its older copy nor it may be dropped.
    """
    keys = client.rows(
        "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
        "WHERE indrelid = %(oid)s::oid AND (indisunique OR indisexclusion) AND NOT EXISTS (SELECT FROM pg_attribute "
        "WHERE attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1]) "
        "AND attname::text = ANY (%(own)s::text[])) ORDER BY relname LIMIT 1",
        {"oid": oid, "own": own},
    )
    if keys:
        raise BrokerMisconfigured(
            f"{where} has the unique key {keys[0][0]}, so that a row which is put back could not be rejected again: "
            f"drop that key, or have it on a column that is not copied, such as an identity of its own"
        )


def statements_of(found: FoundTable, table: Table) -> Statements:
    """Return the statements for a table."""
    columns = found.columns
    key, source = columns[table.id], f"{found.sql} AS source"
    pending = f"({_escaped(table.where)}\n)" if table.where is not None else "true"
    action = f"DELETE FROM {source} USING told"
    if table.mark:
        mark = columns[table.mark]
        is_flag = mark.type == "boolean"
        pending += f" AND source.{mark.sql} IS {'NOT TRUE' if is_flag else 'NULL'}"
        action = f"UPDATE {source} SET {mark.sql} = {'true' if is_flag else 'now()'} FROM told"
    ids, xmins = f"%(ids)s::text[]::{key.type}[]", "%(xmins)s::text[]::xid[]"
    told = f"WITH told AS (SELECT * FROM unnest({ids}, {xmins}) AS told (told_id, told_xmin))"
    same = f"source.{key.sql} = told_id AND source.xmin = told_xmin"
    has_token = "coalesce(current_setting('headgate.reader', true), '') = %(token)s"
    kept = [column.sql for column in columns.values() if not column.is_generated]
    done = f"done AS ({action} WHERE {same} AND {has_token} RETURNING {', '.join(f'source.{sql}' for sql in kept)})"
    into = f"INSERT INTO {found.rejected_sql} ({', '.join(kept)}) OVERRIDING SYSTEM VALUE SELECT * FROM done"
    answer = f"SELECT {has_token}, count(*) FROM"
    return Statements(
        _read(found, table, pending),
        _read(found, table, f"{pending} AND source.{key.sql} > %(after)s::text::{key.type}"),
        f"{told}, {done} {answer} done",
        f"{told}, {done}, kept AS ({into} RETURNING 1) {answer} kept" if found.rejected_sql else "",
        f"SELECT source.{key.sql}::text FROM {source} JOIN unnest({ids}, {xmins}) AS told (told_id, told_xmin) "
        f"ON {same} WHERE {pending} LIMIT 1",
        f"SELECT count(*) FROM (SELECT FROM {source} WHERE {pending} LIMIT %(count_max)s) AS waiting",
    )


def _read(found: FoundTable, table: Table, pending: str) -> str:
    columns = found.columns
    key = columns[table.id]
    lane = f"source.{columns[table.lane].sql}::text" if table.lane else "NULL"
    body = "row_to_json(source)::text"
    if table.body:
        column = columns[table.body]
        body = f"source.{column.sql}" if column.type == "bytea" else f"source.{column.sql}::text"
    oid = str(found.oid) if found.is_partitioned else "source.tableoid::bigint"
    return (
        f"SELECT id, version, oid, lane, size, CASE WHEN size > %(bytes_max)s THEN substring(body FROM 1 FOR "
        f"%(head_bytes)s) ELSE body END FROM (SELECT *, octet_length(body) AS size FROM (SELECT source.{key.sql} AS "
        f"place, source.{key.sql}::text AS id, source.xmin::text AS version, {oid} AS oid, {lane} AS lane, {body} AS "
        f"body FROM {found.sql} AS source WHERE {pending} AND source.{key.sql} <> ALL (%(passed)s::text[]::{key.type}[]"
        f") ORDER BY source.{key.sql} LIMIT %(count_max)s) AS rows) AS sized ORDER BY place"
    )
