"""JetStream on a private server: what messages become, what is lost before us, and what is made and refused."""

from __future__ import annotations

import base64
import contextlib
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import structlog
from nats.aio.client import Client as NATS
from tests.brokers.servers.absent import skip_or_fail
from tests.brokers.servers.certificates import Certify

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.nats_client import NatsClient, NatsLost
from headgate.brokers.nats import JetStreamProducer, JetStreamTrigger
from headgate.brokers.threaded import Received
from headgate.protocol.values import decode_value
from headgate.scheduling.drift import judge_beginning, known_of
from headgate.testing.brokers.nats_station import SHORT_LIMIT_BYTES, NatsAckParser, NatsStation, find_server
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, ServerProcess, free_port, wait_until
from headgate.triggers.named_values import Connection

NS = 1_000_000_000
PAYLOAD_BYTES_MAX = 1024 * 1024  # of a message with its headers, unless the server is set otherwise


def test_the_raw_event_has_body_subject_and_place(station: NatsStation) -> None:
    station._publish(['{"name": "Åsa"}'.encode()])
    with Reading(station.trigger(body="json"), uri=station.uri, has_restarts=False) as read:
        wait_until(read.payloads, "it is stored")
        (payload,) = [decode_value(each) for each in read.payloads()]
        ((_, key),) = [(name, event.key) for name, event in enumerate(list(read._hosted.fired[0]))]
    assert payload.pop("stored_at") > 1_700_000_000
    assert payload == {
        "body": {"name": "Åsa"},
        "subject": "orders.new",
        "stream": "orders",
        "sequence": 1,
        "headers": {},
    }
    created = station.ask("STREAM.INFO.orders")["created"]
    found = station.ask("STREAM.MSG.GET.orders", {"seq": 1})["message"]
    place, _, timestamp_ns = str(key).rpartition(":")
    assert place == f"nats:orders:{created}:1"
    assert int(timestamp_ns) // 1_000 == microseconds(found["time"])


def microseconds(moment: str) -> int:
    whole, _, fraction = moment.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(f"{whole}+00:00").timestamp()) * 1_000_000 + int(f"{fraction:0<6}"[:6])


def publish_with(station: NatsStation, headers: bytes, body: bytes = b"") -> None:
    sizes = len(headers), len(headers) + len(body)
    station.publish_raw(b"HPUB orders.new %d %d\r\n%b%b\r\n" % (*sizes, headers, body))


def test_headers_are_those_that_were_published(station: NatsStation) -> None:
    publish_with(station, "NATS/1.0\r\ntag: a\r\ntag:b\r\nname: Åsa\r\nStatus: 7\r\n\r\n".encode())
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as read:
        wait_until(read.payloads, "it is stored")
        (payload,) = [decode_value(each) for each in read.payloads()]
    assert payload["headers"] == {"tag": "a, b", "name": "Åsa", "Status": "7"}


@pytest.mark.parametrize(
    ("limits", "kwargs"),
    [
        ({"max_batch": 2}, {}),
        ({"max_expires": NS}, {}),
        ({"max_batch": 1, "max_expires": NS}, {"in_flight_max": 2}),
    ],
)
def test_a_consumer_is_asked_for_no_more_than_it_takes(
    station: NatsStation, limits: dict[str, int], kwargs: dict[str, int]
) -> None:
    station.create_consumer("limited", "", **limits)
    station.publish(names(5))
    with Reading(station.trigger(durable="limited", **kwargs), uri=station.uri, has_restarts=False) as read:
        read.wait_stored(names(5))


def read_on(producer: JetStreamProducer) -> None:
    """Read until it fails."""
    while True:
        assert producer.receive(10, 0.1) == []


def test_a_request_that_the_consumer_does_not_take_is_trouble_that_is_told(station: NatsStation) -> None:
    station.create_consumer("limited", max_batch=2)
    producer = JetStreamProducer(CONNECTION, "orders", "limited")
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    producer.connect()
    producer._pull_max = 3  # as if the consumer had been changed since
    try:
        with pytest.raises(NatsLost, match="Exceeded MaxRequestBatch of 2"):
            read_on(producer)
    finally:
        producer.disconnect()


