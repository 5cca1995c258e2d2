"""NATS JetStream: a durable pull consumer, each message acknowledged once it is stored.

The promise, in the words of ``docs/brokers.md``: **every message that the consumer gets is stored once**, for each
watcher, whatever dies, as long as the server does not lose it. A message is known by its stream, the time at which that
was made, and its sequence number, which a server never changes. It is acknowledged after everything derived from it is
stored, and the server's answer to that is waited for.

A consumer lends a message for its ``ack_wait``, which is extended for what is held, however slow the database is. What
a runner had that died comes again when that time is over, after newer messages: JetStream keeps no order over
redelivery. A consumer that gives up after a number of deliveries (``max_deliver``) leaves a message undelivered without
a word, and is refused.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import structlog

from headgate.brokers.broker_errors import BrokerSourceMissing
from headgate.brokers.broker_trigger import BrokerTrigger, arguments_of, check_choice, check_name, check_names
from headgate.brokers.clients.bodies import BODIES, decoded_body, event_of
from headgate.brokers.clients.nats_client import TROUBLE, UNREADABLE, ApiError, NatsClient, NatsLost, sent_bytes
from headgate.brokers.threaded import (
    IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
    BrokerError,
    BrokerMisconfigured,
    PlaceRefuses,
    Received,
    ThreadedProducer,
    oversized,
)
from headgate.triggers.shared_stream import LanePosition, Undecodable

__all__ = ["JetStreamProducer", "JetStreamTrigger"]

NS: Final = 1_000_000_000
ACK_WAIT_S: Final = 30.0  # of a consumer that is made
PULL_EXPIRES_S: Final = 30.0  # the server keeps a request for messages for so long
PASSING: Final = ("leadership change", "server shutdown", "batch completed")  # of 409: the next request is answered
PULL_LATE_S: Final = 5.0  # beyond it a request is taken for lost
PULL_MAX: Final = 250  # messages of one request
HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # the client library publishes no other one
UNFIT: Final = 400  # of an answer to a message that its stream never takes: too long, or the stream is sealed
FORBIDDEN: Final = frozenset(" \t\r\n.*>/\\")  # in the names of streams and consumers

_log = structlog.get_logger("headgate.brokers.nats")


class JetStreamProducer(ThreadedProducer):
    """Reads one durable consumer; the arguments are those of `JetStreamTrigger`."""

    trouble = TROUBLE
    left_takes_room = True

    def __init__(
        self,
        connection: str,
        stream: str,
        durable: str,
        *,
        create: bool = False,
        subject: str | None = None,
        body: str = "text",
        lane: str = "message",
        dead_letter: str | None = None,
        accept_drop: bool = False,
        **limits: Any,
    ) -> None:
        super().__init__(connection, **limits)
        for what, text in (("stream", stream), ("durable", durable)):
            check_name(what, text)
            if FORBIDDEN & set(text):
                raise ValueError(f"{what} must have no dots, spaces, slashes, * and >, not {text!r}")
        check_names(subject=subject, dead_letter=dead_letter)
        if subject is not None and not create:
            raise ValueError("subject is that of a consumer that is made: give create=True, too")
        check_choice("body", body, BODIES)
        check_choice("lane", lane, ("message", "subject", "stream"))
        self.keeps_rejected = dead_letter is not None
        self._stream = stream
        self._durable = durable
        self._creates = create
        self._subject = subject
        self._body = body
        self._lane = lane
        self._dead_letter = dead_letter
        self._accepts_drop = accept_drop
        self._nats: NatsClient | None = None
        self._inbox = ""
        self._created = ""  # when the stream was made
        self._ack_wait_s = ACK_WAIT_S
        self._pull_max, self._pull_s = PULL_MAX, PULL_EXPIRES_S  # of one request, as the consumer takes it
        self._pending_max = self.limits.in_flight_max  # messages that it gives out before some are acknowledged
        self._asked = 0  # messages of the current request that have not come
        self._asked_until = 0.0
        self._waiting: deque[Received] = deque()
        self._replies: dict[int, str] = {}  # by sequence number: to what the newest delivery is acknowledged
        self._kept: dict[int, Any] = {}  # messages that may be published to the place of rejected ones
        self._lost_upto = 0  # sequence number up to which losses are reported

    @property
    def name(self) -> str:
        """The stream and the consumer."""
        return f"jetstream {self._stream}, consumer {self._durable}"

    @property
    def extend_s(self) -> float | None:
        """A third of the time for which the consumer lends."""
        return self.limits.extend_s or self._ack_wait_s / 3

    @property
    def room(self) -> int:
        """As many as may be in flight, or as the consumer gives out at once."""
        return min(self.limits.in_flight_max, self._pending_max)

    # --- connecting -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, and look whether stream and consumer lose messages."""
        assert self.connection is not None
        self._waiting.clear()
        self._asked = 0
        self._nats = client = NatsClient(self.connection, self.name)
        stream = self._ask(f"STREAM.INFO.{self._stream}")
        if self._creates:
            self._create()
        consumer = self._ask(f"CONSUMER.INFO.{self._stream}.{self._durable}")
        if self._created not in ("", stream["created"]):
            # What is held is of another stream, whose numbers begin anew.
            raise BrokerSourceMissing(f"{self.name}: the stream that was read does not exist any more")
        self._check_consumer(consumer["config"])
        self._check_stream(stream["config"])
        if self._dead_letter is not None:
            self._check_place(self._dead_letter)
        self._created = stream["created"]
        self._look_for_losses(stream, consumer)
        # Only who makes the consumer anew can move it, and then it was made at another time.
        cursor = f"{stream['created']} {consumer['created']}"
        given_at = _seconds(consumer["delivered"].get("last_active"))
        self.lane_progress.begin(
            "", _given_out(consumer), cursor=cursor, committed_at=given_at, deliveries=_deliveries(consumer)
        )
        self._inbox = client.subscribe()

    def positions(self) -> list[LanePosition]:
        """Ask for the numbers of the stream and the consumer, and change nothing."""
        assert self.connection is not None
        self._nats = NatsClient(self.connection, self.name)
        state = self._ask(f"STREAM.INFO.{self._stream}")["state"]
        consumer = self._ask(f"CONSUMER.INFO.{self._stream}.{self._durable}")
        (given,) = _given_out(consumer)
        return [
            LanePosition(
                end=(state["last_seq"],),
                first=(state["first_seq"],),
                committed=(given,),
                missing=_missing(state, given),
                lag=int(consumer["num_pending"]) + int(consumer["num_ack_pending"]),
                is_shared=True,  # nobody is told who else reads it
                deliveries=_deliveries(consumer),
            )
        ]

    def disconnect(self) -> None:
        """Close the client."""
        client, self._nats = self._nats, None
        if client is not None:
            client.close()

    def _ask(self, subject: str, question: object = None) -> dict[str, Any]:
        try:
            return self._client.ask(subject, question)
        except ApiError as error:
            if error.code == 404:
                raise BrokerSourceMissing(f"{self.name}: it does not exist (any more): {error}") from None
            if error.code in (400, 403):
                raise BrokerError(f"{self.name}: {error}") from None
            raise NatsLost(f"JetStream refuses {subject} for now: {error}") from None

    def _create(self) -> None:
        try:
            self._client.ask(f"CONSUMER.INFO.{self._stream}.{self._durable}")
            return
        except ApiError as error:
            if error.code != 404:
                raise NatsLost(str(error)) from None
        config: dict[str, Any] = {
            "durable_name": self._durable,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(ACK_WAIT_S * NS),
            "max_deliver": -1,
            "max_ack_pending": self.limits.in_flight_max,
            "replay_policy": "instant",
        }
        if self._subject is not None:
            config["filter_subject"] = self._subject
        question = {"stream_name": self._stream, "config": config}
        self._ask(f"CONSUMER.DURABLE.CREATE.{self._stream}.{self._durable}", question)
        _log.warning("the consumer is created, from the beginning of the stream", stream=self.name)

    def _check_consumer(self, config: dict[str, Any]) -> None:
        if config.get("deliver_subject"):
            raise BrokerMisconfigured(f"{self.name}: it is a push consumer, and must be a pull consumer")
        if (policy := config.get("ack_policy")) != "explicit":
            raise BrokerMisconfigured(
                f"{self.name}: with ack_policy {policy} messages are acknowledged before they are stored: it must be "
                f"explicit"
            )
        if config.get("headers_only"):
            raise BrokerMisconfigured(f"{self.name}: it delivers headers only, without bodies")
        if (max_deliver := config.get("max_deliver", -1)) > 0:
            self._drop(f"it gives up a message after {max_deliver} deliveries without a word (max_deliver)")
        if (threshold_ns := config.get("inactive_threshold", 0)) > 0:
            self._drop(f"it is deleted when nobody reads it for {threshold_ns / NS:g} s (inactive_threshold)")
        filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        if self._subject is not None and filters != [self._subject]:
            raise BrokerMisconfigured(
                f"{self.name}: the consumer is there already, of subject {', '.join(filters)}, not {self._subject}"
            )
        self._pull_max = min(PULL_MAX, config.get("max_batch") or PULL_MAX)
        self._pull_s = min(PULL_EXPIRES_S, (config.get("max_expires") or PULL_EXPIRES_S * NS) / NS)
        pending_max = config.get("max_ack_pending", -1)
        self._pending_max = pending_max if pending_max > 0 else self.limits.in_flight_max
        waits_ns = config.get("backoff") or [config.get("ack_wait") or ACK_WAIT_S * NS]
        self._ack_wait_s = min(waits_ns) / NS

    def _check_stream(self, config: dict[str, Any]) -> None:
        if config.get("storage") == "memory":
            self._drop("the stream is in memory: a restart of the server loses it")
        limits = {name: config.get(name, -1) for name in ("max_age", "max_msgs", "max_bytes", "max_msgs_per_subject")}
        given = [name for name, value in limits.items() if value > 0]
        if given and (config.get("discard", "old") == "old" or "max_age" in given):
            self.warn(f"the stream drops its oldest messages, also those that are not read ({', '.join(given)})")

    def _check_place(self, subject: str) -> None:
        found = self._ask("STREAM.NAMES", {"subject": subject}).get("streams") or []
        if not found:
            raise BrokerMisconfigured(f"{self.name}: no stream keeps the subject {subject} of dead_letter")
        if self._stream in found:
            raise BrokerMisconfigured(f"{self.name}: dead_letter {subject} is kept by the stream that is read")

    def _look_for_losses(self, stream: dict[str, Any], consumer: dict[str, Any]) -> None:
        """Report messages that the stream has dropped before the consumer got them."""
        if missing := _missing(stream["state"], max(_given_out(consumer)[0], self._lost_upto)):
            _log.error("messages were dropped before they were read", stream=self.name, at_most=missing)
            self._lost_upto = stream["state"]["first_seq"] - 1
            self.lane_progress.note_dropped("", (self._lost_upto,), missing)

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        """Return messages that have come; ask for more if none is asked for."""
        client = self._client
        if not self._waiting and (self._asked <= 0 or time.monotonic() > self._asked_until):
            self._asked = min(count_max, self._pull_max)
            self._asked_until = time.monotonic() + self._pull_s + PULL_LATE_S
            question = {"batch": self._asked, "expires": int(self._pull_s * NS)}
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._durable}"
            client.publish([(subject, msgspec.json.encode(question))], self._inbox)
        if not self._waiting:
            client.wait(wait_s)
        self._take()
        return [self._waiting.popleft() for _ in range(min(count_max, len(self._waiting)))]

    def idle(self) -> None:
        """Answer the server's pings also while no message is taken."""
        self._client.wait(0.0)
        self._take()

    def _take(self) -> None:
        arrived = self._client.arrived
        while arrived:
            message = arrived.popleft()
            if message.reply.startswith("$JS.ACK."):
                self._asked -= 1
                self._waiting.append(self._received(message))
                continue
            headers = message.headers or {}
            status, text = headers.get("Status", ""), headers.get("Description", "")
            if status == "409" and text.lower() not in PASSING:
                raise NatsLost(text)  # what is there now is looked at on a new connection
            if status in ("404", "408", "409", "503"):
                self._asked = 0

    def _received(self, message: Any) -> Received:
        parts = message.reply.split(".")
        at = 5 if len(parts) == 9 else 7  # newer servers name domain and account before the stream
        sequence, deliveries, timestamp_ns = (int(part) for part in parts[at : at + 3])
        self._replies[sequence] = message.reply
        if self._dead_letter is not None:
            self._kept[sequence] = message
        self.lane_progress.note("", (sequence,), deliveries)
        lane: Any = {"message": sequence, "subject": message.subject, "stream": None}[self._lane]
        # The time tells messages apart if the server has lost its newest ones, and counts on from before them.
        key = f"nats:{self._stream}:{self._created}:{sequence}:{timestamp_ns}"
        size = len(message.data) + sum(len(name) + len(value) for name, value in (message.headers or {}).items())
        return Received(sequence, self._raw_event(message, sequence, timestamp_ns, size), key, lane, size)

    def _raw_event(self, message: Any, sequence: int, timestamp_ns: int, size: int) -> Any:
        if (too_long := oversized(size, message.data, self.limits.message_bytes_max)) is not None:
            return too_long
        rest = {
            "subject": message.subject,
            "stream": self._stream,
            "sequence": sequence,
            "stored_at": timestamp_ns / NS,
            "headers": {name: value for name, value in (message.headers or {}).items() if name != UNREADABLE},
        }
        problem = (message.headers or {}).get(UNREADABLE)
        body = decoded_body(message.data, self._body) if problem is None else Undecodable(problem, message.data)
        return event_of(body, rest)

    # --- outcomes -------------------------------------------------------------------------------------------------

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Acknowledge messages, and wait for the server's answers.

        A delivery that the server has forgotten is never answered: it comes again, is recognised, and acknowledged.
        """
        requests = [(self._replies[message.ref], b"+ACK") for message in messages]
        answers = self._client.request_all(requests)
        if answers < len(requests):
            _log.warning("acknowledgements have no answer", stream=self.name, messages=len(requests) - answers)
        for message in messages:
            self._replies.pop(message.ref, None)
            self._kept.pop(message.ref, None)

    def reject(self, messages: Sequence[Received]) -> None:
        """Publish messages to the subject of rejected ones, and acknowledge each when its stream has it."""
        self.put_aside(messages, self._publish)

    def _publish(self, message: Received) -> None:
        assert self._dead_letter is not None
        kept = self._kept[message.ref]
        given = {name: value for name, value in (kept.headers or {}).items() if HEADER_NAME.fullmatch(name)}
        headers = {name: value for name, value in given.items() if not name.startswith("Nats-")}
        # Published again, it is recognised by that stream for as long as its duplicate window says.
        headers |= {"Nats-Msg-Id": str(message.key), "Headgate-Subject": kept.subject}
        refusal = f"dead_letter {self._dead_letter} takes no message"
        if (size := sent_bytes(kept.data, headers)) > (bytes_max := self._client.payload_bytes_max):
            # The server closes the connection of whoever sends that.
            raise BrokerMisconfigured(
                f"{self.name}: {refusal} of {size:,} bytes with its headers, as {message.key} would have: max_payload "
                f"of the server is {bytes_max:,}"
            )
        answer = msgspec.json.decode(self._client.request(self._dead_letter, kept.data, headers))
        if error := answer.get("error"):
            refusal += f": {error.get('description')}"
            if error.get("code") == UNFIT:
                raise BrokerMisconfigured(f"{self.name}: {refusal} (message {message.key})")
            raise PlaceRefuses(refusal)

    def extend(self, refs: Sequence[Any]) -> None:
        """Tell the server that these are worked on, and those that wait to be handed out."""
        waiting = [message.ref for message in self._waiting]
        self._client.publish([(self._replies[ref], b"+WPI") for ref in (*refs, *waiting) if ref in self._replies])

    def lag(self) -> int | None:
        """Return what the consumer has not delivered, and what is not acknowledged."""
        consumer = self._ask(f"CONSUMER.INFO.{self._stream}.{self._durable}")
        self._look_for_losses(self._ask(f"STREAM.INFO.{self._stream}"), consumer)
        return int(consumer["num_pending"]) + int(consumer["num_ack_pending"])

    @property
    def _client(self) -> NatsClient:
        assert self._nats is not None
        return self._nats


def _missing(state: dict[str, Any], got: int) -> int:
    """Return how many messages behind number ``got`` may have been dropped from a stream, at most."""
    first: int = state["first_seq"]
    return max(0, first - got - 1) if state["last_seq"] >= first and got else 0


def _given_out(consumer: dict[str, Any]) -> tuple[int]:
    """Return the number up to which a consumer has given out messages.

    A server before 2.10.14 may say one number less than before, though nobody has set the consumer back; its count of
    deliveries, which is told beside it, tells these apart.
    """
    return (int(consumer["delivered"]["stream_seq"]),)


def _deliveries(consumer: dict[str, Any]) -> int:
    """Return how many deliveries a consumer has counted; those of messages that came again as well."""
    return int(consumer["delivered"]["consumer_seq"])


def _seconds(moment: object) -> float | None:
    """Return a time of the server in seconds since 1970; None if it has none."""
    try:
        return datetime.fromisoformat(str(moment)).timestamp() if moment else None
    except ValueError:
        return None


class JetStreamTrigger(BrokerTrigger):
    """Fires an event for every message of a JetStream consumer; triggers of one consumer share a reader.

    ``connection`` names a stored connection (see `headgate.brokers.clients.nats_client`); ``stream`` must exist, and
    the pull consumer ``durable``, too, unless ``create`` is true: then it is made from the beginning of the stream, for
    ``subject`` alone if that is given. The raw event is ``{"body": ..., "subject": str, "stream": str, "sequence": int,
    "stored_at": float, "headers": {str: str}}``, with the time in seconds since 1970. ``body``: ``"text"`` (UTF-8),
    ``"json"`` (parsed) or ``"bytes"``. ``lane``: ``"message"`` keeps no order, ``"subject"`` and ``"stream"`` that in
    which the server delivers. ``dead_letter``: a subject, kept by another stream, that gets the messages that
    subscribers reject; without it they become dead letters of headgate. ``accept_drop``: read a consumer or a stream
    that drops messages. The limits are those of `headgate.brokers.threaded.ThreadedProducer`. Raises ValueError for
    arguments that cannot be used.

    To select or transform messages, subclass it and override ``filter_shared_stream``.
    """

    producer = JetStreamProducer
    scheme = "nats"
    place = ("connection", "stream", "durable")

    def __init__(
        self,
        connection: str,
        stream: str,
        durable: str,
        *,
        create: bool = False,
        subject: str | None = None,
        body: str = "text",
        lane: str = "message",
        dead_letter: str | None = None,
        accept_drop: bool = False,
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(**arguments_of(locals()))
