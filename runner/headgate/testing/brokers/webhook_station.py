"""A sender of webhooks for conformance tests: it posts each message again until it is answered with 2xx."""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from headgate.brokers.webhooks import WebhookTrigger
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, Refusal, Station, free_port, wait_until
from headgate.testing.brokers.tap import AckParser, Tap

SECRET = b"a secret of the station, 32 byte"
SECRET_TEXT = "whsec_" + base64.b64encode(SECRET).decode()
SENDERS = 72  # requests at the same moment, more than a test holds back
SHORT_LIMIT_BYTES = 2_000  # `message_bytes_max` of the station's triggers
AGAIN_S = 0.05


class Message(NamedTuple):
    """What is posted."""

    name: str
    body: bytes


class NoParser(AckParser):
    """Finds nothing: the sender itself knows what is acknowledged."""

    def feed(self, data: bytes) -> list[str]:
        """Return nothing."""
        return []


def signed(name: str, body: bytes, *, at: float | None = None, secret: bytes = SECRET) -> dict[str, str]:
    """Return the headers of Standard Webhooks."""
    seconds = str(int(time.time() if at is None else at))
    signature = hmac.digest(secret, f"{name}.{seconds}.".encode() + body, "sha256")
    return {
        "webhook-id": name,
        "webhook-timestamp": seconds,
        "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
    }


class WebhookStation(Station):
    """A sender whose address is a tap before the listener of the trigger."""

    path = "/orders"
    keeps_order = False
    can_be_deleted = False

    def __init__(self) -> None:
        self.port = free_port()
        self.tap = Tap(("127.0.0.1", self.port), NoParser)
        self._pending: dict[str, None] = {}
        self._sending: set[str] = set()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._waiting: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: the end
        self._closed = threading.Event()
        self._senders = [
            threading.Thread(target=self._send, name="headgate sender", daemon=True) for _ in range(SENDERS)
        ]
        for each in self._senders:
            each.start()

    @property
    def uri(self) -> str:
        """The address on which the trigger listens, with the secret."""
        return self._uri()

    def _uri(self, scheme: str = "http", secret: str = SECRET_TEXT, at: str = "127.0.0.1", query: str = "") -> str:
        quoted = secret.replace("/", "%2F").replace("+", "%2B")
        return f"{scheme}://:{quoted}@{at}:{self.port}{query}"

    def trigger(self, **kwargs: Any) -> WebhookTrigger:
        """Return a trigger for the path."""
        given: dict[str, Any] = {
            "path": self.path,
            "verify": "standard",
            "body": "text",
            "message_bytes_max": SHORT_LIMIT_BYTES,
            **kwargs,
        }
        return WebhookTrigger(CONNECTION, **given)

    def create(self) -> None:
        """Do nothing: a path is there while it is read."""

    def delete(self) -> None:
        """Post nothing again of what is not acknowledged."""
        with self._lock:
            self._pending.clear()
        wait_until(lambda: not self._sending, "the requests of what is deleted have ended")

    def publish(self, messages: Sequence[str]) -> None:
        """Post a message for each name, in the background; the name is its id."""
        self.post([Message(name, name.encode()) for name in messages])

    def post(self, messages: Sequence[Message]) -> None:
        """Post these in the background."""
        with self._lock:
            self._pending |= dict.fromkeys(message.name for message in messages)
        for message in messages:
            self._waiting.put(message)

    def pending(self) -> list[str]:
        """Return what was not answered with 2xx."""
        with self._lock:
            return list(self._pending)

    def request(self, body: bytes, headers: Mapping[str, str], path: str | None = None, method: str = "POST") -> Any:
        """Return the answer to one request, which has ``status``, ``headers`` and the whole ``text``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.tap.port, timeout=WITHIN_S)
        with contextlib.closing(connection), self._while_open(connection):
            connection.request(method, path or self.path, body, dict(headers))
            answer: Any = connection.getresponse()
            answer.text = answer.read().decode()
            return answer

    @contextlib.contextmanager
    def _while_open(self, connection: http.client.HTTPConnection) -> Generator[None]:
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def _send(self) -> None:
        # Without a time limit, which was seen not to hold on CPython 3.11 if several threads take from one queue.
        while (message := self._waiting.get()) is not None and not self._closed.is_set():
            with self._lock:
                if message.name not in self._pending:
                    continue  # `delete` has come meanwhile
                self._sending.add(message.name)
            status = 0
            with contextlib.suppress(OSError, http.client.HTTPException):
                status = self.request(message.body, signed(message.name, message.body)).status
            with self._lock:
                self._sending.discard(message.name)
                if status // 100 == 2:
                    self._pending.pop(message.name, None)
                    self.tap.acknowledged.append(message.name)
            if status // 100 != 2:
                self._closed.wait(AGAIN_S)
                self._waiting.put(message)

    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to post what no filter may get."""
        return {"not UTF-8": partial(self.post, [Message("message-900000", b"message-900000\xff\xfe")])}

    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes of settings."""
        no_secret = f"http://127.0.0.1:{self.port}"
        short = "whsec_c2hvcnQ="
        return {
            "another scheme": Refusal(self._uri("amqp"), {}, "must begin with http:// or https://", SECRET_TEXT),
            "no secret": Refusal(no_secret, {}, "has no secret to verify by"),
            "no port": Refusal(f"http://:{SECRET_TEXT}@127.0.0.1", {}, "must name one address", SECRET_TEXT),
            "a path": Refusal(self._uri(query="/orders"), {}, "must have no path", SECRET_TEXT),
            "a secret that is none": Refusal(self._uri(secret="hunter22-hunter22"), {}, "must be whsec_", "hunter22"),
            "a short secret": Refusal(self._uri(secret=short), {}, "at least 16 bytes", short),
            "a secret for nothing": Refusal(None, {"verify": "none"}, "verify is none", SECRET_TEXT),
            "an unknown option": Refusal(self._uri(query="/?retries=5"), {}, "the option 'retries'", SECRET_TEXT),
            "an address elsewhere": Refusal(self._uri(at="192.0.2.1"), {}, "one cannot listen on 192.0.2.1"),
            "no certificate": Refusal(self._uri("https"), {}, "needs ssl_certfile", SECRET_TEXT),
            "no file": Refusal(self._uri("https", query="/?ssl_certfile=/no"), {}, "/no cannot be read", SECRET_TEXT),
        }

    def close(self) -> None:
        """End the senders and the tap."""
        self._closed.set()
        super().close()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)  # its sender may wait for an answer
        for _ in self._senders:
            self._waiting.put(None)
        for each in self._senders:
            each.join(WITHIN_S)
