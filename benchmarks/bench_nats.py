"""From the messages of a JetStream stream to their acknowledgement: how many events a second a pair stores.

The server is the one at ``HEADGATE_TEST_NATS_URL``, with a stream of the benchmark's own, which is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Generator, Sequence
from functools import cache

import msgspec

from benchmarks.bare_brokers import BareMessage, BareSource, bench_of
from benchmarks.harness import BenchFailed, main
from headgate.brokers.broker_errors import BrokerError
from headgate.brokers.clients.nats_client import TROUBLE, NatsClient
from headgate.triggers.named_values import Connection

NATS_URL = os.environ.get("HEADGATE_TEST_NATS_URL", "nats://127.0.0.1:4222")
CONSUMER = "bench"
PULL_EXPIRES_NS = 5_000_000_000


def connected() -> NatsClient:
    """Return a client of the server."""
    return NatsClient(Connection.from_uri("bench", NATS_URL), "bench")


@cache
def nats_answers() -> bool:
    """Whether a NATS server with JetStream answers."""
    try:
        with contextlib.closing(connected()) as client:
            client.ask("INFO")
    except (BrokerError, *TROUBLE):
        return False
    return True


class BareConsumer(BareSource):
    """A durable pull consumer."""

    uri = NATS_URL
    classpath = "headgate.brokers.nats.JetStreamTrigger"

    def __init__(self, client: NatsClient, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._inbox = client.subscribe()
        self.kwargs = {"stream": stream, "durable": CONSUMER}

    def read(self, count: int) -> list[BareMessage]:
        """Pull messages."""
        question = msgspec.json.encode({"batch": count, "expires": PULL_EXPIRES_NS})
        self._client.publish([(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{CONSUMER}", question)], self._inbox)
        found: list[BareMessage] = []
        while len(found) < count:
            self._client.wait(1.0)
            while self._client.arrived:
                message = self._client.arrived.popleft()
                payload = {
                    "body": message.data.decode(),
                    "subject": message.subject,
                    "stream": self._stream,
                    "sequence": (number := int(message.reply.split(".")[-4])),
                    "stored_at": 1_700_000_000.5,
                    "headers": {},
                }
                found.append(BareMessage(message.reply, str(number), payload))
        return found

    def acknowledge(self, messages: Sequence[BareMessage]) -> None:
        """Acknowledge, and wait for the answers."""
        self._client.request_all([(message.handle, b"+ACK") for message in messages])

    def unacknowledged(self) -> int:
        """Return the messages that the consumer has not acknowledged."""
        info = self._client.ask(f"CONSUMER.INFO.{self._stream}.{CONSUMER}")
        return int(info["num_pending"]) + int(info["num_ack_pending"])


@contextlib.contextmanager
def filled(messages: int) -> Generator[BareSource]:
    """Yield a stream with so many messages, and a consumer."""
    if not nats_answers():
        raise BenchFailed("no NATS server with JetStream answers at HEADGATE_TEST_NATS_URL")
    stream = f"headgate-bench-{secrets.token_hex(6)}"
    with contextlib.closing(connected()) as client:
        client.ask(f"STREAM.CREATE.{stream}", {"name": stream, "subjects": [stream], "storage": "file"})
        config = {"durable_name": CONSUMER, "ack_policy": "explicit", "max_ack_pending": 10_000}
        question = {"stream_name": stream, "config": {**config, "deliver_policy": "all", "replay_policy": "instant"}}
        try:
            client.ask(f"CONSUMER.DURABLE.CREATE.{stream}.{CONSUMER}", question)
            body = b'{"order": %d, "amount": "1800", "customer": "a customer\'s name"}'
            for begin in range(0, messages, 1_000):
                client.request_all([(stream, body % number) for number in range(begin, min(messages, begin + 1_000))])
            yield BareConsumer(client, stream)
        finally:
            client.ask(f"STREAM.DELETE.{stream}")


BENCH = bench_of("nats", "from the messages of a JetStream stream to their acknowledgement", filled)

if __name__ == "__main__":
    sys.exit(main(BENCH))
