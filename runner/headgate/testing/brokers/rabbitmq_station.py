"""A private RabbitMQ node for conformance tests, and a queue of any server as a crash test sees it.

AMQP tells nobody what a consumer has and has not acknowledged. So what is pending is what was published, without those
whose acknowledgement has passed the tap.
"""

from __future__ import annotations

import os
import pwd
import secrets
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pika
from pika.exceptions import AMQPError

from headgate.brokers.rabbitmq import RabbitTrigger
from headgate.testing.brokers.reading import NAME
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, Refusal, ServerProcess, Station, free_port
from headgate.testing.brokers.tap import AckParser, Tap

SERVERS = ("/usr/lib/rabbitmq/bin/rabbitmq-server", "/opt/rabbitmq/sbin/rabbitmq-server")
OWNER = "rabbitmq"  # the user of the system under whom a node runs, if the tests run as root
SHORT_LIMIT_BYTES = 2_000  # `message_bytes_max` of the station's triggers
_FRAME = struct.Struct(">BHI")  # type, channel, bytes of the payload; behind it one byte more
_METHOD, _HEADER, _BODY = 1, 2, 3
_DELIVER, _ACK = b"\x00\x3c\x00\x3c", b"\x00\x3c\x00\x50"


def find_server() -> str | None:
    """Return the path of the script that starts a node as its caller; None if this machine has none."""
    return next((path for path in SERVERS if os.access(path, os.X_OK)), None)


class RabbitAckParser(AckParser):
    """Finds `basic.ack`, and tells by what the server has delivered which messages these were."""

    def __init__(self) -> None:
        self._sent, self._got = b"", b""
        self._has_header = False
        self._lock = threading.Lock()
        self._delivered: dict[tuple[int, int], str] = {}  # by channel and tag, until it is acknowledged
        self._tag: dict[int, int] = {}  # of the delivery whose content a channel gets next

    def feed(self, data: bytes) -> list[str]:
        """Return the names of the messages of the acknowledgements that are complete with these bytes."""
        self._sent += data
        if not self._has_header:
            if len(self._sent) < 8:
                return []
            self._sent, self._has_header = self._sent[8:], True
        found: list[str] = []
        frames, self._sent = _frames(self._sent)
        for kind, channel, payload in frames:
            if kind == _METHOD and payload.startswith(_ACK):
                tag, is_multiple = struct.unpack(">QB", payload[4:13])
                with self._lock:
                    tags = [each for each in self._delivered if each[0] == channel]
                    tags = [each for each in tags if each[1] == tag or (is_multiple and each[1] < tag)]
                    found += [self._delivered.pop(each) for each in tags]
        return found

    def feed_answer(self, data: bytes) -> None:
        """Note which message each delivery has."""
        frames, self._got = _frames(self._got + data)
        with self._lock:
            for kind, channel, payload in frames:
                if kind == _METHOD and payload.startswith(_DELIVER):
                    at = 5 + payload[4]  # behind the name of the consumer
                    self._tag[channel] = struct.unpack(">Q", payload[at : at + 8])[0]
                    self._delivered[channel, self._tag[channel]] = f"tag {self._tag[channel]}"
                elif kind in (_HEADER, _BODY) and channel in self._tag:
                    if (name := NAME.search(payload.decode("latin-1"))) is not None:
                        self._delivered[channel, self._tag[channel]] = name.group()


def _frames(data: bytes) -> tuple[list[tuple[int, int, bytes]], bytes]:
    """Return the frames that are complete, and the rest."""
    frames, at = [], 0
    while at + _FRAME.size <= len(data):
        kind, channel, size = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + size + 1
        if end > len(data):
            break
        frames.append((kind, channel, data[at + _FRAME.size : end - 1]))
        at = end
    return frames, data[at:]


