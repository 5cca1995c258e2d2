"""The soak: events at a steady pace for an hour, a SIGKILL of the runner a minute, and the same recovery at the last.

::

    python -m tests.proof.soak [--minutes M] [--rate EVENTS_PER_SECOND] [--every SECONDS]

The pair has the settings that users have. A line for each kill says how long it took until an event that was written
after the kill was stored, how many events were not acknowledged then, and the memory of both processes. The exit code
is 0 only if nothing is lost, nothing is stored twice, and the last recoveries are as short as `RECOVERY_S_MAX`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from headgate.brokers.filelog import FileLogTrigger
from headgate.testing.crash.pair import Pair
from headgate.testing.demo import GROUP, Writer, WrittenLog

SUBSCRIBERS = ("soak-0", "soak-1", "soak-2")
PARTITIONS = 4
RECOVERY_S_MAX = 1.0
LAST_KILLS = 3  # their median counts: one alone may have met a busy machine
SETTLE_S = 120.0  # for the last events to be acknowledged once all are written


class Recovery(NamedTuple):
    """What was seen after one kill: times in seconds, memory in bytes."""

    recovery_s: float
    unacknowledged: int
    supervisor_rss: int
    runner_rss: int

    def __str__(self) -> str:
        mib = 1024 * 1024
        return (
            f"recovery {self.recovery_s:.2f} s, not acknowledged {self.unacknowledged:,}, memory "
            f"{self.supervisor_rss / mib:.1f} MiB supervisor, {self.runner_rss / mib:.1f} MiB runner"
        )


class Outcome(NamedTuple):
    """The end of a soak: events written, rows and different events stored by subscriber, and all recoveries."""

    written: int
    rows: dict[str, int]
    different: dict[str, int]
    recoveries: list[Recovery]
    exit_code: int

    def faults(self) -> list[str]:
        """Return what is wrong, in words."""
        lost = {name: self.written - number for name, number in self.different.items() if number != self.written}
        twice = {name: self.rows[name] - self.different[name] for name in self.rows}
        last_s = statistics.median(kill.recovery_s for kill in self.recoveries[-LAST_KILLS:])
        found = {
            f"events are lost: {lost}": lost,
            f"events are stored twice: {twice}": any(twice.values()),
            f"the last recoveries took {last_s:.2f} s": last_s > RECOVERY_S_MAX,
            f"the supervisor left with exit code {self.exit_code}": self.exit_code,
        }
        return [words for words, is_so in found.items() if is_so]


class Soak:
    """One soak in an empty folder."""

    def __init__(self, folder: Path, *, seconds: float, rate: float, every_s: float) -> None:
        self._folder = folder / "log"
        self._folder.mkdir()
        self._events, self._rate, self._every_s = int(seconds * rate), rate, every_s
        self._kills = int(seconds / every_s)
        self._log = WrittenLog(self._folder)
        self._pair = Pair(folder, settings={"log_format": "human"}, has_short_waits=False)
        self._database = f"file:{folder / 'headgate.db'}?mode=ro"

    def run(self) -> Outcome:
        """Run it to its end. Raises `headgate.testing.crash.pair.PairFailed`."""
        recoveries = []
        with self._pair as pair:
            for name in SUBSCRIBERS:
                pair.add(FileLogTrigger(str(self._folder), GROUP), name)
            pair.start()
            pair.wait_until(pair.ready_count, "the runner is ready")
            begun_at = time.monotonic()
            with Writer(self._folder, events=self._events, partitions=PARTITIONS, rate=self._rate) as writer:
                # The last kill has as much time after it as the others.
                for number in range(self._kills):
                    due_at = begun_at + (number + 0.5) * self._every_s
                    pair.wait_until(lambda due=due_at: time.monotonic() >= due, "the next kill", within_s=1e9)  # type: ignore[misc]
                    writer.check()
                    recoveries.append(self._kill())
                    print(f"kill {number + 1} of {self._kills}: {recoveries[-1]}", flush=True)
                within_s = max(0.0, begun_at + self._events / self._rate - time.monotonic()) + SETTLE_S
                pair.wait_until(lambda: self._unacknowledged() == 0 == self._unwritten(), "the end", within_s=within_s)
            exit_code = pair.stop()
        return self._outcome(recoveries, exit_code)

    def _unwritten(self) -> int:
        return self._events - self._log.written

    def _unacknowledged(self) -> int:
        committed = self._log.committed()
        self._log.read()
        return self._log.written - self._log.acknowledged(committed)

    def _kill(self) -> Recovery:
        self._pair.kill_runner()
        killed_at, begun_at = time.time(), time.monotonic()
        with contextlib.closing(sqlite3.connect(self._database, uri=True)) as connection:
            newest = "SELECT payload FROM trigger_event ORDER BY id DESC LIMIT 1"

            def is_back() -> bool:
                row = connection.execute(newest).fetchone()
                return row is not None and json.loads(row[0])["written_at"] > killed_at

            self._pair.wait_until(is_back, "an event that was written after the kill is stored")
        recovery_s = time.monotonic() - begun_at
        (runner,) = self._pair.runners()
        supervisor = runner.parent()
        assert isinstance(supervisor, psutil.Process)
        sizes = supervisor.memory_info().rss, runner.memory_info().rss
        return Recovery(recovery_s, self._unacknowledged(), *sizes)

    def _outcome(self, recoveries: list[Recovery], exit_code: int) -> Outcome:
        counts = (
            "SELECT name, count(*), count(DISTINCT json_extract(payload, '$.id')) FROM trigger_event "
            "JOIN asset_watcher USING (trigger_id) GROUP BY name"
        )
        with contextlib.closing(sqlite3.connect(self._database, uri=True)) as connection:
            found = {name: (rows, different) for name, rows, different in connection.execute(counts)}
        rows = {name: found.get(name, (0, 0))[0] for name in SUBSCRIBERS}
        different = {name: found.get(name, (0, 0))[1] for name in SUBSCRIBERS}
        return Outcome(self._log.written, rows, different, recoveries, exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=300.0, help="events written a second")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    given = parser.parse_args(arguments)
    if given.minutes * 60 < given.every:
        parser.error("not one kill: --minutes are shorter than --every")
    with tempfile.TemporaryDirectory(prefix="headgate-soak-") as folder:
        soak = Soak(Path(folder), seconds=given.minutes * 60, rate=given.rate, every_s=given.every)
        outcome = soak.run()
    print(f"{outcome.written:,} events written, stored by {outcome.rows}, {len(outcome.recoveries)} kills")
    for fault in outcome.faults():
        print(f"BAD: {fault}")
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
