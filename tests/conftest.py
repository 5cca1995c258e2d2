"""Databases for tests: a file of SQLite and a database of PostgreSQL, both with the tables of this headgate.

A test that takes `store` or `database_url` runs once on each. The server of PostgreSQL is the one that
``HEADGATE_TEST_POSTGRES_URL`` names, or one of the tests' own; where none answers those tests skip, but never where
``CI`` is set. Files are in memory where there is room: nothing here tells a power cut from a kill, and waiting for the
disk took most of the time of a test. To use the disk, set ``TMPDIR``.
"""

from __future__ import annotations

import compileall
import faulthandler
import gc
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import psutil
import psycopg
import pytest
import structlog
from cryptography.fernet import Fernet
from hypothesis import HealthCheck, settings
from psycopg import sql
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from tests import postgres
from tests.engines import close_engine, open_engine, share_what_is_compiled
from tests.store.harness import OpenStore, Query, migrated_sqlite
from tests.waiting import WITHIN_S

from headgate.child import queries
from headgate.store.db import engine, schema
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.store.tables import metadata

POSTGRES_CONNECT_TIMEOUT_S = 5  # a server on this machine answers at once
FEW_FILES = 400
ROOT = Path(__file__).parent.parent
SLOW_TESTS, BROWSER_TESTS = ROOT / "tests" / "integration", ROOT / "tests" / "browser"
FIRST_STEPS = {"test_readme.py", "test_examples.py"}  # of these, on SQLite: what a new user does
MEMORY_FOLDER = Path("/dev/shm")
MEMORY_FREE_MIN = 6 << 30  # bytes; the largest databases of tests have one, and processes need some as well

# Modules that tests write are changed within a second, which a file of compiled code does not tell.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# As processes of headgate do: rich takes seconds for one traceback, as it shows all values that were there.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback

share_what_is_compiled()

# How long an example takes, or the making of one, is no finding on a busy machine.
settings.register_profile("busy", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow]))
settings.load_profile("busy")

HUNG_S = 60.0  # a process of tests ends so long after the time limit of its test, if that did not end the test
STDERR = pytest.StashKey[int]()  # as it is outside of tests


def pytest_configure(config: pytest.Config) -> None:
    """Choose the folder for temporary files, also for the processes that tests start."""
    config.stash[STDERR] = os.dup(2)
    sys.dont_write_bytecode = False  # until all is imported: rewritten tests are kept for the next worker and run
    if not hasattr(config, "workerinput"):
        _compile()
    if "TMPDIR" not in os.environ and config.getoption("basetemp") is None and _has_room(MEMORY_FOLDER):
        os.environ["TMPDIR"] = str(MEMORY_FOLDER)
        tempfile.tempdir = None  # what was found before


def _compile() -> None:
    """Compile what has changed, once: else each of the thousand processes that tests start would, as none may write."""
    for root in ("protocol", "runner", "supervisor", "tests"):
        compileall.compile_dir(ROOT / root, quiet=2)


def _has_room(folder: Path) -> bool:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return False
    # Such a folder may be larger than what is left of the memory that it takes its files from.
    return min(shutil.disk_usage(folder).free, psutil.virtual_memory().available) >= MEMORY_FREE_MIN


