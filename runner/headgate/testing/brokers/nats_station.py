"""A private NATS server with JetStream for conformance tests."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import nats
from nats.errors import Error as NatsError

from headgate.brokers.nats import JetStreamTrigger
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, Refusal, ServerProcess, Station, free_port
from headgate.testing.brokers.tap import AckParser, Tap

PASSWORD = "hunter22-of-the-station"
SHORT_LIMIT_BYTES = 2_000  # `message_bytes_max` of the station's triggers
ACK_WAIT_S = 2.0
NS = 1_000_000_000


def find_server() -> str | None:
    """Return the path of a server; None if this machine has none."""
    return shutil.which("nats-server")


class NatsAckParser(AckParser):
    """Finds ``+ACK`` in what a client sends: the name is the sequence number in its subject."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the sequence numbers of the acknowledgements that are complete with these bytes."""
        self._rest += data
        found: list[str] = []
        while (end := self._rest.find(b"\r\n")) >= 0:
            words = self._rest[:end].split()
            size = int(words[-1]) + 2 if words and words[0].upper() in (b"PUB", b"HPUB") else 0
            if len(self._rest) < end + 2 + size:
                break
            payload = self._rest[end + 2 : end + 2 + size]
            if size and payload.startswith(b"+ACK"):
                parts = words[1].decode().split(".")
                found.append(f"sequence {parts[5 if len(parts) == 9 else 7]}")
            self._rest = self._rest[end + 2 + size :]
        return found


