"""A fake broker and a watcher on it, for the tests of ack mode: what is sent, and what was advanced."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

import trio

from headgate.streams import Subscription
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome, SharedStreamManager, SharedStreamProducer

ACKED = AdvanceOutcome(acked=1)
FAILED = AdvanceOutcome(failed=1)
REJECTED = AdvanceOutcome(rejected=1)


class Broker(SharedStreamProducer):
    """A fake broker: `send` puts a message in, ``batches`` is what was advanced. The raw event is upper case."""

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()
        self.arrived = trio.lowlevel.ParkingLot()
        self.batches: list[list[AdvanceItem]] = []
        self.advance_gate: Callable[[], Any] | None = None

    def send(self, *payloads: str) -> None:
        self.waiting.extend(payloads)
        self.arrived.unpark_all()

    async def open_stream(self) -> AsyncIterator[tuple[str, str]]:
        while True:
            while self.waiting:
                payload = self.waiting.popleft()
                yield payload.upper(), payload
            await self.arrived.park()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        self.batches.append(list(batch))
        if self.advance_gate is not None:
            await self.advance_gate()

    def get_advance_lane(self, broker_payload: str) -> Hashable:
        return broker_payload[0]

    def event_key(self, broker_payload: str) -> str | None:
        return f"key of {broker_payload}"

    @property
    def advanced(self) -> dict[str, AdvanceOutcome]:
        return {item.broker_payload: item.outcome for batch in self.batches for item in batch}


class Watcher(BaseEventTrigger):
    """An event trigger on the fake broker, with the default filter."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.Watcher", {"broker": self.broker}

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        broker: Broker = kwargs["broker"]
        return broker


async def ask(subscription: Subscription) -> None:
    """Ask for the next raw event, and give up at once: what closes the window is the asking."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(subscription)
    assert scope.cancelled_caught


def subscribe(streams: SharedStreamManager, broker: Broker, trigger_id: int = 1) -> Subscription:
    return streams.subscribe(trigger_id=trigger_id, trigger=Watcher(broker), key="k")


def bind(subscription: Subscription) -> int:
    seq = subscription.bind().seq
    assert seq is not None
    return seq
