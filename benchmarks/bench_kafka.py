"""From the messages of a Kafka topic to the committed offset: how many events a second a pair stores.

The server is a noida of the benchmark's own, of one topic with one partition.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bare_brokers import BareMessage, BareSource, bench_of
from benchmarks.harness import BenchFailed, main
from headgate.brokers.clients.kafka_client import Consumer, KafkaAdmin, TopicPartition
from headgate.testing.brokers.kafka_station import KafkaStation, find_server

GROUP = "bench"
CHUNK = 10_000  # messages published at once: what the client's queue takes
WAIT_S = 5.0


def noida_is_there() -> bool:
    """Whether a server can be started."""
    return find_server() is not None


class BareTopic(BareSource):
    """A topic of one partition, read by the one member of a group."""

    classpath = "headgate.brokers.kafka.KafkaTrigger"

    def __init__(self, address: str) -> None:
        self.uri = f"kafka://{address}"
        self.kwargs = {"topic": KafkaStation.topic, "group": GROUP}
        self._config: dict[str, Any] = {"bootstrap.servers": address}
        self._client: Consumer | None = None

    def _joined(self) -> Consumer:
        if self._client is None:
            own = {"group.id": GROUP, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
            self._client = Consumer({**self._config, **own})
            self._client.subscribe([KafkaStation.topic])
        return self._client

    def read(self, count: int) -> list[BareMessage]:
        """Join the group at the first call, and read."""
        found: list[BareMessage] = []
        while not found:
            for message in self._joined().consume(count, WAIT_S):
                offset, body = message.offset(), message.value()
                if message.error() is not None or offset is None or not isinstance(body, bytes):
                    raise BenchFailed(f"the broker says: {message.error()}")
                payload: dict[str, Any] = {
                    "body": body.decode(),
                    "key": None,
                    "topic": KafkaStation.topic,
                    "partition": 0,
                    "offset": offset,
                    "timestamp": message.timestamp()[1] / 1000,
                    "headers": {},
                }
                found.append(BareMessage(offset, f"kafka:bench:0:{offset}", payload))
        return found

    def acknowledge(self, messages: Sequence[BareMessage]) -> None:
        """Commit behind the last, and wait for the answer."""
        place = TopicPartition(KafkaStation.topic, 0, messages[-1].handle + 1)
        self._joined().commit(offsets=[place], asynchronous=False)

    def unacknowledged(self) -> int:
        """Return the messages behind the committed offset."""
        with contextlib.closing(KafkaAdmin(self._config, GROUP)) as admin:
            return admin.lag(KafkaStation.topic, GROUP, 1)

    def close(self) -> None:
        """Leave the group."""
        if self._client is not None:
            self._client.close()


@contextlib.contextmanager
def filled(messages: int) -> Generator[BareSource]:
    """Yield a topic with so many messages."""
    if (path := find_server()) is None:
        raise BenchFailed("noida-db is not installed")
    with tempfile.TemporaryDirectory(prefix="headgate-kafka-") as folder:
        station = KafkaStation(Path(folder), path)
        try:
            station.create()
            body = b'{"order": %d, "amount": "1800", "customer": "a customer\'s name"}'
            for begin in range(0, messages, CHUNK):
                station.publish_bodies([body % number for number in range(begin, min(messages, begin + CHUNK))])
            with contextlib.closing(BareTopic(station.address)) as source:
                yield source
        finally:
            station.close()


BENCH = bench_of("kafka", "from the messages of a Kafka topic to the committed offset", filled)

if __name__ == "__main__":
    sys.exit(main(BENCH))
