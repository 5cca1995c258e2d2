"""No page reads a large table from one end to the other, however many rows it has: the database says how it reads.

Every statement of every page is explained, on a small database that has counted its rows. SQLite tells a scan from a
search. PostgreSQL has to use an index if there is one that serves, and tells where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from benchmarks.filling import Filled, Sizes, fill
from sqlalchemy import Connection, Engine, event

from benchmarks import bench_web
from headgate.store.store import Store

# Enough rows that an index is worth it to both.
SIZES = Sizes(events=2_000, triggers=1_000, runs=300, letters=200, signal_keys=20)
LARGE = ("trigger_event", "trigger", "task_instance", "dag_run", "dead_letter")

Asked = dict[tuple[str, str], Any]  # the page and the statement, with its parameters


@contextmanager
def listening(path: str, asked: Asked) -> Iterator[None]:
    """Take note of all statements."""

    def note(_connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.lstrip().startswith(("SELECT", "WITH")):
            asked[(path, statement)] = parameters

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def asked(store: Store, database_url: str) -> Asked:
    """What all pages ask of a filled database."""
    epoch, busy = fill(store, SIZES)
    given = Filled(store, epoch, busy, store.database.engine, database_url)
    found: Asked = {}
    bench_web.ask(given, 1, around=lambda path: listening(path, found))
    assert set(bench_web.paths()) - {path for path, _ in found} == {"/search", "/search.json"}, "these ask for nothing"
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
    return [] if stops else [line for line in plan if re.match(rf"SCAN ({tables})$", line)]


@contextmanager
def explaining(store: Store) -> Iterator[Connection]:
    """Yield a connection that has to use indexes."""
    with store.database.engine.connect() as connection:
        if connection.dialect.name != "sqlite":
            connection.exec_driver_sql("SET enable_seqscan = off")
        yield connection


def test_no_page_reads_a_whole_table(asked: Asked, store: Store) -> None:
    with explaining(store) as connection:
        found = [
            f"{path}: {line}\n{statement}"
            for (path, statement), parameters in asked.items()
            for line in scans(connection, statement, parameters)
        ]
    assert found == []


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
        assert all(scans(connection, statement) for statement in bad)
        assert not any(scans(connection, statement) for statement in good)
