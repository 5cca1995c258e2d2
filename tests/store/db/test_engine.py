"""The engine and the transactions: durable settings, limits, errors sorted, connections replaced."""

from __future__ import annotations

import errno
import getpass
import os
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import psycopg.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, bindparam, exc, select, text, update
from sqlalchemy.engine import make_url
from tests.store.harness import register
from tests.waiting import WITHIN_S

from headgate.protocol.messages.runner import FiredEvent
from headgate.store.db import driver_errors, engine, schema
from headgate.store.db.engine import open_engine
from headgate.store.db.prepared import Prepared
from headgate.store.db.secrets import Secrets
from headgate.store.db.times import DatabaseNow, UtcDateTime
from headgate.store.errors import (
    DatabaseAway,
    DatabaseFault,
    DatabaseLocked,
    DatabaseReadOnly,
    RowsRefused,
    SchemaOutOfDate,
    UnsupportedDatabase,
)
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tables import triggerer

# --- URLs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["mysql://u:hunter2@host/db", "postgresql+asyncpg://u:hunter2@host/db", "oracle://"])
def test_another_database_is_refused_naming_the_supported_ones(url: str) -> None:
    with pytest.raises(UnsupportedDatabase, match=r"sqlite:///.*postgresql://") as told:
        open_engine(url)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    "url",
    [
        *("hunter2", "postgresql://u:hunter2@h:port/d", "postgresql://u:hunter2@[::1/d", "postgresql://u:hunter2@h:/d"),
        *("postgresql://u:hunter2@h/\udcff", "sqlite:///hunter2\udcff"),
    ],
)
def test_what_is_no_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(UnsupportedDatabase, match="cannot be read") as told:
        open_engine(url)
    assert "hunter2" not in str(told.value)


def test_parameters_that_would_change_a_connection_and_hosts_of_sqlite_are_refused() -> None:
    with pytest.raises(UnsupportedDatabase, match="prepare_threshold is not a parameter"):
        open_engine("postgresql://u@host/db?prepare_threshold=5")
    with pytest.raises(UnsupportedDatabase, match="no parameters"):
        open_engine("sqlite:///x.db?timeout=0")
    with pytest.raises(UnsupportedDatabase, match=r"has no host, so three slashes .* sqlite:///path"):
        open_engine("sqlite://x.db")


def test_an_at_sign_in_a_password_is_refused_and_the_rest_of_it_not_shown_as_a_host() -> None:
    with pytest.raises(UnsupportedDatabase, match="more than one @: write %40") as told:
        open_engine("postgresql://u:pa@hunter2@host/db")
    assert "hunter2" not in str(told.value)


def test_a_server_that_is_not_there_is_away_and_its_password_is_not_shown(secrets: Secrets) -> None:
    store = Store(open_engine("postgresql://u:hunter2@127.0.0.1:1/db?sslpassword=hunter3"), secrets=secrets)
    with pytest.raises(DatabaseAway, match=r"127\.0\.0\.1:1/db") as told:
        store.live_triggerers()
    assert "hunter" not in str(told.value)


@pytest.mark.parametrize(
    ("names", "missing"), [({"database": "nope"}, 'database "nope"'), ({"username": "nobody_x"}, 'role "nobody_x"')]
)
def test_a_database_or_a_role_that_does_not_exist_is_wrong_and_not_away(
    postgres_url: str, secrets: Secrets, names: dict[str, Any], missing: str
) -> None:
    url = make_url(postgres_url).set(**names).render_as_string(hide_password=False)
    with pytest.raises(DatabaseFault, match=f"cannot be used: {missing} does not exist$"):
        Store(open_engine(url), secrets=secrets).live_triggerers()


@pytest.mark.parametrize("is_file_there", [False, True])
def test_a_folder_or_file_that_is_not_writable_is_a_fault_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file_there: bool
) -> None:
    path = tmp_path / "x.db"
    if is_file_there:
        path.touch(mode=0o444)
    tmp_path.chmod(0o500)
    monkeypatch.setattr(os, "access", lambda path, _mode: bool(path.stat().st_mode & 0o200))  # root may do all
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    told = driver_errors.translate(error, database=f"sqlite+pysqlite:///{path}")
    assert isinstance(told, DatabaseFault)
    name, mode = (path, "-r--r--r--") if is_file_there else (tmp_path, "dr-x------")
    assert told.reason == f"{name} is not writable (mode {mode}, owner {getpass.getuser()})"


