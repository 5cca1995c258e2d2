"""No page reads a large table from one end to the other, however many rows it has: the database says how it reads.

Every statement of every page is explained, on a small database that has counted its rows. SQLite tells a scan from a
search. PostgreSQL has to use an index if there is one that serves, and tells where there is none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from benchmarks.filling import Filled, Sizes, fill
from sqlalchemy import Connection, Engine, event

from benchmarks import bench_web
from headgate.store.store import Store
from headgate.store.tables import metadata
from headgate.web.routes import ROUTES

# Enough rows that an index is worth it to both.
SIZES = Sizes(events=2_000, triggers=1_000, runs=300, letters=200, signal_keys=20)
LARGE = ("trigger_event", "trigger", "task_instance", "dag_run", "dead_letter")

# Indexes that have few rows of a large table: those that fail, wait, or are due.
PARTIAL = {
    index.name
    for table in LARGE
    for index in metadata.tables[table].indexes
    if index.dialect_options["sqlite"]["where"] is not None
} - {"ix_trigger_claim", "ix_trigger_stream", "ix_trigger_owner"}
STATEMENTS_OF_LIST_MAX = 12  # of a list, however many rows it has
STATEMENTS_OF_PAGE_MAX = 48

Asked = dict[tuple[str, str], Any]  # the page and the statement, with its parameters


class Listened(NamedTuple):
    """The statements of all pages, and how many each page ran in all its calls, of which there are `CALLS`."""

    statements: Asked
    counts: Counter[str]


CALLS = 2  # one before those that are timed


@contextmanager
def listening(path: str, asked: Listened) -> Iterator[None]:
    """Take note of all statements."""

    def note(_connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.lstrip().startswith(("SELECT", "WITH")):
            asked.statements[(path, statement)] = parameters
            asked.counts[path] += 1

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def asked(store: Store, database_url: str) -> Listened:
    """What all pages ask of a filled database."""
    epoch, busy = fill(store, SIZES)
    given = Filled(store, epoch, busy, store.database.engine, database_url)
    found = Listened({}, Counter())
    bench_web.ask(given, 1, around=lambda path: listening(path, found))
    silent = {"/search", "/search.json", "/account"}
    assert set(bench_web.paths()) - found.counts.keys() == silent, "these ask for nothing"
    return found


def scans(connection: Connection, statement: str, parameters: Any = ()) -> list[str]:
    """Return the lines of a plan that read a large table from one end to the other."""
    is_sqlite = connection.dialect.name == "sqlite"
    explain = "EXPLAIN QUERY PLAN " if is_sqlite else "EXPLAIN "
    plan = [str(row[-1]) for row in connection.exec_driver_sql(explain + statement, parameters)]
    tables = "|".join(LARGE)
    if not is_sqlite:
        return [line for line in plan if re.search(rf'Seq Scan on "?({tables})\b', line)]
    # A list begins at one end as well, and stops.
    stops = "LIMIT" in statement and not any("TEMP B-TREE" in line for line in plan)
    whole = [re.match(rf"SCAN ({tables})(?: USING (?:COVERING )?INDEX (\w+))?$", line) for line in plan]
    return [] if stops else [found[0] for found in whole if found is not None and found[2] not in PARTIAL]


@contextmanager
def explaining(store: Store) -> Iterator[Connection]:
    """Yield a connection that has to use indexes."""
    with store.database.engine.connect() as connection:
        if connection.dialect.name != "sqlite":
            connection.exec_driver_sql("SET enable_seqscan = off")
        yield connection


def test_no_page_reads_a_whole_table(asked: Listened, store: Store) -> None:
    with explaining(store) as connection:
        found = [
            f"{path}: {line}\n{statement}"
            for (path, statement), parameters in asked.statements.items()
            for line in scans(connection, statement, parameters)
        ]
    assert found == []


def test_no_page_asks_again_for_each_of_its_rows(asked: Listened) -> None:
    lists = {route.path for route in ROUTES if route.is_list} - {"/search"}

    def most(path: str) -> int:
        is_list = path.partition("?")[0].removesuffix(".json") in lists
        return CALLS * (STATEMENTS_OF_LIST_MAX if is_list else STATEMENTS_OF_PAGE_MAX)

    assert {path: count for path, count in asked.counts.items() if count > most(path)} == {}


def test_a_statement_that_reads_a_whole_table_is_found(store: Store) -> None:
    bad = (
        "SELECT sum(position) FROM trigger_event",
        "SELECT * FROM task_instance WHERE last_error = 'x' ORDER BY started_at LIMIT 50",
    )
    good = (
        "SELECT * FROM trigger_event ORDER BY id DESC LIMIT 50",
        "SELECT * FROM dag_run WHERE state = 'failed' ORDER BY id DESC LIMIT 50",
    )
    with explaining(store) as connection:
        if connection.dialect.name == "sqlite":  # an index of all rows is read from one end to the other, too
            assert scans(connection, "SELECT sum(trigger_id) FROM trigger_event")
        assert all(scans(connection, statement) for statement in bad)
        assert not any(scans(connection, statement) for statement in good)
