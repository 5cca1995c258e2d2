"""How threads ask a loop, a supervisor's or that of a server of signals, how it is, and whether it turns at all.

A report is made by the loop between two turns, only while somebody waits for one: so what it says is true now, and a
process that nobody asks computes nothing. Whether the loop turns is read from one number, without asking it. If it is
busy, scrapes get what it said last, as unready: series that end would end the alerts about them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from headgate.supervisor.metrics.catalogue import Metric
from headgate.supervisor.metrics.figures import Snapshot

REPORT_WAIT_S = 5.0  # a turn of the loop may store a slice, or wait for a database that hangs
AWAY_S_MAX = 15.0  # a database that is away for longer makes a process unready; shorter outages are retried away
TURN_MAX_S = 60.0  # a turn that takes longer is not one that waits for the database: its limits are shorter


class Report(msgspec.Struct, frozen=True):
    """What the loop says of itself: ``checks`` by name, each with whether it holds and a few words.

    ``ready`` is the gauge that says whether all do.
    """

    snapshot: Snapshot
    checks: Mapping[str, tuple[bool, str]]
    ready: Metric

    @property
    def is_ready(self) -> bool:
        """Whether all checks hold."""
        return all(holds for holds, _ in self.checks.values())

    def as_unready(self) -> Report:
        """Return it with its gauge at 0."""
        gauges = {**self.snapshot.gauges, (self.ready.name, ()): 0.0}
        return msgspec.structs.replace(self, snapshot=msgspec.structs.replace(self.snapshot, gauges=gauges))


def database_check(away_s: float, reason: str) -> tuple[bool, str]:
    """Return the check of a database that could not be used for so long, 0 if it can; ``reason`` is the last error."""
    words = f"the database cannot be used for {away_s:.0f} s: {reason}" if away_s else "the database is used"
    return away_s <= AWAY_S_MAX, words


def staying_check(*, is_leaving: bool) -> tuple[bool, str]:
    """Return the check of a process that may have been asked to stop."""
    return not is_leaving, "asked to stop" if is_leaving else "not asked to stop"


class Loop:
    """Where the thread asks, and the loop answers. ``wake`` ends the wait of the loop, ``name`` is for people."""

    def __init__(self, wake: Callable[[], object], name: str = "the supervisor's loop") -> None:
        self.name = name
        self._wake = wake
        self._changed = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._report: Report | None = None
        self.turn_began_at: float | None = None  # by `time.monotonic`; None while the loop waits

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for a report."""
        return self._asked > self._answered

    def answer(self, report: Report) -> None:
        """Give a report to all who wait."""
        with self._changed:
            self._report, self._answered = report, self._asked
            self._changed.notify_all()

    def ask(self, wait_s: float = REPORT_WAIT_S) -> Report | None:
        """Return a report that is made now; None if the loop does not come to it in time."""
        with self._changed:
            self._asked += 1
            number = self._asked
            self._wake()
            if self._changed.wait_for(lambda: self._answered >= number, wait_s):
                return self._report
        return None

    def said_last(self) -> Report | None:
        """Return its last report as that of a loop that is not ready, None if it has made none."""
        report = self._report
        return None if report is None else report.as_unready()

    def turns_for_s(self) -> float:
        """Return for how long the current turn has lasted; 0 while the loop waits."""
        began_at = self.turn_began_at
        return 0.0 if began_at is None else max(0.0, time.monotonic() - began_at)
