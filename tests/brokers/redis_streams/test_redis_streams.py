"""Redis streams on the server of the machine: what entries become, what is lost before us, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog
from tests.brokers.servers.absent import skip_or_fail

from headgate.brokers import broker_thread
from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.redis_client import open_client, run
from headgate.brokers.redis_streams import MOVE_ATTEMPTS_MAX, RedisStreamProducer, RedisStreamTrigger
from headgate.brokers.threaded import PlaceRefuses, Received
from headgate.protocol.values import decode_value
from headgate.testing import crash_test
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.redis_station import RedisAckParser, RedisStream
from headgate.testing.brokers.station import CONNECTION, wait_until
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.named_values import Connection

REDIS_URL = os.environ.get("HEADGATE_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")
GROUP = "accounting"
_numbers = count(1)


@pytest.fixture(scope="module")
def client() -> Iterator[redis.Redis]:
    """The server at ``HEADGATE_TEST_REDIS_URL``; where none answers the tests skip, but never where ``CI`` is set."""
    client = redis.Redis.from_url(REDIS_URL, protocol=2)
    try:
        client.ping()
    except redis.ConnectionError as error:
        skip_or_fail(f"no Redis server answers at {REDIS_URL}: {error}")
    with client:
        yield client


@pytest.fixture
def stream(client: redis.Redis) -> Iterator[str]:
    """The name of a stream of this test, with a group; both are removed."""
    name = f"headgate-test-{os.getpid()}-{next(_numbers)}"
    RedisStream(client, name, GROUP).create()
    yield name
    for key in client.scan_iter(f"{name}*"):
        client.delete(key)


def reading(stream: str, *, is_held: bool = False, **kwargs: Any) -> Reading:
    trigger = RedisStreamTrigger(CONNECTION, stream, GROUP, **kwargs)
    return Reading(trigger, uri=REDIS_URL, has_restarts=False, is_held=is_held)


def wait_acknowledged(client: redis.Redis, stream: str) -> None:
    wait_until(lambda: not RedisStream(client, stream, GROUP).pending(), "everything is acknowledged")


def payloads(reading: Reading) -> list[Any]:
    return [decode_value(payload) for payload in reading.payloads()]


@pytest.mark.campaign
def test_no_entry_is_lost_or_stored_twice_whoever_dies(client: redis.Redis, stream: str, tmp_path: Path) -> None:
    report = crash_test(
        RedisStreamTrigger("shop", stream, GROUP),
        RedisStream(client, stream, GROUP),
        subscribers=2,
        kills=4,
        folder=tmp_path,
        settings={"conn_shop": REDIS_URL},
    )
    assert report.faults() == []
    assert report.kills == 4


# --- what entries become --------------------------------------------------------------------------


def test_the_raw_event_has_the_id_and_the_fields(client: redis.Redis, stream: str) -> None:
    entry_id: Any = client.xadd(stream, {"name": "Åsa", "amount": "7", "empty": ""})
    with reading(stream) as read:
        wait_until(read.payloads, "it is stored")
        fields = {"name": "Åsa", "amount": "7", "empty": ""}
        assert payloads(read) == [{"id": str(entry_id, "ascii"), "stream": stream, "fields": fields}]


def test_the_value_of_one_field_may_be_the_event(client: redis.Redis, stream: str) -> None:
    for value in ('{"id": 1}', "no JSON", "[" * 100_000, "2"):
        client.xadd(stream, {"body": value})
    client.xadd(stream, {"other": "x"})
    with reading(stream, body="json:body") as read:
        wait_acknowledged(client, stream)
        assert payloads(read) == [{"id": 1}, 2]
        reasons = [letter.reason for letter in read.letters]
    assert len(reasons) == 3
    assert "the field 'body' is not JSON: Expecting value" in reasons[0]
    assert "there is no field 'body'" in reasons[2]
    assert "no JSON" in read.letters[0].payload_head.decode()


def test_entries_that_are_not_utf8_are_told_apart_in_their_letters(client: redis.Redis, stream: str) -> None:
    bodies: list[Any] = [b"\xff\xfe\x01", b"\\xff\xfe\x01", b"\\xff\\xfe\x01"]
    for body in bodies:
        client.xadd(stream, {"body": body})
    with reading(stream, body="json:body") as read:
        wait_until(lambda: len(read.letters) == 3, "all are letters")
        found = [decode_value(letter.payload_head)["body"] for letter in read.letters]
        assert found == [*bodies[:2], bodies[2].decode()]
        wait_acknowledged(client, stream)


def test_a_field_that_an_entry_has_twice_keeps_both_values(client: redis.Redis, stream: str) -> None:
    parts = ["tag", "a", "message", "one", "tag", "b"]
    entry_id: Any = run(client, "XADD", stream, "*", *parts)
    with reading(stream) as read:
        wait_until(read.payloads, "it is stored")
        fields = {"tag": ["a", "b"], "message": "one"}
        assert payloads(read) == [{"id": str(entry_id, "ascii"), "stream": stream, "fields": fields}]
        wait_acknowledged(client, stream)
    run(client, "XADD", stream, "*", *parts)
    with reading(stream, body="json:tag") as read:
        wait_until(lambda: read.letters, "it is a letter")
        assert read.letters[0].reason.endswith("there are 2 fields 'tag'")
        wait_acknowledged(client, stream)
    run(client, "XADD", stream, "*", *parts)
    with reading(stream, message_bytes_max=1, dead_letter=f"{stream}-rejected"):
        wait_until(lambda: client.exists(f"{stream}-rejected"), "it is put aside")
    with open_client(Connection.from_uri("shop", REDIS_URL)) as unconverted:
        ((_, copied),) = run(unconverted, "XRANGE", f"{stream}-rejected", "-", "+")
    assert copied[:6] == [part.encode() for part in parts]


def test_entries_of_one_value_of_a_field_are_a_lane(client: redis.Redis, stream: str) -> None:
    producer = RedisStreamProducer(CONNECTION, stream, GROUP, lane="field:customer")
    entries = [[(b"customer", b"a")], [(b"customer", b"b")], [(b"other", b"a")]]
    assert [producer._message(b"1-0", fields).lane for fields in entries] == [b"a", b"b", None]
    producer = RedisStreamProducer(CONNECTION, stream, GROUP, lane="message")
    assert producer._message(b"1-0", entries[0]).lane == b"1-0"


def test_the_same_id_with_another_content_is_another_message() -> None:
    producer = RedisStreamProducer(CONNECTION, "s", GROUP)
    entries: list[list[tuple[bytes, bytes]]] = [
        [(b"a", b"bc")],
        [(b"ab", b"c")],
        [(b"a", b"b"), (b"c", b"")],
        [(b"a", b"1"), (b"a", b"2")],
        [(b"a", b"2")],
        [],
    ]
    keys = {producer._message(b"1-0", fields).key for fields in entries}
    assert len(keys) == len(entries)
    assert producer._message(b"1-0", entries[0]).key == producer._message(b"1-0", list(entries[0])).key


def test_names_as_long_as_may_be_fit_the_key_of_an_event(client: redis.Redis) -> None:
    stream = f"headgate-test-{os.getpid()}-".ljust(256, "x")
    RedisStream(client, stream, GROUP).create()
    try:
        client.xadd(stream, {"a": "b"}, id=f"{2**64 - 1}-{2**64 - 1}")
        with reading(stream) as read:
            wait_until(read.payloads, "it is stored")
    finally:
        client.delete(stream)


# --- what is not there any more ---------------------------------------------------------------------


def test_an_entry_that_is_trimmed_after_it_was_handed_out_is_a_letter_that_names_it(
    client: redis.Redis, stream: str
) -> None:
    RedisStream(client, stream, GROUP).publish(names(3))
    with reading(stream, is_held=True) as read:
        read.wait_stored(names(3))
    client.xtrim(stream, maxlen=1, approximate=False)
    with reading(stream) as read:
        read.wait_stored(names(1, 2))
        wait_acknowledged(client, stream)
        wait_until(lambda: client.xpending(stream, GROUP)["pending"] == 0, "the entries that are gone are, too")
        letters = read.letters
    assert len(letters) == 2
    assert all("the server has dropped the entry before it was handled" in letter.reason for letter in letters)
    assert all(letter.is_whole for letter in letters)


def test_entries_that_are_trimmed_before_they_are_read_are_counted_and_logged(client: redis.Redis, stream: str) -> None:
    broker = RedisStream(client, stream, GROUP)
    broker.publish(names(2))
    with reading(stream) as read:
        read.wait_stored(names(2))
        wait_acknowledged(client, stream)
    broker.publish(names(10, 10))
    client.xtrim(stream, maxlen=3, approximate=False)
    with structlog.testing.capture_logs() as records, reading(stream) as read:
        read.wait_stored(names(3, 17))
    lost = [record for record in records if record["event"] == "entries were trimmed or deleted before they were read"]
    assert [(record["log_level"], record["entries"]) for record in lost] == [("error", 7)]


def test_a_group_that_is_destroyed_ends_the_stream(client: redis.Redis, stream: str) -> None:
    RedisStream(client, stream, GROUP).publish(names(1))
    with reading(stream) as read:
        read.wait_stored(names(1))
        client.xgroup_destroy(stream, GROUP)
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert f"redis stream {stream} of group {GROUP}: the stream or the group does not exist" in str(failure)


def test_with_create_stream_and_group_are_made_from_the_beginning(client: redis.Redis, stream: str) -> None:
    RedisStream(client, stream, GROUP).publish(names(2))
    client.xgroup_destroy(stream, GROUP)
    with structlog.testing.capture_logs() as records, reading(stream, create=True) as read:
        read.wait_stored(names(2))
    assert "the group is created, from the beginning of the stream" in [record["event"] for record in records]
    client.delete(stream)
    with reading(stream, create=True) as read:
        wait_until(lambda: client.exists(stream), "the stream is made")
        RedisStream(client, stream, GROUP).publish(names(1))
        read.wait_stored(names(1))


def test_entries_of_a_consumer_that_is_gone_are_taken_over(client: redis.Redis, stream: str) -> None:
    RedisStream(client, stream, GROUP).publish(names(5))
    run(client, "XREADGROUP", "GROUP", GROUP, "gone", "COUNT", 3, "STREAMS", stream, ">")
    with reading(stream) as read:
        read.wait_stored(names(2, 3))
        wait_until(lambda: client.xpending(stream, GROUP)["pending"] == 3, "those of the other one are left to it")
    with reading(stream, claim_idle_s=0.001) as read:
        read.wait_stored(names(3))
        wait_acknowledged(client, stream)


def test_entries_that_are_gone_and_have_no_id_in_the_answer_of_redis_6_are_passed_over_when_they_are_claimed(
    client: redis.Redis, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    RedisStream(client, stream, GROUP).publish(names(1))
    run(client, "XREADGROUP", "GROUP", GROUP, "gone", "STREAMS", stream, ">")
    producer = RedisStreamProducer(CONNECTION, stream, GROUP, claim_idle_s=0.001)
    producer.connection = Connection.from_uri(CONNECTION, REDIS_URL)
    producer.connect()
    try:
        execute: Any = producer._redis.execute_command

        def as_redis_6(*command: Any, **options: Any) -> Any:
            answer = execute(*command, **options)
            if command[0] != "XAUTOCLAIM":
                return answer
            cursor, claimed, _ = answer
            return [cursor, [None, *claimed]]

        monkeypatch.setattr(producer._redis, "execute_command", as_redis_6)
        messages: list[Received] = []

        def is_claimed() -> bool:
            messages.extend(producer.receive(10, 0.0))
            return bool(messages)

        wait_until(is_claimed, "it is claimed")
    finally:
        producer.disconnect()
    assert [message.raw_event["fields"]["message"] for message in messages] == names(1)


def test_entries_that_another_process_has_read_under_our_name_are_read_without_a_new_connection(
    client: redis.Redis, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_thread, "LAG_INTERVAL_S", 0.02)
    broker = RedisStream(client, stream, GROUP)
    with structlog.testing.capture_logs() as records, reading(stream, is_held=True) as read:
        broker.publish(names(2))
        read.wait_stored(names(2))
        with client.pipeline(transaction=True) as pipeline:  # so that we do not get them before it
            for name in names(3, 2):
                pipeline.xadd(stream, {"message": name})
            run(pipeline, "XREADGROUP", "GROUP", GROUP, "headgate", "COUNT", 2, "STREAMS", stream, ">")
            pipeline.execute()
        read.wait_stored(names(5))
        read.confirm()
        wait_until(lambda: client.xpending(stream, GROUP)["pending"] == 0, "everything is acknowledged")
        broker.publish(names(1, 5))
        read.wait_stored(names(6))
    told = [(record["event"], record["entries"]) for record in records if "under our name" in record["event"]]
    assert told == [("another reader has had entries under our name", 2)], "once"
    assert not [record for record in records if "connected again" in record["event"]]


def test_another_reader_of_the_group_under_another_name_shares_the_entries(client: redis.Redis, stream: str) -> None:
    triggers = [RedisStreamTrigger(CONNECTION, stream, GROUP, consumer=name) for name in ("one", "two")]
    assert triggers[0].shared_stream_key() != triggers[1].shared_stream_key()
    with Reading(*triggers, uri=REDIS_URL) as read:
        RedisStream(client, stream, GROUP).publish(names(50))
        wait_until(lambda: read.stored(0).total() + read.stored(1).total() >= 50, "all are stored")
        wait_acknowledged(client, stream)
        assert read.stored(0) + read.stored(1) == dict.fromkeys(names(50), 1)


@contextmanager
def connected(stream: str, **kwargs: Any) -> Iterator[RedisStreamProducer]:
    """A producer that reads the stream by hand."""
    producer = RedisStreamProducer(CONNECTION, stream, GROUP, **kwargs)
    producer.connection = Connection.from_uri(CONNECTION, REDIS_URL)
    producer.connect()
    try:
        yield producer
    finally:
        producer.disconnect()


def test_the_lag_is_what_is_not_acknowledged(client: redis.Redis, stream: str) -> None:
    RedisStream(client, stream, GROUP).publish(names(5))
    with connected(stream) as producer:
        assert producer.lag() == 5
        messages = producer.receive(3, 0.0)
        assert len(messages) == 3
        producer.acknowledge(messages[:2])
        assert producer.lag() == 3


def test_an_entry_whose_rejection_had_no_answer_is_put_aside_once(client: redis.Redis, stream: str) -> None:
    RedisStream(client, stream, GROUP).publish(names(3))
    rejected = f"{stream}-rejected"
    with connected(stream, dead_letter=rejected) as producer:
        messages = producer.receive(3, 0.0)
        producer.reject(messages[:2])
        producer.reject(messages)  # as after a connection that was lost before the answers to the first two
    copies = [fields[b"headgate-id"] for _, fields in run(client, "XRANGE", rejected, "-", "+")]
    assert copies == [message.ref for message in messages]
    assert client.xpending(stream, GROUP)["pending"] == 0


def test_an_entry_is_not_acknowledged_if_its_place_is_no_stream(client: redis.Redis, stream: str) -> None:
    RedisStream(client, stream, GROUP).publish(names(1))
    rejected = f"{stream}-rejected"
    with connected(stream, dead_letter=rejected) as producer:
        messages = producer.receive(1, 0.0)
        client.rpush(rejected, "an item")
        with pytest.raises(BrokerMisconfigured, match=f"dead_letter {rejected} is a list, not a stream"):
            producer.reject(messages)
        assert client.xpending(stream, GROUP)["pending"] == 1
        with pytest.raises(BrokerMisconfigured, match="is a list, not a stream"):
            producer.connect()
    client.delete(rejected)


@pytest.mark.parametrize("busy_times", [1, MOVE_ATTEMPTS_MAX])
def test_a_place_to_which_others_write_gets_the_entry_too(
    client: redis.Redis, stream: str, monkeypatch: Any, busy_times: int
) -> None:
    RedisStream(client, stream, GROUP).publish(names(1))
    rejected = f"{stream}-rejected"
    with connected(stream, dead_letter=rejected) as producer:
        watch_place, busy = producer._watch_place, iter(range(busy_times))

        def while_others_write(pipeline: Any) -> None:
            watch_place(pipeline)
            for _ in busy:
                run(client, "XADD", rejected, "*", "a", "b")
                return

        monkeypatch.setattr(producer, "_watch_place", while_others_write)
        messages = producer.receive(1, 0.0)
        if busy_times == MOVE_ATTEMPTS_MAX:
            with pytest.raises(PlaceRefuses, match="others write to it all the time"):
                producer.reject(messages)
            assert client.xpending(stream, GROUP)["pending"] == 1
        producer.reject(messages)
    assert client.xlen(rejected) == busy_times + 1
    assert client.xpending(stream, GROUP)["pending"] == 0
    client.delete(rejected)


# --- the trigger --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"stream": ""}, r"stream must have 1\.\.256 printable characters"),
        ({"group": "a\nb"}, "group must have"),
        ({"consumer": "x" * 257}, "consumer must have"),
        ({"connection": ""}, "connection must have"),
        ({"stream": 7}, "stream must be a str, not int"),
        ({"dead_letter": "orders"}, "dead_letter must be another stream"),
        ({"body": "json"}, 'body must be "fields" or "json:FIELD", not \'json\''),
        ({"lane": "field:"}, "lane must be"),
        ({"claim_idle_s": 0}, "claim_idle_s must be more than 0"),
        ({"in_flight_max": 0}, "in_flight_max must be more than 0"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        RedisStreamTrigger(**{"connection": "shop", "stream": "orders", "group": GROUP, **kwargs})


def test_a_subclass_is_restored_as_itself_and_its_own_kwargs_are_no_concern_of_the_producer() -> None:
    class Big(RedisStreamTrigger):
        def __init__(self, least: int, **kwargs: Any) -> None:
            super().__init__("shop", "orders", GROUP, **kwargs)
            self.least = least

        def serialize(self) -> tuple[str, dict[str, Any]]:
            classpath, kwargs = super().serialize()
            return classpath, {**kwargs, "least": self.least}

    trigger: BaseEventTrigger = Big(7)
    classpath, kwargs = trigger.serialize()
    assert classpath.endswith("Big")
    assert kwargs["least"] == 7
    assert Big.create_shared_stream_producer(kwargs).name == f"redis stream orders of group {GROUP}"
    assert trigger.shared_stream_key() == ("redis", "shop", "orders", GROUP, "headgate")


def test_the_first_of_several_hosts_that_answers_is_used(client: redis.Redis) -> None:
    address = REDIS_URL.partition("://")[2]
    opened = open_client(Connection.from_uri("shop", f"redis://127.0.0.1:1,{address}"))
    with opened:
        assert opened.ping()
    with pytest.raises(redis.ConnectionError, match=r"127\.0\.0\.1:2"):
        open_client(Connection.from_uri("shop", "redis://127.0.0.1:1,127.0.0.1:2"))


def test_without_the_client_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['redis'] = None; import headgate.brokers.redis_streams"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'headgate[redis]'" in ran.stderr


def test_the_tap_finds_acknowledgements_wherever_the_bytes_are_cut() -> None:
    sent = b"".join(
        b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in command)
        for command in (
            [b"PING"],
            [b"xack", b"s", b"g", b"1-0", b"2-0"],
            [b"GET", b"\r\n*1"],
            [b"XACK", b"s", b"g", b"3-0"],
        )
    )
    for size in range(1, len(sent)):
        parser = RedisAckParser()
        parts = [sent[at : at + size] for at in range(0, len(sent), size)]
        assert [name for part in parts for name in parser.feed(part)] == ["1-0", "2-0", "3-0"]
