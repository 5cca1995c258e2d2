"""A supervisor's lease and its triggers in a store, and waits for another transaction: for the tests of stores."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Engine
from tests.waiting import wait_until

from headgate.protocol.messages.runner import DescribedTrigger
from headgate.store.db import schema
from headgate.store.db.engine import open_engine
from headgate.store.ids import Epoch
from headgate.store.store import Store

Query = Callable[..., list[dict[str, Any]]]

QUEUES = ("default",)
START = datetime(2026, 1, 1, tzinfo=UTC)


class OpenStore(Protocol):
    """Opens one more store on the database of the test; it is closed when the test ends."""

    def __call__(self, *, clock: Callable[[], datetime] | None = None) -> Store: ...


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def pass_days(self, days: float) -> None:
        self.now += timedelta(days=days)


@cache
def migrated_sqlite() -> bytes:
    """A file of SQLite with the tables and without rows, to be written anywhere: to migrate one takes 0.4 s of CPU."""
    with tempfile.TemporaryDirectory(prefix="headgate-tests-") as folder:
        path = Path(folder) / "migrated.db"
        engine = open_engine(f"sqlite:///{path}")
        schema.upgrade(engine)
        engine.dispose()  # the last connection leaves all in the one file
        return path.read_bytes()


def open_migrated_in_memory() -> Engine:
    """Open a database in memory with the tables and without rows."""
    opened, file = open_engine("sqlite://"), migrated_sqlite()
    with opened.connect() as connection:
        # Nothing in memory is written ahead, as bytes 18 and 19 of a file tell: https://www.sqlite.org/fileformat.html
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.deserialize(file[:18] + b"\x01\x01" + file[20:])
    return opened


def register(store: Store, **changes: Any) -> Epoch:
    lease = {"hostname": "h", "pid": 1, "machine": "m", "process_started": 0.0, "capacity": 10, "queues": QUEUES}
    return store.register_triggerer(**{**lease, **changes})


def add(store: Store, *names: str, queue: str = "default") -> list[int]:
    return [store.add_watcher(name, "a.B", {"name": name}, queue=queue) for name in names]


def wait_until_blocked(opened: Engine) -> None:
    """Return when some backend of this database waits for a lock."""
    with opened.connect() as connection:

        def waiting() -> int:
            count: int = connection.exec_driver_sql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ).scalar_one()
            connection.rollback()
            return count

        wait_until(waiting, "somebody waits for a lock")


def describe_stream(store: Store) -> Epoch:
    """Have a supervisor run the watcher ``orders``, which reads the stream "d" named "the log"; return its epoch."""
    epoch = register(store)
    add(store, "orders")
    ((trigger,)) = store.claim_triggers(epoch, limit=10, queues=QUEUES)
    store.store_slice(epoch, described=(DescribedTrigger(trigger.id, "described", "d", "the log"),))
    return epoch
