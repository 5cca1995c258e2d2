"""A private `moto <https://github.com/getmoto/moto>`_ server, which answers as SQS does, for conformance tests.

It keeps everything in memory, so it is never killed; it takes any receipt that it has ever given; and it knows nothing
of the twelve hours for which SQS lends a message at most.
"""

from __future__ import annotations

import importlib.util
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote
from urllib.request import Request, urlopen

from botocore.config import Config
from botocore.session import Session

from headgate.brokers.sqs import SqsTrigger
from headgate.testing.brokers.reading import NAME
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, Refusal, ServerProcess, Station, free_port
from headgate.testing.brokers.tap import AckParser, Tap

REGION: Final = "eu-west-1"
VISIBILITY_S: Final = 3  # of the station's triggers
RECEIPTS_MAX: Final = 1_000  # of its redrive policy
BATCH: Final = 10  # messages that are published in one request, as many as SQS takes
GROUPS: Final = 100  # of a FIFO queue, more than a test holds messages
SHORT_LIMIT_BYTES: Final = 2_000  # `message_bytes_max` of its triggers
_DELETES: Final = b"AmazonSQS.DeleteMessageBatch"
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


def is_there() -> bool:
    """Whether the server is installed."""
    return all(importlib.util.find_spec(name) for name in ("moto", "flask", "flask_cors"))


class Key(NamedTuple):
    """The access key of a user, and its secret."""

    name: str
    secret: str


class MotoServer(ServerProcess):
    """A server that checks signatures and permissions: ``me`` may do everything, ``reads`` may only look at queues."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        # Nobody is asked for a signature until there are users.
        command = [
            "env",
            "INITIAL_NO_AUTH_ACTION_COUNT=1000",
            sys.executable,
            "-m",
            "headgate.testing.brokers.moto_server",
        ]
        command += ["-H", "127.0.0.1", "-p", str(self.port)]
        super().__init__(command, port=self.port, log_path=folder / "moto.log")
        self.me = self.reads = Key("", "")

    def start(self) -> None:
        """Start it, and make the users."""
        super().start()
        self.me = self._user("me", ["*"])
        self.reads = self._user("reads", ["sqs:GetQueueUrl", "sqs:GetQueueAttributes"])
        head = {"Content-Type": "text/plain"}
        asks = Request(f"http://127.0.0.1:{self.port}/moto-api/reset-auth", b"0", head, method="POST")
        urlopen(asks, timeout=WITHIN_S).close()

    def client(self, service: str, key: Key | None = None) -> Any:
        """Return a client that does not go through a tap."""
        session = Session()
        session.set_credentials(*(key or self.me or Key("nobody", "yet")))
        config = Config(read_timeout=WITHIN_S, connect_timeout=WITHIN_S)
        url = f"http://127.0.0.1:{self.port}"
        return session.create_client(service, region_name=REGION, endpoint_url=url, config=config)

    def _user(self, name: str, actions: Sequence[str]) -> Key:
        iam = self.client("iam", Key("nobody", "yet"))
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="own", PolicyDocument=policy)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return Key(made["AccessKeyId"], made["SecretAccessKey"])


class SqsAckParser(AckParser):
    """Finds deletions. ``receipts`` has what each receipt is of, and is shared by all connections of a tap."""

    def __init__(self, receipts: dict[str, str], lock: threading.Lock) -> None:
        self._receipts = receipts
        self._lock = lock
        self._sent, self._got = b"", b""

    def feed(self, data: bytes) -> list[str]:
        """Return the names of the messages of the deletions that are complete with these bytes."""
        parts, self._sent = _http_messages(self._sent + data)
        found: list[str] = []
        for head, body in parts:
            if _DELETES in head:
                given = [entry["ReceiptHandle"] for entry in json.loads(body)["Entries"]]
                with self._lock:
                    found += [self._receipts[receipt] for receipt in given if receipt in self._receipts]
        return found

    def feed_answer(self, data: bytes) -> None:
        """Note which message each receipt is of."""
        parts, self._got = _http_messages(self._got + data)
        for _, body in parts:
            for message in json.loads(body).get("Messages", ()) if body.startswith(b'{"Messages"') else ():
                name = NAME.search(message["Body"])
                with self._lock:
                    self._receipts[message["ReceiptHandle"]] = message["MessageId"] if name is None else name.group()


def _http_messages(data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the requests or answers that are complete, each as head and body, and the rest."""
    found = []
    while (end := data.find(b"\r\n\r\n")) >= 0:
        length = _LENGTH.search(data[:end])
        behind = end + 4 + (0 if length is None else int(length[1]))
        if len(data) < behind:
            break
        found.append((data[:end], data[end + 4 : behind]))
        data = data[behind:]
    return found, data