class NatsStation(Station):
    """A server with a password, one stream and one durable pull consumer. ``server_path``: `find_server`."""

    stream, durable, subject, rejected = "orders", "accounting", "orders.new", "rejected"
    keeps_order = False
    lease_s = ACK_WAIT_S

    def __init__(self, folder: Path, server_path: str) -> None:
        self._port = free_port()
        users = [f"{{user: me, password: {PASSWORD}}}"]
        users.append(f'{{user: reads, password: {PASSWORD}, permissions: {{publish: {{deny: ["$JS.API.>"]}}}}}}')
        (folder / "nats.conf").write_text(
            f"listen: 127.0.0.1:{self._port}\njetstream {{ store_dir: {json.dumps(str(folder / 'js'))} }}\n"
            f"authorization {{ users: [ {', '.join(users)} ] }}\n"
        )
        command = [server_path, "-c", str(folder / "nats.conf")]
        self.server = ServerProcess(command, port=self._port, log_path=folder / "nats.log", is_ready=self._is_ready)
        self.server.start()
        self.tap = Tap(("127.0.0.1", self._port), NatsAckParser)

    # --- our own client: one connection a call, so that none is left when the server is killed -------------

    def _call(self, what: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        async def run() -> Any:
            async def ignore(_: Exception) -> None: ...

            server = f"nats://me:{PASSWORD}@127.0.0.1:{self._port}"
            client = await nats.connect(server, allow_reconnect=False, connect_timeout=WITHIN_S, error_cb=ignore)
            try:
                return await what(client)
            finally:
                await client.close()

        return asyncio.run(run())

    def ask(self, subject: str, question: object = None) -> dict[str, Any]:
        """Return the answer of JetStream's API; an error raises RuntimeError."""
        payload = b"" if question is None else json.dumps(question).encode()

        async def run(client: Any) -> Any:
            return json.loads((await client.request(f"$JS.API.{subject}", payload, timeout=WITHIN_S)).data)

        answer: dict[str, Any] = self._call(run)
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer

    def _is_ready(self) -> bool:
        try:
            self.ask("INFO")
        except (TimeoutError, NatsError, OSError, RuntimeError):
            return False
        return True

    @property
    def uri(self) -> str:
        """The address of the tap."""
        return self._uri()

    def _uri(self, user: str = "me", password: str = PASSWORD) -> str:
        return f"nats://{user}:{password}@127.0.0.1:{self.tap.port}"

    def trigger(self, **kwargs: Any) -> JetStreamTrigger:
        """Return a trigger for the consumer."""
        given: dict[str, Any] = {
            "stream": self.stream,
            "durable": self.durable,
            "message_bytes_max": SHORT_LIMIT_BYTES,
            **kwargs,
        }
        return JetStreamTrigger(CONNECTION, **given)

    def create(self) -> None:
        """Make stream and consumer."""
        self.create_stream(self.stream, f"{self.stream}.>")
        self.create_consumer(self.durable)

    def create_stream(self, name: str, subject: str, **config: Any) -> None:
        """Make a stream."""
        given = {"name": name, "subjects": [subject], "retention": "limits", "storage": "file", **config}
        self.ask(f"STREAM.CREATE.{name}", given)

    def create_consumer(self, name: str, stream: str = "", **config: Any) -> None:
        """Make a durable consumer."""
        given = {
            "durable_name": name,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(ACK_WAIT_S * NS),
            "max_ack_pending": 10_000,
            "replay_policy": "instant",
            **config,
        }
        stream = stream or self.stream
        self.ask(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": given})

    def delete(self) -> None:
        """Delete the stream."""
        self.ask(f"STREAM.DELETE.{self.stream}")

    def publish(self, messages: Sequence[str]) -> None:
        """Publish a message for each name."""
        self._publish([message.encode() for message in messages])

    def _publish(self, bodies: Sequence[bytes]) -> None:
        async def run(client: Any) -> None:
            for body in bodies:
                answer = json.loads((await client.request(self.subject, body, timeout=WITHIN_S)).data)
                assert "seq" in answer, answer

        self._call(run)

    def publish_raw(self, command: bytes) -> None:
        """Send a command as it is: what no client publishes, and the server takes all the same."""
        login = json.dumps({"user": "me", "pass": PASSWORD, "verbose": False, "headers": True})
        with socket.create_connection(("127.0.0.1", self._port), WITHIN_S) as link, link.makefile("rb") as answers:
            link.sendall(f"CONNECT {login}\r\n".encode() + command + b"PING\r\n")
            while not (line := answers.readline()).startswith(b"PONG"):
                assert line.startswith(b"INFO"), line

    def pending(self) -> list[str]:
        """Return all messages that the consumer has not acknowledged."""
        info = self.ask(f"CONSUMER.INFO.{self.stream}.{self.durable}")
        count = info["num_pending"] + info["num_ack_pending"]
        if count == 0:
            return []
        last = self.ask(f"STREAM.INFO.{self.stream}")["state"]["last_seq"]
        floor = info["ack_floor"]["stream_seq"]
        acknowledged = {int(name.split()[1]) for name in self.tap.acknowledged}

        async def run(client: Any) -> list[str]:
            found = []
            for sequence in range(floor + 1, last + 1):
                if sequence in acknowledged:
                    continue
                question = json.dumps({"seq": sequence}).encode()
                answer = json.loads((await client.request(f"$JS.API.STREAM.MSG.GET.{self.stream}", question)).data)
                if "message" in answer:
                    found.append(base64.b64decode(answer["message"].get("data", "")).decode("latin-1"))
            return found

        return list(self._call(run)) or ["a message whose acknowledgement the server does not know"] * count

    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to publish messages that no filter may get."""
        return {
            "too long": partial(self._publish, [b"x" * (SHORT_LIMIT_BYTES + 1)]),
            "not UTF-8": partial(self._publish, [b"\xff\xfe"]),
        }

    def with_place(self) -> Mapping[str, Any]:
        """Return the subject of a stream for rejected messages."""
        self.create_stream("rejected", self.rejected)
        return {"dead_letter": self.rejected}

    def in_place(self) -> list[str]:
        """Return the messages in it."""
        last = self.ask("STREAM.INFO.rejected")["state"]["last_seq"]
        answers = [self.ask("STREAM.MSG.GET.rejected", {"seq": number}) for number in range(1, last + 1)]
        return [base64.b64decode(answer["message"]["data"]).decode() for answer in answers]

    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes; some of them need consumers and streams, which are made here."""
        self.create_consumer("gives-up", max_deliver=3)
        self.create_consumer("leaves", inactive_threshold=600 * NS)
        self.create_consumer("pushes", deliver_subject="elsewhere")
        self.create_consumer("hasty", ack_policy="none")
        self.create_consumer("bodiless", headers_only=True)
        self.create_stream("volatile", "volatile", storage="memory")
        self.create_consumer("reader", "volatile")
        wrong = "another-password-22"
        return {
            "wrong password": Refusal(self._uri(password=wrong), {}, "refuses access", wrong),
            "no such user": Refusal(self._uri(user="nobody"), {}, "refuses access", PASSWORD),
            "no password": Refusal(f"nats://127.0.0.1:{self.tap.port}", {}, "refuses access"),
            "may not ask": Refusal(self._uri(user="reads"), {}, "refuses access", PASSWORD),
            "no such stream": Refusal(None, {"stream": "nothing"}, "it does not exist"),
            "no such consumer": Refusal(None, {"durable": "nobody"}, "it does not exist"),
            "max_deliver": Refusal(None, {"durable": "gives-up"}, "gives up a message after 3 deliveries"),
            "inactive_threshold": Refusal(None, {"durable": "leaves"}, "is deleted when nobody reads it for 600 s"),
            "a push consumer": Refusal(None, {"durable": "pushes"}, "must be a pull consumer"),
            "no acknowledgements": Refusal(None, {"durable": "hasty"}, "before they are stored"),
            "no bodies": Refusal(None, {"durable": "bodiless"}, "headers only"),
            "in memory": Refusal(None, {"stream": "volatile", "durable": "reader"}, "the stream is in memory"),
            "no place": Refusal(None, {"dead_letter": "nowhere"}, "no stream keeps the subject nowhere"),
            "itself as place": Refusal(None, {"dead_letter": self.subject}, "kept by the stream that is read"),
            "another scheme": Refusal(self.uri.replace("nats:", "kafka:"), {}, "must begin with nats://", PASSWORD),
            "an unknown option": Refusal(self.uri + "?retries=5", {}, "the option 'retries'", PASSWORD),
            "an option of TLS": Refusal(self.uri + "?ssl_check_hostname=true", {}, "options of TLS", PASSWORD),
            "no file": Refusal(self.uri + "?creds=/nowhere", {}, "creds /nowhere cannot be read", PASSWORD),
        }
