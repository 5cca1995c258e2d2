"""The demo: events flow through the real pair while it is killed, and what is stored is compared with the log.

``headgate demo`` runs this module in a process of its own, because the command line may not import the runner's code::

    python -m headgate.testing.demo FOLDER --events N --kills K --subscribers S --partitions P --seed SEED

Events are written to a file log at a pace, so that the kills meet them in flight. A look reads the committed offsets
first and the stored events after them: an event below an offset that is not stored was acknowledged too early (I1).
Events are told apart by the ``id`` in their payload, never by the keys that headgate gives them, and judged by the
checker of crash tests (`headgate.testing.crash.history`), which knows nothing of the code under test.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headgate.brokers.filelog import FileLogTrigger
from headgate.testing.crash import history
from headgate.testing.crash.commands import PairFailed
from headgate.testing.crash.pair import Pair

DATABASE_VARIABLE = "HEADGATE_DEMO_DATABASE"  # an empty PostgreSQL database; not in the arguments, which everyone reads
GROUP = "demo"
NOT_PROVEN = 1  # exit code
FINDINGS_SHOWN_MAX = 3  # stories below the table

POLL_S = 0.02  # between two readings of the committed offsets
LINE_INTERVAL_S = 5.0  # between two lines of progress if there is no terminal
# Kills are spread over this part of the acknowledged events: after the first of them, and while some are to come.
FIRST_KILL_AT, LAST_KILL_AT = 0.03, 0.92
KILL_DELAY_MAX_S = 0.1  # a random wait before each kill, so that none follows from the rhythm of the readings
# The writer takes about this long for each kill, so that it is still writing at the last one: at least so many
# seconds, and at least so many times as long as the pair took to start on this machine.
WRITE_S_MIN = 3.0
WRITE_S_PER_KILL_MIN = 2.5
WRITE_STARTS_PER_KILL = 1.5
RATE_MAX = 5_000.0  # events a second: above it the writer is done before anything is killed
# The limit of the whole demo, after which it fails: generous, because a machine may be slow.
TIME_LIMIT_S = 120.0
TIME_LIMIT_S_PER_KILL = 15.0
TIME_LIMIT_ROWS_PER_S = 200.0

Target = Literal["runner", "supervisor"]


@dataclass(frozen=True)
class Plan:
    """The size of a demo, and its kills."""

    events: int
    kills: int
    subscribers: int
    partitions: int
    seed: int

    @property
    def time_limit_s(self) -> float:
        """The time after which the demo fails."""
        rows = self.events * self.subscribers
        return TIME_LIMIT_S + TIME_LIMIT_S_PER_KILL * (self.kills + 1) + rows / TIME_LIMIT_ROWS_PER_S

    def schedule(self) -> list[ScheduledKill]:
        """Return the kills in order: one at a random place in each of as many equal parts of the events."""
        randomness = random.Random(self.seed)
        count = self.kills + 1
        part = (LAST_KILL_AT - FIRST_KILL_AT) / count
        of_supervisor = randomness.randrange(count)
        return [
            ScheduledKill(
                target="supervisor" if number == of_supervisor else "runner",
                at_events=int(self.events * (FIRST_KILL_AT + part * (number + randomness.random()))),
                delay_s=randomness.uniform(0, KILL_DELAY_MAX_S),
            )
            for number in range(count)
        ]


@dataclass(frozen=True)
class ScheduledKill:
    """One kill: as soon as so many events are acknowledged, and then ``delay_s`` later."""

    target: Target
    at_events: int
    delay_s: float


@dataclass(frozen=True)
class Kill:
    """One kill that was done. ``recovery_s``: until events were acknowledged again; None if none was left."""

    target: Target
    recovery_s: float | None


class Writer:
    """The program outside that writes the events, in a process of its own: the file log's own command."""

    def __init__(self, folder: Path, *, events: int, partitions: int, rate: float) -> None:
        arguments = ["--events", str(events), "--partitions", str(partitions), "--rate", f"{rate:.3f}"]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headgate.brokers.filelog_writer", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def check(self) -> None:
        """Raise `PairFailed` if it has failed; having finished is fine."""
        if self._process.poll():
            assert self._process.stderr is not None
            raise PairFailed(f"the writer failed: {self._process.stderr.read().strip()}")


