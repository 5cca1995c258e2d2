"""From the entries of a Redis stream to their acknowledgement: how many events a second a pair stores.

The server is the one at ``HEADGATE_TEST_REDIS_URL``, with a stream of the benchmark's own, which is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Generator, Sequence
from functools import cache

import redis

from benchmarks.bare_brokers import BareMessage, BareSource, bench_of
from benchmarks.harness import BenchFailed, main
from headgate.brokers.clients.redis_client import run

REDIS_URL = os.environ.get("HEADGATE_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")
GROUP = "bench"
ENTRIES_A_PIPELINE = 1_000


@cache
def redis_answers() -> bool:
    """Whether a Redis server answers."""
    with redis.Redis.from_url(REDIS_URL) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


class BareStream(BareSource):
    """A stream with one group."""

    uri = REDIS_URL
    classpath = "headgate.brokers.redis_streams.RedisStreamTrigger"

    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self.kwargs = {"stream": stream, "group": GROUP}

    def read(self, count: int) -> list[BareMessage]:
        """Read new entries for the group."""
        read = ("GROUP", GROUP, "bare", "COUNT", count, "STREAMS", self._stream, ">")
        ((_, found),) = run(self._client, "XREADGROUP", *read)
        messages = []
        for entry_id, fields in found:
            named = {name.decode(): value.decode() for name, value in fields.items()}
            key = entry_id.decode()
            messages.append(BareMessage(entry_id, key, {"id": key, "stream": self._stream, "fields": named}))
        return messages

    def acknowledge(self, messages: Sequence[BareMessage]) -> None:
        """Acknowledge all in one command."""
        run(self._client, "XACK", self._stream, GROUP, *(message.handle for message in messages))

    def unacknowledged(self) -> int:
        """Return the entries of the group that are pending, or not read."""
        (group,) = self._client.xinfo_groups(self._stream)
        return int(group["pending"]) + int(group["lag"] or 0)


@contextlib.contextmanager
def filled(entries: int) -> Generator[BareSource]:
    """Yield a stream with so many entries that a group has not read."""
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
            yield BareStream(client, stream)
        finally:
            client.delete(stream)


BENCH = bench_of("redis", "from the entries of a stream to their acknowledgement", filled)

if __name__ == "__main__":
    sys.exit(main(BENCH))
