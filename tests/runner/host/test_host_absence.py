"""Streams wait for triggers that cannot be loaded, and for those that the supervisor names: nothing is lost to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio
from tests.runner.authors import publish
from tests.runner.host.stream_rig import Broker, Rig, Watcher, hosting
from trio.testing import MockClock

from headgate.protocol.messages.runner import AbsentSubscriber, CancelReason, CancelTrigger, TriggerSpec
from headgate.protocol.values import encode_value
from headgate.streams.identity import identify
from headgate.triggers.base import TriggerEvent

STREAM = identify("stream")


class Plain(Watcher):
    """Reads the stream."""

    def __init__(self, key: str = "stream", is_broken: bool = False) -> None:
        if is_broken:
            raise ImportError("a deployment went wrong")
        self.key = key


class Fine(Plain):
    def __init__(self) -> None:
        super().__init__()


class Broken(Plain):
    def __init__(self, is_broken: bool = True) -> None:
        super().__init__(is_broken=is_broken)


class KeyFails(Plain):
    def shared_stream_key(self) -> str:
        raise ValueError("no key")


def spec_of(cls: type[Watcher], trigger_id: int, stream: str | None = STREAM.digest, **kwargs: object) -> TriggerSpec:
    data = encode_value(kwargs, where="kwargs")
    return TriggerSpec(trigger_id, f"run-{trigger_id}", f"name-{trigger_id}", publish(cls), data, stream=stream)


async def start(rig: Rig, *specs: TriggerSpec) -> None:
    rig.streams.pause_starts()
    await rig.host.start(specs)
    rig.streams.resume_starts()
    await rig.settle()


@pytest.mark.parametrize("cls", [Broken, KeyFails])
async def test_a_stream_waits_for_a_trigger_that_cannot_be_loaded(
    autojump_clock: MockClock, cls: type[Watcher]
) -> None:
    async with hosting() as rig:
        await start(rig, spec_of(Fine, 2), spec_of(cls, 1))
        await rig.publish(1)
        await trio.sleep(600.0)
        await rig.settle()
        assert [end.outcome for end in rig.finished] == ["failed"]
        assert rig.events == []
        await start(rig, spec_of(Fine, 1))  # mended
        assert {(event.trigger_id, event.payload) for event in rig.events} == {(1, b"1"), (2, b"1")}


async def test_a_trigger_whose_stream_is_not_known_is_waited_for_by_no_stream(autojump_clock: MockClock) -> None:
    async with hosting() as rig:
        await start(rig, spec_of(Fine, 2), spec_of(Broken, 1, stream=None), spec_of(Broken, 3, stream=""))
        await rig.publish(1)
        assert [event.trigger_id for event in rig.events] == [2]


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_stream_waits_for_a_subscriber_that_its_supervisor_names_until_it_is_started(
    autojump_clock: MockClock, is_first: bool
) -> None:
    async with hosting() as rig:
        if is_first:
            rig.host.expect_absent((AbsentSubscriber(1, STREAM.digest),))
        await start(rig, spec_of(Fine, 2))
        if not is_first:
            rig.host.expect_absent((AbsentSubscriber(1, STREAM.digest),))
        await rig.publish(1)
        await trio.sleep(600.0)
        await rig.settle()
        assert rig.events == []
        await start(rig, spec_of(Fine, 1))
        assert {event.trigger_id for event in rig.events} == {1, 2}


@pytest.mark.parametrize("reason", ["user", "timeout", "reassigned"])
async def test_the_wait_for_an_absent_subscriber_ends_with_its_cancellation(
    autojump_clock: MockClock, reason: CancelReason
) -> None:
    async with hosting() as rig:
        rig.host.expect_absent(
            (
                AbsentSubscriber(1, STREAM.digest),
                AbsentSubscriber(3, "another"),
            )
        )
        await start(rig, spec_of(Fine, 2))
        await rig.publish(1)
        assert rig.events == []
        await rig.cancel(reason, 1)
        assert [event.trigger_id for event in rig.events] == [2]


async def test_a_trigger_that_is_held_while_it_runs_misses_nothing(autojump_clock: MockClock) -> None:
    """Its supervisor cancels it and names it in one message; it leaves its stream only after that."""
    async with hosting() as rig:
        await start(rig, spec_of(Fine, 1), spec_of(Fine, 2))
        rig.host.cancel(CancelTrigger(1, "reassigned"))
        rig.host.expect_absent((AbsentSubscriber(1, STREAM.digest),))
        await rig.publish(1)
        assert rig.events == []
        await start(rig, spec_of(Fine, 1))
        assert {event.trigger_id for event in rig.events} == {1, 2}


async def test_a_trigger_that_returns_after_its_stream_has_failed_is_waited_for_no_more(
    autojump_clock: MockClock,
) -> None:
    """The supervisor starts it no more, and has nothing to say of it."""

    class Failing(Broker):
        async def open_stream(self) -> AsyncIterator[tuple[int, int]]:
            async for message in self._messages.clone():
                if message == 99:
                    raise ConnectionError("gone")
                yield message, message

    class OneShot(Fine):
        async def filter_shared_stream(self, shared_stream: Any) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                await trio.sleep(1)
                if message == 2:
                    yield TriggerEvent(message)

    async with hosting() as rig:
        rig.broker = Watcher.broker = Failing()
        await start(rig, msgspec.structs.replace(spec_of(OneShot, 1), takes_one_event=True), spec_of(Fine, 2))
        await rig.publish(1, 2, 99)
        await trio.sleep(10)
        await rig.settle()
        assert {end.trigger_id: end.outcome for end in rig.finished} == {1: "returned", 2: "failed"}
        await start(rig, spec_of(Fine, 2))
        await rig.publish(3)
        await rig.settle()
        assert rig.streams.statistics().stalls == ()
        assert rig.events[-1].payload == b"3"
