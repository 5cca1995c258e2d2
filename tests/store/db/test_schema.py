"""The schema: migrations and tables agree, and a database of another version is not worked on."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

from headgate.store.db import schema
from headgate.store.db.engine import open_engine
from headgate.store.errors import SchemaOutOfDate, UnsupportedDatabase
from headgate.store.tables import metadata

POSTGRES_DEFINITIONS = """
SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL
SELECT 'constraint', conname, conrelid::regclass || ' ' || pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace
UNION ALL
SELECT 'column', table_name || '.' || column_name,
       concat_ws(' ', data_type, is_nullable, column_default) FROM information_schema.columns
WHERE table_schema = 'public'
"""
SQLITE_DEFINITIONS = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"


def definitions(engine: Engine) -> dict[tuple[str, str], Any]:
    """Return what the database itself says its tables, constraints and indexes are."""
    statement = SQLITE_DEFINITIONS if engine.dialect.name == "sqlite" else POSTGRES_DEFINITIONS
    with engine.connect() as connection:
        rows = connection.execute(text(statement)).all()
    found = {
        (kind, name): definition for kind, name, definition in rows if "alembic_version" not in f"{name}{definition}"
    }
    if engine.dialect.name == "sqlite":
        # The order of columns and constraints in a CREATE TABLE means nothing, nor do quotes around these names; and
        # a column that was added later stands in the line of the one before, or right before the bracket at the end.
        comma = re.compile(r",\s*\n|\s?, (?=\w+ (?:BOOLEAN|TEXT|BIGINT|INTEGER|BLOB|DOUBLE))")
        bracket = re.compile(r"(\n|(?<=NULL)|(?<=TEXT))\)$")
        parts = {key: comma.split(bracket.sub("", sql.strip())) for key, sql in found.items()}
        return {key: sorted(" ".join(part.replace('"', "").split()) for part in value) for key, value in parts.items()}
    return found


# On SQLite alembic cannot compare an index of expressions; the test after this one does.
@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index")
@pytest.mark.filterwarnings("ignore:autogenerate skipping metadata-specified expression-based index")
def test_the_migrated_schema_is_the_metadata(empty_database_url: str) -> None:
    engine = open_engine(empty_database_url)
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_migrations_and_metadata_give_the_same_checks_and_partial_indexes(own_database_url: str) -> None:
    engine = open_engine(own_database_url)
    migrated = definitions(engine)
    schema.downgrade(engine, "base")
    metadata.create_all(engine)
    created = definitions(engine)
    assert len(migrated) >= len(metadata.tables) + 6  # and the six indexes that stand beside their tables
    assert migrated == created


def test_going_down_and_up_again_gives_the_same_schema(own_database_url: str) -> None:
    engine = open_engine(own_database_url)
    first = definitions(engine)
    schema.downgrade(engine, "base")
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    assert schema.current_revision(engine) is None
    schema.upgrade(engine)
    assert definitions(engine) == first


def test_an_upgraded_database_is_current(empty_database_url: str) -> None:
    engine = open_engine(empty_database_url)
    assert schema.current_revision(engine) is None
    assert schema.upgrade(engine) == schema.head_revision()
    assert schema.current_revision(engine) == schema.head_revision()
    schema.require_current(engine)
    assert schema.upgrade(engine) == schema.head_revision()


def test_the_revision_that_is_asked_for_is_the_newest_there_is() -> None:
    scripts = ScriptDirectory(str(Path(schema.__file__).with_name("migrations")))
    assert scripts.get_heads() == [schema.HEAD_REVISION]


def test_a_database_without_tables_is_refused_with_the_command_to_run(empty_database_url: str) -> None:
    with pytest.raises(SchemaOutOfDate, match="run `headgate db upgrade`"):
        schema.require_current(open_engine(empty_database_url))


def test_a_database_newer_than_the_code_is_refused_by_every_command(own_database_url: str) -> None:
    engine = open_engine(own_database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaOutOfDate, match=r"newer than this headgate.*9999.*upgrade headgate"):
        schema.require_current(engine)
    with pytest.raises(SchemaOutOfDate, match="newer than this headgate"):
        schema.upgrade(engine)


def test_a_database_of_another_program_that_uses_alembic_is_refused_as_such(empty_database_url: str) -> None:
    engine = open_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('ae1027a6acf')"))
    for verb in (schema.require_current, schema.upgrade):
        with pytest.raises(UnsupportedDatabase, match=r"another program.*ae1027a6acf: give headgate a database"):
            verb(engine)


def test_an_upgrade_of_what_is_up_to_date_waits_for_nobody(own_database_url: str) -> None:
    engine, others = open_engine(own_database_url), open_engine(own_database_url)
    with others.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": schema.MIGRATION_LOCK})
        else:  # a supervisor that stands still in a transaction
            connection.execute(text("UPDATE alembic_version SET version_num = version_num"))
        assert schema.upgrade(engine) == schema.head_revision()


def test_an_upgrade_that_fails_leaves_nothing_behind(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(empty_database_url)

    def upgrade_and_fail(config: Any, revision: str) -> None:
        migrate(config, revision)
        raise OverflowError("the process dies here")

    migrate = command.upgrade
    monkeypatch.setattr(command, "upgrade", upgrade_and_fail)
    with pytest.raises(Exception, match="dies here"):
        schema.upgrade(engine)
    assert inspect(engine).get_table_names() == []


def test_an_upgrade_may_take_long_and_another_waits_for_it(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[str] = []

    def upgrade(config: Any, revision: str) -> None:
        connection = config.attributes["connection"]
        is_server = connection.dialect.name == "postgresql"
        wanted = "SHOW statement_timeout" if is_server else "PRAGMA busy_timeout"
        limits.append(str(connection.scalar(text(wanted))))
        migrate(config, revision)

    migrate = command.upgrade
    monkeypatch.setattr(command, "upgrade", upgrade)
    schema.upgrade(engine := open_engine(empty_database_url))
    assert limits == ["0" if engine.dialect.name == "postgresql" else str(schema.MIGRATION_WAIT_S * 1000)]


def test_upgrades_at_the_same_time_all_succeed(empty_database_url: str) -> None:
    processes = 4
    start = Barrier(processes)

    def upgrade() -> str:
        engine = open_engine(empty_database_url)
        start.wait()
        return schema.upgrade(engine)

    with ThreadPoolExecutor(processes) as pool:
        revisions = [future.result() for future in [pool.submit(upgrade) for _ in range(processes)]]
    assert revisions == [schema.head_revision()] * processes
    schema.require_current(open_engine(empty_database_url))


def test_letters_of_older_tables_have_a_state_and_go_back_as_one_a_message(own_database_url: str) -> None:
    engine = open_engine(own_database_url)
    schema.downgrade(engine, "0005")
    insert = (
        "INSERT INTO dead_letter (trigger_id, trigger_run_id, sequence_index, key, position, payload, payload_head, "
        "payload_bytes, payload_kept, reason, stored_at) "
        "VALUES (1, :run, 0, :key, 0, :payload, :head, 1, :kept, 'too big', '2026-01-01 00:00:00.000000')"
    )
    whole = {"run": "a", "key": "whole", "payload": b"1", "head": b"1", "kept": True}
    head = {"run": "b", "key": "head", "payload": None, "head": b"1", "kept": False}
    with engine.begin() as connection:
        connection.execute(text(insert), [whole, head])
    schema.upgrade(engine)
    states = text("SELECT key, trigger_run_id, state FROM dead_letter ORDER BY id")
    with engine.begin() as connection:
        assert [tuple(row) for row in connection.execute(states)] == [
            ("whole", "a", "open"),
            ("head", "b", "at_broker"),
        ]
        # It is resolved, and refused again: the older tables have room for one letter of a message.
        connection.execute(
            text("UPDATE dead_letter SET state = 'discarded', resolved_at = stored_at WHERE key = 'whole'")
        )
        connection.execute(text(insert), [whole | {"run": "c"}])
    schema.downgrade(engine, "0005")
    with engine.begin() as connection:
        left = connection.execute(text("SELECT key, trigger_run_id FROM dead_letter ORDER BY id"))
        assert [tuple(row) for row in left] == [("head", "b"), ("whole", "c")]
