"""The schema's version: upgrades a database, and refuses one that is out of date.

The migrations are in ``headgate/store/db/migrations`` and are run by alembic, without an ``alembic.ini``. Alembic is
only imported if there is something to migrate, because the import would take a fifth of the time that a supervisor
needs to start. If the database is up to date, one row is read.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text

from headgate.store.db import driver_errors
from headgate.store.db.engine import READS_ONLY, database_name
from headgate.store.db.prepared import driver_of
from headgate.store.errors import DatabaseFault, SchemaOutOfDate, UnsupportedDatabase

if TYPE_CHECKING:
    from alembic.config import Config

HEAD_REVISION = "0041"  # the newest in the folder of migrations, as a test checks
MIGRATION_LOCK = 0x68656164  # "head": the advisory lock of PostgreSQL that all migrations of headgate take
MIGRATION_WAIT_S = 60  # for another process's migration

_MIGRATIONS = Path(__file__).with_name("migrations")


def upgrade(engine: Engine) -> str:
    """Bring the database to the newest revision, in one transaction; return that revision.

    If it is cut short, by whatever, the database is as it was before, and the next call begins anew. Any number of
    processes may call it at once: one upgrades, the others find it done. If the database is up to date, it takes no
    lock, so it does not wait, for example, for a stopped supervisor that holds SQLite's lock. Raises `DatabaseAway`,
    `DatabaseFault`, `SchemaOutOfDate` if the database is newer than this headgate, and `UnsupportedDatabase` if another
    program has its tables there.
    """
    if current_revision(engine) == head_revision():
        return head_revision()
    from alembic import command

    with _migrating(engine) as connection:
        _refuse_newer(engine, _revision(connection))
        command.upgrade(_config(connection), "head")
    return head_revision()


def downgrade(engine: Engine, revision: str) -> None:
    """Downgrade the database to ``revision`` (``base``: no tables). Data with no place in the older tables is lost."""
    from alembic import command

    with _migrating(engine) as connection:
        command.downgrade(_config(connection), revision)


def current_revision(engine: Engine) -> str | None:
    """Return the revision of the database; None if headgate has not created its tables in it."""
    with translated(engine), engine.connect().execution_options(**{READS_ONLY: True}) as connection:
        return _revision(connection)


def head_revision() -> str:
    """Return the newest revision this headgate knows."""
    return HEAD_REVISION


def require_current(engine: Engine) -> None:
    """Raise `SchemaOutOfDate` unless the database has the tables of this headgate; the message says what to do."""
    current = current_revision(engine)
    if current == head_revision():
        return
    if current is None:
        raise SchemaOutOfDate(f"the database {database_name(engine)} has no tables yet: run `headgate db upgrade`")
    _refuse_newer(engine, current)
    raise SchemaOutOfDate(
        f"the database {database_name(engine)} has the tables of an older headgate "
        f"(revision {current}, needed {head_revision()}): run `headgate db upgrade`"
    )


def _refuse_newer(engine: Engine, current: str | None) -> None:
    if current is not None and current not in _known():
        raise SchemaOutOfDate(
            f"the database {database_name(engine)} is newer than this headgate (its revision {current} is unknown "
            f"here, the newest known is {head_revision()}): upgrade headgate"
        )


def _revision(connection: Connection) -> str | None:
    # The table of Alembic, which other programs use as well.
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    if revision not in (None, HEAD_REVISION) and not inspect(connection).has_table("triggerer"):
        raise UnsupportedDatabase(
            f"the database {database_name(connection.engine)} belongs to another program, whose table alembic_version "
            f"says {revision}: give headgate a database, or a schema, of its own"
        )
    return revision


def _known() -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(_MIGRATIONS)).walk_revisions()}


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config()
    # A percent sign in the path would be read as an interpolation.
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _migrating(engine: Engine) -> Generator[Connection]:
    """Run the transaction of a migration. On SQLite it may rebuild tables that others refer to.

    There a dropped table would take along the rows that refer to it, although another takes its name afterwards. So
    foreign keys are off, which SQLite allows only outside of transactions, and all are checked before the commit.
    """
    if engine.dialect.name != "sqlite":
        with exclusively(engine) as connection:
            connection.execute(text("SET LOCAL statement_timeout = 0"))  # an index of a big table takes what it takes
            yield connection
        return
    with translated(engine), engine.connect() as connection:
        driver_of(connection).execute(f"PRAGMA busy_timeout = {MIGRATION_WAIT_S * 1000}")
        driver_of(connection).execute("PRAGMA foreign_keys = OFF")
        try:
            with connection.begin():
                yield connection
                _check_foreign_keys(engine, connection)
        finally:
            driver_of(connection).execute("PRAGMA foreign_keys = ON")  # a database in memory keeps its connection


def _check_foreign_keys(engine: Engine, connection: Connection) -> None:
    broken = connection.execute(text("PRAGMA foreign_key_check")).first()
    if broken is not None:
        table, row, parent, _ = broken
        raise DatabaseFault(
            database_name(engine),
            f"row {row} of the table {table} refers to a row of {parent} that does not exist, so its tables are left "
            "as they were: restore a backup, or delete the row and upgrade again",
        )


@contextmanager
def exclusively(engine: Engine) -> Generator[Connection]:
    """Run one transaction that excludes migrations and changes of the keys. On SQLite its write lock does that."""
    with translated(engine), engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SET LOCAL lock_timeout = '{MIGRATION_WAIT_S}s'"))
            connection.execute(text(f"SET LOCAL statement_timeout = '{MIGRATION_WAIT_S}s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        yield connection


@contextmanager
def translated(engine: Engine) -> Generator[None]:
    """Raise the drivers' errors as those of `headgate.store.errors`."""
    try:
        yield
    except driver_errors.translated() as error:
        raise driver_errors.translate(error, database=database_name(engine)) from error
