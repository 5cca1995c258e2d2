"""How a stream begins and ends, what each end leaves behind, and that a dead one takes no subscriber."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from headgate.protocol.messages.runner import KEY_CHARS_MAX
from headgate.streams import Binding, Subscription
from headgate.streams.group_settings import DRAIN_TIMEOUT_S, PRODUCER_CLOSE_TIMEOUT_S
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.shared_stream import (
    AdvanceItem,
    AdvanceOutcome,
    PollTerminated,
    SharedStreamManager,
    SharedStreamProducer,
)

Step = Callable[[], Any]


class Broker(SharedStreamProducer):
    """A fake broker that yields ``items`` and then does ``at_end``; the rest of it can be told to misbehave."""

    def __init__(self, *items: Any, at_end: Step = trio.sleep_forever) -> None:
        self.items = items
        self.at_end = at_end
        self.advanced: list[tuple[Any, AdvanceOutcome]] = []
        self.on_advance: Step | None = None
        self.on_close: Step | None = None
        self.lane: Step | None = None
        self.key: Step | None = None
        self.opened = 0
        self.closed = 0

    async def open_stream(self) -> AsyncIterator[Any]:
        self.opened += 1
        for item in self.items:
            yield item
        await self.at_end()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        if self.on_advance is not None:
            await self.on_advance()
        self.advanced.extend(batch)

    def get_advance_lane(self, broker_payload: Any) -> Any:
        return None if self.lane is None else self.lane()

    def event_key(self, broker_payload: Any) -> str | None:
        return "a key" if self.key is None else self.key()

    async def aclose(self) -> None:
        self.closed += 1
        if self.on_close is not None:
            await self.on_close()


class Watcher(BaseEventTrigger):
    """An event trigger whose kwargs say how its producer comes about."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.Watcher", {"factory": self.factory}

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        producer: SharedStreamProducer = kwargs["factory"]()
        return producer


def subscribe(streams: SharedStreamManager, broker: Any, trigger_id: int = 1) -> Subscription:
    return streams.subscribe(trigger_id=trigger_id, trigger=Watcher(lambda: broker), key="k")


def failing_with(error: BaseException) -> Step:
    async def fail() -> None:
        raise error

    return fail


def raising(error: BaseException) -> Step:
    def fail() -> Any:
        raise error

    return fail


async def ask(subscription: Subscription) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(subscription)


async def pull_until_it_ends(subscription: Subscription) -> tuple[list[Any], PollTerminated]:
    seen = []
    try:
        async for raw_event in subscription:
            seen.append(raw_event)
    except PollTerminated as end:
        return seen, end
    raise AssertionError("the subscription ended without PollTerminated")


