"""The proxy in front of PostgreSQL: it changes nothing, counts statements, and holds back answers to commits only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from benchmarks.board import Board
from benchmarks.databases import Database, fresh, postgresql_answers

from benchmarks import proxy

DELAY_S = 0.05


@pytest.fixture
def database() -> Iterator[Database]:
    if not postgresql_answers():
        pytest.skip("no PostgreSQL server answers")
    with fresh("postgresql") as database:
        yield database


def took_s(connection: psycopg.Connection[Any], statement: str) -> float:
    begun = time.monotonic()
    connection.execute(statement)
    return time.monotonic() - begun


def test_statements_are_counted_and_answers_are_the_server_s(database: Database, tmp_path: Path) -> None:
    board = Board(str(tmp_path / "board"), 0)
    with proxy.in_front_of(database.url, board=board) as url, psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("SELECT %s + 1", [41]).fetchone() == (42,)
        assert board["statements"] == 1
        big = connection.execute("SELECT repeat('x', 1000000) FROM generate_series(1, 3)").fetchall()
        assert [len(text) for (text,) in big] == [1_000_000] * 3
        with connection.transaction():
            connection.execute("SELECT 1")
        assert board["statements"] == 5  # with BEGIN and COMMIT


def test_a_change_is_answered_late_once_it_is_committed_and_not_before(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with proxy.in_front_of(database.url, commit_delay_s=DELAY_S) as url, psycopg.connect(url) as connection:
        connection.execute("CREATE TEMPORARY TABLE t (n int)")
        connection.execute("INSERT INTO t VALUES (1)")
        assert slept == []  # nothing is committed yet
        connection.commit()
        assert slept == [DELAY_S]
        connection.execute("SELECT * FROM t").fetchall()
        connection.rollback()
        assert slept == [DELAY_S]  # nothing was changed
        connection.autocommit = True
        connection.execute("UPDATE t SET n = 2")
        assert slept == [DELAY_S] * 2  # a change by itself is a commit


def test_the_delay_is_waited_for(database: Database) -> None:
    with proxy.in_front_of(database.url, commit_delay_s=DELAY_S) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TEMPORARY TABLE t (n int)")
            assert took_s(connection, "INSERT INTO t VALUES (1)") >= DELAY_S
