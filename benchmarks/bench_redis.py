"""From the entries of a Redis stream to their acknowledgement: how many events a second a pair stores.

The server is the one at ``HEADGATE_TEST_REDIS_URL``, with a stream of the benchmark's own, which is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Generator
from functools import cache

import redis

from benchmarks import nothing, pairs
from benchmarks.bench_filelog import require_no_failure
from benchmarks.bench_pair import WITHIN_S, require_all
from benchmarks.databases import add_triggers, bare_driver, fresh, moment
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from headgate.brokers.redis_client import run
from headgate.protocol.values import encode_value

REDIS_URL = os.environ.get("HEADGATE_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")
CLASSPATH = "benchmarks.users.redis_streams.CountedRedisStreamTrigger"
GROUP = "bench"
STORED = "stored rows"
TOOK = "to acknowledge all"
ENTRIES_A_PIPELINE = 1_000


@cache
def redis_answers() -> bool:
    """Whether a Redis server answers."""
    with redis.Redis.from_url(REDIS_URL) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


@contextlib.contextmanager
def filled(entries: int) -> Generator[tuple[redis.Redis, str]]:
    """Yield a client, and the name of a stream with so many entries that a group has not read."""
    if not redis_answers():
        raise BenchFailed("no Redis server answers at HEADGATE_TEST_REDIS_URL")
    stream = f"headgate-bench-{secrets.token_hex(6)}"
    with redis.Redis.from_url(REDIS_URL, protocol=2) as client:
        try:
            run(client, "XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
            for begin in range(0, entries, ENTRIES_A_PIPELINE):
                pipeline = client.pipeline(transaction=False)
                for number in range(begin, min(entries, begin + ENTRIES_A_PIPELINE)):
                    pipeline.xadd(stream, {"order": str(number), "amount": "1800", "customer": "a customer's name"})
                pipeline.execute()
            yield client, stream
        finally:
            client.delete(stream)


def run_pair(kind: str, entries: int) -> Figures:
    """Have a pair store the entries of a stream; return the pace and the time."""
    with fresh(kind) as database, filled(entries) as (client, stream):
        board = pairs.new_board(database)
        kwargs = {"connection": "bench", "stream": stream, "group": GROUP, "board": board.path}
        add_triggers(database, CLASSPATH, [kwargs])
        with pairs.running(database, board, conn_bench=REDIS_URL) as pair:
            pair.wait_board("advanced", entries, WITHIN_S)
            require_all(pair, entries, 1)
            require_no_failure(pair)
        require_acknowledged(client, stream)
    took_s = board["advanced_at"] - board["first_at"]
    return {STORED: entries / took_s, TOOK: took_s}


def run_bare(kind: str, entries: int) -> Figures:
    """Have one process store 100 entries a commit, and acknowledge them after it."""
    with fresh(kind) as database, filled(entries) as (client, stream):
        add_triggers(database, CLASSPATH, [{}])
        driver = bare_driver(database)
        begun, number = time.monotonic(), 0
        while number < entries:
            read = ("GROUP", GROUP, "bare", "COUNT", nothing.ROWS_PER_COMMIT, "STREAMS", stream, ">")
            ((_, found),) = run(client, "XREADGROUP", *read)
            rows, stored_at = [], moment(kind)
            for entry_id, fields in found:
                named = {name.decode(): value.decode() for name, value in fields.items()}
                key = entry_id.decode()
                payload = encode_value({"id": key, "stream": stream, "fields": named}, where="payload")
                rows.append(nothing.event_row(1, number, key, payload, stored_at))
                number += 1
            driver.store(rows)
            run(client, "XACK", stream, GROUP, *(entry_id for entry_id, _ in found))
        took_s = time.monotonic() - begun
        driver.close()
        require_acknowledged(client, stream)
        if (stored := database.count("trigger_event")) != entries:
            raise BenchFailed(f"the bare client stored {stored:,} of {entries:,} entries")
    return {STORED: entries / took_s, TOOK: took_s}


def require_acknowledged(client: redis.Redis, stream: str) -> None:
    """Raise `BenchFailed` if the group has entries that it has not acknowledged."""
    (group,) = client.xinfo_groups(stream)
    if group["pending"] or group["lag"]:
        raise BenchFailed(f"{group['pending']:,} entries are pending, {group['lag']} are not read")


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    return [case(kind, options.of(60_000, 20_000, 200)) for kind in options.databases]


def case(kind: str, entries: int) -> Case:
    """Return the case of a stream of so many entries."""
    return Case(
        f"{kind}, {entries:,} entries",
        [Figure(STORED, "rows/s", Target(ratio_min=0.3)), Figure(TOOK, "s")],
        lambda: run_pair(kind, entries),
        lambda: run_bare(kind, entries),
    )


BENCH = Bench(
    "redis",
    "redis: from the entries of a stream to their acknowledgement",
    "one process with the same client: 100 entries read, stored in one commit by the bare driver, then acknowledged",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
