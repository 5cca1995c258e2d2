"""Errors of a cluster, injected by librdkafka's mock: each is trouble, a mistake or the end, and costs no message."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from tests.brokers.servers.kafka_mock import FETCH, HEARTBEAT, JOIN_GROUP, OFFSET_COMMIT, PRODUCE, MockCluster

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured
from headgate.brokers.clients import kafka_group
from headgate.brokers.clients.kafka_client import (
    Consumer,
    KafkaAdmin,
    KafkaError,
    KafkaLost,
    Producer,
    TopicFound,
    TopicPartition,
    failure_of,
)
from headgate.brokers.kafka import KafkaProducer, KafkaTrigger
from headgate.brokers.progress import Progress
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import CONNECTION, WITHIN_S, wait_until
from headgate.triggers.named_values import Connection

pytestmark = pytest.mark.campaign  # clusters that are in trouble take their time

TOPIC, GROUP = "orders", "accounting"


class Cluster(MockCluster):
    """A mock with one topic, and a client for it."""

    def __init__(self) -> None:
        super().__init__()
        self.create_topic(TOPIC)
        self.uri = f"kafka://{self.address}/?session.timeout.ms=2000&heartbeat.interval.ms=500"
        self._config = {"bootstrap.servers": self.address, "log_level": 0}
        self._reader = Consumer({**self._config, "group.id": GROUP})

    def publish(self, messages: list[str]) -> None:
        producer = Producer({**self._config, "linger.ms": 1})
        for message in messages:
            producer.produce(TOPIC, message.encode(), partition=0)
        assert producer.flush(WITHIN_S) == 0

    def committed(self) -> int:
        (place,) = self._reader.committed([TopicPartition(TOPIC, 0)], timeout=WITHIN_S)
        return max(0, place.offset)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    # Questions about topics go to the controller of a cluster, and the mock has none.
    monkeypatch.setattr(KafkaAdmin, "topic", lambda *_: TopicFound("mock", "", 1))
    monkeypatch.setattr(KafkaAdmin, "dangers", lambda *_: [])
    cluster = Cluster()
    yield cluster
    cluster.close()


def trigger(**kwargs: Any) -> KafkaTrigger:
    return KafkaTrigger(CONNECTION, TOPIC, GROUP, **kwargs)


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
    ],
)
def test_a_commit_that_is_refused_is_made_in_the_next_generation(cluster: Cluster, code: int) -> None:
    cluster.publish(names(5))
    with Reading(trigger(), uri=cluster.uri, is_held=True) as read:
        read.wait_stored(names(5))
        cluster.fail(OFFSET_COMMIT, code)
        read.confirm()
        wait_until(lambda: cluster.committed() == 5, "it is committed all the same")
        read.wait_stored(names(5))


@pytest.mark.parametrize(
    ("request_kind", "code"),
    [
        (FETCH, KafkaError.TOPIC_AUTHORIZATION_FAILED),
        (JOIN_GROUP, KafkaError.GROUP_AUTHORIZATION_FAILED),
    ],
)
def test_a_right_that_is_missing_ends_the_stream_and_is_named(cluster: Cluster, request_kind: int, code: int) -> None:
    cluster.publish(names(1))
    cluster.fail(request_kind, code)
    with Reading(trigger(), uri=cluster.uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "kafka topic orders, group accounting: the broker refuses access" in str(failure)


@pytest.mark.parametrize(
    "code", [KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION]
)
def test_a_place_that_never_takes_a_message_ends_the_stream_and_is_named(cluster: Cluster, code: int) -> None:
    cluster.create_topic("rejected")
    cluster.publish(names(1))
    cluster.fail(PRODUCE, code)
    short = trigger(dead_letter="rejected", message_bytes_max=1)
    with Reading(short, uri=cluster.uri, has_restarts=False) as read:
        failure = read.failure()
    assert isinstance(failure, BrokerMisconfigured)
    assert "kafka topic orders, group accounting: dead_letter rejected: " in str(failure)
    assert cluster.committed() == 0


def test_a_reader_that_is_fenced_ends_and_commits_nothing(cluster: Cluster) -> None:
    cluster.publish(names(2))
    with Reading(trigger(), uri=cluster.uri, has_restarts=False, is_held=True) as read:
        read.wait_stored(names(2))
        cluster.fail(OFFSET_COMMIT, KafkaError.FENCED_INSTANCE_ID)
        read.confirm()
        failure = read.failure()
    assert isinstance(failure, BrokerError)
    assert "instance of its own" in str(failure)
    assert cluster.committed() == 0


def test_a_cluster_that_is_away_costs_no_message_and_holds_up_no_end(cluster: Cluster) -> None:
    cluster.publish(names(5))
    with structlog.testing.capture_logs() as records:
        with Reading(trigger(), uri=cluster.uri, is_held=True) as read:
            read.wait_stored(names(5))
            cluster.take_down()
            read.confirm()
            wait_until(lambda: any("in trouble" in record["event"] for record in records), "the trouble is seen")
            cluster.bring_up()
            wait_until(lambda: cluster.committed() == 5, "it is connected again")
            cluster.publish(names(1, 5))
            read.wait_stored(names(6))
            cluster.take_down()
            began = time.monotonic()
        assert time.monotonic() - began < WITHIN_S
    assert not [record for record in records if record["log_level"] == "error"]


def test_a_partition_that_is_taken_away_while_it_is_paused_is_read_when_it_comes_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_group, "POLL_EVERY_S", 0.0)
    cluster.publish(names(6))
    with (
        structlog.testing.capture_logs() as records,
        Reading(trigger(in_flight_max=3), uri=cluster.uri, is_held=True) as read,
    ):
        read.wait_stored(names(3))
        cluster.fail(HEARTBEAT, KafkaError.REBALANCE_IN_PROGRESS)
        wait_until(lambda: [each["event"] for each in records].count("partitions are assigned") == 2, "it comes again")
        read.confirm()
        read.wait_stored(names(6))
        wait_until(lambda: cluster.committed() == 6, "everything is committed")
    assert not any("in trouble" in record["event"] for record in records), "within one connection"


@pytest.mark.parametrize(("begin", "choice"), [(0, "error"), (0, "latest"), (2, "latest")])
def test_a_cluster_that_errs_about_an_offset_has_no_message_passed_over(
    cluster: Cluster, begin: int, choice: str
) -> None:
    cluster.publish(names(5))
    if begin:
        cluster._reader.commit(offsets=[TopicPartition(TOPIC, 0, begin)], asynchronous=False)
    cluster.fail(FETCH, KafkaError.OFFSET_OUT_OF_RANGE)
    with Reading(trigger(on_offset_lost=choice), uri=cluster.uri, has_restarts=False) as read:
        read.wait_stored(names(5 - begin, begin))
        wait_until(lambda: cluster.committed() == 5, "everything is committed")


def test_a_partition_whose_committed_offset_is_not_told_does_not_begin_anew(cluster: Cluster) -> None:
    untold = SimpleNamespace(partition=1, offset=-1001, error=KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE))
    told = SimpleNamespace(partition=0, offset=7, error=None)

    class Untold:
        """Answers for one partition of two; whatever else is asked of it fails."""

        def committed(self, *_: object, **__: object) -> list[Any]:
            return [told, untold]

    member = kafka_group.GroupMember(
        {"bootstrap.servers": cluster.address},
        kafka_group.Reading("orders", TOPIC, GROUP, "test", "cluster:1", "latest", "error"),
        progress=Progress(),
        settle=lambda: None,
        forget=lambda _: None,
        check_topic=lambda: None,
    )
    with contextlib.closing(member):
        member._note_assigned(Untold(), [])  # type: ignore[arg-type]
        with pytest.raises(KafkaLost, match="COORDINATOR_NOT_AVAILABLE"):
            member.receive(1, 0.0)


@pytest.mark.parametrize(("start", "began"), [("earliest", ()), ("latest", (5,))])
def test_where_a_group_without_offsets_begins_is_no_move_by_others(
    cluster: Cluster, start: str, began: tuple[int, ...]
) -> None:
    cluster.publish(names(5))
    producer = KafkaProducer(CONNECTION, TOPIC, GROUP, start=start)
    producer.connection = Connection.from_uri(CONNECTION, cluster.uri)
    try:
        producer.connect()

        def has_begun() -> bool:
            producer.receive(1, 0.1)
            return bool(producer.progress())

        wait_until(has_begun, "its partition is assigned")
        (lane,) = producer.progress()
        assert (lane.began, lane.advanced, lane.asked, lane.is_ours) == (began, began, began, start == "earliest")
        assert cluster.committed() == max((0, *began)), "what the cluster has is what was asked for"
    finally:
        producer.disconnect()


@pytest.mark.parametrize("code", [KafkaError._SSL, KafkaError._TRANSPORT])
@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("error:0A000086:SSL routines::certificate verify failed", "x: the certificate of the server is refused: "),
        ("error:0A000413:SSL routines::ssl/tls alert unsupported certificate", "x: the server refuses our certificate"),
    ],
)
def test_an_end_of_the_handshake_is_a_mistake_by_whichever_code_it_comes(code: int, text: str, meaning: str) -> None:
    failure = failure_of(KafkaError(code, text), "x")
    assert isinstance(failure, BrokerMisconfigured)
    assert str(failure).startswith(meaning)
