"""How many statements a consumer runs: for a batch, and while there is nothing to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.client.harness import Statements, Watched, client_of, payloads

from headgate.client import waiting
from headgate.store.db.transaction import Database
from headgate.store.store import Store

CONSUMERS = 100
HOURS = 10.0


class Hours:
    """A clock of waits, in which nobody is ever woken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_s = 0.0
        monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: self.passed_s))

        def wait(_: Database, news: Any, timeout_s: float, concerns: Any) -> bool:
            self.passed_s += timeout_s
            return False

        monkeypatch.setattr(Database, "wait_for", wait)


def test_a_full_batch_takes_five_statements_beside_those_of_the_user(store: Store, tmp_path: Path) -> None:
    watched = Watched(store)
    with client_of(store) as client:
        consumer = client.add_consumer("billing", "orders")
        watched.store_events(*range(4))
        with consumer.batch(2):  # the first batch of a process is recorded before
            pass
        with Statements(client, tmp_path) as statements, consumer.batch(2) as batch:
            assert payloads(batch) == [2, 3]
        assert len(statements.sent) == 5, statements.sent  # BEGIN, the place, the events, the new place, COMMIT


def test_a_hundred_idle_consumers_run_less_than_one_statement_a_second(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks by itself, ever more rarely. How readers on SQLite notice commits is not counted here."""
    watched = Watched(store)
    with client_of(store) as client:
        consumer = client.add_consumer("billing", "orders")
        watched.store_events("a")
        with consumer.batch():
            pass
        assert not consumer.wait(0.0)  # it listens
        hours = Hours(monkeypatch)
        with Statements(client, tmp_path) as statements:
            assert not consumer.wait(HOURS * 3600)
        assert hours.passed_s == HOURS * 3600
        assert 0 < len(statements.sent) * CONSUMERS < hours.passed_s
