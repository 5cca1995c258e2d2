"""The trigger of a task is over with its first event, and any trigger with an event that ends a task (I8)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.runner.host.host_rig import REASONS, SETTINGS, Authored, beside_a_neighbour, hosting
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.protocol.messages.runner import CancelReason
from headgate.triggers.base import TaskSuccessEvent, TriggerEvent

FOREVER = object()


FIRED_MAX = 1000  # by a `Counting`


class Counting(Authored):
    """Fires more often than any test lets it, and writes down how far it came and what is called.

    What is held back by nothing comes to an end as well, so that the test fails, and does not hang.
    """

    seen: list[str]

    def __init_subclass__(cls) -> None:
        cls.seen = []

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            for number in range(FIRED_MAX):
                yield TriggerEvent(number)
                self.seen.append(f"went on to {number + 1}")
            await trio.sleep_forever()
        finally:
            self.seen.append("closed")

    async def cleanup(self) -> None:
        await trio.lowlevel.checkpoint()
        self.seen.append("cleanup")

    async def on_kill(self) -> None:
        self.seen.append("on_kill")


async def test_the_trigger_of_a_task_is_closed_cleaned_up_and_reported_after_its_first_event(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Counting):
        pass

    async with beside_a_neighbour() as rig:
        await rig.start_for_a_task(Trigger)
        end = await rig.end_of()
        assert (end.outcome, end.reason, end.error, end.events) == ("returned", None, "", 1)
        assert [event.payload for event in rig.events()] == [b"0"]
        assert Trigger.seen == ["closed", "cleanup"]
        assert trio.current_time() == 0.0, "at once"


async def test_a_refused_event_is_the_one_event_too(autojump_clock: MockClock) -> None:
    class Trigger(Counting):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(FOREVER)
            yield TriggerEvent("the second")

    async with hosting() as rig:
        await rig.start_for_a_task(Trigger)
        end = await rig.end_of()
        assert (end.outcome, end.events) == ("returned", 1)
        assert (len(rig.refused()), rig.events()) == (1, [])


async def wait_for_ever(self: Any) -> AsyncIterator[TriggerEvent]:
    yield TriggerEvent(1)
    await trio.sleep_forever()


async def raise_afterwards(self: Any) -> AsyncIterator[TriggerEvent]:
    yield TriggerEvent(1)
    raise ValueError("never reached")


async def raise_while_closed(self: Any) -> AsyncIterator[TriggerEvent]:
    try:
        yield TriggerEvent(1)
    finally:
        raise ValueError("boom")


async def ignore_the_end(self: Any) -> AsyncIterator[TriggerEvent]:
    try:
        yield TriggerEvent(1)
    finally:
        yield TriggerEvent("too late")


async def end_the_task_and_ignore_the_end(self: Any) -> AsyncIterator[TriggerEvent]:
    try:
        yield TaskSuccessEvent()
    finally:
        yield TriggerEvent("too late")


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (wait_for_ever, ""),
        (raise_afterwards, ""),
        (raise_while_closed, "ValueError: boom"),
        (ignore_the_end, "RuntimeError: async generator ignored GeneratorExit"),
        (end_the_task_and_ignore_the_end, "RuntimeError: async generator ignored GeneratorExit"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_whatever_a_trigger_does_after_its_event_its_run_has_returned(
    autojump_clock: MockClock, run: Any, error: str
) -> None:
    class Trigger(Authored):
        pass

    Trigger.run = run  # type: ignore[method-assign]
    Trigger.__abstractmethods__ = frozenset()
    async with beside_a_neighbour() as rig:
        await rig.start_for_a_task(Trigger)  # type: ignore[type-abstract]
        end = await rig.end_of()
        assert (end.outcome, end.reason, end.events, end.error) == ("returned", None, 1, error)
        assert len(rig.events()) == 1


async def test_closing_that_takes_too_long_is_cancelled_and_the_run_has_returned_all_the_same(
    autojump_clock: MockClock,
) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            try:
                yield TriggerEvent(1)
            finally:
                await trio.sleep_forever()

    async with beside_a_neighbour() as rig:
        await rig.start_for_a_task(Trigger)
        end = await rig.end_of()
        assert (end.outcome, end.error) == ("returned", "")
        assert trio.current_time() == SETTINGS.cancel_grace_s
        assert rig.take_stuck() == []


async def test_closing_that_swallows_its_cancellation_is_reported_stuck(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            try:
                yield TriggerEvent(1)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(1000.0)

    async with hosting() as rig:
        await rig.start_for_a_task(Trigger)
        await rig.until(rig.take_stuck)
        assert rig.stuck == [1]
        assert trio.current_time() == 2 * SETTINGS.cancel_grace_s


@pytest.mark.parametrize("reason", REASONS)
async def test_a_cancellation_after_the_event_changes_the_end_only_if_a_user_acts(
    autojump_clock: MockClock, reason: CancelReason
) -> None:
    class Trigger(Counting):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            try:
                yield TriggerEvent(1)
            finally:
                await trio.sleep(3.0)

    async with hosting() as rig:
        await rig.start_for_a_task(Trigger)
        await rig.until(rig.events)
        await wait_all_tasks_blocked()
        rig.cancel(reason)
        end = await rig.end_of()
        is_users = reason == "user"
        assert (end.outcome, end.reason) == (("cancelled", "user") if is_users else ("returned", None))
        assert Trigger.seen == (["on_kill", "cleanup"] if is_users else ["cleanup"])


async def test_a_watcher_goes_on_after_its_first_event(autojump_clock: MockClock) -> None:
    class Trigger(Counting):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            for number in range(3):
                yield TriggerEvent(number)

    async with hosting() as rig:
        await rig.start(Trigger)
        await rig.end_of()
        assert len(rig.events()) == 3
