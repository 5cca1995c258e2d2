"""What delays a stream: starts, grace, the drain; fairness and limits."""

from __future__ import annotations

import pytest
import trio
from tests.streams.flow_rig import Broker, ask, subscribe
from trio.testing import wait_all_tasks_blocked

from headgate.streams import StreamStatistics
from headgate.streams import group as group_module
from headgate.triggers.shared_stream import (
    SharedStreamManager,
)

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
