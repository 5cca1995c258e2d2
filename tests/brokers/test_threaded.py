"""A producer with a blocking client: what its thread does, and when, with a broker in memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import structlog
import trio
from tests.brokers.blocking_broker import (
    BlockingBroker,
    BlockingProducer,
    BrokerDown,
    Forgetting,
    names,
    opened,
)
from tests.brokers.fake_broker import FAILED
from tests.waiting import WITHIN_S

from headgate.brokers import broker_thread
from headgate.brokers.threaded import BrokerError, BrokerMisconfigured, BrokerUnreachable, oversized
from headgate.child import queries
from headgate.protocol.messages.queries import QueryResult, SecretText
from headgate.triggers.shared_stream import AdvanceOutcome, Undecodable

FOREVER_S = 1e9


@pytest.fixture
def broker() -> BlockingBroker:
    return BlockingBroker()


async def test_a_message_is_acknowledged_after_its_advance_and_not_before(broker: BlockingBroker) -> None:
    broker.publish("a:1", "a:2", "b:1")
    async with opened(BlockingProducer(broker)) as stream:
        deliveries = await stream.next(3)
        assert names(deliveries) == ["a:1", "a:2", "b:1"]
        assert [stream.producer.get_advance_lane(delivery) for delivery in deliveries] == ["a", "a", "b"]
        assert stream.producer.event_key(deliveries[0]) == "key of a:1"
        assert broker.acknowledged == []
        await stream.advance(deliveries[0])
        await stream.until(lambda: broker.acknowledged == ["a:1"])
        await stream.advance(*deliveries[1:])
        await stream.until(lambda: broker.acknowledged == ["a:1", "a:2", "b:1"])
    assert not broker.is_connected


@pytest.mark.parametrize("outcome", [FAILED, AdvanceOutcome(), AdvanceOutcome(acked=2, failed=1)])
async def test_a_failed_message_comes_again_with_those_behind_it_in_its_lane(
    broker: BlockingBroker, outcome: AdvanceOutcome
) -> None:
    broker.publish("a:1", "a:2", "a:3", "b:1")
    async with opened(BlockingProducer(broker)) as stream:
        first, second, third, other = await stream.next(4)
        await stream.advance(first)
        await stream.advance(second, outcome=outcome)
        await stream.advance(third)  # its outcome counts for nothing: the lane begins anew at the second
        await stream.advance(other)
        again = await stream.next(2)
        assert names(again) == ["a:2", "a:3"]
        await stream.until(lambda: broker.acknowledged == ["a:1", "b:1"])
        await stream.advance(*again)
        await stream.until(lambda: broker.acknowledged == ["a:1", "b:1", "a:2", "a:3"])
        assert stream.producer.statistics().redelivered == 2
    assert broker.messages == {}


async def test_no_more_messages_are_taken_than_may_be_in_flight_and_the_connection_is_kept_alive(
    broker: BlockingBroker,
) -> None:
    broker.publish(*(f"{number}:" for number in range(10)))
    async with opened(BlockingProducer(broker, in_flight_max=4)) as stream:
        deliveries = await stream.next(4)
        await stream.until(lambda: broker.idles > 3)
        assert sum(broker.messages.values()) == 4
        await stream.advance(*deliveries[:3])
        await stream.next(3)
        assert stream.producer.statistics().held == 4


async def test_no_more_bytes_are_held_than_may_be(broker: BlockingBroker) -> None:
    broker.publish("a:1")
    async with opened(BlockingProducer(broker, in_flight_bytes_max=3)) as stream:
        (delivery,) = await stream.next()
        broker.publish("a:2")
        await stream.until(lambda: broker.idles > 3)
        await stream.advance(delivery)
        assert names(await stream.next()) == ["a:2"]


async def test_after_a_lost_connection_what_is_held_is_not_handed_out_twice_and_is_still_acknowledged(
    broker: BlockingBroker,
) -> None:
    broker.publish("a:1", "a:2")
    async with opened(BlockingProducer(broker)) as stream:
        deliveries = await stream.next(2)
        broker.fail("receive", BrokerDown("gone"), BrokerDown("and again"))
        await stream.until(lambda: broker.connections == 3)
        broker.publish("a:3")
        assert names(await stream.next()) == ["a:3"], "the others were delivered again, and were recognised"
        assert broker.messages["a:1"] > 1
        broker.fail("acknowledge", BrokerDown("gone"))
        await stream.advance(*deliveries)
        await stream.until(lambda: broker.acknowledged == ["a:1", "a:2"])
        assert stream.producer.statistics().connections == 4


async def test_handles_that_end_with_their_connection_are_not_used_on_the_next_one(broker: BlockingBroker) -> None:
    broker.publish("a:1")
    async with opened(Forgetting(broker)) as stream:
        (stale,) = await stream.next()
        broker.fail("receive", BrokerDown("gone"))
        (again,) = await stream.next()
        await stream.advance(stale)
        broker.publish("a:2")
        await stream.next()
        assert broker.acknowledged == []
        await stream.advance(again)
        await stream.until(lambda: broker.acknowledged == ["a:1"])


async def test_a_stream_that_is_not_pulled_keeps_no_messages_of_earlier_connections(broker: BlockingBroker) -> None:
    broker.publish("a:1")
    async with opened(Forgetting(broker, in_flight_max=1, reconnect_max_s=0.001)) as stream:
        await stream.next()
        broker.fail("idle", *[BrokerDown("gone")] * 20)
        await stream.until(lambda: broker.messages["a:1"] == 21)
        await stream.until(lambda: not broker.failures["idle"] and broker.is_connected)
        assert len(stream.producer._broker_thread._arrived) <= 2
        await stream.advance(*await stream.next())
        await stream.until(lambda: broker.acknowledged == ["a:1"])


async def test_an_acknowledgement_that_comes_too_late_is_not_made_and_the_message_comes_again(
    broker: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_thread, "SETTLE_S", -1.0)  # everything is too late
    broker.publish("a:1", "a:2")
    async with opened(BlockingProducer(broker)) as stream:
        await stream.advance(*await stream.next(2))
        again = await stream.next(2)
        assert names(again) == ["a:1", "a:2"]
        assert broker.acknowledged == []
        monkeypatch.setattr(broker_thread, "SETTLE_S", FOREVER_S)
        await stream.advance(*again)
        await stream.until(lambda: broker.acknowledged == ["a:1", "a:2"])


@pytest.mark.parametrize("method", ["connect", "receive", "acknowledge"])
async def test_a_mistake_ends_the_stream_without_another_attempt(broker: BlockingBroker, method: str) -> None:
    broker.publish("a:1")
    broker.fail(method, BrokerMisconfigured("no such queue"))
    async with opened(BlockingProducer(broker)) as stream:
        with pytest.raises(BrokerMisconfigured, match="no such queue"):
            await stream.work()
        with pytest.raises(BrokerMisconfigured, match="no such queue"):
            await stream.advance()
    assert broker.connections <= 1
    assert broker.acknowledged == []


async def test_trouble_that_lasts_ends_the_stream_with_the_last_error(broker: BlockingBroker) -> None:
    broker.fail("connect", *[BrokerDown(f"attempt {number}") for number in range(1000)])
    async with opened(BlockingProducer(broker, give_up_s=0.01)) as stream:
        with pytest.raises(BrokerUnreachable, match=r"the broker of the test could not be used for 0\.01 s") as failed:
            await stream.next()
    assert isinstance(failed.value.__cause__, BrokerDown)


async def test_an_acknowledgement_that_never_succeeds_ends_the_stream_though_each_connection_does(
    broker: BlockingBroker,
) -> None:
    broker.publish("a:1")
    broker.fail("acknowledge", *[BrokerDown("it takes none")] * 10_000)
    async with opened(BlockingProducer(broker, give_up_s=0.01)) as stream:
        with pytest.raises(BrokerUnreachable):
            await stream.work()
    assert broker.connections > 1


async def test_a_link_that_is_lost_now_and_then_ends_no_stream_on_which_nothing_comes(
    broker: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(broker_thread, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with opened(BlockingProducer(broker, give_up_s=300.0)) as stream, trio.open_nursery() as nursery:

        async def lose(connection: int) -> None:
            nonlocal now_s
            await stream.until(lambda: broker.receiving == connection)
            now_s += 250.0
            broker.fail("receive", BrokerDown("gone"))

        nursery.start_soon(stream.work)
        for connection in range(1, 5):
            await lose(connection)
        broker.publish("a:1")
        await stream.until(lambda: broker.acknowledged == ["a:1"])
        nursery.cancel_scope.cancel()


async def test_why_there_is_no_connection_is_known_until_there_is_one(broker: BlockingBroker) -> None:
    broker.publish("a:1")
    async with opened(BlockingProducer(broker)) as stream:
        await stream.next()
        assert stream.producer.known_trouble() is None
        broker.fail("connect", *[BrokerDown("refused")] * 3)
        broker.fail("receive", BrokerDown("gone"))
        told: set[str | None] = set()
        await stream.until(lambda: told.add(stream.producer.known_trouble()) or broker.connections > 1)  # type: ignore[func-returns-value]
        assert told & {"BrokerDown: gone", "BrokerDown: refused"}
        await stream.until(lambda: stream.producer.known_trouble() is None)


async def test_closing_acknowledges_what_was_advanced_before(broker: BlockingBroker) -> None:
    broker.publish("a:1")
    async with opened(BlockingProducer(broker)) as stream:
        await stream.advance(*await stream.next())
    assert broker.acknowledged == ["a:1"]


async def test_a_client_that_hangs_is_abandoned_and_ends_once_it_hangs_no_more(broker: BlockingBroker) -> None:
    broker.hangs_in = "receive"
    producer = BlockingProducer(broker, close_s=0.01)
    with structlog.testing.capture_logs() as records:
        async with opened(producer) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(stream.next)
            await trio.to_thread.run_sync(broker.in_hang.wait, WITHIN_S)
            nursery.cancel_scope.cancel()
    assert [record["event"] for record in records] == ["the client of a broker hangs and is abandoned"]
    assert broker.is_connected
    broker.released.set()
    with trio.fail_after(WITHIN_S):
        await producer._broker_thread.is_done.wait()
    assert not broker.is_connected


async def test_a_producer_that_was_never_opened_can_be_closed(broker: BlockingBroker) -> None:
    await BlockingProducer(broker).aclose()
    assert broker.connections == 0


async def test_what_is_held_is_extended_while_nothing_is_stored(broker: BlockingBroker) -> None:
    broker.publish("a:1", "b:1")
    async with opened(BlockingProducer(broker, extend_s=0.001, in_flight_max=2)) as stream:
        first, second = await stream.next(2)
        await stream.until(lambda: broker.extended.count(["a:1", "b:1"]) >= 3)
        await stream.advance(first)
        await stream.until(lambda: ["b:1"] in broker.extended)
        await stream.advance(second)


async def test_the_connection_is_asked_for_at_each_attempt(broker: BlockingBroker) -> None:
    passwords = iter(["old", "old", "new"])

    async def answer(query: object) -> QueryResult:
        return SecretText(f"mem://me:{next(passwords)}@here")

    broker.fail("connect", BrokerDown("refused"), BrokerDown("refused"))
    broker.publish("a:1")
    producer = BlockingProducer(broker, "shop")
    with queries.trigger_queries_handled_by(answer):
        async with opened(producer) as stream:
            await stream.advance(*await stream.next())
    assert producer.seen_connections == ["old", "old", "new"]


@pytest.mark.parametrize("uri", [None, "no URI, hunter22"])
async def test_a_connection_that_is_missing_or_no_uri_is_named_and_not_shown(
    broker: BlockingBroker, uri: str | None
) -> None:
    async def answer(query: object) -> QueryResult:
        return SecretText(uri)

    with queries.trigger_queries_handled_by(answer):
        async with opened(BlockingProducer(broker, "shop")) as stream:
            with pytest.raises(BrokerMisconfigured, match=r"the broker of the test: .*connection 'shop'") as refused:
                await stream.next()
    assert "hunter22" not in str(refused.value)


async def test_a_supervisor_that_cannot_answer_is_trouble_like_any_other(broker: BlockingBroker) -> None:
    failures = [queries.QueryFailed("the database does not answer")]

    async def answer(query: object) -> QueryResult:
        if failures:
            raise failures.pop()
        return SecretText("mem://here")

    broker.publish("a:1")
    with queries.trigger_queries_handled_by(answer):
        async with opened(BlockingProducer(broker, "shop")) as stream:
            await stream.advance(*await stream.next())
    assert broker.acknowledged == ["a:1"]


async def test_outcomes_out_of_order_are_an_error_of_the_stream(broker: BlockingBroker) -> None:
    broker.publish("a:1", "a:2")
    async with opened(BlockingProducer(broker)) as stream:
        _, second = await stream.next(2)
        await stream.advance(second)
        with pytest.raises(BrokerError, match="lane 'a' came before"):
            await stream.next()
    assert broker.acknowledged == []


async def test_statistics_tell_how_far_it_is(broker: BlockingBroker) -> None:
    broker.publish("a:1", "a:2")
    async with opened(BlockingProducer(broker)) as stream:
        before = stream.producer.statistics()
        assert (before.is_connected, before.connections, before.lag) == (False, 0, None)
        await stream.advance((await stream.next(2))[0])
        await stream.until(lambda: broker.acknowledged)
        now = stream.producer.statistics()
        assert (now.is_connected, now.connections, now.received, now.lag) == (True, 1, 2, 2)


@pytest.mark.parametrize("limit", ["in_flight_max", "message_bytes_max", "poll_s", "extend_s", "give_up_s", "close_s"])
def test_a_limit_that_is_none_is_refused_by_its_name(broker: BlockingBroker, limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit} must be more than 0, not 0"):
        BlockingProducer(broker, None, **{limit: 0})


def test_a_message_that_is_too_long_is_named_with_both_numbers() -> None:
    assert oversized(10, b"x", 10) is None
    refused = oversized(1_000_001, b"x" * 10_000, 1_000_000)
    assert refused == Undecodable(
        "the message has 1,000,001 bytes, and message_bytes_max is 1,000,000",
        b"x" * 4096,
        is_whole=False,
        whole_bytes=1_000_001,
    )
