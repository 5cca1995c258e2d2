"""RabbitMQ queues on the server of the machine: what messages become, their keys, and what is refused."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pika
import pytest
import structlog
import trio
import trio.lowlevel
from tests.brokers.servers.certificates import NOW, Certify

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients import rabbitmq_client
from headgate.brokers.clients.rabbitmq_client import TROUBLE, UNREAD, open_connection, queue_arguments, translated
from headgate.brokers.clients.rabbitmq_frames import ReadingConnection
from headgate.brokers.held import Received
from headgate.brokers.rabbitmq import RabbitProducer, RabbitTrigger
from headgate.protocol.values import decode_value
from headgate.testing.brokers.rabbitmq_station import (
    _ACK,
    _FRAME,
    _METHOD,
    SHORT_LIMIT_BYTES,
    RabbitAckParser,
    RabbitNode,
    RabbitStation,
    _frames,
)
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, wait_until
from headgate.testing.brokers.tap import Tap
from headgate.triggers.named_values import Connection
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome


def publish(station: RabbitStation, body: bytes, **properties: Any) -> None:
    def run(channel: Any) -> None:
        channel.confirm_delivery()
        channel.basic_publish("", station.queue, body, pika.BasicProperties(delivery_mode=2, **properties))

    station._source.ask(run)


def test_the_raw_event_has_the_body_and_what_the_publisher_has_set(station: RabbitStation) -> None:
    sent_at = datetime(2026, 11, 23, tzinfo=UTC)
    headers = {"tenant": "eu", "number": 2**40, "price": Decimal("1.25"), "at": sent_at, "list": [1, {"a": b"\xff"}]}
    publish(station, '{"name": "Åsa"}'.encode(), headers=headers, content_type="application/json", message_id="m1")
    with Reading(station.trigger(body="json"), uri=station.uri, has_restarts=False) as read:
        wait_until(read.payloads, "it is stored")
        (payload,) = [decode_value(each) for each in read.payloads()]
    assert payload == {
        "body": {"name": "Åsa"},
        "queue": station.queue,
        "exchange": "",
        "routing_key": station.queue,
        "headers": headers,
        "content_type": "application/json",
        "message_id": "m1",
    }


def test_the_letter_of_a_body_that_cannot_be_decoded_has_the_whole_message(station: RabbitStation) -> None:
    publish(station, b"no JSON", headers={"tenant": "eu"}, reply_to="answers", message_id="m1")
    with Reading(station.trigger(body="json"), uri=station.uri) as read:
        wait_until(lambda: read.letters, "it is a letter")
        (letter,) = read.letters
    assert letter.is_whole
    assert decode_value(letter.payload_head) == {
        "body": b"no JSON",
        "queue": station.queue,
        "exchange": "",
        "routing_key": station.queue,
        "headers": {"tenant": "eu"},
        "reply_to": "answers",
        "message_id": "m1",
    }


def message(body: bytes = b"{}", **properties: Any) -> Any:
    method = SimpleNamespace(delivery_tag=1, exchange="", routing_key="orders")
    return SimpleNamespace(method=method, properties=pika.BasicProperties(**properties), body=body)


def received(producer: RabbitProducer, given: Any) -> Any:
    return producer._received((given.method, given.properties, given.body))  # type: ignore[arg-type]


def test_a_key_is_the_name_that_the_publisher_gave_with_the_content() -> None:
    by_id = RabbitProducer(CONNECTION, "orders")
    keys = [
        received(by_id, message(b"a", message_id="1")).key,
        received(by_id, message(b"b", message_id="1")).key,
        received(by_id, message(b"a", message_id="2")).key,
        received(by_id, message(b"a", message_id="x" * 1_000)).key,
    ]
    assert len(set(keys)) == len(keys)
    assert max(map(len, keys)) <= 400
    assert received(by_id, message(b"a")).key is None
    by_header = RabbitProducer(CONNECTION, "orders", key="header:id")
    assert received(by_header, message(headers={"id": 7})).key.startswith("rabbitmq:orders:7:")
    by_field = RabbitProducer(CONNECTION, "orders", key="json:id")
    assert received(by_field, message(b'{"id": 7}')).key.startswith("rabbitmq:orders:7:")
    for body in (b"no JSON", b"[]", b'{"id": null}', b"[" * 100_000):
        assert received(by_field, message(body)).key is None
    assert received(RabbitProducer(CONNECTION, "orders", key=None), message(message_id="1")).key is None


def test_the_count_of_deliveries_makes_no_other_event_and_many_of_them_are_warned_of() -> None:
    producer = RabbitProducer(CONNECTION, "orders")
    first, later = (received(producer, message(headers={"x-delivery-count": count})) for count in (1, 5))
    assert first.raw_event == later.raw_event
    assert len(producer.warnings) == 1
    assert "the queue may drop it" in producer.warnings[0]


def test_a_stream_is_refused(station: RabbitStation) -> None:
    stream = f"{station.queue}-stream"
    station._source.ask(
        lambda channel: channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    )
    try:
        assert "it is a stream" in station.trigger(queue=stream).check(station.uri).problem
    finally:
        station._source.ask(lambda channel: channel.queue_delete(stream))


def test_a_stream_that_may_not_be_asked_about_is_refused_when_its_first_message_comes() -> None:
    with pytest.raises(BrokerMisconfigured, match="it is a stream"):
        received(RabbitProducer(CONNECTION, "orders"), message(headers={"x-stream-offset": 0}))


@pytest.mark.usefixtures("as_others_publish")
def test_headers_that_others_set_end_nothing(station: RabbitStation) -> None:
    given = {"x-stream-offset": 5, "x-delivery-count": "many", "rate": Float(1.5), "half": SingleFloat(0.5)}
    publish(station, b"a", headers={**given, "at": Milliseconds(1_700_000_000_000)}, message_id="m1")
    publish(station, b"c", content_type="text/plain", content_encoding="utf-8", headers={}, message_id="m2")
    with Reading(station.trigger(), uri=station.uri) as read:
        wait_until(lambda: len(read.payloads()) == 2, "they are stored")
        first, second = [decode_value(each) for each in read.payloads()]
    shown = {"x-stream-offset": 5, "rate": 1.5, "half": 0.5, "at": 1_700_000_000_000}
    assert (first["headers"], first["message_id"]) == (shown, "m1")
    assert (second["content_type"], second["message_id"], second["headers"]) == ("text/plain", "m2", {})


class Float(float):
    """A number that pika does not write."""


class SingleFloat(float):
    """One of 32 bits, as publishers of other languages send it."""


class Milliseconds(int):
    """A time that a publisher has counted in milliseconds."""


@pytest.fixture
def as_others_publish(monkeypatch: Any) -> None:
    """What pika itself cannot publish."""
    encode = pika.data.encode_value

    def encode_more(pieces: list[bytes], value: Any) -> int:
        more = {
            Float: lambda: b"d" + struct.pack(">d", value),
            SingleFloat: lambda: b"f" + struct.pack(">f", value),
            Milliseconds: lambda: b"T" + struct.pack(">Q", value),
        }
        if type(value) not in more:
            return int(encode(pieces, value))
        pieces.append(more[type(value)]())
        return len(pieces[-1])

    monkeypatch.setattr(pika.data, "encode_value", encode_more)


def test_a_frame_is_read_wherever_its_bytes_are_cut() -> None:
    properties = pika.BasicProperties(headers={"list": [None, {"a": b"\xff"}]}, message_id="m1", content_type="a/b")
    whole = pika.frame.Header(1, 7, properties).marshal()
    link = ReadingConnection.__new__(ReadingConnection)
    for size in range(1, len(whole)):
        link._frame_buffer = whole[:size]
        assert link._read_frame() == (0, None), size
    link._frame_buffer = whole + b"more"
    size, read = link._read_frame()
    assert (size, read.body_size) == (len(whole), 7)
    assert (read.properties.headers, read.properties.message_id) == (properties.headers, "m1")
    assert read.marshal() == whole


def test_headers_that_cannot_be_read_make_a_dead_letter_and_end_nothing() -> None:
    whole = pika.frame.Header(1, 7, pika.BasicProperties(headers={"rate": "1.5"}, message_id="m1")).marshal()
    link = ReadingConnection.__new__(ReadingConnection)
    link._frame_buffer = whole.replace(b"S", b"?")
    _, read = link._read_frame()
    given = SimpleNamespace(method=message().method, properties=read.properties, body=b"{}")
    event = received(RabbitProducer(CONNECTION, "orders"), given).raw_event
    assert event.reason == UNREAD
    assert event.content["headers"] == {UNREAD: b"\x04rate?\x00\x00\x00\x031.5"}
    assert (event.content["body"], event.content["message_id"]) == (b"{}", "m1")


@contextmanager
def first_message(station: RabbitStation, queue: str, place: str) -> Iterator[tuple[RabbitProducer, Received, Any]]:
    """A producer that has read a message, and the message's properties."""
    producer = RabbitProducer(CONNECTION, queue, dead_letter=place, accept_drop=True)
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    producer.connect()
    try:
        while not (messages := producer.receive(1, WITHIN_S)):
            pass
        kept = producer._unacknowledged[messages[0].ref]
        assert kept is not None
        yield producer, messages[0], kept.properties
    finally:
        producer.disconnect()


