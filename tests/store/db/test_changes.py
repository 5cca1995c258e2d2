"""Hearing of what others wrote: on SQLite by bells, on PostgreSQL by notifications."""

from __future__ import annotations

import select
import shutil
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from tests.store.db.test_engine import terminate_backends
from tests.store.harness import add, register
from tests.waiting import WITHIN_S

from headgate.store.db import bells, changes
from headgate.store.db.engine import open_engine
from headgate.store.db.schema import upgrade
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store

NEVER_S = 1000.0  # longer than any test


def hears(store: Store) -> bool:
    """Whether the store has news now; on PostgreSQL, as soon as the server has said what it has to say."""
    deadline = time.monotonic() + WITHIN_S
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


def resizes_a_pool(other: Store) -> None:
    other.tasks.set_pool("small", 1)


@pytest.mark.parametrize("change", [adds, removes, gives_up, resizes_a_pool])
def test_what_others_change_is_news_once(store: Store, other: Store, change: Callable[[Store], None]) -> None:
    with store, other:
        add(other, "known")
        assert hears(store)
        assert not store.has_changes()
        change(other)
        assert hears(store)
        assert not store.has_changes()


def test_what_is_rolled_back_is_no_news(store: Store, other: Store) -> None:
    with store, other:
        with suppress(ZeroDivisionError), other.database.writing() as tx:
            tx.notify()
            raise ZeroDivisionError
        assert not store.has_changes()
        with other.database.writing() as tx:
            tx.notify()
            assert not store.has_changes(), "it is not committed yet"
        assert hears(store)


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


# --- the doorbell ---------------------------------------------------------------------------------


def rings(descriptor: int, within_s: float = 0.0) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])


def test_a_descriptor_says_when_there_is_news(database_url: str, secrets: Secrets, other: Store) -> None:
    with Store(open_engine(database_url), secrets=secrets) as store, other:
        bell = store.database.doorbell()
        assert not rings(bell)
        store.has_changes()
        assert store.no_bell() is None
        store.has_changes()
        assert not rings(bell)
        add(store, "my own")
        assert not store.has_changes()
        add(other, "new")
        assert rings(bell, WITHIN_S)
        assert rings(bell), "until it is asked"
        assert store.has_changes()
        assert not rings(bell)
        store.database._drop_connection()
        add(other, "while it is away")
        assert not rings(bell)
        assert store.has_changes()
        add(other, "later")
        assert rings(bell, WITHIN_S), "the same descriptor, over another connection"


def test_a_connection_that_is_lost_rings_too(postgres_url: str, secrets: Secrets) -> None:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        bell = store.database.doorbell()
        store.has_changes()
        store.has_changes()
        terminate_backends(postgres_url)
        assert rings(bell, WITHIN_S)
        with pytest.raises(DatabaseAway):
            hears(store)
        assert not rings(bell)


def test_news_that_come_with_another_answer_are_heard_although_nothing_rings(
    postgres_url: str, secrets: Secrets
) -> None:
    store, other = (Store(open_engine(postgres_url), secrets=secrets) for _ in range(2))
    with store, other:
        bell = store.database.doorbell()
        store.has_changes()
        store.has_changes()
        add(other, "new")
        assert rings(bell, WITHIN_S)
        store.live_triggerers()  # the driver reads what has arrived together with the answer
        assert not rings(bell)
        assert store.has_changes()


def test_where_no_bell_can_hang_commits_of_others_are_counted(
    sqlite_url: str, secrets: Secrets, tmp_path: Path
) -> None:
    (tmp_path / "headgate.db-bells").write_text("not a folder")
    store, other = (Store(open_engine(sqlite_url), secrets=secrets) for _ in range(2))
    with store, other:
        bell = store.database.doorbell()
        assert store.has_changes()
        assert store.no_bell() == f"{tmp_path}/headgate.db-bells: Not a directory"
        assert not store.has_changes()
        add(store, "my own")
        assert not store.has_changes()
        add(other, "new")
        assert not rings(bell)
        assert store.has_changes()
        assert not store.has_changes()


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
        store.has_changes()
        assert len(said) == 3, "a bell takes none"


# --- readers on SQLite ----------------------------------------------------------------------------


class Sleeps:
    """A reader on SQLite, whose looks without a bell are far away if it has one."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(changes, "COMMITS_LOOK_S", NEVER_S)
        self._store = store
        store.database.listen_for("events")
        self.said: list[str] = []
        assert store.database._connection is not None
        driver = store.database._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_trace_callback(self.said.append)

    def wait(self, timeout_s: float) -> bool:
        return self._store.database.wait_for("events", timeout_s, lambda trigger_id: True)


def test_an_idle_reader_on_sqlite_looks_once_and_hears_of_events(
    sqlite_url: str, secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (Store(open_engine(sqlite_url), secrets=secrets) for _ in range(2))
    with store, other:
        add(other, "known")
        reader = Sleeps(store, monkeypatch)
        assert not reader.wait(0.1)
        assert reader.said == ["PRAGMA data_version"] * 2, "at the beginning and at the end"
        add(other, "new")
        other.put_event("known", b"1")
        assert reader.wait(NEVER_S)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(reader.wait, NEVER_S)
            other.put_event("known", b"2")
            assert waits.result(WITHIN_S)


def test_a_reader_without_a_bell_looks_by_itself(
    sqlite_url: str, secrets: Secrets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "headgate.db-bells").write_text("not a folder")
    store, other = (Store(open_engine(sqlite_url), secrets=secrets) for _ in range(2))
    with store, other:
        add(other, "known")
        reader = Sleeps(store, monkeypatch)
        assert not reader.wait(0.0)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(reader.wait, NEVER_S)
            other.put_event("known", b"1")
            assert waits.result(WITHIN_S)


def test_a_bell_that_was_taken_down_is_hung_up_again(
    sqlite_url: str, secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a writer in another kernel does, to which the process behind it seems to have ended."""
    monkeypatch.setattr(bells, "CHECK_S", 0.0)
    store, other = (Store(open_engine(sqlite_url), secrets=secrets) for _ in range(2))
    with store, other:
        bell = store.database.doorbell()
        store.has_changes()
        assert not store.has_changes()
        shutil.rmtree(tmp_path / "headgate.db-bells")
        assert store.has_changes(), "nobody knows what was missed"
        assert not store.has_changes()
        add(other, "new")
        assert rings(bell)
        store.database.listen_for("events")
        assert not store.database.listen_for("events")
        shutil.rmtree(tmp_path / "headgate.db-bells")
        assert store.database.listen_for("events")


def test_news_of_some_and_of_any_in_one_transaction_are_news_of_any(store: Store) -> None:
    with store, store.database.writing() as tx:
        tx.notify_readers([2])
        tx.notify_readers([3, 2])
        assert tx.rings == {"events": {2, 3}}
        tx.notify_readers([])
        tx.notify_readers([4])
        tx.notify_listeners([])
        tx.notify_listeners([5])
        assert tx.rings == {"events": set(), "signals": set()}
