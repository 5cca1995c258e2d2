"""Streams over several supervisors: three of them on one queue of a PostgreSQL database, killed one after the other.

::

    python -m tests.proof.streams [--minutes M] [--every SECONDS]

Twelve watchers of three file logs are added one by one while they run, and every kill hits the supervisor that owns
most of them; another one is started in its place. The checker of the crash tests judges each log from outside (I1, I2,
I3). An observer looks at the rows all the time: no stream may have two owners (I19). The exit code is 0 only if nothing
was found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.proof.crash.databases import Databases
from tests.proof.crash.reader import open_reader
from tests.proof.crash.workloads.pair import GROUP, PARTITIONS, Log, PairTruth
from tests.proof.supervisors import Supervisors
from tests.waiting import wait_until

from headgate.testing.crash.history import Report, Subscribed

SUPERVISORS = 3
STREAMS = 3
WATCHERS = 12
WATCHERS_ADDED_BY = 0.6  # of the time: the other kills meet all of them
FEED_INTERVAL_S = 0.1  # between two lines of a partition
BEHIND_MAX = 200  # lines of a log that may wait to be acknowledged; a busy machine gets no more
LOOK_INTERVAL_S = 0.25
OBSERVER_INTERVAL_S = 0.005
SETTLE_S = 60.0  # for the last lines to be acknowledged

# By stream, which epochs that may write own its open triggers. One statement, so that it is one moment.
_OWNERS = """
SELECT s.id, s.triggerer_id, o.id, count(*) FROM stream s JOIN trigger t ON t.stream_id = s.id
JOIN triggerer o ON o.id = t.triggerer_id AND o.fenced_at IS NULL AND o.stopped_at IS NULL
WHERE t.finished_at IS NULL AND t.removed_at IS NULL GROUP BY s.id, s.triggerer_id, o.id ORDER BY s.id, o.id
"""


class StreamTruth(PairTruth):
    """The history of one log among several, whose subscribers come while lines flow.

    A watcher is owed the lines that are written after its first row was seen: it is a subscriber then.
    """

    def __init__(self, log: Log, journals: Path, url: str) -> None:
        super().__init__(log, GROUP, journals, url)
        self._expected: list[str] = []
        self.log = log

    def watch(self, trigger_id: int, name: str) -> None:
        """Take the rows of one more watcher for this log's."""
        self._names[trigger_id] = name
        self._expected.append(name)

    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """See `PairTruth`."""
        seen = len(self._history)
        super().look(at, at_rest=at_rest, is_over=is_over)
        there = {getattr(record, "subscriber", "") for record in self._history[seen:]}
        for name in [name for name in self._expected if name in there]:
            self._expected.remove(name)
            self._record([Subscribed(name)])

    def subscribers_missing(self) -> int:
        """Return how many watchers have not stored a line yet."""
        return len(self._expected)

    def behind(self) -> int:
        """Return how many bytes of the log are not acknowledged."""
        committed = self.log.committed(GROUP)
        return sum(end - committed.get(name, 0) for name, end in self.log.ends.items())

    def is_complete(self) -> bool:
        """Whether every line is acknowledged."""
        return self.log.committed(GROUP) == self.log.ends


class Observer:
    """A thread that looks at the owners of streams all the time; ``with`` it."""

    def __init__(self, url: str) -> None:
        self.looks = 0
        self.split: list[str] = []
        self.takeovers = 0
        self.error: Exception | None = None
        self._owners: dict[int, int] = {}
        self._reader = open_reader(url)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        try:
            while not self._is_over.wait(OBSERVER_INTERVAL_S):
                self.see(self._reader.ask(_OWNERS))
        except Exception as error:  # an observer that has died has seen nothing
            self.error = error

    def see(self, rows: Sequence[tuple[int, int | None, int, int]]) -> None:
        """Judge one look: streams with the owner of their own row, those of their triggers, and of how many."""
        self.looks += 1
        by_stream: dict[int, dict[int, int]] = {}
        for stream, owner, epoch, count in rows:
            by_stream.setdefault(stream, {})[epoch] = count
            if owner != epoch:
                self.split.append(f"stream {stream} of {owner} has {count} triggers with {epoch}")
        for stream, owners in by_stream.items():
            if len(owners) > 1:
                self.split.append(f"stream {stream} has the owners {owners}")
            newest = max(owners)
            self.takeovers += self._owners.get(stream, newest) != newest
            self._owners[stream] = newest


