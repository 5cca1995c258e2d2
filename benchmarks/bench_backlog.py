"""Many events that wait when the pair starts: the time to advance them all, and whether memory stays flat."""

from __future__ import annotations

import sys

from benchmarks import bench_filelog
from benchmarks.bench_filelog import RUNNER_PEAK, SUPERVISOR_PEAK, TOOK
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main

FLAT = Target(ratio_max=1.25)  # ten times the events, and no more than a quarter more memory


def run_baseline(kind: str, events: int) -> Figures:
    """Read and store as many in one process, and look at the memory of a pair that has a tenth of them to do."""
    tenth = bench_filelog.run_log(kind, events // 10)
    return {**bench_filelog.run_lines(kind, events), **{peak: tenth[peak] for peak in (RUNNER_PEAK, SUPERVISOR_PEAK)}}


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    return [case(kind, options.of(100_000, 10_000, 200)) for kind in options.databases]


def case(kind: str, events: int) -> Case:
    """Return the case of so many events."""
    return Case(
        f"{kind}, {events:,} events",
        [Figure(TOOK, "s"), Figure(RUNNER_PEAK, "MB", FLAT), Figure(SUPERVISOR_PEAK, "MB", FLAT)],
        lambda: bench_filelog.run_log(kind, events),
        lambda: run_baseline(kind, events),
    )


BENCH = Bench(
    "backlog",
    "backlog: events that wait at the start, none of which may overflow anything",
    "for the time: the null pipeline of bench_filelog; for memory: a pair with a tenth of the events",
    cases,
    repeats=2,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
