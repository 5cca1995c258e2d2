"""A broker in memory with a blocking client, and an adapter for it: what the thread of a producer calls."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import trio
from tests.brokers.fake_broker import ACKED
from tests.waiting import WITHIN_S

from headgate.brokers.held import Delivery
from headgate.brokers.threaded import Received, ThreadedProducer
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome


class BrokerDown(OSError):
    """The connection is lost."""


class BlockingBroker:
    """Keeps messages until they are acknowledged; each connection is given all of them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[str, int] = {}  # and how often each was delivered
        self.acknowledged: list[str] = []
        self.rejected: list[str] = []
        self.extended: list[list[str]] = []
        self.connections = 0
        self.is_connected = False
        self.failures: dict[str, list[Exception]] = {}  # by the method that is to raise them, one after the other
        self.hangs_in: str | None = None
        self.released = threading.Event()
        self.in_hang = threading.Event()
        self.given: set[str] = set()  # to the connection that there is
        self.idles = 0
        self.receiving = 0  # the number of the connection that has received last

    def publish(self, *messages: str) -> None:
        with self.changed:
            self.messages |= dict.fromkeys(messages, 0)
            self.changed.notify_all()

    def fail(self, method: str, *errors: Exception) -> None:
        with self.changed:
            self.failures.setdefault(method, []).extend(errors)

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WITHIN_S), "it did not happen"

    def called(self, method: str) -> None:
        """Do what a test has asked of this call."""
        if self.hangs_in == method:
            self.in_hang.set()
            self.released.wait(WITHIN_S)
        with self.changed:
            self.changed.notify_all()
            if self.failures.get(method):
                raise self.failures[method].pop(0)


class BlockingProducer(ThreadedProducer):
    """The adapter. A message "a:7" is the seventh of the lane "a"."""

    def __init__(self, broker: BlockingBroker, connection: str | None = None, **limits: Any) -> None:
        super().__init__(connection, **{"reconnect_s": 0.001, "retry_s": 0.001, "poll_s": 0.01, **limits})
        self.broker = broker
        self.seen_connections: list[str] = []

    @property
    def name(self) -> str:
        return "the broker of the test"

    def connect(self) -> None:
        if self.connection is not None:
            self.seen_connections.append(self.connection.password)
        self.broker.called("connect")
        with self.broker.changed:
            self.broker.given = set()
            self.broker.connections += 1
            self.broker.is_connected = True

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        broker = self.broker
        broker.receiving = broker.connections
        broker.called("receive")
        with broker.changed:
            broker.changed.wait_for(lambda: broker.messages.keys() - broker.given, wait_s)
            names = [name for name in broker.messages if name not in broker.given][:count_max]
            broker.given.update(names)
            for name in names:
                broker.messages[name] += 1
        return [Received(name, name.upper(), f"key of {name}", name.partition(":")[0], len(name)) for name in names]

    def acknowledge(self, messages: Sequence[Received]) -> None:
        self.broker.called("acknowledge")
        with self.broker.changed:
            for message in messages:
                del self.broker.messages[message.ref]
                self.broker.acknowledged.append(message.ref)
            self.broker.changed.notify_all()

    def reject(self, messages: Sequence[Received]) -> None:
        self.put_aside(messages, self.put)

    def put(self, message: Received) -> None:
        self.broker.called("put")
        self.broker.rejected.append(message.ref)

    def extend(self, refs: Sequence[str]) -> None:
        self.broker.extended.append(list(refs))
        self.broker.called("extend")

    def idle(self) -> None:
        self.broker.idles += 1
        self.broker.called("idle")

    def lag(self) -> int:
        return len(self.broker.messages)

    def disconnect(self) -> None:
        self.broker.is_connected = False
        self.broker.called("disconnect")


class Forgetting(BlockingProducer):
    """Of a broker whose handles end with their connection."""

    handles_survive = False


class WithPlace(BlockingProducer):
    """Of a broker that has a place for rejected messages."""

    keeps_rejected = True


class ForgettingWithPlace(Forgetting):
    """Of a broker of both kinds."""

    keeps_rejected = True


class Cumulative(BlockingProducer):
    """Of a broker that is told of offsets."""

    acknowledges_each = False


class Opened:
    """An open stream, pulled by the test. `close` it by leaving `opened`."""

    def __init__(self, producer: BlockingProducer, stream: AsyncIterator[tuple[Any, Delivery]]) -> None:
        self.producer = producer
        self.broker = producer.broker
        self.stream = stream

    async def next(self, count: int = 1) -> list[Delivery]:
        deliveries = []
        with trio.fail_after(WITHIN_S):
            for _ in range(count):
                raw_event, delivery = await anext(self.stream)
                assert raw_event == delivery.message.ref.upper()
                deliveries.append(delivery)
        return deliveries

    async def advance(self, *deliveries: Delivery, outcome: AdvanceOutcome = ACKED) -> None:
        await self.producer.advance([AdvanceItem(delivery, outcome) for delivery in deliveries])

    async def work(self, outcome: AdvanceOutcome = ACKED) -> None:
        """Advance all there is, for ever."""
        while True:
            await self.advance(*await self.next(), outcome=outcome)

    async def until(self, condition: Callable[[], object]) -> None:
        await trio.to_thread.run_sync(self.broker.wait, condition)


@asynccontextmanager
async def opened(producer: BlockingProducer) -> AsyncIterator[Opened]:
    async with aclosing(producer.open_stream()) as stream:
        try:
            yield Opened(producer, stream)
        finally:
            with trio.CancelScope(shield=True):
                await producer.aclose()


def names(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.message.ref for delivery in deliveries]
