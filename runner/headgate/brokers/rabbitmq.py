"""RabbitMQ: a quorum or classic queue, each message acknowledged once it is stored.

The promise, in the words of ``docs/brokers.md``: **every message that the queue hands out is stored, and stored once
where publishers set message_id** (or where ``key`` names another thing that a message has for itself). AMQP gives a
message no name that lasts: after a crash of the runner or of the link, what was stored and whose acknowledgement did
not arrive comes again, and is recognised by its ``message_id`` and its content. A message without one may be stored
twice then. No message is stored later than it is acknowledged.

A queue itself may drop messages: a quorum queue after a number of deliveries (20 since RabbitMQ 4.0, unless it says
otherwise), any queue after a time to live. Whether it has a dead-letter exchange for these is looked up where AMQP
tells; where it does not, the user must name the exchange, or accept the loss.

Order: a queue hands out messages in order, but those that come again after a crash come between others. Failed messages
are handed out again from memory, so that they spend none of the deliveries that a queue counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, NoReturn

from headgate.brokers.broker_errors import BrokerSourceMissing
from headgate.brokers.broker_trigger import BrokerTrigger, arguments_of, check_choice, check_name, check_names
from headgate.brokers.clients.bodies import BODIES, decoded_body, event_of, field_of, message_key
from headgate.brokers.clients.rabbitmq_client import (
    REFUSED,
    TROUBLE,
    UNREAD,
    UNROUTABLE,
    BasicProperties,
    Deliver,
    RabbitChannel,
    RabbitConnection,
    RabbitPasses,
    open_connection,
    queue_arguments,
    translated,
)
from headgate.brokers.threaded import (
    IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
    BrokerMisconfigured,
    PlaceRefuses,
    Received,
    ThreadedProducer,
    oversized,
)
from headgate.triggers.shared_stream import Undecodable

__all__ = ["RabbitProducer", "RabbitTrigger"]

PREFETCH_MAX: Final = 65_535  # a number of 16 bits; 0 would be no limit
DELIVERIES_WARNED: Final = 5  # of one message by a queue that counts them
OWN_HEADERS: Final = frozenset({"x-delivery-count", "x-acquired-count"})  # which the queue changes at each delivery
ROUTING: Final = ("CC", "BCC")  # headers by which the broker routes to more queues
PROPERTIES: Final = ("message_id", "correlation_id", "content_type", "type", "app_id", "reply_to", "timestamp")


class _Message(NamedTuple):
    """What the client has delivered."""

    method: Deliver
    properties: BasicProperties
    body: bytes


class RabbitProducer(ThreadedProducer):
    """Reads one queue; the arguments are those of `RabbitTrigger`."""

    trouble = TROUBLE
    handles_survive = False  # a tag is one of its channel
    left_takes_room = True

    def __init__(
        self,
        connection: str,
        queue: str,
        *,
        key: str | None = "message_id",
        body: str = "text",
        lane: str = "message",
        dead_letter: str | None = None,
        dead_letter_exchange: str | None = None,
        accept_drop: bool = False,
        **limits: Any,
    ) -> None:
        super().__init__(connection, **limits)
        check_name("queue", queue)
        check_names(dead_letter=dead_letter, dead_letter_exchange=dead_letter_exchange)
        if dead_letter == queue:
            raise ValueError("dead_letter must be another queue than the one that is read")
        if key is not None:
            check_choice("key", key, ("message_id",), ("header:", "json:"))
        check_choice("body", body, BODIES)
        check_choice("lane", lane, ("message", "queue"), ("header:",))
        if self.limits.in_flight_max > PREFETCH_MAX:
            raise ValueError(f"in_flight_max must be at most {PREFETCH_MAX:,}, not {self.limits.in_flight_max:,}")
        self.keeps_rejected = dead_letter is not None
        self._queue = queue
        self._key = key
        self._body = body
        self._lane = lane
        self._dead_letter = dead_letter
        self._dead_letter_exchange = dead_letter_exchange
        self._accepts_drop = accept_drop
        self._connection: RabbitConnection | None = None
        self._channel: RabbitChannel | None = None
        self._publisher: RabbitChannel | None = None
        self._arrived: deque[_Message] = deque()
        self._unacknowledged: dict[int, _Message | None] = {}  # by tag, in order; the message if it may be published
        self._is_consuming = self._is_cancelled = False
        self._may_be_stream = True  # as far as it is known

    @property
    def name(self) -> str:
        """The queue."""
        return f"rabbitmq queue {self._queue}"

    # --- connecting -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, and look whether the queue may lose messages; none is taken, which would count as a delivery."""
        assert self.connection is not None
        self._arrived.clear()
        self._unacknowledged.clear()
        self._is_cancelled = False
        self._connection = connection = open_connection(self.connection, self.name)
        with translated(self.name):
            connection.channel().queue_declare(self._queue, passive=True)
        with translated(f"{self.name}: dead_letter_exchange {self._dead_letter_exchange}"):
            if self._dead_letter_exchange is not None:
                connection.channel().exchange_declare(self._dead_letter_exchange, passive=True)
        with translated(f"{self.name}: dead_letter {self._dead_letter}"):
            if self._dead_letter is not None:
                self._publisher = publisher = connection.channel()
                publisher.queue_declare(self._dead_letter, passive=True)
                publisher.confirm_delivery()
        with translated(self.name):
            known = queue_arguments(connection, self._queue)
            self._may_be_stream = known is None
            self._check_queue(known or {})
            self._channel = channel = connection.channel()
            channel.basic_qos(prefetch_count=self.limits.in_flight_max)
            channel.add_on_cancel_callback(self._note_cancelled)
        self._is_consuming = False

    def disconnect(self) -> None:
        """Close the client."""
        connection, self._connection = self._connection, None
        self._channel = self._publisher = None
        if connection is not None and connection.is_open:
            connection.close()

    def _check_queue(self, known: dict[str, Any]) -> None:
        """Refuse a queue that drops messages by itself, unless the user has said where they go, or that they may."""
        if known.get("x-queue-type") == "stream":
            self._refuse_stream()
        problems = []
        exchange = known.get("x-dead-letter-exchange")
        if self._dead_letter_exchange is not None and exchange not in (None, self._dead_letter_exchange):
            raise BrokerMisconfigured(
                f"{self.name}: its dead-letter exchange is {exchange}, not {self._dead_letter_exchange}"
            )
        has_exchange = exchange is not None or self._dead_letter_exchange is not None
        if exchange and not self._exists(exchange):  # "" is the default exchange
            problems.append(f"its dead-letter exchange {exchange} does not exist: what the queue drops is lost")
        if known.get("durable") is False:
            problems.append("it is not durable: a restart of the broker deletes it with all messages")
        if known.get("auto_delete"):
            problems.append("it is deleted with all messages when nobody reads it (auto-delete)")
        if (expires_ms := known.get("x-expires")) is not None:
            problems.append(f"it is deleted with all messages when nobody reads it for {expires_ms} ms (x-expires)")
        if (ttl_ms := known.get("x-message-ttl")) is not None and not has_exchange:
            problems.append(f"it drops messages after {ttl_ms} ms (x-message-ttl) and has no dead-letter exchange")
        elif not has_exchange:
            problems.append(
                "no dead-letter exchange is known, and a quorum queue drops what it has delivered too often (20 times "
                "since RabbitMQ 4.0): give the queue one, and if a policy does, name it by dead_letter_exchange"
            )
        for problem in problems:
            if not self._accepts_drop:
                raise BrokerMisconfigured(f"{self.name}: {problem}; accept_drop=true reads it all the same")
            self.warn(problem.partition(":")[0])

    def _exists(self, exchange: str) -> bool:
        try:
            with translated(self.name):
                self._open_connection.channel().exchange_declare(exchange, passive=True)
        except BrokerSourceMissing:
            return False
        return True

    def _refuse_stream(self) -> NoReturn:
        raise BrokerMisconfigured(f"{self.name}: it is a stream, which has no acknowledgements of single messages")

    def _note_cancelled(self, _: object) -> None:
        self._is_cancelled = True

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        """Return messages that the broker has sent, of which it sends no more than may be in flight."""
        if not self._is_consuming:
            with translated(self.name):
                self._open_channel.basic_consume(self._queue, self._note_arrived, auto_ack=False)
            self._is_consuming = True
        if not self._arrived:
            self._process(wait_s)
        count = min(count_max, len(self._arrived))
        return [self._received(self._arrived.popleft()) for _ in range(count)]

    def idle(self) -> None:
        """Answer heartbeats also while no message is taken."""
        self._process(0.0)

    def _process(self, wait_s: float) -> None:
        with translated(self.name):
            self._open_connection.process_data_events(wait_s)
            if self._is_cancelled:
                # The queue was deleted, or has moved: without a new consumer nothing would come any more.
                raise RabbitPasses("the broker has ended the consumer")
            if not self._open_channel.is_open:
                self._open_channel.basic_qos(prefetch_count=1)  # raises why it is closed
                raise RabbitPasses("the broker has closed the channel")

    def _note_arrived(self, _: object, method: Deliver, properties: BasicProperties, body: bytes) -> None:
        self._arrived.append(_Message(method, properties, body))

    def _received(self, message: _Message) -> Received:
        method, properties, body = message
        headers = {name: _plain(value) for name, value in (properties.headers or {}).items()}
        if "x-stream-offset" in headers and self._may_be_stream:  # a message that was moved here may have it, too
            self._refuse_stream()
        deliveries = headers.get("x-delivery-count")
        if isinstance(deliveries, int) and deliveries >= DELIVERIES_WARNED:
            self.warn(f"a message was delivered {DELIVERIES_WARNED} times: the queue may drop it, if it has a limit")
        tag = int(method.delivery_tag)
        self._unacknowledged[tag] = message if self._dead_letter is not None else None
        raw_event = self._raw_event(message, headers)
        lane: Any = tag if self._lane == "message" else None
        if self._lane.startswith("header:"):
            lane = repr(headers.get(self._lane[7:]))
        return Received(tag, raw_event, self._key_of(properties, headers, body, raw_event), lane, len(body))

    def _raw_event(self, message: _Message, headers: dict[str, Any]) -> Any:
        method, properties, body = message
        size = len(body) + sum(len(name) + len(str(value)) for name, value in headers.items())
        if (too_long := oversized(size, body, self.limits.message_bytes_max)) is not None:
            return too_long
        given = {name: _plain(getattr(properties, name)) for name in PROPERTIES}
        rest = {
            "queue": self._queue,
            "exchange": method.exchange,
            "routing_key": method.routing_key,
            "headers": {name: value for name, value in headers.items() if name not in OWN_HEADERS},
            **{name: value for name, value in given.items() if value is not None},
        }
        if UNREAD in headers:
            return Undecodable(UNREAD, {"body": body, **rest})
        return event_of(decoded_body(body, self._body), rest)

    def _key_of(self, properties: BasicProperties, headers: dict[str, Any], body: bytes, raw_event: Any) -> str | None:
        """Return what the publisher has named the message by; None if it has not."""
        if self._key is None:
            return None
        if self._key == "message_id":
            name = properties.message_id
        elif self._key.startswith("header:"):
            name = headers.get(self._key[7:])
        else:
            name = field_of(body, self._key[5:])
        return message_key(f"rabbitmq:{self._queue}", name, body)

    # --- outcomes -------------------------------------------------------------------------------------------------

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Acknowledge messages, as many at once as are unacknowledged without one between."""
        tags = {int(message.ref) for message in messages}
        with translated(self.name):
            channel, upto = self._open_channel, None
            for tag in self._unacknowledged:
                if tag not in tags:
                    break
                upto = tag
            if upto is not None:
                channel.basic_ack(upto, multiple=True)
            for tag in tags:
                if upto is None or tag > upto:
                    channel.basic_ack(tag)
            for tag in tags:
                del self._unacknowledged[tag]

    def reject(self, messages: Sequence[Received]) -> None:
        """Publish messages to the queue of rejected ones, and acknowledge each when the broker has confirmed that."""
        self.put_aside(messages, self._publish)

    def _publish(self, message: Received) -> None:
        assert self._publisher is not None
        assert self._dead_letter is not None
        kept = self._unacknowledged[message.ref]
        assert kept is not None
        # What would route the copy elsewhere as well, have the broker drop it in time, or refuse it if its user is
        # another one than ours.
        copy = kept.properties
        copy.expiration = copy.user_id = None
        for name in ROUTING:
            copy.rename_header(name, f"x-headgate-{name}")
        copy.add_header("x-headgate-queue", self._queue)
        copy.add_header("x-headgate-exchange", kept.method.exchange)
        copy.add_header("x-headgate-routing-key", kept.method.routing_key)
        copy.delivery_mode = 2
        with translated(f"{self.name}: dead_letter {self._dead_letter}"):
            try:
                self._publisher.basic_publish("", self._dead_letter, kept.body, copy, mandatory=True)
            except REFUSED as error:
                raise PlaceRefuses(f"the queue {self._dead_letter} of dead_letter is full: {error!r}") from None
            except UNROUTABLE:
                # A new connection looks whether it is there.
                raise RabbitPasses(f"no message comes to the queue {self._dead_letter} of dead_letter") from None

    def lag(self) -> int | None:
        """Return the messages of the queue that are ready, and those that we have not acknowledged."""
        self._process(0.0)  # what has arrived, and was not handed to us yet, is neither
        with translated(self.name):
            channel = self._open_connection.channel()
            ready = channel.queue_declare(self._queue, passive=True).method.message_count
            channel.close()
        return int(ready) + len(self._unacknowledged) + len(self._arrived)

    @property
    def _open_connection(self) -> RabbitConnection:
        assert self._connection is not None
        return self._connection

    @property
    def _open_channel(self) -> RabbitChannel:
        assert self._channel is not None
        return self._channel


class RabbitTrigger(BrokerTrigger):
    """Fires an event for every message of a RabbitMQ queue; triggers of one queue share a reader.

    ``connection`` names a stored connection (see `headgate.brokers.clients.rabbitmq_client`); ``queue`` must exist. The
    raw event is ``{"body": ..., "queue": str, "exchange": str, "routing_key": str, "headers": dict}`` with those of
    ``message_id``, ``correlation_id``, ``content_type``, ``type``, ``app_id``, ``reply_to`` and ``timestamp`` that the
    publisher has set. ``body``: what the event has of it: ``"text"`` (UTF-8), ``"json"`` (parsed) or ``"bytes"``.

    ``key``: by what a message that comes again is recognised, together with its content: ``"message_id"``,
    ``"header:NAME"`` or ``"json:FIELD"``; None: by nothing. ``lane``: ``"message"`` keeps no order, ``"queue"`` that in
    which the queue hands out, ``"header:NAME"`` that of messages with the same value. ``dead_letter``: a queue that
    gets the messages that subscribers reject; without it they become dead letters of headgate.
    ``dead_letter_exchange``: where the queue itself puts what it drops, if a policy says so; ``accept_drop``: read a
    queue that drops messages. The limits are those of `headgate.brokers.threaded.ThreadedProducer`; ``in_flight_max``
    is the prefetch, too. Raises ValueError for arguments that cannot be used.

    To select or transform messages, subclass it and override ``filter_shared_stream``.
    """

    producer = RabbitProducer
    scheme = "rabbitmq"
    place = ("connection", "queue")

    def __init__(
        self,
        connection: str,
        queue: str,
        *,
        key: str | None = "message_id",
        body: str = "text",
        lane: str = "message",
        dead_letter: str | None = None,
        dead_letter_exchange: str | None = None,
        accept_drop: bool = False,
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(**arguments_of(locals()))


def _plain(value: Any) -> Any:
    """Return a value of AMQP as one with a stored form."""
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if value is None or isinstance(value, bool | Decimal):
        return value
    if isinstance(value, int):
        return int(value)  # the client has a class of its own for long ones
    if isinstance(value, float | str | bytes):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value)
