"""When a DAG is due: intervals by a cron expression, over both clock changes of a time zone."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from headgate.protocol.messages.dags import CronSchedule
from headgate.scheduling import timetable
from headgate.scheduling.timetable import Interval, NoMoment

BERLIN = ZoneInfo("Europe/Berlin")
SPRING = datetime(2026, 3, 28, 23, tzinfo=UTC)  # 29 March 00:00 in Berlin; 02:00 to 03:00 is left out
AUTUMN = datetime(2026, 10, 24, 22, tzinfo=UTC)  # 25 October 00:00; 02:00 to 03:00 comes twice
DAILY = CronSchedule("0 0 * * *")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def local_ends(cron: str, begin: datetime, count: int) -> list[str]:
    """Return the ends of some intervals, one after the other, as clocks in Berlin show them."""
    schedule = CronSchedule(cron, "Europe/Berlin")
    interval = timetable.interval_from(schedule, begin)
    shown = [interval.start]
    while len(shown) < count:
        assert interval.end > interval.start
        shown.append(interval.end)
        interval = timetable.interval_after(schedule, interval)
    return [moment.astimezone(BERLIN).strftime("%d %H:%M%z")[:8] for moment in shown]


@pytest.mark.parametrize(
    ("cron", "begin", "expected"),
    [
        # In spring what is to happen in the hour that is left out happens right after it, once.
        ("30 2 * * *", SPRING, ["29 03:00", "30 02:30", "31 02:30"]),
        ("0 2,3 * * *", SPRING, ["29 03:00", "30 02:00", "30 03:00"]),
        ("0 * * * *", SPRING, ["29 00:00", "29 01:00", "29 03:00", "29 04:00"]),
        ("*/30 1-3 * * *", SPRING, ["29 01:00", "29 01:30", "29 03:00", "29 03:30"]),
        # In autumn what is to happen at an hour that comes twice happens once; what goes on, goes on.
        ("30 2 * * *", AUTUMN, ["25 02:30", "26 02:30"]),
        ("0 * * * *", AUTUMN, ["25 00:00", "25 01:00", "25 02:00", "25 02:00", "25 03:00"]),
        ("0 3 * * *", AUTUMN, ["25 03:00", "26 03:00"]),
    ],
)
def test_a_clock_change_leaves_out_nothing_and_doubles_nothing(cron: str, begin: datetime, expected: list[str]) -> None:
    assert local_ends(cron, begin, len(expected)) == expected


@pytest.mark.parametrize("cron", ["30 2 * * *", "*/20 * * * *", "0 */6 * * *", "15 1-3 * * *", "0 0 * * *"])
@pytest.mark.parametrize("begin", [SPRING, AUTUMN])
def test_every_moment_around_a_clock_change_lies_in_exactly_one_interval(cron: str, begin: datetime) -> None:
    schedule = CronSchedule(cron, "Europe/Berlin")
    found: list[Interval] = []
    for minutes in range(-120, 48 * 60, 7):
        moment = begin + timedelta(minutes=minutes)
        interval = timetable.interval_at(schedule, moment)
        assert interval.start <= moment < interval.end
        if not found or found[-1] != interval:
            found.append(interval)
    assert all(one.end == next_.start for one, next_ in itertools.pairwise(found))


def test_the_interval_of_a_moment_begins_with_it() -> None:
    day = Interval(at("2026-05-01"), at("2026-05-02"))
    assert timetable.interval_at(DAILY, at("2026-05-01")) == day
    assert timetable.interval_at(DAILY, at("2026-05-01T23:59:59.999999")) == day
    assert timetable.interval_from(DAILY, at("2026-05-01")) == day
    assert timetable.interval_from(DAILY, at("2026-04-30T00:00:01")) == day


@pytest.mark.parametrize(
    ("cron", "start", "end"),
    [
        ("0 0 29 2 *", "2024-02-29", "2028-02-29"),
        ("0 0 29 2 MON", "2026-02-23", "2027-02-01"),  # the 29th, and Mondays
        ("* * * * *", "2026-05-05T12:30", "2026-05-05T12:31"),
    ],
)
def test_expressions_that_match_rarely_are_found_as_well(cron: str, start: str, end: str) -> None:
    now = at("2026-05-05T12:30:30")
    interval = timetable.interval_at(CronSchedule(cron), now)
    assert interval.start <= now < interval.end
    assert interval == Interval(at(start), at(end))


@pytest.mark.parametrize(
    "schedule",
    [
        CronSchedule("0 0 31 2 *"),
        CronSchedule("* * * *"),
        CronSchedule("x y z a b"),
        CronSchedule("* * * * *", "Nowhere/Land"),
        CronSchedule("61 * * * *"),
    ],
)
def test_what_is_no_schedule_is_named(schedule: CronSchedule) -> None:
    with pytest.raises(NoMoment, match="is not a valid schedule"):
        timetable.interval_from(schedule, at("2026-01-01"))


NOW = at("2026-05-05T12:00")


@pytest.mark.parametrize(
    ("start_date", "catchup", "expected"),
    [
        (None, False, "2026-05-05"),  # nothing is asked for of the time before it was there
        (at("2026-01-01"), False, "2026-05-04"),  # the latest
        (at("2026-01-01"), True, "2026-01-01"),
        (at("2026-01-01T10:00"), True, "2026-01-02"),
        (at("2026-05-04T10:00"), False, "2026-05-05"),
        (at("2026-05-05T10:00"), False, "2026-05-06"),
        (at("2026-06-01T10:00"), False, "2026-06-02"),
        (at("2026-06-01"), True, "2026-06-01"),
    ],
)
def test_a_new_dag_begins_where_its_author_says(start_date: datetime | None, catchup: bool, expected: str) -> None:
    first = timetable.first_interval(DAILY, NOW, start_date=start_date, catchup=catchup)
    assert first == Interval(at(expected), at(expected) + timedelta(days=1))


def test_what_was_missed_is_caught_up_one_after_the_other_or_left_out() -> None:
    missed = Interval(at("2026-05-01"), at("2026-05-02"))
    second = Interval(at("2026-05-02"), at("2026-05-03"))
    assert timetable.due(DAILY, missed, NOW, catchup=True) == (missed, second)
    latest = Interval(at("2026-05-04"), at("2026-05-05"))
    current = Interval(at("2026-05-05"), at("2026-05-06"))
    assert timetable.due(DAILY, missed, NOW, catchup=False) == (latest, current)
    assert timetable.due(DAILY, latest, NOW, catchup=False) == (latest, current)
