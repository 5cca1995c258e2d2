"""A trigger that feeds the stream of a task goes no further than its credit, and harms nobody meanwhile (I22)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.runner.authors import expected, publish
from tests.runner.host import stream_rig
from tests.runner.host.host_rig import REASONS, SETTINGS, Authored, Rig, beside_a_neighbour, hosting
from tests.runner.host.test_host_one_event import Counting
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.protocol.messages.runner import CancelReason, Credit, TriggerSpec
from headgate.protocol.values import encode_value
from headgate.runner.pauses import EVENTS_A_STEP
from headgate.streams.contract import AdvanceOutcome
from headgate.triggers.base import TriggerEvent

BYTES_MAX = SETTINGS.event_bytes_max


async def extend(rig: Rig, events: int, *, run: str = "run-1", trigger_id: int = 1) -> int:
    """Extend the credit; return how many events the trigger has fired then."""
    rig.host.extend(Credit(trigger_id, run, events))
    await wait_all_tasks_blocked()
    return len(rig.events(trigger_id))


@pytest.mark.parametrize("credit", [1, 3, EVENTS_A_STEP, EVENTS_A_STEP + 1, 3 * EVENTS_A_STEP - 1])
async def test_a_run_fires_as_many_events_as_its_credit_says_and_goes_on_where_it_stood(
    autojump_clock: MockClock, credit: int
) -> None:
    class Trigger(Counting):
        pass

    async with beside_a_neighbour() as rig:
        await rig.start_for_a_stream(Trigger, credit)
        await wait_all_tasks_blocked()
        assert len(rig.events()) == credit
        assert Trigger.seen[-1:] == ([f"went on to {credit - 1}"] if credit > 1 else []), "it stands in its yield"
        assert await extend(rig, credit + 2) == credit + 2
        assert [event.sequence_index for event in rig.events()] == list(range(credit + 2))


async def test_without_credit_a_trigger_does_not_begin(autojump_clock: MockClock) -> None:
    began = []

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            began.append(1)
            yield TriggerEvent(1)

    async with beside_a_neighbour() as rig:
        await rig.start_for_a_stream(Trigger, 0)
        await wait_all_tasks_blocked()
        assert (began, rig.events()) == ([], [])
        rig.host.extend(Credit(1, "run-1", 5))
        end = await rig.end_of()
        assert (end.outcome, end.events) == ("returned", 1)


async def test_credit_is_that_of_one_run_and_is_never_taken_back(autojump_clock: MockClock) -> None:
    class Trigger(Counting):
        pass

    async with beside_a_neighbour() as rig:
        await rig.start_for_a_stream(Trigger, 4)
        await wait_all_tasks_blocked()
        assert await extend(rig, 2) == 4
        assert await extend(rig, 4) == 4
        assert await extend(rig, 9, run="run-0") == 4, "of an earlier run"
        assert await extend(rig, 9, trigger_id=2, run="run-2") == 0, "of a trigger that does not run here"
        assert await extend(rig, 6) == 6


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (TriggerEvent(object()), "an event of name-1 cannot be stored: "),
        (TriggerEvent("x" * BYTES_MAX), f"an event of name-1 has {BYTES_MAX + 2:,} bytes; the limit is {BYTES_MAX:,}"),
        (TriggerEvent(1, key="k" * 2000), "the key of an event of name-1 is not storable"),
    ],
)
async def test_an_event_that_cannot_be_stored_fails_its_run_and_nothing_behind_it_is_fired(
    autojump_clock: MockClock, event: TriggerEvent, reason: str
) -> None:
    """In the next try the trigger goes on after the event before; a dead letter would be that event a second time."""

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(0)
            yield event
            yield TriggerEvent(2)

    async with beside_a_neighbour() as rig:
        await rig.start_for_a_stream(Trigger, 10)
        end = await rig.end_of()
        assert end.outcome == "failed"
        assert end.error.startswith(f"EventNotStorable: {reason}")
        assert rig.refused() == []
        assert [fired.payload for fired in rig.events()] == [b"0"]


async def test_a_stream_may_be_empty(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            return
            yield

    async with beside_a_neighbour() as rig:
        await rig.start_for_a_stream(Trigger, 3)
        end = await rig.end_of()
        assert (end.outcome, end.events) == ("returned", 0)


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("credit", [0, 2])
async def test_a_run_that_stands_is_cancelled_at_once(
    autojump_clock: MockClock, reason: CancelReason, credit: int
) -> None:
    class Trigger(Counting):
        pass

    async with beside_a_neighbour() as rig:
        await rig.start_for_a_stream(Trigger, credit)
        await wait_all_tasks_blocked()
        rig.cancel(reason)
        end = await rig.end_of()
        assert (end.outcome, end.reason, end.events) == ("cancelled", reason, credit)
        assert trio.current_time() == 0.0
        killed = ["on_kill"] if reason == "user" else []
        assert [one for one in Trigger.seen if not one.startswith("went")] == ["closed"] * (credit > 0) + killed + [
            "cleanup"
        ]


async def test_credit_that_comes_while_the_outbox_is_full_is_kept(autojump_clock: MockClock) -> None:
    class Trigger(Counting):
        pass

    full: Any = SETTINGS.__class__(outbox_events_max=3, round_events_max=2)
    async with hosting(full) as rig:
        await rig.start_for_a_stream(Trigger, 3)
        await wait_all_tasks_blocked()
        rig.host.extend(Credit(1, "run-1", 5))
        await wait_all_tasks_blocked()
        assert len(rig.outbox) == 3, "it waits for room"
        rig.take()
        await wait_all_tasks_blocked()
        rig.take()
        await wait_all_tasks_blocked()
        assert len(rig.events()) == 5


class Fires(stream_rig.Watcher):
    """One event a message."""

    async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            yield TriggerEvent(message)


@pytest.mark.parametrize("credit", [0, 2])
async def test_a_shared_stream_waits_for_one_without_credit_and_does_not_fail_it(
    autojump_clock: MockClock, credit: int
) -> None:
    settings = SETTINGS.__class__(subscriber_queue_max=1)
    async with stream_rig.hosting(settings, overflow="pause") as rig:
        classpath, kwargs = publish(Fires), encode_value({}, where="kwargs")
        spec = TriggerSpec(1, "run-1", "slow", classpath, kwargs, credit=credit)
        await rig.host.start((expected(spec),))
        await rig.start(Fires, 2)
        await rig.publish(*range(5))
        await rig.confirm()
        await trio.sleep(10 * stream_rig.ACK_TIMEOUT_S)
        await rig.settle()
        assert len([event for event in rig.events if event.trigger_id == 1]) == credit
        assert rig.finished == []
        rig.host.extend(Credit(1, "run-1", credit + 1))
        await trio.sleep(stream_rig.ACK_TIMEOUT_S / 2)
        await rig.settle()
        assert len([event for event in rig.events if event.trigger_id == 1]) == credit + 1
        rig.host.extend(Credit(1, "run-1", 5))
        await rig.settle()
        await rig.confirm()
        assert rig.finished == []
        assert all(rig.broker.outcomes[message] == [AdvanceOutcome(acked=2)] for message in range(4))


async def test_a_stream_that_failed_does_not_wait_for_one_without_credit_and_blames_no_message(
    autojump_clock: MockClock,
) -> None:
    async with stream_rig.hosting() as rig:
        classpath, kwargs = publish(Fires), encode_value({}, where="kwargs")
        await rig.host.start((expected(TriggerSpec(1, "run-1", "slow", classpath, kwargs, credit=1)),))
        await rig.publish(1, 2)
        rig.broker.close()  # its stream returns
        await rig.until_finished()
        (end,) = rig.finished
        assert (end.outcome, end.events, end.message_key) == ("failed", 1, None)
        assert "AckTimeout" in end.error
