"""A broker in memory and triggers in three modes, for the tests of flow."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import trio

from headgate.streams import Subscription
from headgate.triggers.base import BaseEventTrigger, TriggerEvent
from headgate.triggers.shared_stream import (
    AdvanceItem,
    AdvanceOutcome,
    SharedStreamManager,
    SharedStreamProducer,
)


class Broker(SharedStreamProducer):
    """A fake broker; ``pulls`` counts how often its stream was asked for something."""

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()
        self.arrived = trio.lowlevel.ParkingLot()
        self.advanced: list[str] = []
        self.may_advance = trio.Event()
        self.may_advance.set()
        self.pulls = 0

    def send(self, *payloads: str) -> None:
        self.waiting.extend(payloads)
        self.arrived.unpark_all()

    async def raw_events(self) -> AsyncGenerator[str, None]:
        while True:
            self.pulls += 1
            while not self.waiting:
                await self.arrived.park()
            yield self.waiting.popleft()

    async def open_stream(self) -> AsyncIterator[tuple[str, str]]:
        async with aclosing(self.raw_events()) as raw_events:
            async for raw_event in raw_events:
                yield raw_event, raw_event

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        await self.may_advance.wait()
        assert all(item.outcome == AdvanceOutcome(acked=1) for item in batch)
        self.advanced.extend(item.broker_payload for item in batch)


class Fast(BaseEventTrigger):
    """An event trigger of the fast path, whose filter is the one of ack mode as well."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"tests.{type(self).__name__}", {"broker": self.broker}

    def run(self) -> AsyncIterator[TriggerEvent]:
        raise NotImplementedError

    @classmethod
    def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        broker: Broker = kwargs["broker"]
        return broker.raw_events()


class Acking(Fast):
    """The same in ack mode: nothing but the factory is added."""

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        broker: Broker = kwargs["broker"]
        return broker


class AckingByInheritance(Acking):
    """Overrides nothing itself."""


def subscribe(
    streams: SharedStreamManager, broker: Broker, trigger_id: int = 1, cls: type[Fast] = Acking, key: str = "k"
) -> Subscription:
    return streams.subscribe(trigger_id=trigger_id, trigger=cls(broker), key=key)


async def ask(subscription: Subscription) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(subscription)