def test_a_folder_that_is_not_there_is_away(secrets: Secrets, tmp_path: Path) -> None:
    with pytest.raises(DatabaseAway, match=f"unable to open database file: there is no folder {tmp_path}/no$"):
        Store(open_engine(f"sqlite:///{tmp_path}/no/folder.db"), secrets=secrets).live_triggerers()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_folder_that_cannot_even_be_looked_at_is_away(
    secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def stat(path: Path, **options: Any) -> os.stat_result:
        raise OSError(code, os.strerror(code), str(path))

    store = Store(open_engine(f"sqlite:///{tmp_path}/no/h.db"), secrets=secrets)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        with pytest.raises(DatabaseAway, match=f"unable to open database file: {tmp_path}/no: {os.strerror(code)}$"):
            store.live_triggerers()


def test_a_file_that_is_no_database_is_a_fault(secrets: Secrets, tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("a letter to grandmother, long enough to be taken for a header" * 40)
    with pytest.raises(DatabaseFault, match="not a database"):
        Store(open_engine(f"sqlite:///{tmp_path}/x.db"), secrets=secrets).live_triggerers()


def test_a_database_without_tables_is_out_of_date_for_every_verb(empty_database_url: str, secrets: Secrets) -> None:
    with Store(open_engine(empty_database_url), secrets=secrets) as store:
        with pytest.raises(SchemaOutOfDate, match="headgate db upgrade"):
            store.inspect.watchers()
        with pytest.raises(SchemaOutOfDate, match="headgate db upgrade"):
            store.heartbeat(Epoch(1))


# --- settings of connections ---------------------------------------------------------------------


def test_every_sqlite_connection_is_durable(sqlite_url: str) -> None:
    opened = open_engine(sqlite_url)
    for _ in range(2):
        with opened.connect() as connection:
            values = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            }
        assert values == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


@pytest.mark.parametrize(
    ("wanted", "given_instead"),
    [
        ("synchronous = FULL", "synchronous = NORMAL"),
        ("journal_mode = WAL", "journal_mode = DELETE"),
        ("foreign_keys = ON", "foreign_keys = OFF"),
    ],
)
def test_a_sqlite_that_does_not_obey_is_refused(wanted: str, given_instead: str, tmp_path: Path) -> None:
    class Disobedient(sqlite3.Connection):
        def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
            return super().execute(statement.replace(wanted, given_instead), *parameters)

    connection = sqlite3.connect(tmp_path / "x.db", factory=Disobedient)
    with pytest.raises(DatabaseFault):
        engine._set_pragmas(connection, "sqlite:///x.db")
    connection.close()


def test_a_database_in_memory_keeps_its_rows_for_all_stores_of_its_engine(secrets: Secrets) -> None:
    opened = open_engine("sqlite://")
    schema.upgrade(opened)
    first, second = Store(opened, secrets=secrets), Store(opened, secrets=secrets)
    epoch = register(first)
    with pytest.raises(DatabaseFault), first.database.writing() as tx:
        tx.connection.execute(text("no SQL"))
    assert [row.id for row in second.live_triggerers()] == [epoch]
    first.heartbeat(epoch)


def test_every_postgresql_connection_has_limits_and_is_durable(make_postgres_url: Callable[[], str]) -> None:
    url = make_postgres_url()
    with psycopg.connect(url, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
        if connection.info.server_version >= 140000:
            connection.execute(f"ALTER DATABASE {name} SET idle_session_timeout = '1min'")
    with open_engine(url).connect() as connection_:
        idle = connection_.exec_driver_sql("SELECT current_setting('idle_session_timeout', true)").scalar()
        assert idle in ("0", None)  # None: an old server, which does not have it
        values = {
            name: connection_.exec_driver_sql(f"SHOW {name}").scalar()
            for name in (
                "synchronous_commit",
                "lock_timeout",
                "statement_timeout",
                "idle_in_transaction_session_timeout",
                "transaction_isolation",
            )
        }
    assert values == {
        "synchronous_commit": "on",
        "lock_timeout": "5s",
        "statement_timeout": "30s",
        "idle_in_transaction_session_timeout": "10s",
        "transaction_isolation": "read committed",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("datestyle", "German"),
        ("intervalstyle", "sql_standard"),
        ("timezone", "Asia/Kathmandu"),
        ("extra_float_digits", "-15"),
        ("bytea_output", "escape"),
        ("client_encoding", "latin1"),
        ("standard_conforming_strings", "off"),
    ],
)
def test_a_role_cannot_change_how_values_are_read(
    postgres_url: str, postgres_admin: psycopg.Connection[Any], secrets: Secrets, name: str, value: str
) -> None:
    role = f"headgate_role_{os.getpid()}"
    postgres_admin.execute(f"CREATE ROLE {role} SUPERUSER LOGIN")
    try:
        postgres_admin.execute(f"ALTER ROLE {role} SET {name} = '{value}'")
        url = make_url(postgres_url).set(username=role).render_as_string(hide_password=False)
        with Store(open_engine(url), secrets=secrets) as store:
            epoch = register(store, process_started=0.1 + 0.2)
            trigger_id = store.add_watcher("é", "a.B", {"at": datetime(2026, 1, 2, tzinfo=UTC)})
            (lease,) = store.live_triggerers()
            assert (lease.process_started, lease.latest_heartbeat.utcoffset()) == (0.1 + 0.2, timedelta(0))
            (claimed,) = store.claim_triggers(epoch, limit=1, queues=("default",))
            store.store_slice(epoch, events=[FiredEvent(trigger_id, "run", 0, seq=1, payload=b"\\x00\xff'")])
            (event,) = store.inspect.events()
            assert (claimed.name, claimed.error, event.payload) == ("é", "", b"\\x00\xff'")
    finally:
        postgres_admin.execute(f"DROP ROLE {role}")


# --- a database that goes away -------------------------------------------------------------------


def test_a_sqlite_database_locked_by_another_is_away_until_it_is_free(
    sqlite_url: str, secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SQLITE_BUSY_TIMEOUT_S", 0.01)
    with Store(open_engine(sqlite_url), secrets=secrets) as store:
        epoch = register(store)
        other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseAway, match="locked"):
            store.heartbeat(epoch)
        # Whoever only reads does not wait for a writer.
        assert [row.id for row in store.live_triggerers()] == [epoch]
        other.execute("ROLLBACK")
        other.close()
        store.heartbeat(epoch)


OF_STORES = (
    "FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'headgate'"
)


def terminate_backends(url: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    with psycopg.connect(url, autocommit=True) as connection:
        # The server notices a little later that a test before this one has closed its connection.
        while connection.execute(f"SELECT count(*) {OF_STORES}").fetchall() != [(1,)]:
            assert time.monotonic() < deadline, "other stores are connected"
        assert connection.execute(f"SELECT pg_terminate_backend(pid, 5000) {OF_STORES}").fetchall() == [(True,)]


def test_a_dropped_connection_is_away_once_and_then_replaced(postgres_url: str, secrets: Secrets) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        epoch = register(store)
        terminate_backends(postgres_url)
        with pytest.raises(DatabaseAway, match="terminat"):
            store.heartbeat(epoch)
        store.heartbeat(epoch)


def test_a_connection_dropped_within_a_transaction_leaves_nothing_and_is_replaced(
    postgres_url: str, secrets: Secrets
) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        epoch = register(store)

        def write_half() -> None:
            with store.database.writing() as tx:
                tx.connection.execute(text("UPDATE triggerer SET hostname = 'half done'"))
                terminate_backends(postgres_url)

        with pytest.raises(DatabaseAway):
            write_half()
        assert [(row.id, row.hostname) for row in store.live_triggerers()] == [(epoch, "h")]


def test_a_row_held_for_too_long_is_away_and_not_waited_for_for_ever(postgres_url: str, secrets: Secrets) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store, psycopg.connect(postgres_url) as other:
        epoch = register(store)
        with store.database.writing() as tx:
            tx.connection.execute(text("SET lock_timeout = '10ms'"))
        other.execute("SELECT 1 FROM triggerer FOR UPDATE")
        with pytest.raises(DatabaseAway, match="lock timeout") as told:
            store.heartbeat(epoch)
        assert " is away" not in str(told.value)
        assert "longer than 5 s" in str(told.value)
        with psycopg.connect(postgres_url, autocommit=True) as third:  # what it says to ask can be asked
            third.execute(str(told.value).partition("to find it: ")[2])
        other.rollback()
        store.heartbeat(epoch)


def test_a_stopped_supervisors_transaction_is_ended_by_the_server(postgres_url: str, secrets: Secrets) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        register(store)

        def stop_half_way() -> None:
            with store.database.writing() as tx:
                tx.connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '10ms'"))
                tx.connection.execute(text("UPDATE triggerer SET hostname = 'half done'"))
                backend: Any = tx.connection.connection.driver_connection
                # The server speaks first: nothing is asked here, only listened for.
                list(backend.notifies(timeout=WITHIN_S))

        with pytest.raises(DatabaseAway, match="is away"):
            stop_half_way()
        assert [row.hostname for row in store.live_triggerers()] == ["h"]


@pytest.mark.parametrize("rows", [1, 2, 500])
def test_many_rows_written_at_once_leave_the_server_its_limit_of_an_idle_transaction(
    postgres_url: str, secrets: Secrets, rows: int
) -> None:
    rename = Prepared(
        update(triggerer).where(triggerer.c.id == bindparam("of_id")).values(hostname=bindparam("to_hostname"))
    )
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        register(store)

        def stop_half_way() -> None:
            with store.database.writing() as tx:
                tx.connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '10ms'"))
                rename.run_many(
                    tx.connection, [{"of_id": number, "to_hostname": "half done"} for number in range(rows)]
                )
                backend: Any = tx.connection.connection.driver_connection
                list(backend.notifies(timeout=WITHIN_S))

        with pytest.raises(DatabaseAway, match="is away"):
            stop_half_way()


# --- what the drivers' errors mean ---------------------------------------------------------------


def postgresql_codes() -> list[str]:
    # The driver's table is keyed by the names of the errors, too.
    codes = [code for code, kind in psycopg.errors._sqlcodes.items() if kind.sqlstate == code]
    assert len(codes) > 200
    return codes


def test_no_fault_of_postgresql_is_taken_for_a_fault_of_the_rows() -> None:
    refused = {
        code
        for code in postgresql_codes()
        if isinstance(driver_errors.translate(psycopg.errors.lookup(code)(), database="db"), RowsRefused)
    }
    assert {code[:2] for code in refused} == {"22", "23", "54"}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("57P01", DatabaseAway),  # an administrator shuts it down
        ("57P03", DatabaseAway),  # it starts up
        ("57014", DatabaseAway),  # statement timeout
        ("40P01", DatabaseAway),  # deadlock
        ("53100", DatabaseAway),  # disk full
        ("53300", DatabaseAway),  # too many connections
        ("55P03", DatabaseLocked),  # lock timeout
        ("25006", DatabaseReadOnly),  # a standby
        ("25P03", DatabaseAway),  # idle in transaction
        ("08006", DatabaseAway),
        ("28P01", DatabaseAway),
        ("3D000", DatabaseFault),
        ("42P01", SchemaOutOfDate),
        ("42703", SchemaOutOfDate),
        ("42501", DatabaseFault),  # no permission
        ("42601", DatabaseFault),  # a statement of ours is wrong
        ("XX001", DatabaseFault),  # damaged
        ("22003", RowsRefused),
        ("22021", RowsRefused),
        ("23503", RowsRefused),
        ("23514", RowsRefused),
        ("54000", RowsRefused),
    ],
)
def test_postgresql_errors_are_sorted_by_what_to_do(code: str, kind: type[Exception]) -> None:
    assert type(driver_errors.translate(psycopg.errors.lookup(code)("why"), database="db")) is kind


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_BUSY, DatabaseAway),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, DatabaseAway),
        (sqlite3.SQLITE_FULL, DatabaseAway),
        (sqlite3.SQLITE_IOERR_FSYNC, DatabaseAway),
        (sqlite3.SQLITE_READONLY_DBMOVED, DatabaseAway),
        (sqlite3.SQLITE_CANTOPEN, DatabaseAway),
        (sqlite3.SQLITE_CORRUPT, DatabaseFault),
        (sqlite3.SQLITE_NOTADB, DatabaseFault),
        (sqlite3.SQLITE_PERM, DatabaseFault),
        (sqlite3.SQLITE_ERROR, DatabaseFault),
        (sqlite3.SQLITE_MISUSE, DatabaseFault),
        (sqlite3.SQLITE_CONSTRAINT_CHECK, RowsRefused),
        (sqlite3.SQLITE_TOOBIG, RowsRefused),
    ],
)
def test_sqlite_errors_are_sorted_by_what_to_do(code: int, kind: type[Exception]) -> None:
    error = sqlite3.OperationalError("why")
    error.sqlite_errorcode = code
    assert type(driver_errors.translate(error, database="db")) is kind


