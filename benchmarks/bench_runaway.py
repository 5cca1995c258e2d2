"""Many good triggers and one that ends their process a second after each of its starts: what the good ones store.

``--only "300 s" --limit 900`` runs the long form.
"""

from __future__ import annotations

import sys
import time

from benchmarks import idlers
from benchmarks.databases import add_triggers
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main

TICKS = "benchmarks.users.streams.Ticks"
EXITS = "benchmarks.users.streams.Exits"
STORED = "stored by the good triggers"
LONG_S = 300.0


def run(kind: str, count: int, seconds: float, *, culprits: int) -> Figures:
    """Run the triggers; return how many events a second were stored in the time after all of them had begun."""
    with idlers.pair_ready_for(kind) as pair:
        board = {"board": pair.board.path}
        add_triggers(pair.database, TICKS, [board] * count)
        pair.wait_board("running", count, idlers.WITHIN_S)
        before, began_at = pair.database.count("trigger_event"), time.monotonic()
        if culprits:
            add_triggers(pair.database, EXITS, [board] * culprits)
        time.sleep(seconds)
        stored = pair.database.count("trigger_event") - before
        return {STORED: stored / (time.monotonic() - began_at)}


def cases(options: Options) -> list[Case]:
    """Return one case; the long form only if it is asked for."""
    seconds = options.of(60.0, 20.0, 4.0)
    count = options.of(1000, 1000, 20)
    kind = options.databases[0]
    return [case(kind, count, span_s) for span_s in {seconds, LONG_S if str(int(LONG_S)) in options.only else seconds}]


def case(kind: str, count: int, seconds: float) -> Case:
    """Return the case of so many good triggers."""
    # The three ends of the process cost some seconds in all, however long it runs.
    target = Target(ratio_min=0.95) if seconds >= LONG_S else Target()
    return Case(
        f"{kind}, {count:,} triggers, {seconds:g} s",
        [Figure(STORED, "events/s", target)],
        lambda: run(kind, count, seconds, culprits=1),
        lambda: run(kind, count, seconds, culprits=0),
    )


BENCH = Bench(
    "runaway",
    "runaway: one trigger of many ends their process a second after each of its starts",
    "the same triggers without it",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