# --- what terminates a stream --------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("gone"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        BaseException("anything"),
        ExceptionGroup("two", [ValueError(), OSError()]),
        BaseExceptionGroup("two", [SystemExit(), OSError()]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_open_stream_raises_ends_that_stream_only(error: BaseException) -> None:
    broker, healthy = Broker(("A", "a"), at_end=failing_with(error)), Broker(("B", "b"))
    async with SharedStreamManager() as streams:
        other = streams.subscribe(trigger_id=9, trigger=Watcher(lambda: healthy), key="other")
        subscriptions = [subscribe(streams, broker, trigger_id) for trigger_id in (1, 2)]
        failures: list[Exception] = []
        for subscription in subscriptions:
            subscription.on_failed = failures.append
        ends = [await pull_until_it_ends(subscription) for subscription in subscriptions]
        assert [seen for seen, _ in ends] == [["A"], ["A"]]
        assert [end.__cause__ for _, end in ends] == [error, error]
        assert ends[0][1] is not ends[1][1]
        assert failures == [end for _, end in ends]
        assert await anext(other) == "B"
        await wait_all_tasks_blocked()
        assert broker.closed == 1


async def return_normally() -> None:
    return


@pytest.mark.parametrize(
    ("broker", "cause"),
    [
        (Broker(at_end=return_normally), "must yield for ever"),
        (Broker("no tuple"), "must yield .raw_event, broker_payload., not a value of type str"),
        (Broker((1, 2, 3)), "not a tuple of 3"),
    ],
    ids=["returns", "no tuple", "three"],
)
async def test_a_stream_that_breaks_its_contract_is_an_error_to_every_subscriber(broker: Broker, cause: str) -> None:
    async with SharedStreamManager() as streams:
        first, second = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        for subscription in (first, second):
            _, end = await pull_until_it_ends(subscription)
            assert end.__cause__ is not None
            with pytest.raises(type(end.__cause__), match=cause):
                raise end.__cause__
    assert broker.closed == 1


@pytest.mark.parametrize(
    ("lane", "key", "cause"),
    [
        (raising(ValueError("no lane")), None, ValueError),
        (raising(SystemExit()), None, SystemExit),
        (lambda: ["unhashable"], None, TypeError),
        (None, raising(KeyError("no key")), KeyError),
        (None, lambda: 5, TypeError),
        (None, lambda: "x" * (KEY_CHARS_MAX + 1), ValueError),
    ],
    ids=["lane raises", "lane exits", "lane unhashable", "key raises", "key no str", "key too long"],
)
async def test_a_bad_lane_or_key_terminates_the_stream_before_the_event_is_broadcast(
    lane: Step | None, key: Step | None, cause: type[BaseException]
) -> None:
    broker = Broker(("A", "a"))
    broker.lane, broker.key = lane, key
    async with SharedStreamManager() as streams:
        seen, end = await pull_until_it_ends(subscribe(streams, broker))
    assert seen == []
    assert type(end.__cause__) is cause
    assert broker.advanced == []
    assert broker.closed == 1


async def coroutine() -> None:
    """What a factory returns that was written as ``async def`` by mistake."""


@pytest.mark.parametrize(
    ("factory", "cause"),
    [(raising(OSError("no broker")), OSError), (raising(SystemExit()), SystemExit), (coroutine, TypeError)],
    ids=["raises", "exits", "coroutine"],
)
async def test_a_factory_that_fails_terminates_the_stream_and_leaves_nothing(
    factory: Step, cause: type[BaseException]
) -> None:
    async with SharedStreamManager() as streams:
        subscription = streams.subscribe(trigger_id=1, trigger=Watcher(factory), key="k")
        _, end = await pull_until_it_ends(subscription)
        assert type(end.__cause__) is cause
        await wait_all_tasks_blocked()
        assert streams.statistics().groups == streams.statistics().groups_ending == 0


async def test_an_open_stream_without_a_yield_is_named() -> None:
    class NoGenerator(Broker):
        async def open_stream(self) -> Any:  # type: ignore[override]  # this is the mistake
            return None

    async with SharedStreamManager() as streams:
        _, end = await pull_until_it_ends(subscribe(streams, NoGenerator()))
        assert "NoGenerator.open_stream must be an async generator" in str(end.__cause__)


async def test_a_raising_advance_terminates_the_stream_and_nothing_more_is_advanced() -> None:
    calls, gate, error = [], trio.Event(), OSError("commit failed")

    async def wait_and_fail() -> None:
        calls.append("advance")
        await gate.wait()
        raise error

    broker = Broker(("A", "a"), ("B", "b"))
    broker.on_advance, broker.lane = wait_and_fail, object  # a lane of its own for each event
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        await anext(subscription)
        await anext(subscription)
        await ask(subscription)
        await wait_all_tasks_blocked()
        gate.set()
        _, end = await pull_until_it_ends(subscription)
        assert end.__cause__ is error
        await wait_all_tasks_blocked()
    assert calls == ["advance"]
    assert broker.closed == 1


async def test_what_is_resolved_is_still_advanced_when_the_poll_dies_and_the_rest_is_abandoned() -> None:
    die = trio.Event()

    async def wait_and_fail() -> None:
        await die.wait()
        raise OSError("gone")

    gate = trio.Event()
    broker = Broker(("A", "a"), ("B", "b"), at_end=wait_and_fail)
    broker.on_advance = gate.wait
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        await anext(subscription)
        await anext(subscription)
        seq = subscription.bind().seq
        assert seq is not None
        die.set()
        await wait_all_tasks_blocked()
        # The stream is gone: nothing waits for a seq any more, but the event can still be recognised.
        assert subscription.bind() == Binding(None, "a key", 1)
        streams.confirm_persisted([seq])
        await ask(subscription)
        gate.set()
        await wait_all_tasks_blocked()
        assert broker.advanced == [("a", AdvanceOutcome(acked=1))]
        assert broker.closed == 1


async def test_a_nursery_that_fails_inside_open_stream_ends_that_stream_only() -> None:
    fail = trio.Event()

    class WithNursery(Broker):
        async def open_stream(self) -> AsyncIterator[Any]:
            async def reader() -> None:
                await fail.wait()
                raise ConnectionError("gone")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader)
                yield "A", "a"
                yield "B", "b"

    broker = WithNursery()
    async with SharedStreamManager(max_subscriber_queue=1, overflow="pause") as streams:
        # The queue is full, so the poll waits outside the producer when the producer's nursery cancels it.
        subscription = subscribe(streams, broker)
        await wait_all_tasks_blocked()
        fail.set()
        await wait_all_tasks_blocked()
        seen, end = await pull_until_it_ends(subscription)
        assert seen == ["A"]
        assert end.__cause__ is not None
        await wait_all_tasks_blocked()
        assert broker.closed == 1