@pytest.mark.usefixtures("as_others_publish")
def test_a_copy_of_a_rejected_message_is_whole_and_goes_to_its_place_alone(station: RabbitStation) -> None:
    given = {"tenant": "eu", "rate": Float(1.5), "many": 2**40, "at": Milliseconds(10**13), "list": [{"a": None}]}
    more = {"message_id": "m1", "content_type": "a/b", "content_encoding": "c"}
    publish(station, b"a", headers={**given, "CC": [station.queue]}, expiration="60000", user_id="guest", **more)
    station.with_place()
    with first_message(station, station.queue, station.rejected) as (producer, message, _):
        producer.reject([message])
    with first_message(station, station.rejected, station.queue) as (_, copied, copy):
        assert {name: getattr(copy, name) for name in (*more, "expiration", "user_id")} == {
            **more,
            "expiration": None,
            "user_id": None,
        }
        assert copied.raw_event["body"] == "a"
        assert copy.headers == {
            **given,
            "x-headgate-CC": [station.queue],
            "x-headgate-queue": station.queue,
            "x-headgate-exchange": "",
            "x-headgate-routing-key": station.queue,
        }


def test_lanes_are_of_each_message_of_the_queue_or_of_a_header() -> None:
    given = message(headers={"customer": "a"})
    lanes = [
        received(RabbitProducer(CONNECTION, "q", lane=lane), given).lane
        for lane in ("message", "queue", "header:customer")
    ]
    assert lanes == [1, None, "'a'"]


