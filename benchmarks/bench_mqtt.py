"""From the messages of an MQTT session to their acknowledgement: how many events a second a pair stores.

The server is a Mosquitto of the benchmark's own, because one with its usual settings keeps 1,000 messages of a session.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from benchmarks.bare_brokers import BareMessage, BareSource, bench_of
from benchmarks.harness import BenchFailed, main
from headgate.brokers.clients.mqtt_client import MqttClient
from headgate.brokers.threaded import IN_FLIGHT_BYTES_MAX
from headgate.testing.brokers.mqtt_station import MqttServer, MqttUser, find_server
from headgate.triggers.named_values import Connection

TOPIC, CLIENT_ID, LAST = "bench/orders", "bench", b"the last one"
EXPIRY_S = 86_400
RECEIVE_MAX = 1_000  # as that of the trigger
WAIT_S = 5.0


def mosquitto_is_there() -> bool:
    """Whether a server can be started."""
    return find_server() is not None


class BareSession(BareSource):
    """A session, with the receive maximum of the trigger."""

    classpath = "headgate.brokers.mqtt.MqttTrigger"

    def __init__(self, port: int) -> None:
        self.uri = f"mqtt://127.0.0.1:{port}"
        self.kwargs = {"topic": TOPIC, "client_id": CLIENT_ID}
        self._port = port
        self._client: MqttClient | None = None

    def _connected(self) -> MqttClient:
        if self._client is None:
            connection = Connection.from_uri("bench", self.uri)
            self._client = MqttClient(
                connection,
                "bench",
                client_id=CLIENT_ID,
                session_expiry_s=EXPIRY_S,
                receive_max=RECEIVE_MAX,
                bytes_max=IN_FLIGHT_BYTES_MAX,
            )
        return self._client

    def read(self, count: int) -> list[BareMessage]:
        """Connect at the first call, and read."""
        client = self._connected()
        while not client.arrived:
            client.wait(WAIT_S)
        found = []
        for _ in range(min(count, len(client.arrived))):
            message = client.next_arrived()
            name = dict(vars(message.properties)["UserProperty"])["message_id"]
            payload = {
                "body": bytes(message.payload).decode(),
                "topic": message.topic,
                "qos": 1,
                "retain": False,
                "properties": {"message_id": name},
            }
            found.append(BareMessage(message.mid, name, payload))
        return found

    def acknowledge(self, messages: Sequence[BareMessage]) -> None:
        """Acknowledge each."""
        for message in messages:
            self._connected().acknowledge(message.handle)

    def unacknowledged(self) -> int:
        """Return the messages that the session has before one that is published now."""
        with MqttUser(self._port) as user:
            user.publish(TOPIC, [("last", LAST)])
        client, found = self._connected(), 0
        while True:
            client.wait(WAIT_S)
            while client.arrived:
                if client.next_arrived().payload == LAST:
                    return found
                found += 1

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()


@contextlib.contextmanager
def filled(messages: int) -> Generator[BareSource]:
    """Yield a session with so many messages."""
    if (path := find_server()) is None:
        raise BenchFailed("this machine has no mosquitto and mosquitto_passwd")
    with tempfile.TemporaryDirectory(prefix="headgate-mqtt-") as folder:
        server = MqttServer(Path(folder), path, saves_changes=False)
        try:
            server.start()
            with MqttUser(server.port, CLIENT_ID, is_clean=False) as user:
                user.subscribe(TOPIC)
            body = b'{"order": %d, "amount": "1800", "customer": "a customer\'s name"}'
            with MqttUser(server.port) as user:
                user.publish(TOPIC, [(str(number), body % number) for number in range(messages)])
            with contextlib.closing(BareSession(server.port)) as source:
                yield source
        finally:
            server.close()


BENCH = bench_of("mqtt", "from the messages of an MQTT session to their acknowledgement", filled)

if __name__ == "__main__":
    sys.exit(main(BENCH))
