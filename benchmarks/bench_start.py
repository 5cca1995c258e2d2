"""Many triggers inserted at once, in one commit: how long until the last of them runs."""

from __future__ import annotations

import sys

from benchmarks import idlers
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main

STARTED = "to the last one running"


def run_pair(kind: str, count: int) -> Figures:
    """Insert triggers while a pair without triggers runs."""
    with idlers.pair_ready_for(kind) as pair:
        return {STARTED: idlers.add_idle(pair, count)}


def cases(options: Options) -> list[Case]:
    """Return one case for each database and number of triggers."""
    return [case(kind, count) for kind in options.databases for count in options.of((1000, 10_000), (1000,), (20,))]


def case(kind: str, count: int) -> Case:
    """Return the case of so many triggers."""
    target = Target(value_max=2.0) if count == 10_000 else Target()
    return Case(
        f"{kind}, {count:,} triggers",
        [Figure(STARTED, "s", target)],
        lambda: run_pair(kind, count),
        lambda: idlers.bare_trio(count),
    )


BENCH = Bench(
    "start",
    "start: triggers inserted in one commit, to the last one running",
    "trio starting as many bare generators, in one process",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