@dataclass
class _Partition:
    """The whole lines of one file: the id of each, and the offset at which it ends."""

    read_to: int = 0
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class WrittenLog:
    """The file log as its files are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partitions: defaultdict[str, _Partition] = defaultdict(_Partition)
        self._unreported: list[history.Published] = []

    @property
    def written(self) -> int:
        """How many events were read."""
        return sum(len(partition.ids) for partition in self._partitions.values())

    def read(self) -> None:
        """Read the whole lines that were appended since the last time."""
        for path in sorted(self._folder.glob("*.jsonl")):
            partition = self._partitions[path.stem]
            with path.open("rb") as file:
                file.seek(partition.read_to)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    id_ = json.loads(line)["id"]
                    self._unreported.append(history.Published(str(id_), path.stem, partition.read_to))
                    partition.read_to += len(line)
                    partition.ids.append(id_)
                    partition.ends.append(partition.read_to)

    def report(self) -> list[history.Published]:
        """Read once more; return the records of all lines that were read since the last report."""
        self.read()
        records, self._unreported = self._unreported, []
        return records

    def committed(self) -> dict[str, int]:
        """Return how far, in bytes, each partition is acknowledged."""
        try:
            data = (self._folder / ".groups" / f"{GROUP}.json").read_bytes()
        except FileNotFoundError:
            return {}
        offsets: dict[str, int] = json.loads(data)["offsets"]
        return offsets

    def acknowledged(self, committed: Mapping[str, int]) -> int:
        """Return how many events are below the committed offsets."""
        found = ((self._partitions.get(name), offset) for name, offset in committed.items())
        return sum(bisect.bisect_right(partition.ends, offset) for partition, offset in found if partition)


class Audit:
    """Compares the log with the stored events. ``stored`` returns the rows of all stored events."""

    def __init__(self, log: WrittenLog, subscribers: Sequence[str], stored: Callable[[], list[dict[str, Any]]]) -> None:
        self._log = log
        self._stored = stored
        self._checker = history.Checker(map(history.Subscribed, subscribers))
        self._known: set[str] = set()
        self._rows_seen: set[int] = set()
        self.events: dict[str, set[str]] = {name: set() for name in subscribers}  # stored, by subscriber
        self.strange_rows = 0  # rows that hold no event of the log
        self.redelivered = 0

    def look(self, at: str, *, at_rest: bool = False) -> None:
        """Read the committed offsets, then the stored events; check them (I1)."""
        committed = self._log.committed()
        rows = self._stored()
        # Read last: every event that is committed or stored was written before.
        published = self._log.report()
        self._checker.extend(published)
        self._known.update(record.event for record in published)
        self._checker.extend(history.Committed(lane, offset, at) for lane, offset in committed.items())
        self.redelivered = sum(row["redelivered"] for row in rows)
        for row in rows:
            if row["id"] in self._rows_seen:
                continue
            self._rows_seen.add(row["id"])
            event = str(row["payload"]["id"]) if isinstance(row["payload"], dict) and "id" in row["payload"] else ""
            if event not in self._known or row["watcher"] not in self.events:
                self.strange_rows += 1
                continue
            self.events[row["watcher"]].add(event)
            self._checker.add(history.Stored(event, row["watcher"], str(row["id"]), at=at))
        self._checker.add(history.Looked(at, at_rest=at_rest))

    def report(self) -> history.Report:
        """Return the findings of the looks so far."""
        return self._checker.report()


@dataclass(frozen=True)
class Result:
    """The outcome of a demo that has come to its end."""

    plan: Plan
    written: int
    audit: Audit
    checked: history.Report
    kills: Sequence[Kill]
    dead_letters: Sequence[str]
    exit_code: int
    rows_per_s: float

    def faults(self) -> list[str]:
        """Return the faults, in words; the demo has proven its promise if there are none."""
        found = {
            f"{self.checked.count('lost'):,} events are lost": self.checked.count("lost"),
            f"{self.checked.count('stored twice'):,} events are stored twice": self.checked.count("stored twice"),
            f"{self.audit.strange_rows:,} stored events are not in the log": self.audit.strange_rows,
            f"{self.checked.count('advanced before stored'):,} events were acknowledged before they were stored": (
                self.checked.count("advanced before stored")
            ),
            f"{self.written:,} of {self.plan.events:,} events were written": self.written != self.plan.events,
            "not every event is stored for every subscriber": any(
                len(events) != self.plan.events for events in self.audit.events.values()
            ),
            f"{len(self.dead_letters):,} events are dead letters": self.dead_letters,
            f"the supervisor left with exit code {self.exit_code} when it was asked to stop": self.exit_code,
        }
        return [words for words, is_so in found.items() if is_so]

    def lines(self) -> list[tuple[str, str, bool]]:
        """Return label, value and whether it is bad, for each line of the table."""
        checked = self.checked
        lost, twice = checked.count("lost"), checked.count("stored twice") + self.audit.strange_rows
        early = checked.count("advanced before stored")
        targets = [kill.target for kill in self.kills]
        return [
            ("events written", f"{self.written:,}", False),
            *((f"stored for {name}", f"{len(events):,}", False) for name, events in self.audit.events.items()),
            ("redelivered, and not stored again", f"{self.audit.redelivered:,}", False),
            ("stored twice", f"{twice:,}", twice > 0),
            ("lost", f"{lost:,}", lost > 0),
            (f"acknowledged before stored, in {checked.looks:,} looks", f"{early:,}", early > 0),
            (
                "kills with SIGKILL",
                f"{targets.count('runner')} runner, {targets.count('supervisor')} supervisor",
                False,
            ),
            *((f"recovery from a kill of the {target}", text, False) for target, text in self._recoveries()),
            ("events stored per second, kills included", f"{self.rows_per_s:,.0f}", False),
        ]

    def _recoveries(self) -> list[tuple[str, str]]:
        """Return, for each target that recovered, the shortest, the median and the longest time."""
        found = []
        for target in ("runner", "supervisor"):
            times = sorted(
                kill.recovery_s for kill in self.kills if kill.target == target and kill.recovery_s is not None
            )
            if len(times) == 1:
                found.append((target, f"{times[0]:.2f} s"))
            elif times:
                found.append((target, f"{times[0]:.2f} / {statistics.median(times):.2f} / {times[-1]:.2f} s"))
        return found


class Demo:
    """One demo, in a folder of its own, on a database of its own."""

    def __init__(self, plan: Plan, folder: Path, pair: Pair, out: Console) -> None:
        self._plan = plan
        self._pair = pair
        self._out = out
        self._folder = folder / "log"
        self._folder.mkdir()
        self._log = WrittenLog(self._folder)
        names = [f"demo-{number}" for number in range(plan.subscribers)]
        for name in names:
            pair.add(FileLogTrigger(str(self._folder), GROUP), name)
        self._audit = Audit(self._log, names, pair.events)
        self._committed: dict[str, int] = {}
        self._kills: list[Kill] = []
        self._deadline = time.monotonic() + plan.time_limit_s
        self._flow_at: list[float] = []  # the first and the last moment at which an offset was seen to move
        self._line_at = time.monotonic() + LINE_INTERVAL_S
        self._bar = Progress(
            TextColumn("acknowledged"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"),
            TimeElapsedColumn(),
            console=out,
            disable=not out.is_terminal,
        )
        self._task = self._bar.add_task("", total=plan.events, more="")

    @property
    def progress(self) -> str:
        """How far it has come, in words."""
        return f"written {self._log.written:,}, kills {len(self._kills)} of {self._plan.kills + 1}"

    def run(self) -> Result:
        """Run it to its end. Raises `PairFailed` if it cannot get there."""
        started_at = time.monotonic()
        self._pair.start()
        self._wait(lambda: self._pair.ready_count() > 0, "the runner is ready")
        self._audit.look("before the first event")
        per_kill_s = max(WRITE_S_PER_KILL_MIN, WRITE_STARTS_PER_KILL * (time.monotonic() - started_at))
        rate = min(RATE_MAX, self._plan.events / (WRITE_S_MIN + per_kill_s * (self._plan.kills + 1)))
        writing = Writer(self._folder, events=self._plan.events, partitions=self._plan.partitions, rate=rate)
        with self._bar, writing as writer:
            for kill in self._plan.schedule():
                self._wait_acknowledged(kill.at_events, writer)
                time.sleep(kill.delay_s)
                self._kill(kill.target, writer)
            self._wait_acknowledged(self._plan.events, writer)
        exit_code = self._pair.stop()
        self._audit.look("the pair has left", at_rest=True)
        flow_s = self._flow_at[-1] - self._flow_at[0] if self._flow_at else 0.0
        stored = sum(map(len, self._audit.events.values()))
        return Result(
            plan=self._plan,
            written=self._log.written,
            audit=self._audit,
            checked=self._audit.report(),
            kills=self._kills,
            dead_letters=self._pair.dead_letters(),
            exit_code=exit_code,
            rows_per_s=stored / flow_s if flow_s > 0 else 0.0,
        )

    @property
    def _acknowledged(self) -> int:
        return self._log.acknowledged(self._committed)

    def _kill(self, target: Target, writer: Writer) -> None:
        """Kill, wait until events are acknowledged again, and look; the time of a look is no part of the recovery."""
        killed_at = time.monotonic()
        looked_s = 0.0
        if target == "runner":
            self._pair.kill_runner()
        else:
            self._pair.kill_supervisor()
            looked_at = time.monotonic()
            self._audit.look("the supervisor and its runner are dead")
            looked_s = time.monotonic() - looked_at
            self._pair.start()
        # Of the dead runner nothing can move the offsets any more.
        before = self._log.committed()
        self._wait(
            lambda: self._committed != before or self._acknowledged >= self._plan.events,
            f"events flow after a kill of the {target}",
            writer,
        )
        flows = self._committed != before
        recovery_s = time.monotonic() - killed_at - looked_s if flows else None
        self._kills.append(Kill(target, recovery_s))
        after = f"events flow again after {recovery_s:.2f} s" if flows else "nothing was left to store"
        self._out.print(f"SIGKILL to the {target} at {self._log.acknowledged(before):,} events: {after}")
        if target == "runner":
            self._audit.look("after a kill of the runner")

    def _wait_acknowledged(self, events: int, writer: Writer) -> None:
        self._wait(lambda: self._acknowledged >= events, f"{events:,} events are acknowledged", writer)

    def _wait(self, condition: Callable[[], bool], goal: str, writer: Writer | None = None) -> None:
        """Read offsets and log until something is so. Raises `PairFailed` if a process fails or the time is up."""
        while True:
            self._read()
            if condition():
                return
            if not self._pair.is_running:
                raise self._pair.left_by_itself()
            if writer is not None:
                writer.check()
            if time.monotonic() > self._deadline:
                limit_s = self._plan.time_limit_s
                raise self._pair.failure(f"the time limit of {limit_s:,.0f} s came before this: {goal}")
            time.sleep(POLL_S)

    def _read(self) -> None:
        """Read the offsets and the log, and show how far the demo is."""
        committed = self._log.committed()
        self._log.read()
        now = time.monotonic()
        if committed != self._committed:
            self._committed = committed
            self._flow_at = [*self._flow_at[:1], now]
        self._bar.update(self._task, completed=self._acknowledged, more=self.progress)
        if not self._out.is_terminal and now >= self._line_at:
            self._line_at = now + LINE_INTERVAL_S
            self._out.print(f"acknowledged {self._acknowledged:,} of {self._plan.events:,}, {self.progress}")


def prove(plan: Plan, folder: Path, database_url: str | None, out: Console) -> bool:
    """Run a demo in an empty folder, print its report, and return whether all is well."""
    pair = Pair(folder, settings={"database_url": database_url} if database_url else {})
    with pair:
        demo = Demo(plan, folder, pair, out)
        try:
            result = demo.run()
        except PairFailed as failure:
            out.print(f"\nthe demo failed ({demo.progress}): {failure}", markup=False)
            return False
    faults = result.faults()
    print_report(out, "headgate demo", result.lines(), faults)
    for finding in result.checked.findings[:FINDINGS_SHOWN_MAX]:
        out.print(str(finding), markup=False)
    if not faults:
        out.print("Every event was stored exactly once for every subscriber, and none was acknowledged before.")
    return not faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m headgate.testing.demo", description="See `headgate demo --help`.")
    parser.add_argument("folder", type=Path)
    for name in ("events", "kills", "subscribers", "partitions", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = vars(parser.parse_args(arguments))
    folder = given.pop("folder")
    out = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    return 0 if prove(Plan(**given), folder, os.environ.get(DATABASE_VARIABLE), out) else NOT_PROVEN


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a demo as a program. SIGTERM, by which the command line ends it, is handled as Ctrl-C: it cleans up."""
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)


def _interrupt(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one does not cut the cleaning up short
    raise KeyboardInterrupt


def print_report(out: Console, title: str, lines: Sequence[tuple[str, str, bool]], faults: Sequence[str]) -> None:
    """Print a table of labels, values and whether each is bad; then the faults."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value, is_bad in lines:
        table.add_row(label, value, style="bold red" if is_bad else None)
    out.print()
    out.print(table)
    for fault in faults:
        out.print(f"BAD: {fault}", style="bold red", markup=False)


if __name__ == "__main__":
    run_program(main)
