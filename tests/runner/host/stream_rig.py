"""A host with shared streams and a broker in memory; the test stands in for the supervisor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import trio
from tests.runner.authors import expected, publish
from trio.testing import wait_all_tasks_blocked

from headgate.protocol.messages.runner import (
    CancelReason,
    CancelTrigger,
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    RedeliveryEnd,
    RefusedEvent,
    RunnerSettings,
    TriggerSpec,
)
from headgate.protocol.values import encode_value
from headgate.runner.black_box import BlackBox
from headgate.runner.host import Host
from headgate.runner.outbox import Outbox
from headgate.streams.contract import AdvanceItem, AdvanceOutcome, SharedStreamProducer
from headgate.streams.manager import SharedStreamManager
from headgate.triggers.base import BaseEventTrigger, TriggerEvent

ACK_TIMEOUT_S = 60.0
SETTINGS = RunnerSettings(event_bytes_max=100, hook_timeout_s=5.0)

ACKED = AdvanceOutcome(acked=1)
FAILED = AdvanceOutcome(failed=1)
REJECTED = AdvanceOutcome(rejected=1)


class Broker(SharedStreamProducer):
    """A broker in memory: the test publishes, the producer notes what it was told about each message."""

    def __init__(self) -> None:
        self.publish, self._messages = trio.open_memory_channel[int](100)
        self.outcomes: dict[int, list[AdvanceOutcome]] = defaultdict(list)
        self.opened_with: list[dict[str, Any]] = []
        self.names_messages = True

    async def open_stream(self) -> AsyncIterator[tuple[int, int]]:
        async for message in self._messages.clone():
            yield message, message

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        for item in batch:
            self.outcomes[item.broker_payload].append(item.outcome)

    def event_key(self, broker_payload: int) -> str | None:
        return f"m{broker_payload}" if self.names_messages else None

    def close(self) -> None:
        self.publish.close()
        self._messages.close()


class Watcher(BaseEventTrigger):
    """One event a message."""

    broker: Broker

    def __init__(self, key: Any = "stream") -> None:
        self.key = key

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {"key": self.key}

    def shared_stream_key(self) -> Any:
        return self.key

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        cls.broker.opened_with.append(kwargs)
        return cls.broker

    def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("a trigger with a shared stream is filtered, not run")


class Rig:
    """A host and its streams; the test stands in for the supervisor."""

    def __init__(self, settings: RunnerSettings, streams: SharedStreamManager, nursery: trio.Nursery) -> None:
        self.streams = streams
        self.outbox = Outbox(events_max=settings.outbox_events_max, round_events_max=settings.round_events_max)

        async def ask_last_event(trigger_id: int) -> None:
            await trio.lowlevel.checkpoint()

        self.host = Host(
            settings=settings,
            streams=streams,
            outbox=self.outbox,
            nursery=nursery,
            ask_last_event=ask_last_event,
            box=BlackBox(),
        )
        self.broker = Watcher.broker = Broker()
        self.events: list[FiredEvent] = []
        self.refused: list[RefusedEvent] = []
        self.finished: list[FinishedTrigger] = []
        self.described: list[DescribedTrigger] = []
        self.redriven: list[RedeliveryEnd] = []

    async def start(
        self, cls: type[BaseEventTrigger], *trigger_ids: int, credit: int | None = None, **kwargs: Any
    ) -> None:
        classpath, data = publish(cls), encode_value(kwargs, where="kwargs")
        specs = (
            TriggerSpec(one, f"run-{one}", f"name-{one}", classpath, data, credit=credit) for one in trigger_ids or (1,)
        )
        await self.host.start(tuple(expected(spec) for spec in specs))

    async def publish(self, *messages: int) -> None:
        for message in messages:
            self.broker.publish.send_nowait(message)
        await self.settle()

    async def settle(self) -> None:
        await wait_all_tasks_blocked()
        changes = self.outbox.take_round(1)
        self.events += changes.events
        self.refused += changes.refused
        self.finished += changes.finished
        self.described += changes.described
        self.redriven += changes.redriven

    async def confirm(self) -> None:
        self.streams.confirm_persisted([event.seq for event in self.events])
        await self.settle()

    async def cancel(self, reason: CancelReason, trigger_id: int = 1) -> None:
        self.host.cancel(CancelTrigger(trigger_id, reason))
        await self.settle()

    async def until_finished(self, count: int = 1) -> None:
        while len(self.finished) < count:
            await self.outbox.wait_not_empty()
            await self.settle()


@asynccontextmanager
async def hosting(
    settings: RunnerSettings = SETTINGS, *, overflow: Literal["fail", "pause"] = "fail"
) -> AsyncIterator[Rig]:
    async with (
        SharedStreamManager(
            ack_timeout=ACK_TIMEOUT_S,
            advance_timeout=settings.advance_timeout_s,
            overflow=overflow,
            max_subscriber_queue=settings.subscriber_queue_max,
        ) as streams,
        trio.open_nursery() as nursery,
    ):
        rig = Rig(settings, streams, nursery)
        yield rig
        rig.broker.close()
        nursery.cancel_scope.cancel()


class OneByOne(Watcher):
    """Fires for every message but 3, on which it hangs."""

    async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            if message == 3:
                await trio.sleep_forever()
            yield TriggerEvent(message)
