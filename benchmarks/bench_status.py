"""`why`, `status`, and the statements that a supervisor repeats, on a database with many events and triggers.

The time is that of the store's verbs, in one process: the database's, and what SQLAlchemy and the judgement of the
facts take. `benchmarks.filling` has the rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from benchmarks.filling import QUEUES, Sizes, filled
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main

FAST = Target(value_max=50)  # ms
CALLS = 25  # of each verb; the fastest counts, because whatever else the machine does only adds to the others
FEW = (2000, 200)  # events and triggers of the baseline


def run(kind: str, events: int, triggers: int) -> Figures:
    """Call each verb some times; return the times of the fastest in ms."""
    with filled(kind, Sizes(events, triggers)) as (store, epoch, busy, *_):
        inspect = store.inspect
        task = inspect.find_task("etl", "r1", "a")
        verbs: dict[str, Callable[[], object]] = {
            "status": inspect.status,
            "why, a trigger": lambda: inspect.why_trigger(busy),
            "why, a task that is deferred": lambda: inspect.why_task(task),
            "a look for changes": lambda: store.poll(epoch, QUEUES),
            "a claim of nothing": lambda: store.claim_triggers(epoch, limit=100, queues=QUEUES),
            "a count of claimable triggers": lambda: store.count_claimable(epoch, QUEUES),
        }
        return {name: fastest_ms(verb) for name, verb in verbs.items()}


def fastest_ms(verb: Callable[[], object]) -> float:
    """Return the time of the fastest of some calls, after one that is not counted."""
    verb()
    took = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        verb()
        took.append((time.perf_counter() - begun) * 1000)
    return min(took)


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    sizes = options.of((1_000_000, 100_000), (100_000, 10_000), (2000, 1000))
    return [case(kind, *sizes) for kind in options.databases]


def case(kind: str, events: int, triggers: int) -> Case:
    """Return the case of so many events and triggers."""
    asked = ("status", "why, a trigger", "why, a task that is deferred")
    repeated = ("a look for changes", "a claim of nothing", "a count of claimable triggers")
    figures = [*(Figure(name, "ms", FAST) for name in asked), *(Figure(name, "ms") for name in repeated)]
    label = f"{kind}, {events:,} events, {triggers:,} triggers"
    return Case(label, figures, lambda: run(kind, events, triggers), lambda: run(kind, *FEW))


BENCH = Bench(
    "status",
    "status: what is wrong, and why, with many events and triggers",
    f"the same verbs with {FEW[0]:,} events and {FEW[1]:,} triggers",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
