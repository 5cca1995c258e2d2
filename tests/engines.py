"""Engines for tests: what one test has made them do once, the next ones need not do again.

Statements are compiled once for all engines. Connections to PostgreSQL are kept from one test to the next: the
server forks, and reads its catalog, once. A test finds nothing in them of what an earlier one did: neither settings,
nor plans, nor prepared statements, nor locks; a connection that listens to something is not kept. The server shows
those that wait for a test under a name of their own, so that a test may count, or end, the connections of headgate.
"""

from __future__ import annotations

import select
from functools import cache
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import URL, Engine, event
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import QueuePool

from headgate.store.db import engine

KEPT_MAX = 6
NAME_WHILE_KEPT = "kept for another test"

_PUT_AWAY = f"""
DEALLOCATE ALL;
DISCARD PLANS;
SELECT pg_advisory_unlock_all();
SET application_name = '{NAME_WHILE_KEPT}';
SELECT count(*) FROM pg_listening_channels()
"""
_TAKE_OUT = f"RESET ALL; {engine._SESSION}"  # what each connection of headgate begins with


_compiled: dict[str, Any] = {}  # statements, by dialect


def share_what_is_compiled() -> None:
    """Have all engines of this process find the statements that others have compiled, those of commands and pages too.

    A command opens an engine, and compiles anew all that it asks; that is a third of the time of tests on SQLite.
    """
    for dialect in (SQLiteDialect_pysqlite, PGDialect_psycopg):
        # A statement is found by its dialect as well, which is another one in each engine.
        setattr(dialect, "__eq__", lambda one, other: type(one) is type(other))  # noqa: B010
        setattr(dialect, "__hash__", lambda one: hash(type(one)))  # noqa: B010

    def create_sharing(url: URL, **options: Any) -> Engine:
        opened = sqlalchemy.create_engine(url, **options)
        shared = _compiled.setdefault(opened.dialect.name, opened._compiled_cache)
        opened.update_execution_options(compiled_cache=shared)
        return opened

    setattr(engine, "create_engine", create_sharing)  # noqa: B010


def open_engine(url: str) -> Engine:
    """Open an engine for the tests of this process: as headgate does, but that it keeps connections to PostgreSQL."""
    return engine.open_engine(url) if url.startswith("sqlite") else _open_postgresql(url)


def close_engine(url: str) -> None:
    """Close the connections that are kept to a database."""
    _open_postgresql(url).dispose()


class _Pool(QueuePool):
    def __init__(self, creator: Any, **options: Any) -> None:
        super().__init__(creator, **{**options, "pool_size": KEPT_MAX, "max_overflow": -1, "use_lifo": True})


@cache
def _open_postgresql(url: str) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "NullPool", _Pool)
        opened = engine.open_engine(url)

    @event.listens_for(opened, "checkin")
    def put_away(connection: psycopg.Connection[Any] | None, record: Any) -> None:
        if connection is None or connection.closed:
            return
        try:
            connection.autocommit = True
            cursor = connection.execute(_PUT_AWAY)
            while cursor.nextset():
                pass
            if cursor.fetchall() != [(0,)]:
                record.invalidate()
        except psycopg.Error:
            record.invalidate()

    @event.listens_for(opened, "checkout")
    def take_out(connection: psycopg.Connection[Any], record: Any, proxy: Any) -> None:
        if not connection.autocommit:
            return  # it is new
        try:
            ready = select.poll()
            ready.register(connection.fileno(), select.POLLIN)
            if ready.poll(0):
                raise DisconnectionError
            connection.execute(_TAKE_OUT)
            connection.autocommit = False
        except psycopg.Error:
            raise DisconnectionError from None  # the pool then takes another one

    return opened
