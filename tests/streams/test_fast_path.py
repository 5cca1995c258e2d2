"""The fast path, and subscribing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.streams.flow_rig import Acking, AckingByInheritance, Broker, Fast, subscribe
from trio.testing import wait_all_tasks_blocked

from headgate.streams import Binding, StreamStatistics
from headgate.triggers.base import BaseEventTrigger, TriggerEvent
from headgate.triggers.shared_stream import (
    PollTerminated,
    SharedStreamManager,
    SubscriberOverflow,
    reject_shared_stream_event,
)

# --- the fast path -------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Fast, Acking, AckingByInheritance])
async def test_a_filter_sees_the_same_stream_on_the_fast_path_and_in_ack_mode(cls: type[Fast]) -> None:
    broker, seen = Broker(), []
    broker.send("a", "b", "c")
    async with SharedStreamManager() as streams:
        trigger = cls(broker)
        subscription = streams.subscribe(trigger_id=1, trigger=trigger, key="k")
        events = trigger.filter_shared_stream(subscription)
        assert isinstance(events, AsyncGenerator)
        for _ in range(3):
            seen.append((await anext(events)).payload)
        assert (subscription.bind().seq is None) == (cls is Fast)
        await events.aclose()
    assert seen == ["a", "b", "c"]


async def test_the_fast_path_keeps_no_books() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker, cls=Fast)
        broker.send("a")
        await anext(subscription)
        assert subscription.bind() == Binding(None, None, 0)
        assert streams.bind_pending_event(trigger_id=1, key="k") is None
        with capture_logs() as logs:
            reject_shared_stream_event()
        assert [entry["log_level"] for entry in logs] == ["warning"]
        assert streams.statistics() == StreamStatistics(1, 0, 1, 0, 0, 0)


async def test_the_fast_path_never_times_out_but_overflows(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager(ack_timeout=1, max_subscriber_queue=1) as streams:
        slow, quick = (subscribe(streams, broker, number, cls=Fast) for number in (1, 2))
        broker.send("a")
        await trio.sleep(100)
        assert await anext(quick) == "a"
        broker.send("b")
        assert await anext(quick) == "b"
        with pytest.raises(SubscriberOverflow):
            await anext(slow)


async def test_in_pause_mode_who_alone_holds_the_fast_path_is_failed_after_the_ack_timeout(
    autojump_clock: object,
) -> None:
    broker = Broker()
    async with SharedStreamManager(max_subscriber_queue=2, overflow="pause", ack_timeout=10) as streams:
        stuck, quick = (subscribe(streams, broker, number, cls=Fast) for number in (1, 2))
        broker.send("a1", "a2", "a3")
        assert [await anext(quick) for _ in range(3)] == ["a1", "a2", "a3"]
        assert trio.current_time() == pytest.approx(10, abs=0.01)
        with pytest.raises(SubscriberOverflow, match="nothing was pulled for 10 s"):
            await anext(stuck)


async def test_in_pause_mode_nobody_is_failed_who_holds_nobody_else(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager(max_subscriber_queue=1, overflow="pause", ack_timeout=10) as streams:
        one, two = (subscribe(streams, broker, number, cls=Fast) for number in (1, 2))
        broker.send("a1", "a2")
        await trio.sleep(100)
        assert [await anext(each) for each in (one, two, one, two)] == ["a1", "a1", "a2", "a2"]


async def test_in_pause_mode_nobody_is_failed_for_waiting_for_the_store(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager(max_subscriber_queue=1, overflow="pause", ack_timeout=10) as streams:
        waiting, quick = (subscribe(streams, broker, number, cls=Fast) for number in (1, 2))
        broker.send("a1", "a2", "a3")
        assert await anext(waiting) == "a1"
        waiting.waits_for_store = True
        assert [await anext(quick) for _ in range(2)] == ["a1", "a2"]
        await trio.sleep(100)
        waiting.waits_for_store = False
        await trio.sleep(5)
        assert await anext(waiting) == "a2"
        await trio.sleep(8)
        assert await anext(waiting) == "a3"


async def test_in_pause_mode_nobody_is_failed_in_a_drain(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager(max_subscriber_queue=1, overflow="pause", ack_timeout=10) as streams:
        slow, quick = (subscribe(streams, broker, number, cls=Fast) for number in (1, 2))
        failures: list[Exception] = []
        slow.on_failed = failures.append
        broker.send("a1", "a2")
        assert await anext(quick) == "a1"
        await trio.sleep(1)
        streams.stop_pulling()
        await trio.sleep(100)
        assert failures == []


async def test_in_pause_mode_who_is_slow_and_pulls_is_not_failed(autojump_clock: object) -> None:
    broker, seen = Broker(), []
    broker.send(*(f"a{number}" for number in range(8)))
    async with SharedStreamManager(max_subscriber_queue=1, overflow="pause", ack_timeout=10) as streams:
        slow = subscribe(streams, broker, cls=Fast)
        for _ in range(8):
            seen.append(await anext(slow))
            await trio.sleep(9)
    assert seen == [f"a{number}" for number in range(8)]


async def test_what_was_broadcast_comes_before_the_end_of_the_stream_on_the_fast_path() -> None:
    class Ending(Fast):
        @classmethod
        async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Any]:
            yield "a"
            yield "b"
            raise OSError("gone")

    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, Broker(), cls=Ending)
        await wait_all_tasks_blocked()
        assert [await anext(subscription), await anext(subscription)] == ["a", "b"]
        with pytest.raises(PollTerminated):
            await anext(subscription)


async def test_a_trigger_with_a_key_and_no_stream_is_told_what_to_override() -> None:
    class Neither(BaseEventTrigger):
        def serialize(self) -> tuple[str, dict[str, Any]]:
            return "tests.Neither", {}

        def run(self) -> AsyncIterator[TriggerEvent]:
            raise NotImplementedError

    async with SharedStreamManager() as streams:
        subscription = streams.subscribe(trigger_id=1, trigger=Neither(), key="k")
        with pytest.raises(PollTerminated) as caught:
            await anext(subscription)
        assert "overrides neither open_shared_stream" in str(caught.value.__cause__)


# --- subscribing -----------------------------------------------------------------------------------


async def test_the_kwargs_of_the_first_subscriber_win() -> None:
    first, second = Broker(), Broker()
    async with SharedStreamManager() as streams:
        one, two = subscribe(streams, first, 1), subscribe(streams, second, 2)
        first.send("a")
        second.send("b")
        assert (await anext(one), await anext(two)) == ("a", "a")
    assert second.pulls == 0


async def test_subscribing_twice_outside_the_manager_or_without_a_key_is_refused() -> None:
    broker = Broker()
    streams = SharedStreamManager()
    with pytest.raises(RuntimeError, match="async with"):
        subscribe(streams, broker)
    async with streams:
        subscribe(streams, broker)
        with pytest.raises(ValueError, match="trigger 1 is already subscribed"):
            subscribe(streams, broker)
        with pytest.raises(ValueError, match="cannot be None"):
            streams.subscribe(trigger_id=1, trigger=Acking(broker), key=None)
    with pytest.raises(RuntimeError, match="closed"):
        subscribe(streams, broker)


@pytest.mark.parametrize(
    "arguments",
    [{"max_subscriber_queue": 0}, {"ack_timeout": 0}, {"cohort_grace_period": -1}, {"overflow": "drop"}],
    ids=str,
)
def test_a_limit_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        SharedStreamManager(**arguments)


async def test_a_serialize_that_fails_leaves_no_group_behind() -> None:
    class Unserializable(Acking):
        def serialize(self) -> tuple[str, dict[str, Any]]:
            raise ValueError("no kwargs")

    broker = Broker()
    broker.send("a")
    async with SharedStreamManager() as streams:
        with pytest.raises(ValueError, match="no kwargs"):
            streams.subscribe(trigger_id=1, trigger=Unserializable(broker), key="k")
        assert streams.statistics().groups == 0
        assert await anext(subscribe(streams, broker)) == "a"


async def test_what_the_body_raises_leaves_the_manager_unwrapped() -> None:
    broker = Broker()
    broker.send("a")

    async def body() -> None:
        async with SharedStreamManager() as streams:
            await anext(subscribe(streams, broker))
            raise ValueError("from the body")

    with pytest.raises(ValueError, match="from the body"):
        await body()
