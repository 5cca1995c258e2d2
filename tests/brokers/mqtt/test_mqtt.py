"""MQTT sessions on a private Mosquitto: what messages become, their keys, their order, and what is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from tests.brokers.servers.certificates import NOW, Certify

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.mqtt_client import MqttClient
from headgate.brokers.held import Received
from headgate.brokers.mqtt import TAKEN_OVER_MAX, MqttProducer, MqttTrigger
from headgate.protocol.values import decode_value
from headgate.testing.brokers.mqtt_station import MqttAckParser, MqttServer, MqttStation
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, wait_until
from headgate.triggers.named_values import Connection


def test_a_retained_message_is_the_same_event_when_it_is_published_and_later(station: MqttStation) -> None:
    with Reading(station.trigger(client_id="live"), uri=station.uri, has_restarts=False) as live:

        def has_session() -> bool:
            with station.user() as user:
                user.publish(station.topic, [(None, b"are you there?")])
            return bool(live.payloads())

        wait_until(has_session, "it has subscribed")
        with station.user() as user:
            user.publish(station.topic, [("m1", b"a reading")], retain=True)
        wait_until(lambda: b"a reading" in live.payloads()[-1], "it is stored")
    with Reading(station.trigger(client_id="later"), uri=station.uri, has_restarts=False) as later:
        wait_until(later.payloads, "the retained one has come")
        assert later.payloads() == live.payloads()[-1:]
        assert decode_value(later.payloads()[0])["retain"]


def test_the_raw_event_has_the_body_and_what_the_publisher_has_set(station: MqttStation) -> None:
    given: dict[str, Any] = {
        "ContentType": "application/json",
        "CorrelationData": b"\x01",
        "MessageExpiryInterval": 600,
    }
    users = [("tenant", "eu"), ("tag", "a"), ("tag", "b")]
    with station.user() as user:
        user.publish(station.topic, [(None, '{"name": "Åsa"}'.encode())], qos=2, UserProperty=users, **given)
    with Reading(station.trigger(body="json"), uri=station.uri, has_restarts=False) as read:
        wait_until(read.payloads, "it is stored")
        (payload,) = [decode_value(each) for each in read.payloads()]
    assert payload == {
        "body": {"name": "Åsa"},
        "topic": station.topic,
        "qos": 1,
        "retain": False,
        "properties": {"tenant": "eu", "tag": "a, b"},
        "content_type": "application/json",
        "correlation_data": b"\x01",
    }


def message(payload: bytes = b"{}", topic: str = "orders", mid: int = 1, qos: int = 1, **properties: Any) -> Any:
    given = SimpleNamespace(**properties)
    return SimpleNamespace(mid=mid, qos=qos, topic=topic, payload=payload, retain=False, properties=given)


def received(given: Any, **kwargs: Any) -> Received:
    return MqttProducer(CONNECTION, "#", "accounting", **kwargs)._received(given)


def test_a_key_is_the_name_that_the_publisher_gave_with_topic_and_content() -> None:
    named = [("message_id", "1")]
    keys = [
        received(message(b"a", UserProperty=named)).key,
        received(message(b"b", UserProperty=named)).key,
        received(message(b"a", topic="returns", UserProperty=named)).key,
        received(message(b"a", UserProperty=[("message_id", "2")])).key,
        received(message(b"a", UserProperty=[("message_id", "x" * 1_000)])).key,
        received(message(b"a", topic="t" * 1_000, UserProperty=named)).key,
        received(message(b"a", topic="t" * 1_001, UserProperty=named)).key,
        received(message(b"a", CorrelationData=b"\x01\x02"), key="correlation_data").key,
        received(message(b'{"id": 7}'), key="json:id").key,
        received(message(b"a", UserProperty=[("id", "7")]), key="property:id").key,
        received(message(b"a", topic="a", UserProperty=[("message_id", "b:c")])).key,
        received(message(b"a", topic="a:b", UserProperty=[("message_id", "c")])).key,
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert max(len(key or "") for key in keys) <= 400
    assert received(message()).key is None
    assert received(message(), key="json:id").key is None
    assert received(message(UserProperty=named), key=None).key is None


def test_lanes_are_of_each_message_of_a_topic_or_of_the_subscription() -> None:
    lanes = [received(message(mid=7), lane=lane).lane for lane in ("message", "topic", "subscription")]
    assert lanes == [7, "orders", None]


def test_acknowledgements_are_sent_in_the_order_of_arrival_and_not_for_what_is_left() -> None:
    producer = MqttProducer(CONNECTION, "#", "accounting")
    sent: list[int] = []
    producer._mqtt = SimpleNamespace(acknowledge=sent.append)  # type: ignore[assignment]
    taken = [producer._received(message(mid=mid)) for mid in (5, 3, 9, 1)]
    unnumbered = producer._received(message(mid=0, qos=0))
    producer.acknowledge([taken[2], unnumbered])
    assert sent == []
    producer.acknowledge([taken[0]])
    assert sent == [5]
    producer.leave([taken[1]])
    assert sent == [5, 9]
    producer.acknowledge([taken[3]])
    assert sent == [5, 9, 1]
    assert producer._unacknowledged == {}


def test_messages_without_acknowledgements_are_read_and_warned_of(station: MqttStation) -> None:
    with structlog.testing.capture_logs() as records, Reading(station.trigger(), uri=station.uri) as read:

        def warned() -> int:
            with station.user() as user:  # what is published while nobody is connected goes nowhere
                user.publish(station.topic, [(None, b"a reading")], qos=0)
            return sum("quality of service 0" in each["event"] for each in records)

        wait_until(warned, "it is warned of")
        station.publish(names(1, 20))
        read.wait_stored(names(1, 20))
        wait_until(lambda: not station.pending(), "everything is acknowledged")
        assert warned() == 1, "once"
        assert read.payloads()


def test_a_session_that_the_broker_has_lost_is_reported(station: MqttStation) -> None:
    with structlog.testing.capture_logs() as records, Reading(station.trigger(), uri=station.uri) as read:
        station.publish(names(1))
        read.wait_stored(names(1))
        station.delete()
        wait_until(lambda: [each for each in records if "has lost the session" in each["event"]], "it is reported")
        wait_until(lambda: station.tap.links == 2, "it is connected again")

        def flows() -> bool:  # it subscribes anew as soon as it knows
            station.publish(names(1, 1))
            return bool(read.stored()[names(1, 1)[0]])

        wait_until(flows, "messages flow again")


def test_a_look_at_the_source_leaves_its_reader_and_its_messages_alone(station: MqttStation) -> None:
    with Reading(station.trigger(), uri=station.uri) as read:
        read.hold()
        station.publish(names(2))
        read.wait_stored(names(2))
        checked = station.trigger(group="readers").check(station.uri)
        assert (checked.problem, checked.warnings) == ("", ())
        assert station.tap.links == 2, "the reader has connected once, and the look"
        read.confirm()
        wait_until(lambda: not station.pending(), "everything is acknowledged")
    checked = station.trigger().check(station._uri(password="another"))
    assert "refuses access" in checked.problem
    assert "another" not in checked.problem


def test_another_subscription_of_the_session_ends_the_stream(station: MqttStation) -> None:
    with station.user(station.client_id, is_clean=False) as user:
        user.subscribe("shop/returns")
    with station.user() as user:
        user.publish("shop/returns", [(None, b"a parcel")])
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "topic shop/returns has come: the session has another subscription" in str(failure)
    assert station.tap.acknowledged == []


@pytest.mark.parametrize(("before", "now"), [(None, "readers"), ("readers", None), ("readers", "others")])
def test_a_subscription_of_another_group_ends_the_stream(
    station: MqttStation, before: str | None, now: str | None
) -> None:
    with Reading(station.trigger(group=before), uri=station.uri, has_restarts=False) as read:
        station.publish(names(1))
        wait_until(read.payloads, "it is stored")
    with Reading(station.trigger(group=now), uri=station.uri, has_restarts=False) as read:
        station.publish(names(1, 1))
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "the session has another subscription, perhaps of an earlier topic or group" in str(failure)


def test_the_members_of_a_group_get_each_message_once(station: MqttStation) -> None:
    members = [station.trigger(client_id=f"member-{number}", group="readers") for number in range(2)]
    for number in range(2):
        # What is published before the first member has subscribed goes nowhere, and a link alone is no subscription.
        with station.user(f"member-{number}", is_clean=False) as user:
            user.subscribe(f"$share/readers/{station.topic}")
    with Reading(*members, uri=station.uri) as read:

        def both_read() -> bool:
            station.publish(names(10, len(station._published)))
            return bool(read.stored(0)) and bool(read.stored(1))

        wait_until(both_read, "each gets a part")
        wait_until(lambda: not station.pending(), "everything is acknowledged")
        assert not read.stored(0).keys() & read.stored(1).keys()
    assert set((read.stored(0) + read.stored(1)).values()) == {1}


def test_a_place_that_nobody_reads_costs_no_connection_and_gets_its_message_once_somebody_does(
    station: MqttStation,
) -> None:
    long = b"message-000000" + b"x" * 3_000
    station.publish_bodies([("message-000000", long)])
    station.publish(names(2, 1))
    trigger = station.trigger(dead_letter=station.rejected)
    with structlog.testing.capture_logs() as records, Reading(trigger, uri=station.uri) as read:

        def told() -> int:
            return sum("nobody subscribes to the topic" in each.get("error", "") for each in records)

        wait_until(lambda: told() > 1, "it is told, and tried again")
        read.wait_stored(names(2, 1))
        assert station.tap.acknowledged == [], "acknowledgements are in order"
        station.with_place()
        wait_until(lambda: station.in_place() == [long.decode()], "it comes to its place")
        wait_until(lambda: not station.pending(), "everything is acknowledged")
        assert station.tap.links == 1


# --- what a broker answers ------------------------------------------------------------------------


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that sends these, each after the next packet of its one client; yields its URI."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                for answer in answers:
                    asked = link.recv(4096)
                    # The answer to a subscription has the number of its packet.
                    link.sendall(answer.replace(b"ID", asked[2:4]))
                link.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"mqtt://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def granting(properties: bytes = b"", reason: int = 0) -> bytes:
    body = bytes([0, reason, len(properties)]) + properties
    return bytes([0x20, len(body)]) + body


def subscribed(reason: int) -> bytes:
    return b"\x90\x04ID\x00" + bytes([reason])


@pytest.mark.parametrize(
    ("answers", "kwargs", "problem"),
    [
        ([granting(b"\x11\x00\x00\x00\x00")], {}, "keeps no session.*accept_drop=true"),
        ([granting(b"\x24\x00")], {}, "grants quality of service 0"),
        ([granting(b"\x28\x00")], {"topic": "orders/+"}, r"takes no topics with \+ or #"),
        ([granting(b"\x2a\x00")], {"group": "readers"}, "has no shared subscriptions"),
        ([granting(reason=0x84)], {}, "refuses access.*Unsupported protocol version"),
        ([b"\x20\x02\x00\x01"], {}, "refuses access.*Unsupported protocol version"),
        ([granting(reason=0x85)], {}, "refuses access to the client id accounting"),
        ([granting(), subscribed(0)], {}, "grants quality of service 0"),
        ([granting(), subscribed(0x87)], {}, "refuses a subscription of orders: Not authorized"),
        ([granting(), subscribed(0x9E)], {"group": "readers"}, "Shared subscription not supported"),
    ],
)
def test_a_broker_that_would_lose_messages_is_refused(
    answers: list[bytes], kwargs: dict[str, Any], problem: str
) -> None:
    producer = MqttProducer(**{"connection": CONNECTION, "topic": "orders", "client_id": "accounting", **kwargs})
    with answering(*answers) as uri:
        producer.connection = Connection.from_uri(CONNECTION, uri)
        with pytest.raises(BrokerMisconfigured, match=problem):
            producer.connect()
        producer.disconnect()


def test_no_more_bytes_are_read_than_may_be_in_flight() -> None:
    delivered = b"".join(
        b"\x32\x69\x00\x01a" + number.to_bytes(2, "big") + b"\x00" + b"x" * 99 for number in range(1, 21)
    )
    with answering(granting(), subscribed(1) + delivered) as uri:
        connection = Connection.from_uri(CONNECTION, uri)
        client = MqttClient(connection, "test", client_id="me", session_expiry_s=0, receive_max=1_000, bytes_max=250)
        client.subscribe("a", 1)
        while len(client.arrived) < 3:
            client.wait(WITHIN_S)
        client.wait(0.1)
        assert len(client.arrived) == 3, "as many as fit, and one more"
        taken = [client.next_arrived().mid for _ in range(2)]
        while len(taken) < 20:
            client.wait(0.1)
            assert len(client.arrived) <= 3
            taken.append(client.next_arrived().mid)
        assert taken == list(range(1, 21))
        client.close()


def test_a_session_that_is_kept_for_less_time_is_warned_of() -> None:
    producer = MqttProducer(CONNECTION, "orders", "accounting")
    with answering(granting(b"\x11\x00\x00\x0e\x10"), subscribed(1)) as uri:
        producer.connection = Connection.from_uri(CONNECTION, uri)
        producer.connect()
        producer.disconnect()
    assert producer.warnings == ["the broker keeps the session for 3,600 s only, not for 86,400 s"]


def read_on(producer: MqttProducer) -> None:
    """Read until it fails."""
    producer.connect()
    while True:
        assert producer.receive(1, 0.1) == []


def test_two_readers_with_one_client_id_are_told_and_end() -> None:
    # Mosquitto 2.0.11 closes the connection without a word.
    producer, failures = MqttProducer(CONNECTION, "orders", "accounting"), []
    for _ in range(TAKEN_OVER_MAX):
        with answering(granting(), subscribed(1) + b"\xe0\x01\x8e") as uri:
            producer.connection = Connection.from_uri(CONNECTION, uri)
            with pytest.raises((OSError, BrokerMisconfigured)) as failed:
                read_on(producer)
            failures.append(failed.value)
            producer.disconnect()
    assert [type(failure).__name__ for failure in failures] == ["MqttTakenOver"] * 4 + ["BrokerMisconfigured"]
    assert "each reader needs a client id of its own" in str(failures[-1])


@pytest.mark.parametrize(
    "answers",
    [
        [granting(reason=0x88)],  # it is not there for now
        [b"\x20\x01\x00"],
        [b"\x20\xff\xff\xff\xff\xff"],
        [granting(), b"\x30\x04\x00\x09ab"],
        [granting(), subscribed(1) + b"\xe0\x01\x8b"],  # it is shut down
    ],
)
def test_what_is_no_answer_is_trouble_and_no_end(answers: list[bytes]) -> None:
    producer = MqttProducer(CONNECTION, "orders", "accounting")
    with answering(*answers) as uri:
        producer.connection = Connection.from_uri(CONNECTION, uri)
        with pytest.raises(OSError):  # noqa: PT011 - as `trouble` says
            read_on(producer)
        producer.disconnect()


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"topic": ""}, r"topic must have 1\.\.256 printable characters"),
        ({"topic": "$share/readers/orders"}, r"topic must be one without \$share/"),
        ({"client_id": 7}, "client_id must be a str, not int"),
        ({"group": "a/b"}, r"group must have no /, \+ and #"),
        ({"key": "id"}, 'key must be "correlation_data", "property:FIELD" or "json:FIELD"'),
        ({"body": "xml"}, 'body must be "text", "json" or "bytes"'),
        ({"lane": "queue"}, 'lane must be "message", "topic" or "subscription"'),
        ({"dead_letter": "rejected/#"}, r"dead_letter must be a topic without \+ and #"),
        ({"topic": "orders/#", "dead_letter": "orders/rejected"}, "is among the topics that are read"),
        ({"session_expiry_s": 0}, r"session_expiry_s must be 1\.\.4,294,967,295 seconds"),
        ({"session_expiry_s": 1.5}, "session_expiry_s must be an int, not float"),
        ({"in_flight_max": 70_000}, "in_flight_max must be at most 65,535"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        MqttTrigger(**{"connection": "shop", "topic": "orders", "client_id": "accounting", **kwargs})


def test_the_tap_finds_acknowledgements_wherever_the_bytes_are_cut() -> None:
    def publish(packet_id: int, name: str) -> bytes:
        body = b"\x00\x06orders" + packet_id.to_bytes(2, "big") + b"\x00" + name.encode() + b"x" * 200
        return b"\x32" + bytes([len(body) & 0x7F | 0x80, len(body) >> 7]) + body

    answers = b"".join(publish(number, name) for number, name in enumerate(names(3), 1))
    sent = b"".join(b"\x40\x02" + number.to_bytes(2, "big") for number in (2, 1, 3))
    for size in range(1, 40):
        parser = MqttAckParser()
        for at in range(0, len(answers), size):
            parser.feed_answer(answers[at : at + size])
        found = [name for at in range(0, len(sent), size) for name in parser.feed(sent[at : at + size])]
        assert found == [names(3)[1], names(3)[0], names(3)[2]]


def test_certificates_of_both_sides_are_checked(tmp_path: Path, mosquitto: str, certify: Certify) -> None:
    server, clients, other = certify("server"), certify("clients"), certify("other")
    client = certify("client", issuer=clients)
    expired = certify("expired", until=NOW, issuer=clients)
    for path in (*server, clients[0]):
        path.chmod(0o644)
    lines = [f"certfile {server[0]}", f"keyfile {server[1]}", f"cafile {clients[0]}"]
    running = MqttServer(tmp_path / "server", mosquitto, of_listener=["require_certificate true", *lines])

    def opened(ca: Any, own: Any) -> Callable[[], None]:
        query = f"ssl_ca_certs={ca[0]}&ssl_certfile={own[0]}&ssl_keyfile={own[1]}"
        connection = Connection.from_uri("shop", f"mqtts://127.0.0.1:{running.port}/?{query}")
        return MqttClient(connection, "test", client_id="me", session_expiry_s=0, receive_max=1, bytes_max=1).close

    try:
        running.start()
        opened(server, client)()
        with pytest.raises(BrokerMisconfigured, match="the certificate of the server is refused: self-signed"):
            opened(other, client)
        for wrong in (other, expired):
            with pytest.raises(BrokerMisconfigured, match="the server refuses our certificate"):
                opened(server, wrong)
    finally:
        running.close()
