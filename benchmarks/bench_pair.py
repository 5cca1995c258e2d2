"""Throughput of a pair: events per second from the producer to `advance`, with the two real processes.

The producer hands out numbers from memory, as fast as they are taken. Every subscriber fires each event once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from benchmarks import kernel, nothing, pairs
from benchmarks.databases import add_triggers, fresh
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from benchmarks.pairs import Pair

CLASSPATH = "benchmarks.users.streams.MemoryTrigger"
WITHIN_S = 180.0

STORED = "stored rows"
RAW = "raw events"
RUNNER_CPU = "runner, CPU a row"
SUPERVISOR_CPU = "supervisor, CPU a row"
WHOLE_CPU = "CPU a row"


def run_streams(kind: str, *, streams: int, subscribers: int, events: int) -> Figures:
    """Run streams with this many subscribers and events each to their end; return the throughput."""
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
            pair.wait(lambda: board["first_at"] > 0, "the first event is handed out", WITHIN_S)
            processes = {RUNNER_CPU: pair.runner_pids()[-1], SUPERVISOR_CPU: pair.supervisor_pid}
            before_s = {name: kernel.cpu_s(pid) for name, pid in processes.items()}
            rows_after = everybody * events - board["acked"]
            pair.wait_board("advanced", streams * events, WITHIN_S)
            used_s = {name: kernel.cpu_s(pid) - before_s[name] for name, pid in processes.items()}
            require_all(pair, streams * events, subscribers)
    took_s = board["advanced_at"] - board["first_at"]
    cpu_us = {name: used * 1e6 / max(1, rows_after) for name, used in used_s.items()}
    return {RAW: streams * events / took_s, STORED: everybody * events / took_s, **cpu_us}


def require_all(pair: Pair, events: int, subscribers: int) -> None:
    """Raise `BenchFailed` unless every event was acked by every subscriber, and is in the database once.

    A broker may deliver a message again that it was not told of in time; then it is acked more than once.
    """
    rows = pair.database.count("trigger_event")
    acked, failed = pair.board["acked"], pair.board["failed"]
    if rows != events * subscribers or acked < rows or failed:
        raise BenchFailed(f"{events:,} events, {subscribers} subscribers: {rows:,} rows, {acked=:,.0f}, {failed=:,.0f}")


def run_nothing(kind: str, *, subscribers: int, events: int) -> Figures:
    """Run the null pipeline with as many events."""
    with fresh(kind) as database:
        board = pairs.new_board(database)
        add_triggers(database, CLASSPATH, [{}] * subscribers)
        before_s = time.process_time()
        stored = nothing.drain_memory(database, board, events=events, subscribers=subscribers)
        used_s = time.process_time() - before_s
    return {RAW: stored / subscribers, STORED: stored, WHOLE_CPU: used_s * 1e6 / (events * subscribers)}


def cases(options: Options) -> list[Case]:
    """Return one case for each database and number of subscribers."""
    made = []
    for kind in options.databases:
        for subscribers in options.of((1, 10, 100), (1, 100), (3,)):
            events = max(options.of(30_000, 10_000, 120) // subscribers, 20)
            figures = [Figure(STORED, "rows/s", Target(ratio_min=0.3, value_min=20_000))]
            if subscribers > 1:
                figures.append(Figure(RAW, "events/s"))
            figures += [Figure(name, "µs", baseline=WHOLE_CPU) for name in (RUNNER_CPU, SUPERVISOR_CPU)]
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