class RabbitNode(ServerProcess):
    """A node beside that of the system, in a folder of its own. It takes seconds to start."""

    def __init__(self, folder: Path, server_path: str) -> None:
        self.port, distribution_port = free_port(), free_port()
        for name in ("log", "conf"):
            (folder / name).mkdir(parents=True)
        (folder / "plugins").write_text("[].")
        (folder / "advanced.config").write_text("[].")
        self._folder = folder
        self._settings = f"listeners.tcp.1 = 127.0.0.1:{self.port}\nlog.console = false\n"
        (folder / "rabbitmq.conf").write_text(self._settings)
        (folder / ".erlang.cookie").write_text(secrets.token_hex(20))
        (folder / ".erlang.cookie").chmod(0o400)
        environment = {
            "HOME": folder,
            "RABBITMQ_NODENAME": f"headgate{self.port}@localhost",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": distribution_port,
            "RABBITMQ_MNESIA_BASE": folder / "mnesia",
            "RABBITMQ_LOG_BASE": folder / "log",
            "RABBITMQ_PID_FILE": folder / "pid",
            "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "plugins",
            "RABBITMQ_CONFIG_FILE": folder / "rabbitmq",
            "RABBITMQ_GENERATED_CONFIG_DIR": folder / "conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": folder / "advanced.config",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        command = ["env", *(f"{name}={value}" for name, value in environment.items())]
        if os.geteuid() == 0:
            owner = pwd.getpwnam(OWNER)
            for path in (folder, *folder.rglob("*")):
                os.chown(path, owner.pw_uid, owner.pw_gid)
            command += ["setpriv", "--reuid", OWNER, "--regid", OWNER, "--clear-groups"]
        super().__init__(
            [*command, server_path], port=self.port, log_path=folder / "log" / "output", is_ready=self._takes_clients
        )

    def listen_tls(self, certificate: Path, key: Path, clients: Path) -> int:
        """Restart it with a listener of TLS that asks for a certificate of the file ``clients``; return its port."""
        port = free_port()
        files = {"certfile": certificate, "keyfile": key, "cacertfile": clients}
        lines = [f"listeners.ssl.1 = 127.0.0.1:{port}", "ssl_options.verify = verify_peer"]
        lines.append("ssl_options.fail_if_no_peer_cert = true")
        for option, path in files.items():
            copy = self._folder / path.name
            copy.write_bytes(path.read_bytes())
            copy.chmod(0o644)  # the node runs as another user
            lines.append(f"ssl_options.{option} = {copy}")
        self.stop()
        (self._folder / "rabbitmq.conf").write_text(self._settings + "\n".join(lines) + "\n")
        self.start()
        return port

    def _takes_clients(self) -> bool:
        try:
            pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port)).close()
        except (AMQPError, OSError):
            return False
        return True


class RabbitQueue:
    """A queue, published to over a connection that is made anew when it is lost."""

    def __init__(self, parameters: pika.ConnectionParameters, queue: str, *, is_quorum: bool) -> None:
        self._parameters = parameters
        self._queue = queue
        self._arguments = {"x-queue-type": "quorum" if is_quorum else "classic"}
        self._connection: pika.BlockingConnection | None = None

    def ask(self, what: Callable[[Any], Any]) -> Any:
        """Return what a call with a channel returns; it is repeated over trouble, as a careful publisher does."""
        failure: Exception | None = None
        deadline = time.monotonic() + WITHIN_S
        while failure is None or time.monotonic() < deadline:
            try:
                if self._connection is None or not self._connection.is_open:
                    self._connection = pika.BlockingConnection(self._parameters)
                channel = self._connection.channel()
                result = what(channel)
                channel.close()
                return result
            except (AMQPError, OSError) as error:
                failure, self._connection = error, None
                threading.Event().wait(0.1)
        raise AssertionError("the broker does not answer") from failure

    def create(self) -> None:
        """Make the queue, and its dead-letter exchange."""
        arguments = self._arguments | {"x-dead-letter-exchange": f"{self._queue}-dropped"}
        self.ask(lambda channel: channel.exchange_declare(f"{self._queue}-dropped", "fanout", durable=True))
        self.ask(lambda channel: channel.queue_declare(self._queue, durable=True, arguments=arguments))

    def delete(self) -> None:
        """Delete both."""
        self.ask(lambda channel: channel.queue_delete(self._queue))
        self.ask(lambda channel: channel.exchange_delete(f"{self._queue}-dropped"))

    def publish(self, messages: Sequence[tuple[str | None, bytes]]) -> None:
        """Publish message ids and bodies, and have the broker confirm each."""

        def run(channel: Any) -> None:
            channel.confirm_delivery()
            for message_id, body in messages:
                properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
                channel.basic_publish("", self._queue, body, properties, mandatory=True)

        self.ask(run)

    def ready(self) -> int:
        """Return the number of messages that no consumer has."""
        answer = self.ask(lambda channel: channel.queue_declare(self._queue, passive=True))
        return int(answer.method.message_count)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None and self._connection.is_open:
            self._connection.close()


