"""From the messages of a quorum queue to their acknowledgement: how many events a second a pair stores.

The server is the one at ``HEADGATE_TEST_RABBITMQ_URL``, with a queue of the benchmark's own, which is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Generator, Sequence
from functools import cache
from typing import Any

import pika
from pika.exceptions import AMQPError

from benchmarks.bare_brokers import BareMessage, BareSource, bench_of
from benchmarks.harness import BenchFailed, main

RABBITMQ_URL = os.environ.get("HEADGATE_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672")
PREFETCH = 1_000  # as that of the trigger


@cache
def rabbitmq_answers() -> bool:
    """Whether a RabbitMQ server answers."""
    try:
        pika.BlockingConnection(pika.URLParameters(RABBITMQ_URL)).close()
    except (AMQPError, OSError):
        return False
    return True


class BareQueue(BareSource):
    """A queue, and a consumer with the prefetch of the trigger."""

    uri = RABBITMQ_URL
    classpath = "headgate.brokers.rabbitmq.RabbitTrigger"

    def __init__(self, channel: Any, queue: str) -> None:
        self._channel = channel
        self._queue = queue
        self._arrived: list[Any] = []
        self._consumer: str | None = None
        self.kwargs = {"queue": queue, "accept_drop": True}

    def read(self, count: int) -> list[BareMessage]:
        """Consume, from the first call on."""
        if self._consumer is None:
            self._channel.basic_qos(prefetch_count=PREFETCH)
            self._consumer = self._channel.basic_consume(self._queue, self._note)
        while not self._arrived:
            self._channel.connection.process_data_events(1.0)
        taken, self._arrived = self._arrived[:count], self._arrived[count:]
        return [self._message(*each) for each in taken]

    def _note(self, _: object, *given: Any) -> None:
        self._arrived.append(given)

    def _message(self, method: Any, properties: Any, body: bytes) -> BareMessage:
        payload = {
            "body": body.decode(),
            "queue": self._queue,
            "exchange": method.exchange,
            "routing_key": method.routing_key,
            "headers": {},
            "message_id": properties.message_id,
        }
        return BareMessage(method.delivery_tag, properties.message_id, payload)

    def acknowledge(self, messages: Sequence[BareMessage]) -> None:
        """Acknowledge all up to the last."""
        self._channel.basic_ack(messages[-1].handle, multiple=True)

    def unacknowledged(self) -> int:
        """Return the messages that are ready once nobody consumes."""
        connection = self._channel.connection
        if self._consumer is not None:
            self._channel.close()
            self._channel = connection.channel()
        return int(self._channel.queue_declare(self._queue, passive=True).method.message_count)


@contextlib.contextmanager
def filled(messages: int) -> Generator[BareSource]:
    """Yield a queue with so many messages."""
    if not rabbitmq_answers():
        raise BenchFailed("no RabbitMQ server answers at HEADGATE_TEST_RABBITMQ_URL")
    queue = f"headgate-bench-{secrets.token_hex(6)}"
    with pika.BlockingConnection(pika.URLParameters(f"{RABBITMQ_URL}/%2F?heartbeat=0")) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
        try:
            for number in range(messages):
                properties = pika.BasicProperties(message_id=str(number), delivery_mode=2)
                body = b'{"order": %d, "amount": "1800", "customer": "a customer\'s name"}' % number
                channel.basic_publish("", queue, body, properties)
            connection.channel().queue_declare(queue, passive=True)  # answered behind all of them
            while channel.queue_declare(queue, passive=True).method.message_count < messages:
                connection.process_data_events(0)
            yield BareQueue(connection.channel(), queue)
        finally:
            connection.channel().queue_delete(queue)


BENCH = bench_of("rabbitmq", "from the messages of a quorum queue to their acknowledgement", filled)

if __name__ == "__main__":
    sys.exit(main(BENCH))
