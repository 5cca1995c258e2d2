"""Consumers that wait: how soon one gets an event that was stored, and how many statements idle ones run.

The consumer is a process of its own. The latency is from the call of `Store.store_slice`, which commits, to the begin
of the block that gets the event: a consumer that is woken by the commit may begin before that call returns. A consumer
that waits looks by itself after 2 and 12 s, then ever more rarely (`headgate.client.waiting.CHECKS_S`); idle ones are
watched between two of these looks, as PostgreSQL sees them.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import psycopg

from benchmarks.bench_latency import PERCENTILES, commit_name, ms_at, run_commits
from benchmarks.databases import KEYS, Database, add_triggers, fresh
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from headgate.client import open_client
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.values import encode_value
from headgate.store.db.changes import FOLLOWERS_LOOK_S
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store

WATCHER = "w1"
RATE = 50.0  # events a second
WARM_S = 2 * FOLLOWERS_LOOK_S  # until the supervisor knows that somebody waits
WITHIN_S = 60.0
SETTLED_S = 14.0  # after the second look that a consumer makes by itself
IDLE = 20  # consumers; each has a connection, and a server has 100 as a rule, for everybody
STATEMENTS = "statements of all a second"

_RUNNING = """
SELECT count(*), count(*) FILTER (WHERE query_start > %s) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'headgate'
"""


def run_push(kind: str, *, events: int) -> Figures:
    """Store events one by one at a pace; return the percentiles of the time until each was handed over."""
    warm = int(WARM_S * RATE)
    with fresh(kind) as database, ExitStack() as stack:
        add_triggers(database, "nobody.Loads", [{}])
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_consume, args=(database.url, warm + events, theirs)
        )
        process.start()
        stack.callback(process.join)
        stack.callback(process.terminate)
        _receive(ours)  # it waits
        stored_at = _store(database, warm + events)
        got_at: list[float] = _receive(ours)
    took_s = [got - stored for stored, got in zip(stored_at, got_at, strict=True)][warm:]
    return {f"handed over, p{percentile}": ms_at(percentile, took_s) for percentile in PERCENTILES}


def _receive(pipe: Connection) -> list[float]:
    if not pipe.poll(WITHIN_S):
        raise BenchFailed("the consumer says nothing")
    got: list[float] = pipe.recv()
    return got


def _consume(url: str, events: int, pipe: Connection) -> None:
    """Note when each event comes; a process of its own."""
    got_at: list[float] = []
    with open_client(url) as client:
        consumer = client.add_consumer("billing", WATCHER)
        consumer.wait(0.0)
        pipe.send([])
        while len(got_at) < events and consumer.wait(WITHIN_S):
            with consumer.batch() as batch:
                got_at += [time.monotonic()] * len(batch)
    pipe.send(got_at)


def _store(database: Database, events: int) -> list[float]:
    """Store events as a supervisor does, each in a slice; return when each was about to be."""
    stored_at = []
    with Store(database.engine(), secrets=Secrets([KEYS], source="the benchmarks")) as store:
        epoch = store.register_triggerer(
            hostname="h", pid=1, machine="m", process_started=0.0, capacity=1, queues=("default",)
        )
        (claimed,) = store.claim_triggers(epoch, limit=1, queues=("default",))
        begun_at = time.monotonic()
        for number in range(events):
            time.sleep(max(0.0, begun_at + number / RATE - time.monotonic()))
            payload = encode_value(number, where="payload")
            stored_at.append(time.monotonic())
            store.store_slice(epoch, events=[FiredEvent(claimed.id, "run", number, number + 1, payload, str(number))])
    return stored_at


def run_idle(consumers: int, *, settled_s: float, watched_s: float) -> Figures:
    """Have consumers wait, each over a connection of its own; return the statements that they run in a second."""
    with fresh("postgresql") as database:
        add_triggers(database, "nobody.Loads", [{}])
        waiting = [threading.Thread(target=_wait, args=(database.url, settled_s + watched_s)) for _ in range(consumers)]
        with open_client(database.url) as client:
            client.add_consumer("billing", WATCHER)
        for thread in waiting:
            thread.start()
        with psycopg.connect(database.url, autocommit=True) as server:
            time.sleep(settled_s)
            since = server.execute("SELECT clock_timestamp()").fetchone()
            time.sleep(watched_s / 2)  # the others end their wait at the end of it
            counted = server.execute(_RUNNING, since).fetchone()
        for thread in waiting:
            thread.join()
    if counted is None or counted[0] != consumers:
        raise BenchFailed(f"expected {consumers} connections of consumers, found {counted}")
    return {STATEMENTS: counted[1] / (watched_s / 2)}


def _wait(url: str, timeout_s: float) -> None:
    with open_client(url) as client:
        client.consumer("billing").wait(timeout_s)


def cases(options: Options) -> list[Case]:
    """Return the latency on each database, and the idle consumers of PostgreSQL."""
    events = options.of(500, 200, 10)
    figures = [
        Figure(
            f"handed over, p{percentile}",
            "ms",
            Target(value_max=25.0) if percentile == 99 else Target(),
            commit_name(percentile),
        )
        for percentile in PERCENTILES
    ]
    found = [
        Case(
            f"{kind}, {RATE:.0f} events/s",
            figures,
            lambda kind=kind: run_push(kind, events=events),  # type: ignore[misc]
            lambda kind=kind: run_commits(kind, events),  # type: ignore[misc]
        )
        for kind in options.databases
    ]
    if "postgresql" in options.databases:
        consumers, settled_s, watched_s = options.of((IDLE, SETTLED_S, 60.0), (IDLE, SETTLED_S, 20.0), (3, 3.0, 1.0))
        found.append(
            Case(
                f"postgresql, {consumers} idle consumers",
                [Figure(STATEMENTS, "", Target(value_max=IDLE / 100))],
                lambda: run_idle(consumers, settled_s=settled_s, watched_s=watched_s),
                None,
            )
        )
    return found


BENCH = Bench(
    "push",
    "push: from stored to handed over to a consumer that waits; and consumers that wait for nothing",
    "a durable commit of a single row by the bare driver",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
