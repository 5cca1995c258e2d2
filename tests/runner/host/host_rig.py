"""A host whose outbox the test empties, and a neighbour that must survive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio
from tests.runner.authors import expected, publish
from trio.testing import wait_all_tasks_blocked

from headgate.protocol.messages.queries import StoredEvent
from headgate.protocol.messages.runner import (
    CancelReason,
    CancelTrigger,
    FinishedTrigger,
    FiredEvent,
    RefusedEvent,
    RunnerSettings,
    TriggerSpec,
)
from headgate.protocol.values import encode_value
from headgate.runner.black_box import BlackBox
from headgate.runner.host import Host
from headgate.runner.outbox import Outbox
from headgate.streams.manager import SharedStreamManager
from headgate.triggers.base import (
    BaseTrigger,
    TriggerEvent,
)

SETTINGS = RunnerSettings(cancel_grace_s=10.0, hook_timeout_s=5.0)
REASONS: tuple[CancelReason, ...] = ("user", "timeout", "reassigned", "shutdown")


class Rig:
    """A host whose outbox the test empties."""

    def __init__(self, settings: RunnerSettings, streams: SharedStreamManager, nursery: trio.Nursery) -> None:
        self.outbox = Outbox(events_max=settings.outbox_events_max, round_events_max=settings.round_events_max)
        self.host = Host(
            settings=settings,
            streams=streams,
            outbox=self.outbox,
            nursery=nursery,
            ask_last_event=self._last_event,
            box=BlackBox(),
        )
        self.items: list[FiredEvent | RefusedEvent | FinishedTrigger] = []
        self.stuck: list[int] = []
        self.asked: list[int] = []
        self.earlier: StoredEvent | None = StoredEvent("earlier", 3, b"[1]", "k")

    async def _last_event(self, trigger_id: int) -> StoredEvent | None:
        await trio.lowlevel.checkpoint()
        self.asked.append(trigger_id)
        return self.earlier

    async def start(self, cls: type[BaseTrigger] | str, trigger_id: int = 1, **kwargs: Any) -> None:
        await self._start(cls, trigger_id, kwargs)

    async def start_for_a_task(self, cls: type[BaseTrigger], trigger_id: int = 1) -> None:
        await self._start(cls, trigger_id, {}, takes_one_event=True)

    async def start_for_a_stream(self, cls: type[BaseTrigger], credit: int, trigger_id: int = 1) -> None:
        await self._start(cls, trigger_id, {}, credit=credit)

    async def _start(
        self, cls: type[BaseTrigger] | str, trigger_id: int, kwargs: dict[str, Any], **fields: Any
    ) -> None:
        classpath = cls if isinstance(cls, str) else publish(cls)
        encoded = encode_value(kwargs, where="kwargs")
        spec = expected(TriggerSpec(trigger_id, f"run-{trigger_id}", f"name-{trigger_id}", classpath, encoded))
        await self.host.start((msgspec.structs.replace(spec, **fields),))

    def cancel(self, reason: CancelReason, trigger_id: int = 1) -> None:
        self.host.cancel(CancelTrigger(trigger_id, reason))

    def take(self) -> None:
        while True:
            changes = self.outbox.take_round(1)
            self.stuck += changes.stuck
            if not (changes.events or changes.refused or changes.finished):
                return
            self.items += [*changes.events, *changes.refused, *changes.finished]

    def take_stuck(self) -> list[int]:
        self.take()
        return self.stuck

    def events(self, trigger_id: int = 1) -> list[FiredEvent]:
        self.take()
        return [item for item in self.items if isinstance(item, FiredEvent) and item.trigger_id == trigger_id]

    def refused(self, trigger_id: int = 1) -> list[RefusedEvent]:
        self.take()
        return [item for item in self.items if isinstance(item, RefusedEvent) and item.trigger_id == trigger_id]

    def ends(self, trigger_id: int = 1) -> list[FinishedTrigger]:
        self.take()
        return [item for item in self.items if isinstance(item, FinishedTrigger) and item.trigger_id == trigger_id]

    async def until(self, condition: Callable[[], Any]) -> None:
        with trio.fail_after(1000):
            while not condition():
                await self.outbox.wait_not_empty()

    async def end_of(self, trigger_id: int = 1) -> FinishedTrigger:
        await self.until(lambda: self.ends(trigger_id))
        await wait_all_tasks_blocked()
        (end,) = self.ends(trigger_id)  # once, and only once
        return end


@asynccontextmanager
async def hosting(settings: RunnerSettings = SETTINGS) -> AsyncIterator[Rig]:
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        rig = Rig(settings, streams, nursery)
        try:
            yield rig
        finally:
            # As the session does, and if the test fails, too: a trigger that waits for room or for credit is shielded.
            rig.host.cancel_all("shutdown")
            nursery.cancel_scope.cancel()


class Authored(BaseTrigger):
    """What every trigger here has in common."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}


class Neighbour(Authored):
    """Fires when its bell is rung."""

    bell: trio.MemoryReceiveChannel[None]

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for _ in self.bell:
            yield TriggerEvent("alive")


@asynccontextmanager
async def beside_a_neighbour() -> AsyncIterator[Rig]:
    """A host with a neighbour in it, which must still be alive at the end."""
    ring, Neighbour.bell = trio.open_memory_channel[None](1)
    async with hosting() as rig:
        await rig.start(Neighbour, 99)
        yield rig
        assert rig.ends(99) == []
        ring.send_nowait(None)
        await rig.until(lambda: rig.events(99))
        ring.close()
        Neighbour.bell.close()


async def raise_error(self: Any) -> AsyncIterator[TriggerEvent]:
    raise ValueError("boom")
    yield


async def return_at_once(self: Any) -> AsyncIterator[TriggerEvent]:
    return
    yield
