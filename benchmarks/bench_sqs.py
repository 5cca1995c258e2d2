"""From the messages of an SQS queue to their deletion: how many events a second a pair stores.

The server is a moto of the benchmark's own: one Python process in memory, which is slower than SQS.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.bare_brokers import BareMessage, BareSource, bench_of
from benchmarks.harness import BenchFailed, main
from headgate.brokers.clients.sqs_client import BATCH_MAX
from headgate.testing.brokers.sqs_station import REGION, MotoServer, is_there

QUEUE = "bench"
MESSAGES_SHARE = 0.02  # of the messages of other brokers: this server gives about a hundredth of their rate


class BareQueue(BareSource):
    """A queue that is read by calls one after the other."""

    classpath = "headgate.brokers.sqs.SqsTrigger"

    def __init__(self, moto: MotoServer, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        secret = quote(moto.me.secret, safe="")
        self.uri = f"sqs+http://{moto.me.name}:{secret}@127.0.0.1:{moto.port}/?region={REGION}"
        self.kwargs = {"queue": QUEUE}

    def read(self, count: int) -> list[BareMessage]:
        """Receive messages, ten at a time."""
        found: list[BareMessage] = []
        while len(found) < count:
            asked = min(BATCH_MAX, count - len(found))
            answer = self._client.receive_message(
                QueueUrl=self._url, MaxNumberOfMessages=asked, MessageSystemAttributeNames=["SentTimestamp"]
            )
            for message in answer.get("Messages", ()):
                payload = {
                    "body": message["Body"],
                    "queue": QUEUE,
                    "message_id": message["MessageId"],
                    "sent_at": int(message["Attributes"]["SentTimestamp"]) / 1000,
                    "attributes": {},
                }
                found.append(BareMessage(message["ReceiptHandle"], message["MessageId"], payload))
        return found

    def acknowledge(self, messages: Sequence[BareMessage]) -> None:
        """Delete messages, ten at a time."""
        for begin in range(0, len(messages), BATCH_MAX):
            entries = [
                {"Id": str(number), "ReceiptHandle": message.handle}
                for number, message in enumerate(messages[begin : begin + BATCH_MAX])
            ]
            self._client.delete_message_batch(QueueUrl=self._url, Entries=entries)

    def unacknowledged(self) -> int:
        """Return the messages that the queue has."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = self._client.get_queue_attributes(QueueUrl=self._url, AttributeNames=names)
        return sum(map(int, answer["Attributes"].values()))


@contextlib.contextmanager
def filled(messages: int) -> Generator[BareSource]:
    """Yield a queue with so many messages, on a server of its own."""
    if not is_there():
        raise BenchFailed("moto, flask and flask-cors are not installed")
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        moto = MotoServer(Path(folder))
        try:
            moto.start()
            client = moto.client("sqs")
            url = client.create_queue(QueueName=QUEUE)["QueueUrl"]
            body = '{{"order": {}, "amount": "1800", "customer": "a customer\'s name"}}'
            for begin in range(0, messages, BATCH_MAX):
                numbers = range(begin, min(messages, begin + BATCH_MAX))
                entries = [{"Id": str(number), "MessageBody": body.format(number)} for number in numbers]
                client.send_message_batch(QueueUrl=url, Entries=entries)
            yield BareQueue(moto, client, url)
        finally:
            moto.close()


BENCH = bench_of(
    "sqs", "from the messages of an SQS queue (moto) to their deletion", filled, messages_share=MESSAGES_SHARE
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