def test_messages_left_to_a_consumer_end_the_stream_before_it_gives_out_no_more(station: NatsStation) -> None:
    station.create_consumer("narrow", max_ack_pending=2)
    station._publish([b"x" * (SHORT_LIMIT_BYTES + 1)] * 2)
    station.publish(names(3))
    with Reading(station.trigger(durable="narrow"), uri=station.uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "as many as it gives out at once: give the stream a place" in str(failure)


def test_the_subject_of_a_consumer_that_is_there_is_the_one_that_is_asked_for(station: NatsStation) -> None:
    station.create_consumer("all")
    checked = station.trigger(durable="all", create=True, subject="orders.eu").check(station.uri)
    assert "the consumer is there already, of subject >, not orders.eu" in checked.problem
    station.create_consumer("of-one", filter_subject="orders.eu")
    assert station.trigger(durable="of-one", create=True, subject="orders.eu").check(station.uri).problem == ""


def publish_unreadable(station: NatsStation, body: bytes) -> None:
    """Publish messages that would end the reading of the client library."""
    station.publish_raw(b"PUB orders.\xff %d\r\n%b\r\n" % (len(body), body))
    for headers in (b"NATS/1.0 \xff\xfe\xfd\r\n\r\n", b"NATS/1.0\r\na\r\n\r\n"):
        publish_with(station, headers, body)


def test_messages_whose_subject_or_headers_cannot_be_read_are_letters_and_hold_up_nothing(
    station: NatsStation,
) -> None:
    publish_unreadable(station, b"hi")
    station.publish(names(2))
    with Reading(station.trigger(), uri=station.uri) as read:
        read.wait_stored(names(2))
        wait_until(lambda: not station.pending(), "everything is acknowledged")
        reasons = [letter.reason.partition("decoded: ")[2] for letter in read.letters]
        assert [(decode_value(each.payload_head)["body"], each.is_whole) for each in read.letters] == [
            (b"hi", True)
        ] * 3
    assert reasons == [
        r"the subject orders.\xff is not UTF-8",
        r"the headers b'NATS/1.0 \xff\xfe\xfd\r\n\r\n' cannot be read",
        r"the headers b'NATS/1.0\r\na\r\n\r\n' cannot be read",
    ]
    assert station.tap.links == 1


def test_messages_whose_subject_or_headers_cannot_be_read_have_a_place(station: NatsStation) -> None:
    publish_unreadable(station, b"x" * (SHORT_LIMIT_BYTES + 1))  # too long for a letter
    with Reading(station.trigger(**station.with_place()), uri=station.uri):
        wait_until(lambda: not station.pending(), "everything is acknowledged")
    assert len(station.in_place()) == 3


def test_a_header_that_cannot_be_published_again_is_left_out_of_the_place(station: NatsStation) -> None:
    headers = b"NATS/1.0\r\na(b): c\r\ntenant: eu\r\n\r\n"
    publish_with(station, headers, b"x" * (SHORT_LIMIT_BYTES + 1))
    with Reading(station.trigger(**station.with_place()), uri=station.uri):
        wait_until(lambda: not station.pending(), "it is acknowledged")
    (kept,) = [base64.b64decode(station.ask("STREAM.MSG.GET.rejected", {"seq": 1})["message"]["hdrs"])]
    assert b"tenant: eu\r\n" in kept
    assert b"a(b)" not in kept


def test_a_client_that_has_stopped_reading_is_left_at_once(
    station: NatsStation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError

    def read() -> None:
        client.publish([(client.subscribe(), b"")])
        client.wait(WITHIN_S)

    client = NatsClient(Connection.from_uri(CONNECTION, station.uri), "test")
    try:
        monkeypatch.setattr(NATS, "_build_message", fail)
        with pytest.raises(NatsLost, match="stopped reading"):
            read()
    finally:
        client.close()


def test_what_is_held_for_longer_than_the_server_lends_is_not_delivered_again(station: NatsStation) -> None:
    station.publish(names(3))
    with Reading(station.trigger(), uri=station.uri, is_held=True) as read:
        read.wait_stored(names(3))
        # A second consumer, lent for as long and not extended, shows that the time is over.
        station.create_consumer("other")
        other = JetStreamProducer(CONNECTION, "orders", "other")
        other.connection = Connection.from_uri(CONNECTION, station.uri)
        other.connect()
        got: list[Any] = []
        while len(got) < 6:
            got += other.receive(10, 0.1)
        other.disconnect()
        info = station.ask("CONSUMER.INFO.orders.accounting")
        assert (info["num_redelivered"], info["num_ack_pending"]) == (0, 3)
        read.confirm()
        wait_until(lambda: not station.pending(), "everything is acknowledged")


def test_with_create_the_consumer_is_made_from_the_beginning(station: NatsStation) -> None:
    station.publish(names(2))
    with Reading(station.trigger(durable="mine", create=True, subject="orders.*"), uri=station.uri) as read:
        read.wait_stored(names(2))
        config = station.ask("CONSUMER.INFO.orders.mine")["config"]
    assert (config["max_deliver"], config["ack_policy"], config["filter_subject"]) == (-1, "explicit", "orders.*")


@contextlib.contextmanager
def reader(station: NatsStation, *, asks: bool = False) -> Iterator[JetStreamProducer]:
    """One that reads, or that only asks for positions."""
    producer = JetStreamProducer(CONNECTION, station.stream, station.durable)
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    try:
        if not asks:
            producer.connect()
        yield producer
    finally:
        producer.disconnect()


def receive(producer: JetStreamProducer, count: int) -> list[int]:
    got: list[Received] = []
    while len(got) < count:
        got += producer.receive(count, 0.1)
    return [message.ref for message in got]


def delivered(station: NatsStation) -> dict[str, Any]:
    found: dict[str, Any] = station.ask(f"CONSUMER.INFO.{station.stream}.{station.durable}")["delivered"]
    return found


def take_one_back(station: NatsStation, sequence: int) -> None:
    """Have a message delivered again to a request of nobody: a server before 2.10.14 takes one from its number then."""
    consumer = f"{station.stream}.{station.durable}"

    async def give_back(client: Any) -> bool:
        await client.publish(f"$JS.ACK.{consumer}.1.{sequence}.{sequence}.0.0", b"-NAK")
        await client.flush()
        version = client.connected_server_version
        return (version.major, version.minor, version.patch) < (2, 10, 14)

    async def ask_for_nobody(client: Any) -> None:
        request = b'{"batch": 1, "expires": 60000000000}'
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{consumer}", request, reply=client.new_inbox())
        await client.flush()

    def is_taken() -> bool:
        station._call(ask_for_nobody)  # once more if the server has read it before what was given back
        return bool(delivered(station)["stream_seq"] < last)

    last = delivered(station)["stream_seq"]
    if station._call(give_back):
        wait_until(is_taken, "the server has taken one from the number")


def test_a_number_that_the_server_takes_back_by_itself_is_no_drift(station: NatsStation) -> None:
    station.publish(names(3))
    with reader(station) as producer:
        assert receive(producer, 3) == [1, 2, 3]
        (known,) = known_of(producer.progress())
    assert (known.at, known.deliveries) == ((3,), 3)
    take_one_back(station, 1)
    with reader(station) as producer:
        (lane,) = producer.progress()
        assert judge_beginning(known, lane.begun_at, lane) is None
        # All that is lent comes again, and maybe one as if it were new; another look goes back no more.
        assert sorted(set(receive(producer, 3))) == [1, 2, 3]
        (lane,) = producer.progress()
        assert lane.advanced == (3,)
        assert lane.deliveries > known.deliveries
        with reader(station, asks=True) as other:
            (position,) = other.positions()
        assert position.deliveries >= lane.deliveries


def test_a_consumer_whose_files_are_old_has_gone_back(station: NatsStation, tmp_path: Path) -> None:
    server = station.server
    assert server is not None
    station.publish(names(2))
    with reader(station) as producer:
        receive(producer, 2)
    server.stop()
    folder = next(tmp_path.rglob(f"obs/{station.durable}"))
    shutil.copytree(folder, tmp_path / "old")
    server.start()
    station.publish(names(3, 2))
    with reader(station) as producer:
        wait_until(lambda: receive(producer, 1) == [5], "the newest has come")
        (known,) = known_of(producer.progress())
    server.stop()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "old", folder)
    server.start()
    with reader(station) as producer:
        (lane,) = producer.progress()
    assert (known.at, lane.began, lane.cursor) == ((5,), (2,), known.cursor)
    assert judge_beginning(known, lane.begun_at, lane) == "went back"


def test_messages_that_were_dropped_before_they_were_read_are_reported(station: NatsStation) -> None:
    station.publish(names(2))
    with Reading(station.trigger(), uri=station.uri) as read:
        read.wait_stored(names(2))
        wait_until(lambda: not station.pending(), "everything is acknowledged")
    config = station.ask("STREAM.INFO.orders")["config"]
    station.ask("STREAM.UPDATE.orders", config | {"max_msgs": 2})
    station.publish(names(5, 2))
    with structlog.testing.capture_logs() as records, Reading(station.trigger(), uri=station.uri) as read:
        read.wait_stored(names(2, 5))
    lost = [record for record in records if record["event"] == "messages were dropped before they were read"]
    assert [(record["log_level"], record["at_most"]) for record in lost] == [("error", 3)]


def test_a_stream_that_drops_its_oldest_messages_is_warned_of(station: NatsStation) -> None:
    station.create_stream("short", "short", max_age=3_600 * NS)
    station.create_consumer("reader", "short")
    checked = station.trigger(stream="short", durable="reader").check(station.uri)
    assert (checked.problem, checked.lag) == ("", 0)
    assert checked.warnings == ("the stream drops its oldest messages, also those that are not read (max_age)",)


def test_a_stream_that_is_made_anew_while_it_is_read_is_another_one(station: NatsStation) -> None:
    station.publish(names(2))
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as read:
        read.wait_stored(names(2))
        station.delete()
        station.create()
        station.tap.cut()
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "does not exist" in str(failure)


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"stream": "a.b"}, "stream must have no dots"),
        ({"durable": ""}, r"durable must have 1\.\.256 printable characters"),
        ({"subject": "a"}, "subject is that of a consumer that is made"),
        ({"lane": "queue"}, 'lane must be "message", "subject" or "stream"'),
        ({"body": "xml"}, 'body must be "text", "json" or "bytes"'),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        JetStreamTrigger(**{"connection": "shop", "stream": "orders", "durable": "mine", **kwargs})


