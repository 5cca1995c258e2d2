"""Many empty tasks at once, of one run or of many runs: how many end in a second, by the database's clock."""

from __future__ import annotations

import sys

from benchmarks import nothing, stations
from benchmarks.databases import add_triggers, fresh
from benchmarks.harness import Bench, Case, Figure, Figures, Options, main
from benchmarks.stations import WORKERS

DAG = """
from benchmarks.users.tasks import Empty
from headgate.tasks.graph import DAG

with DAG("warm"):
    Empty(task_id="warm")

with DAG("wide", max_active_runs={runs}):
    for number in range({tasks}):
        Empty(task_id=f"t{{number}}")
"""
COMMITS = 2  # of a task: that it is given to a worker, and what became of it
WITHIN_S = 200.0
RATE = "tasks ended"


def run_station(kind: str, runs: int, tasks: int) -> Figures:
    """Have all runs go on at once; return the number of tasks a second, from the first one begun to the last ended."""
    with stations.running(kind, DAG.format(runs=runs, tasks=tasks)) as station:
        station.warm_up("warm", runs=4 * WORKERS)
        station.wait_dag("wide")
        numbers = [station.create_run("wide", f"run-{number}") for number in range(runs)]
        station.wait_ended(WITHIN_S)
        times = [station.times_of(number) for number in numbers]
    took_s = max(run.ended_at for run in times) - min(run.first_begun_at for run in times)
    return {RATE: runs * tasks / took_s.total_seconds()}


def commits(kind: str, tasks: int) -> Figures:
    """Commit single rows as often as if each task were alone; return the tasks a second."""
    with fresh(kind) as database:
        add_triggers(database, "nobody.Loads", [{}])
        took_s = sum(nothing.commit_moments_s(database, COMMITS * tasks))
    return {RATE: tasks / took_s}


def cases(options: Options) -> list[Case]:
    """Return two cases for each database: one wide run, and many runs of one task."""
    tasks, runs = options.of(500, 100, 8), options.of(1000, 100, 8)
    return [made for kind in options.databases for made in (case(kind, 1, tasks), case(kind, runs, 1))]


def case(kind: str, runs: int, tasks: int) -> Case:
    """Return the case of so many runs of so many tasks each."""
    what = f"1 run of {tasks:,} tasks" if runs == 1 else f"{runs:,} runs of 1 task"
    return Case(
        f"{kind}, {what}",
        [Figure(RATE, "1/s")],
        lambda: run_station(kind, runs, tasks),
        lambda: commits(kind, runs * tasks),
    )


BENCH = Bench(
    "wide",
    f"wide: empty tasks that may all run at once, on {WORKERS} workers",
    f"{COMMITS} durable commits of one row for each task by the bare driver, one after the other",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
