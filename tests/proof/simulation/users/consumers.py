"""Programs of users that consume events: workers that take batches into a table, raise, and die; and the cleaner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio
from sqlalchemy import Connection
from tests.proof.simulation import database, records
from tests.proof.simulation.database import said_in
from tests.proof.simulation.processes import Died

from headgate.client.consumer import Consumer
from headgate.store.cleaning import ASKED, UNASKED
from headgate.store.consuming.reading import Event
from headgate.store.errors import NoSuchRow

if TYPE_CHECKING:
    from tests.proof.simulation.world import World

RESTART_S = 0.3  # from the death of a worker to the start of another in its place
ROWS_CLEANED_AT_ONCE = 3  # few, so that there are several transactions of the cleaner


class UsersError(Exception):
    """What the code of a user raises in the middle of a batch."""


class SimulatedConsumer:
    """One consumer with its workers. All of it is the client's, except the processes."""

    def __init__(self, world: World, number: int) -> None:
        self.plan = world.scenario.consumers[number]
        self._world = world
        self._name = f"c{number + 1}"
        self._batches = 0
        self._is_resting = False
        self._rows: tuple[int, ...] = ()  # of the batch that is being taken

    async def work(self, worker: int) -> None:
        """Take batches for ever, in one process after the other."""
        rng = random.Random(f"{self._world.scenario.seed}/{self._name}/{worker}")
        await trio.sleep_until(self.plan.begins_at)
        while True:
            try:
                consumer = self.open()
                while True:
                    await trio.sleep(rng.uniform(0.0, 2.0 * self.plan.pause_s))
                    await trio.sleep_until(max(trio.current_time(), self._world.weather.database_back_at))
                    self._take(consumer, worker)
            except Died:
                await trio.sleep(RESTART_S)

    def open(self) -> Consumer:
        """Begin as every process of a worker does."""
        return database.open_client().add_consumer(
            self._name, self.plan.watcher, max_deliveries=self.plan.max_deliveries
        )

    def redeliver(self) -> None:
        """Have everything handed over again that was set aside, as a user's command does."""
        self._world.note(records.AskedFor(trio.current_time(), self._name))
        with database.open_store() as store:
            try:
                store.consumers.redeliver(self._name)
            except NoSuchRow:
                pass  # it has not begun
        self._look()

    def catch_up(self, consumer: Consumer) -> None:
        """Take everything that is left, while a cleaner deletes whatever it may; nothing goes wrong any more."""
        self._is_resting = True
        _clean()
        self.redeliver()
        while self._take(consumer, self.plan.workers):
            _clean()
        self._world.note(records.Caught(trio.current_time(), self._name, self.plan.watcher))

    def _take(self, consumer: Consumer, worker: int) -> int:
        """Take one batch; return how many events it has."""
        if not self._is_resting:
            self._world.look()
        self._batches += 1
        number = 0 if self._is_resting else self._batches
        self._rows = ()
        try:
            with consumer.batch(self.plan.limit) as batch:
                self._rows = tuple(event.id for event in batch)
                for place, event in enumerate(batch):
                    if place == len(batch) // 2 and number in self.plan.dies:
                        raise Died("the middle of the user's rows")
                    if place == len(batch) // 2 and number in self.plan.fails:
                        self._fail()
                    self._bill(batch.connection, event, worker)
        except UsersError:
            pass
        except Died:
            self._world.note(records.NotTaken(trio.current_time(), self._name, self._rows, has_died=True))
            raise
        except Exception as error:
            self._world.broke("the user's program", error)
            self._rows = ()
        finally:
            self._look()
        return len(self._rows)

    def _bill(self, connection: Connection, event: Event, worker: int) -> None:
        said = said_in(event.data)
        if said["message"] in self.plan.unfit and trio.current_time() < self.plan.mended_at:
            self._fail()
        row = (self._name, worker, event.id, event.trigger_id, event.key, said["handout"])
        connection.exec_driver_sql(_INSERT, row)

    def _fail(self) -> None:
        self._world.note(records.NotTaken(trio.current_time(), self._name, self._rows, has_died=False))
        raise UsersError("the user's code fails as planned")

    def _look(self) -> None:
        for taken in self._world.reader.look_at_taken():
            self._world.note(taken)
        for letter in self._world.reader.look_at_set_aside():
            self._world.note(letter)


def catch_up(consumers: Sequence[SimulatedConsumer]) -> None:
    """Have all consumers come to the end, one after the other, when everything has come to rest."""
    for consumer, opened in [(consumer, consumer.open()) for consumer in consumers]:
        consumer.catch_up(opened)


def _clean() -> None:
    """Delete every row that may go at its age, keyed events, too: no message is delivered again any more."""
    with database.open_store() as store:
        kinds = [kind for kind in (*UNASKED, *ASKED) if "dead_letters" not in kind]
        for _ in store.cleaning.clean(0.0, kinds=kinds, rows_max=ROWS_CLEANED_AT_ONCE):
            pass


_INSERT = "INSERT INTO taken (consumer, worker, event_id, trigger_id, key, handout) VALUES (?, ?, ?, ?, ?, ?)"
