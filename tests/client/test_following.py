"""Readers that wait are woken by new events, and are found by supervisors only while they wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text
from tests.client.harness import Watched, client_of, payloads
from tests.store.harness import OpenStore, add
from tests.waiting import WITHIN_S

from headgate.client import Client, CursorRefused, NoSuchWatcher, waiting
from headgate.client import Cursor as Place
from headgate.store.consuming import reading
from headgate.store.consuming.reading import Page
from headgate.store.db import changes
from headgate.store.db.engine import open_engine
from headgate.store.db.transaction import Database, Tx
from headgate.store.store import Store

NEVER_S = 1000.0  # longer than any test: only a notification ends such a wait


@pytest.fixture
def reader(watched: Watched) -> Iterator[Client]:
    with client_of(watched.store) as reader:
        yield reader


@pytest.fixture
def told_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers never look by themselves, and supervisors find them at once."""
    monkeypatch.setattr(waiting, "CHECKS_S", (NEVER_S,))
    monkeypatch.setattr(waiting, "HELD_UP_CHECK_S", NEVER_S)
    monkeypatch.setattr(changes, "FOLLOWERS_LOOK_S", 0.0)
    monkeypatch.setattr(changes, "COMMITS_LOOK_S", NEVER_S)


class Waits:
    """Notes the waits of a database, and does something else in place of the first of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, instead: Any = None) -> None:
        self.timeouts: list[float] = []
        real = Database.wait_for

        def wait(database: Database, news: Any, timeout_s: float, concerns: Any) -> bool:
            self.timeouts.append(timeout_s)
            if instead is not None:
                return bool(instead(len(self.timeouts)))
            return real(database, news, timeout_s, concerns)

        monkeypatch.setattr(Database, "wait_for", wait)


@pytest.mark.usefixtures("told_only")
def test_events_stored_while_a_reader_waits_wake_it(
    open_store: OpenStore, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.store_events("a")
    real = Database.wait_for
    to_come = iter(["b", "c", "d"])

    def store_then_wait(database: Database, news: Any, timeout_s: float, concerns: Any) -> bool:
        watched.store_events(next(to_come))  # after the reader has looked, and found nothing
        return real(database, news, timeout_s, concerns)

    monkeypatch.setattr(Database, "wait_for", store_then_wait)
    with client_of(watched.store) as reader:
        events = reader.follow("orders")
        assert [next(events).payload for _ in range(4)] == ["a", "b", "c", "d"]


@pytest.mark.usefixtures("told_only")
def test_a_consumer_waits_for_its_next_batch_and_events_by_hand_wake_it(watched: Watched, reader: Client) -> None:
    consumer = reader.add_consumer("billing", "orders")
    assert not consumer.wait(0.0)
    watched.store_events("a")
    assert consumer.wait()
    with consumer.batch() as batch:
        assert payloads(batch) == ["a"]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(consumer.wait, NEVER_S)
        watched.store.put_event("orders", b'"b"')
        assert waits.result(WITHIN_S)


def test_following_ends_after_the_time_without_an_event(watched: Watched, reader: Client) -> None:
    watched.store_events("a", "b")
    assert payloads(reader.follow("orders", idle_s=0.0)) == ["a", "b"]
    assert payloads(reader.follow("orders", after=reader.newest("orders"), idle_s=0.02)) == []


def test_a_reader_looks_by_itself_ever_more_rarely(
    watched: Watched, reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = reader.add_consumer("billing", "orders")

    def nothing_comes(waits: int) -> bool:
        if waits == 6:
            watched.store_events("a")
        return False

    waits = Waits(monkeypatch, nothing_comes)
    assert consumer.wait()
    assert waits.timeouts == [2.0, 10.0, 60.0, 600.0, 600.0, 600.0]


def test_a_reader_held_up_by_a_removed_trigger_looks_every_second(
    watched: Watched, reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = reader.add_consumer("billing", "orders")
    first = watched.trigger_id
    watched.add_again()
    watched.store_events("b")

    def let_go(waits: int) -> bool:
        watched.store.release_triggers(watched.epoch, [first])
        return False

    waits = Waits(monkeypatch, let_go)
    assert consumer.wait()
    assert waits.timeouts == [waiting.HELD_UP_CHECK_S]


def test_what_cannot_be_followed_is_told_at_once(watched: Watched, reader: Client) -> None:
    with pytest.raises(NoSuchWatcher):
        reader.follow("ordres")
    with pytest.raises(CursorRefused):
        reader.follow("orders", after=Place(watched.trigger_id, 99))
    with pytest.raises(ValueError, match="idle_s must be 0 or more seconds, not -1"):
        reader.follow("orders", idle_s=-1)


def test_a_page_is_concerned_by_its_triggers_and_by_newer_ones() -> None:
    page = Page((), Place(3, 9), triggers=frozenset({3, 5}), newest_trigger=7)
    assert [page.concerns(id_) for id_ in (2, 3, 4, 5, 7, 8)] == [False, True, False, True, False, True]


# --- PostgreSQL: notifications -------------------------------------------------------------------


@pytest.fixture
def on_server(postgres_url: str, secrets: Any) -> Iterator[Watched]:
    with Store(open_engine(postgres_url), secrets=secrets) as store:
        yield Watched(store)


def test_supervisors_notify_readers_only_while_there_are_any(
    on_server: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "FOLLOWERS_LOOK_S", 0.0)
    told: list[list[int]] = []
    real = changes.notify

    def note(connection: Any, rings: Any) -> None:
        if "events" in rings:
            told.append(sorted(rings["events"]))
        real(connection, rings)

    monkeypatch.setattr(changes, "notify", note)
    on_server.store_events("nobody waits")
    with client_of(on_server.store) as reader:
        assert payloads(reader.follow("orders", idle_s=0.0)) == ["nobody waits"]
        on_server.store_events("a", "b")
        assert told == [[on_server.trigger_id]]
    with on_server.store.database.writing() as tx:  # a server notices a little later that a connection was closed
        tx.connection.execute(text(f"SELECT pg_advisory_xact_lock({changes.FOLLOWERS_LOCK})"))
    on_server.store_events("nobody waits any more")
    assert told == [[on_server.trigger_id]]


def test_without_readers_a_supervisor_looks_for_them_once_in_a_second(on_server: Watched) -> None:
    now = [100.0]
    followers = changes.Followers(lambda: now[0])
    looks: list[str] = []

    class Counted:
        """A connection that notes its statements."""

        def __init__(self, connection: Any) -> None:
            self.dialect, self.connection = connection.dialect, self
            self.driver_connection = self
            self._driver = connection.connection.driver_connection

        def execute(self, statement: str) -> Any:
            looks.append(statement)
            return self._driver.execute(statement)

    with on_server.store.database.writing() as tx:
        counted: Any = Counted(tx.connection)
        for _ in range(3):
            assert not followers.are_there(counted)
        now[0] += changes.FOLLOWERS_LOOK_S
        assert not followers.are_there(counted)
    assert len(looks) == 2


@pytest.mark.usefixtures("told_only")
def test_events_of_other_watchers_do_not_wake_a_reader(on_server: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    (other,) = add(on_server.store, "others")
    with client_of(on_server.store) as reader:
        reader.follow("orders", idle_s=0.0)
        looks: list[str] = []
        real = reading.read_page

        def note(tx: Tx, watcher: str, after: Place, limit: int) -> Page:
            looks.append(watcher)
            return real(tx, watcher, after, limit)

        monkeypatch.setattr(reading, "read_page", note)
        assert list(reader.follow("orders", idle_s=0.0)) == []
        on_server.store_events("x", trigger_id=other)
        assert list(reader.follow("orders", idle_s=0.05)) == []
        # The second time: at the beginning and, unless the first of them takes all of the time, at the end.
        assert looks in (["orders"] * 2, ["orders"] * 3)


def test_many_triggers_of_one_slice_wake_every_reader(on_server: Watched) -> None:
    with client_of(on_server.store) as reader:
        database = reader._database
        assert database.listen_for("events")
        assert not database.listen_for("events")
        with on_server.store.database.writing() as tx:
            tx.notify_readers(range(10**12, 10**12 + changes.IDS_NAMED_MAX + 1))
        assert database.wait_for("events", WITHIN_S, lambda trigger_id: False)
        with on_server.store.database.writing() as tx:
            tx.notify_readers(range(10**12, 10**12 + changes.IDS_NAMED_MAX))
        assert not database.wait_for("events", 0.05, lambda trigger_id: False)
