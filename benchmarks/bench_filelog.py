"""From the lines of a file log to its committed offsets: how many events a second a pair stores of those that wait."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import kernel, nothing, pairs
from benchmarks.bench_pair import WITHIN_S, require_all
from benchmarks.databases import add_triggers, fresh
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from benchmarks.pairs import Pair
from headgate.brokers.filelog_writer import FileLogWriter, write_load

CLASSPATH = "benchmarks.users.streams.CountedFileLogTrigger"
STORED = "stored rows"
TOOK = "to advance all"
RUNNER_PEAK = "peak memory of the runner"
SUPERVISOR_PEAK = "peak memory of the supervisor"


def fill(folder: Path, events: int) -> Path:
    """Write a file log of one partition; return its one file."""
    with FileLogWriter(folder) as writer:
        write_load(writer, events=events, partitions=1, rate=None, durable=False)
    (path,) = folder.glob("p0*")
    return path


def run_log(kind: str, events: int) -> Figures:
    """Have a pair store a log that was written before; return the pace, the time, and the peaks of memory."""
    with fresh(kind) as database:
        log = database.folder / "log"
        fill(log, events)
        board = pairs.new_board(database)
        add_triggers(database, CLASSPATH, [{"path": str(log), "group": "bench", "board": board.path}])
        with pairs.running(database, board) as pair:
            pair.wait_board("advanced", events, WITHIN_S)
            require_all(pair, events, 1)
            require_no_failure(pair)
            peaks = kernel.rss_peak_mb(pair.runner_pids()[-1]), kernel.rss_peak_mb(pair.supervisor_pid)
    took_s = board["advanced_at"] - board["first_at"]
    return {STORED: events / took_s, TOOK: took_s, RUNNER_PEAK: peaks[0], SUPERVISOR_PEAK: peaks[1]}


def require_no_failure(pair: Pair) -> None:
    """Raise `BenchFailed` if a trigger failed, be it by an overflow of its queue, or a runner was replaced."""
    failures = [record for record in pair.records() if record.get("event") == "a trigger failed and is started again"]
    if failures or len(pair.runner_pids()) != 1:
        raise BenchFailed(f"{len(failures)} failures, {len(pair.runner_pids())} runners; the first: {failures[:1]}")


def run_lines(kind: str, events: int) -> Figures:
    """Have one process read the same file and store it."""
    with fresh(kind) as database:
        path = fill(database.folder / "log", events)
        add_triggers(database, CLASSPATH, [{}])
        took_s = nothing.drain_lines(database, path)
        if (rows := database.count("trigger_event")) != events:
            raise BenchFailed(f"the null pipeline stored {rows:,} of {events:,} lines")
    return {STORED: events / took_s, TOOK: took_s}


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    return [case(kind, options.of(60_000, 10_000, 200)) for kind in options.databases]


def case(kind: str, events: int) -> Case:
    """Return the case of a log of so many lines."""
    return Case(
        f"{kind}, {events:,} lines",
        [Figure(STORED, "rows/s", Target(ratio_min=0.3))],
        lambda: run_log(kind, events),
        lambda: run_lines(kind, events),
    )


BENCH = Bench(
    "filelog",
    "filelog: from the lines of a file log to its committed offsets",
    "one process reading the same file and storing it, 100 rows a commit by the bare driver, each offset synced",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