def pytest_unconfigure() -> None:
    """Stop the server of PostgreSQL."""
    postgres.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process if a test does not end, with the stacks of all threads; its tests are then said to have failed.

    The time limit of a test is an exception: it does not end what catches it, nor a test that waits without Python.
    """
    _end_if_hung(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Limit the time of what remains of a failed test: all other limits are taken away, for a debugger."""
    if isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
        _end_if_hung(node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test what the server of PostgreSQL wrote last: a test may see only its end."""
    report = yield
    if report.failed and (lines := postgres.last_words()):
        report.sections.append(("The server of PostgreSQL", "\n".join(lines)))
    return report


def _end_if_hung(item: pytest.Item) -> None:
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0]) if marker is not None else float(item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + HUNG_S, exit=True, file=item.config.stash[STDERR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while all is imported: nothing of it goes away, and to walk it takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each worker begin with other folders: it finds the rest as the others have compiled it."""
    report = yield
    if collector.path == ROOT / "tests" and report.result:
        number, workers = _worker(collector.config)
        first = len(report.result) * number // workers
        report.result[:] = report.result[first:] + report.result[:first]
    return report


def _worker(config: pytest.Config) -> tuple[int, int]:
    """The number of this worker of pytest-xdist, from 0, and how many there are."""
    given: dict[str, Any] = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    return int(given["workerid"].removeprefix("gw")) % given["workercount"], given["workercount"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Put the tests in an order that is the same for all workers, and ends with short ones."""
    workers = _worker(config)[1]
    if workers > 1:
        items.sort(key=lambda item: item.path)
    for item in items:
        if _needs_whole_processes(item):
            item.add_marker(pytest.mark.campaign)
    folders = {item.path.relative_to(ROOT / "tests").parts[0] for item in items if item.get_closest_marker("campaign")}
    if strays := folders.difference(_proving()):
        raise pytest.UsageError(f"the Makefile's PROVING lacks folders with campaigns: {', '.join(sorted(strays))}")
    yield
    if workers > 1:
        items[:] = _slow_ones_first(items, workers)


def _proving() -> list[str]:
    """Return the folders in which `make proof` looks for its tests: to collect all others takes each worker longer."""
    makefile = (ROOT / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if line.startswith("PROVING := ")]
    return line.removeprefix("PROVING := ").split()


def _needs_whole_processes(item: pytest.Item) -> bool:
    """Whether a test is about whole pairs of processes, a whole broker or browser. They take half of all the time."""
    if item.path.is_relative_to(SLOW_TESTS):
        return item.path.name not in FIRST_STEPS or _database_of(item) == "postgresql"
    return "conformance" in item.path.name or item.path.is_relative_to(BROWSER_TESTS)


def _database_of(item: pytest.Item) -> str | None:
    """The kind of database that a test is run on, if it is run on both."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return next((kind for kind in params.values() if kind in ("sqlite", "postgresql")), None)


def _slow_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests so that the part of each worker begins with its share of those that start processes and wait.

    pytest-xdist gives each worker one part of the list. At the end of a run no worker then waits for a long test of
    another. Neighbours stay neighbours: they share servers.
    """
    slow = [item for item in items if item.path.is_relative_to(SLOW_TESTS)]
    quick = [item for item in items if not item.path.is_relative_to(SLOW_TESTS)]
    ordered: list[pytest.Item] = []
    for left in range(workers, 0, -1):
        size = (len(slow) + len(quick)) // left
        some = min(len(slow) // left, size)
        ordered += slow[:some] + quick[: size - some]
        slow, quick = slow[some:], quick[size - some :]
    return ordered


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
        url = postgres.url_for_tests()
        connection = psycopg.connect(url, autocommit=True, connect_timeout=POSTGRES_CONNECT_TIMEOUT_S)
    except (psycopg.OperationalError, postgres.NoServer) as error:
        message = f"no PostgreSQL server answers: {error}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with connection:
        yield connection


class MakePostgresUrl(Protocol):
    """Makes a database, empty or a copy of another one, and returns its URL; it is dropped when the session ends."""

    def __call__(self, *, copy_of: str = "") -> str: ...


@pytest.fixture(scope="session")
def make_postgres_url(postgres_admin: psycopg.Connection[Any]) -> Iterator[MakePostgresUrl]:
    """See `MakePostgresUrl`. Nobody may be connected to the database that is copied."""
    made: list[str] = []
    numbers = count(1)

    def make(*, copy_of: str = "") -> str:
        name = f"headgate_test_{os.getpid()}_{next(numbers)}"
        template = sql.Identifier(make_url(copy_of).database or "") if copy_of else sql.Identifier("template1")
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), template)
        deadline = time.monotonic() + WITHIN_S
        while True:
            try:
                postgres_admin.execute(statement)
                break
            except psycopg.errors.ObjectInUse:  # the server notices later that a connection to it was closed
                if time.monotonic() > deadline:
                    raise
        made.append(name)
        return make_url(postgres.url_for_tests()).set(database=name).render_as_string(hide_password=False)

    yield make
    for name in made:
        postgres_admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def make_migrated_postgres_url(make_postgres_url: MakePostgresUrl) -> Callable[[], str]:
    """Makes a database with tables and without rows, as a copy: to migrate one takes half a second of CPU."""
    template = make_postgres_url()
    opened = engine.open_engine(template)
    schema.upgrade(opened)
    opened.dispose()
    return lambda: make_postgres_url(copy_of=template)


@pytest.fixture(scope="session")
def migrated_postgres_url(make_migrated_postgres_url: Callable[[], str]) -> Iterator[str]:
    """The database that most tests share, one after the other."""
    url = make_migrated_postgres_url()
    yield url
    close_engine(url)


@pytest.fixture(scope="session")
def empty_tables(migrated_postgres_url: str) -> Iterator[Callable[[], None]]:
    """Deletes all rows of that database: some rows are deleted much faster than tables are truncated."""
    deletes = "; ".join(f'DELETE FROM "{table.name}"' for table in reversed(metadata.sorted_tables))
    # A function of the session keeps its plans.
    function = f"CREATE FUNCTION pg_temp.empty_tables() RETURNS void LANGUAGE plpgsql AS 'BEGIN {deletes}; END'"
    connection: psycopg.Connection[Any] | None = None

    def empty() -> None:
        nonlocal connection
        if connection is None:
            connection = psycopg.connect(migrated_postgres_url, autocommit=True)
            connection.execute(function)
            # Without the triggers of foreign keys: their plans, made for empty tables, read all deleted rows of a table
            # for each row. Whatever is deleted here is deleted with all that refers to it.
            connection.execute("SET session_replication_role = replica")
        connection.execute("SELECT pg_temp.empty_tables()")

    def empty_again() -> None:
        nonlocal connection
        try:
            empty()
        except psycopg.OperationalError:  # a test has ended all connections
            connection = None
            empty()

    yield empty_again
    if connection is not None:
        connection.close()


@pytest.fixture
def postgres_url(migrated_postgres_url: str, empty_tables: Callable[[], None]) -> str:
    """A PostgreSQL database with tables and without rows."""
    empty_tables()
    return migrated_postgres_url


# --- SQLite --------------------------------------------------------------------------------------


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite database with tables and without rows."""
    path = tmp_path / "headgate.db"
    path.write_bytes(migrated_sqlite())
    return f"sqlite:///{path}"


@pytest.fixture
def patient_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers wait for SQLite's lock as long as it takes: it is given in no order, so one of many may starve."""
    monkeypatch.setattr(engine, "SQLITE_BUSY_TIMEOUT_S", WITHIN_S)


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


@pytest.fixture(params=["sqlite", "postgresql"])
def own_database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a database with tables and without rows that no other test uses, on both databases."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    return str(request.getfixturevalue("make_migrated_postgres_url")())


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
def query(database_url: str) -> Iterator[Query]:
    """Runs SQL on the database of the test, in a transaction of its own; returns the rows as dicts."""
    opened = open_engine(database_url)
    kept = opened.connect() if opened.dialect.name == "postgresql" else None  # to connect takes longer than to ask

    def run(statement: str, **parameters: Any) -> list[dict[str, Any]]:
        if kept is None:
            with opened.begin() as connection:
                return _rows(connection, statement, parameters)
        try:
            with kept.begin():
                return _rows(kept, statement, parameters)
        except OperationalError as error:
            if not error.connection_invalidated:  # the test has ended all connections
                raise
        with kept.begin():
            return _rows(kept, statement, parameters)

    yield run
    if kept is not None:
        kept.close()


def _rows(connection: Connection, statement: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    result = connection.execute(text(statement), parameters)
    return [dict(row._mapping) for row in result] if result.returns_rows else []


@pytest.fixture
def few_files() -> Iterator[int]:
    """How many files processes that a test starts may have open: so few that a step can leave most of them open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))
    yield FEW_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
