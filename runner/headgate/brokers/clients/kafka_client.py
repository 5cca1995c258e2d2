"""Clients for Kafka from stored connections, what their errors mean to a producer, and a look at a topic.

``kafka://login:password@h1:9092,h2:9092``, and ``kafkas://`` for TLS. In the query: ``sasl_mechanism`` (`MECHANISMS`),
properties of librdkafka by their own names (`PROPERTIES`), and the options of `headgate.brokers.clients.connecting`. A
login alone means SASL with ``PLAIN``. With ``OAUTHBEARER`` login and password are the id and the secret of a client of
OpenID Connect, for which librdkafka gets tokens by itself (`OIDC`).

librdkafka connects again by itself, and tells of trouble by callbacks that run while the client is polled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured, BrokerSourceMissing
from headgate.brokers.clients.connecting import check_connection, checks_host, tls_files
from headgate.triggers.named_values import Connection

try:
    from confluent_kafka import (
        OFFSET_BEGINNING,
        Consumer,
        ConsumerGroupTopicPartitions,
        KafkaError,
        KafkaException,
        Message,
        Producer,
        TopicCollection,
        TopicPartition,
    )
    from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec  # type: ignore[attr-defined]
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "Kafka needs the client confluent-kafka: pip install 'headgate[kafka]'", name="confluent_kafka"
    ) from missing

__all__ = [
    "OFFSET_BEGINNING",
    "TROUBLE",
    "BackgroundErrors",
    "Consumer",
    "KafkaAdmin",
    "KafkaError",
    "KafkaException",
    "KafkaLost",
    "Message",
    "Producer",
    "TopicFound",
    "TopicPartition",
    "client_config",
    "failure_of",
    "translated",
]

SCHEMES: Final = {"kafka": False, "kafkas": True}
PORT: Final = 9092
BEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", BEARER)
TOKEN_URL: Final = "sasl.oauthbearer.token.endpoint.url"
OIDC: Final = (TOKEN_URL, "sasl.oauthbearer.scope", "sasl.oauthbearer.extensions", "https.ca.location")
PROPERTIES: Final = (
    "broker.address.family",
    "client.id",
    "client.rack",
    "connections.max.idle.ms",
    "fetch.max.bytes",
    "fetch.message.max.bytes",
    "fetch.min.bytes",
    "fetch.wait.max.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
    "message.max.bytes",
    "partition.assignment.strategy",
    "queued.max.messages.kbytes",
    "queued.min.messages",
    "receive.message.max.bytes",
    "session.timeout.ms",
    "socket.timeout.ms",
    "topic.metadata.refresh.interval.ms",
)
# By these messages would be lost, or read by nobody: headgate commits by itself, and only what is stored.
OWN: Final = ("auto.commit", "auto.offset", "offset.store", "group.", "isolation.level", "bootstrap.servers")
ANSWER_S: Final = 10.0  # the longest that one question to the cluster may take
LOOK_S: Final = 0.02  # between two looks whether it is answered
CLIENT_ID: Final = "headgate"
SHORT_RETENTION_MS: Final = 24 * 3_600_000
NO_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"  # of a topic, from a broker that gives none

_REFUSED: Final = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
_MISSING: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
_UNFIT: Final = (
    KafkaError.INVALID_GROUP_ID,
    KafkaError.INVALID_SESSION_TIMEOUT,
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE,
    KafkaError._INVALID_ARG,
    # Of what is written: it is written never, however often it is tried.
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
)
_EARLIEST: Final[OffsetSpec] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: Final[OffsetSpec] = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_FENCED: Final = (KafkaError.FENCED_INSTANCE_ID, KafkaError._FENCED)
# An end of the TLS handshake: by the code of TLS, or, if it comes as fast as the connection, by that of the transport.
_HANDSHAKE: Final = (KafkaError._SSL, KafkaError._TRANSPORT)

_SILENT: Final = logging.getLogger("headgate.brokers.kafka.client")
_SILENT.setLevel(logging.CRITICAL + 1)
_T = TypeVar("_T")


class KafkaLost(ConnectionError):
    """The cluster is in trouble, or the group has gone on without us; among `TROUBLE`."""


TROUBLE: Final = (KafkaLost,)


def failure_of(error: KafkaError, where: str) -> Exception:
    """Return what an error of the client means: a mistake, the end of the stream, or trouble."""
    code, text = error.code(), error.str()
    if code in _FENCED or (code == KafkaError._FATAL and "fenced" in text):
        return BrokerError(
            f"{where}: another reader has taken its place in the group: give each program that reads for one group an "
            f"instance of its own"
        )
    if code in _REFUSED:
        return BrokerMisconfigured(f"{where}: the broker refuses access: {text}")
    if code in _HANDSHAKE and "certificate verify failed" in text:
        return BrokerMisconfigured(f"{where}: the certificate of the server is refused: {text}")
    if code in _HANDSHAKE and "SSL" in text and "alert" in text:
        return BrokerMisconfigured(f"{where}: the server refuses our certificate: {text}")
    if code in _MISSING:
        return BrokerSourceMissing(f"{where}: it does not exist (any more): {text}")
    if code in _UNFIT:
        return BrokerMisconfigured(f"{where}: {text}")
    return KafkaLost(f"{error.name()}: {text}")


@contextmanager
def translated(where: str) -> Generator[None]:
    """Raise errors of the client as what they mean (`failure_of`)."""
    try:
        yield
    except KafkaException as error:
        raise failure_of(error.args[0], where) from None


class BackgroundErrors:
    """What a client has told by its callback, since it was made."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._trouble = ""
        self._failure: Exception | None = None

    def note(self, error: KafkaError) -> None:
        """Take what the client tells."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._failure = self._failure or KafkaLost(self._trouble or error.str())
            return
        failure = failure_of(error, self._where)
        if not isinstance(failure, KafkaLost):
            self._failure = failure
        elif error.fatal():
            self._failure = self._failure or failure
        self._trouble = str(failure)

    def check(self) -> None:
        """Raise what needs another connection, or ends the stream."""
        if self._failure is not None:
            raise self._failure


def client_config(connection: Connection) -> dict[str, Any]:
    """Return what every client of a connection is made with. Raises `BrokerMisconfigured`, which shows no value."""
    where = f"the connection {connection.name!r}"
    for option in connection.extra:
        if any(part in option for part in OWN):
            raise BrokerMisconfigured(
                f"{where} has the option {option!r}, which headgate sets by itself: it commits an offset when "
                f"everything before it is stored, and not otherwise"
            )
    check_connection(connection, SCHEMES, ("sasl_mechanism", *OIDC, *PROPERTIES))
    is_tls = SCHEMES[connection.scheme]
    hosts = connection.hosts or (("localhost", None),)
    config: dict[str, Any] = {
        "bootstrap.servers": ",".join(_address(host or "localhost", port or PORT) for host, port in hosts),
        "client.id": CLIENT_ID,
        "logger": _SILENT,  # what it has to say comes to `BackgroundErrors`, too
        "reconnect.backoff.max.ms": 1_000,
        **{name: connection.extra[name] for name in PROPERTIES if name in connection.extra},
    }
    if is_tls:
        names = {"ssl_ca_certs": "ssl.ca.location", "ssl_certfile": "ssl.certificate.location"}
        names["ssl_keyfile"] = "ssl.key.location"
        config |= {names[option]: path for option, path in tls_files(connection).items()}
        config["ssl.endpoint.identification.algorithm"] = "https" if checks_host(connection) else "none"
    config |= _login_config(connection)
    config["security.protocol"] = ("sasl_" if connection.login else "") + ("ssl" if is_tls else "plaintext")
    return config


def _login_config(connection: Connection) -> dict[str, Any]:
    where = f"the connection {connection.name!r}"
    mechanism = connection.extra.get("sasl_mechanism", "PLAIN")
    if mechanism not in MECHANISMS:
        raise BrokerMisconfigured(f"{where}: sasl_mechanism must be {', '.join(MECHANISMS)}, not {mechanism!r}")
    if not connection.login and "sasl_mechanism" in connection.extra:
        raise BrokerMisconfigured(f"{where} has a sasl_mechanism, and no login")
    tokens: dict[str, Any] = {name: connection.extra[name] for name in OIDC if name in connection.extra}
    if mechanism != BEARER:
        if tokens:
            raise BrokerMisconfigured(f"{where} has the option {next(iter(tokens))!r} of sasl_mechanism={BEARER}")
        if not connection.login:
            return {}
        return {
            "sasl.mechanism": mechanism,
            "sasl.username": connection.login,
            "sasl.password": connection.password,
        }
    if not tokens.get(TOKEN_URL, "").startswith(("https://", "http://")):
        raise BrokerMisconfigured(f"{where}: sasl_mechanism={BEARER} needs the address that gives tokens, {TOKEN_URL}")
    return {
        "sasl.mechanism": mechanism,
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": connection.login,
        "sasl.oauthbearer.client.secret": connection.password,
        **tokens,
    }


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class TopicFound(NamedTuple):
    """A topic as the cluster has it. ``id`` is '' if the broker gives topics none; ``partitions``: their number."""

    cluster: str
    id: str
    partitions: int


class Offsets(NamedTuple):
    """Of one partition: its oldest message, what a group has committed (negative: nothing), and its end."""

    first: int
    committed: int
    end: int

    @property
    def lag(self) -> int:
        """The messages behind the committed offset; without one they count from the beginning."""
        return max(0, self.end - max(self.first, self.committed))


class KafkaAdmin:
    """Asks a cluster about topics and groups. ``where`` is named by its errors; `close` it.

    Each question is answered within `ANSWER_S`, or raises `KafkaLost`. The client must not outlive its use, not even in
    the traceback of a failure: it has threads of its own.
    """

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self._where = where
        self._errors = BackgroundErrors(where)
        with translated(where):
            given: dict[str, Any] = {**config, "error_cb": self._errors.note}
            self._client: AdminClient | None = AdminClient(given)

    def close(self) -> None:
        """End the client."""
        self._client = None

    def topic(self, name: str, where: str = "") -> TopicFound:
        """Return what the cluster knows of a topic; ``where`` is named if there is none."""
        cluster = self._answer(self._open_client.describe_cluster(request_timeout=ANSWER_S)).cluster_id or ""
        asked = self._open_client.describe_topics(TopicCollection([name]), request_timeout=ANSWER_S)
        found = self._answer(asked[name], where)
        topic_id = str(found.topic_id)
        return TopicFound(cluster, "" if topic_id == NO_ID else topic_id, len(found.partitions))

    def dangers(self, name: str) -> list[str]:
        """Return what a topic's settings may lose, as far as we may know them."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        try:
            entries = self._answer(self._open_client.describe_configs([resource], request_timeout=ANSWER_S)[resource])
        except (BrokerMisconfigured, KafkaLost):
            return []  # a right that is not needed to read
        dangers = []
        if "compact" in _setting(entries, "cleanup.policy"):
            dangers.append("the topic is compacted: it keeps the newest message of each key only, read or not")
        if 0 <= int(_setting(entries, "retention.ms") or -1) < SHORT_RETENTION_MS:
            dangers.append("the topic drops messages within a day, read or not (retention.ms)")
        return dangers

    def create_topic(self, name: str, partitions: int) -> None:
        """Make a topic of so many partitions."""
        topic = NewTopic(name, partitions, 1)
        self._answer(self._open_client.create_topics([topic], request_timeout=ANSWER_S)[name])

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all messages."""
        self._answer(self._open_client.delete_topics([name], request_timeout=ANSWER_S)[name])

    def lag(self, topic: str, group: str, partitions: int) -> int:
        """Return how many messages of a topic are behind the committed offsets of a group.

        A partition without one counts from its beginning.
        """
        return sum(offsets.lag for offsets in self.offsets(topic, group, partitions).values())

    def offsets(self, topic: str, group: str, partitions: int) -> dict[int, Offsets]:
        """Return the offsets of a topic's partitions, and those that a group has committed."""
        places = [TopicPartition(topic, number) for number in range(partitions)]
        asked = self._open_client.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group, places)], request_timeout=ANSWER_S
        )
        committed = {place.partition: place.offset for place in self._answer(asked[group]).topic_partitions}
        first, last = (self._offsets(places, spec) for spec in (_EARLIEST, _LATEST))
        return {at: Offsets(first[at], committed.get(at, -1), last[at]) for at in last}

    def _offsets(self, places: Sequence[TopicPartition], spec: OffsetSpec) -> dict[int, int]:
        asked = self._open_client.list_offsets(dict.fromkeys(places, spec), request_timeout=ANSWER_S)
        return {place.partition: self._answer(future).offset for place, future in asked.items()}

    @property
    def _open_client(self) -> AdminClient:
        assert self._client is not None, "it is closed"
        return self._client

    def _answer(self, future: Future[_T], where: str = "") -> _T:
        """Wait for an answer; raise at once if the client tells that there will be none."""
        deadline = time.monotonic() + ANSWER_S + 1
        while not wait([future], LOOK_S).done:
            self._open_client.poll(0)
            self._errors.check()
            if time.monotonic() > deadline:
                raise KafkaLost(f"the cluster does not answer within {ANSWER_S:g} s")
        with translated(where or self._where):
            return future.result()


def _setting(entries: dict[str, Any], name: str) -> str:
    entry = entries.get(name)
    return "" if entry is None or entry.value is None else str(entry.value)
