"""A chain of ten empty tasks: from the creation of the run to its end, by the database's clock."""

from __future__ import annotations

import statistics
import sys

from benchmarks import nothing, stations
from benchmarks.databases import add_triggers, fresh
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main

TASKS = 10
DAG = f"""
from benchmarks.users.tasks import Empty
from headgate.tasks.graph import DAG, chain

with DAG("chain"):
    chain(*[Empty(task_id=f"t{{number}}") for number in range({TASKS})])
"""
# What changes the database on the way: the run is created, and begun; each task is dispatched, its outcome is stored,
# and the look at the run begins the next task or ends the run.
COMMITS = 1 + 1 + 3 * TASKS
RUN_S_MAX = 60.0
CREATED, BEGUN = "run created to ended", "first task dispatched to run ended"


def run_station(kind: str, runs: int) -> Figures:
    """Have runs one after the other, each created when the one before has ended; return the medians of their times."""
    with stations.running(kind, DAG) as station:
        station.warm_up("chain")
        times = []
        for number in range(runs):
            run = station.create_run("chain", f"run-{number}")
            station.wait_ended(RUN_S_MAX)
            times.append(station.times_of(run))
    return {
        CREATED: statistics.median([(run.ended_at - run.created_at).total_seconds() for run in times]),
        BEGUN: statistics.median([(run.ended_at - run.first_begun_at).total_seconds() for run in times]),
    }


def commits(kind: str, runs: int) -> Figures:
    """Commit single rows as often as a run does; return the median of the times that a run's commits take."""
    with fresh(kind) as database:
        add_triggers(database, "nobody.Loads", [{}])
        took_s = nothing.commit_moments_s(database, COMMITS * runs)
    of_runs = [sum(took_s[start : start + COMMITS]) for start in range(0, len(took_s), COMMITS)]
    return dict.fromkeys((CREATED, BEGUN), statistics.median(of_runs))


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    return [case(kind, options.of(20, 5, 1)) for kind in options.databases]


def case(kind: str, runs: int) -> Case:
    """Return the case of so many runs."""
    figures = [Figure(CREATED, "s", Target(value_max=0.5)), Figure(BEGUN, "s")]
    return Case(f"{kind}, {TASKS} empty tasks", figures, lambda: run_station(kind, runs), lambda: commits(kind, runs))


BENCH = Bench(
    "chain",
    f"chain: a run of {TASKS} empty tasks, one after the other",
    f"{COMMITS} durable commits of one row by the bare driver, as many as the run takes",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
