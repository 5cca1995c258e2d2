"""The migration that makes `task_instance` anew on SQLite: it keeps every row, and a death in it changes nothing."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text
from tests.store.harness import migrated_sqlite

from headgate.store.db import schema
from headgate.store.db.engine import open_engine
from headgate.store.errors import DatabaseFault

BEFORE = str(ScriptDirectory(str(Path(schema.__file__).with_name("migrations"))).get_revision("0013").down_revision)
RUNS = 40
TASKS = 50  # a run
DEFERRED = 7  # each seventh task is deferred, and waits for a trigger of its own
COPIED = ("task_instance", "xcom")
OLD_COLUMNS: dict[str, list[str]] = {}  # of these, before the migration; `fill` has seen them
DELETED = 3  # of the rows with the highest ids

# ``n`` counts to ``:rows`` on both databases.
COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows) "
NOW = "'2026-01-01 00:00:00.000000'"
FILL = (
    f"INSERT INTO dag (name, file, spec, max_active_runs, is_paused, created_date, parsed_at) "
    f"VALUES ('etl', 'etl.py', :nothing, 1, false, {NOW}, {NOW})",
    f"{COUNT}INSERT INTO dag_run (dag_id, run_id, run_type, state, created_date) "
    f"SELECT dag.id, 'r' || i, 'manual', 'running', {NOW} FROM n, dag WHERE i <= {RUNS}",
    f"{COUNT}INSERT INTO trigger (classpath, kwargs, created_date) SELECT 'a.B', 'x', {NOW} FROM n",
    f"{COUNT}INSERT INTO task_instance (dag_run_id, task_id, state, token, trigger_id, next_method, tries_max, "
    f"retries, retry_delay_s, retry_exponential_backoff, priority_weight, pool_slots, created_date, last_error) "
    f"SELECT i % {RUNS} + 1, 't' || (i / {RUNS}), CASE WHEN i % {DEFERRED} = 0 THEN 'deferred' ELSE 'scheduled' END, "
    f"CASE WHEN i % {DEFERRED} = 0 THEN 'token' || i END, CASE WHEN i % {DEFERRED} = 0 THEN i END, 'resume', "
    f"3, 2, 0.5, false, i % 5, 1, {NOW}, 'line' FROM n",
    f"{COUNT}INSERT INTO xcom (task_instance_id, key, value, stored_at) SELECT i, 'k', :nothing, {NOW} FROM n "
    f"WHERE i <= :rows - {DELETED}",
    f"DELETE FROM task_instance WHERE id > :rows - {DELETED}",
)


def fill(engine: Engine) -> None:
    """Bring a database without rows to the version before, with runs, tasks that wait, and XComs."""
    schema.downgrade(engine, BEFORE)
    with engine.begin() as connection:
        for table in COPIED:
            OLD_COLUMNS[table] = sorted(column["name"] for column in inspect(connection).get_columns(table))
        for statement in FILL:
            given = {"rows": RUNS * TASKS, "nothing": b""}
            connection.execute(text(statement), {name: given[name] for name in given if f":{name}" in statement})


def rows_of(engine: Engine) -> dict[str, list[Any]]:
    """Return all rows of the tables that the migration concerns, without the columns that came with it and later."""
    found = {}
    with engine.connect() as connection:
        for table, columns in OLD_COLUMNS.items():
            listed = connection.execute(text(f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1, 2, 3, 4"))
            found[table] = [tuple(row) for row in listed]
    return found


def add_task(engine: Engine, *, run: int, task_id: str, map_index: int = -1) -> int:
    """Insert a task and return its id."""
    columns = "dag_run_id, task_id, map_index, tries_max, retries, retry_delay_s, retry_exponential_backoff"
    with engine.begin() as connection:
        return int(
            connection.execute(
                text(
                    f"INSERT INTO task_instance ({columns}, priority_weight, pool_slots, created_date) "
                    f"VALUES (:run, :task_id, :map_index, 1, 0, 0, false, 1, 1, {NOW}) RETURNING id"
                ),
                {"run": run, "task_id": task_id, "map_index": map_index},
            ).scalar_one()
        )


@pytest.fixture(params=["sqlite", "postgresql"])
def filled(request: pytest.FixtureRequest) -> Engine:
    """A database of the version before, on both databases."""
    if request.param == "sqlite":
        return open_engine(f"sqlite:///{request.getfixturevalue('file')}")
    template = request.getfixturevalue("filled_postgres_url")
    return open_engine(request.getfixturevalue("make_postgres_url")(copy_of=template))


@pytest.fixture(scope="module")
def filled_postgres_url(make_migrated_postgres_url: Callable[[], str]) -> str:
    """A database of PostgreSQL of the version before, to be copied."""
    url = make_migrated_postgres_url()
    engine = open_engine(url)
    fill(engine)
    engine.dispose()
    return url


@pytest.fixture(scope="module")
def filled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of SQLite of the version before, to be copied."""
    path = tmp_path_factory.mktemp("map_index") / "before.db"
    path.write_bytes(migrated_sqlite())
    engine = open_engine(f"sqlite:///{path}")
    fill(engine)
    engine.dispose()  # the last connection leaves all in the one file
    return path


@pytest.fixture
def file(filled_file: Path, tmp_path: Path) -> Path:
    path = tmp_path / "headgate.db"
    shutil.copy(filled_file, path)
    return path


