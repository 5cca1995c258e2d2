"""Many empty instances of one mapped task, beside as many empty tasks that stand in their DAG by themselves.

The tasks of the baseline are those of many runs, because a worker runs the DAG file of all tasks for each step, and
that would take longer than anything else if it had thousands. Supervisor and memory are the kernel's figures; the
memory is that after the last task, above that before the run.
"""

from __future__ import annotations

import sys
import time

from benchmarks import kernel, stations
from benchmarks.harness import Bench, Case, Figure, Figures, Options, main
from benchmarks.stations import WORKERS

DAG = """
from benchmarks.users.tasks import Empty, Taking
from headgate.tasks.graph import DAG

with DAG("warm"):
    Empty(task_id="warm")

with DAG("mapped"):
    Taking.partial(task_id="each").expand(value=range({tasks}))

with DAG("unmapped", max_active_runs={runs}):
    for number in range({each}):
        Empty(task_id=f"t{{number}}")
"""
TASKS_OF_RUN = 100  # in one run of the baseline
WITHIN_S = 1000.0
SETTLE_S = 0.5
TOOK, RATE = "all of them", "tasks ended"
CPU, MEMORY = "CPU of the supervisor, each task", "memory of the supervisor above its start"


def run_station(kind: str, tasks: int, *, is_mapped: bool) -> Figures:
    """Have all tasks go on at once; measure from the first one begun to the end of the last run."""
    each = min(tasks, TASKS_OF_RUN)
    runs = 1 if is_mapped else tasks // each
    name = "mapped" if is_mapped else "unmapped"
    with stations.running(kind, DAG.format(tasks=tasks, runs=runs, each=each)) as station:
        station.warm_up("warm", runs=4 * WORKERS)
        station.wait_dag(name)
        time.sleep(SETTLE_S)
        pid = station.pair.supervisor_pid
        memory_kb, cpu_s = kernel.pss_kb(pid), kernel.cpu_s(pid)
        numbers = [station.create_run(name, f"run-{number}") for number in range(runs)]
        station.wait_ended(WITHIN_S)
        memory_kb, cpu_s = kernel.pss_kb(pid) - memory_kb, kernel.cpu_s(pid) - cpu_s
        times = [station.times_of(number) for number in numbers]
    took_s = (max(run.ended_at for run in times) - min(run.first_begun_at for run in times)).total_seconds()
    return {TOOK: took_s, RATE: tasks / took_s, CPU: 1000 * cpu_s / tasks, MEMORY: memory_kb}


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    tasks = options.of(10_000, 1000, 20)
    return [case(kind, tasks) for kind in options.databases]


def case(kind: str, tasks: int) -> Case:
    """Return the case of so many tasks."""
    return Case(
        f"{kind}, {tasks:,} instances",
        [Figure(TOOK, "s"), Figure(RATE, "1/s"), Figure(CPU, "ms"), Figure(MEMORY, "KB")],
        lambda: run_station(kind, tasks, is_mapped=True),
        lambda: run_station(kind, tasks, is_mapped=False),
    )


BENCH = Bench(
    "maps",
    f"maps: empty instances of one mapped task, on {WORKERS} workers",
    f"as many empty tasks that are not mapped, {TASKS_OF_RUN} in each run, all runs at once",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
