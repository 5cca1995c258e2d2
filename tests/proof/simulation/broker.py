"""The simulated broker: lanes of messages with one committed offset each, one reader at a time, cumulative commits.

Its producer keeps its books with the file log's own (`headgate.brokers.filelogs.partition`), in offsets of messages
instead of bytes: it rewinds to what failed, and commits what was acknowledged or rejected before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import trio
from tests.proof.simulation import records
from tests.proof.simulation.scenario import Message
from tests.proof.simulation.wire import Bell

from headgate.brokers.filelogs.partition import FileLogPosition, Partition
from headgate.protocol import values
from headgate.triggers.shared_stream import AdvanceItem, SharedStreamProducer

if TYPE_CHECKING:
    from tests.proof.simulation.processes import RunnerProcess
    from tests.proof.simulation.world import World

REWIND_DELAY_S = 0.1
REWIND_DELAY_MAX_S = 1.0


class BrokerFails(Exception):
    """The broker has failed, as a fault says."""


OPAQUE_LANE = 2  # its messages cannot be kept as dead letters


class Delivery(NamedTuple):
    """The raw event: one message, handed out once."""

    message: str
    lane: int
    offset: int
    handout: int


def _encoded(delivery: Delivery) -> list[str | int]:
    if delivery.lane == OPAQUE_LANE:
        raise ValueError("messages of this lane have no form on the wire")
    return list(delivery)


def _given_again(fields: list[Any]) -> Delivery:
    """Return the message of a dead letter as the runner gives it to its trigger: it is another handout."""
    from tests.proof.simulation.processes import running_in

    delivery, runner = Delivery(*fields), running_in.get()
    runner.world.broker.handouts += 1
    again = delivery._replace(handout=runner.world.broker.handouts)
    runner.note(records.Redelivered(trio.current_time(), again.handout, again.lane, again.offset))
    return again


values.register(Delivery, "delivery", _encoded, _given_again)


class Place(NamedTuple):
    """The broker payload."""

    position: FileLogPosition
    lane: int
    handout: int


def message_name(lane: int, offset: int) -> str:
    """Return the broker's own name of a message."""
    return f"{lane}:{offset}"


class Broker:
    """What outlives every reader: the messages, and how far each lane is committed."""

    def __init__(self, world: World, lanes: Sequence[Sequence[Message]]) -> None:
        self._world = world
        self.lanes = lanes
        self.published = [0] * len(lanes)
        self.committed = [0] * len(lanes)
        self.handouts = 0
        self.readers = 0
        self.holder: SimulatedProducer | None = None
        self.released = trio.lowlevel.ParkingLot()

    def publish_due(self) -> None:
        """Publish what is due."""
        now = trio.current_time()
        for lane, messages in enumerate(self.lanes):
            while self.published[lane] < len(messages) and messages[self.published[lane]].publish_at <= now:
                self._world.note(records.Published(now, lane, self.published[lane]))
                self.published[lane] += 1

    def next_publish_at(self) -> float:
        """When the next message is due."""
        times = [
            messages[published].publish_at
            for messages, published in zip(self.lanes, self.published, strict=True)
            if published < len(messages)
        ]
        return min(times, default=math.inf)

    def commit(self, reader: int, lane: int, before: int) -> None:
        """Forget every message of the lane before an offset."""
        if before != self.committed[lane]:
            self.committed[lane] = before
            self._world.note(records.Committed(trio.current_time(), reader, lane, before))
            self._world.look_at_rest()

    @property
    def is_empty(self) -> bool:
        """Whether everything there will ever be is committed."""
        return all(committed == len(messages) for committed, messages in zip(self.committed, self.lanes, strict=True))