# --- what it keeps -------------------------------------------------------------------------------


def test_every_row_is_kept_on_the_way_up_and_down(filled: Engine) -> None:
    before = rows_of(filled)
    assert len(before["task_instance"]) == len(before["xcom"]) == RUNS * TASKS - DELETED
    schema.upgrade(filled)
    assert rows_of(filled) == before
    with filled.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM task_instance WHERE map_index = -1")) == len(before["xcom"])
    schema.downgrade(filled, BEFORE)
    assert rows_of(filled) == before


def test_no_id_is_given_a_second_time(filled: Engine) -> None:
    schema.upgrade(filled)
    new = add_task(filled, run=1, task_id="new")
    assert new > RUNS * TASKS, "the last ids were those of rows that are deleted"
    with filled.begin() as connection:
        connection.execute(text("DELETE FROM task_instance WHERE id = :id"), {"id": new})
    schema.downgrade(filled, BEFORE)
    schema.upgrade(filled)
    assert add_task(filled, run=1, task_id="new") > new


def test_a_task_has_one_instance_of_each_index_and_those_are_lost_on_the_way_down(filled: Engine) -> None:
    schema.upgrade(filled)
    before = rows_of(filled)
    for map_index in (0, 1):
        add_task(filled, run=1, task_id="t5", map_index=map_index)
    for refused in (-1, 0, -2):
        with pytest.raises(Exception, match=r"(?i)unique|check"):
            add_task(filled, run=1, task_id="t5", map_index=refused)
    schema.downgrade(filled, BEFORE)
    assert rows_of(filled) == before


# --- SQLite: the table is made anew --------------------------------------------------------------


def test_a_row_that_refers_to_nothing_stops_it_and_nothing_is_changed(file: Path) -> None:
    engine = open_engine(f"sqlite:///{file}")
    with sqlite3.connect(file) as connection:  # without foreign keys
        connection.execute("INSERT INTO xcom (task_instance_id, key, value, stored_at) VALUES (99999, 'k', x'', '')")
    before = rows_of(engine)
    with pytest.raises(DatabaseFault, match=r"of the table xcom refers to a row of task_instance that does not exist"):
        schema.upgrade(engine)
    assert schema.current_revision(engine) == BEFORE
    assert rows_of(engine) == before


def test_foreign_keys_hold_again_after_it_also_in_memory() -> None:
    engine = open_engine("sqlite://")
    schema.upgrade(engine)
    with pytest.raises(Exception, match="FOREIGN KEY"):
        add_task(engine, run=1, task_id="a")


# The statements before which it is killed, and the work of SQLite into the one that copies, counted in its own steps.
MARKS = (
    *("CREATE TABLE task_instance_copy", "INSERT INTO task_instance_copy", "DELETE FROM sqlite_sequence"),
    *("DROP TABLE task_instance", "ALTER TABLE task_instance_copy", "CREATE UNIQUE INDEX uq_task_instance_trigger"),
    *("CREATE INDEX ix_task_instance_scheduled", "UPDATE alembic_version", "PRAGMA foreign_key_check", "COMMIT"),
)
STEPS = 20_000

# All that an upgrade needs is imported once; each of these forks upgrades, and is killed.
KILLED = """
import os, signal, sys
import alembic.command
from sqlalchemy import event
from headgate.store.db import schema
from headgate.store.db.engine import open_engine

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def upgrade(url, mark, steps):
    engine = open_engine(url)
    @event.listens_for(engine, "connect")
    def connected(connection, record):
        connection.execute("PRAGMA cache_size = 8")  # pages: the rest is written to the log before the commit
        def before(statement):
            if statement.lstrip().startswith(mark):
                connection.set_progress_handler(die, steps) if steps else die()
        connection.set_trace_callback(before)
    schema.upgrade(engine)

for line in sys.stdin:
    url, mark, steps = line.rstrip("\\n").split("\\t")
    fork = os.fork()
    if not fork:
        upgrade(url, mark, int(steps))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def upgrade_and_kill() -> Iterator[Callable[..., None]]:
    """Upgrades a file in a process that is killed before a statement, or so many steps of SQLite into it."""
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        given, told = process.stdin, process.stdout
        assert given is not None
        assert told is not None

        def upgrade(file: Path, mark: str, steps: int = 0) -> None:
            print(f"sqlite:///{file}", mark, steps, sep="\t", file=given, flush=True)
            ended = int(told.readline())
            assert ended == -signal.SIGKILL, f"it never came to {mark!r}, but ended with {ended}"

        yield upgrade


@pytest.mark.parametrize(("mark", "steps"), [*((mark, 0) for mark in MARKS), ("INSERT INTO task_instance_copy", STEPS)])
def test_a_kill_in_the_middle_leaves_the_tables_of_before_and_the_next_start_migrates(
    upgrade_and_kill: Callable[..., None], file: Path, mark: str, steps: int
) -> None:
    engine = open_engine(f"sqlite:///{file}")
    before = rows_of(engine)
    upgrade_and_kill(file, mark, steps)
    if steps:
        assert file.with_name(f"{file.name}-wal").stat().st_size > 0, "it had begun to write"
    assert schema.current_revision(engine) == BEFORE
    assert rows_of(engine) == before
    assert schema.upgrade(engine) == schema.head_revision()
    assert rows_of(engine) == before
    with engine.connect() as connection:
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
        assert "task_instance_copy" not in inspect(connection).get_table_names()
