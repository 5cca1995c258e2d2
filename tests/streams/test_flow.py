"""Shared streams: the fast path, what holds polls back, the drain, fairness, and who may subscribe."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from headgate.streams import Binding, StreamStatistics, Subscription
from headgate.streams import group as group_module
from headgate.triggers.base import BaseEventTrigger, TriggerEvent
from headgate.triggers.shared_stream import (
    AdvanceItem,
    AdvanceOutcome,
    PollTerminated,
    SharedStreamManager,
    SharedStreamProducer,
    SubscriberOverflow,
    reject_shared_stream_event,
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


# --- the fast path -------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Fast, Acking, AckingByInheritance])
async def test_a_filter_sees_the_same_stream_on_the_fast_path_and_in_ack_mode(cls: type[Fast]) -> None:
    broker, seen = Broker(), []
    broker.send("a", "b", "c")
    async with SharedStreamManager() as streams:
        trigger = cls(broker)
        subscription = streams.subscribe(trigger_id=1, trigger=trigger, key="k")
        events = trigger.filter_shared_stream(subscription)
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


# --- hold and grace ------------------------------------------------------------------------------


async def test_while_held_new_streams_do_not_begin_so_that_a_whole_cohort_gets_the_first_event() -> None:
    running, held = Broker(), Broker()
    async with SharedStreamManager() as streams:
        before = subscribe(streams, running, key="running")
        await wait_all_tasks_blocked()
        streams.pause_starts()
        streams.pause_starts()
        held.send("first")
        subscriptions = [subscribe(streams, held, 1)]
        await wait_all_tasks_blocked()
        streams.resume_starts()
        await wait_all_tasks_blocked()
        assert held.pulls == 0
        running.send("a")
        assert await anext(before) == "a"
        subscriptions.append(subscribe(streams, held, 2))
        streams.resume_starts()
        assert [await anext(subscription) for subscription in subscriptions] == ["first", "first"]
        with pytest.raises(RuntimeError, match="without pause_starts"):
            streams.resume_starts()


async def test_the_cohort_grace_period_begins_with_the_first_subscriber(autojump_clock: object) -> None:
    broker = Broker()
    broker.send("first")
    async with SharedStreamManager(cohort_grace_period=2.0) as streams:
        one = subscribe(streams, broker, 1)
        await trio.sleep(1.9)
        assert broker.pulls == 0
        two = subscribe(streams, broker, 2)
        assert [await anext(one), await anext(two)] == ["first", "first"]
        assert trio.current_time() == pytest.approx(2.0)


async def test_a_stream_left_while_it_was_held_never_begins() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        streams.pause_starts()
        subscribe(streams, broker)
        await streams.unsubscribe(1, "k")
        streams.resume_starts()
        await wait_all_tasks_blocked()
        assert broker.pulls == 0


# --- the drain -----------------------------------------------------------------------------------


async def test_after_stop_pulling_nothing_is_pulled_or_handed_out_but_advances_go_on() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        subscription = subscribe(streams, broker)
        broker.send("a", "b")
        await anext(subscription)
        seq = subscription.bind().seq
        assert seq is not None
        await wait_all_tasks_blocked()
        streams.stop_pulling()
        pulls = broker.pulls
        broker.send("c", "d")
        nursery.start_soon(anext, subscription)
        await wait_all_tasks_blocked()
        # The event that was being pulled at that moment still came; nothing was asked for after it.
        assert broker.pulls == pulls
        assert list(broker.waiting) == ["d"]
        streams.confirm_persisted([seq])
        await wait_all_tasks_blocked()
        assert broker.advanced == ["a"]
        assert streams.statistics().queued_events == 2
        nursery.cancel_scope.cancel()


async def test_settled_waits_for_confirmations_and_for_advances_but_not_for_work_in_hand() -> None:
    broker, done = Broker(), trio.Event()
    broker.may_advance = trio.Event()

    async def wait_settled(streams: SharedStreamManager) -> None:
        await streams.settled()
        done.set()

    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        subscription = subscribe(streams, broker)
        broker.send("a", "b", "c")
        await anext(subscription)
        seq = subscription.bind().seq
        assert seq is not None
        await anext(subscription)  # b is in hand, c is queued
        streams.stop_pulling()
        nursery.start_soon(wait_settled, streams)
        await wait_all_tasks_blocked()
        assert not done.is_set()
        streams.confirm_persisted([seq])
        await wait_all_tasks_blocked()
        assert not done.is_set()
        broker.may_advance.set()
        await done.wait()
        assert broker.advanced == ["a"]


async def test_settled_returns_with_the_last_confirmation_of_an_event_still_in_hand() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        subscription = subscribe(streams, broker)
        broker.send("a")
        await anext(subscription)
        seq = subscription.bind().seq
        assert seq is not None
        nursery.start_soon(streams.settled)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        streams.confirm_persisted([seq])
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 0


async def test_settled_does_not_wait_for_what_was_given_up(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscribe(streams, Broker(), 2, key="quiet")
        subscription = subscribe(streams, broker)
        broker.send("a")
        await anext(subscription)
        assert subscription.bind().seq is not None
        await streams.stop_all()
        await streams.settled()
        assert streams.statistics().unconfirmed_seqs == 0


async def test_settled_returns_at_once_where_nothing_is_going_on() -> None:
    async with SharedStreamManager() as streams:
        await streams.settled()


# --- fairness and limits -------------------------------------------------------------------------


async def test_a_full_queue_does_not_keep_other_tasks_from_running() -> None:
    broker, turns = Broker(), []

    async def other() -> None:
        while True:
            turns.append(trio.current_time())
            await trio.lowlevel.checkpoint()

    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        subscription = subscribe(streams, broker)
        broker.send(*map(str, range(1000)))
        await wait_all_tasks_blocked()
        nursery.start_soon(other)
        for _ in range(1000):
            await anext(subscription)
        assert len(turns) >= 1000 // 32 - 1
        nursery.cancel_scope.cancel()


async def test_a_pull_honours_cancellation_even_where_an_event_is_waiting() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a")
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(subscription)
        assert scope.cancelled_caught
        assert await anext(subscription) == "a"


async def test_two_tasks_cannot_pull_from_one_subscription() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        subscription = subscribe(streams, broker)
        nursery.start_soon(anext, subscription)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await anext(subscription)
        nursery.cancel_scope.cancel()


async def test_a_stalled_lane_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "OUTSTANDING_EVENTS_MAX", 10)
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send(*map(str, range(20)))
        seqs = []
        for _ in range(10):
            await anext(subscription)
            seq = subscription.bind().seq
            assert seq is not None
            seqs.append(seq)
        await ask(subscription)
        await wait_all_tasks_blocked()
        assert len(broker.waiting) == 10
        streams.confirm_persisted(seqs)
        await wait_all_tasks_blocked()
        assert len(broker.waiting) == 0


async def test_statistics_count_what_the_manager_holds() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        subscribe(streams, broker, 2)
        broker.send("a", "b")
        await anext(subscription)
        subscription.bind()
        assert streams.statistics() == StreamStatistics(
            groups=1, groups_ending=0, subscribers=2, queued_events=3, outstanding_events=2, unconfirmed_seqs=1
        )


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
