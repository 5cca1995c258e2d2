"""Memory of a trigger that only waits, in the runner and in the supervisor.

It is the difference of the kernel's figure (PSS) with and without the triggers. The measurement is half a second after
the start, so that garbage of the start that is freed at once does not count; memory that the allocator keeps does.
"""

from __future__ import annotations

import sys
import time

from benchmarks import idlers, kernel
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main

EACH = "KB each"
SETTLE_S = 0.5


def run_pair(kind: str, count: int) -> Figures:
    """Measure a pair without triggers, then with them."""
    with idlers.pair_ready_for(kind) as pair:
        processes = {"runner": pair.runner_pids()[-1], "supervisor": pair.supervisor_pid}
        time.sleep(SETTLE_S)
        before_kb = {name: kernel.pss_kb(pid) for name, pid in processes.items()}
        idlers.add_idle(pair, count)
        time.sleep(SETTLE_S)
        after_kb = {name: kernel.pss_kb(pid) for name, pid in processes.items()}
    each_kb = {name: (after_kb[name] - before_kb[name]) / count for name in processes}
    return {
        EACH: sum(each_kb.values()),
        "of it in the runner": each_kb["runner"],
        "of it in the supervisor": each_kb["supervisor"],
        "the whole runner": after_kb["runner"] / 1024,
    }


def cases(options: Options) -> list[Case]:
    """Return one case for each number of triggers. The first database is enough: neither process keeps it."""
    kind = options.databases[0]
    return [case(kind, count) for count in options.of((1000, 10_000, 100_000), (1000,), (200,))]


def case(kind: str, count: int) -> Case:
    """Return the case of so many triggers."""
    figures = [
        Figure(EACH, "KB", Target(value_max=5.0)),
        Figure("of it in the runner", "KB", baseline=EACH),
        Figure("of it in the supervisor", "KB", baseline=EACH),
    ]
    if count == 100_000:
        figures.append(Figure("the whole runner", "MB", Target(value_max=700), baseline="the whole process"))
    return Case(f"{kind}, {count:,} triggers", figures, lambda: run_pair(kind, count), lambda: idlers.bare_trio(count))


BENCH = Bench(
    "memory",
    "memory: one idle trigger in runner and supervisor",
    "the bare generator in a bare trio task",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
