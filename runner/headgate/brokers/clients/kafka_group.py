"""A member of a consumer group: the partitions of one topic that are its own, their messages, and their commits.

Everything runs in the thread that calls it, the client's callbacks too: they run while the client is polled. A
partition is ours for one *generation*, from its assignment until it is revoked or lost, and what is read in one
generation is never committed in a later one: the producer is told to forget it, and until then `GroupMember.commit`
passes it over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import structlog

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.kafka_client import (
    OFFSET_BEGINNING,
    BackgroundErrors,
    Consumer,
    KafkaError,
    KafkaLost,
    Message,
    TopicPartition,
    failure_of,
    translated,
)
from headgate.brokers.progress import Progress

COMMIT_S: Final = 2.0  # for the answer to a commit: as `headgate.brokers.broker_thread.SETTLE_S`
COMMIT_LOOK_S: Final = 0.001  # between two looks for it
ANSWER_S: Final = 10.0  # for the offsets of partitions that are assigned
POLL_EVERY_S: Final = 2.0  # while nothing may be received: far below max.poll.interval.ms
MARK: Final = "headgate "  # of our commits, before the time of each
WAITING_MAX: Final = 1_000  # messages that arrive while a commit is waited for; then partitions are paused
_LOST_OFFSET: Final = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": False,
    "allow.auto.create.topics": False,
    "queued.min.messages": 10_000,
    "queued.max.messages.kbytes": 16_384,
    "fetch.queue.backoff.ms": 20,
    "topic.metadata.refresh.interval.ms": 10_000,
}

_log = structlog.get_logger("headgate.brokers.kafka")


class Reading(NamedTuple):
    """What a member reads, and how. ``name`` is that of logs and errors."""

    name: str
    topic: str
    group: str
    instance: str  # by which the group knows this member again
    cursor: str  # what the offsets are of: the cluster and the id of the topic
    start: str  # "earliest" or "latest": where a group begins that has committed nothing
    on_offset_lost: str  # "error", "earliest" or "latest"


class _Committed(NamedTuple):
    """The answer to a commit."""

    error: KafkaError | None
    partitions: Sequence[TopicPartition]


class _Partition:
    """A partition that is ours. ``expected``: the lowest offset that may come next; negative if nothing is read."""

    __slots__ = ("committed", "expected")

    def __init__(self, committed: int) -> None:
        self.committed, self.expected = max(0, committed), committed


class GroupMember:
    """Joins a group, and reads the partitions that it gives; `close` it.

    ``settle`` has what is resolved by now committed, by `commit`, before partitions are given away; ``forget`` is told
    the partitions of which everything that was handed out is to be forgotten; ``check_topic`` raises if the topic is
    another one than before. Methods raise what `failure_of` says.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        reading: Reading,
        *,
        progress: Progress,
        settle: Callable[[], None],
        forget: Callable[[set[int]], None],
        check_topic: Callable[[], None],
    ) -> None:
        self._reading = reading
        self._progress = progress
        self._settle = settle
        self._forget = forget
        self._check_topic = check_topic
        self._errors = BackgroundErrors(reading.name)
        self._is_cooperative = "cooperative" in config.get("partition.assignment.strategy", "")
        self._owned: dict[int, _Partition] = {}
        self._paused: set[int] = set()
        self._gone: set[int] = set()  # given up, and not forgotten yet
        self._waiting: deque[Message] = deque()
        self._answer: _Committed | None = None
        self._is_committing = self._is_called_back = False
        self._failure: Exception | None = None  # of a callback
        self._polled_at = 0.0
        own = {
            "group.id": reading.group,
            "group.instance.id": reading.instance,
            "error_cb": self._errors.note,
            "on_commit": self._note_committed,
        }
        with translated(reading.name):
            self._consumer: Consumer | None = Consumer({**_DEFAULTS, **config, **own})
            self._client.subscribe(
                [reading.topic], on_assign=self._note_assigned, on_revoke=self._note_revoked, on_lost=self._note_lost
            )

    def close(self) -> None:
        """Drop the client. It does not leave its group, which would wait for brokers that may be down.

        With its name in the group, its partitions are those of whoever comes next with that name, and of the other
        members after ``session.timeout.ms``. Even dropping it may take as long, so a thread does nothing else.
        """
        last: list[Consumer | None] = [self._consumer]
        self._consumer = None
        threading.Thread(target=last.clear, name="headgate kafka drops a client", daemon=True).start()

    def receive(self, count_max: int, wait_s: float) -> list[Message]:
        """Return messages of our partitions."""
        if self._paused:
            with translated(self._reading.name):
                self._client.resume([self._place(number) for number in self._paused])
            self._paused.clear()
        if not self._waiting:
            self._serve(wait_s)
        if self._waiting and (more := count_max - len(self._waiting)) > 0:
            with translated(self._reading.name):
                messages = self._client.consume(more, 0.0)
            self._take(messages)
        self._forget_gone()
        return [self._waiting.popleft() for _ in range(min(count_max, len(self._waiting)))]

    def idle(self) -> None:
        """Poll also while no message may be taken, or the group takes us for dead; partitions are paused then."""
        if time.monotonic() - self._polled_at >= POLL_EVERY_S:
            self._pause()
            self._serve(0.0)
            self._forget_gone()

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit the next offset of each partition, as far as it is ours; return when the cluster has answered.

        Without an answer in time it raises, because a client whose brokers are down waits for ever by itself, and
        commits when they are back.
        """
        ours = {at: offset for at, offset in offsets.items() if at in self._owned and at not in self._gone}
        if not ours:
            return
        for number, offset in ours.items():
            self._progress.note_asked(str(number), (offset,))
        places = [self._place(number, offset) for number, offset in ours.items()]
        with translated(self._reading.name):
            if self._is_called_back:  # it must not be polled here, and the cluster has answered just now
                self._answer = _Committed(None, self._client.commit(offsets=places, asynchronous=False) or ())
            else:
                self._answer = None
                self._client.commit(offsets=places, asynchronous=True)
                self._wait_for_commit()
        assert self._answer is not None
        for error in (self._answer.error, *(place.error for place in self._answer.partitions)):
            if error is not None:
                failure = failure_of(error, self._reading.name)
                # Of a topic that is gone: what is there now is looked at for a new connection.
                raise KafkaLost(str(failure)) if isinstance(failure, BrokerMisconfigured) else failure
        for number, offset in ours.items():
            if (partition := self._owned.get(number)) is not None:
                partition.committed = offset
                self._progress.note_advanced(str(number), (offset,))

    def lag(self) -> int | None:
        """Return the messages behind the committed offsets, as far as the client has seen the ends of partitions."""
        lags = []
        for number, partition in self._owned.items():
            _, end = self._client.get_watermark_offsets(self._place(number), cached=True)
            if end >= 0:
                lags.append(max(0, end - partition.committed))
        return sum(lags) if lags else None

    # --- callbacks of the client ------------------------------------------------------------------------------------

    def _note_assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        with self._called_back(), translated(self._reading.name):
            committed = self._committed(consumer, partitions)
            first = self._first_offsets(consumer, [place.partition for place in committed if place.offset < 0])
            for place in committed:
                self._begin(place, first.get(place.partition, place.offset))
                place.offset = first.get(place.partition, place.offset)
                self._owned[place.partition] = _Partition(place.offset)
            if self._is_cooperative:
                consumer.incremental_assign(committed)
            else:
                consumer.assign(committed)
            consumer.resume(committed)  # a partition that was paused when it was taken away is so still
            numbers = sorted(place.partition for place in committed)
            _log.info("partitions are assigned", stream=self._reading.name, partitions=numbers)

    def _begin(self, place: TopicPartition, first: int) -> None:
        """Note what is committed of a partition that is ours from now on, and who has committed it.

        ``first`` is where we begin. If nothing was committed and it is the end, what is before it is passed over.
        """
        at = committed_at(place.metadata)
        self._progress.begin(
            str(place.partition),
            (first,) if first >= 0 else (),
            is_ours=first < 0 or at is not None,
            committed_at=at,
            cursor=self._reading.cursor,
        )

    def _first_offsets(self, consumer: Consumer, partitions: Sequence[int]) -> dict[int, int]:
        """Return where to begin with partitions of which nothing is committed."""
        offsets = dict.fromkeys(partitions, OFFSET_BEGINNING)
        if not partitions or self._reading.start == "earliest":
            return offsets
        topic = consumer.list_topics(self._reading.topic, timeout=ANSWER_S).topics[self._reading.topic]
        everything = [self._place(number) for number in topic.partitions]
        if any(place.offset >= 0 for place in self._committed(consumer, everything)):
            return offsets  # the group has begun before: this partition is a new one
        for number in partitions:
            _, offsets[number] = consumer.get_watermark_offsets(self._place(number), timeout=ANSWER_S)
        # At once, or a reader that dies before its first message would begin later the next time.
        self._commit_now(consumer, [self._place(number, at) for number, at in offsets.items()])
        return offsets

    def _committed(self, consumer: Consumer, places: list[TopicPartition]) -> list[TopicPartition]:
        """Return places with their committed offsets, negative where there is none."""
        committed = consumer.committed(places, timeout=ANSWER_S)
        self._check_places(committed)  # or one that the cluster could not tell would look like none
        return committed

    def _commit_now(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._check_places(consumer.commit(offsets=places, asynchronous=False) or ())

    def _check_places(self, places: Sequence[TopicPartition]) -> None:
        for place in places:
            if place.error is not None:
                raise failure_of(place.error, self._reading.name)

    def _note_revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        with self._called_back():
            if not self._is_committing:
                self._settle()
        self._give_up(place.partition for place in partitions)

    def _note_lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(place.partition for place in partitions)

    def _note_committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        self._answer = _Committed(error, partitions)

    @contextlib.contextmanager
    def _called_back(self) -> Generator[None]:
        """Keep what a callback raises until the client returns."""
        self._is_called_back = True
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._is_called_back = False

    # --- inside -----------------------------------------------------------------------------------------------------

    def _give_up(self, partitions: Iterable[int]) -> None:
        """End the generation of partitions: nothing of them that is held now is committed any more."""
        gone = set(partitions)
        self._progress.give_up([str(number) for number in gone])
        for number in gone:
            self._owned.pop(number, None)
        self._paused -= gone
        self._gone |= gone
        self._waiting = deque(message for message in self._waiting if message.partition() not in gone)
        _log.info("partitions are given up", stream=self._reading.name, partitions=sorted(gone))

    def _forget_gone(self) -> None:
        """Have what was handed out in earlier generations forgotten; not while some of it is being committed."""
        if self._gone:
            self._forget(self._gone)
            self._gone.clear()

    def _serve(self, wait_s: float) -> None:
        """Poll once: callbacks run, and what has come is put to the messages that wait."""
        self._polled_at = time.monotonic()
        with translated(self._reading.name):
            message = self._client.poll(wait_s)
        self._take([] if message is None else [message])

    def _take(self, messages: Sequence[Message]) -> None:
        if self._failure is not None:
            raise self._failure
        self._errors.check()
        for message in messages:
            if (error := message.error()) is not None:
                self._note_error(error, message.partition())
                continue
            number, offset = place_of(message)
            partition = self._owned.get(number)
            if partition is None:
                continue  # it was fetched before the partition was taken away
            if offset < partition.expected:
                raise KafkaLost(f"offset {offset} of partition {number} came after {partition.expected - 1}")
            partition.expected = offset + 1
            self._waiting.append(message)

    def _note_error(self, error: KafkaError, partition: int | None) -> None:
        if error.code() in _LOST_OFFSET and partition in self._owned:
            self._find_place(error, partition)
            return
        failure = failure_of(error, self._reading.name)
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise KafkaLost(error.str())  # what is there now is looked at for a new connection
        raise failure

    def _find_place(self, error: KafkaError, number: int) -> None:
        """Go on, if we may, where the messages at our place are not there: retention or an election has taken them."""
        self._check_topic()
        expected, name = self._owned[number].expected, self._reading.name
        if expected < 0:  # nothing is read, so nothing can be lost: the cluster could not tell where it begins
            raise KafkaLost(f"the first offset of partition {number} is not known: {error.str()}")
        with translated(name):
            first, end = self._client.get_watermark_offsets(self._place(number), timeout=ANSWER_S)
        lost = f"offset {expected:,} of partition {number} is not there: it has {first:,} to {end:,}"
        if self._reading.on_offset_lost == "error":
            raise BrokerMisconfigured(
                f"{name}: {lost} ({error.str()}). Messages may be lost. on_offset_lost=earliest goes on with the first "
                f"that is there, latest with those to come"
            )
        # The cluster may have erred, and have our place: then nothing is passed over.
        begin = expected if first <= expected <= end else end
        if self._reading.on_offset_lost == "earliest":
            begin = first
        _log.error("messages are not there any more", stream=name, partition=number, lost=lost, goes_on_at=begin)
        self._progress.note_asked(str(number), (begin,))
        with translated(name):
            self._commit_now(self._client, [self._place(number, begin)])
        raise KafkaLost(lost)  # the client reads such a partition on in a new assignment only

    def _wait_for_commit(self) -> None:
        deadline = time.monotonic() + COMMIT_S
        self._is_committing = True
        try:
            while self._answer is None:
                if time.monotonic() > deadline:
                    raise KafkaLost(f"a commit has no answer within {COMMIT_S:g} s")
                if len(self._waiting) >= WAITING_MAX:
                    self._pause()
                self._serve(COMMIT_LOOK_S)
        finally:
            self._is_committing = False

    def _pause(self) -> None:
        if running := self._owned.keys() - self._paused:
            with translated(self._reading.name):
                self._client.pause([self._place(number) for number in running])
            self._paused |= running

    def _place(self, number: int, offset: int = -1001) -> TopicPartition:
        # With each commit goes a mark: whoever moves the group's offset leaves another one, or none.
        return TopicPartition(self._reading.topic, number, offset, metadata=f"{MARK}{time.time():.0f}")

    @property
    def _client(self) -> Consumer:
        assert self._consumer is not None, "it is closed"
        return self._consumer


def committed_at(metadata: str | None) -> float | None:
    """Return when headgate has made a commit (seconds since 1970), by its mark; None if it has not."""
    text = (metadata or "").removeprefix(MARK)
    return float(text) if text != metadata and text.isascii() and text.isdigit() else None


def place_of(message: Message) -> tuple[int, int]:
    """Return partition and offset of a message that is no error."""
    number, offset = message.partition(), message.offset()
    assert number is not None
    assert offset is not None
    return number, offset


Headers = list[tuple[str, str | bytes | None]]


def headers_of(message: Message) -> Headers | None:
    """Return the headers of a message, of which several may have one name; None if a name is not UTF-8.

    To be called once: after it has failed, the client has freed them, and a second call reads what is not there.
    """
    try:
        return list(cast("Headers", message.headers() or []))
    except (SystemError, UnicodeDecodeError):
        return None
