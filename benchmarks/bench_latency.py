"""From the moment a producer hands an event out to its commit, and to its advance; alone and beside idle triggers.

The runner notes when it hands out and advances, the supervisor when `Store.store_slice` has returned.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

from benchmarks import idlers, nothing, pairs
from benchmarks.bench_pair import WITHIN_S, require_all
from benchmarks.databases import add_triggers, fresh
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main

CLASSPATH = "benchmarks.users.streams.PacedTrigger"
PERCENTILES = (50, 99)
RATE_OF_THE_TARGET = 100.0

Paces = Sequence[tuple[float, int]]  # events a second, and how many of them


def run_pair(kind: str, idle: int, paces: Paces) -> Figures:
    """Run one stream at one pace after the other, beside so many idle triggers."""
    events = sum(count for _, count in paces)
    with fresh(kind) as database:
        board = pairs.new_board(database, events)
        watched = ("-m", "benchmarks.watched", "--board", board.path, "--moments")
        with pairs.running(database, board, command=watched, capacity=idlers.COUNT_MAX) as pair:
            idlers.add_idle(pair, idle)
            kwargs = {"board": board.path, "stream": 0, "paces": [list(pace) for pace in paces], "subscribers": 1}
            add_triggers(database, CLASSPATH, [kwargs])
            pair.wait_board("advanced", events, WITHIN_S)
            require_all(pair, events, 1)
    figures = {}
    first = 0
    for rate, count in paces:
        numbers = range(first, first + count)
        for what, moments in (("stored", board.stored_at), ("advanced", board.advanced_at)):
            took_s = [moments[number] - board.handed_at[number] for number in numbers]
            for percentile in PERCENTILES:
                figures[name_of(what, rate, percentile)] = ms_at(percentile, took_s)
        first += count
    return figures


def run_commits(kind: str, commits: int) -> Figures:
    """Store single rows by the bare driver."""
    with fresh(kind) as database:
        add_triggers(database, CLASSPATH, [{}])
        took_s = nothing.commit_moments_s(database, commits)
    return {commit_name(percentile): ms_at(percentile, took_s) for percentile in PERCENTILES}


def ms_at(percentile: int, took_s: Iterable[float]) -> float:
    """Return the percentile in milliseconds: the smallest value that so many percent do not exceed."""
    ordered = sorted(took_s)
    return ordered[math.ceil(len(ordered) * percentile / 100) - 1] * 1000


def name_of(what: str, rate: float, percentile: int) -> str:
    """Name a figure."""
    return f"{what}, {rate:,.0f}/s, p{percentile}"


def commit_name(percentile: int) -> str:
    """Name a figure of the baseline."""
    return f"one commit, p{percentile}"


def cases(options: Options) -> list[Case]:
    """Return one case for each database and number of idle triggers."""
    paces: Paces = options.of(((1, 5), (100, 300), (1000, 2000)), ((100, 200), (1000, 1000)), ((100, 10),))
    return [
        case(kind, idle, paces, commits=options.of(300, 100, 10))
        for kind in options.databases
        for idle in options.of((0, 10_000), (0,), (5,))
    ]


def case(kind: str, idle: int, paces: Paces, *, commits: int) -> Case:
    """Return the case of so many idle triggers."""
    figures = [
        Figure(name_of(what, rate, percentile), "ms", target_of(rate, percentile), commit_name(percentile))
        for rate, _ in paces
        for what in ("stored", "advanced")
        for percentile in PERCENTILES
    ]
    return Case(
        f"{kind}, {idle:,} idle triggers",
        figures,
        lambda: run_pair(kind, idle, paces),
        lambda: run_commits(kind, commits),
    )


def target_of(rate: float, percentile: int) -> Target:
    """Return what is to be reached at one pace."""
    if rate != RATE_OF_THE_TARGET:
        return Target()
    return Target(ratio_max=3.0) if percentile == 50 else Target(value_max=25.0)


BENCH = Bench(
    "latency",
    "latency: from handed out to stored, and to advanced",
    "a durable commit of a single row by the bare driver",
    cases,
    repeats=2,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