class Outcome(NamedTuple):
    """The end of it: what the checker says of each log, what the observer saw, and how the supervisors left."""

    reports: list[Report]
    kills: int
    looks: int
    takeovers: int
    split: list[str]
    dead_letters: int
    exit_codes: Counter[int]

    def faults(self) -> list[str]:
        """Return what is wrong, in words."""
        found = [str(finding) for report in self.reports for finding in report.findings]
        found += self.split
        if self.dead_letters:
            found.append(f"{self.dead_letters} dead letters")
        if set(self.exit_codes) != {0}:
            found.append(f"exit codes {dict(self.exit_codes)}")
        return found


class Campaign:
    """One campaign in an empty folder, on an empty database; ``with`` it."""

    def __init__(self, folder: Path, url: str, *, seconds: float, every_s: float) -> None:
        self._folder, self._url = folder, url
        self._seconds, self._every_s = seconds, every_s
        self._supervisors = Supervisors(folder, url)
        self._truths: list[StreamTruth] = []
        self._journals: list[Path] = []
        for number in range(STREAMS):
            self._journals.append(folder / f"journals-{number}")
            self._journals[-1].mkdir()
            self._truths.append(StreamTruth(Log(folder / f"log-{number}", PARTITIONS), self._journals[-1], url))
        self._added = 0
        self._fed_at = self._looked_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._supervisors.__exit__(kind, error, trace)
        for truth in self._truths:
            truth.close()

    def run(self) -> Outcome:
        """Run it to its end. Raises `tests.waiting.NotInTime`."""
        with Observer(self._url) as observer:
            self._supervisors.start(SUPERVISORS)
            self._supervisors.wait_ready()
            begun_at = time.monotonic()
            while (passed_s := time.monotonic() - begun_at) < self._seconds:
                if self._added < WATCHERS and passed_s >= self._added * self._seconds * WATCHERS_ADDED_BY / WATCHERS:
                    self._add()
                if passed_s >= (self._supervisors.kills + 1) * self._every_s:
                    self._supervisors.replace_owner()
                self._work()
                time.sleep(OBSERVER_INTERVAL_S)
            wait_until(self._is_everybody_there, "every watcher has stored a line", SETTLE_S)
            wait_until(lambda: all(truth.is_complete() for truth in self._truths), "the last lines", SETTLE_S)
            for truth in self._truths:
                truth.look("at rest", at_rest=True)
            codes = self._supervisors.drain()
        if observer.error is not None:
            raise observer.error
        reports = [truth.report() for truth in self._truths]
        letters = self._truths[0].dead_letters()
        kills = self._supervisors.kills
        return Outcome(reports, kills, observer.looks, observer.takeovers, observer.split, letters, codes)

    def keep(self) -> None:
        """Write the histories to the folder."""
        for number, truth in enumerate(self._truths):
            truth.write_history(self._folder / f"history-{number}.jsonl")

    def _is_everybody_there(self) -> bool:
        self._work()
        return not any(truth.subscribers_missing() for truth in self._truths)

    def _work(self) -> None:
        """Write lines, and look at what has become of them, if it is time for that."""
        now = time.monotonic()
        if now >= self._fed_at + FEED_INTERVAL_S:
            self._fed_at = now
            for truth in self._truths:
                if truth.behind() < BEHIND_MAX * len(b'{"id": "p0:00000"}\n'):
                    truth.append(1)
        if now >= self._looked_at + LOOK_INTERVAL_S:
            self._looked_at = now
            for truth in self._truths:
                truth.look(f"after {self._supervisors.kills} kills")

    def _add(self) -> None:
        """Add the next watcher, as a user does."""
        number = self._added % STREAMS
        name = f"w{self._added}"
        kwargs = {"path": str(self._truths[number].log.folder), "group": GROUP, "journal": str(self._journals[number])}
        trigger_id = self._supervisors.add_watcher(name, "crash_triggers.CrashTrigger", kwargs)
        self._truths[number].watch(trigger_id, name)
        self._added += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.streams", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="headgate-streams-"))
    databases = Databases(folder)
    try:
        with (
            databases.one("postgresql", folder) as (url, _),
            Campaign(folder, url, seconds=given.minutes * 60, every_s=given.every) as campaign,
        ):
            outcome = campaign.run()
            campaign.keep()
    finally:
        databases.close()
    for report in outcome.reports:
        print(report)
    print(
        f"{outcome.kills} kills, {outcome.takeovers} times another owner of a stream, {outcome.looks:,} looks at the "
        f"owners, {len(outcome.split)} of them split"
    )
    for fault in outcome.faults():
        print(f"BAD: {fault}")
    print(f"histories and logs are in {folder}")
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