def test_the_tap_finds_acknowledgements_wherever_the_bytes_are_cut() -> None:
    subject = "$JS.ACK.orders.accounting.1.{}.9.1700000000000000000.0"
    sent = b"".join(
        b"PUB %b _INBOX.x %d\r\n%b\r\n" % (subject.format(number).encode(), len(payload), payload)
        for number, payload in ((3, b"+ACK"), (4, b"+WPI"), (5, b"+ACK"))
    )
    sent = b'CONNECT {"verbose": false}\r\nPING\r\n' + sent
    for size in range(1, len(sent)):
        parser = NatsAckParser()
        found = [name for at in range(0, len(sent), size) for name in parser.feed(sent[at : at + size])]
        assert found == ["sequence 3", "sequence 5"]


def test_certificates_of_both_sides_are_checked(tmp_path: Path, certify: Certify) -> None:
    path = find_server()
    if path is None:
        skip_or_fail("this machine has no nats-server")
    server, client, other = certify("server"), certify("client"), certify("other")
    port = free_port()
    files = f'cert_file: "{server[0]}", key_file: "{server[1]}", ca_file: "{client[0]}", verify: true'
    (tmp_path / "tls.conf").write_text(
        f"listen: 127.0.0.1:{port}\nauthorization {{token: hunter22}}\ntls {{{files}}}\n"
    )
    process = ServerProcess([path, "-c", str(tmp_path / "tls.conf")], port=port, log_path=tmp_path / "tls.log")

    def opened(ca: tuple[Path, Path], own: tuple[Path, Path], token: str = "hunter22") -> NatsClient:
        query = f"ssl_ca_certs={ca[0]}&ssl_certfile={own[0]}&ssl_keyfile={own[1]}"
        return NatsClient(Connection.from_uri("shop", f"tls://{token}@127.0.0.1:{port}/?{query}"), "test")

    try:
        process.start()
        opened(server, client).close()
        with pytest.raises(BrokerMisconfigured, match="the server refuses access") as refused:
            opened(server, client, "another-token")
        assert "another-token" not in str(refused.value)
        with pytest.raises(BrokerMisconfigured, match="the certificate of the server is refused: self-signed"):
            opened(other, client)
        with pytest.raises(BrokerMisconfigured, match="the server refuses our certificate"):
            opened(server, other)
    finally:
        process.close()


