"""From what a user commits to the start of the task, in an idle system: woken by a bell, and by looks.

Runs are created from outside, as `headgate dags trigger` does. The times are those of the database's clock: from the
transaction that creates the run to the one that gives its task to a worker.
"""

from __future__ import annotations

import random
import sys
import time

from benchmarks import stations
from benchmarks.bench_latency import ms_at
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main
from benchmarks.pairs import PLAIN

DAG = """
from benchmarks.users.tasks import Empty
from headgate.tasks.graph import DAG

with DAG("woken"):
    Empty(task_id="t")
"""
PERCENTILES = (50, 90)
RUN_S_MAX = 60.0
QUIET_S = (0.1, 1.1)  # before a run, drawn anew: so long that looks are as rare as they become, and in no step with it
LOOKING = ("-m", "benchmarks.looking")


def run_station(kind: str, runs: int, command: tuple[str, ...] = PLAIN) -> Figures:
    """Have runs one after the other, each after a pause; return the percentiles of their times."""
    times_s = []
    with stations.running(kind, DAG, command=command) as station:
        station.warm_up("woken")
        for number in range(runs):
            time.sleep(random.uniform(*QUIET_S))
            run = station.create_run("woken", f"run-{number}")
            station.wait_ended(RUN_S_MAX)
            times = station.times_of(run)
            times_s.append((times.first_begun_at - times.created_at).total_seconds())
    return {f"created to begun, p{percentile}": ms_at(percentile, times_s) for percentile in PERCENTILES}


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    return [case(kind, options.of(60, 20, 2)) for kind in options.databases]


def case(kind: str, runs: int) -> Case:
    """Return the case of so many runs."""
    figures = [
        Figure(f"created to begun, p{percentile}", "ms", Target(value_max=50.0) if percentile == 50 else Target())
        for percentile in PERCENTILES
    ]
    return Case(
        f"{kind}, an idle supervisor",
        figures,
        lambda: run_station(kind, runs),
        lambda: run_station(kind, runs, LOOKING),
    )


BENCH = Bench(
    "wake",
    "wake: from a run that a command creates to the begin of its first task",
    "the same with a supervisor that no bell wakes: it looks every 0.05 to 0.5 s",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
