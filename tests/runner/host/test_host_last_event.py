"""A trigger says that an event is its last, or has nothing to add to what an earlier run of it has fired."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.runner.host.host_rig import SETTINGS, Authored, beside_a_neighbour, hosting
from trio.testing import MockClock

from headgate.triggers.base import TaskSuccessEvent, TriggerEvent


async def test_the_last_event_travels_as_such_and_the_code_behind_it_runs(autojump_clock: MockClock) -> None:
    seen: list[str] = []

    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(1)
            yield TriggerEvent(2, is_last=True)
            await trio.sleep(1)
            seen.append("behind it")

        async def cleanup(self) -> None:
            await trio.lowlevel.checkpoint()
            seen.append("cleanup")

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        end = await rig.end_of()
        assert (end.outcome, end.reason, end.error, end.events) == ("returned", None, "", 2)
        assert [(event.payload, event.is_last, event.kind) for event in rig.events()] == [
            (b"1", False, "event"),
            (b"2", True, "event"),
        ]
        assert seen == ["behind it", "cleanup"]


async def test_an_event_behind_the_last_is_an_error_with_the_name_and_is_not_stored(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(1, is_last=True)
            yield TriggerEvent(2)

    async with beside_a_neighbour() as rig:
        await rig.start(Trigger)
        end = await rig.end_of()
        assert (end.outcome, end.reason, end.events) == ("returned", None, 1)
        assert end.error.startswith(
            "FiredAfterLast: authors_of_tests.Trigger fired an event after the one with is_last"
        )
        assert [event.payload for event in rig.events()] == [b"1"]


async def test_the_code_behind_the_last_event_has_the_time_of_a_cancellation(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(1, is_last=True)
            await trio.sleep_forever()

    async with hosting(SETTINGS) as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "returned"
        assert trio.current_time() == SETTINGS.cancel_grace_s


async def test_the_one_event_of_a_task_is_its_last_and_nothing_behind_it_runs(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(1, is_last=True)
            raise AssertionError("never reached")

    async with hosting() as rig:
        await rig.start_for_a_task(Trigger)
        end = await rig.end_of()
        assert (end.outcome, end.error) == ("returned", "")


async def test_a_last_event_that_cannot_be_stored_ends_the_run_too(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            yield TriggerEvent(print, is_last=True)

    async with hosting() as rig:
        await rig.start(Trigger)
        assert (await rig.end_of()).outcome == "returned"
        assert [letter.is_last for letter in rig.refused()] == [True]


async def test_a_run_may_add_nothing_to_what_an_earlier_one_has_fired(autojump_clock: MockClock) -> None:
    class Trigger(Authored):
        async def run(self) -> AsyncIterator[TriggerEvent]:
            if (await self.last_event()) is None:
                yield TriggerEvent(1)

    async with hosting() as rig:
        await rig.start(Trigger)
        end = await rig.end_of()
        assert (end.outcome, end.events, end.error) == ("returned", 0, "")
        await rig.start_for_a_task(Trigger, trigger_id=2)
        end = await rig.end_of(2)
        assert (end.outcome, end.error) == (
            "failed",
            "ReturnedBeforeFirstEvent: authors_of_tests.Trigger returned before its first event",
        )


def test_an_event_says_that_it_is_the_last() -> None:
    assert repr(TriggerEvent(1, key="k", is_last=True)) == "TriggerEvent(1, key='k', is_last=True)"
    assert TriggerEvent(1, is_last=True) != TriggerEvent(1)
    assert TaskSuccessEvent().is_last
    wrong: Any = 1
    with pytest.raises(TypeError, match="is_last must be a bool, not int"):
        TriggerEvent(1, is_last=wrong)


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ValueError, match="key must not be empty: an event without a key has None"):
        TriggerEvent(1, key="")
