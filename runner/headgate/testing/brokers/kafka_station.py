"""A private broker that speaks Kafka's protocol, for conformance tests: noida, which keeps its data over SIGKILL."""

from __future__ import annotations

import importlib.util
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from headgate.brokers.clients.kafka_client import (
    Consumer,
    KafkaAdmin,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from headgate.brokers.kafka import KafkaTrigger
from headgate.testing.brokers.station import (
    CONNECTION,
    WITHIN_S,
    Refusal,
    ServerProcess,
    Station,
    free_port,
    wait_until,
)
from headgate.testing.brokers.tap import AckParser, Tap

SHORT_LIMIT_BYTES = 2_000  # `message_bytes_max` of the station's triggers
CALL_S: Final = 10.0  # of our own client
MARKS: Final = "headgate-marks"  # a group and a topic of nobody else
OFFSET_COMMIT: Final = 8  # the number of the request
FLEXIBLE: Final = 8  # its version from which on texts and lists have lengths of 7 bits a byte


def find_server() -> str | None:
    """Return the path of noida's program, which its wheel brings; None if it is not installed."""
    found = importlib.util.find_spec("noida_db")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).with_name("noida-db")
    return str(path) if os.access(path, os.X_OK) else None


class KafkaAckParser(AckParser):
    """Finds committed offsets in what a client sends, and has the client stay with the tap.

    A commit names the next offset: each message from the one before it on is acknowledged, as ``"partition 0 offset
    7"``. ``floors`` are the offsets committed so far by partition, of all connections. ``own`` and ``shown`` are the
    port of the broker, which it tells all clients, and that of the tap.
    """

    def __init__(self, floors: dict[int, int], own: int, shown: int) -> None:
        self._floors = floors
        self._asked = self._answered = b""
        host = b"127.0.0.1"
        self._own, self._shown = (host + struct.pack(">i", port) for port in (own, shown))

    def feed(self, data: bytes) -> list[str]:
        """Return the messages that are acknowledged by the requests which are complete with these bytes."""
        frames, self._asked = whole_frames(self._asked + data)
        found: list[str] = []
        for frame in frames:
            key, version = struct.unpack_from(">hh", frame, 4)
            if key == OFFSET_COMMIT:
                for number, offset in committed_in(frame[4:], version):
                    found += [f"partition {number} offset {at}" for at in range(self._floors.get(number, 0), offset)]
                    self._floors[number] = max(offset, self._floors.get(number, 0))
        return found

    def pass_answer(self, data: bytes) -> bytes:
        """Put the tap in the place of the broker, in answers that are complete."""
        frames, self._answered = whole_frames(self._answered + data)
        return b"".join(frames).replace(self._own, self._shown)


