"""The end of a supervisor: its exit code, and the deadlines for work that is still in progress."""

from __future__ import annotations

import math
from collections.abc import Sequence

import structlog

from headgate.store.ids import TryName
from headgate.supervisor import commands
from headgate.supervisor.commands import Exit

log = structlog.get_logger(__name__)

LOG_INTERVAL_S = 5.0  # between two records that say what a drain waits for
TASKS_NAMED_MAX = 5  # of the tasks for which a drain waits, in one record
DRAIN_MARGIN_S = 5.0  # after the end of its drain, until a runner is killed
# A database that hangs holds the supervisor up: for `transaction.ANSWER_MAX_S` in the transaction in which it is asked
# to stop, then for `engine.CONNECT_TIMEOUT_S` in each attempt to connect, of which a step of the drain makes a few.
HANG_MARGIN_S = 60.0


class Leaving:
    """The decision to leave: the exit so far, and the deadlines. Before the decision, ``exit`` is None."""

    def __init__(self, *, drain_s: float) -> None:
        self.exit: Exit | None = None
        self.deadline: float | None = None  # then it leaves, even if events are not stored and not confirmed
        self.drain_s = drain_s
        self.has_released = False  # the triggers, while tasks still run
        self.log_at = math.inf  # the next record that says what the drain waits for
        self._cut_short = ""

    @property
    def is_fenced(self) -> bool:
        """Whether it leaves because others own its triggers now: nothing more may be written (I10)."""
        return self.exit is not None and self.exit.code == commands.EXIT_LEASE_LOST

    def begin(self, exit_: Exit, now: float) -> float:
        """Leave after a drain; return the deadline. A lost lease replaces an earlier reason."""
        self.exit = exit_
        self.deadline = now + self.drain_s + DRAIN_MARGIN_S
        self.log_at = now + LOG_INTERVAL_S
        return self.deadline

    def begin_without_drain(self, exit_: Exit) -> None:
        """Leave when the runner has ended, which cannot be drained: `runner_ended` begins the drain of the rest."""
        self.exit = exit_

    def runner_ended(self, now: float) -> None:
        """Give what is still in progress the time of a drain, if it leaves without one of the runner."""
        if self.exit is not None and self.deadline is None:
            self.begin(self.exit, now)

    def remaining_s(self, now: float) -> float:
        """Return the seconds that are left for the drain."""
        return 0.0 if self.deadline is None else round(max(0.0, self.deadline - DRAIN_MARGIN_S - now), 1)

    def is_drain_over(self, now: float) -> bool:
        """Whether work that still runs is to be ended."""
        return self.deadline is not None and now >= self.deadline - DRAIN_MARGIN_S

    def is_past_deadline(self, now: float) -> bool:
        """Whether the supervisor must leave without waiting any longer."""
        return self.deadline is not None and now >= self.deadline

    def cut_short(self, reason: str) -> None:
        """Set the reason why the drain was not completed. Does nothing if there is no drain."""
        if self.exit is not None:
            self._cut_short = reason

    def log(self, now: float, *, has_runner: bool, has_events: bool, tasks: Sequence[TryName]) -> None:
        """Log what the drain waits for, and do it again later: the runner, events to be stored, and running tasks."""
        self.log_at = now + LOG_INTERVAL_S
        waits_for = ["the runner"] * has_runner + ["events to be stored"] * has_events
        if tasks:
            names = ", ".join(f"{task.dag_id}/{task.run_id}/{task.task_id}" for task in tasks[:TASKS_NAMED_MAX])
            more = ", ..." if len(tasks) > TASKS_NAMED_MAX else ""
            waits_for.append(f"{len(tasks)} task{'s' if len(tasks) > 1 else ''}: {names}{more}")
        if waits_for:
            log.info("the drain waits", waits_for="; ".join(waits_for), ends_in_s=self.remaining_s(now))

    def result(self, now: float, *, is_all_stored: bool) -> Exit | None:
        """Return the exit, now that the runner has ended; None while events still wait for the database."""
        if not is_all_stored:
            if self.deadline is not None and now < self.deadline:
                return None
            self.exit = Exit(commands.EXIT_KILLED, "the database was away until the drain's deadline")
        if self._cut_short and self.exit is not None and self.exit.code == commands.EXIT_DRAINED:
            self.exit = Exit(commands.EXIT_KILLED, self._cut_short)
        return self.exit
