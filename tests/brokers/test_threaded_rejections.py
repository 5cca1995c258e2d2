"""A producer with a blocking client: what becomes of rejected messages, with and without a place for them."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import structlog
import trio
from tests.brokers.blocking_broker import (
    BlockingBroker,
    BlockingProducer,
    BrokerDown,
    Cumulative,
    ForgettingWithPlace,
    Opened,
    WithPlace,
    names,
    opened,
)
from tests.brokers.fake_broker import ACKED, REJECTED

from headgate.brokers import broker_thread
from headgate.brokers.threaded import BrokerError, PlaceRefuses
from headgate.triggers.shared_stream import AdvanceItem


@pytest.fixture
def broker() -> BlockingBroker:
    return BlockingBroker()


async def test_a_rejected_message_goes_to_the_brokers_place_if_there_is_one(broker: BlockingBroker) -> None:
    broker.publish("a:1", "a:2")
    async with opened(WithPlace(broker)) as stream:
        await stream.advance(*await stream.next(2), outcome=REJECTED)
        await stream.until(lambda: broker.acknowledged == ["a:1", "a:2"])
        assert broker.rejected == ["a:1", "a:2"]


async def test_a_place_that_refuses_a_message_costs_no_connection_and_holds_up_its_lane_only(
    broker: BlockingBroker,
) -> None:
    broker.publish("a:1", "a:2", "b:1", "c:1")
    broker.fail("put", PlaceRefuses("it is full"))
    async with opened(WithPlace(broker)) as stream:
        first, second, other, accepted = await stream.next(4)
        items = [AdvanceItem(each, REJECTED) for each in (first, second, other)]
        await stream.producer.advance([*items, AdvanceItem(accepted, ACKED)])
        await stream.until(lambda: broker.acknowledged == ["b:1", "c:1"])
        again = await stream.next(2)
        assert names(again) == ["a:1", "a:2"]
        await stream.advance(*again, outcome=REJECTED)
        await stream.until(lambda: broker.acknowledged == ["b:1", "c:1", "a:1", "a:2"])
        assert broker.rejected == ["b:1", "a:1", "a:2"]
        statistics = stream.producer.statistics()
        assert (statistics.connections, statistics.rejected, statistics.held) == (1, 3, 0)


async def test_a_place_that_takes_no_message_for_long_ends_the_stream_with_the_reason(broker: BlockingBroker) -> None:
    broker.publish("a:1")
    broker.fail("put", *[PlaceRefuses("it is full")] * 10_000)
    async with opened(WithPlace(broker, give_up_s=0.01)) as stream:
        with pytest.raises(BrokerError, match=r"of the test: no rejected message could .* for 0\.01 s: .*it is full"):
            await stream.work(REJECTED)
    assert broker.connections == 1


async def reject_one(stream: Opened) -> None:
    """Reject "a:1" each time it comes, while others are published and acknowledged on each connection."""
    for number in range(10_000):
        (delivery,) = await stream.next()
        if delivery.message.ref == "a:1":
            stream.broker.publish(f"b:{number}")
            (other,) = await stream.next()
            await stream.producer.advance([AdvanceItem(other, ACKED), AdvanceItem(delivery, REJECTED)])


async def test_a_connection_that_ends_at_each_rejection_is_made_anew_less_and_less_often(
    broker: BlockingBroker,
) -> None:
    broker.publish("a:1")
    broker.fail("put", *[BrokerDown("gone")] * 6)
    producer = ForgettingWithPlace(broker, reconnect_s=0.01)
    with structlog.testing.capture_logs() as records:
        async with opened(producer) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(reject_one, stream)
            await stream.until(lambda: "a:1" in broker.acknowledged)
            nursery.cancel_scope.cancel()
    waits = [record["again_in_s"] for record in records if "again_in_s" in record]
    assert len(waits) == 6
    assert waits[-1] > 0.1


async def test_connections_that_end_at_each_rejection_for_long_end_the_stream(broker: BlockingBroker) -> None:
    broker.publish("a:1")
    broker.fail("put", *[BrokerDown("gone")] * 10_000)
    async with opened(ForgettingWithPlace(broker, reconnect_max_s=0.01, give_up_s=0.05)) as stream:
        with pytest.raises(BrokerError, match=r"no rejected message could be put aside for 0\.05 s: .*gone"):
            await reject_one(stream)
    assert broker.connections > 1
    assert broker.acknowledged


async def test_a_rejection_that_fails_now_and_then_ends_no_stream(
    broker: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, ticks = 0.0, count()
    monkeypatch.setattr(broker_thread, "time", SimpleNamespace(monotonic=lambda: now_s + next(ticks) / 1_000))
    async with opened(WithPlace(broker, give_up_s=300.0)) as stream:
        for ref in ("a:1", "a:2", "a:3"):
            broker.fail("put", PlaceRefuses("it is full"))
            broker.publish(ref)
            await stream.advance(*await stream.next(), outcome=REJECTED)
            await stream.until(lambda: not broker.failures["put"])
            now_s += 400.0
            await stream.advance(*await stream.next())  # a filter that takes it the second time
        await stream.until(lambda: broker.acknowledged == ["a:1", "a:2", "a:3"])


async def test_a_rejected_message_without_a_place_stays_unacknowledged_and_the_stream_goes_on(
    broker: BlockingBroker,
) -> None:
    broker.publish("a:1", "a:2")
    async with opened(BlockingProducer(broker)) as stream:
        first, second = await stream.next(2)
        with structlog.testing.capture_logs() as records:
            await stream.advance(first, outcome=REJECTED)
            await stream.advance(second)
            await stream.until(lambda: broker.acknowledged == ["a:2"])
        assert ["rejected messages stay unacknowledged"] == [record["event"] for record in records]
        broker.fail("receive", BrokerDown("gone"))
        await stream.until(lambda: broker.connections == 2)
        broker.publish("a:3")
        assert names(await stream.next()) == ["a:3"], "it is delivered again, and not handed out again"
    assert list(broker.messages) == ["a:1", "a:3"]


async def test_an_offset_cannot_pass_a_message_that_nobody_has(broker: BlockingBroker) -> None:
    broker.publish("a:1", "a:2")
    async with opened(Cumulative(broker)) as stream:
        first, second = await stream.next(2)
        await stream.advance(first, outcome=REJECTED)
        await stream.advance(second)
        with pytest.raises(BrokerError, match="message key of a:1 is rejected, its dead letter is not whole"):
            await stream.next()
    assert broker.acknowledged == []


async def test_what_is_held_is_extended_while_others_are_put_aside(
    broker: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_thread, "REJECT_MAX", 1)
    broker.publish("a:1", "b:1", "c:1", "d:1")
    async with opened(WithPlace(broker, extend_s=1e-9)) as stream:
        await stream.advance(*(await stream.next(4))[:3], outcome=REJECTED)
        await stream.until(lambda: len(broker.acknowledged) == 3)
    assert ["b:1", "c:1", "d:1"] in broker.extended, "between the first and the second"