def test_a_place_that_is_full_costs_no_connection_and_holds_up_nothing(station: NatsStation) -> None:
    place = station.with_place()
    config = station.ask("STREAM.INFO.rejected")["config"]
    station.ask("STREAM.UPDATE.rejected", config | {"max_msgs": 1, "discard": "new"})
    long = "x" * (SHORT_LIMIT_BYTES + 1)
    station._publish([b"y" * (SHORT_LIMIT_BYTES + 1), long.encode()])  # there is room for one of them
    station.publish(names(3))
    with structlog.testing.capture_logs() as records, Reading(station.trigger(**place), uri=station.uri) as read:
        read.wait_stored(names(3))
        refusal = "dead_letter rejected takes no message: maximum messages"
        wait_until(lambda: sum(refusal in each.get("error", "") for each in records) > 1, "it is tried again")
        assert len(station.pending()) == 1
        station.ask("STREAM.UPDATE.rejected", config)
        wait_until(lambda: not station.pending(), "it comes to its place once there is room")
        assert station.tap.links == 1
    assert long in station.in_place()


@pytest.mark.parametrize(
    ("place", "size", "says"),
    [
        ({"max_msg_size": 1_000}, SHORT_LIMIT_BYTES + 1, "message size exceeds maximum"),
        (
            {},
            PAYLOAD_BYTES_MAX,
            "max_payload of the server is 1,048,576",
        ),  # which it exceeds with the headers of headgate
    ],
)
def test_a_place_that_never_takes_a_message_ends_the_stream_and_is_named(
    station: NatsStation, place: dict[str, int], size: int, says: str
) -> None:
    station.create_stream("rejected", "rejected", **place)
    station._publish([b"x" * size])
    trigger = station.trigger(dead_letter="rejected")
    with Reading(trigger, uri=station.uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "jetstream orders, consumer accounting: dead_letter rejected takes no message" in str(failure)
    assert says in str(failure)
    assert len(station.pending()) == 1


def test_a_message_that_was_put_aside_and_not_acknowledged_is_put_aside_once(
    station: NatsStation, monkeypatch: pytest.MonkeyPatch
) -> None:
    station.publish(names(2))
    producer = JetStreamProducer(CONNECTION, station.stream, station.durable, **station.with_place())
    producer.connection = Connection.from_uri(CONNECTION, station.uri)
    try:
        producer.connect()
        messages: list[Received] = []

        def are_received() -> bool:
            messages.extend(producer.receive(2, 0.1))
            return len(messages) == 2

        wait_until(are_received, "both are received")
        with monkeypatch.context() as dies:
            dies.setattr(producer, "acknowledge", lambda _: None)  # as a runner that dies before it
            producer.reject(messages)
        producer.reject(messages)
    finally:
        producer.disconnect()
    assert len(station.in_place()) == 2
    assert not station.pending()
