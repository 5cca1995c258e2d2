"""A private Mosquitto for conformance tests.

MQTT tells nobody what a session has and has not acknowledged. So what is pending is what was published, without that
whose acknowledgement has passed the tap.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from headgate.brokers.mqtt import MqttTrigger
from headgate.testing.brokers.reading import NAME
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, Refusal, ServerProcess, Station, free_port
from headgate.testing.brokers.tap import AckParser, Tap

SERVERS = ("/usr/sbin/mosquitto", "/usr/local/sbin/mosquitto")
PASSWORD = "hunter22-of-the-station"
SHORT_LIMIT_BYTES = 2_000  # `message_bytes_max` of the station's triggers
_PUBLISH, _PUBACK = 3, 4


def find_server() -> str | None:
    """Return the path of a server; None if this machine has none, or not its program for passwords."""
    path = shutil.which("mosquitto") or next((each for each in SERVERS if os.access(each, os.X_OK)), None)
    return path if shutil.which("mosquitto_passwd") else None


class MqttAckParser(AckParser):
    """Finds PUBACK, and tells by what the server has published which messages these were."""

    def __init__(self) -> None:
        self._sent, self._got = b"", b""
        self._lock = threading.Lock()
        self._delivered: dict[int, str] = {}  # by packet id, until it is acknowledged

    def feed(self, data: bytes) -> list[str]:
        """Return the names of the messages of the acknowledgements that are complete with these bytes."""
        packets, self._sent = _packets(self._sent + data)
        found = []
        for first, payload in packets:
            if first >> 4 == _PUBACK:
                packet_id = int.from_bytes(payload[:2], "big")
                with self._lock:
                    found.append(self._delivered.pop(packet_id, f"packet {packet_id}"))
        return found

    def feed_answer(self, data: bytes) -> None:
        """Note which message each packet id is of."""
        packets, self._got = _packets(self._got + data)
        for first, payload in packets:
            if first >> 4 == _PUBLISH and first & 0x06:
                at = 2 + int.from_bytes(payload[:2], "big")
                packet_id = int.from_bytes(payload[at : at + 2], "big")
                name = NAME.search(payload[at:].decode("latin-1"))
                with self._lock:
                    self._delivered[packet_id] = f"packet {packet_id}" if name is None else name.group()


def _packets(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Return the packets that are complete, each with its first byte, and the rest."""
    packets: list[tuple[int, bytes]] = []
    at = 0
    while True:
        size, behind = 0, at + 1
        while behind < len(data) and behind - at <= 4:
            size |= (data[behind] & 0x7F) << 7 * (behind - at - 1)
            behind += 1
            if data[behind - 1] < 0x80:
                break
        else:
            return packets, data[at:]
        if behind + size > len(data):
            return packets, data[at:]
        packets.append((data[at], data[behind : behind + size]))
        at = behind + size


class MqttServer(ServerProcess):
    """A Mosquitto that writes what it has into a folder after each change, or at its end only.

    ``lines`` and ``of_listener``: more of its configuration. It takes everybody if ``lines`` say nothing else.
    """

    def __init__(
        self,
        folder: Path,
        server_path: str,
        lines: Sequence[str] = (),
        of_listener: Sequence[str] = (),
        *,
        saves_changes: bool = True,
    ) -> None:
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        configuration = folder / "mosquitto.conf"
        own = [
            "per_listener_settings false",
            "persistence true",
            f"persistence_location {folder}/",
            *(["autosave_on_changes true", "autosave_interval 1"] if saves_changes else []),
            "max_queued_messages 0",
            "log_dest stderr",
            *(["user root"] if os.geteuid() == 0 else []),
        ]
        listener = [f"listener {self.port} 127.0.0.1", *of_listener]
        configuration.write_text("\n".join([*own, *(lines or ["allow_anonymous true"]), *listener]) + "\n")
        super().__init__([server_path, "-c", str(configuration)], port=self.port, log_path=folder / "mosquitto.log")

    def crash(self) -> None:
        """End it in order, and start it again.

        Mosquitto acknowledges what is published before it writes it: what a kill of it loses, no reader could save.
        """
        self.stop()
        self.start()


class MqttUser:
    """A client of the tests: one connection, and a thread of the library's for it. A context manager."""

    def __init__(self, port: int, client_id: str = "", *, login: str = "", is_clean: bool = True) -> None:
        self.client = Client(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTv5)
        if login:
            self.client.username_pw_set(login, PASSWORD)
        asked: Any = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        asked.SessionExpiryInterval = 0 if is_clean else 86_400
        self._connect = partial(self.client.connect, "127.0.0.1", port, clean_start=is_clean, properties=asked)
        self._connected, self._subscribed = threading.Event(), threading.Event()
        self.reason: Any = None
        self.messages: list[MQTTMessage] = []

        def connected(_: Client, __: object, ___: object, reason: Any, ____: object) -> None:
            self.reason = reason
            self._connected.set()

        self.client.on_connect = connected
        self.client.on_subscribe = self._note_subscribed
        self.client.on_message = lambda _, __, message: self.messages.append(message)

    def __enter__(self) -> MqttUser:
        self._connect()
        self.client.loop_start()
        assert self._connected.wait(WITHIN_S)
        assert not self.reason.is_failure, self.reason
        return self

    def __exit__(self, *_: object) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def _note_subscribed(self, *_: object) -> None:
        self._subscribed.set()

    def subscribe(self, topic_filter: str) -> None:
        """Subscribe with quality of service 1, and wait for the answer."""
        self._subscribed.clear()
        self.client.subscribe(topic_filter, qos=1)
        assert self._subscribed.wait(WITHIN_S)

    def publish(
        self,
        topic: str,
        bodies: Sequence[tuple[str | None, bytes]],
        qos: int = 1,
        *,
        retain: bool = False,
        **properties: Any,
    ) -> None:
        """Publish ids and bodies, and have the broker confirm each."""
        sent = []
        for message_id, body in bodies:
            given: Any = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            for name, value in properties.items():
                setattr(given, name, value)
            if message_id is not None:
                given.UserProperty = ("message_id", message_id)
            sent.append(self.client.publish(topic, body, qos=qos, retain=retain, properties=given))
        for each in sent:
            each.wait_for_publish(WITHIN_S)


