"""A scripted supervisor for a session of the runner, over streams in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from tests.runner.authors import expected, publish
from trio.testing import memory_stream_pair

from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FinishedTrigger,
    FiredEvent,
    FromRunner,
    Hello,
    Refusal,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)
from headgate.protocol.values import encode_value
from headgate.runner.black_box import BlackBox
from headgate.runner.link import AsyncLink
from headgate.runner.session import (
    RunnerSession,
    shake_hands,
)
from headgate.streams.contract import AdvanceItem, AdvanceOutcome, SharedStreamProducer
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

INCARNATION = 3
LEASE_S = 7.0
SETTINGS = RunnerSettings(heartbeat_s=5.0, cancel_grace_s=10.0, hook_timeout_s=5.0)


class Supervisor:
    """The other side, word by word."""

    def __init__(self, stream: trio.abc.Stream, settings: RunnerSettings) -> None:
        self.stream = stream
        self.settings = settings
        self.connection = Connection(RunnerDialect(INCARNATION), Role.SUPERVISOR)
        self.frames: list[StateChanges] = []
        self.events: list[FiredEvent] = []
        self.finished: list[FinishedTrigger] = []
        self.exit_code: int | None = None  # what the session returned
        self.exits: list[int] = []  # what it left the process with
        self.has_ended = trio.Event()

    async def say(self, message: Any) -> None:
        await self.stream.send_all(self.connection.send(message))

    async def hear(self) -> FromRunner | None:
        """The next message, None at the end of the stream."""
        while (message := self.connection.next_message()) is None:
            data = await self.stream.receive_some()
            if not data:
                return None
            self.connection.receive_data(data)
        return message

    async def greet(self) -> None:
        hello = await self.hear()
        assert isinstance(hello, Hello)
        assert (hello.protocol_version, hello.incarnation) == (PROTOCOL_VERSION, INCARNATION)
        await self.say(Welcome(PROTOCOL_VERSION, INCARNATION, self.settings))
        heartbeat = await self.hear()  # the first round asks for the lease, whatever else there is
        assert heartbeat == StateChanges(1)
        await self.answer(heartbeat)

    async def hear_round(self) -> StateChanges:
        """The next frame of a round; its contents are noted."""
        changes = await self.hear()
        assert isinstance(changes, StateChanges)
        self.frames.append(changes)
        self.events += changes.events
        self.finished += changes.finished
        return changes

    async def answer(self, changes: StateChanges) -> None:
        """Everything of this frame is stored."""
        refused = tuple(Refusal(one.seq, one.trigger_id, one.reason, False) for one in changes.refused)
        persisted = tuple(one.seq for one in changes.events if one.seq)
        await self.say(StateSync(changes.round, persisted, refused, lease_s=LEASE_S))

    async def until(self, condition: Callable[[], Any]) -> None:
        """Answer rounds until the condition holds."""
        while not condition():
            changes = await self.hear_round()
            if not changes.more:
                await self.answer(changes)

    async def start(self, cls: type[BaseTrigger], *trigger_ids: int, more: bool = False) -> None:
        await self.say(StateSync(to_create=specs(cls, *trigger_ids), more=more))

    async def drain(self, deadline_s: float = 10.0) -> None:
        """Ask for the end, and answer rounds until the runner closes the link."""
        await self.say(Drain(deadline_s))
        while (message := await self.hear()) is not None:
            assert isinstance(message, StateChanges)
            self.events += message.events
            self.finished += message.finished
            if not message.more:
                await self.answer(message)
        await self.has_ended.wait()


def specs(cls: type[BaseTrigger], *trigger_ids: int) -> tuple[TriggerSpec, ...]:
    classpath, kwargs = publish(cls), encode_value({}, where="kwargs")
    return tuple(
        expected(TriggerSpec(one, f"run-{one}", f"name-{one}", classpath, kwargs)) for one in trigger_ids or (1,)
    )


@asynccontextmanager
async def supervising(
    settings: RunnerSettings = SETTINGS,
    streams: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = memory_stream_pair,
    *,
    greets: bool = True,
) -> AsyncIterator[Supervisor]:
    ours, theirs = streams()
    supervisor = Supervisor(ours, settings)

    async def run() -> None:
        link = AsyncLink(theirs, Connection(RunnerDialect(INCARNATION), Role.RUNNER))
        welcome_settings = await shake_hands(link, INCARNATION)
        session = RunnerSession(
            link, welcome_settings, exit_process=lambda code: supervisor.exits.append(code), box=BlackBox()
        )
        supervisor.exit_code = await session.run()
        await link.aclose()
        supervisor.has_ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        if greets:
            await supervisor.greet()
        yield supervisor
        nursery.cancel_scope.cancel()


class Authored(BaseTrigger):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}


class Sleeper(Authored):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.sleep_forever()
        yield TriggerEvent()


class Broker(SharedStreamProducer):
    """A broker in memory."""

    def __init__(self) -> None:
        self.publish, self._messages = trio.open_memory_channel[int](100)
        self.outcomes: dict[int, list[AdvanceOutcome]] = defaultdict(list)
        self.is_closed = False

    async def open_stream(self) -> AsyncIterator[tuple[int, int]]:
        async for message in self._messages:
            yield message, message

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        for item in batch:
            self.outcomes[item.broker_payload].append(item.outcome)

    def event_key(self, broker_payload: int) -> str | None:
        return f"m{broker_payload}"

    async def aclose(self) -> None:
        self.is_closed = True
        self.publish.close()
        self._messages.close()


def watcher_of(broker: Broker) -> type[BaseEventTrigger]:
    class Watcher(BaseEventTrigger):
        def serialize(self) -> tuple[str, dict[str, Any]]:
            return "", {}

        def shared_stream_key(self) -> str:
            return "stream"

        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            return broker

        def run(self) -> AsyncIterator[TriggerEvent]:
            raise AssertionError

    return Watcher
