"""What people are told of streams: what is in flight, how far behind, who holds them up, and how they ended."""

from __future__ import annotations

import msgspec
import pytest
import trio
from tests.streams import flow_rig
from tests.streams.flow_rig import Fast, subscribe
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.protocol.messages.runner import STREAMS_TOLD_MAX, RunnerFigures, StreamFigures
from headgate.streams import figures as figures_module
from headgate.streams.figures import ENDED_TOLD_S
from headgate.streams.identity import identify
from headgate.triggers.shared_stream import Lag, PollTerminated, SharedStreamManager


class Broker(flow_rig.Broker):
    """One that says how far it is behind, or whatever the test wants it to."""

    lag: object = None
    trouble: object = None

    def known_trouble(self) -> str | None:
        if isinstance(self.trouble, BaseException):
            raise self.trouble
        return self.trouble  # type: ignore[return-value]

    def known_lag(self) -> Lag | None:
        if isinstance(self.lag, BaseException):
            raise self.lag
        return self.lag  # type: ignore[return-value]


def only(streams: SharedStreamManager) -> StreamFigures:
    figures = streams.figures()
    assert figures.streams_in_all == 1
    [stream] = figures.streams
    return stream


async def test_a_stream_is_told_with_all_that_is_known_of_it(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, began = Broker(), 1_790_000_000.0
    monkeypatch.setattr(figures_module, "time", lambda: began + trio.current_time())
    broker.lag = Lag(70, "bytes")
    key = identify(("log", "shop"))
    async with SharedStreamManager(ack_timeout=100.0, max_subscriber_queue=2, overflow="pause") as streams:
        subscription = streams.subscribe(trigger_id=1, trigger=flow_rig.Acking(broker), key=key)
        await trio.sleep(5.0)
        broker.send("a", "b", "c", "d")
        assert await anext(subscription) == "a"
        await wait_all_tasks_blocked()
        streams.expect_rejoin(trigger_id=2, key=key)
        await trio.sleep(2.0)
        stream = only(streams)
        assert (stream.stream, stream.name) == (key.digest, "('log', 'shop')")
        assert (stream.in_flight, stream.queued, stream.lanes, stream.online, stream.absent) == (3, 2, 1, 1, 1)
        assert (stream.lag, stream.lag_unit) == (70, "bytes")
        assert (stream.held, stream.held_by) == ("absent subscriber", (2,))
        assert stream.oldest_at == began + 5.0
        assert stream.held_since == pytest.approx(began + 5.5, abs=1.5)
        assert only(streams) == stream  # nothing has happened
        await trio.sleep(3.0)
        assert only(streams) == stream  # nor since
        streams.cancel_rejoin(2)
        for payload in ("b", "c", "d"):
            assert await anext(subscription) == payload
        await trio.sleep(2.0)
        stream = only(streams)
        assert (stream.acked, stream.failed, stream.rejected) == (3, 0, 0)
        assert (stream.held, stream.held_since, stream.held_by, stream.absent) == (None, None, (), 0)


async def test_the_outcomes_and_the_error_outlive_the_end_of_a_stream(autojump_clock: MockClock) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a", "b")
        await anext(subscription)
        await anext(subscription)
        await wait_all_tasks_blocked()

        async def fail(batch: object) -> None:
            raise ConnectionError("the broker has gone\nand more")

        broker.advance = fail  # type: ignore[method-assign]
        broker.send("c")
        await wait_all_tasks_blocked()  # it waits in the queue, so what fails below does not come before it
        assert await anext(subscription) == "c"  # b is to be advanced now
        with pytest.raises(PollTerminated):
            await anext(subscription)
        await streams.unsubscribe(1, "k")
        gone = only(streams)  # a scrape finds it, though it may end again as soon as it is opened
        assert (gone.online, gone.acked, gone.ended, gone.last_error) == (
            0,
            1,
            1,
            "ConnectionError: the broker has gone",
        )
        await trio.sleep(ENDED_TOLD_S)
        assert streams.figures() == RunnerFigures()
        subscribe(streams, Broker())
        stream = only(streams)
        assert (stream.acked, stream.ended) == (1, 1)
        assert stream.last_error == "ConnectionError: the broker has gone"
        assert stream.last_error_at is not None


@pytest.mark.parametrize("lag", [RuntimeError("not now"), SystemExit(3), Lag(1, "miles"), Lag(None), "many"])  # type: ignore[arg-type]
async def test_what_a_producer_says_in_place_of_a_number_is_nothing(lag: object) -> None:
    broker = Broker()
    broker.lag = lag
    async with SharedStreamManager() as streams:
        subscribe(streams, broker)
        await wait_all_tasks_blocked()
        assert only(streams).lag is None


async def test_a_broker_that_is_away_is_told_with_the_error(autojump_clock: MockClock) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscribe(streams, broker)
        await trio.sleep(2.0)
        broker.trouble = "OSError: refused"
        await trio.sleep(5.0)
        stream = only(streams)
        assert (stream.held, stream.held_by, stream.last_error) == ("broker away", (), "OSError: refused")
        assert stream.held_since == stream.last_error_at is not None
        broker.trouble = None
        await trio.sleep(2.0)
        stream = only(streams)
        assert (stream.held, stream.last_error) == (None, "")


@pytest.mark.parametrize("trouble", [RuntimeError("not now"), "", "\ud800"])
async def test_what_a_producer_says_of_its_trouble_may_be_anything(autojump_clock: MockClock, trouble: object) -> None:
    broker = Broker()
    broker.trouble = trouble
    async with SharedStreamManager() as streams:
        subscribe(streams, broker)
        await trio.sleep(2.0)
        stream = only(streams)
        msgspec.msgpack.encode(stream)
        assert stream.held == (None if isinstance(trouble, Exception) else "broker away")


async def test_the_fast_path_has_a_queue_and_nothing_in_flight() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscribe(streams, broker, cls=Fast)
        broker.send("a", "b")
        await wait_all_tasks_blocked()
        stream = only(streams)
        assert (stream.queued, stream.in_flight, stream.oldest_at, stream.lag) == (2, 0, None, None)


async def test_of_many_streams_those_with_most_in_flight_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_module, "RECORDS_MAX", 3)
    brokers = [Broker() for _ in range(STREAMS_TOLD_MAX + 1)]
    async with SharedStreamManager() as streams:
        for number, broker in enumerate(brokers):
            subscribe(streams, broker, key=str(number))
            if number:
                broker.send("a")
        await wait_all_tasks_blocked()
        figures = streams.figures()
        assert figures.streams_in_all == STREAMS_TOLD_MAX + 1
        assert len(figures.streams) == STREAMS_TOLD_MAX
        assert {stream.in_flight for stream in figures.streams} == {1}