class SimulatedProducer(SharedStreamProducer):
    """One reader: one poll of one group of one runner."""

    def __init__(self, runner: RunnerProcess) -> None:
        self._runner = runner
        self._world = runner.world
        self._broker = broker = runner.world.broker
        broker.readers += 1
        self.number = broker.readers
        # Which lane comes next is drawn from the seed and the reader: lanes overtake one another.
        self._rng = random.Random(f"{self._world.scenario.seed}/reader/{self.number}")
        self._partitions: list[Partition] = []
        self._bell = Bell()
        self._is_over = False
        runner.producers.append(self)

    async def open_stream(self) -> AsyncGenerator[tuple[Delivery, Place], None]:
        """Hand out what is not committed, then what is published, for ever."""
        await self._take_hold()
        broker = self._broker
        in_flight_max = self._world.scenario.topology.in_flight_max
        self._partitions = [
            Partition(str(lane), committed, rewind_delay_s=REWIND_DELAY_S, rewind_delay_max_s=REWIND_DELAY_MAX_S)
            for lane, committed in enumerate(broker.committed)
        ]
        self._runner.note(records.Opened(trio.current_time(), self.number, self._runner.number))
        while True:
            if self._world.weather.stream_fails:
                self._world.weather.stream_fails = False
                raise BrokerFails("the broker has thrown its reader out")
            broker.publish_due()
            now = trio.current_time()
            wanted = [
                lane
                for lane, partition in enumerate(self._partitions)
                if partition.position < broker.published[lane] and partition.in_flight < in_flight_max
            ]
            ready = [lane for lane in wanted if self._partitions[lane].not_before <= now]
            if not ready:
                times = [self._partitions[lane].not_before for lane in wanted]
                await self._bell.wait_until(min(times, default=broker.next_publish_at()))
                continue
            lane = self._rng.choice(ready)
            offset = self._partitions[lane].position
            place = Place(self._partitions[lane].hand_out(offset, offset + 1), lane, self._next_handout())
            self._runner.note(records.HandedOut(now, self.number, place.handout, lane, offset))
            yield Delivery(message_name(lane, offset), lane, offset, place.handout), place

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Commit up to the first failed message and rewind to it; or fail, as the faults say."""
        if self._runner.is_dead:
            return
        places: list[Place] = [item.broker_payload for item in batch]
        items = tuple(
            records.AdvancedItem(place.handout, item.outcome.acked, item.outcome.failed, item.outcome.rejected)
            for place, item in zip(places, batch, strict=True)
        )
        self._world.look()
        self._runner.note(records.AdvanceBegan(trio.current_time(), self.number, items))
        failed = True
        try:
            await self._advance(
                places[0].lane, [AdvanceItem(p.position, i.outcome) for p, i in zip(places, batch, strict=True)]
            )
            failed = False
        finally:
            self._runner.note(records.AdvanceEnded(trio.current_time(), self.number, failed))

    async def _advance(self, lane: int, batch: list[AdvanceItem]) -> None:
        weather = self._world.weather
        fault, weather.advance_fails = weather.advance_fails, None
        seconds, weather.advance_hangs_s = weather.advance_hangs_s, 0.0
        if seconds:
            await self._runner.nap(seconds)
        if fault is not None and not fault.after_commit:
            raise BrokerFails("the broker does not take the commit")
        if self._is_over:
            return
        partition = self._partitions[lane]
        verdict = partition.judge(batch)
        if verdict.failed_at is not None:
            partition.rewind(verdict.failed_at, trio.current_time())
        else:
            partition.in_flight -= verdict.resolved
        partition.commit(verdict.commit_to)
        self._broker.commit(self.number, lane, verdict.commit_to)
        self._bell.ring()
        if fault is not None:
            raise BrokerFails("the broker has committed, and its answer is lost")

    def get_advance_lane(self, broker_payload: Place) -> int:
        """Return the lane."""
        return broker_payload.lane

    def event_key(self, broker_payload: Place) -> str | None:
        """Return the name of the message; None where the topology's broker has no names."""
        if not self._world.scenario.topology.keyed:
            return None
        return message_name(broker_payload.lane, broker_payload.position.offset)

    async def aclose(self) -> None:
        """Let the next reader in."""
        self._runner.note(records.Closed(trio.current_time(), self.number))
        self.let_go()

    def let_go(self) -> None:
        """Give the broker up, as the kernel does for a process that died."""
        self._is_over = True
        if self._broker.holder is self:
            self._broker.holder = None
            self._broker.released.unpark_all()

    def wake(self) -> None:
        """Have the stream look at the faults."""
        self._bell.ring()

    async def _take_hold(self) -> None:
        while self._broker.holder is not None and not self._is_over:
            await self._broker.released.park()
        if self._is_over:
            await trio.sleep_forever()  # its process has died; whoever unwinds it cancels this
        self._broker.holder = self

    def _next_handout(self) -> int:
        self._broker.handouts += 1
        return self._broker.handouts
