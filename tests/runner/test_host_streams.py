"""Triggers of the host in shared streams: what an event derives from, and how the broker hears of each end (I13)."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.protocol.messages.runner import (
    CancelReason,
    CancelTrigger,
    FinishedTrigger,
    FiredEvent,
    RefusedEvent,
    RunnerSettings,
    TriggerSpec,
)
from headgate.protocol.values import encode_value
from headgate.runner.host import Host
from headgate.runner.outbox import Outbox
from headgate.streams.contract import AdvanceItem, AdvanceOutcome, SharedStreamProducer
from headgate.streams.manager import SharedStreamManager
from headgate.triggers.base import BaseEventTrigger, TriggerEvent

ACK_TIMEOUT_S = 60.0
SETTINGS = RunnerSettings(event_bytes_max=100, hook_timeout_s=5.0)

ACKED = AdvanceOutcome(acked=1)
FAILED = AdvanceOutcome(failed=1)
REJECTED = AdvanceOutcome(rejected=1)


class Broker(SharedStreamProducer):
    """A broker in memory: the test publishes, the producer notes what it was told about each message."""

    def __init__(self) -> None:
        self.publish, self._messages = trio.open_memory_channel[int](100)
        self.outcomes: dict[int, list[AdvanceOutcome]] = defaultdict(list)
        self.opened_with: list[dict[str, Any]] = []
        self.names_messages = True

    async def open_stream(self) -> AsyncIterator[tuple[int, int]]:
        async for message in self._messages.clone():
            yield message, message

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        for item in batch:
            self.outcomes[item.broker_payload].append(item.outcome)

    def event_key(self, broker_payload: int) -> str | None:
        return f"m{broker_payload}" if self.names_messages else None

    def close(self) -> None:
        self.publish.close()
        self._messages.close()


class Watcher(BaseEventTrigger):
    """One event a message."""

    broker: Broker

    def __init__(self, key: Any = "stream") -> None:
        self.key = key

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {"key": self.key}

    def shared_stream_key(self) -> Any:
        return self.key

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        cls.broker.opened_with.append(kwargs)
        return cls.broker

    def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("a trigger with a shared stream is filtered, not run")


AUTHORS = types.ModuleType("authors_of_test_host_streams")


@pytest.fixture(autouse=True)
def authors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, AUTHORS.__name__, AUTHORS)
    with structlog.testing.capture_logs():
        yield


class Rig:
    """A host and its streams; the test stands in for the supervisor."""

    def __init__(self, settings: RunnerSettings, streams: SharedStreamManager, nursery: trio.Nursery) -> None:
        self.streams = streams
        self.outbox = Outbox(events_max=settings.outbox_events_max, round_events_max=settings.round_events_max)

        async def ask_last_event(trigger_id: int) -> None:
            await trio.lowlevel.checkpoint()

        self.host = Host(
            settings=settings, streams=streams, outbox=self.outbox, nursery=nursery, ask_last_event=ask_last_event
        )
        self.broker = Watcher.broker = Broker()
        self.events: list[FiredEvent] = []
        self.refused: list[RefusedEvent] = []
        self.finished: list[FinishedTrigger] = []

    async def start(self, cls: type[BaseEventTrigger], *trigger_ids: int, **kwargs: Any) -> None:
        setattr(AUTHORS, cls.__name__, cls)
        data = encode_value(kwargs, where="kwargs")
        specs = (
            TriggerSpec(one, f"run-{one}", f"name-{one}", f"{AUTHORS.__name__}.{cls.__name__}", data)
            for one in trigger_ids or (1,)
        )
        await self.host.start(tuple(specs))

    async def publish(self, *messages: int) -> None:
        for message in messages:
            self.broker.publish.send_nowait(message)
        await self.settle()

    async def settle(self) -> None:
        await wait_all_tasks_blocked()
        changes = self.outbox.take_round(1)
        self.events += changes.events
        self.refused += changes.refused
        self.finished += changes.finished

    async def confirm(self) -> None:
        self.streams.confirm_persisted([event.seq for event in self.events])
        await self.settle()

    async def cancel(self, reason: CancelReason, trigger_id: int = 1) -> None:
        self.host.cancel(CancelTrigger(trigger_id, reason))
        await self.settle()

    async def until_finished(self, count: int = 1) -> None:
        while len(self.finished) < count:
            await self.outbox.wait_not_empty()
            await self.settle()


@asynccontextmanager
async def hosting(
    settings: RunnerSettings = SETTINGS, *, rejoin_wait: float = 0.0, overflow: Literal["fail", "pause"] = "fail"
) -> AsyncIterator[Rig]:
    async with (
        SharedStreamManager(
            ack_timeout=ACK_TIMEOUT_S,
            rejoin_wait=rejoin_wait,
            overflow=overflow,
            max_subscriber_queue=settings.subscriber_queue_max,
        ) as streams,
        trio.open_nursery() as nursery,
    ):
        rig = Rig(settings, streams, nursery)
        yield rig
        rig.broker.close()
        nursery.cancel_scope.cancel()


# --- key, position and seq -----------------------------------------------------------------------


async def test_an_event_carries_the_brokers_key_and_its_position_and_is_confirmed_by_its_seq(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent(message)
                yield TriggerEvent(message, key="the broker's coordinate wins")

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.publish(7, 8)
        assert [(e.key, e.position) for e in rig.events] == [("m7", 0), ("m7", 1), ("m8", 0), ("m8", 1)]
        assert [e.sequence_index for e in rig.events] == [0, 1, 2, 3]
        assert len({e.seq for e in rig.events}) == 4
        assert all(e.seq for e in rig.events)
        assert rig.broker.outcomes == {}  # I1: nothing is confirmed
        await rig.confirm()
        assert rig.broker.outcomes == {7: [ACKED], 8: [ACKED]}


async def test_the_log_names_the_message_that_a_filter_failed_on(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if message == 8:
                    raise TypeError("list indices must be integers")
                yield TriggerEvent(message)

    async with hosting() as rig:
        await rig.start(Trigger)
        with structlog.testing.capture_logs() as records:
            await rig.publish(7, 8)
        (failed,) = (record for record in records if record["event"] == "a trigger failed")
        assert (failed["message_key"], failed["outcome"]) == ("m8", "failed")


async def test_without_a_key_of_the_brokers_the_triggers_own_is_used(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent(message, key=f"own-{message}")
                yield TriggerEvent(message)

    async with hosting() as rig:
        rig.broker.names_messages = False
        await rig.start(Trigger)
        await rig.publish(7)
        assert [(e.key, e.position) for e in rig.events] == [("own-7", 0), (None, 0)]
        assert all(e.seq for e in rig.events)


async def test_an_event_fired_before_the_first_message_derives_from_none(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent("hello", key="own")
            async for message in shared_stream:
                yield TriggerEvent(message)

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.settle()
        assert [(e.seq, e.key, e.position) for e in rig.events] == [(0, "own", 0)]


async def test_what_is_fired_after_the_ack_timeout_is_still_recognisable_but_confirms_nothing(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for _message in shared_stream:
                yield TriggerEvent("in time")
                with trio.CancelScope(shield=True):
                    await trio.sleep(2 * ACK_TIMEOUT_S)
                yield TriggerEvent("late")

    async with hosting(RunnerSettings(cancel_grace_s=1000)) as rig:
        await rig.start(Trigger)
        await rig.publish(7)
        await rig.until_finished()
        assert [(e.key, e.position, bool(e.seq)) for e in rig.events] == [("m7", 0, True), ("m7", 1, False)]
        (end,) = rig.finished
        assert (end.outcome, end.events) == ("failed", 2)
        assert end.error.startswith("AckTimeout: ")
        assert rig.broker.outcomes == {7: [FAILED]}


async def test_an_event_that_is_too_big_rejects_its_message_and_nothing_else(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent("x" * message)

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.publish(1, 1000, 2, 3)
        await rig.confirm()
        assert [e.key for e in rig.events] == ["m1", "m2", "m3"]
        (refused,) = rig.refused
        assert (refused.key, refused.position, refused.payload_bytes) == ("m1000", 0, 1002)
        assert rig.broker.outcomes == {1: [ACKED]}  # until the dead letter is written, the message waits
        rig.streams.confirm_refused([refused.seq])
        await rig.settle()
        assert rig.broker.outcomes == {1: [ACKED], 1000: [REJECTED], 2: [ACKED], 3: [ACKED]}


# --- I13: cut short is not done ------------------------------------------------------------------


class OneByOne(Watcher):
    """Fires for every message but 3, on which it hangs."""

    async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            if message == 3:
                await trio.sleep_forever()
            yield TriggerEvent(message)


@pytest.mark.parametrize("reason", ["shutdown", "timeout", "reassigned"])
async def test_i13_a_trigger_cancelled_by_anyone_but_a_user_leaves_its_message_failed(
    autojump_clock: MockClock, reason: CancelReason
) -> None:
    class Trigger(OneByOne):
        pass

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.publish(1, 2, 3)
        await rig.confirm()
        await rig.cancel(reason)
        assert rig.broker.outcomes == {1: [ACKED], 2: [ACKED], 3: [FAILED]}
        assert [(end.outcome, end.reason) for end in rig.finished] == [("cancelled", reason)]


async def test_i13_a_trigger_that_a_user_removed_is_done_with_its_message(autojump_clock: MockClock) -> None:
    class Trigger(OneByOne):
        pass

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.publish(1, 3)
        await rig.confirm()
        await rig.cancel("user")
        assert rig.broker.outcomes == {1: [ACKED], 3: [ACKED]}


async def test_i13_what_a_removed_trigger_fired_is_not_acked_before_it_is_stored(autojump_clock: MockClock) -> None:
    class Trigger(OneByOne):
        pass

    class Second(Watcher):
        pass

    async with hosting() as rig:
        await rig.start(Trigger, 1)
        await rig.start(Second, 2)
        await rig.publish(1)
        await rig.cancel("user")
        of_second = [event.seq for event in rig.events if event.trigger_id == 2]
        rig.streams.confirm_persisted(of_second)
        await rig.settle()
        assert rig.broker.outcomes == {}
        await rig.confirm()
        assert rig.broker.outcomes == {1: [AdvanceOutcome(acked=2)]}


async def test_i13_a_filter_that_raised_leaves_its_message_failed_and_the_neighbour_goes_on(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if message == 2:
                    raise ValueError("poison")
                yield TriggerEvent(message)

    class Second(Watcher):
        pass

    async with hosting() as rig:
        await rig.start(Trigger, 1)
        await rig.start(Second, 2)
        await rig.publish(1, 2)
        await rig.publish(3)
        await rig.confirm()
        assert rig.broker.outcomes == {
            1: [AdvanceOutcome(acked=2)],
            2: [AdvanceOutcome(acked=1, failed=1)],
            3: [ACKED],
        }
        (end,) = rig.finished
        assert (end.trigger_id, end.outcome, end.error) == (1, "failed", "ValueError: poison")


async def test_i13_a_filter_that_returned_is_done_with_its_message(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent(message)
                if message == 2:
                    return

    class Second(Watcher):
        pass

    async with hosting() as rig:
        await rig.start(Trigger, 1)
        await rig.start(Second, 2)
        await rig.publish(1, 2)
        await rig.confirm()
        assert rig.broker.outcomes == {1: [AdvanceOutcome(acked=2)], 2: [AdvanceOutcome(acked=2)]}
        assert [end.outcome for end in rig.finished] == ["returned"]


async def test_i13_a_filter_that_catches_its_cancellation_and_returns_was_cut_short_all_the_same(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent(message)
                try:
                    await trio.sleep_forever()
                except trio.Cancelled:
                    return

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.publish(1)
        await rig.confirm()
        await rig.cancel("shutdown")
        assert rig.broker.outcomes == {1: [FAILED]}
        assert [(end.outcome, end.reason) for end in rig.finished] == [("cancelled", "shutdown")]


async def test_a_cancel_during_cleanup_does_not_undo_that_the_filter_returned(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                yield TriggerEvent(message)
                return

        async def cleanup(self) -> None:
            await trio.sleep(3)

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.publish(1)
        await rig.cancel("shutdown")
        await rig.until_finished()
        assert [(end.outcome, end.reason) for end in rig.finished] == [("returned", None)]


async def test_the_stream_is_left_before_the_hooks_so_that_a_slow_one_holds_nobody_up(
    autojump_clock: MockClock,
) -> None:
    class Trigger(OneByOne):
        async def cleanup(self) -> None:
            await trio.sleep(4)

    class Second(Watcher):
        pass

    async with hosting() as rig:
        await rig.start(Trigger, 1)
        await rig.start(Second, 2)
        await rig.publish(3)
        await rig.confirm()
        await rig.cancel("reassigned")
        assert rig.broker.outcomes == {3: [AdvanceOutcome(acked=1, failed=1)]}
        assert rig.finished == []


# --- a stream's own failures ---------------------------------------------------------------------


async def test_a_slow_subscriber_is_failed_alone_by_the_ack_timeout(autojump_clock: MockClock) -> None:
    class Trigger(OneByOne):
        pass

    class Second(Watcher):
        pass

    async with hosting() as rig:
        await rig.start(Trigger, 1)
        await rig.start(Second, 2)
        await rig.publish(3, 4)
        await rig.confirm()
        await rig.until_finished()
        (end,) = rig.finished
        assert (end.trigger_id, end.outcome) == (1, "failed")
        assert end.error.startswith("AckTimeout: ")
        assert trio.current_time() == pytest.approx(ACK_TIMEOUT_S, abs=2)
        await rig.publish(5)
        await rig.confirm()
        assert rig.broker.outcomes[3] == [AdvanceOutcome(acked=1, failed=1)]
        assert [e.payload for e in rig.events if e.trigger_id == 2] == [b"3", b"4", b"5"]


async def test_a_trigger_that_waits_for_room_when_the_ack_timeout_comes_ends_without_room(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        pass

    async with hosting(RunnerSettings(outbox_events_max=1)) as rig:
        await rig.start(Trigger)
        rig.broker.publish.send_nowait(1)
        await rig.host.wait_all_ended()  # though nobody takes a round
        await rig.settle()
        assert rig.finished[0].error.startswith("AckTimeout: ")


async def test_a_trigger_that_waits_for_the_store_is_not_failed_for_holding_the_fast_path(
    autojump_clock: MockClock,
) -> None:
    class Counting(BaseEventTrigger):
        def __init__(self, fires: bool) -> None:
            self.fires = fires

        def serialize(self) -> tuple[str, dict[str, Any]]:
            return "", {"fires": self.fires}

        def shared_stream_key(self) -> str:
            return "stream"

        @classmethod
        async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[int]:
            for number in range(100):
                yield number
            await trio.sleep_forever()

        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncGenerator[TriggerEvent, None]:
            async for number in shared_stream:
                if self.fires:
                    yield TriggerEvent(number)

        def run(self) -> AsyncIterator[TriggerEvent]:
            raise NotImplementedError

    async with hosting(RunnerSettings(outbox_events_max=1, subscriber_queue_max=2), overflow="pause") as rig:
        await rig.start(Counting, 1, fires=True)
        await rig.start(Counting, 2, fires=False)
        await trio.sleep(10 * ACK_TIMEOUT_S)  # the database is away: nobody takes a round
        assert len(rig.host) == 2
        before = len(rig.outbox)
        await rig.settle()
        assert [event.payload for event in rig.events] == [b"0"] * before


async def test_a_stream_that_cannot_be_opened_fails_its_triggers_with_the_cause(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            raise ConnectionError("no broker here")

    async with hosting() as rig:
        await rig.start(Trigger, 1, 2)
        await rig.until_finished(2)
        assert {end.trigger_id for end in rig.finished} == {1, 2}
        for end in rig.finished:
            assert end.outcome == "failed"
            assert end.error.startswith("PollTerminated: ")
            assert "ConnectionError: no broker here" in end.traceback


async def test_a_trigger_whose_stream_ended_is_failed_even_if_it_catches_that_and_returns(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            raise ConnectionError("no broker here")

        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(0)
            try:
                async for message in shared_stream:
                    yield TriggerEvent(message)
            except Exception:
                return

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.until_finished()
        assert [(end.outcome, end.events) for end in rig.finished] == [("failed", 1)]


class Unequal:
    """A key that falls apart when it is looked at for the second time."""

    def __init__(self) -> None:
        self.hashes = 0

    def __hash__(self) -> int:
        self.hashes += 1
        if self.hashes > 4:
            raise RuntimeError("no hash any more")
        return 1


@pytest.mark.parametrize(
    ("shared_stream_key", "error"),
    [
        (lambda self: ["unhashable"], "TypeError: unhashable type: 'list'"),
        (lambda self: sys.exit(3), "SystemExit: 3"),
        (lambda self: Unequal(), ""),
    ],
    ids=["unhashable", "exits", "changes its mind"],
)
async def test_a_trigger_with_a_bad_stream_key_fails_alone_and_is_cleaned_up(
    autojump_clock: MockClock, shared_stream_key: Callable[[Any], Any], error: str
) -> None:
    cleanups: list[str] = []

    class Trigger(Watcher):
        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            raise ConnectionError("no broker here")

        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            raise ValueError("filtered")
            yield

        async def cleanup(self) -> None:
            cleanups.append("cleanup")

    class Second(Watcher):
        pass

    Trigger.shared_stream_key = shared_stream_key  # type: ignore[method-assign]
    async with hosting() as rig:
        await rig.start(Second, 2)
        await rig.start(Trigger, 1)
        await rig.until_finished()
        (end,) = rig.finished
        assert (end.trigger_id, end.outcome) == (1, "failed")
        assert end.error.startswith(error or "ValueError: filtered")
        assert cleanups == ["cleanup"]
        await rig.publish(1)
        assert [event.trigger_id for event in rig.events] == [2]


# --- joining -------------------------------------------------------------------------------------


async def test_all_triggers_of_one_assignment_get_the_very_first_message(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        pass

    async with hosting() as rig:
        rig.broker.publish.send_nowait(1)
        rig.streams.pause_starts()
        await rig.start(Trigger, *range(1, 251))
        rig.streams.resume_starts()
        await rig.settle()
        assert len(rig.events) == 250
        assert len({event.trigger_id for event in rig.events}) == 250
        assert len(rig.broker.opened_with) == 1


async def test_a_subscriber_that_failed_is_waited_for_and_misses_nothing(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        failures = 1

        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if type(self).failures:
                    type(self).failures -= 1
                    raise ValueError("once")
                yield TriggerEvent(message)

    class Second(Watcher):
        pass

    async with hosting(rejoin_wait=60) as rig:
        await rig.start(Second, 2)
        await rig.start(Trigger, 1)
        await rig.publish(1)
        assert len(rig.finished) == 1
        await rig.publish(2)
        assert [event.payload for event in rig.events if event.trigger_id == 2] == [b"1"]
        await rig.start(Trigger, 1)
        await rig.settle()
        assert [event.payload for event in rig.events if event.trigger_id == 1] == [b"2"]
        assert [event.payload for event in rig.events if event.trigger_id == 2] == [b"1", b"2"]


async def test_nobody_waits_for_a_trigger_that_was_removed_after_it_failed(autojump_clock: MockClock) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for _message in shared_stream:
                raise ValueError("always")
            yield TriggerEvent()

    class Second(Watcher):
        pass

    async with hosting(rejoin_wait=60) as rig:
        await rig.start(Second, 2)
        await rig.start(Trigger, 1)
        await rig.publish(1)
        await rig.publish(2)
        assert len(rig.events) == 1
        await rig.cancel("user", 1)  # it does not run, but its rejoin is awaited
        assert len(rig.events) == 2
