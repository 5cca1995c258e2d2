"""Throughput on a database that answers every commit 50 ms late, so that only larger rounds keep up.

PostgreSQL is behind a proxy that delays the answers to commits (`benchmarks.proxy`). With SQLite the driver's
connection waits after a commit (`benchmarks.watched`); the baseline, which has no supervisor, waits likewise.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Sequence

from benchmarks import nothing, pairs
from benchmarks.bench_pair import CLASSPATH, WITHIN_S, require_all
from benchmarks.databases import BareDriver, Database, EventRow, add_triggers, bare_driver, fresh
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main
from benchmarks.proxy import in_front_of

COMMIT_DELAY_S = 0.05
STORED = "stored rows"


class _Slow:
    """A bare driver whose commits take longer."""

    def __init__(self, driver: BareDriver) -> None:
        self._driver = driver

    def store(self, rows: Sequence[EventRow]) -> None:
        self._driver.store(rows)
        time.sleep(COMMIT_DELAY_S)

    def close(self) -> None:
        self._driver.close()


@contextlib.contextmanager
def slow(database: Database) -> Generator[Database]:
    """Yield the database through the proxy if it is PostgreSQL; SQLite is slowed in the process that opens it."""
    if database.kind == "sqlite":
        yield database
        return
    with in_front_of(database.url, commit_delay_s=COMMIT_DELAY_S) as url:
        yield database._replace(url=url)


def run_pair(kind: str, subscribers: int, events: int) -> Figures:
    """Run one stream to its end."""
    with fresh(kind) as database:
        board = pairs.new_board(database)
        kwargs = {"board": board.path, "stream": 0, "events": events, "subscribers": subscribers}
        add_triggers(database, CLASSPATH, [kwargs] * subscribers)
        watched = ("-m", "benchmarks.watched", "--board", board.path, "--commit-delay", str(COMMIT_DELAY_S))
        command = watched if kind == "sqlite" else pairs.PLAIN
        with slow(database) as seen, pairs.running(seen, board, command=command) as pair:
            pair.wait_board("advanced", events, WITHIN_S)
            require_all(pair, events, subscribers)
    return {STORED: events * subscribers / (board["advanced_at"] - board["first_at"])}


def run_nothing(kind: str, subscribers: int, events: int) -> Figures:
    """Run the null pipeline on as slow a database."""
    with fresh(kind) as database:
        board = pairs.new_board(database)
        add_triggers(database, CLASSPATH, [{}] * subscribers)
        with slow(database) as seen:
            driver = bare_driver(seen)
            rows = nothing.drain_memory(
                database,
                board,
                events=events,
                subscribers=subscribers,
                driver=_Slow(driver) if kind == "sqlite" else driver,
            )
    return {STORED: rows}


def cases(options: Options) -> list[Case]:
    """Return one case for each database and number of subscribers."""
    made = []
    for kind in options.databases:
        for subscribers in options.of((1, 100), (1,), (1,)):
            made.append(case(kind, subscribers, options.of(30_000, 10_000, 200) // subscribers))
    return made


def case(kind: str, subscribers: int, events: int) -> Case:
    """Return the case of one stream with so many subscribers; the baseline stores a tenth, at its steady pace."""
    return Case(
        f"{kind}, {subscribers} subscriber" + "s" * (subscribers > 1),
        [Figure(STORED, "rows/s", Target(value_min=10_000))],
        lambda: run_pair(kind, subscribers, events),
        lambda: run_nothing(kind, subscribers, max(1, events // 10)),
    )


BENCH = Bench(
    "slow_database",
    "slow database: every commit is answered after 50 ms",
    "the null pipeline of bench_pair, 100 rows a commit, on the same slow database",
    cases,
    repeats=2,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
