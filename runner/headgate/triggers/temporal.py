"""Triggers that wait for a point in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import trio

from headgate.triggers.base import BaseTrigger, TriggerEvent

__all__ = ["DateTimeTrigger", "TimeDeltaTrigger"]

# The loop's clock is monotonic: it does not follow when the wall clock is set, and it stops while the machine is
# suspended. So no sleep is longer than this without a look at the wall clock, and a trigger can be this late.
WALL_CLOCK_CHECK_S = 30.0


def utc_now() -> datetime:
    """Return the wall clock's time, aware and in UTC."""
    return datetime.now(UTC)


class DateTimeTrigger(BaseTrigger):
    """Fires once, when the wall clock reaches ``moment``; at once if it has passed. The payload is the moment in UTC.

    The moment is also the event's key: if the trigger runs again after it fired, the event is a redelivery (I2).
    Raises TypeError if ``moment`` is not a datetime, ValueError for a naive one, which depends on the machine.
    ``clock`` returns aware datetimes, is for tests, and is not serialized.
    """

    def __init__(self, moment: datetime, *, clock: Callable[[], datetime] = utc_now) -> None:
        if not isinstance(moment, datetime):
            raise TypeError(f"moment must be a datetime, not {type(moment).__name__}")
        if moment.utcoffset() is None:
            raise ValueError(f"moment must have a time zone; {moment.isoformat()} has none")
        self.moment = moment.astimezone(UTC)
        self._clock = clock

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class and the moment in UTC."""
        return self._classpath(), {"moment": self.moment}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait in bounded sleeps, then yield one event."""
        await trio.lowlevel.checkpoint()
        while True:
            remaining_s = (self.moment - self._clock()).total_seconds()
            if remaining_s <= 0:
                break
            await trio.sleep(min(remaining_s, WALL_CLOCK_CHECK_S))
        yield TriggerEvent(self.moment, key=self.moment.isoformat())


class TimeDeltaTrigger(DateTimeTrigger):
    """Fires once, ``delta`` after it was constructed.

    It is serialized as a `DateTimeTrigger` with the moment computed, so that the wait of a deferred task does not
    restart with the runner. A watcher's kwargs are stored as they were given, so the wait of a watcher of this class
    does restart; use `DateTimeTrigger` if it must not.
    Raises TypeError if ``delta`` is not a timedelta, ValueError if it is negative or leads past the year 9999.
    """

    def __init__(self, delta: timedelta, *, clock: Callable[[], datetime] = utc_now) -> None:
        if not isinstance(delta, timedelta):
            raise TypeError(f"delta must be a timedelta, not {type(delta).__name__}")
        if delta < timedelta(0):
            raise ValueError(f"delta must not be negative: {delta}")
        try:
            moment = clock() + delta
        except OverflowError as error:
            raise ValueError(f"delta is too long: {delta}") from error
        super().__init__(moment, clock=clock)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return a `DateTimeTrigger` that waits for the same moment."""
        return f"{DateTimeTrigger.__module__}.{DateTimeTrigger.__qualname__}", {"moment": self.moment}
