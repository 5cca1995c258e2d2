"""Kafka on a private server: what messages become, what is lost before us, and partitions that come and go."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured
from headgate.brokers.clients.kafka_client import Consumer, TopicPartition
from headgate.brokers.kafka import KafkaProducer, KafkaTrigger
from headgate.protocol.values import decode_value
from headgate.testing.brokers.kafka_station import KafkaAckParser, KafkaStation
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, wait_until

GROUP = "accounting"


def committed(station: KafkaStation, partitions: int) -> list[int]:
    places = [TopicPartition(station.topic, number) for number in range(partitions)]
    return [max(0, place.offset) for place in station._own_reader.committed(places, timeout=WITHIN_S)]


def test_the_raw_event_has_body_key_place_and_headers(station: KafkaStation) -> None:
    station.publish_bodies(['{"name": "Åsa"}'.encode()], key=b"k\xc3\xa9y", headers=[("a", b"1"), ("b", b"\xff")])
    station.publish_bodies([None], key=b"\xff")
    with Reading(station.trigger(body="json"), uri=station.uri, has_restarts=False) as read:
        wait_until(lambda: len(read.payloads()) == 2, "both are stored")
        first, tombstone = [decode_value(each) for each in read.payloads()]
        keys = [event.key for event in read._hosted.fired[0]]
    assert 0 <= time.time() - first.pop("timestamp") < 2 * WITHIN_S
    assert first == {
        "body": {"name": "Åsa"},
        "key": "kéy",
        "topic": "orders",
        "partition": 0,
        "offset": 0,
        "headers": {"a": "1", "b": b"\xff"},
    }
    assert (tombstone["body"], tombstone["key"], tombstone["offset"]) == (None, b"\xff", 1)
    assert all(key is not None and ":orders:0:" in key for key in keys), "noida gives topics no ids"


class UnreadHeaders:
    """A message as the client gives it that has a header whose name is not UTF-8: what reads it again may crash."""

    calls = 0

    def headers(self) -> None:
        self.calls += 1
        raise SystemError("returned a result with an exception set")

    def __getattr__(self, name: str) -> Any:
        values = {"value": b"a", "key": None, "timestamp": (1, 2_000), "partition": 0, "offset": 7, "topic": "orders"}
        return lambda: values[name]


def test_headers_that_cannot_be_read_make_a_dead_letter_and_are_asked_for_once() -> None:
    message: Any = UnreadHeaders()
    producer = KafkaProducer(CONNECTION, "orders", "accounting", dead_letter="rejected")
    event = producer._received(message).raw_event
    assert "not UTF-8" in event.reason
    assert (event.content["body"], event.content["offset"]) == (b"a", 7)
    sent: list[Any] = []
    producer._publisher = SimpleNamespace(  # type: ignore[assignment]
        produce=lambda *given, headers, on_delivery: on_delivery(None, sent.append((*given, headers))),  # type: ignore[func-returns-value]
        flush=lambda _: 0,
    )
    producer._member = SimpleNamespace(commit=sent.append)  # type: ignore[assignment]
    producer.reject([producer._received(message)])
    (_, value, _, headers), offsets = sent
    assert (value, headers[-1], offsets) == (b"a", ("headgate-offset", b"7"), {0: 8})
    assert message.calls == 2, "once each time that it is received"


def test_a_message_that_is_too_long_ends_the_stream_without_a_place_and_goes_to_the_place(
    station: KafkaStation,
) -> None:
    station.publish(names(1))
    station.publish_bodies([b"message-000001 " + b"x" * 2_000])
    station.publish(names(1, 2))
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerError)
    assert "give the stream a place for rejected messages" in str(failure)
    assert committed(station, 1) == [1]
    with Reading(station.trigger(**station.with_place()), uri=station.uri) as read:
        read.wait_stored(names(1, 2))
        wait_until(lambda: not station.pending(), "everything is committed")
    (moved,) = station.in_place()
    assert moved.startswith("message-000001 xxx")


@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("latest", 3)])
def test_a_group_that_has_committed_nothing_begins_where_it_is_told(
    station: KafkaStation, start: str, first: int
) -> None:
    station.publish(names(3))
    with Reading(station.trigger(start=start), uri=station.uri, is_held=True) as read:
        wait_until(lambda: read.outstanding() == 3 or committed(station, 1) == [3], "it has begun")
        station.publish(names(2, 3))
        read.wait_stored(names(5 - first, first))
        assert read.order() == names(5 - first, first)
        assert committed(station, 1) == [first], "a death before the first message begins at the same place"


@pytest.mark.parametrize("choice", ["error", "earliest", "latest"])
def test_offsets_that_are_not_there_are_never_passed_over_in_silence(station: KafkaStation, choice: str) -> None:
    station.publish(names(3))
    beyond = [TopicPartition(station.topic, 0, 100)]
    station._own_reader.commit(offsets=beyond, asynchronous=False)
    with structlog.testing.capture_logs() as records:
        with Reading(station.trigger(on_offset_lost=choice), uri=station.uri, has_restarts=False) as read:
            if choice == "error":
                failure = read.failure()
                assert isinstance(failure, BrokerMisconfigured)
                assert "offset 100 of partition 0 is not there: it has 0 to 3" in str(failure)
                assert "on_offset_lost" in str(failure)
                assert committed(station, 1) == [100]
                return
            wait_until(lambda: any("not there any more" in record["event"] for record in records), "it is reported")
            station.publish(names(1, 3))
            read.wait_stored(names(1, 3))
            wait_until(lambda: committed(station, 1) == [4], "it goes on")
            assert read.order() == (names(4) if choice == "earliest" else names(1, 3))


def test_a_topic_that_is_made_anew_while_it_is_read_ends_the_stream(station: KafkaStation) -> None:
    station.publish(names(2))
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as read:
        read.wait_stored(names(2))
        wait_until(lambda: committed(station, 1) == [2], "it is committed")
        station.delete()
        station.create()
        station.tap.cut()
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "offset 2 of partition 0 is not there" in str(failure), "without ids of topics it is seen by its offsets"


def test_partitions_that_another_member_takes_are_never_committed_by_us(station: KafkaStation) -> None:
    station.partitions = 4
    station.create_topic("wide", 4)
    station.topic = "wide"
    for number in range(4):
        station.publish_bodies([name.encode() for name in names(5, 5 * number)], partition=number)
    other = Consumer({**station._config, "group.id": GROUP, "enable.auto.commit": False})
    taken: set[int] = set()

    def note_assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        taken.update(place.partition for place in partitions)
        consumer.assign(partitions)

    with Reading(station.trigger(), uri=station.uri, is_held=True) as read:
        read.wait_stored(names(20))
        assert committed(station, 4) == [0] * 4
        other.subscribe([station.topic], on_assign=note_assigned)
        deadline = time.monotonic() + WITHIN_S
        while not taken:
            assert time.monotonic() < deadline, "another member gets partitions"
            other.poll(0.1)
        assert taken != {0, 1, 2, 3}
        other.pause([TopicPartition(station.topic, number) for number in taken])
        read.confirm()
        ours = {0, 1, 2, 3} - taken

        def is_done() -> bool:
            other.poll(0.0)
            return all(committed(station, 4)[number] == 5 for number in ours)

        wait_until(is_done, "ours are committed")
        assert all(committed(station, 4)[number] == 0 for number in taken), "what was held of theirs was given up"
        other.close()
        wait_until(lambda: committed(station, 4) == [5] * 4, "what it leaves behind is read again and committed")
        read.wait_stored(names(20))


def test_a_reader_whose_name_another_one_takes_ends_and_says_so(station: KafkaStation) -> None:
    station.publish(names(2))
    with Reading(station.trigger(), uri=station.uri, has_restarts=False) as read:
        read.wait_stored(names(2))
        with Reading(station.trigger(), uri=station.uri, has_restarts=False) as other:
            failure = read.failure()
            assert isinstance(failure, BrokerError)
            assert "instance of its own" in str(failure)
            station.publish(names(2, 2))
            other.wait_stored(names(2, 2))


def test_a_check_says_how_far_the_group_is_behind_and_joins_nothing(station: KafkaStation) -> None:
    station.publish(names(5))
    trigger = station.trigger()
    checked = trigger.check(station.uri)
    assert (checked.problem, checked.lag, checked.warnings) == ("", 5, ())
    with Reading(trigger, uri=station.uri) as read:
        read.wait_stored(names(5))
        wait_until(lambda: not station.pending(), "everything is committed")
        assert trigger.check(station.uri).lag == 0
        station.publish(names(1, 5))
        read.wait_stored(names(6))
    missing = station.trigger(topic="nothing").check(station.uri)
    assert "kafka topic nothing, group accounting: it does not exist (any more)" in missing.problem


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"topic": "^orders.*"}, "topic must be the name of one topic"),
        ({"topic": ""}, r"topic must have 1\.\.249 printable characters"),
        ({"dead_letter": "orders"}, "dead_letter must be another topic"),
        ({"start": "now"}, 'start must be "earliest" or "latest"'),
        ({"on_offset_lost": "skip"}, 'on_offset_lost must be "error", "earliest" or "latest"'),
        ({"body": "xml"}, 'body must be "text", "json" or "bytes"'),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        KafkaTrigger(**{"connection": "shop", "topic": "orders", "group": GROUP, **kwargs})


def test_the_tap_finds_commits_wherever_the_bytes_are_cut() -> None:
    def text(value: bytes) -> bytes:
        return len(value).to_bytes(2, "big") + value

    head = b"\x00\x08\x00\x07" + (9).to_bytes(4, "big") + text(b"headgate")
    place = (0).to_bytes(4, "big") + (3).to_bytes(8, "big") + b"\xff\xff\xff\xff" + text(b"")
    body = text(b"accounting") + (1).to_bytes(4, "big") + text(b"member") + text(b"stable")
    body += (1).to_bytes(4, "big") + text(b"orders") + (1).to_bytes(4, "big") + place
    frame = (len(head + body)).to_bytes(4, "big") + head + body
    other = (8).to_bytes(4, "big") + b"\x00\x01\x00\x04" + bytes(4)
    sent = other + frame + other
    for size in range(1, len(sent)):
        parser = KafkaAckParser({}, 9092, 9093)
        found = [name for at in range(0, len(sent), size) for name in parser.feed(sent[at : at + size])]
        assert found == [f"partition 0 offset {offset}" for offset in range(3)]
    answer = (20).to_bytes(4, "big") + b"....127.0.0.1" + (9092).to_bytes(4, "big") + b"end"
    parser = KafkaAckParser({}, 9092, 9093)
    passed = b"".join(parser.pass_answer(answer[at : at + 1]) for at in range(len(answer)))
    assert passed == answer.replace((9092).to_bytes(4, "big"), (9093).to_bytes(4, "big"))
