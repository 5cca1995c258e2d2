"""Kafka: the partitions of a topic that a consumer group gives us, each offset committed once all before it is stored.

The promise, in the words of ``docs/brokers.md``: **every message that the group gives us is stored once**, for each
watcher, whatever dies, as long as the cluster does not lose it. A message is known by its cluster, the id of its topic,
its partition, its offset and its timestamp. An offset is committed after everything derived from the messages before it
is stored.

A partition is a lane. What a subscriber fails on is handed out again from memory with all behind it in its partition
(`headgate.brokers.held`), so that no offset is sought and no commit passes it.

A group may take a partition away at any moment, and Kafka lets whoever was its owner commit all the same. So a
partition belongs to a generation here: when it is revoked, what is resolved is committed, and everything else that is
held of it is forgotten; when it is lost, all is forgotten. No outcome of a message of an earlier generation reaches a
commit (`headgate.brokers.clients.kafka_group`). A new connection is a new generation of all. The runner has a stable
name in its group (static membership), so whoever starts after a death gets the same partitions at once, and whoever was
thought dead may commit nothing more.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any, Final

from headgate.brokers.broker_errors import BrokerSourceMissing
from headgate.brokers.broker_trigger import BrokerTrigger, arguments_of, check_choice, check_name
from headgate.brokers.clients.bodies import BODIES, decoded_body, event_of, readable
from headgate.brokers.clients.kafka_client import (
    TROUBLE,
    KafkaAdmin,
    KafkaError,
    KafkaLost,
    Message,
    Producer,
    TopicFound,
    client_config,
    failure_of,
    translated,
)
from headgate.brokers.clients.kafka_group import GroupMember, Headers, Reading, headers_of, place_of
from headgate.brokers.threaded import (
    MESSAGE_BYTES_MAX,
    Received,
    ThreadedProducer,
    oversized,
)
from headgate.triggers.shared_stream import LanePosition, Undecodable

__all__ = ["KafkaProducer", "KafkaTrigger"]

# More than of other brokers: only bytes and the memory bound it, as Kafka counts no deliveries, and a round trip to the
# database of 50 ms with 1,000 messages in flight would be 20,000 a second at most.
IN_FLIGHT_MAX: Final = 10_000
NAME_CHARS_MAX: Final = 249  # of a topic, by Kafka's own rule
DELIVER_S: Final = 10.0  # for the report that a rejected message has arrived in its place
PLACE_BYTES_MAX: Final = 100 * 1024 * 1024  # of a rejected message: the broker says how long one may be


class KafkaProducer(ThreadedProducer):
    """Reads one topic for one group; the arguments are those of `KafkaTrigger`."""

    trouble = TROUBLE
    handles_survive = False  # an offset may be committed in the generation only in which it was received
    acknowledges_each = False

    def __init__(
        self,
        connection: str,
        topic: str,
        group: str,
        *,
        start: str = "earliest",
        on_offset_lost: str = "error",
        body: str = "text",
        dead_letter: str | None = None,
        instance: str = "headgate",
        in_flight_max: int = IN_FLIGHT_MAX,
        **limits: Any,
    ) -> None:
        super().__init__(connection, in_flight_max=in_flight_max, **limits)
        for what, text in (("topic", topic), ("group", group), ("instance", instance)):
            check_name(what, text, NAME_CHARS_MAX)
        if topic.startswith("^"):
            raise ValueError(f"topic must be the name of one topic, and no pattern, not {topic!r}")
        check_choice("start", start, ("earliest", "latest"))
        check_choice("on_offset_lost", on_offset_lost, ("error", "earliest", "latest"))
        check_choice("body", body, BODIES)
        if dead_letter is not None:
            check_name("dead_letter", dead_letter, NAME_CHARS_MAX)
            if dead_letter == topic:
                raise ValueError("dead_letter must be another topic than the one that is read")
        self.keeps_rejected = dead_letter is not None
        self._topic = topic
        self._group = group
        self._start = start
        self._on_offset_lost = on_offset_lost
        self._body = body
        self._dead_letter = dead_letter
        name = hashlib.blake2b(repr((connection, topic, group)).encode(), digest_size=8).hexdigest()
        self._instance = f"{instance}-{name}"
        self._config: dict[str, Any] = {}
        self._member: GroupMember | None = None
        self._publisher: Producer | None = None
        self._found: TopicFound | None = None
        self._place = ""  # what tells offsets of the topic that was found from those of any other
        # Messages that may be published to the place of rejected ones, with their headers.
        self._kept: dict[tuple[int, int], tuple[Message, Headers]] = {}
        self._first_lag: int | None = None

    @property
    def name(self) -> str:
        """The topic and the group."""
        return f"kafka topic {self._topic}, group {self._group}"

    # --- connecting -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at topic, group and place, without joining the group."""
        assert self.connection is not None
        self._config = client_config(self.connection)
        with contextlib.closing(KafkaAdmin(self._config, self.name)) as admin:
            self._check(admin)
            for danger in admin.dangers(self._topic):
                self.warn(danger)
            assert self._found is not None
            self._first_lag = admin.lag(self._topic, self._group, self._found.partitions)

    def connect(self) -> None:
        """Look at the topic, and join the group; partitions are assigned while the client is polled."""
        self._kept.clear()
        self.look()
        self._member = GroupMember(
            self._config,
            Reading(
                self.name, self._topic, self._group, self._instance, self._place, self._start, self._on_offset_lost
            ),
            progress=self.lane_progress,
            settle=self.settle,
            forget=self._give_up,
            check_topic=self._check_again,
        )

    def positions(self) -> list[LanePosition]:
        """Ask for the offsets of all partitions, without joining the group."""
        assert self.connection is not None
        with contextlib.closing(KafkaAdmin(client_config(self.connection), self.name)) as admin:
            found = admin.offsets(self._topic, self._group, admin.topic(self._topic).partitions)
        return [
            LanePosition(
                str(number),
                end=(offsets.end,),
                first=(offsets.first,),
                committed=(offsets.committed,) if offsets.committed >= 0 else (),
                lag=offsets.lag,
                missing=max(0, offsets.first - offsets.committed) if offsets.committed >= 0 else 0,
            )
            for number, offsets in sorted(found.items())
        ]

    def disconnect(self) -> None:
        """Drop the clients."""
        member, self._member = self._member, None
        self._publisher = None
        if member is not None:
            member.close()

    def _check(self, admin: KafkaAdmin) -> None:
        found = admin.topic(self._topic)
        if self._found is not None and (found.cluster, found.id) != (self._found.cluster, self._found.id):
            # What is stored is of another topic, whose offsets begin anew.
            raise BrokerSourceMissing(
                f"{self.name}: the topic that was read does not exist any more; there is another of its name"
            )
        self._found = found
        place = f"{found.cluster}:{found.id or self._topic}"
        too_long = len(place) > NAME_CHARS_MAX
        self._place = hashlib.blake2b(place.encode(), digest_size=16).hexdigest() if too_long else place
        if self._dead_letter is not None:
            admin.topic(self._dead_letter, f"{self.name}: dead_letter {self._dead_letter}")

    def _check_again(self) -> None:
        with contextlib.closing(KafkaAdmin(self._config, self.name)) as admin:
            self._check(admin)

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        """Return messages of our partitions."""
        return [self._received(message) for message in self._joined.receive(count_max, wait_s)]

    def idle(self) -> None:
        """Stay in the group also while no message may be taken."""
        self._joined.idle()

    def _give_up(self, partitions: set[int]) -> None:
        self.forget_lanes(partitions)
        for ref in [ref for ref in self._kept if ref[0] in partitions]:
            del self._kept[ref]

    def _received(self, message: Message) -> Received:
        ref = number, offset = place_of(message)
        headers = headers_of(message)
        if self._dead_letter is not None:
            self._kept[ref] = message, headers or []
        _, timestamp_ms = message.timestamp()
        # The timestamp tells messages apart if the topic was made anew on a cluster without ids of topics.
        key = f"kafka:{self._place}:{number}:{offset}:{timestamp_ms}"
        size = len(message.value() or b"") + len(message.key() or b"")
        size += sum(len(name) + len(value or b"") for name, value in headers or ())
        return Received(ref, self._raw_event(message, headers, size), key, number, size)

    def _raw_event(self, message: Message, headers: Headers | None, size: int) -> Any:
        body, (kind, timestamp_ms) = message.value(), message.timestamp()
        if (too_long := oversized(size, body or b"", self.limits.message_bytes_max)) is not None:
            return too_long
        rest = {
            "key": _text(message.key()),
            "topic": self._topic,
            "partition": message.partition(),
            "offset": message.offset(),
            "timestamp": timestamp_ms / 1000 if kind else None,
            "headers": {name: _text(value) for name, value in headers or ()},
        }
        if headers is None:
            return Undecodable("a header has a name that is not UTF-8: they cannot be read", {"body": body, **rest})
        return event_of(None if body is None else decoded_body(body, self._body), rest)

    # --- outcomes -------------------------------------------------------------------------------------------------

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Commit behind the last of each partition: what is before is resolved, too, as partitions are lanes."""
        offsets: dict[int, int] = {}
        for message in messages:
            number, offset = message.ref
            offsets[number] = offset + 1
        self._joined.commit(offsets)
        for message in messages:
            self._kept.pop(message.ref, None)

    def reject(self, messages: Sequence[Received]) -> None:
        """Publish messages to the topic of rejected ones, and commit when the cluster has reported each as written."""
        assert self._dead_letter is not None
        where = f"{self.name}: dead_letter {self._dead_letter}"
        reports: list[KafkaError | None] = []
        if self._publisher is None:
            config = {**self._config, "acks": "all", "message.timeout.ms": int(DELIVER_S * 1_000)}
            self._publisher = Producer({**config, "message.max.bytes": PLACE_BYTES_MAX, "linger.ms": 5})
        with translated(where):
            for message in messages:
                kept, headers = self._kept[message.ref]
                origin = {"topic": self._topic, "partition": message.ref[0], "offset": message.ref[1]}
                more = [(f"headgate-{name}", str(value).encode()) for name, value in origin.items()]
                self._publisher.produce(
                    self._dead_letter,
                    kept.value(),
                    kept.key(),
                    headers=[*headers, *more],
                    on_delivery=lambda error, _: reports.append(error),
                )
            self._publisher.flush(DELIVER_S + 1)
        for error in reports:
            if error is not None:
                raise failure_of(error, where)
        if len(reports) < len(messages):
            raise KafkaLost(f"{len(messages) - len(reports)} messages have no report from {self._dead_letter}")
        self.acknowledge(messages)

    def lag(self) -> int | None:
        """Return the messages behind the committed offsets of our partitions; before we have joined, of all."""
        return self._first_lag if self._member is None else self._member.lag()

    @property
    def _joined(self) -> GroupMember:
        assert self._member is not None
        return self._member


def _text(value: bytes | str | None) -> str | bytes | None:
    """Return a key or a header as a text if it is one."""
    return readable(value) if isinstance(value, bytes) else value


class KafkaTrigger(BrokerTrigger):
    """Fires an event for every message of a Kafka topic; triggers of one topic and group share a reader.

    ``connection`` names a stored connection (see `headgate.brokers.clients.kafka_client`); the topic must exist. The
    raw event is ``{"body": ..., "key": str, "topic": str, "partition": int, "offset": int, "timestamp": float,
    "headers": {str: str}}``, the time in seconds since 1970; a key or a header that is not UTF-8 is bytes, and None if
    there is none, as is the body of a tombstone. ``body``: ``"text"`` (UTF-8), ``"json"`` (parsed) or ``"bytes"``.

    ``start``: where a group begins that has committed nothing, ``"earliest"`` or ``"latest"``. ``on_offset_lost``: what
    to do if the messages at the committed offset are not there any more: ``"error"`` ends the stream, ``"earliest"``
    and ``"latest"`` read on there. ``dead_letter``: a topic that gets the messages which subscribers reject; without it
    they become dead letters of headgate. ``instance``: the name of this reader in its group; two programs that read for
    one group need different ones. The limits are those of `headgate.brokers.threaded.ThreadedProducer`. Raises
    ValueError or TypeError for arguments that cannot be used.

    To select or transform messages, subclass it and override ``filter_shared_stream``.
    """

    producer = KafkaProducer
    scheme = "kafka"
    place = ("connection", "topic", "group")

    def __init__(
        self,
        connection: str,
        topic: str,
        group: str,
        *,
        start: str = "earliest",
        on_offset_lost: str = "error",
        body: str = "text",
        dead_letter: str | None = None,
        instance: str = "headgate",
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(**arguments_of(locals()))