class MqttStation(Station):
    """A server with a password, and one session that subscribes to one topic. ``server_path``: `find_server`."""

    topic, client_id, rejected = "shop/orders", "accounting", "rejected/orders"
    keeps_order = False
    can_be_deleted = False

    def __init__(self, folder: Path, server_path: str) -> None:
        passwords = folder / "passwords"
        make = ["mosquitto_passwd", "-b", "-c", str(passwords), "me", PASSWORD]
        subprocess.run(make, check=True, capture_output=True)
        if os.geteuid() != 0:
            passwords.chmod(0o600)
        lines = ["allow_anonymous false", f"password_file {passwords}"]
        self.server = server = MqttServer(folder, server_path, lines)
        self._port = server.port
        server.start()
        self._published: dict[str, None] = {}
        self._rejected: MqttUser | None = None
        self.tap = Tap(("127.0.0.1", self._port), MqttAckParser)

    def user(self, client_id: str = "", *, is_clean: bool = True) -> MqttUser:
        """Return a client that does not go through the tap."""
        return MqttUser(self._port, client_id, login="me", is_clean=is_clean)

    @property
    def uri(self) -> str:
        """The address of the tap."""
        return self._uri()

    def _uri(self, user: str = "me", password: str = PASSWORD) -> str:
        return f"mqtt://{user}:{password}@127.0.0.1:{self.tap.port}"

    def trigger(self, **kwargs: Any) -> MqttTrigger:
        """Return a trigger for the session."""
        given: dict[str, Any] = {
            "topic": self.topic,
            "client_id": self.client_id,
            "message_bytes_max": SHORT_LIMIT_BYTES,
            **kwargs,
        }
        return MqttTrigger(CONNECTION, **given)

    def create(self) -> None:
        """Make the session: what is published before there is one goes nowhere."""
        with self.user(self.client_id, is_clean=False) as user:
            user.subscribe(self.topic)
        self._published.clear()

    def delete(self) -> None:
        """End the session."""
        with self.user(self.client_id):
            pass

    def publish(self, messages: Sequence[str]) -> None:
        """Publish a message for each name; the name is its id, too."""
        self.publish_bodies([(message, message.encode()) for message in messages])

    def publish_bodies(self, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Publish names and bodies."""
        self._published |= dict.fromkeys(name for name, _ in bodies)
        with self.user() as user:
            user.publish(self.topic, bodies)
            # The server saves between two rounds of its loop: with an answer of the next one the save is done.
            user.publish("elsewhere", [(None, b"")])

    def pending(self) -> list[str]:
        """Return what was published, and whose acknowledgement has not passed the tap."""
        acknowledged = set(self.tap.acknowledged)
        return [name for name in self._published if name not in acknowledged]

    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to publish messages that no filter may get."""
        bodies = {"too long": b"message-900000" + b"x" * SHORT_LIMIT_BYTES, "not UTF-8": b"message-900001\xff\xfe"}
        return {what: partial(self.publish_bodies, [(body[:14].decode(), body)]) for what, body in bodies.items()}

    def with_place(self) -> Mapping[str, Any]:
        """Return the topic for rejected messages, with somebody who gets them."""
        self._rejected = self.user().__enter__()
        self._rejected.subscribe(self.rejected)
        return {"dead_letter": self.rejected}

    def in_place(self) -> list[str]:
        """Return the messages that were published to it."""
        assert self._rejected is not None
        return [message.payload.decode() for message in self._rejected.messages]

    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes."""
        wrong = "another-password-22"
        uri = f"{self.uri}/?"
        return {
            "wrong password": Refusal(self._uri(password=wrong), {}, "refuses access", wrong),
            "no such user": Refusal(self._uri(user="nobody"), {}, "refuses access", PASSWORD),
            "no password": Refusal(f"mqtt://127.0.0.1:{self.tap.port}", {}, "refuses access"),
            "no such topic": Refusal(None, {"topic": "shop/#/orders"}, "cannot be subscribed"),
            "another scheme": Refusal(self.uri.replace("mqtt:", "kafka:"), {}, "must begin with mqtt://", PASSWORD),
            "an unknown option": Refusal(f"{uri}clean_start=true", {}, "the option 'clean_start'", PASSWORD),
            "an option of TLS": Refusal(f"{uri}ssl_check_hostname=true", {}, "options of TLS", PASSWORD),
            "no number": Refusal(f"{uri}keepalive=soon", {}, "keepalive must be 1..3,600 seconds", PASSWORD),
            "a topic as path": Refusal(f"{self.uri}/shop", {}, "the topic is an argument", PASSWORD),
        }

    def close(self) -> None:
        """End server, clients and tap."""
        if self._rejected is not None:
            self._rejected.__exit__()
        super().close()