class SqsStation(Station):
    """A queue with a redrive policy, on a server that others may use, too, unless the station ``owns_server``.

    With ``is_fifo`` a FIFO queue, whose messages take turns in `GROUPS` groups: of one group SQS hands out no more
    while some of it are held. ``server`` is None: what is in memory does not survive a kill.
    """

    keeps_order = False

    lease_s = VISIBILITY_S

    def __init__(self, moto: MotoServer, *, is_fifo: bool = False, owns_server: bool = False) -> None:
        self.moto = moto
        self._owns_server = owns_server
        self._fifo = ".fifo" if is_fifo else ""
        self._prefix = f"headgate-{secrets.token_hex(6)}"
        self.queue, self.rejected = self.name_of("orders"), self.name_of("rejected")
        self.sqs = moto.client("sqs")
        self._published: dict[str, None] = {}
        self._url = ""
        receipts: dict[str, str] = {}
        self.tap = Tap(("127.0.0.1", moto.port), partial(SqsAckParser, receipts, threading.Lock()))

    def name_of(self, name: str) -> str:
        """Return the name of a queue of this test."""
        return f"{self._prefix}-{name}{self._fifo}"

    @property
    def uri(self) -> str:
        """The address of the tap."""
        return self.uri_of()

    def uri_of(self, key: Key | None = None, query: str = f"region={REGION}", scheme: str = "sqs+http") -> str:
        """Return the address of the tap with another key, or another query."""
        name, secret = key or self.moto.me
        return f"{scheme}://{quote(name, safe='')}:{quote(secret, safe='')}@127.0.0.1:{self.tap.port}/?{query}"

    def trigger(self, **kwargs: Any) -> SqsTrigger:
        """Return a trigger for the queue."""
        given: dict[str, Any] = {
            "queue": self.queue,
            "visibility_s": VISIBILITY_S,
            "message_bytes_max": SHORT_LIMIT_BYTES,
            **kwargs,
        }
        return SqsTrigger(CONNECTION, **given)

    def create(self) -> None:
        """Make the queue, and the one that it moves messages to."""
        self._url = self.make_queue("orders", receipts=RECEIPTS_MAX)
        self._published.clear()

    def make_queue(self, name: str, *, receipts: int | None = None, **attributes: str) -> str:
        """Make a queue, with a redrive policy if ``receipts`` are given; return its URL."""
        if receipts is not None:
            self.make_queue("dropped")
            place = f"arn:aws:sqs:{REGION}:123456789012:{self.name_of('dropped')}"
            attributes["RedrivePolicy"] = json.dumps({"deadLetterTargetArn": place, "maxReceiveCount": receipts})
        if self._fifo:
            attributes["FifoQueue"] = "true"
        return str(self.sqs.create_queue(QueueName=self.name_of(name), Attributes=attributes)["QueueUrl"])

    def delete(self) -> None:
        """Delete the queue."""
        self.sqs.delete_queue(QueueUrl=self._url)

    def publish(self, messages: Sequence[str]) -> None:
        """Publish a message for each name."""
        self.publish_bodies([(message, message) for message in messages])

    def publish_bodies(self, bodies: Sequence[tuple[str, str]], **more: Any) -> None:
        """Publish names and bodies."""
        for first in range(0, len(bodies), BATCH):
            entries = []
            for number, (name, body) in enumerate(bodies[first : first + BATCH]):
                self._published[name] = None
                entry = {"Id": str(number), "MessageBody": body, **more}
                if self._fifo:
                    group = f"group-{int(name[-6:]) % GROUPS}"
                    entry |= {"MessageGroupId": group, "MessageDeduplicationId": name}
                entries.append(entry)
            answer = self.sqs.send_message_batch(QueueUrl=self._url, Entries=entries)
            if failed := answer.get("Failed"):
                raise RuntimeError(f"SQS has refused a message: {failed}")

    def pending(self) -> list[str]:
        """Return what was published, and whose deletion has not passed the tap."""
        deleted = set(self.tap.acknowledged)
        found = [name for name in self._published if name not in deleted]
        return found or ["a message that was deleted, and is there again"] * self.count()

    def count(self, *names: str) -> int:
        """Return how many messages the queue has; with names, only those in these attributes."""
        names = names or ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
        answer = self.sqs.get_queue_attributes(QueueUrl=self._url, AttributeNames=list(names))
        return sum(map(int, answer["Attributes"].values()))

    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to publish messages that no filter may get; SQS itself takes neither empty ones nor bad UTF-8."""
        long = "message-900000" + "x" * SHORT_LIMIT_BYTES
        return {"too long": partial(self.publish_bodies, [("message-900000", long)])}

    def with_place(self) -> Mapping[str, Any]:
        """Return the name of a queue for rejected messages."""
        self.make_queue("rejected")
        return {"dead_letter": self.rejected}

    def in_place(self) -> list[str]:
        """Return the messages in it."""
        url = self.sqs.get_queue_url(QueueName=self.rejected)["QueueUrl"]
        found: list[str] = []
        while messages := self.sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages"):
            found += [message["Body"] for message in messages]
            if self._fifo:  # the next ones of the group come when these are gone
                for message in messages:
                    self.sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return found

    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes; one of them needs a queue, which is made here."""
        self.make_queue("hasty", receipts=3)
        me, wrong = self.moto.me, Key(self.moto.me.name, "another-secret-22-another-secret-22-anot")
        no_key = f"sqs+http://127.0.0.1:{self.tap.port}/?region={REGION}"
        half = f"sqs+http://{me.name}@127.0.0.1:{self.tap.port}/?region={REGION}"
        tls = self.uri_of(query=f"region={REGION}&ssl_ca_certs=/nowhere", scheme="sqs")
        return {
            "wrong secret": Refusal(self.uri_of(wrong), {}, "AWS refuses access", wrong.secret),
            "no such key": Refusal(self.uri_of(Key("AKIANOBODY", wrong.secret)), {}, "refuses access", wrong.secret),
            "no permission": Refusal(self.uri_of(self.moto.reads), {}, "DeleteMessage", self.moto.reads.secret),
            "half a key": Refusal(half, {}, "must have an access key and its secret", me.secret),
            "no such queue": Refusal(None, {"queue": self.name_of("nothing")}, "does not exist", me.secret),
            "no such place": Refusal(None, {"dead_letter": self.name_of("nothing")}, "dead_letter", me.secret),
            "few receipts": Refusal(None, {"queue": self.name_of("hasty")}, "after 3 receipts", me.secret),
            "no region": Refusal(self.uri_of(query=""), {}, "no region is known", me.secret),
            "a region that is none": Refusal(self.uri_of(query="region=a%2Fb"), {}, "region", me.secret),
            "no profile": Refusal(f"{no_key}&profile=nobody", {}, "nobody", me.secret),
            "a profile, too": Refusal(f"{self.uri}&profile=me", {}, "access key and a profile", me.secret),
            "a token of no key": Refusal(f"{no_key}&session_token=hunter22", {}, "session_token", "hunter22"),
            "another scheme": Refusal(self.uri.replace("sqs+http:", "kafka:"), {}, "must begin with sqs", me.secret),
            "an unknown option": Refusal(f"{self.uri}&retries=5", {}, "the option 'retries'", me.secret),
            "an option of TLS": Refusal(f"{self.uri}&ssl_ca_certs=/a", {}, "options of TLS", me.secret),
            "no file": Refusal(tls, {}, "ssl_ca_certs /nowhere cannot be read", me.secret),
            "a queue as path": Refusal(self.uri.replace("/?", "/orders?"), {}, "must have no path", me.secret),
        }

    def close(self) -> None:
        """Delete all queues of the test; the server goes on, unless it is the station's."""
        self.tap.close()
        if self._owns_server:
            self.moto.close()
            return
        for url in self.sqs.list_queues(QueueNamePrefix=self._prefix).get("QueueUrls", ()):
            self.sqs.delete_queue(QueueUrl=url)
        self.sqs.close()
