"""Ack mode: when the manager gives up on a subscriber, and that nobody else notices."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import structlog
import trio
from structlog.testing import capture_logs
from tests.brokers.fake_broker import ACKED, Broker, Watcher, ask, bind, subscribe
from trio.testing import wait_all_tasks_blocked

from headgate.streams import Binding
from headgate.streams.stalls import STALL_REPORT_AGAIN_S, STALL_REPORT_S, Stall
from headgate.triggers.shared_stream import (
    AckTimeout,
    AdvanceOutcome,
    PollTerminated,
    SharedStreamManager,
    SubscriberOverflow,
)

# --- ack timeout and overflow --------------------------------------------------------------------


async def test_the_ack_timeout_fails_only_the_slow_subscriber_and_frees_all_it_owes(autojump_clock: object) -> None:
    broker = Broker()
    failures: list[Exception] = []
    async with SharedStreamManager(ack_timeout=10) as streams:
        slow, quick = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        slow.on_failed = failures.append
        start = trio.current_time()
        broker.send("a1", "a2", "b3")
        assert await anext(slow) == "A1"
        for _ in range(3):
            await anext(quick)
        await ask(quick)
        await trio.sleep(9.99)
        assert broker.advanced == {}
        assert failures == []
        await trio.sleep_until(start + 10.1)
        both = AdvanceOutcome(acked=1, failed=1)
        assert broker.advanced == {"a1": both, "a2": both, "b3": both}
        assert [type(failure) for failure in failures] == [AckTimeout]
        # What it was working on is still recognised when it is delivered again, but nothing waits for it.
        assert slow.bind() == Binding(None, "key of a1", 0)
        with pytest.raises(AckTimeout, match=r"within 10 s"):
            await anext(slow)
        broker.send("a4")
        assert await anext(quick) == "A4"
        await ask(quick)
        await wait_all_tasks_blocked()
        assert broker.advanced["a4"] == ACKED


async def test_the_ack_timeout_is_due_when_elapsed_equals_it(autojump_clock: object) -> None:
    now = 100.0
    broker = Broker()
    failures: list[Exception] = []
    async with SharedStreamManager(ack_timeout=7, _now=lambda: now) as streams:
        subscription = subscribe(streams, broker)
        subscription.on_failed = failures.append
        broker.send("a1")
        await wait_all_tasks_blocked()
        now = 106.999
        await trio.sleep(5)
        assert failures == []
        now = 107.0
        await trio.sleep(5)
        assert len(failures) == 1


async def test_a_confirmation_that_never_comes_is_an_ack_timeout_and_a_late_one_is_ignored(
    autojump_clock: object,
) -> None:
    broker = Broker()
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscribe(streams, broker, 2)
        subscription = subscribe(streams, broker, 1)
        broker.send("a1")
        await anext(subscription)
        seq = bind(subscription)
        with pytest.raises(AckTimeout):
            await anext(subscription)
        streams.confirm_persisted([seq])
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": AdvanceOutcome(failed=2)}


async def test_the_confirmed_events_of_a_waiting_subscriber_never_time_out(autojump_clock: object) -> None:
    broker = Broker()
    failures: list[Exception] = []
    async with SharedStreamManager(ack_timeout=10) as streams:
        subscription = subscribe(streams, broker)
        subscription.on_failed = failures.append
        broker.send("a1")
        await anext(subscription)
        streams.confirm_persisted([bind(subscription)])
        await ask(subscription)
        await trio.sleep(1000)
        assert failures == []


async def test_an_overflow_fails_only_the_slow_subscriber_and_counts_the_overflowing_event() -> None:
    broker = Broker()
    failures: list[Exception] = []
    async with SharedStreamManager(max_subscriber_queue=2) as streams:
        slow, quick = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        slow.on_failed = failures.append
        for name in ("a1", "a2", "a3"):
            broker.send(name)
            await anext(quick)
        await ask(quick)
        await wait_all_tasks_blocked()
        both = AdvanceOutcome(acked=1, failed=1)
        assert broker.advanced == {"a1": both, "a2": both, "a3": both}
        assert [type(failure) for failure in failures] == [SubscriberOverflow]
        with pytest.raises(SubscriberOverflow):
            await anext(slow)


async def test_a_subscriber_that_was_failed_can_subscribe_again() -> None:
    broker = Broker()
    async with SharedStreamManager(max_subscriber_queue=1) as streams:
        slow, quick = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        for name in ("a1", "a2"):
            broker.send(name)
            await anext(quick)
        with pytest.raises(SubscriberOverflow):
            await anext(slow)
        again = subscribe(streams, broker, 1)
        broker.send("a3")
        assert await anext(again) == "A3"


async def test_an_on_failed_that_raises_harms_nobody() -> None:
    broker = Broker()

    def broken(failure: Exception) -> None:
        raise ValueError("on_failed is broken")

    async with SharedStreamManager(max_subscriber_queue=1, log=structlog.get_logger()) as streams:
        slow, quick = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        slow.on_failed = broken
        for name in ("a1", "a2", "a3"):
            broker.send(name)
            assert await anext(quick) == name.upper()


@pytest.mark.parametrize("overflow", ["fail", "pause"])
async def test_filters_run_while_open_stream_never_awaits(overflow: Any) -> None:
    broker, seen = Broker(), []
    broker.send(*(f"a{number}" for number in range(200)))
    async with SharedStreamManager(max_subscriber_queue=1, overflow=overflow) as streams:
        subscription = subscribe(streams, broker)
        async for raw_event in subscription:
            seen.append(raw_event)
            if len(seen) == 200:
                break
    assert seen == [f"A{number}" for number in range(200)]


async def test_in_pause_mode_a_full_queue_stops_the_poll_until_there_is_room() -> None:
    broker = Broker()
    async with SharedStreamManager(max_subscriber_queue=2, overflow="pause") as streams:
        slow, quick = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        broker.send("a1", "a2", "a3", "a4")
        await wait_all_tasks_blocked()
        assert list(broker.waiting) == ["a3", "a4"]
        await anext(quick)
        await wait_all_tasks_blocked()
        assert list(broker.waiting) == ["a3", "a4"]
        await anext(slow)
        await wait_all_tasks_blocked()
        assert list(broker.waiting) == ["a4"]
        await streams.unsubscribe(1, "k")
        assert [await anext(quick) for _ in range(2)] == ["A2", "A3"]
        await wait_all_tasks_blocked()
        assert list(broker.waiting) == []


async def test_in_pause_mode_the_ack_timeout_ends_the_pause(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager(max_subscriber_queue=1, overflow="pause", ack_timeout=10) as streams:
        stuck, quick = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        broker.send("a1", "a2")
        assert await anext(quick) == "A1"
        assert await anext(quick) == "A2"
        assert trio.current_time() == pytest.approx(10, abs=0.01)
        with pytest.raises(AckTimeout):
            await anext(stuck)


async def test_the_statistics_and_the_log_say_who_holds_whom(autojump_clock: object) -> None:
    broker = Broker()
    with capture_logs() as logs:
        async with SharedStreamManager(max_subscriber_queue=1, overflow="pause", ack_timeout=1000) as streams:
            slow, quick = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
            assert streams.statistics().stalls == ()
            broker.send("a1", "a2")
            assert await anext(quick) == "A1"
            await trio.sleep(STALL_REPORT_S - 2)
            assert streams.statistics().stalls == (Stall("'k'", "full queue", (1,)),)
            assert logs == []
            await trio.sleep(STALL_REPORT_AGAIN_S + 5)
            assert [await anext(slow) for _ in range(2)] == ["A1", "A2"]
            assert await anext(quick) == "A2"
            await trio.sleep(2)
            assert streams.statistics().stalls == ()
    waits = [entry for entry in logs if entry["event"] == "a shared stream waits for its subscribers"]
    assert [(entry["reason"], entry["trigger_ids"]) for entry in waits] == [("full queue", [1])] * 2
    assert [entry["event"] for entry in logs if entry not in waits] == ["a shared stream continues"]


async def test_who_is_slow_but_alive_is_not_reported(autojump_clock: object) -> None:
    broker = Broker()
    broker.send(*(f"a{number}" for number in range(100)))
    with capture_logs() as logs:
        async with SharedStreamManager(max_subscriber_queue=4, overflow="pause", ack_timeout=100) as streams:
            slow = subscribe(streams, broker)
            for _ in range(60):
                await anext(slow)
                await trio.sleep(0.37)
    assert logs == []


async def test_a_key_whose_hash_fails_by_now_ends_no_other_stream(autojump_clock: object) -> None:
    class Key:
        is_broken = False

        def __hash__(self) -> int:
            if self.is_broken:
                raise RuntimeError("no hash any more")
            return 1

    key, broker = Key(), Broker()
    async with SharedStreamManager(ack_timeout=10) as streams:
        streams.subscribe(trigger_id=1, trigger=Watcher(Broker()), key=key)
        subscription = subscribe(streams, broker, 2)
        streams.expect_rejoin(trigger_id=3, key="elsewhere")
        await trio.sleep(1.5)
        key.is_broken = True
        await trio.sleep(3)
        assert len(streams.statistics().stalls) == 0
        key.is_broken = False
        broker.send("a1")
        assert await anext(subscription) == "A1"


# --- what an author's objects do ------------------------------------------------------------------


class Changing(list[int]):
    """A lane hashed by its content, which its author goes on to change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


class OneLane(Broker):
    lane = Changing([1])

    def get_advance_lane(self, broker_payload: str) -> Hashable:
        return self.lane


async def test_a_lane_whose_hash_changes_ends_its_stream_and_nothing_else() -> None:
    bad, good = OneLane(), Broker()
    async with SharedStreamManager() as streams:
        one = subscribe(streams, bad)
        other = streams.subscribe(trigger_id=2, trigger=Watcher(good), key="another")
        bad.send("a1", "a2")
        good.send("b1", "b2")
        assert (await anext(one), await anext(other)) == ("A1", "B1")
        bad.lane.append(2)
        assert await anext(one) == "A2"
        with pytest.raises(PollTerminated) as ended:
            await anext(one)
        assert isinstance(ended.value.__cause__, KeyError)
        assert await anext(other) == "B2"
