"""Triggers of the host in shared streams that fail, and joining."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest
import trio
from tests.runner.host.stream_rig import ACK_TIMEOUT_S, OneByOne, Watcher, hosting
from trio.testing import MockClock

from headgate.protocol.messages.runner import (
    RunnerSettings,
)
from headgate.streams.contract import AdvanceOutcome, SharedStreamProducer
from headgate.triggers.base import BaseEventTrigger, TriggerEvent

# --- a stream's own failures ---------------------------------------------------------------------


async def test_a_slow_subscriber_is_failed_alone_by_the_ack_timeout(autojump_clock: MockClock) -> None:
    class Trigger(OneByOne):
        pass

    class Second(Watcher):
        pass

    async with hosting() as rig:
        await rig.start(Trigger, 1)
        await rig.start(Second, 2)
        await rig.publish(3, 4)
        await rig.confirm()
        await rig.until_finished()
        (end,) = rig.finished
        assert (end.trigger_id, end.outcome) == (1, "failed")
        assert end.error.startswith("AckTimeout: ")
        assert trio.current_time() == pytest.approx(ACK_TIMEOUT_S, abs=2)
        await rig.publish(5)
        assert [e.payload for e in rig.events if e.trigger_id == 2] == [b"3", b"4"]  # it waits for the other
        await rig.cancel("user", 1)
        await rig.confirm()
        assert rig.broker.outcomes[3] == [AdvanceOutcome(acked=1, failed=1)]
        assert [e.payload for e in rig.events if e.trigger_id == 2] == [b"3", b"4", b"5"]


async def test_a_trigger_that_waits_for_room_when_the_ack_timeout_comes_ends_without_room(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        pass

    async with hosting(RunnerSettings(outbox_events_max=1)) as rig:
        await rig.start(Trigger)
        rig.broker.publish.send_nowait(1)
        await rig.host.wait_all_ended()  # though nobody takes a round
        await rig.settle()
        assert rig.finished[0].error.startswith("AckTimeout: ")


async def test_a_trigger_that_waits_for_the_store_is_not_failed_for_holding_the_fast_path(
    autojump_clock: MockClock,
) -> None:
    class Counting(BaseEventTrigger):
        def __init__(self, fires: bool) -> None:
            self.fires = fires

        def serialize(self) -> tuple[str, dict[str, Any]]:
            return "", {"fires": self.fires}

        def shared_stream_key(self) -> str:
            return "stream"

        @classmethod
        async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[int]:
            for number in range(100):
                yield number
            await trio.sleep_forever()

        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncGenerator[TriggerEvent, None]:
            async for number in shared_stream:
                if self.fires:
                    yield TriggerEvent(number)

        def run(self) -> AsyncIterator[TriggerEvent]:
            raise NotImplementedError

    async with hosting(RunnerSettings(outbox_events_max=1, subscriber_queue_max=2), overflow="pause") as rig:
        await rig.start(Counting, 1, fires=True)
        await rig.start(Counting, 2, fires=False)
        await trio.sleep(10 * ACK_TIMEOUT_S)  # the database is away: nobody takes a round
        assert len(rig.host) == 2
        before = len(rig.outbox)
        await rig.settle()
        assert [event.payload for event in rig.events] == [b"0"] * before


async def test_a_stream_that_cannot_be_opened_fails_its_triggers_with_the_cause(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            raise ConnectionError("no broker here")

    async with hosting() as rig:
        await rig.start(Trigger, 1, 2)
        await rig.until_finished(2)
        assert {end.trigger_id for end in rig.finished} == {1, 2}
        for end in rig.finished:
            assert end.outcome == "failed"
            assert end.error.startswith("PollTerminated: ")
            assert "ConnectionError: no broker here" in end.traceback


async def test_a_trigger_whose_stream_ended_is_failed_even_if_it_catches_that_and_returns(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            raise ConnectionError("no broker here")

        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(0)
            try:
                async for message in shared_stream:
                    yield TriggerEvent(message)
            except Exception:
                return

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.until_finished()
        assert [(end.outcome, end.events) for end in rig.finished] == [("failed", 1)]


@pytest.mark.parametrize(
    ("shared_stream_key", "error"),
    [
        (lambda self: ["unhashable"], "TypeError: unhashable type: 'list'"),
        (lambda self: sys.exit(3), "SystemExit: 3"),
        (
            lambda self: object(),
            "TypeError: shared_stream_key() contains a builtins.object whose repr contains the address",
        ),
    ],
    ids=["unhashable", "exits", "not the same elsewhere"],
)
async def test_a_trigger_with_a_bad_stream_key_fails_alone_and_is_cleaned_up(
    autojump_clock: MockClock, shared_stream_key: Callable[[Any], Any], error: str
) -> None:
    cleanups: list[str] = []

    class Trigger(Watcher):
        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            raise ConnectionError("no broker here")

        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            raise ValueError("filtered")
            yield

        async def cleanup(self) -> None:
            cleanups.append("cleanup")

    class Second(Watcher):
        pass

    Trigger.shared_stream_key = shared_stream_key  # type: ignore[assignment, method-assign]
    async with hosting() as rig:
        await rig.start(Second, 2)
        await rig.start(Trigger, 1)
        await rig.until_finished()
        (end,) = rig.finished
        assert (end.trigger_id, end.outcome) == (1, "failed")
        assert end.error.startswith(error)
        assert cleanups == ["cleanup"]
        await rig.publish(1)
        assert [event.trigger_id for event in rig.events] == [2]


# --- joining -------------------------------------------------------------------------------------


async def test_all_triggers_of_one_assignment_get_the_very_first_message(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        pass

    async with hosting() as rig:
        rig.broker.publish.send_nowait(1)
        rig.streams.pause_starts()
        await rig.start(Trigger, *range(1, 251))
        rig.streams.resume_starts()
        await rig.settle()
        assert len(rig.events) == 250
        assert len({event.trigger_id for event in rig.events}) == 250
        assert len(rig.broker.opened_with) == 1


async def test_a_subscriber_that_failed_is_waited_for_and_misses_nothing(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        failures = 1

        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if type(self).failures:
                    type(self).failures -= 1
                    raise ValueError("once")
                yield TriggerEvent(message)

    class Second(Watcher):
        pass

    async with hosting() as rig:
        await rig.start(Second, 2)
        await rig.start(Trigger, 1)
        await rig.publish(1)
        assert len(rig.finished) == 1
        await rig.publish(2)
        assert [event.payload for event in rig.events if event.trigger_id == 2] == [b"1"]
        await rig.start(Trigger, 1)
        await rig.settle()
        assert [event.payload for event in rig.events if event.trigger_id == 1] == [b"2"]
        assert [event.payload for event in rig.events if event.trigger_id == 2] == [b"1", b"2"]


async def test_nobody_waits_for_a_trigger_that_was_removed_after_it_failed(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for _message in shared_stream:
                raise ValueError("always")
            yield TriggerEvent()

    class Second(Watcher):
        pass

    async with hosting() as rig:
        await rig.start(Second, 2)
        await rig.start(Trigger, 1)
        await rig.publish(1)
        await rig.publish(2)
        assert len(rig.events) == 1
        await rig.cancel("user", 1)  # it does not run, but its rejoin is awaited
        assert len(rig.events) == 2
