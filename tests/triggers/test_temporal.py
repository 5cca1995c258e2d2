"""Triggers of a moment and of a duration, on a clock that the tests set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
import trio
from trio.testing import MockClock

from headgate.triggers.base import TriggerEvent
from headgate.triggers.temporal import WALL_CLOCK_CHECK_S, DateTimeTrigger, TimeDeltaTrigger

NOON = datetime(2024, 2, 29, 12, tzinfo=UTC)


class WallClock:
    """A wall clock that runs with the loop's clock and can be set."""

    def __init__(self) -> None:
        self.offset = timedelta(0)

    def __call__(self) -> datetime:
        return NOON + timedelta(seconds=trio.current_time()) + self.offset


async def fire(trigger: DateTimeTrigger) -> list[TriggerEvent]:
    return [event async for event in trigger.run()]


async def test_a_moment_fires_once_when_the_wall_clock_reaches_it(autojump_clock: MockClock) -> None:
    moment = NOON + timedelta(hours=5)
    events = await fire(DateTimeTrigger(moment, clock=WallClock()))
    assert trio.current_time() == pytest.approx(5 * 3600, abs=0.01)
    assert events == [TriggerEvent(moment, key="2024-02-29T17:00:00+00:00")]


async def test_a_moment_that_has_passed_fires_at_once(autojump_clock: MockClock) -> None:
    assert len(await fire(DateTimeTrigger(NOON - timedelta(days=1), clock=WallClock()))) == 1
    assert trio.current_time() == 0


@pytest.mark.parametrize("change_s", [1800, -1800])
async def test_a_wall_clock_that_is_set_while_waiting_is_noticed_within_the_limit(
    autojump_clock: MockClock, change_s: int
) -> None:
    clock = WallClock()

    async def set_clock() -> None:
        await trio.sleep(600)
        clock.offset = timedelta(seconds=change_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(set_clock)
        await fire(DateTimeTrigger(NOON + timedelta(hours=1), clock=clock))
    due = 3600 - change_s
    assert due - 0.01 <= trio.current_time() <= due + WALL_CLOCK_CHECK_S


@pytest.mark.parametrize("bad", [datetime(2024, 1, 1), "2024-01-01", None])
def test_a_moment_that_is_not_an_aware_datetime_is_refused(bad: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"moment must (be a datetime|have a time zone)"):
        DateTimeTrigger(bad)  # type: ignore[arg-type]


def test_a_moment_is_kept_in_utc_and_is_restored_equal() -> None:
    trigger = DateTimeTrigger(datetime(2024, 2, 29, 13, tzinfo=timezone(timedelta(hours=1))))
    classpath, kwargs = trigger.serialize()
    assert classpath == "headgate.triggers.temporal.DateTimeTrigger"
    assert kwargs == {"moment": NOON}
    assert kwargs["moment"].tzinfo is UTC
    assert DateTimeTrigger(**kwargs).serialize() == (classpath, kwargs)


async def test_a_delta_fires_that_much_later(autojump_clock: MockClock) -> None:
    events = await fire(TimeDeltaTrigger(timedelta(minutes=3), clock=WallClock()))
    assert trio.current_time() == pytest.approx(180, abs=0.01)
    assert [event.payload for event in events] == [NOON + timedelta(minutes=3)]


def test_a_delta_is_serialized_as_its_moment_so_that_a_restart_does_not_begin_anew() -> None:
    trigger = TimeDeltaTrigger(timedelta(hours=2), clock=lambda: NOON)
    assert trigger.serialize() == (
        "headgate.triggers.temporal.DateTimeTrigger",
        {"moment": NOON + timedelta(hours=2)},
    )


@pytest.mark.parametrize("bad", [timedelta(seconds=-1), timedelta.max, 5])
def test_a_delta_that_leads_nowhere_is_refused(bad: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"delta (must|is too long)"):
        TimeDeltaTrigger(bad)  # type: ignore[arg-type]
