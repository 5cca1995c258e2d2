"""Pages of a trigger to instances: each page has one value, each value an instance that does nothing.

Ours stores the elements of a page with its event (`TriggerOperator`); the baseline has a worker's step emit them. Times
are the database's: from the first page stored to the end of the run. Memory is the kernel's, at its peak, above that
before the run. The last case holds the rate of many pages against that of a tenth of them.
"""

from __future__ import annotations

import sys
import time

from benchmarks import kernel, stations
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main
from benchmarks.stations import WORKERS

DAG = """
from benchmarks.users.tasks import Emitting, Empty, Pages, Taking
from headgate.tasks import DAG, TriggerOperator

with DAG("warm"):
    Empty(task_id="warm")

with DAG("straight"):
    trigger = {{"trigger_cls": "benchmarks.users.tasks.Pages", "trigger_kwargs": {{"upto": {pages}}}}}
    pages = TriggerOperator(task_id="pages", elements="each", **trigger)
    Taking.partial(task_id="each", retries=1).expand(value=pages.output)

with DAG("through_steps"):
    pages = Emitting(task_id="pages", upto={pages})
    Taking.partial(task_id="each", retries=1).expand(value=pages.output)
"""
WITHIN_S = 1500.0
SETTLE_S = 0.5
FIRST, TOOK, RATE = "page 1 stored to the first instance begun", "page 1 stored to the end", "instances ended"
CPU, PEAK = "CPU of the supervisor, each page", "memory of the supervisor, peak above its start"
FIRST_MS_MAX = {"sqlite": 50.0, "postgresql": 80.0}
TOOK_S_MAX = {"sqlite": 12.0, "postgresql": 25.0}
PAGES = 10_000  # of the goals
PEAK_KB_MAX = 8 * 1024


def run_station(kind: str, pages: int, name: str) -> Figures:
    """Run a DAG whose source has so many pages; measure from the first page stored to the end of the run."""
    with stations.running(kind, DAG.format(pages=pages)) as station:
        station.warm_up("warm", runs=4 * WORKERS)
        station.wait_dag(name)
        time.sleep(SETTLE_S)
        pid = station.pair.supervisor_pid
        memory_kb, cpu_s = kernel.rss_kb(pid), kernel.cpu_s(pid)
        kernel.forget_peak(pid)
        run = station.create_run(name, "measured")
        station.wait_ended(WITHIN_S)
        memory_kb, cpu_s = 1024 * kernel.rss_peak_mb(pid) - memory_kb, kernel.cpu_s(pid) - cpu_s
        times, page_at, begun_at = station.times_of(run), *station.first_of_map(run)
    took_s = (times.ended_at - page_at).total_seconds()
    first_ms = 1000 * (begun_at - page_at).total_seconds()
    return {FIRST: first_ms, TOOK: took_s, RATE: pages / took_s, CPU: 1000 * cpu_s / pages, PEAK: memory_kb}


def cases(options: Options) -> list[Case]:
    """Return two cases for each database, and one in a quick run."""
    few, many = options.of(PAGES, 500, 20), options.of(10 * PAGES, 0, 40)
    made = [straight(kind, few) for kind in options.databases]
    return made + [tenfold(kind, few, many) for kind in options.databases if many]


def straight(kind: str, pages: int) -> Case:
    """Return the case of so many pages, beside the same through steps of a worker."""
    is_goal = pages == PAGES
    figures = [
        Figure(FIRST, "ms", Target(value_max=FIRST_MS_MAX[kind])),
        Figure(TOOK, "s", Target(value_max=TOOK_S_MAX[kind]) if is_goal else Target()),
        Figure(RATE, "1/s"),
        Figure(CPU, "ms"),
        Figure(PEAK, "KB", Target(value_max=PEAK_KB_MAX)),
    ]
    return Case(
        f"{kind}, {pages:,} pages to as many instances",
        figures,
        lambda: run_station(kind, pages, "straight"),
        lambda: run_station(kind, pages, "through_steps"),
    )


def tenfold(kind: str, few: int, many: int) -> Case:
    """Return the case of many pages, beside few of them."""
    return Case(
        f"{kind}, {many:,} pages beside {few:,}",
        [Figure(RATE, "1/s", Target(ratio_min=0.9)), Figure(PEAK, "KB", Target(value_max=PEAK_KB_MAX))],
        lambda: run_station(kind, many, "straight"),
        lambda: run_station(kind, few, "straight"),
    )


BENCH = Bench(
    "pages",
    f"pages: events of a trigger to instances of a mapped task, on {WORKERS} workers",
    "a worker's step that emits the elements; in the last cases, fewer pages",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
