"""How long to wait before the next try: exponential with jitter, by tenacity's arithmetic.

The waits are computed, not slept: the core is told the time and says when it wants to be woken.
"""

from __future__ import annotations

from typing import Any, cast

import tenacity


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
