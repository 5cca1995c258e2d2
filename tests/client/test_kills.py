"""A consumer that is killed at random points, while two supervisors store and swap their triggers."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from sqlalchemy import text
from tests.client.worker import WATCHERS
from tests.store.harness import OpenStore, add, register

from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.values import encode_value
from headgate.store.db.engine import open_engine
from headgate.store.errors import DatabaseAway
from headgate.store.ids import Epoch
from headgate.store.store import Store

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
KILLS = 12
LINES_MAX = 25  # of a worker before it is killed
SLICES = 6  # of each supervisor between two kills
SLICE_EVENTS = 10
EVENTS = KILLS * SLICES * SLICE_EVENTS  # of each watcher
IDLE_LINES = 2 * len(WATCHERS)  # in a row: the worker has got everything
TABLES = {
    "sqlite": "CREATE TABLE users_bill (n INTEGER PRIMARY KEY AUTOINCREMENT, watcher TEXT, event_id INT, payload INT)",
    "postgresql": "CREATE TABLE users_bill (n BIGSERIAL PRIMARY KEY, watcher TEXT, event_id BIGINT, payload INT)",
}


@contextmanager
def worker(url: str) -> Generator[IO[str]]:
    """Run a worker; give its output, and kill it with SIGKILL."""
    command = [sys.executable, "-m", "tests.client.worker", url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


class Supervisor:
    """A store under an epoch of its own, which ends after each turn."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def turn(self, watcher: str, trigger_id: int, first: int) -> None:
        """Take a trigger over, store its next events, and give it up."""
        epoch = self._again(lambda: register(self.store, queues=(watcher,)))
        claimed = self._again(lambda: self.store.claim_triggers(epoch, limit=1, queues=(watcher,)))
        assert [one.id for one in claimed] == [trigger_id]
        for start in range(first, first + SLICES * SLICE_EVENTS, SLICE_EVENTS):
            self._store(epoch, watcher, trigger_id, start)
        self._again(lambda: self.store.release_triggerer(epoch))

    def _store(self, epoch: Epoch, watcher: str, trigger_id: int, start: int) -> None:
        events = [
            FiredEvent(trigger_id, watcher, index, 1, encode_value(index, where="payload"))
            for index in range(start, start + SLICE_EVENTS)
        ]
        self._again(lambda: self.store.store_slice(epoch, events=events))

    def _again(self, verb: Callable[[], T]) -> T:
        while True:
            try:
                return verb()
            except DatabaseAway:  # SQLite has one writer at a time, and the worker is one
                continue


def test_each_event_is_in_the_users_table_once_and_in_order(database_url: str, open_store: OpenStore) -> None:
    setup = open_store()
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text(TABLES[engine.dialect.name]))
    try:
        ids = {name: add(setup, name, queue=name)[0] for name in WATCHERS}
        run(database_url, [Supervisor(open_store()) for _ in WATCHERS], ids)
        check(setup)
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE users_bill"))


def run(url: str, supervisors: list[Supervisor], ids: dict[str, int]) -> None:
    """Kill a worker again and again while both supervisors store; then let one get the rest."""
    chosen = random.Random(14)
    with ThreadPoolExecutor(len(supervisors)) as pool:
        for number in range(KILLS):
            first = number * SLICES * SLICE_EVENTS
            with worker(url) as output:
                turns = [
                    pool.submit(supervisor.turn, name, ids[name], first)
                    for supervisor, name in zip(supervisors, WATCHERS[:: 1 if number % 2 else -1], strict=True)
                ]
                for _ in range(chosen.randint(1, LINES_MAX)):
                    assert output.readline()
            for turn in turns:
                turn.result()
    with worker(url) as output:
        idle = 0
        while idle < IDLE_LINES:
            line = output.readline()
            assert line, "the worker has ended by itself"
            idle = idle + 1 if line == "idle\n" else 0


def check(store: Store) -> None:
    with store.database.reading() as tx:
        rows = tx.connection.execute(text("SELECT watcher, event_id, payload FROM users_bill ORDER BY n")).all()
    for name in WATCHERS:
        mine = [(event_id, payload) for watcher, event_id, payload in rows if watcher == name]
        assert [payload for _, payload in mine] == list(range(EVENTS)), "each once, in order"
        assert [event_id for event_id, _ in mine] == sorted(event_id for event_id, _ in mine)
        assert store.consumers.consumer(f"billing of {name}").handed_over == EVENTS