def test_a_lost_connection_is_away_whatever_the_error_says() -> None:
    error = exc.DBAPIError("SELECT", None, psycopg.errors.SyntaxError("odd"), connection_invalidated=True)
    assert isinstance(driver_errors.translate(error, database="db"), DatabaseAway)


def test_the_details_of_postgresql_which_quote_rows_are_not_repeated(postgres_url: str, secrets: Secrets) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        with pytest.raises(RowsRefused) as told, store.database.writing() as tx:
            tx.connection.execute(text("INSERT INTO asset (name, created_date) VALUES ('hunter2', NULL)"))
    assert "hunter2" not in str(told.value)


# --- times ---------------------------------------------------------------------------------------

moments = st.datetimes(
    min_value=datetime(1000, 1, 1), max_value=datetime(9000, 1, 1), timezones=st.just(timezone(timedelta(hours=5)))
)


@given(st.lists(moments, min_size=2, max_size=2))
def test_times_sort_as_text_on_sqlite_and_come_back_the_same(pair: list[datetime]) -> None:
    dialect = open_engine("sqlite://").dialect
    texts = [UtcDateTime().process_bind_param(moment, dialect) for moment in pair]
    assert (texts[0] < texts[1]) == (pair[0] < pair[1])
    assert (texts[0] == texts[1]) == (pair[0] == pair[1])
    assert [UtcDateTime().process_result_value(value, dialect) for value in texts] == pair


