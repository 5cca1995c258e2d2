"""The right to advance brokers: what is answered while the lease is held, and what waits for it (I10)."""

from __future__ import annotations

import pytest
import trio
from tests.brokers.fake_broker import ACKED, Broker, ask, bind, subscribe
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.streams.group_settings import LEASE_WAIT_S
from headgate.streams.lease import Lease
from headgate.triggers.shared_stream import SharedStreamManager


class Asked:
    """Counts how often a round was asked for."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


async def skip_one(streams: SharedStreamManager, broker: Broker) -> None:
    """Have a message go by that fires nothing, and so needs no confirmation."""
    broker.send("a")
    subscription = subscribe(streams, broker)
    await anext(subscription)
    await ask(subscription)
    await wait_all_tasks_blocked()


async def test_what_fired_nothing_is_advanced_while_the_lease_is_held(autojump_clock: MockClock) -> None:
    broker, asked = Broker(), Asked()
    lease = Lease(request_round=asked)
    async with SharedStreamManager(lease=lease) as streams:
        lease.renew(trio.current_time(), 5.0)
        await trio.sleep(4.9)
        await skip_one(streams, broker)
        assert broker.advanced == {"a": ACKED}
        assert asked.times == 0


@pytest.mark.parametrize("renewed_before_s", [5.0, 100.0])
async def test_and_waits_for_an_answer_to_a_round_that_was_sent_since(
    autojump_clock: MockClock, renewed_before_s: float
) -> None:
    broker, asked = Broker(), Asked()
    lease = Lease(request_round=asked)
    async with SharedStreamManager(lease=lease) as streams:
        lease.renew(trio.current_time(), 5.0)
        await trio.sleep(renewed_before_s)
        await skip_one(streams, broker)
        assert broker.batches == []
        assert lease.is_wanted
        assert asked.times == 1
        lease.renew(trio.current_time() - 5.0, 5.0)  # an answer that took too long is worth nothing
        lease.renew(trio.current_time(), 0.0)  # nor is one of a supervisor that is not sure of its lease itself
        await wait_all_tasks_blocked()
        assert broker.batches == []
        assert lease.is_wanted
        assert asked.times == 1, "who asks again at once would ask for ever"
        lease.renew(trio.current_time() - 4.9, 5.0)
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a": ACKED}
        assert not lease.is_wanted


async def test_what_was_confirmed_waits_as_well(autojump_clock: MockClock) -> None:
    broker, asked = Broker(), Asked()
    lease = Lease(request_round=asked)
    async with SharedStreamManager(lease=lease) as streams:
        broker.send("a")
        subscription = subscribe(streams, broker)
        await anext(subscription)
        seq = bind(subscription)
        await ask(subscription)
        streams.confirm_persisted([seq])
        await wait_all_tasks_blocked()
        assert broker.batches == []
        lease.renew(trio.current_time(), 5.0)
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a": ACKED}


async def test_what_gathers_meanwhile_is_advanced_together(autojump_clock: MockClock) -> None:
    broker = Broker()
    lease = Lease(request_round=Asked())
    async with SharedStreamManager(lease=lease) as streams:
        broker.send("a1", "a2", "a3")
        subscription = subscribe(streams, broker)
        for _ in range(3):
            await anext(subscription)
            await wait_all_tasks_blocked()
        await ask(subscription)
        lease.renew(trio.current_time(), 5.0)
        await wait_all_tasks_blocked()
        assert [[item.broker_payload for item in batch] for batch in broker.batches] == [["a1", "a2", "a3"]]


async def test_a_lease_that_is_given_up_comes_never_back(autojump_clock: MockClock) -> None:
    broker, asked = Broker(), Asked()
    lease = Lease(request_round=asked)
    async with SharedStreamManager(lease=lease) as streams:
        lease.renew(trio.current_time(), 5.0)
        lease.give_up()
        lease.renew(trio.current_time(), 5.0)
        await skip_one(streams, broker)
        assert broker.batches == []
        assert asked.times == 0
        assert not lease.is_wanted
        with trio.fail_after(0.1):
            await streams.stop_all()
        assert broker.batches == []


async def test_who_waits_for_a_lease_that_is_given_up_waits_no_longer(autojump_clock: MockClock) -> None:
    broker = Broker()
    lease = Lease(request_round=Asked())
    async with SharedStreamManager(lease=lease) as streams:
        await skip_one(streams, broker)
        assert lease.is_wanted
        lease.give_up()
        with trio.fail_after(0.1):
            await streams.unsubscribe(1, "k")
            await streams.stop_all()
        assert broker.batches == []


async def test_an_answer_that_grants_less_takes_nothing_away(autojump_clock: MockClock) -> None:
    lease = Lease(request_round=Asked())
    lease.renew(trio.current_time(), 5.0)
    await trio.sleep(1.0)
    lease.renew(trio.current_time(), 0.0)
    assert lease.is_held
    await trio.sleep(4.0)
    assert not lease.is_held


async def test_a_supervisor_that_tells_nothing_sets_no_limit_until_it_does(autojump_clock: MockClock) -> None:
    lease = Lease(request_round=Asked())
    lease.renew(trio.current_time(), None)
    await trio.sleep(10_000.0)
    assert lease.is_held
    lease.renew(trio.current_time(), 5.0)
    assert lease.is_held
    await trio.sleep(5.0)
    assert not lease.is_held


async def test_a_stream_that_has_ended_waits_for_the_lease_a_moment(autojump_clock: MockClock) -> None:
    broker = Broker()
    lease = Lease(request_round=Asked())
    async with SharedStreamManager(lease=lease) as streams:
        await skip_one(streams, broker)
        await trio.sleep(100.0)
        await streams.settled()  # nobody knows whether the lease will come
        async with trio.open_nursery() as nursery:
            nursery.start_soon(streams.unsubscribe, 1, "k")
            await trio.sleep(LEASE_WAIT_S / 2)
            lease.renew(trio.current_time(), 5.0)
        assert broker.advanced == {"a": ACKED}
        await trio.sleep(10.0)
        broker.send("b")
        subscription = subscribe(streams, broker)
        await anext(subscription)
        await ask(subscription)
        begun_at = trio.current_time()
        await streams.unsubscribe(1, "k")
        assert trio.current_time() - begun_at == pytest.approx(LEASE_WAIT_S, abs=0.01)
        assert "b" not in broker.advanced
