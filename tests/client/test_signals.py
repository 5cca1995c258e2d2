"""Signals in a program of a user: sent, listed, and listened to."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.client.harness import client_of
from tests.supervisor.tasks_harness import Tasks

from headgate.client import Client, NoSuchRow, Send, SentSignal, ValueRefused, waiting
from headgate.protocol.errors import ValueNotSerializable
from headgate.store.db.transaction import Database
from headgate.store.store import Store


def values(signals: Any) -> list[Any]:
    return [one.value for one in signals]


def test_a_program_sends_and_lists_signals(store: Store) -> None:
    with client_of(store) as client:
        assert client.send_signal("model", {"auc": 0.9}, dedup="run-7") == SentSignal(1, True)
        assert client.send_signal("model", {"auc": 0.9}, dedup="run-7") == SentSignal(1, False)
        assert client.send_signals([Send("model", 2), Send("labels", 3)]) == [SentSignal(2, True), SentSignal(1, True)]
        assert values(client.list_signals("model")) == [{"auc": 0.9}, 2]
        assert values(client.list_signals("model", after=1)) == [2]
        assert values(client.list_signals("model", 1)) == [{"auc": 0.9}]
        assert client.list_signals("model", 3) == []
        assert client.list_signals("nothing") == []


def test_a_program_starts_a_run_with_signals(store: Store, query: Any) -> None:
    tasks = Tasks(store, query)
    with client_of(store) as client:
        assert client.send_and_start("etl", [Send("model", 1), Send("labels", 2)]) == (
            [SentSignal(1, True), SentSignal(1, True)],
            None,
        )
        store.tasks.cancel_run(tasks.run)
        _, run_id = client.send_and_start("etl", [Send("model", 3)])
        assert str(run_id).startswith("manual__")


def test_a_program_sends_a_signal_to_one_run(store: Store, query: Any) -> None:
    tasks = Tasks(store, query)
    with client_of(store) as client:
        client.send_signal("model", 1, run=("etl", "r1"))
        (sent,) = client.list_signals("model")
        assert (sent.dag, sent.run_id, sent.sender) == ("etl", "r1", "a client")
        with pytest.raises(NoSuchRow, match="no run named 'r2'"):
            client.send_signal("model", 1, run=("etl", "r2"))
    store.tasks.cancel_run(tasks.run)


def test_a_listener_gets_all_versions_in_order_and_waits_for_those_to_come(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "CHECKS_S", (3600.0,))  # it has to be woken
    real = Database.wait_for
    to_come = iter([2, 3])

    def send_then_wait(database: Database, news: Any, timeout_s: float, concerns: Any) -> bool:
        with client_of(store) as sender:  # after the listener has looked, and found nothing
            sender.send_signal("other", 0)
            sender.send_signal("model", next(to_come))
        return real(database, news, timeout_s, concerns)

    monkeypatch.setattr(Database, "wait_for", send_then_wait)
    with client_of(store) as client:
        client.send_signal("model", 1)
        signals = client.listen_signal("model", after=0)
        assert [(one.version, one.value) for one in (next(signals) for _ in range(3))] == [(1, 1), (2, 2), (3, 3)]


def test_a_listener_without_a_place_gets_what_is_sent_from_now_on(store: Store) -> None:
    with client_of(store) as client:
        client.send_signal("model", 1)
        signals = client.listen_signal("model", idle_s=0.0)
        first_ever = client.listen_signal("new", idle_s=0.0)
        client.send_signals([Send("model", 2), Send("new", 3)])
        assert (values(signals), values(first_ever)) == ([2], [3])


def test_what_cannot_be_sent_or_listened_to_is_refused(store: Store) -> None:
    with client_of(store) as client:
        with pytest.raises(ValueRefused, match="the key of a signal"):
            client.listen_signal("")
        with pytest.raises(ValueNotSerializable, match="signal 'a'"):
            client.send_signal("a", object())
        with pytest.raises(ValueRefused, match="the dedup"):
            client.send_signal("a", 1, dedup="")
        assert client.list_signals("a") == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"key": 5}, "key must be a str, not 5"),
        ({"run": "x"}, "run must be a tuple of a dag_id and a run_id, not 'x'"),
        ({"run": "xy"}, "run must be a tuple of a dag_id and a run_id, not 'xy'"),
        ({"run": 5}, "run must be a tuple of a dag_id and a run_id, not 5"),
        ({"run": ["d", "latest"]}, r"run must be a tuple of a dag_id and a run_id, not \['d', 'latest'\]"),
        ({"run": ("d", 5)}, r"run must be a tuple of a dag_id and a run_id, not \('d', 5\)"),
        ({"dedup": 5}, "dedup must be a str, not 5"),
        ({"namespace": None}, "namespace must be a str, not None"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_its_name(store: Store, arguments: Any, problem: str) -> None:
    with client_of(store) as client:
        with pytest.raises(TypeError, match=problem):
            client.send_signal(**{"key": "a"} | arguments)
        if arguments.keys() & {"key", "namespace"}:
            with pytest.raises(TypeError, match=problem):
                client.list_signals(**{"key": "a"} | arguments)
            with pytest.raises(TypeError, match=problem):
                client.listen_signal(**{"key": "a"} | arguments)
        assert client.list_signals("a") == []


@pytest.mark.parametrize(
    ("idle_s", "kind", "problem"),
    [
        (-1, ValueError, "idle_s must be 0 or more seconds, not -1"),
        (math.nan, ValueError, "idle_s must be 0 or more seconds, not nan"),
        ("1", TypeError, "idle_s must be a number of seconds, not '1'"),
    ],
)
def test_a_listener_waits_for_some_seconds(store: Store, idle_s: Any, kind: type[Exception], problem: str) -> None:
    with client_of(store) as client, pytest.raises(kind, match=problem):
        client.listen_signal("a", idle_s=idle_s)


def test_a_client_hears_of_events_and_signals(store: Store) -> None:
    with client_of(store) as client:
        database = _database_of(client)
        assert database.listen_for("signals")
        assert database.listen_for("events")
        assert not database.listen_for("signals")
        with client_of(store) as sender:
            sender.send_signal("a")
        assert database.wait_for("signals", 60.0, lambda key: True)


def _database_of(client: Client) -> Database:
    return client._database
