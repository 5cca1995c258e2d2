"""Hearing of what others wrote: on SQLite by its count of their commits, on PostgreSQL by notifications."""

from __future__ import annotations

import contextlib
import os
import select
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.db.test_engine import terminate_backends
from tests.store.harness import add, register

from headgate.store.db.engine import open_engine
from headgate.store.db.schema import upgrade
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store

ARRIVES_WITHIN_S = 10.0  # a notification that takes longer than this does not come


def hears(store: Store) -> bool:
    """Whether the store has news now; on PostgreSQL, as soon as the server has said what it has to say."""
    deadline = time.monotonic() + ARRIVES_WITHIN_S
    while not store.has_changes():
        assert store.database._connection is not None
        driver = store.database._connection.connection.driver_connection
        if driver is None or isinstance(driver, sqlite3.Connection):
            return False
        if not select.select([driver.fileno()], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
    return True


@pytest.fixture
def store(database_url: str, secrets: Secrets) -> Store:
    """A store that has heard what there was."""
    made = Store(open_engine(database_url), secrets=secrets)
    assert made.has_changes(), "the first answer is yes: nobody knows what was there before"
    assert not made.has_changes()
    return made


@pytest.fixture
def other(database_url: str, secrets: Secrets) -> Store:
    """Somebody else's store on the same database."""
    return Store(open_engine(database_url), secrets=secrets)


def removes(other: Store) -> None:
    other.remove_watcher("known")


def adds(other: Store) -> None:
    other.add_watcher("new", "a.B", {})


def gives_up(other: Store) -> None:
    epoch = register(other)
    other.claim_triggers(epoch, limit=1, queues=("default",))
    other.release_triggerer(epoch)


@pytest.mark.parametrize("change", [adds, removes, gives_up])
def test_what_others_change_is_news_once(store: Store, other: Store, change: Callable[[Store], None]) -> None:
    with store, other:
        add(other, "known")
        assert hears(store)
        assert not store.has_changes()
        change(other)
        assert hears(store)
        assert not store.has_changes()


def test_what_one_writes_oneself_is_no_news(store: Store) -> None:
    with store:
        epoch = register(store)
        store.store_slice(epoch)
        store.heartbeat(epoch)
        add(store, "my own")
        store.live_triggerers()
        store.add_watcher("own", "a.B", {})
        store.inspect.watchers()  # by now the server has said what it has to say
        assert not store.has_changes()


def test_a_database_behind_a_link_is_looked_at_where_it_lies(tmp_path: Path, secrets: Secrets) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "headgate.db").symlink_to(tmp_path / "disk" / "headgate.db")
    engine = open_engine(f"sqlite:///{tmp_path}/disk/headgate.db")
    upgrade(engine)
    linked = open_engine(f"sqlite:///{tmp_path}/headgate.db")
    with Store(linked, secrets=secrets) as store, Store(engine, secrets=secrets) as other:
        assert store.has_changes()
        assert not store.has_changes()
        add(other, "new")
        assert store.has_changes()


def test_what_others_wrote_before_one_wrote_oneself_is_still_news(store: Store, other: Store) -> None:
    with store, other:
        epoch = register(store)
        add(other, "new")
        store.store_slice(epoch)
        assert hears(store)


def test_what_others_wrote_right_after_one_wrote_oneself_is_news(sqlite_url: str, secrets: Secrets) -> None:
    """Even where sizes and times of the files are what they were: a log begun anew, within one tick of the clock."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    files = [path, path.with_name(f"{path.name}-wal")]
    with (
        Store(open_engine(sqlite_url), secrets=secrets) as store,
        Store(open_engine(sqlite_url), secrets=secrets) as other,
    ):
        epoch = register(store)
        store.tasks.variables.put("long", b"x" * 20_000)
        with contextlib.closing(sqlite3.connect(path)) as checkpointer:
            checkpointer.execute("PRAGMA wal_checkpoint(RESTART)")
        store.heartbeat(epoch)
        store.has_changes()
        before = [file.stat() for file in files]
        other.tasks.variables.put("short", b"x")
        for file, status in zip(files, before, strict=True):
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            assert file.stat().st_size == status.st_size
        assert store.has_changes()


def test_in_memory_all_that_is_written_is_news(secrets: Secrets) -> None:
    engine = open_engine("sqlite://")
    upgrade(engine)
    one, two = Store(engine, secrets=secrets), Store(engine, secrets=secrets)
    one.has_changes()
    assert not one.has_changes()
    add(two, "new")
    assert one.has_changes()
    assert not one.has_changes()


def test_a_lost_connection_is_away_and_the_next_one_listens_anew(postgres_url: str, secrets: Secrets) -> None:
    store, other = (Store(open_engine(postgres_url), secrets=secrets) for _ in range(2))
    with store, other:
        store.has_changes()
        assert not store.has_changes()
        terminate_backends(postgres_url)
        with pytest.raises(DatabaseAway):
            hears(store)
        assert store.has_changes(), "nobody knows what was missed"
        assert not store.has_changes()
        add(other, "new")
        assert hears(store)


def test_questions_are_one_statement_each(sqlite_url: str, secrets: Secrets) -> None:
    """An idle supervisor asks the same three things for ever. Counted where the driver counts."""
    with Store(open_engine(sqlite_url), secrets=secrets) as store:
        epoch = register(store)
        assert store.database._connection is not None
        driver = store.database._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        said: list[str] = []
        driver.set_trace_callback(said.append)
        store.heartbeat(epoch)
        store.poll(epoch, ("default",))
        store.live_triggerers()
        assert len(said) == 3, said
        store.has_changes()
        assert said[3:] == ["PRAGMA data_version"]  # a look into shared memory
