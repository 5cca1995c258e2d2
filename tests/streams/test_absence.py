"""AbsentSubscribers: a subscriber that is not there misses nothing of what the others get, however long it takes."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import structlog
import trio
from trio.testing import wait_all_tasks_blocked

from headgate.streams import Subscription
from headgate.streams.group_settings import DESERTED_S_MAX
from headgate.streams.stalls import ABSENCE_REPORT_AGAIN_S, STALL_REPORT_S
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.shared_stream import (
    AckTimeout,
    AdvanceItem,
    PollTerminated,
    SharedStreamManager,
    SharedStreamProducer,
)


class Broker(SharedStreamProducer):
    """Yields what is put into ``waiting``, and fails when told to."""

    def __init__(self) -> None:
        self.waiting: deque[int | Exception] = deque()
        self.arrived = trio.lowlevel.ParkingLot()
        self.pulled: list[int] = []
        self.opened = self.open = 0
        self.closing_s = 0.0
        self.returned: list[int] = []

    def send(self, *items: int | Exception) -> None:
        self.waiting.extend(items)
        self.arrived.unpark_all()

    async def open_stream(self) -> AsyncIterator[tuple[int, int]]:
        self.opened += 1
        self.open += 1
        assert self.open == 1, "one is closed before the next one begins"
        try:
            while True:
                while self.waiting:
                    item = self.waiting.popleft()
                    if isinstance(item, Exception):
                        raise item
                    self.pulled.append(item)
                    yield item, item
                await self.arrived.park()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.closing_s)
            self.open -= 1

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        await trio.lowlevel.checkpoint()


class Watcher(BaseEventTrigger):
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.Watcher", {"broker": self.broker}

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        broker: Broker = kwargs["broker"]
        return broker


def join(streams: SharedStreamManager, broker: Broker, trigger_id: int) -> Subscription:
    return streams.subscribe(trigger_id=trigger_id, trigger=Watcher(broker), key="k")


async def fail(streams: SharedStreamManager, trigger_id: int) -> None:
    """What the host does when a filter raised."""
    streams.expect_rejoin(trigger_id=trigger_id, key="k")
    await streams.unsubscribe(trigger_id, "k", cut_short=True)


async def test_nothing_is_broadcast_until_the_failed_subscriber_is_back(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        stays, fails = join(streams, broker, 1), join(streams, broker, 2)
        broker.send(1)
        assert (await anext(stays), await anext(fails)) == (1, 1)
        await fail(streams, 2)
        broker.send(2, 3)
        await trio.sleep(290.0)
        assert streams.statistics().queued_events == 0
        assert len(broker.pulled) <= 2, "at most the one that was being pulled"
        back = join(streams, broker, 2)
        assert [await anext(stays), await anext(stays)] == [2, 3]
        assert [await anext(back), await anext(back)] == [2, 3]


async def test_after_the_poll_died_nothing_is_broadcast_until_all_its_subscribers_are_back(
    autojump_clock: object,
) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscriptions = [join(streams, broker, trigger_id) for trigger_id in (1, 2, 3)]
        for subscription in subscriptions:
            subscription.on_failed = lambda _, trigger_id=subscription.trigger_id: streams.expect_rejoin(
                trigger_id=trigger_id, key="k"
            )
        broker.send(ConnectionError("gone"))
        await wait_all_tasks_blocked()
        with pytest.raises(PollTerminated):
            await anext(subscriptions[-1])
        broker.send(1, 2)
        first = join(streams, broker, 1)
        await trio.sleep(10.0)
        second = join(streams, broker, 2)
        await trio.sleep(10.0)
        assert streams.statistics().queued_events == 0
        third = join(streams, broker, 3)
        for subscription in (first, second, third):
            assert [await anext(subscription), await anext(subscription)] == [1, 2]


async def test_the_log_says_again_and_again_whom_a_stream_stands_still_for(autojump_clock: object) -> None:
    broker = Broker()
    with structlog.testing.capture_logs() as records:
        async with SharedStreamManager() as streams:
            join(streams, broker, 1)
            join(streams, broker, 2)
            await fail(streams, 2)
            await trio.sleep(STALL_REPORT_S + 10 * ABSENCE_REPORT_AGAIN_S + 5)
    said = [record for record in records if "stands still" in record["event"]]
    assert {(record["log_level"], tuple(record["trigger_ids"])) for record in said} == {("error", (2,))}
    assert 9 <= len(said) <= 11
    assert all("'k'" in record["stream"] for record in said)


async def test_a_subscriber_that_is_not_started_is_waited_for_from_the_first_message_on(
    autojump_clock: object,
) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        streams.expect_rejoin(trigger_id=2, key="k")
        first = join(streams, broker, 1)
        broker.send(1)
        await trio.sleep(600.0)
        assert streams.statistics().queued_events == 0
        second = join(streams, broker, 2)
        assert (await anext(first), await anext(second)) == (1, 1)


async def test_a_stream_waits_for_each_of_those_that_are_absent(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        for absent in (2, 3):
            streams.expect_rejoin(trigger_id=absent, key="k")
        first = join(streams, broker, 1)
        broker.send(1)
        await trio.sleep(10.0)
        streams.cancel_rejoin(3)
        await trio.sleep(10.0)
        assert streams.statistics().queued_events == 0
        join(streams, broker, 2)
        assert await anext(first) == 1


async def test_a_trigger_that_will_not_come_back_is_not_waited_for(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        stays = join(streams, broker, 1)
        join(streams, broker, 2)
        await fail(streams, 2)
        broker.send(1)
        await trio.sleep(1.0)
        streams.cancel_rejoin(2)
        began = trio.current_time()
        assert await anext(stays) == 1
        assert trio.current_time() == began


async def test_other_streams_do_not_wait(autojump_clock: object) -> None:
    broker, other = Broker(), Broker()
    async with SharedStreamManager() as streams:
        join(streams, broker, 1)
        elsewhere = streams.subscribe(trigger_id=3, trigger=Watcher(other), key="another")
        await fail(streams, 1)
        began = trio.current_time()
        other.send(1)
        assert await anext(elsewhere) == 1
        assert trio.current_time() == began


async def test_a_manager_is_left_at_once_even_while_a_stream_waits_for_somebody(autojump_clock: object) -> None:
    broker = Broker()
    began = trio.current_time()
    async with SharedStreamManager() as streams:
        join(streams, broker, 1)
        join(streams, broker, 2)
        await fail(streams, 2)
        broker.send(1)
        await wait_all_tasks_blocked()
    assert trio.current_time() - began < 1.0


# --- nobody is online -----------------------------------------------------------------------------


async def test_the_broker_is_kept_for_the_only_subscriber_which_has_failed(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        fails = join(streams, broker, 1)
        broker.send(1, 2)
        assert await anext(fails) == 1
        await fail(streams, 1)
        await wait_all_tasks_blocked()
        broker.send(3)
        await trio.sleep(DESERTED_S_MAX - 1)
        assert (streams.statistics().groups, broker.opened) == (1, 1)
        back = join(streams, broker, 1)
        await trio.sleep(DESERTED_S_MAX + 1)
        broker.send(4)
        assert [await anext(back), await anext(back)] == [3, 4], "the broker hands out 1 and 2 again"
        assert broker.opened == 1


async def test_what_was_pulled_before_the_only_subscriber_failed_comes_again_behind_it(autojump_clock: object) -> None:
    """A producer hands out again all behind a failed message; what it had handed out already is in no order."""
    broker = Broker()
    async with SharedStreamManager(max_subscriber_queue=1, overflow="pause") as streams:
        fails = join(streams, broker, 1)
        broker.send(1)
        assert await anext(fails) == 1
        pulled = trio.Event()

        async def advance(batch: Sequence[AdvanceItem]) -> None:
            await pulled.wait()
            broker.returned += [item.broker_payload for item in batch if item.outcome.failed]

        broker.advance = advance  # type: ignore[method-assign]
        await fail(streams, 1)
        broker.send(2)
        await wait_all_tasks_blocked()
        assert broker.pulled == [1, 2]
        back = join(streams, broker, 1)
        pulled.set()
        await wait_all_tasks_blocked()
        assert broker.returned == [1, 2]
        broker.send(1, 2)
        assert [await anext(back), await anext(back)] == [1, 2]


@pytest.mark.parametrize("ends", ["never comes back", "is cancelled"])
async def test_a_stream_without_subscribers_ends_if_the_one_it_waits_for(autojump_clock: object, ends: str) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        join(streams, broker, 1)
        await wait_all_tasks_blocked()
        await fail(streams, 1)
        assert streams.statistics().groups == 1
        if ends == "is cancelled":
            streams.cancel_rejoin(1)
        else:
            await trio.sleep(DESERTED_S_MAX + 1)
        assert streams.statistics().groups == 0
        join(streams, broker, 1)
        await wait_all_tasks_blocked()
        assert broker.opened == 2


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise SystemExit(1)

    __hash__ = object.__hash__


class Changeable(Watcher):
    """One with a value that its producer reads, or may."""

    def __init__(self, broker: Broker, value: object) -> None:
        super().__init__(broker)
        self.value = value

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.Changeable", {"broker": self.broker, "value": self.value}


@pytest.mark.parametrize(
    ("value", "later", "opened"), [(1, 2, 2), (1, 1, 1), (Incomparable(), Incomparable(), 1)], ids=["2", "1", "no"]
)
async def test_a_stream_that_nobody_reads_is_opened_anew_by_other_values(
    value: object, later: object, opened: int, autojump_clock: object
) -> None:
    broker = Broker()
    broker.closing_s = 0.5
    async with SharedStreamManager() as streams:
        first = streams.subscribe(trigger_id=1, trigger=Changeable(broker, value), key="k")
        broker.send(1)
        assert await anext(first) == 1
        await fail(streams, 1)
        streams.subscribe(trigger_id=1, trigger=Changeable(broker, later), key="k")
        assert streams.statistics().groups_ending == opened - 1
        await trio.sleep(1.0)
        assert (broker.opened, broker.open) == (opened, 1)
        assert (streams.statistics().groups, streams.statistics().groups_ending) == (1, 0)


class Opening(Changeable):
    @classmethod
    def shared_stream_arguments(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs["value"] == "raises":
            raise KeyError("value")
        return {"value": kwargs["value"]}


async def test_a_trigger_that_joins_a_stream_that_was_opened_otherwise_is_warned_of() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        with structlog.testing.capture_logs() as records:
            for trigger_id, value in enumerate(("json", "json", "text", "raises"), 1):
                streams.subscribe(trigger_id=trigger_id, trigger=Opening(broker, value), key="k")
    (told,) = [one for one in records if "other arguments" in one["event"]]
    assert (told["trigger_id"], told["differs"], told["log_level"]) == (3, {"value": "'json', not 'text'"}, "warning")


@pytest.mark.parametrize(("is_removed", "opened"), [(False, 1), (True, 2)])
async def test_the_values_of_another_that_comes_back_first_open_no_stream_anew(
    is_removed: bool, opened: int, autojump_clock: object
) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        for trigger_id in (1, 2):
            streams.subscribe(trigger_id=trigger_id, trigger=Changeable(broker, trigger_id), key="k")
        await wait_all_tasks_blocked()
        await fail(streams, 1)
        await fail(streams, 2)
        if is_removed:  # the one that has opened it
            streams.cancel_rejoin(1)
        streams.subscribe(trigger_id=2, trigger=Changeable(broker, 2), key="k")
        await trio.sleep(1.0)
        assert broker.opened == opened


async def test_a_stream_that_another_reads_stays_as_it_was_opened(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        for trigger_id in (1, 2):
            streams.subscribe(trigger_id=trigger_id, trigger=Changeable(broker, 1), key="k")
        await fail(streams, 1)
        streams.subscribe(trigger_id=1, trigger=Changeable(broker, 2), key="k")
        await trio.sleep(1.0)
        assert broker.opened == 1


async def test_a_subscriber_that_is_failed_by_its_stream_is_waited_for_as_well(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager(ack_timeout=5.0) as streams:
        hangs = join(streams, broker, 1)
        hangs.on_failed = lambda _: streams.expect_rejoin(trigger_id=1, key="k")
        broker.send(1)
        assert await anext(hangs) == 1
        await trio.sleep(6.0)
        with pytest.raises(AckTimeout):
            await anext(hangs)
        await streams.unsubscribe(1, "k")
        assert streams.statistics().groups == 1
        join(streams, broker, 1)
        assert broker.opened == 1


async def test_nothing_is_broadcast_without_one_that_leaves_again(autojump_clock: trio.testing.MockClock) -> None:
    """Both had left, and the stream waits for what they had derived before; then one leaves for a second time (I1)."""
    broker = Broker()
    async with SharedStreamManager() as streams:
        a, b = join(streams, broker, 1), join(streams, broker, 2)
        broker.send(1)
        assert (await anext(a), await anext(b)) == (1, 1)
        seq = streams.bind_pending_event(trigger_id=1, key="k")
        assert seq is not None
        async with trio.open_nursery() as nursery:  # both go on to the next message
            nursery.start_soon(anext, a)
            nursery.start_soon(anext, b)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await fail(streams, 1)
        await fail(streams, 2)
        broker.send(2)
        await wait_all_tasks_blocked()
        join(streams, broker, 1)
        b = join(streams, broker, 2)
        await wait_all_tasks_blocked()
        await fail(streams, 1)
        streams.confirm_persisted([seq])
        await wait_all_tasks_blocked()
        assert streams.statistics().queued_events == 0
        a = join(streams, broker, 1)
        assert (await anext(a), await anext(b)) == (2, 2)
