"""Many empty instances of one mapped task, or of a mapped group, beside as many empty tasks that stand in their DAG.

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
from headgate.tasks import DAG, task_group


@task_group
def pair(value):
    Empty(task_id="a", retries=1) >> Empty(task_id="b", retries=1)


with DAG("warm"):
    Empty(task_id="warm")

with DAG("mapped"):
    Taking.partial(task_id="each", retries=1).expand(value=range({tasks}))

with DAG("grouped"):
    pair.expand(value=range({tasks} // 2))

with DAG("unmapped", max_active_runs={runs}):
    for number in range({each}):
        Empty(task_id=f"t{{number}}", retries=1)
"""
TASKS_OF_RUN = 100  # in one run of the baseline
WITHIN_S = 1000.0
SETTLE_S = 0.5
TOOK, RATE = "all of them", "tasks ended"
CPU, MEMORY = "CPU of the supervisor, each task", "memory of the supervisor above its start"


def run_station(kind: str, tasks: int, name: str) -> Figures:
    """Have all tasks of a DAG go on at once; measure from the first one begun to the end of the last run."""
    each = min(tasks, TASKS_OF_RUN)
    runs = tasks // each if name == "unmapped" else 1
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
    return [
        case(kind, tasks, name, text)
        for kind in options.databases
        for name, text in (("mapped", "of a task"), ("grouped", "of the two tasks of a group"))
    ]


def case(kind: str, tasks: int, name: str, text: str) -> Case:
    """Return the case of so many instances of the tasks of a DAG."""
    return Case(
        f"{kind}, {tasks:,} instances {text}",
        [Figure(TOOK, "s"), Figure(RATE, "1/s"), Figure(CPU, "ms"), Figure(MEMORY, "KB")],
        lambda: run_station(kind, tasks, name),
        lambda: run_station(kind, tasks, "unmapped"),
    )


BENCH = Bench(
    "maps",
    f"maps: empty instances, on {WORKERS} workers",
    f"as many empty tasks that are not mapped, {TASKS_OF_RUN} in each run, all runs at once",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
