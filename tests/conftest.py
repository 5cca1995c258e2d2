"""Databases for tests: a file of SQLite and a database of PostgreSQL, both with the tables of this headgate.

A test that takes `store` or `database_url` runs once on each. PostgreSQL is looked for at
``HEADGATE_TEST_POSTGRES_URL``; where no server answers those tests skip, but never where ``CI`` is set.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cryptography.fernet import Fernet
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.engine import make_url
from tests.store.harness import WAITED_MAX_S, OpenStore, Query

from headgate.child import queries
from headgate.store.db import engine, schema
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.store.tables import metadata

POSTGRES_URL = os.environ.get("HEADGATE_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
POSTGRES_CONNECT_TIMEOUT_S = 5  # a server on this machine answers at once

# Modules that tests write are changed within a second, which a file of compiled code does not tell.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


CAMPAIGN_S_MAX = 900.0  # of one test: the longest that a busy machine may take for what a quiet one does in a minute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give campaigns the time that they take: they compute, and wait for nothing that could fail to come."""
    for item in items:
        if item.get_closest_marker("campaign") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(CAMPAIGN_S_MAX))


def pytest_collection_finish() -> None:
    """Tell Python that what is imported by now, most of the heap, stays as it is."""
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()  # no collection walks it any more


# --- PostgreSQL ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _secrets_of_this_test_alone() -> Iterator[None]:
    """A secret that one test has read would be masked in what all later ones of the process write."""
    with queries.secrets.apart():
        yield


@pytest.fixture(scope="session")
def postgres_admin() -> Iterator[psycopg.Connection[Any]]:
    """A connection that may make and drop databases."""
    try:
        connection = psycopg.connect(POSTGRES_URL, autocommit=True, connect_timeout=POSTGRES_CONNECT_TIMEOUT_S)
    except psycopg.OperationalError as error:
        message = f"no PostgreSQL server answers: {error}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with connection:
        yield connection


@pytest.fixture(scope="session")
def make_postgres_url(postgres_admin: psycopg.Connection[Any]) -> Iterator[Callable[[], str]]:
    """Makes an empty database and returns its URL; it is dropped when the session ends."""
    made: list[str] = []
    numbers = count(1)

    def make() -> str:
        name = f"headgate_test_{os.getpid()}_{next(numbers)}"
        postgres_admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        made.append(name)
        return make_url(POSTGRES_URL).set(database=name).render_as_string(hide_password=False)

    yield make
    for name in made:
        postgres_admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def migrated_postgres_url(make_postgres_url: Callable[[], str]) -> str:
    """The database that most tests share, one after the other."""
    url = make_postgres_url()
    schema.upgrade(open_engine(url))
    return url


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """A PostgreSQL database with tables and without rows."""
    # Deleting a few rows is much faster than truncating, which makes new files. Nobody has to wait for the disk.
    statements: list[sql.Composable] = [sql.SQL("SET LOCAL synchronous_commit = off")]
    for table in reversed(metadata.sorted_tables):
        statements.append(sql.SQL("DELETE FROM {}").format(sql.Identifier(table.name)))
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute(sql.SQL("; ").join(statements))
    return migrated_postgres_url


# --- SQLite --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def migrated_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the tables, to be copied: faster than to migrate for each test."""
    path = tmp_path_factory.mktemp("store") / "migrated.db"
    schema.upgrade(open_engine(f"sqlite:///{path}"))
    return path


@pytest.fixture
def sqlite_url(migrated_sqlite_file: Path, tmp_path: Path) -> str:
    """A SQLite database with tables and without rows."""
    path = tmp_path / "headgate.db"
    shutil.copy(migrated_sqlite_file, path)
    return f"sqlite:///{path}"


@pytest.fixture
def patient_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers wait for SQLite's lock as long as it takes: it is given in no order, so one of many may starve."""
    monkeypatch.setattr(engine, "SQLITE_BUSY_TIMEOUT_S", WAITED_MAX_S)


# --- both ----------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a database with tables and without rows, on both databases."""
    fixture = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    return str(request.getfixturevalue(fixture))


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables, on both databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    return str(request.getfixturevalue("make_postgres_url")())


@pytest.fixture(scope="session")
def secrets() -> Secrets:
    """The keys of the tests' stores."""
    return Secrets([Fernet.generate_key().decode()], source="the tests")


@pytest.fixture
def open_store(database_url: str, secrets: Secrets) -> Iterator[OpenStore]:
    """Opens any number of stores on the same database, each with a connection of its own."""
    stores: list[Store] = []

    def open_another(*, clock: Callable[[], datetime] | None = None) -> Store:
        store = Store(open_engine(database_url), secrets=secrets, clock=clock)
        stores.append(store)
        return store

    yield open_another
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    """A store on an empty database, on both databases."""
    return open_store()


@pytest.fixture
def query(database_url: str) -> Query:
    """Runs SQL on the database of the test, in a transaction of its own; returns the rows as dicts."""
    opened = open_engine(database_url)

    def run(statement: str, **parameters: Any) -> list[dict[str, Any]]:
        with opened.begin() as connection:
            result = connection.execute(text(statement), parameters)
            return [dict(row._mapping) for row in result] if result.returns_rows else []

    return run
