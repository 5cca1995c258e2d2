"""The thread that has the database: sends that wait are committed together, and no idle looks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from tests.signal_server.rig import database_of
from tests.store.signals.test_sending import new
from tests.waiting import WITHIN_S

from headgate.signal_server import store_thread
from headgate.signal_server.store_thread import Stopping, StoreThread, Waiter
from headgate.store.db.transaction import Database
from headgate.store.errors import DatabaseAway, ValueRefused
from headgate.store.signal_verbs import SignalVerbs
from headgate.store.signals import reading
from headgate.store.store import Store


@pytest.fixture
def database(database_url: str) -> Database:
    return database_of(database_url)


@pytest.fixture
def thread(database: Database) -> Iterator[StoreThread]:
    thread = StoreThread(database, listeners_max=10, failed=lambda: None)
    yield thread
    thread.close()


@contextmanager
def held(thread: StoreThread) -> Iterator[None]:
    """Keep the thread at a job in the block."""
    begun, ended = threading.Event(), threading.Event()

    def hold(_verbs: SignalVerbs) -> None:
        begun.set()
        assert ended.wait(WITHIN_S)

    with ThreadPoolExecutor(1) as holder:
        holding = holder.submit(thread.call, hold)
        assert begun.wait(WITHIN_S)
        try:
            yield
        finally:
            ended.set()
        holding.result(WITHIN_S)


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each transaction that sends adds its number of signals."""
    counted: list[int] = []
    real: Callable[..., Any] = SignalVerbs.send

    def send(verbs: SignalVerbs, signals: Any) -> Any:
        counted.append(len(signals))
        return real(verbs, signals)

    monkeypatch.setattr(SignalVerbs, "send", send)
    return counted


def wait_for_jobs(thread: StoreThread, count: int) -> None:
    while len(thread._jobs) < count:
        os.sched_yield()


def test_sends_that_wait_together_are_one_transaction(thread: StoreThread, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = calls_of(monkeypatch)
    with ThreadPoolExecutor(5) as senders:
        with held(thread):
            sending = []
            for number in range(5):
                sending.append(senders.submit(thread.send, [new("a", number), new("b", number)]))
                wait_for_jobs(thread, number + 1)
        sent = [[one.version for one in sends.result(WITHIN_S)] for sends in sending]
    assert counted == [10]
    assert sent == [[number, number] for number in range(1, 6)], "each has its own, in the order in which they came"


def test_no_more_than_one_call_may_send_are_sent_together(thread: StoreThread, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = calls_of(monkeypatch)
    with ThreadPoolExecutor(5) as senders:
        with held(thread):
            for number in range(5):
                senders.submit(thread.send, [new("a") for _ in range(400)])
                wait_for_jobs(thread, number + 1)
    assert counted == [800, 800, 400]


def test_one_that_is_refused_costs_the_others_nothing(
    thread: StoreThread, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread.send([new("a")])
    monkeypatch.setattr("headgate.store.signals.sending.KEYS_MAX", 0)
    with ThreadPoolExecutor(3) as senders:
        with held(thread):
            sending = []
            for number, key in enumerate(("a", "too many", "a")):
                sending.append(senders.submit(thread.send, [new(key)]))
                wait_for_jobs(thread, number + 1)
        assert [sending[index].result(WITHIN_S)[0].version for index in (0, 2)] == [2, 3]
        with pytest.raises(ValueRefused, match="keys of signals already"):
            sending[1].result(WITHIN_S)
    assert [one.version for one in store.signals.page("a").signals] == [1, 2, 3]


def test_who_listens_is_woken_by_others_and_by_this_thread(thread: StoreThread, store: Store) -> None:
    waiter = Waiter("default", "a")
    with thread.joined(waiter):
        assert thread.call(lambda verbs: verbs.page("a", after=0)).is_empty
        store.signals.send([new("a")])
        waiter.wait()
        waiter.seen = 1
        thread.send([new("a")])
        waiter.wait()
        assert [one.version for one in thread.call(lambda verbs: verbs.page("a", after=1)).signals] == [2]


def test_while_nothing_happens_no_statement_is_run(
    thread: StoreThread, database: Database, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if those who listen come and go, which wakes the thread."""
    looks = []
    monkeypatch.setattr(store_thread, "CHECKS_S", (3600.0,))
    real = reading.newest_versions

    def newest(tx: Any, addresses: Any) -> Any:
        looks.append(addresses)
        return real(tx, addresses)

    monkeypatch.setattr(reading, "newest_versions", newest)
    waiter = Waiter("default", "a")
    with thread.joined(waiter):
        thread.call(lambda verbs: None)
        for _ in range(20):
            thread.call(lambda verbs: None)
        assert len(looks) <= 2, "when it began to listen"
        before = len(looks)
        store.signals.send([new("a")])
        waiter.wait()
        assert len(looks) == before + 1


def test_a_job_that_loses_the_connection_costs_no_listener_what_is_sent_meanwhile(
    thread: StoreThread, store: Store
) -> None:
    def lose(verbs: SignalVerbs) -> None:
        verbs.database._drop_connection()
        store_of_others.signals.send([new("a")])  # nobody listens at this moment
        raise DatabaseAway("db", "the test says so")

    store_of_others = store
    waiter = Waiter("default", "a")
    with thread.joined(waiter):
        assert thread.call(lambda verbs: verbs.page("a", after=0)).is_empty
        with ThreadPoolExecutor(1) as other, held(thread):
            losing = other.submit(thread.call, lose)
            wait_for_jobs(thread, 1)
        assert isinstance(losing.exception(WITHIN_S), DatabaseAway)
        waiter.wait()
        assert [one.version for one in thread.call(lambda verbs: verbs.page("a", after=0)).signals] == [1]


def test_after_its_end_nothing_is_answered(thread: StoreThread) -> None:
    waiter = Waiter("default", "a")
    with thread.joined(waiter):
        thread.close()
        with pytest.raises(Stopping):
            waiter.wait()
    with pytest.raises(Stopping):
        thread.send([new("a")])
    with pytest.raises(Stopping), thread.joined(waiter):
        pass