def test_a_time_without_a_zone_is_refused(database_url: str) -> None:
    with open_engine(database_url).connect() as connection, pytest.raises(exc.StatementError, match="no time zone"):
        connection.execute(select(triggerer.c.id).where(triggerer.c.started_at > datetime(2026, 1, 1)))


def database_now(opened: Engine) -> datetime:
    with opened.connect() as connection:
        return connection.execute(select(DatabaseNow())).scalar_one()


def test_the_databases_clock_is_aware_and_in_the_form_of_all_times(database_url: str) -> None:
    opened = open_engine(database_url)
    now = database_now(opened)
    assert now.tzinfo is UTC
    assert abs(now - datetime.now(UTC)) < timedelta(minutes=1)
    if opened.dialect.name == "sqlite":
        with opened.connect() as connection:
            raw = connection.exec_driver_sql("SELECT strftime('%Y-%m-%d %H:%M:%f000', 'now')").scalar_one()
        assert len(raw) == len(UtcDateTime().process_bind_param(now, opened.dialect))


def test_the_clock_runs_on_within_a_transaction(database_url: str) -> None:
    with open_engine(database_url).begin() as connection:
        first = connection.execute(select(DatabaseNow())).scalar_one()
        while connection.execute(select(DatabaseNow())).scalar_one() == first:
            pass
