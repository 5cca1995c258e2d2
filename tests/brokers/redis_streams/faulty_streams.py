"""Producers of Redis streams as users might write them, each with a fault that the conformance suite has to find."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.redis_streams import RedisStreamProducer, RedisStreamTrigger
from headgate.brokers.threaded import Received
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome

_deliveries = count(1)


class Hasty(RedisStreamProducer):
    """Acknowledges what it hands out."""

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        messages = super().receive(count_max, wait_s)
        if messages:
            self.acknowledge(messages)
        return messages


class Nameless(RedisStreamProducer):
    """Names a message differently at each delivery."""

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        return [message._replace(key=f"delivery {next(_deliveries)}") for message in super().receive(count_max, wait_s)]


class Forgetful(RedisStreamProducer):
    """It does not ask for what is pending, neither after a new connection nor later."""

    handles_survive = False

    def connect(self) -> None:
        super().connect()
        self._pending_from = None

    def lag(self) -> int | None:
        lag = super().lag()
        self._pending_from = None
        return lag


class Careless(RedisStreamProducer):
    """Acknowledges what a subscriber has failed on."""

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        await super().advance([AdvanceItem(item.broker_payload, AdvanceOutcome(acked=1)) for item in batch])


class Greedy(RedisStreamProducer):
    """Takes more than may be in flight."""

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        return super().receive(1_000, wait_s)


class Throwing(RedisStreamProducer):
    """Throws away what was rejected, in place of putting it aside."""

    def reject(self, messages: Sequence[Received]) -> None:
        self.acknowledge(messages)


class Stubborn(RedisStreamProducer):
    """Takes a source that is gone for an empty one."""

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        try:
            return super().receive(count_max, wait_s)
        except BrokerMisconfigured:
            return []

    def lag(self) -> int | None:
        return None


FAULTY: dict[str, type[RedisStreamProducer]] = {
    cls.__name__: cls for cls in (Hasty, Nameless, Forgetful, Careless, Greedy, Throwing, Stubborn)
}


class FaultyTrigger(RedisStreamTrigger):
    """Reads a stream by one of these producers."""

    def __init__(self, *, fault: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fault = fault

    def serialize(self) -> tuple[str, dict[str, Any]]:
        classpath, kwargs = super().serialize()
        return classpath, kwargs | {"fault": self.fault}

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> RedisStreamProducer:
        return FAULTY[kwargs["fault"]](**{name: value for name, value in kwargs.items() if name != "fault"})
