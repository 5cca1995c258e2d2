"""Exponential backoff with jitter, computed by tenacity.

The waits are only computed: the caller passes the time, and asks when to try again.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import structlog
import tenacity

from headgate.store.errors import DATABASE_UNUSABLE, DatabaseAway
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.figures import Figures

log = structlog.get_logger(__name__)

FAILURES_COUNTED_MAX = 32  # of one window: the wait after so many has long reached its limit


class Waits:
    """The wait after any number of failures in a row.

    The n-th wait is ``wait_s * 2**(n-1)`` seconds, at most ``wait_max_s``, plus up to half of ``wait_s`` of jitter, so
    that tries that failed together are not repeated together. The jitter is drawn from the `random` module, whose
    seed a simulation sets.
    """

    def __init__(self, wait_s: float, wait_max_s: float) -> None:
        self._wait = tenacity.wait_exponential_jitter(multiplier=wait_s, max=wait_max_s, jitter=wait_s / 2)

    def after(self, failures: int) -> float:
        """Return the seconds to wait after so many failures in a row, at least one."""
        # tenacity reads only the number of the attempt from the call state.
        state = tenacity.RetryCallState(cast(Any, None), None, (), {})
        state.attempt_number = failures
        return float(self._wait(state))


class Backoff:
    """Counts failures in a row, and computes the seconds to wait before the next try; see `Waits`."""

    def __init__(self, wait_s: float, wait_max_s: float) -> None:
        self.failures = 0
        self._waits = Waits(wait_s, wait_max_s)

    def fail(self) -> float:
        """Count one more failure; return the seconds to wait."""
        self.failures += 1
        return self._waits.after(self.failures)

    def succeed(self) -> None:
        """Reset the count: the next failure waits ``wait_s`` again."""
        self.failures = 0


class RateBackoff:
    """Computes waits from the rate of failures: only those within the last ``window_s`` seconds count; see `Waits`.

    So a failure once in ``window_s`` always waits ``wait_s``, however often that has happened before, and many failures
    at once wait longer and longer.
    """

    def __init__(self, wait_s: float, wait_max_s: float, window_s: float) -> None:
        self._waits = Waits(wait_s, wait_max_s)
        self._window_s = window_s
        self._failed_at: deque[float] = deque(maxlen=FAILURES_COUNTED_MAX)

    def fail(self, now: float) -> float:
        """Count one more failure; return the seconds to wait."""
        self._failed_at.append(now)
        while self._failed_at[0] <= now - self._window_s:
            self._failed_at.popleft()
        return self._waits.after(len(self._failed_at))

    def first(self) -> float:
        """Return the seconds to wait after a failure that does not count."""
        return self._waits.after(1)


TOLD_AFTER = 3
TROUBLE_CHARS_MAX = 500
KINDS_LOGGED_MAX = 8  # of one outage
_VARIES = re.compile(r"\d+|\"[^\"]*\"|'[^']*'")  # numbers and quoted names: two errors of one kind may differ in them


class DatabaseOutage:
    """Logs the beginning and the end of an outage of the database once for all duties together.

    It begins when the first duty fails, and is over when all that failed have succeeded.
    """

    def __init__(self, figures: Figures | None = None) -> None:
        self._figures = Figures() if figures is None else figures
        self._failing: dict[str, tuple[int, str]] = {}  # how often in a row, and the last error
        self._began_at = 0.0
        self._away_at = -math.inf  # when it was found away last
        self._logged: set[tuple[type[Exception], str]] = set()
        self._reason = ""

    def failed(self, duty: str, error: Exception, now: float, retry_in_s: float) -> None:
        """Count a duty as failing. Logs the first error of each kind: a database may be away, and then read-only.

        Errors without a code tell by their texts alone what has happened, so a kind is a class and a text.
        """
        self._figures.add(catalogue.DATABASE_ERRORS)
        if not self._failing:
            self._began_at = now
            self._logged.clear()
        self._failing[duty] = (self._failing.get(duty, (0, ""))[0] + 1, str(error))
        self._reason = " ".join(str(getattr(error, "reason", error)).split())[:TROUBLE_CHARS_MAX]
        if isinstance(error, DatabaseAway):
            self._away_at = now
        kind = type(error), _VARIES.sub("", str(error))
        if kind not in self._logged and len(self._logged) < KINDS_LOGGED_MAX:
            self._logged.add(kind)
            log.warning("the database cannot be used", duty=duty, error=str(error), retry_in_s=round(retry_in_s, 3))

    def away_s(self, now: float) -> float:
        """Return for how long the database could not be used by now; 0 if it can."""
        return max(0.001, now - self._began_at) if self._failing else 0.0

    def is_away_again(self, now: float) -> bool:
        """Whether the database, which could not be used before now, has been found away in the step that began now."""
        return bool(self._failing) and self._began_at < now <= self._away_at

    def reason(self) -> str:
        """Return why the database could not be used last, without its URL; "" if it can be used."""
        return self._reason if self._failing else ""

    def trouble(self) -> str:
        """Return a duty that has failed `TOLD_AFTER` times in a row or more, and why; "" if there is none.

        It matters to others if the supervisor can use the database for its other duties.
        """
        told = [f"{duty}: {error}" for duty, (times, error) in sorted(self._failing.items()) if times >= TOLD_AFTER]
        return told[0][:TROUBLE_CHARS_MAX] if told else ""

    def succeeded(self, duty: str, now: float) -> None:
        """Count a duty as no longer failing."""
        if duty in self._failing:
            del self._failing[duty]
            if not self._failing:
                log.info("the database is back", away_s=round(now - self._began_at, 3))


class DatabaseRetry:
    """The time at which one duty may use the database again after a failure; ``duty`` is its name in the log.

    Without an ``outage`` nothing is logged. That is for a duty that may never run again after a failure: it would keep
    the outage of the others open.
    """

    def __init__(self, duty: str, wait_s: float, wait_max_s: float, outage: DatabaseOutage | None = None) -> None:
        self._duty = duty
        self._backoff = Backoff(wait_s, wait_max_s)
        self._outage = outage
        self.at = 0.0

    def ready(self, now: float) -> bool:
        """Whether the duty may use the database."""
        return now >= self.at

    def failed(self, error: Exception, now: float) -> float:
        """Record that the database could not be used; return the time of the next try."""
        wait_s = self._backoff.fail()
        self.at = now + wait_s
        if self._outage is not None:
            self._outage.failed(self._duty, error, now, wait_s)
        return self.at

    def succeeded(self, now: float) -> None:
        """Record that the duty used the database successfully."""
        if self._backoff.failures:
            self._backoff.succeed()
            if self._outage is not None:
                self._outage.succeeded(self._duty, now)

    @contextmanager
    def attempt(self, now: float) -> Generator[None]:
        """Record whether the block could use the database. If not, the rest of the block is left out."""
        try:
            yield
        except DATABASE_UNUSABLE as exc:
            self.failed(exc, now)
        else:
            self.succeeded(now)
