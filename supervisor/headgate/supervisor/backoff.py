"""When to try again: exponential waits with jitter, by tenacity's arithmetic.

The waits are computed and not slept: the caller passes the time in, and asks when to wake up.
"""

from __future__ import annotations

from typing import Any, cast

import structlog
import tenacity

log = structlog.get_logger(__name__)


class Waits:
    """The waits of many counts of tries that failed in a row: `after` says how long each is.

    The n-th wait is ``wait_s * 2**(n-1)`` seconds, at most ``wait_max_s``, plus up to half of ``wait_s`` of jitter,
    so that many that failed together do not come back together. The jitter is drawn from the `random`
    module, whose seed a simulation sets.
    """

    def __init__(self, wait_s: float, wait_max_s: float) -> None:
        self._wait = tenacity.wait_exponential_jitter(multiplier=wait_s, max=wait_max_s, jitter=wait_s / 2)

    def after(self, failures: int) -> float:
        """Return the seconds to wait after so many failures in a row, at least one."""
        # tenacity reads nothing of the call state but the number of the attempt.
        state = tenacity.RetryCallState(cast(Any, None), None, (), {})
        state.attempt_number = failures
        return float(self._wait(state))


class Backoff:
    """Counts tries that failed in a row, and says how many seconds to wait before the next; see `Waits`."""

    def __init__(self, wait_s: float, wait_max_s: float) -> None:
        self.failures = 0
        self._waits = Waits(wait_s, wait_max_s)

    def fail(self) -> float:
        """Count one more failure; return the seconds to wait."""
        self.failures += 1
        return self._waits.after(self.failures)

    def succeed(self) -> None:
        """Forget the failures: the next one waits ``wait_s`` again."""
        self.failures = 0


class DatabaseOutage:
    """Logs an outage of the database once for all duties that meet it, and once that it is over.

    It begins when the first duty fails, and is over when all that failed have succeeded.
    """

    def __init__(self) -> None:
        self._failing: set[str] = set()
        self._began_at = 0.0
        self._logged: set[type[Exception]] = set()

    def failed(self, duty: str, error: Exception, now: float, retry_in_s: float) -> None:
        """Count a duty as failing. Logs the first error of each class: a database may be away, and then read-only."""
        if not self._failing:
            self._began_at = now
            self._logged.clear()
        self._failing.add(duty)
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.warning("the database cannot be used", duty=duty, error=str(error), retry_in_s=round(retry_in_s, 3))

    def succeeded(self, duty: str, now: float) -> None:
        """Count a duty as no longer failing."""
        if duty in self._failing:
            self._failing.remove(duty)
            if not self._failing:
                log.info("the database is back", away_s=round(now - self._began_at, 3))


class DatabaseRetry:
    """When one duty may use the database again after it could not; ``duty`` names it in the log.

    Without an ``outage`` nothing is logged. That is for a duty that may fail and not be tried again: it would keep the
    outage of the others open.
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
        """Note that the database could not be used; return when it may be tried again."""
        wait_s = self._backoff.fail()
        self.at = now + wait_s
        if self._outage is not None:
            self._outage.failed(self._duty, error, now, wait_s)
        return self.at

    def succeeded(self, now: float) -> None:
        """Note that the database did what the duty asked for."""
        if self._backoff.failures:
            self._backoff.succeed()
            if self._outage is not None:
                self._outage.succeeded(self._duty, now)
