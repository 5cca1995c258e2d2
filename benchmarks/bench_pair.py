"""From producer to `advance`, with two real processes between: how many events a second a pair stores.

The producer hands out numbers from memory, as fast as they are taken. Every subscriber fires once an event.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import nothing, pairs
from benchmarks.databases import add_triggers, fresh
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from benchmarks.pairs import Pair

CLASSPATH = "benchmarks.users.streams.MemoryTrigger"
WITHIN_S = 180.0

STORED = "stored rows"
RAW = "raw events"


def run_streams(kind: str, *, streams: int, subscribers: int, events: int) -> Figures:
    """Run ``streams`` streams with so many subscribers and events each to their end; return what went through."""
    everybody = streams * subscribers
    with fresh(kind) as database:
        board = pairs.new_board(database)
        kwargs = [
            {"board": board.path, "stream": stream, "events": events, "subscribers": everybody}
            for stream in range(streams)
            for _ in range(subscribers)
        ]
        add_triggers(database, CLASSPATH, kwargs)
        with pairs.running(database, board, capacity=everybody) as pair:
            pair.wait_board("advanced", streams * events, WITHIN_S)
            require_all(pair, streams * events, subscribers)
    took_s = board["advanced_at"] - board["first_at"]
    return {RAW: streams * events / took_s, STORED: everybody * events / took_s}


def require_all(pair: Pair, events: int, subscribers: int) -> None:
    """Raise `BenchFailed` unless every event was acked by every subscriber and stands in the database."""
    rows = pair.database.count("trigger_event")
    acked, failed = pair.board["acked"], pair.board["failed"]
    if rows != events * subscribers or acked != rows or failed:
        raise BenchFailed(f"{events:,} events, {subscribers} subscribers: {rows:,} rows, {acked=:,.0f}, {failed=:,.0f}")


def run_nothing(kind: str, *, subscribers: int, events: int) -> Figures:
    """Run the null pipeline over as much."""
    with fresh(kind) as database:
        board = pairs.new_board(database)
        add_triggers(database, CLASSPATH, [{}] * subscribers)
        stored = nothing.drain_memory(database, board, events=events, subscribers=subscribers)
    return {RAW: stored / subscribers, STORED: stored}


def cases(options: Options) -> list[Case]:
    """Return one case for each database and number of subscribers."""
    made = []
    for kind in options.databases:
        for subscribers in options.of((1, 10, 100), (1, 100), (3,)):
            events = max(options.of(30_000, 10_000, 120) // subscribers, 20)
            figures = [Figure(STORED, "rows/s", Target(ratio_min=0.3, value_min=20_000))]
            if subscribers > 1:
                figures.append(Figure(RAW, "events/s"))
            made.append(case(kind, subscribers, events, figures))
    return made


def case(kind: str, subscribers: int, events: int, figures: Sequence[Figure]) -> Case:
    """Return the case of a pair with so many subscribers of one stream."""
    return Case(
        f"{kind}, {subscribers} subscriber" + "s" * (subscribers > 1),
        figures,
        lambda: run_streams(kind, streams=1, subscribers=subscribers, events=events),
        lambda: run_nothing(kind, subscribers=subscribers, events=events),
    )


BENCH = Bench(
    "pair",
    "pair: from the producer to its advance, through two processes",
    "one process, the same producer and rows, 100 rows a commit by the bare driver, the same advance",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
