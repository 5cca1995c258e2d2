"""Triggers of the host in shared streams: what an event derives from, and how it ends for the broker (I13)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog
import trio
from tests.runner.host.stream_rig import ACK_TIMEOUT_S, ACKED, FAILED, SETTINGS, Broker, OneByOne, Watcher, hosting
from trio.testing import MockClock

from headgate.protocol.messages.runner import (
    CancelReason,
    RunnerSettings,
)
from headgate.streams.contract import AdvanceOutcome
from headgate.triggers.base import TriggerEvent
from headgate.triggers.shared_stream import reject_shared_stream_event

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


async def test_the_log_says_that_a_filter_has_returned_unless_it_said_so_itself(autojump_clock: MockClock) -> None:
    class Returns(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                if message == 8:
                    return
                yield TriggerEvent(message, is_last=message == 7 and self.key == "said")

    async with hosting() as rig:
        with structlog.testing.capture_logs() as records:
            await rig.start(Returns, 1)
            await rig.publish(7)
            assert not rig.finished
            await rig.publish(8)
            rig.broker = Watcher.broker = Broker()
            await rig.start(Returns, 2, key="said")
            await rig.publish(7)
            rig.broker = Watcher.broker = Broker()
            await rig.start(Returns, 3, key="of a task", credit=9)
            await rig.publish(8)
        assert [(end.trigger_id, end.outcome) for end in rig.finished] == [(one, "returned") for one in (1, 2, 3)]
        told = [record for record in records if record["event"].startswith("a trigger returned")]
        assert [record["trigger_id"] for record in told] == [1]


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


async def test_an_event_that_is_too_big_is_kept_whole_and_its_message_is_acked_when_it_is_stored(
    autojump_clock: MockClock,
) -> None:
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
        assert (refused.content, refused.is_whole, len(refused.payload_head)) == ("event", True, 1002)
        assert rig.broker.outcomes == {1: [ACKED]}  # until the dead letter is written, the message waits
        rig.streams.confirm_persisted([refused.seq])
        await rig.settle()
        assert rig.broker.outcomes == {1: [ACKED], 1000: [ACKED], 2: [ACKED], 3: [ACKED]}


# --- I13: cut short is not done ------------------------------------------------------------------


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
        await rig.cancel("user", 1)  # it is not waited for
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


async def test_while_the_outbox_is_full_a_subscriber_that_rejects_gets_no_more_and_is_not_failed(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Watcher):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for message in shared_stream:
                reject_shared_stream_event()
                if message < 0:
                    yield TriggerEvent(message)

    narrow = msgspec.structs.replace(SETTINGS, outbox_events_max=3, round_events_max=3, subscriber_queue_max=4)
    async with hosting(narrow, overflow="pause") as rig:
        rig.broker.keeps_rejected = False
        await rig.start(Trigger)
        await rig.settle()
        for number in range(20):
            rig.broker.publish.send_nowait(number)
        await trio.testing.wait_all_tasks_blocked()
        assert len(rig.outbox) == 3
        while len(rig.refused) < 20:
            await rig.settle()
            rig.streams.confirm_persisted([letter.seq for letter in rig.refused])
        await rig.settle()
        assert list(rig.broker.outcomes) == list(range(20))
        assert rig.finished == []