class RabbitStation(Station):
    """A queue behind a tap, on a node of the tests' own or on a server that others use, too."""

    keeps_order = False

    def __init__(
        self,
        node: RabbitNode | None = None,
        *,
        address: tuple[str, int] = ("127.0.0.1", 5672),
        login: str = "guest",
        password: str = "guest",
        is_quorum: bool = True,
    ) -> None:
        self.server = node
        if node is not None:
            address = ("127.0.0.1", node.port)
        self._login, self._password = login, password
        self.queue = f"headgate-{secrets.token_hex(6)}"
        self.rejected = f"{self.queue}-rejected"
        self.parameters = pika.ConnectionParameters(*address, credentials=pika.PlainCredentials(login, password))
        self._source = RabbitQueue(self.parameters, self.queue, is_quorum=is_quorum)
        self._published: dict[str, None] = {}
        self.tap = Tap(address, RabbitAckParser)

    @property
    def uri(self) -> str:
        """The address of the tap."""
        return self._uri()

    def _uri(self, login: str | None = None, password: str | None = None, vhost: str = "") -> str:
        user = f"{quote(login or self._login)}:{quote(password or self._password)}"
        return f"amqp://{user}@127.0.0.1:{self.tap.port}{vhost}"

    def trigger(self, **kwargs: Any) -> RabbitTrigger:
        """Return a trigger for the queue."""
        given: dict[str, Any] = {"queue": self.queue, "message_bytes_max": SHORT_LIMIT_BYTES, **kwargs}
        return RabbitTrigger(CONNECTION, **given)

    def create(self) -> None:
        """Make the queue, empty."""
        self._source.create()
        self._published.clear()

    def delete(self) -> None:
        """Delete the queue."""
        self._source.delete()

    def publish(self, messages: Sequence[str]) -> None:
        """Publish a message for each name; the name is its id, too."""
        self._publish([(message, message.encode()) for message in messages])

    def _publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        self._published |= dict.fromkeys(name for name, _ in messages)
        self._source.publish(messages)

    def pending(self) -> list[str]:
        """Return what was published, and whose acknowledgement has not passed the tap."""
        acknowledged = set(self.tap.acknowledged)
        found = [name for name in self._published if name not in acknowledged]
        return found or ["a message that was acknowledged, and is ready again"] * self._source.ready()

    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to publish messages that no filter may get."""
        bodies = {"too long": b"x" * (SHORT_LIMIT_BYTES + 1), "not UTF-8": b"\xff\xfe"}
        given = {what: (f"message-{number:06d}", body) for number, (what, body) in enumerate(bodies.items(), 900_000)}
        return {what: partial(self._publish, [each]) for what, each in given.items()}

    def with_place(self) -> Mapping[str, Any]:
        """Return the name of a queue for rejected messages."""
        self._source.ask(lambda channel: channel.queue_declare(self.rejected, durable=True))
        return {"dead_letter": self.rejected}

    def in_place(self) -> list[str]:
        """Return the messages in it."""

        def run(channel: Any) -> list[str]:
            found: list[str] = []
            while (got := channel.basic_get(self.rejected, auto_ack=True))[0] is not None:
                found.append(got[2].decode())
            return found

        return list(self._source.ask(run))

    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes; some of them need queues, which are deleted with their connection."""
        queues: dict[str, dict[str, Any]] = {
            "plain": {},
            "expiring": {"x-expires": 600_000},
            "forgetful": {"x-message-ttl": 600_000},
            "elsewhere": {"x-dead-letter-exchange": "amq.fanout"},
            "nowhere": {"x-dead-letter-exchange": "not-there"},
        }
        for name, arguments in queues.items():
            self._declare(f"{self.queue}-{name}", durable=True, arguments=arguments)
        self._declare(f"{self.queue}-transient", durable=False)
        wrong = "another-password-22"

        def of(name: str, says: str, **kwargs: Any) -> Refusal:
            return Refusal(None, {"queue": f"{self.queue}-{name}", **kwargs}, says)

        return {
            "wrong password": Refusal(self._uri(password=wrong), {}, "refuses access", wrong),
            "no such user": Refusal(self._uri(login="nobody"), {}, "refuses access"),
            "no such virtual host": Refusal(self._uri(vhost="/nowhere"), {}, "vhost nowhere not found"),
            "no such queue": Refusal(None, {"queue": "nothing"}, "it does not exist"),
            "no such place": Refusal(None, {"dead_letter": "nothing"}, "dead_letter nothing: it does not exist"),
            "no such exchange": Refusal(None, {"dead_letter_exchange": "nothing"}, "it does not exist"),
            "another exchange": of("elsewhere", "is amq.fanout, not amq.topic", dead_letter_exchange="amq.topic"),
            "a dead-letter exchange that is not there": of("nowhere", "dead-letter exchange not-there does not exist"),
            "no dead-letter exchange": of("plain", "no dead-letter exchange is known"),
            "a queue that expires": of("expiring", "x-expires"),
            "messages that expire": of("forgetful", "x-message-ttl"),
            "not durable": of("transient", "it is not durable"),
            "another scheme": Refusal(self.uri.replace("amqp:", "kafka:"), {}, "must begin with amqp://"),
            "an unknown option": Refusal(self.uri + "?retries=5", {}, "the option 'retries'"),
            "an option of TLS": Refusal(self.uri + "?ssl_check_hostname=true", {}, "options of TLS"),
            "a certificate that is not given": Refusal(self.uri + "?auth=external", {}, "ssl_certfile"),
        }

    def _declare(self, queue: str, **properties: Any) -> None:
        self._source.ask(lambda channel: channel.queue_declare(queue, **properties))

    def close(self) -> None:
        """Delete all queues of the test; a node goes on."""
        self.tap.close()
        names = ("", "-rejected", "-plain", "-expiring", "-forgetful", "-elsewhere", "-transient")

        def run(channel: Any) -> None:
            for name in names:
                channel.queue_delete(f"{self.queue}{name}")
            channel.exchange_delete(f"{self.queue}-dropped")

        self._source.ask(run)
        self._source.close()