def test_messages_that_stay_with_the_broker_end_the_stream_before_they_fill_the_prefetch(
    station: RabbitStation,
) -> None:
    for _ in range(3):
        publish(station, b"x" * (SHORT_LIMIT_BYTES + 1))
    with Reading(station.trigger(in_flight_max=3), uri=station.uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "give the stream a place for rejected messages" in str(failure)


def test_a_rejected_message_keeps_its_properties_in_its_place(station: RabbitStation) -> None:
    place = station.with_place()
    publish(station, b"x" * (SHORT_LIMIT_BYTES + 1), message_id="m1", headers={"tenant": "eu"})
    found: list[Any] = []
    with Reading(station.trigger(**place), uri=station.uri):

        def look() -> bool:
            got = station._source.ask(lambda channel: channel.basic_get(station.rejected, auto_ack=True))
            found.append(got)
            return got[0] is not None

        wait_until(look, "it is in its place")
    _, properties, body = found[-1]
    assert len(body) == SHORT_LIMIT_BYTES + 1
    assert properties.message_id == "m1"
    assert properties.headers["tenant"] == "eu"
    assert properties.headers["x-headgate-queue"] == station.queue


class Unconfirming(RabbitAckParser):
    """Passes on all that the broker sends, heartbeats too, but the confirmations of what was published."""

    def pass_answer(self, data: bytes) -> bytes:
        frames, self._got = _frames(self._got + data)
        kept = [each for each in frames if not (each[0] == _METHOD and each[2].startswith(_ACK))]
        return b"".join(_FRAME.pack(*each[:2], len(each[2])) + each[2] + b"\xce" for each in kept)


@pytest.fixture
def unconfirmed(station: RabbitStation) -> Iterator[RabbitProducer]:
    """A producer whose broker confirms nothing; its thread is not begun."""
    tap = Tap((station.parameters.host, station.parameters.port), Unconfirming)
    producer = RabbitProducer(CONNECTION, station.queue, close_s=0.01, **station.with_place())
    uri = station.uri.replace(str(station.tap.port), str(tap.port))
    producer.connection = Connection.from_uri(CONNECTION, uri)
    station.publish(names(1))
    try:
        yield producer
    finally:
        producer.disconnect()
        tap.close()


def consumers(station: RabbitStation) -> int:
    answer = station._source.ask(lambda channel: channel.queue_declare(station.queue, passive=True))
    return int(answer.method.consumer_count)


def test_a_broker_that_does_not_confirm_a_rejected_message_is_left(
    station: RabbitStation, unconfirmed: RabbitProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unconfirmed.connect()
    messages: list[Any] = []
    while not messages:
        messages += unconfirmed.receive(1, 0.1)
    assert consumers(station) == 1
    monkeypatch.setattr(rabbitmq_client, "ANSWER_S", 0.05)
    with pytest.raises(TROUBLE, match=r"has not answered for 0\.05 s"):
        unconfirmed.reject(messages)
    monkeypatch.undo()
    wait_until(lambda: not consumers(station) and station._source.ready() == 1, "the broker has the message again")


def test_a_thread_that_is_abandoned_while_it_waits_for_a_confirmation_leaves_the_broker(
    station: RabbitStation, unconfirmed: RabbitProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unconfirmed.connection_name = None  # it has it already

    async def reject_all(stream: AsyncIterator[Any]) -> None:
        async for _, payload in stream:
            monkeypatch.setattr(rabbitmq_client, "ANSWER_S", 0.5)
            await unconfirmed.advance([AdvanceItem(payload, AdvanceOutcome(rejected=1))])

    async def hang() -> None:
        async with aclosing(unconfirmed.open_stream()) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(reject_all, stream)
            await trio.to_thread.run_sync(wait_until, station.in_place, "it is put aside, and nobody is told")
            nursery.cancel_scope.cancel()
        await unconfirmed.aclose()
        with trio.fail_after(WITHIN_S):
            await unconfirmed._broker_thread.is_done.wait()

    trio.run(hang)
    wait_until(lambda: not consumers(station), "the broker has let the consumer go")


def test_a_place_that_is_full_costs_no_connection_and_holds_up_nothing(station: RabbitStation) -> None:
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}

    def fill(channel: Any) -> None:
        channel.queue_declare(station.rejected, durable=True, arguments=arguments)
        channel.confirm_delivery()
        channel.basic_publish("", station.rejected, b"it is full")

    station._source.ask(fill)
    long = b"x" * (SHORT_LIMIT_BYTES + 1)
    publish(station, long, message_id="long")
    station.publish(names(3))
    trigger = station.trigger(dead_letter=station.rejected)
    with structlog.testing.capture_logs() as records, Reading(trigger, uri=station.uri) as read:
        read.wait_stored(names(3))
        wait_until(lambda: not station.pending(), "all but the long one are acknowledged")
        wait_until(lambda: sum("is full" in each.get("error", "") for each in records) > 1, "it is tried again")
        found: list[str] = []

        def is_in_place() -> bool:
            found.extend(station.in_place())  # and empties it
            return long.decode() in found

        wait_until(is_in_place, "it comes to its place once there is room")
        assert station.tap.links == 1
    assert found == ["it is full", long.decode()]


def test_the_arguments_of_a_queue_are_found_and_no_queue_is_made(station: RabbitStation) -> None:
    station.refusals()  # makes some queues
    with open_connection(Connection.from_uri(CONNECTION, station.uri), "test") as connection:
        found = {
            name: queue_arguments(connection, f"{station.queue}{name}")
            for name in ("", "-plain", "-expiring", "-forgetful", "-transient", "-nothing")
        }
        dlx = "x-dead-letter-exchange"
        assert found == {
            "": {"durable": True, "auto_delete": False, dlx: f"{station.queue}-dropped"},
            "-plain": {"durable": True, "auto_delete": False, dlx: None},
            "-expiring": {"durable": True, "auto_delete": False, "x-expires": 600_000, dlx: None},
            "-forgetful": {"durable": True, "auto_delete": False, "x-message-ttl": 600_000, dlx: None},
            "-transient": {"durable": False, "auto_delete": False, dlx: None},
            "-nothing": None,
        }
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="no queue"):
            connection.channel().queue_declare(f"{station.queue}-nothing", passive=True)


def test_a_queue_that_may_drop_messages_is_read_where_the_user_says_so(station: RabbitStation) -> None:
    station.refusals()
    trigger = station.trigger(queue=f"{station.queue}-plain", accept_drop=True)
    with structlog.testing.capture_logs() as records, Reading(trigger, uri=station.uri):
        wait_until(lambda: [each for each in records if "no dead-letter exchange" in each["event"]], "it is warned of")


def test_the_lag_is_what_is_ready_and_what_is_not_acknowledged(station: RabbitStation) -> None:
    station.publish(names(5))
    producer = RabbitProducer(CONNECTION, station.queue, in_flight_max=3)
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    producer.connect()
    try:
        messages: list[Any] = []
        while len(messages) < 3:
            messages += producer.receive(3, 0.1)
        assert producer.lag() == 5
        producer.acknowledge([messages[0], messages[2]])
        wait_until(lambda: len(station.tap.acknowledged) == 2, "they are acknowledged")
        assert station.tap.acknowledged == names(1) + names(1, 2)
        wait_until(lambda: producer.lag() == 3, "the rest is left")
    finally:
        producer.disconnect()


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"queue": ""}, r"queue must have 1\.\.256 printable characters"),
        ({"connection": 7}, "connection must be a str, not int"),
        ({"dead_letter": "orders"}, "dead_letter must be another queue"),
        ({"body": "xml"}, 'body must be "text", "json" or "bytes", not \'xml\''),
        ({"lane": "header:"}, 'lane must be "message", "queue" or "header:FIELD"'),
        ({"key": "id"}, 'key must be "message_id", "header:FIELD" or "json:FIELD"'),
        ({"in_flight_max": 70_000}, "in_flight_max must be at most 65,535"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        RabbitTrigger(**{"connection": "shop", "queue": "orders", **kwargs})


@pytest.mark.parametrize(("scheme", "module"), [("rabbitmq", "pika"), ("nats", "nats"), ("mqtt", "paho")])
def test_without_the_client_the_error_says_what_to_install(scheme: str, module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; import headgate.brokers.{scheme}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install 'headgate[{scheme}]'" in ran.stderr


def test_the_tap_finds_acknowledgements_wherever_the_bytes_are_cut() -> None:
    def frame(kind: int, payload: bytes) -> bytes:
        return bytes([kind]) + (1).to_bytes(2, "big") + len(payload).to_bytes(4, "big") + payload + b"\xce"

    answers = b"".join(
        frame(1, b"\x00\x3c\x00\x3c\x01c" + number.to_bytes(8, "big") + b"\x00\x00\x00") + frame(3, name.encode())
        for number, name in enumerate(names(4), 1)
    )
    sent = b"AMQP\x00\x00\x09\x01" + b"".join(
        frame(1, b"\x00\x3c\x00\x50" + tag.to_bytes(8, "big") + bytes([is_multiple]))
        for tag, is_multiple in ((3, 0), (4, 1))
    )
    for size in range(1, len(sent)):
        parser = RabbitAckParser()
        for at in range(0, len(answers), size):
            parser.feed_answer(answers[at : at + size])
        found = [name for at in range(0, len(sent), size) for name in parser.feed(sent[at : at + size])]
        assert found == names(1, 2) + names(2) + names(1, 3)


@pytest.mark.campaign
def test_certificates_of_both_sides_are_checked(rabbitmq_node: RabbitNode, certify: Certify) -> None:
    server, clients, other = certify("server"), certify("clients"), certify("other")
    client = certify("client", issuer=clients)
    expired = certify("expired", until=NOW, issuer=clients)
    port = rabbitmq_node.listen_tls(*server, clients[0])

    def opened(ca: Any, own: Any) -> pika.BlockingConnection:
        query = f"ssl_ca_certs={ca[0]}&ssl_certfile={own[0]}&ssl_keyfile={own[1]}"
        return open_connection(Connection.from_uri("shop", f"amqps://guest:guest@127.0.0.1:{port}/?{query}"), "test")

    opened(server, client).close()
    with pytest.raises(BrokerMisconfigured, match="the certificate of the server is refused: self-signed"):
        opened(other, client)
    for wrong in (other, expired):
        with pytest.raises(BrokerMisconfigured, match="the server refuses our certificate"):
            opened(server, wrong)


def test_a_link_that_is_reset_while_pika_begins_is_trouble_and_another_error_of_values_is_not() -> None:
    text = "Expected connected socket, but getpeername() failed: error=OSError(107)"  # seen when a node was killed
    with pytest.raises(TROUBLE, match="getpeername"), translated("orders"):
        raise ValueError(text)
    with pytest.raises(ValueError, match="another"), translated("orders"):
        raise ValueError("another")
