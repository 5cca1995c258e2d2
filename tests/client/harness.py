"""A watcher whose events a supervisor stores, and a client that reads them."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Column, Integer, MetaData, Table, Text, select
from tests.store.harness import QUEUES, add, register

from headgate.client import Client, open_client
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.values import encode_value
from headgate.store.consuming.consumers import ConsumerRow
from headgate.store.db.prepared import driver_of
from headgate.store.store import Store

BILLS = Table("users_bill", MetaData(), Column("event_id", Integer, primary_key=True), Column("payload", Text))


class Watched:
    """A store with a supervisor that owns one watcher, and stores its events."""

    def __init__(self, store: Store, name: str = "orders") -> None:
        self.store = store
        self.epoch = register(store)
        self._name = name
        (self.trigger_id,) = add(store, name)
        self._stored = 0
        self.claim()

    def claim(self) -> None:
        self.store.claim_triggers(self.epoch, limit=10, queues=QUEUES)

    def add_again(self) -> int:
        """Remove the watcher, and add it again under the same name; return the id of its new trigger."""
        self.store.remove_watcher(self._name)
        (self.trigger_id,) = add(self.store, self._name)
        self.claim()
        return self.trigger_id

    def store_events(self, *payloads: Any, trigger_id: int | None = None) -> None:
        events = []
        for payload in payloads:
            of = self.trigger_id if trigger_id is None else trigger_id
            data = encode_value(payload, where="payload")
            events.append(FiredEvent(of, "run", self._stored, 1, data, key=f"key {self._stored}"))
            self._stored += 1
        assert self.store.store_slice(self.epoch, events=events).stored == len(payloads)


@contextmanager
def client_of(store: Store) -> Generator[Client]:
    """Open a client on the database of a store."""
    with open_client(store.database.engine.url.render_as_string(hide_password=False)) as client:
        yield client


def payloads(events: Any) -> list[Any]:
    return [event.payload for event in events]


def bills(watched: Watched) -> list[str | None]:
    """Return the payloads of the events of which the user's program has written a bill."""
    with watched.store.database.reading() as tx:
        return list(tx.connection.execute(select(BILLS.c.payload).order_by(BILLS.c.event_id)).scalars())


def row(watched: Watched) -> ConsumerRow:
    """Return what is known of the consumer ``billing``."""
    return watched.store.consumers.consumer("billing")


class Statements:
    """What a client sends to its database in the block: each statement, BEGIN and COMMIT, too."""

    def __init__(self, client: Client, folder: Path) -> None:
        with client._database.reading() as tx:
            self._driver: Any = driver_of(tx.connection)
        self._path = folder / "sent"
        self.sent: list[str] = []

    def __enter__(self) -> Self:
        if isinstance(self._driver, sqlite3.Connection):
            self._driver.set_trace_callback(self.sent.append)
        else:  # the client library writes what goes over the connection, whoever sends it
            self._file = self._path.open("w")
            self._driver.pgconn.trace(self._file.fileno())
        return self

    def __exit__(self, *exc_info: object) -> None:
        if isinstance(self._driver, sqlite3.Connection):
            self._driver.set_trace_callback(None)
            return
        self._driver.pgconn.untrace()
        self._file.close()
        for line in self._path.read_text().splitlines():
            _, sender, _, kind, *_ = [*line.split("\t"), "", "", ""]
            if sender == "F" and kind in ("Query", "Execute"):
                self.sent.append(line)