async def test_a_context_entered_in_open_stream_may_be_left_in_aclose() -> None:
    class WithStack(Broker):
        async def open_stream(self) -> AsyncIterator[Any]:
            self.stack = AsyncExitStack()
            nursery = await self.stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(trio.sleep_forever)
            yield "A", "a"
            await trio.sleep_forever()

        async def aclose(self) -> None:
            await self.stack.aclose()
            await super().aclose()

    broker = WithStack()
    async with SharedStreamManager() as streams:
        await anext(subscribe(streams, broker))
        await streams.unsubscribe(1, "k")
        assert broker.advanced == [("a", AdvanceOutcome(acked=1))]
        assert broker.closed == 1


# --- stopping ------------------------------------------------------------------------------------


async def test_the_last_unsubscribe_drains_what_is_resolved_then_closes_once() -> None:
    broker = Broker(("A", "a"), ("B", "b"), ("C", "c"))
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        await anext(subscription)
        await anext(subscription)
        assert subscription.bind().seq is not None
        await streams.unsubscribe(1, "k")
        # b waits for a confirmation that nobody will hear, so b and c, in its lane behind it, are abandoned.
        assert broker.advanced == [("a", AdvanceOutcome(acked=1))]
        assert broker.closed == 1
        assert streams.statistics().unconfirmed_seqs == 0


async def test_stop_all_abandons_what_is_unresolved_and_ends_waiting_subscribers() -> None:
    broker = Broker(("A", "a"))
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        await anext(subscription)
        await streams.stop_all()
        assert broker.closed == 1
        assert broker.advanced == []
        with pytest.raises(PollTerminated) as caught:
            await anext(subscription)
        assert caught.value.__cause__ is None
        fresh = Broker(("B", "b"))
        assert await anext(subscribe(streams, fresh)) == "B"


async def test_stop_all_empties_the_table_before_it_waits() -> None:
    gate = trio.Event()
    broker, fresh = Broker(("A", "a")), Broker(("B", "b"))
    broker.on_close = gate.wait
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        await anext(subscribe(streams, broker))
        nursery.start_soon(streams.stop_all)
        await wait_all_tasks_blocked()
        assert await anext(subscribe(streams, fresh)) == "B"
        gate.set()


async def test_an_advance_in_flight_is_not_cancelled_by_the_stop() -> None:
    gate = trio.Event()
    broker = Broker(("A", "a"))
    broker.on_advance = gate.wait
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        subscription = subscribe(streams, broker)
        await anext(subscription)
        await ask(subscription)
        await wait_all_tasks_blocked()
        nursery.start_soon(streams.unsubscribe, 1, "k")
        await wait_all_tasks_blocked()
        assert broker.closed == 0
        gate.set()
    assert broker.advanced == [("a", AdvanceOutcome(acked=1))]
    assert broker.closed == 1


