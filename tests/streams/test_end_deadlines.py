"""A stream that has ended: its subscribers come to its end in their own time, but they do come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.brokers.fake_broker import Broker, subscribe
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.streams import Subscription
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.shared_stream import AckTimeout, PollTerminated, SharedStreamManager


class Dying(Broker):
    """A broker whose stream fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_failing = False

    def fail(self) -> None:
        self.is_failing = True
        self.send("the end")

    def get_advance_lane(self, broker_payload: str) -> str:
        if self.is_failing:
            raise ConnectionError("the broker is gone")
        return "a lane"


async def at_work(
    streams: SharedStreamManager, broker: Broker, *payloads: str
) -> tuple[Subscription, list[tuple[float, str]]]:
    """Subscribe, send, and pull the first; return what the subscriber is failed with, and when."""
    failures: list[tuple[float, str]] = []
    subscription = subscribe(streams, broker)
    subscription.on_failed = lambda error: failures.append((trio.current_time(), type(error).__name__))
    broker.send(*payloads)
    assert await anext(subscription) == payloads[0].upper()
    return subscription, failures


async def test_who_hangs_when_the_stream_fails_is_failed_an_ack_timeout_later(autojump_clock: MockClock) -> None:
    broker = Dying()
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscription, failures = await at_work(streams, broker, "a", "b")
        await trio.sleep_until(8.0)
        broker.fail()
        await wait_all_tasks_blocked()
        assert failures == [(8.0, "PollTerminated")]
        await trio.sleep_until(17.9)
        assert len(failures) == 1
        await trio.sleep_until(18.1)
        assert [(round(at, 1), name) for at, name in failures[1:]] == [(18.0, "AckTimeout")]
        with pytest.raises(AckTimeout, match="within 10 s"):
            await anext(subscription)


async def test_who_goes_on_pulling_has_the_time_anew_for_each_event(autojump_clock: MockClock) -> None:
    broker = Dying()
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscription, failures = await at_work(streams, broker, "a", "b", "c")
        await wait_all_tasks_blocked()
        broker.fail()
        for expected in ("B", "C"):
            await trio.sleep(8.0)
            assert await anext(subscription) == expected
        await trio.sleep(8.0)
        with pytest.raises(PollTerminated):
            await anext(subscription)
        await trio.sleep(8.0)  # it may clean up
        await streams.unsubscribe(1, "k")
        await trio.sleep(100.0)
        assert [name for _, name in failures] == ["PollTerminated"]


async def test_who_has_heard_of_the_end_and_pulls_again_for_ever_is_failed(autojump_clock: MockClock) -> None:
    broker = Dying()
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscription, failures = await at_work(streams, broker, "a")
        broker.fail()
        for _ in range(9):
            with pytest.raises(PollTerminated):
                await anext(subscription)
            await trio.sleep(1.0)
        assert [name for _, name in failures] == ["PollTerminated"]
        await trio.sleep(2.1)
        assert [name for _, name in failures] == ["PollTerminated", "AckTimeout"]


async def test_who_has_left_is_not_failed(autojump_clock: MockClock) -> None:
    broker = Dying()
    async with SharedStreamManager(ack_timeout=10) as streams:
        _, failures = await at_work(streams, broker, "a")
        broker.fail()
        await trio.sleep(5.0)
        await streams.unsubscribe(1, "k")
        await trio.sleep(100.0)
        assert [name for _, name in failures] == ["PollTerminated"]


async def test_who_waits_for_the_store_is_not_to_blame(autojump_clock: MockClock) -> None:
    broker = Dying()
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscription, failures = await at_work(streams, broker, "a")
        subscription.waits_for_store = True
        broker.fail()
        await trio.sleep(100.0)
        assert [name for _, name in failures] == ["PollTerminated"]
        subscription.waits_for_store = False
        await trio.sleep(11.0)
        assert [name for _, name in failures] == ["PollTerminated", "AckTimeout"]


class Fast(BaseEventTrigger):
    """A trigger of the fast path, whose stream fails after two events."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.Fast", {}

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[str]:
        yield "a"
        yield "b"
        raise ConnectionError("the feed is gone")


async def test_on_the_fast_path_a_filter_may_take_its_time(autojump_clock: MockClock) -> None:
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscription = streams.subscribe(trigger_id=1, trigger=Fast(), key="k")
        failures: list[str] = []
        subscription.on_failed = lambda error: failures.append(type(error).__name__)
        assert await anext(subscription) == "a"
        await trio.sleep(100.0)
        assert failures == ["PollTerminated"]
        assert await anext(subscription) == "b"


async def test_on_the_fast_path_a_filter_is_failed_while_the_next_stream_waits_for_it(
    autojump_clock: MockClock,
) -> None:
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscription = streams.subscribe(trigger_id=1, trigger=Fast(), key="k")
        failures: list[str] = []
        subscription.on_failed = lambda error: failures.append(type(error).__name__)
        assert await anext(subscription) == "a"
        await trio.sleep(100.0)
        streams.expect_rejoin(trigger_id=1, key="k")
        other = streams.subscribe(trigger_id=2, trigger=Fast(), key="k")
        with trio.move_on_after(5.0):
            await anext(other)
        assert failures == ["PollTerminated"]
        assert streams.statistics().queued_events == 0
        with trio.move_on_after(6.0):
            await anext(other)
        assert failures == ["PollTerminated", "AckTimeout"]
        streams.cancel_rejoin(1)  # it has ended, and will not come back
        assert await anext(other) == "a"
