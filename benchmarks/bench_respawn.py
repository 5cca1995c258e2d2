"""SIGKILL to the runner while many triggers run: how long until the last of them runs again."""

from __future__ import annotations

import sys

from benchmarks import idlers
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main

RUNNING = "to the last one running again"


def run_pair(kind: str, count: int) -> Figures:
    """Start triggers, kill their runner, wait for all of them."""
    with idlers.pair_ready_for(kind) as pair:
        idlers.add_idle(pair, count)
        killed_at = pair.kill_runner()
        pair.wait_board("running", 2 * count, idlers.WITHIN_S)
        return {RUNNING: pair.board["running_at"] - killed_at}


def run_start(kind: str, count: int) -> Figures:
    """Start as many in a pair that is ready."""
    with idlers.pair_ready_for(kind) as pair:
        return {RUNNING: idlers.add_idle(pair, count)}


def cases(options: Options) -> list[Case]:
    """Return one case for each database and number of triggers."""
    return [
        case(kind, count)
        for kind in options.of(options.databases, options.databases[:1], options.databases)
        for count in options.of((1000, 10_000), (1000,), (20,))
    ]


def case(kind: str, count: int) -> Case:
    """Return the case of so many triggers."""
    target = Target(value_max=1.0) if count == 1000 else Target()
    return Case(
        f"{kind}, {count:,} triggers",
        [Figure(RUNNING, "s", target)],
        lambda: run_pair(kind, count),
        lambda: run_start(kind, count),
    )


BENCH = Bench(
    "respawn",
    "respawn: from SIGKILL of the runner to the last trigger running again",
    "start: as many triggers inserted at once beside a runner that is ready",
    cases,
    repeats=2,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