def whole_frames(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole frames with their lengths, and the rest."""
    frames, at = [], 0
    while len(data) >= at + 4:
        (size,) = struct.unpack_from(">i", data, at)
        if len(data) < at + 4 + size:
            break
        frames.append(data[at : at + 4 + size])
        at += 4 + size
    return frames, data[at:]


class _Fields:
    """Reads the fields of a request one after the other."""

    def __init__(self, data: bytes, at: int, *, is_flexible: bool) -> None:
        self._data = data
        self._at = at
        self._is_flexible = is_flexible

    def number(self, form: str) -> int:
        """Return an integer of the form of `struct`."""
        (value,) = struct.unpack_from(f">{form}", self._data, self._at)
        self._at += struct.calcsize(f">{form}")
        return int(value)

    def count(self) -> int:
        """Return the length of a list."""
        return self._varint() - 1 if self._is_flexible else self.number("i")

    def text(self) -> None:
        """Pass over a text."""
        size = self._varint() - 1 if self._is_flexible else self.number("h")
        self._at += max(0, size)

    def tags(self) -> None:
        """Pass over fields that only newer clients know."""
        if self._is_flexible:
            for _ in range(self._varint()):
                self._varint()
                size = self._varint()  # before the place is read, which it moves
                self._at += size

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7


def committed_in(request: bytes, version: int) -> list[tuple[int, int]]:
    """Return partitions and offsets of a request to commit, version 2 to 9; it has one topic."""
    is_flexible = version >= FLEXIBLE
    head = _Fields(request, 8, is_flexible=False)
    head.text()  # the client's name, which has a length of two bytes in every version
    fields = _Fields(request, head._at, is_flexible=is_flexible)
    fields.tags()
    fields.text()  # the group
    fields.number("i")  # its generation
    fields.text()  # the member
    if version >= 7:
        fields.text()  # its stable name
    if version < 5:
        fields.number("q")  # retention
    found = []
    for _ in range(fields.count()):
        fields.text()
        for _ in range(fields.count()):
            found.append((fields.number("i"), fields.number("q")))
            if version >= 6:
                fields.number("i")  # epoch of the leader
            fields.text()  # metadata
            fields.tags()
        fields.tags()
    return found


class NoidaServer(ServerProcess):
    """A server that writes all it has to one file each second: a kill waits until what it has confirmed is there.

    What members of a group commit meanwhile may be lost with the kill, and their messages come again.
    """

    def __init__(self, folder: Path, program: str, port: int, is_ready: Callable[[], object]) -> None:
        command = [program, "start", "--only", "kafka", "--kafka-port", str(port), "--data-dir", str(folder / "noida")]
        super().__init__(command, port=port, log_path=folder / "noida.log", is_ready=is_ready)
        self._file = folder / "noida" / "kafka.json"
        self._address = f"127.0.0.1:{port}"
        self._marks = 0

    def kill9(self) -> None:
        """End it with SIGKILL, when its file has what it had confirmed at the call."""
        self._marks += 1
        marker = Consumer({"bootstrap.servers": self._address, "group.id": MARKS, "log_level": 0})
        marker.commit(offsets=[TopicPartition(MARKS, 0, self._marks)], asynchronous=False)
        mark = f'[["{MARKS}","{MARKS}",0],{self._marks}]'
        wait_until(lambda: self._file.is_file() and mark in self._file.read_text(), "the broker writes its file")
        super().kill9()


class KafkaStation(Station):
    """A server with one topic of one partition, and one group. ``server_path``: `find_server`."""

    topic, group, rejected = "orders", "accounting", "rejected"
    partitions = 1

    def __init__(self, folder: Path, server_path: str) -> None:
        self._port = free_port()
        self.server = NoidaServer(folder, server_path, self._port, self._is_ready)
        self._floors: dict[int, int] = {}
        self._reader: Consumer | None = None
        self._writer: Producer | None = None  # tests publish in other threads, too
        self.server.start()
        self.create_topic(MARKS)
        self.tap = Tap(("127.0.0.1", self._port), self._parser)

    def _parser(self) -> KafkaAckParser:
        return KafkaAckParser(self._floors, self._port, self.tap.port)

    # --- our own client, past the tap ------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Host and port of the server itself."""
        return f"127.0.0.1:{self._port}"

    @property
    def _config(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.address, "log_level": 0, "reconnect.backoff.max.ms": 200}

    def admin(self) -> KafkaAdmin:
        """Return a client that asks about topics; close it."""
        return KafkaAdmin(self._config, "the station")

    def _is_ready(self) -> bool:
        try:
            self._own_reader.list_topics(timeout=1)
        except KafkaException:
            return False
        return True

    @property
    def _own_reader(self) -> Consumer:
        """A client that never joins the group, and sees its committed offsets."""
        if self._reader is None:
            self._reader = Consumer({**self._config, "group.id": self.group, "enable.auto.commit": False})
        return self._reader

    @property
    def uri(self) -> str:
        """The address of the tap. Topics are looked at each second, so that a deleted one is noticed soon."""
        return f"kafka://127.0.0.1:{self.tap.port}/?topic.metadata.refresh.interval.ms=1000"

    def trigger(self, **kwargs: Any) -> KafkaTrigger:
        """Return a trigger for the topic."""
        given: dict[str, Any] = {
            "topic": self.topic,
            "group": self.group,
            "message_bytes_max": SHORT_LIMIT_BYTES,
            **kwargs,
        }
        return KafkaTrigger(CONNECTION, **given)

    def create(self) -> None:
        """Make the topic."""
        self.create_topic(self.topic, self.partitions)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Make a topic."""
        admin = self.admin()
        try:
            admin.create_topic(name, partitions)
        finally:
            admin.close()

    def delete(self) -> None:
        """Delete the topic."""
        admin = self.admin()
        try:
            admin.delete_topic(self.topic)
        finally:
            admin.close()
        self._floors.clear()
        self._writer = None  # it counts the messages of a partition

    def publish(self, messages: Sequence[str]) -> None:
        """Publish a message for each name."""
        self.publish_bodies([message.encode() for message in messages])

    def publish_bodies(self, bodies: Sequence[bytes | None], partition: int = 0, **fields: Any) -> None:
        """Publish a message for each body to a partition; the client tries again, and the broker takes each once."""
        if self._writer is None:
            self._writer = Producer({**self._config, "enable.idempotence": True, "linger.ms": 1})
        failures: list[KafkaError] = []
        for body in bodies:
            self._writer.produce(
                self.topic,
                body,
                partition=partition,
                on_delivery=lambda error, _: failures.append(error) if error is not None else None,
                **fields,
            )
        left = self._writer.flush(WITHIN_S)
        assert not left, f"{left} messages are not published within {WITHIN_S:g} s"
        assert not failures, failures

    def _end(self, partition: int) -> int:
        deadline = time.monotonic() + WITHIN_S
        while True:
            try:
                return self._own_reader.get_watermark_offsets(TopicPartition(self.topic, partition), timeout=1)[1]
            except KafkaException:
                assert time.monotonic() < deadline, f"the broker does not answer within {WITHIN_S:g} s"

    def pending(self) -> list[str]:
        """Return all messages behind the committed offset of the group."""
        found: list[str] = []
        for number in range(self.partitions):
            found += self._pending_of(number)
        return found

    def _pending_of(self, number: int) -> list[str]:
        end = self._end(number)
        (place,) = self._own_reader.committed([TopicPartition(self.topic, number)], timeout=CALL_S)
        begin = max(0, place.offset)
        return self._read(self.topic, number, begin, end)

    def _read(self, topic: str, number: int, begin: int, end: int) -> list[str]:
        found: list[str] = []
        if begin >= end:
            return found
        reader = self._own_reader
        reader.assign([TopicPartition(topic, number, begin)])
        deadline = time.monotonic() + WITHIN_S
        while len(found) < end - begin:
            assert time.monotonic() < deadline, f"not read within {WITHIN_S:g} s: {topic} from {begin} to {end}"
            for message in reader.consume(end - begin - len(found), 0.2):
                if message.error() is None:
                    found.append((message.value() or b"").decode("latin-1"))
        reader.unassign()
        return found

    def spoilt(self) -> Mapping[str, Callable[[], object]]:
        """Return how to publish messages that no filter may get; what is too long ends a stream without a place."""
        return {"not UTF-8": partial(self.publish_bodies, [b"\xff\xfe"])}

    def with_place(self) -> Mapping[str, Any]:
        """Return a topic for rejected messages."""
        self.create_topic(self.rejected)
        return {"dead_letter": self.rejected}

    def in_place(self) -> list[str]:
        """Return the messages in it."""
        _, end = self._own_reader.get_watermark_offsets(TopicPartition(self.rejected, 0), timeout=CALL_S)
        return self._read(self.rejected, 0, 0, end)

    def refusals(self) -> Mapping[str, Refusal]:
        """Return mistakes; passwords and certificates need a broker that asks for them."""
        tap = f"127.0.0.1:{self.tap.port}"
        secret = "hunter22-of-the-station"
        return {
            "no such topic": Refusal(None, {"topic": "nothing"}, "it does not exist"),
            "no place": Refusal(None, {"dead_letter": "nowhere"}, "dead_letter nowhere: it does not exist"),
            "another scheme": Refusal(f"redis://me:{secret}@{tap}", {}, "must begin with kafka://", secret),
            "an unknown option": Refusal(
                f"kafka://me:{secret}@{tap}/?lingering=5", {}, "the option 'lingering'", secret
            ),
            "automatic commits": Refusal(f"{self.uri}&enable.auto.commit=true", {}, "commits an offset when"),
            "another reset": Refusal(f"{self.uri}&auto.offset.reset=latest", {}, "which headgate sets by itself"),
            "an option of TLS": Refusal(f"kafka://{tap}/?ssl_check_hostname=false", {}, "options of TLS"),
            "no file": Refusal(f"kafkas://{tap}/?ssl_ca_certs=/nowhere", {}, "ssl_ca_certs /nowhere cannot be read"),
            "another mechanism": Refusal(f"kafka://me:{secret}@{tap}/?sasl_mechanism=GSSAPI", {}, "'GSSAPI'", secret),
            "no login": Refusal(f"kafka://{tap}/?sasl_mechanism=PLAIN", {}, "and no login"),
            "a bad value": Refusal(f"kafka://{tap}/?session.timeout.ms=never", {}, "session.timeout.ms"),
        }
