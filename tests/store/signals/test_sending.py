"""Signals get dense versions, in the order of their commits, and one dedup gets one version (I25)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.store.harness import Clock, OpenStore, Query, wait_until_blocked
from tests.supervisor.tasks_harness import Tasks
from tests.waiting import WITHIN_S

from headgate.protocol.messages import signals as wire
from headgate.protocol.messages.signals import SentSignal, SignalSend
from headgate.protocol.values import encode_value
from headgate.store.errors import NoSuchRow, ValueRefused
from headgate.store.signals import sending
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store


def new(key: str, value: Any = None, dedup: str = "", **fields: Any) -> NewSignal:
    new.count += 1  # type: ignore[attr-defined]
    name = dedup or f"dedup {new.count}"  # type: ignore[attr-defined]
    return NewSignal(key, encode_value(value, where="value"), name, "the test", **fields)


new.count = 0  # type: ignore[attr-defined]


def versions(store: Store, key: str, **where: Any) -> list[tuple[int, Any]]:
    return [(one.version, one.value) for one in store.signals.page(key, **where).signals]


def test_each_signal_gets_the_next_version_of_its_key(store: Store) -> None:
    assert store.signals.send([new("a", 1)]) == [SentSignal(1, True)]
    sent = store.signals.send([new("b", "x"), new("a", {"n": 2}), new("a", 3), new("b")])
    assert [one.version for one in sent] == [1, 2, 3, 2]
    assert versions(store, "a") == [(1, 1), (2, {"n": 2}), (3, 3)]
    assert versions(store, "b") == [(1, "x"), (2, None)]
    assert versions(store, "c") == []


def test_namespaces_keep_keys_apart(store: Store) -> None:
    store.signals.send([new("a", 1), new("a", 2, namespace="other")])
    assert versions(store, "a") == [(1, 1)]
    assert versions(store, "a", namespace="other") == [(1, 2)]


def test_one_dedup_gets_one_version_in_a_call_and_over_calls(store: Store) -> None:
    first = store.signals.send([new("a", 1, "x"), new("a", 2, "x"), new("a", 3, "y"), new("b", 4, "x")])
    assert first == [SentSignal(1, True), SentSignal(1, False), SentSignal(2, True), SentSignal(1, True)]
    again = store.signals.send([new("a", 5, "y"), new("a", 6, "z"), new("a", 7, "x")])
    assert again == [SentSignal(2, False), SentSignal(3, True), SentSignal(1, False)]
    assert versions(store, "a") == [(1, 1), (2, 3), (3, 6)]


def test_a_signal_keeps_who_sent_it_and_when(open_store: OpenStore) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    store.signals.send([new("a")])
    clock.advance(7)
    store.signals.send([new("a")])
    first, second = store.signals.page("a").signals
    assert (first.sender, (second.sent_at - first.sent_at).total_seconds()) == ("the test", 7)
    assert store.signals.key("a").sent_at == second.sent_at


def test_a_signal_for_one_run_takes_a_version_and_no_other_run_considers_it(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    other = store.tasks.create_run("etl", "other")
    store.signals.send([new("a", "all"), new("a", "one", dag_run=tasks.run), new("a", "all")])
    assert versions(store, "a", dag_run=tasks.run) == [(1, "all"), (2, "one"), (3, "all")]
    assert versions(store, "a", dag_run=other) == [(1, "all"), (3, "all")]
    everything = store.signals.page("a").signals
    assert [(one.dag, one.run_id) for one in everything] == [(None, None), ("etl", "r1"), (None, None)]


def test_the_newest_versions_are_kept_and_none_is_given_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "VERSIONS_KEPT_MAX", 3)
    for number in range(1, 6):
        store.signals.send([new("a", number, f"d{number}")])
    assert versions(store, "a") == [(3, 3), (4, 4), (5, 5)]
    assert store.signals.send([new("a", 6, "d4")]) == [SentSignal(4, False)]
    assert store.signals.send([new("a", 6, "d1")]) == [SentSignal(6, True)]  # its first version is not kept


def test_versions_are_read_by_pages_and_singly(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.signals.send([new("a", "x" * 100) for _ in range(5)])
    assert [one.version for one in store.signals.page("a", after=1, limit=2).signals] == [2, 3]
    assert [one.version for one in store.signals.newest("a", limit=2)] == [4, 5]
    found = store.signals.version("a", "default", 4)
    assert found is not None
    assert found.version == 4
    assert store.signals.version("a", "default", 6) is None
    monkeypatch.setattr("headgate.store.signals.reading.PAGE_BYTES_MAX", 150)
    assert [one.version for one in store.signals.page("a").signals] == [1, 2]


def test_keys_are_listed_in_pages(store: Store) -> None:
    store.signals.send([new("b"), new("a"), new("a"), new("c", namespace="other")])
    found = store.signals.keys(limit=2)
    found += store.signals.keys(beyond_id=found[-1].id, limit=2)
    assert sorted((row.namespace, row.key, row.last_version) for row in found) == [
        ("default", "a", 2),
        ("default", "b", 1),
        ("other", "c", 1),
    ]
    assert [row.key for row in store.signals.keys("other", limit=9)] == ["c"]


def test_a_key_that_is_forgotten_begins_anew(store: Store) -> None:
    store.signals.send([new("a"), new("a"), new("b")])
    assert store.signals.forget("a") == 2
    with pytest.raises(NoSuchRow, match="there is no key of signals named 'a'"):
        store.signals.key("a")
    assert versions(store, "b") == [(1, None)]
    assert store.signals.send([new("a", "new")]) == [SentSignal(1, True)]
    with pytest.raises(NoSuchRow, match="named 'a' in the namespace 'other'"):
        store.signals.forget("a", "other")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (SignalSend("", b"1", "d"), "the key of a signal '' must have 1..512 characters, not 0"),
        (SignalSend("k" * 513, b"1", "d"), "must have 1..512 characters, not 513"),
        (SignalSend("a\0b", b"1", "d"), r"the key of a signal 'a\x00b' must not contain '\x00'"),
        (SignalSend("\ud800", b"1", "d"), r"must not contain '\ud800'"),
        (SignalSend("a", b"1", "d", "n" * 101), "the namespace 'nnn"),
        (SignalSend("a", b"1", ""), "the dedup of the signal 'a' '' must have 1..512"),
        (SignalSend("a", b"1" * (wire.SIGNAL_BYTES_MAX + 1), "d"), "'a' needs 49,153 bytes; the limit is 49,152"),
        (SignalSend("a", b"abc", "d"), "the value of the signal 'a' is not JSON: "),
        (SignalSend("a", b"[" * 900 + b"]" * 900, "d"), "'a' is nested deeper than 400 levels of JSON"),
        (SignalSend("a", b"1", "d", is_of_run=True), "is for its sender's run alone, and the sender has none"),
    ],
)
def test_a_malformed_signal_is_refused_with_the_reason(said: SignalSend, problem: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        NewSignal.of(said, "the test", None)
    assert problem in str(refused.value)


def test_the_longest_key_namespace_and_dedup_can_be_stored(store: Store) -> None:
    said = SignalSend("\N{GRINNING FACE}" * 512, b"1", "\N{GRINNING FACE}" * 512, "\N{GRINNING FACE}" * 100)
    assert store.signals.send([NewSignal.of(said, "the test", None)]) == [SentSignal(1, True)]


def test_too_many_signals_or_keys_are_refused_and_nothing_is_sent(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueRefused, match="1,001 signals are sent at once; the limit is 1,000"):
        store.signals.send([new("a") for _ in range(1001)])
    monkeypatch.setattr(sending, "KEYS_MAX", 0)
    with pytest.raises(ValueRefused, match="headgate signals forget KEY"):
        store.signals.send([new("a"), new("b")])
    assert store.signals.keys(limit=9) == []
    with pytest.raises(ValueRefused, match="limit must be from 1 to 1,000: 0"):
        store.signals.page("a", limit=0)


@pytest.mark.usefixtures("patient_sqlite")
def test_many_who_send_to_the_same_keys_leave_no_gap(open_store: OpenStore, store: Store) -> None:
    senders, rounds = 6, 25
    failed: list[BaseException] = []

    def send(number: int) -> None:
        try:
            mine = open_store()
            for round_ in range(rounds):
                keys = ("a", "b") if number % 2 else ("b", "a")
                mine.signals.send([new(key, [number, round_], f"{number} {round_}") for key in keys])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert failed == []
    for key in ("a", "b"):
        found = versions(store, key)
        assert [version for version, _ in found] == list(range(1, senders * rounds + 1))
        for number in range(senders):
            assert [round_ for _, (by, round_) in found if by == number] == list(range(rounds))


def test_later_versions_never_have_earlier_times(open_store: OpenStore) -> None:
    """Rules act in the order of the times, so a stop that was sent before a start would take it back."""
    clock = Clock()
    store = open_store(clock=clock)
    store.signals.send([new("a"), new("b")])
    clock.advance(-100.0)
    store.signals.send([new("a"), new("c")])
    clock.advance(150.0)
    store.signals.send([new("a")])
    times = [one.sent_at for one in store.signals.page("a").signals]
    assert times[0] == times[1]
    assert (times[2] - times[1]).total_seconds() == 50.0


def test_the_time_of_a_version_is_none_of_before_its_key_was_locked(postgres_url: str, secrets: Any) -> None:
    from headgate.store.db.engine import open_engine

    with (
        Store(open_engine(postgres_url), secrets=secrets) as one,
        Store(open_engine(postgres_url), secrets=secrets) as two,
    ):
        with one.database.writing() as tx:
            begun_at = tx.now
            two.signals.send([new("a", "stop")])
            sending.send(tx, [new("a", "start")])
        first, second = one.signals.page("a").signals
        assert (first.value, second.value) == ("stop", "start")
        assert begun_at < first.sent_at < second.sent_at


def test_who_sends_to_a_key_waits_for_the_commit_of_another(
    postgres_url: str, secrets: Any, request: pytest.FixtureRequest
) -> None:
    from headgate.store.db.engine import open_engine

    with (
        Store(open_engine(postgres_url), secrets=secrets) as one,
        Store(open_engine(postgres_url), secrets=secrets) as two,
    ):
        sent: list[SentSignal] = []
        with one.database.writing() as tx:
            sending.send(tx, [new("a", "first")])
            thread = threading.Thread(target=lambda: sent.extend(two.signals.send([new("a", "second")])))
            thread.start()
            wait_until_blocked(one.database.engine)
            assert sent == []
        thread.join(WITHIN_S)
        assert sent == [SentSignal(2, True)]
        assert versions(one, "a") == [(1, "first"), (2, "second")]
