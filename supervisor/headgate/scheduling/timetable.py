"""The data intervals of a cron schedule, each from one moment of the expression to the next.

A run is for an interval: it is named after its start (the logical date), and created at its end. cronsim evaluates the
expressions in the DAG's own time zone, by the rules of Debian's cron. At a clock change, a run of an hour that is left
out is due right after it, a run of an hour that occurs twice is due once, and runs every few minutes or hours keep
their pace. Outside this module all times are in UTC.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim

from headgate.protocol.messages.dags import CronSchedule

# Ticks that do not advance, as in the hour that a clock change skips: more in a row than the change has minutes.
SAME_TICKS_MAX = 240
# The search for the last tick before a moment starts this long before it; each next try starts earlier. The longest
# is for 29 February on a Monday, which occurs every 28 years, or after 40 if 2100 is between them.
_LOOK_BACK = tuple(timedelta(days=days) for days in (1 / 24, 1, 40, 500, 366 * 41))


class NoMoment(Exception):
    """The schedule has no next moment, or is not valid; the message says which."""


class Interval(msgspec.Struct, frozen=True):
    """The time from ``start`` up to but not including ``end``; both are aware and in UTC."""

    start: datetime
    end: datetime


def _ticks(schedule: CronSchedule, after: datetime) -> Callable[[], datetime]:
    """Return a function whose calls return the moments after ``after``, in UTC, one by one. Raises `NoMoment`."""
    try:
        ticks = CronSim(schedule.cron, after.astimezone(ZoneInfo(schedule.timezone)))
    except Exception as error:  # for some expressions the library fails an assertion instead of raising its own error
        raise NoMoment(_problem(schedule, error)) from error
    last = after

    def tick() -> datetime:
        nonlocal last
        for _ in range(SAME_TICKS_MAX):
            try:
                moment = next(ticks).astimezone(UTC)
            except StopIteration:
                raise NoMoment(f"{schedule.cron!r} has no moment after {last.isoformat()}") from None
            except Exception as error:
                raise NoMoment(_problem(schedule, error)) from error
            if moment > last:
                last = moment
                return moment
        raise NoMoment(f"{schedule.cron!r} does not move on from {last.isoformat()}")

    return tick


def _problem(schedule: CronSchedule, error: Exception) -> str:
    reason = str(error) or type(error).__name__
    return f"{schedule.cron!r:.100} in {schedule.timezone!r:.100} is not a valid schedule: {reason}"


def moment_after(schedule: CronSchedule, moment: datetime) -> datetime:
    """Return the first moment of the schedule after this one. Raises `NoMoment`."""
    return _ticks(schedule, moment)()


def interval_from(schedule: CronSchedule, moment: datetime) -> Interval:
    """Return the first interval that begins at ``moment`` or later. Raises `NoMoment`."""
    tick = _ticks(schedule, moment - timedelta(microseconds=1))
    return Interval(tick(), tick())


def interval_after(schedule: CronSchedule, interval: Interval) -> Interval:
    """Return the interval that begins where this one ends. Raises `NoMoment`."""
    return Interval(interval.end, _ticks(schedule, interval.end)())


def interval_at(schedule: CronSchedule, now: datetime) -> Interval:
    """Return the interval that contains ``now``. Raises `NoMoment`.

    The search goes forward from earlier moments, because backward cronsim finds other ones at a clock change.
    """
    for back in _LOOK_BACK:
        before, tick = None, _ticks(schedule, now - back)
        while (moment := tick()) <= now:
            before = moment
        if before is not None:
            return Interval(before, moment)
    return interval_from(schedule, now)  # its first moment is in the future


def next_after_change(
    schedule: CronSchedule, now: datetime, upto: datetime, *, start_date: datetime | None, catchup: bool
) -> Interval:
    """Return the next interval of a DAG whose runs by another expression or time zone cover all up to ``upto``.

    No interval that began before that has another run, except the one that contains ``now``. Raises `NoMoment`.
    """
    first = first_interval(schedule, now, start_date=start_date, catchup=catchup)
    if first.start >= upto:
        return first
    current, following = interval_at(schedule, now), interval_from(schedule, upto)
    return current if first.start <= current.start < following.start else following


def first_interval(schedule: CronSchedule, now: datetime, *, start_date: datetime | None, catchup: bool) -> Interval:
    """Return the first interval of a DAG that is new at the time ``now``, or has a new schedule. Raises `NoMoment`.

    With ``catchup`` it is the first one from ``start_date`` on. Without it, past intervals get no run, except the one
    that ended last if ``start_date`` is before it.
    """
    if start_date is not None and (catchup or start_date > now):
        return interval_from(schedule, start_date)
    current = interval_at(schedule, now)
    if start_date is None:
        return current
    past = interval_at(schedule, current.start - timedelta(microseconds=1))
    return (
        past if past.start >= start_date and past.end == current.start else _not_before(schedule, current, start_date)
    )


def _not_before(schedule: CronSchedule, interval: Interval, start_date: datetime) -> Interval:
    return interval if interval.start >= start_date else interval_after(schedule, interval)


def due(schedule: CronSchedule, next_: Interval, now: datetime, *, catchup: bool) -> tuple[Interval, Interval]:
    """Return the interval of the run that is due, ``next_`` having ended, and the next one. Raises `NoMoment`.

    Without ``catchup`` the run is for the interval that ended last, however many have since the last run was made.
    """
    assert next_.end <= now
    if not catchup:
        current = interval_at(schedule, now)
        if current.start > next_.end:
            return interval_at(schedule, current.start - timedelta(microseconds=1)), current
    return next_, interval_after(schedule, next_)
