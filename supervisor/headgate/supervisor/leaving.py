"""How a supervisor leaves: with which exit code, and until when it waits for what is still under way."""

from __future__ import annotations

import math

from headgate.supervisor import commands
from headgate.supervisor.commands import Exit

LOG_INTERVAL_S = 5.0  # between two records that say for what a drain waits
DRAIN_MARGIN_S = 5.0  # how long after the end of its drain a runner may still exist


class Leaving:
    """The decision to leave, once it is made: the exit so far, and the deadlines. Before that, ``exit`` is None."""

    def __init__(self, *, drain_s: float) -> None:
        self.exit: Exit | None = None
        self.deadline: float | None = None  # then it leaves with what is not stored left unconfirmed
        self.drain_s = drain_s
        self.log_at = math.inf  # when to say for what it waits
        self._cut_short = ""

    @property
    def is_fenced(self) -> bool:
        """Whether it leaves because others own its triggers now: nothing more may be written (I10)."""
        return self.exit is not None and self.exit.code == commands.EXIT_LEASE_LOST

    def begin(self, exit_: Exit, now: float) -> float:
        """Leave after a drain; return the deadline. A lost lease takes the place of an earlier reason."""
        self.exit = exit_
        self.deadline = now + self.drain_s + DRAIN_MARGIN_S
        self.log_at = now + LOG_INTERVAL_S
        return self.deadline

    def begin_without_drain(self, exit_: Exit) -> None:
        """Leave as soon as the runner is gone: nothing could be drained."""
        self.exit = exit_

    def remaining_s(self, now: float) -> float:
        """Return how many seconds the drain may still take."""
        return 0.0 if self.deadline is None else round(max(0.0, self.deadline - DRAIN_MARGIN_S - now), 1)

    def is_drain_over(self, now: float) -> bool:
        """Whether what still runs is to be ended."""
        return self.deadline is not None and now >= self.deadline - DRAIN_MARGIN_S

    def is_past_deadline(self, now: float) -> bool:
        """Whether nothing more is waited for."""
        return self.deadline is not None and now >= self.deadline

    def cut_short(self, reason: str) -> None:
        """Note why a drain did not come to its end. Without one under way this does nothing."""
        if self.exit is not None:
            self._cut_short = reason

    def result(self, now: float, *, is_all_stored: bool) -> Exit | None:
        """Return what to exit with, now that the runner is gone; None while events still wait for the database."""
        if not is_all_stored:
            if self.deadline is not None and now < self.deadline:
                return None
            self.exit = Exit(commands.EXIT_KILLED, "the database was away until the drain's deadline")
        if self._cut_short and self.exit is not None and self.exit.code == commands.EXIT_DRAINED:
            self.exit = Exit(commands.EXIT_KILLED, self._cut_short)
        return self.exit