async def test_an_advance_and_an_aclose_that_hang_are_given_up_in_time(autojump_clock: object) -> None:
    broker = Broker(("A", "a"))
    broker.on_advance = broker.on_close = trio.sleep_forever
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        await anext(subscription)
        start = trio.current_time()
        await streams.unsubscribe(1, "k")
        assert trio.current_time() - start == pytest.approx(DRAIN_TIMEOUT_S + PRODUCER_CLOSE_TIMEOUT_S)
    assert broker.advanced == []
    assert broker.closed == 1


async def test_an_event_that_comes_after_the_last_subscriber_left_is_advanced_as_failed() -> None:
    gate = trio.Event()

    class Uncancellable(Broker):
        async def open_stream(self) -> AsyncIterator[Any]:
            yield "A", "a"
            with trio.CancelScope(shield=True):
                await gate.wait()
            yield "B", "b"

    broker = Uncancellable()
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        await anext(subscribe(streams, broker))
        nursery.start_soon(streams.unsubscribe, 1, "k")
        await wait_all_tasks_blocked()
        gate.set()
    assert broker.advanced == [("a", AdvanceOutcome(acked=1)), ("b", AdvanceOutcome(failed=1))]


async def test_an_aclose_that_raises_is_not_propagated() -> None:
    broker = Broker(("A", "a"))
    broker.on_close = failing_with(SystemExit("closing"))
    async with SharedStreamManager() as streams:
        await anext(subscribe(streams, broker))
        await streams.unsubscribe(1, "k")
    assert broker.closed == 1


async def test_a_producer_that_fails_while_it_is_stopped_does_not_escape() -> None:
    class Noisy(Broker):
        async def open_stream(self) -> AsyncIterator[Any]:
            try:
                yield "A", "a"
                await trio.sleep_forever()
            except trio.Cancelled as cancelled:
                raise BaseExceptionGroup("mixed", [cancelled, OSError("while closing")]) from None

    broker = Noisy()
    async with SharedStreamManager() as streams:
        await anext(subscribe(streams, broker))
        await streams.unsubscribe(1, "k")
    assert broker.closed == 1


async def test_cancelling_whoever_owns_the_manager_ends_all_of_it() -> None:
    broker = Broker(("A", "a"))
    with trio.CancelScope() as scope:
        async with SharedStreamManager() as streams:
            subscription = subscribe(streams, broker)
            await anext(subscription)
            await ask(subscription)
            scope.cancel()
            await anext(subscription)
    assert scope.cancelled_caught
    assert broker.advanced == [("a", AdvanceOutcome(acked=1))]
    assert broker.closed == 1


# --- a dead stream takes no subscriber -----------------------------------------------------------


async def test_a_subscriber_in_the_tick_of_the_polls_death_gets_a_fresh_group() -> None:
    broker, fresh = Broker(at_end=failing_with(OSError("gone"))), Broker(("B", "b"))
    again: list[Subscription] = []
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        subscription.on_failed = lambda failure: again.append(subscribe(streams, fresh))
        await pull_until_it_ends(subscription)
        assert await anext(again[0]) == "B"


async def test_a_subscriber_in_the_tick_of_the_last_unsubscribe_gets_a_fresh_group() -> None:
    gate = trio.Event()
    broker, fresh = Broker(("A", "a")), Broker(("B", "b"))
    broker.on_close = gate.wait
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        await anext(subscribe(streams, broker))
        nursery.start_soon(streams.unsubscribe, 1, "k")
        await wait_all_tasks_blocked()
        assert (streams.statistics().groups, streams.statistics().groups_ending) == (0, 1)
        assert await anext(subscribe(streams, fresh)) == "B"
        gate.set()
    assert broker.opened == fresh.opened == 1


async def test_the_stream_ends_with_its_last_subscriber_that_is_failed() -> None:
    broker = Broker(("A", "a"), ("B", "b"))
    async with SharedStreamManager(max_subscriber_queue=1) as streams:
        subscribe(streams, broker)
        await wait_all_tasks_blocked()
        assert streams.statistics().groups == 0
        assert broker.advanced == [("a", AdvanceOutcome(failed=1)), ("b", AdvanceOutcome(failed=1))]
        assert broker.closed == 1
