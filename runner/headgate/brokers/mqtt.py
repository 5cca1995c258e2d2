"""MQTT 5: one subscription of a session that outlives its connections, each message acknowledged once it is stored.

The promise, in the words of ``docs/brokers.md``: **every message that the session gets is stored, and stored once where
publishers set a message id** (the user property ``message_id``, or what ``key`` names), **else at least once**. MQTT
gives a message no name that lasts: after a crash of the runner or of the link, what was stored and whose
acknowledgement did not arrive comes again, and is recognised by its id and its content. A message without one may be
stored twice then. No message is stored later than it is acknowledged.

The subscription has quality of service 1. A message that was published with 2 comes with 1: as a receiver, 2 would name
a message only as long as its exchange lasts, which tells nothing after a crash. A message that was published with 0
comes with 0: nobody acknowledges it, and it is lost with whoever has it. That is warned of.

Acknowledgements are sent in the order in which messages have come, as MQTT demands (4.6). So a message on which a
subscriber fails holds up the acknowledgements of those behind it, and not their handling.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import structlog

from headgate.brokers.broker_trigger import BrokerTrigger, arguments_of, check_choice, check_name, check_names
from headgate.brokers.clients.bodies import BODIES, decoded_body, event_of, field_of, joined, message_key
from headgate.brokers.clients.mqtt_client import (
    TROUBLE,
    MqttClient,
    MqttMessage,
    MqttPasses,
    MqttTakenOver,
    topic_matches_sub,
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
from headgate.triggers.shared_stream import LanePosition

__all__ = ["MqttProducer", "MqttTrigger"]

SUBSCRIPTION_IDENTIFIER_MAX: Final = 268_435_455  # a number of four bytes of seven bits
RECEIVE_MAX: Final = 65_535  # a number of 16 bits; 0 is none
SESSION_EXPIRY_S: Final = 86_400
SESSION_EXPIRY_S_MAX: Final = 0xFFFFFFFF  # it never expires
TAKEN_OVER_MAX: Final = 5  # by other clients, with no message read between
WILDCARDS: Final = frozenset("+#")
NO_SUBSCRIBERS: Final = 0x10  # the answer to a message that the broker has, and that nobody gets

_log = structlog.get_logger("headgate.brokers.mqtt")


class MqttProducer(ThreadedProducer):
    """Reads one session; the arguments are those of `MqttTrigger`."""

    trouble = TROUBLE
    handles_survive = False  # after a new connection the number of a packet may be that of another message
    left_takes_room = True

    def __init__(
        self,
        connection: str,
        topic: str,
        client_id: str,
        *,
        group: str | None = None,
        key: str | None = "property:message_id",
        body: str = "text",
        lane: str = "message",
        dead_letter: str | None = None,
        session_expiry_s: int = SESSION_EXPIRY_S,
        accept_drop: bool = False,
        **limits: Any,
    ) -> None:
        super().__init__(connection, **limits)
        check_name("topic", topic)
        check_name("client_id", client_id)
        check_names(group=group, dead_letter=dead_letter)
        if topic.startswith("$share/"):
            raise ValueError("topic must be one without $share/: give the name of the shared subscription as group")
        if group is not None and set("/+#") & set(group):
            raise ValueError(f"group must have no /, + and #, not {group!r}")
        if dead_letter is not None and WILDCARDS & set(dead_letter):
            raise ValueError(f"dead_letter must be a topic without + and #, not {dead_letter!r}")
        if dead_letter is not None and topic_matches_sub(topic, dead_letter):
            raise ValueError(f"dead_letter {dead_letter!r} is among the topics that are read")
        if key is not None:
            check_choice("key", key, ("correlation_data",), ("property:", "json:"))
        check_choice("body", body, BODIES)
        check_choice("lane", lane, ("message", "topic", "subscription"))
        if isinstance(session_expiry_s, bool) or not isinstance(session_expiry_s, int):
            raise TypeError(f"session_expiry_s must be an int, not {type(session_expiry_s).__name__}")
        if not 0 < session_expiry_s <= SESSION_EXPIRY_S_MAX:
            raise ValueError(
                f"session_expiry_s must be 1..{SESSION_EXPIRY_S_MAX:,} seconds, not {session_expiry_s:,}: the session "
                f"keeps messages while nobody is connected"
            )
        if self.limits.in_flight_max > RECEIVE_MAX:
            raise ValueError(f"in_flight_max must be at most {RECEIVE_MAX:,}, not {self.limits.in_flight_max:,}")
        self.keeps_rejected = dead_letter is not None
        self._topic = topic
        self._client_id = client_id
        self._group = group
        self._filter = topic if group is None else f"$share/{group}/{topic}"
        self._identifier = _identifier_of(self._filter)
        self._key = key
        self._body = body
        self._lane = lane
        self._dead_letter = dead_letter
        self._session_expiry_s = session_expiry_s
        self._accepts_drop = accept_drop
        self._mqtt: MqttClient | None = None
        self._has_connected = False
        self._taken_over = 0
        self._unacknowledged: dict[int, bool] = {}  # by packet id, in order of arrival: may it be acknowledged?
        self._kept: dict[int, MqttMessage] = {}  # messages that may be published to the place of rejected ones
        self._unnumbered = 0  # messages without a packet id so far

    @property
    def name(self) -> str:
        """The topics and the session."""
        return f"mqtt topic {self._topic}, client id {self._client_id}"

    # --- connecting -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to the session, which sends what is unacknowledged first, and look whether it may lose messages."""
        self._unacknowledged.clear()
        self._kept.clear()
        client = self._open(self._client_id, self._session_expiry_s, is_clean=False)
        if not client.has_session:
            self._note_new_session()
        self._subscribe(client, self._filter)
        self._has_connected = True

    def look(self) -> None:
        """Connect with a session of its own that ends with it: another one would end that of a running reader."""
        client = self._open(f"{self._client_id}-check", 0, is_clean=True)
        # Not as a member of the group, which would get messages.
        self._subscribe(client, self._topic)

    def positions(self) -> list[LanePosition]:
        """Return nothing: no question of MQTT says how far a session is."""
        return []

    def disconnect(self) -> None:
        """Close the client; the session stays."""
        client, self._mqtt = self._mqtt, None
        if client is not None:
            client.close()

    def _open(self, client_id: str, session_expiry_s: int, *, is_clean: bool) -> MqttClient:
        assert self.connection is not None
        self._mqtt = client = MqttClient(
            self.connection,
            self.name,
            client_id=client_id,
            session_expiry_s=session_expiry_s,
            receive_max=self.limits.in_flight_max,
            bytes_max=self.limits.in_flight_bytes_max,
            is_clean=is_clean,
        )
        granted = client.granted
        if (expiry_s := granted.get("SessionExpiryInterval", session_expiry_s)) == 0 != session_expiry_s:
            self._drop("the broker keeps no session: what comes while nobody is connected is lost")
        elif expiry_s < session_expiry_s:
            self.warn(f"the broker keeps the session for {expiry_s:,} s only, not for {session_expiry_s:,} s")
        if granted.get("MaximumQoS", 2) == 0:
            self._refuse_no_acknowledgements()
        if WILDCARDS & set(self._topic) and granted.get("WildcardSubscriptionAvailable", 1) == 0:
            raise BrokerMisconfigured(f"{self.name}: the broker takes no topics with + or #")
        if self._group is not None and granted.get("SharedSubscriptionAvailable", 1) == 0:
            raise BrokerMisconfigured(f"{self.name}: the broker has no shared subscriptions: give no group")
        return client

    def _subscribe(self, client: MqttClient, topic_filter: str) -> None:
        if client.subscribe(topic_filter, _identifier_of(topic_filter)) == 0:
            self._refuse_no_acknowledgements()

    def _refuse_no_acknowledgements(self) -> None:
        self._drop("the broker grants quality of service 0: messages have no acknowledgement, and are lost in a crash")

    def _note_new_session(self) -> None:
        if self._has_connected:
            self.warn("the broker has lost the session at least once, with the messages that were in it")
            _log.error("the broker has lost the session: messages that were in it are lost", stream=self.name)
        else:
            _log.warning("the session begins now: the broker has none of this client id", stream=self.name)

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, count_max: int, wait_s: float) -> list[Received]:
        """Return messages that the broker has sent; it sends no more than may be in flight, if it keeps to MQTT."""
        client = self._client
        self._wait(client, 0.0 if client.arrived else wait_s)
        count = min(count_max, len(client.arrived))
        if count:
            self._taken_over = 0
        return [self._received(client.next_arrived()) for _ in range(count)]

    def idle(self) -> None:
        """Send what keeps the connection alive also while no message is taken."""
        self._wait(self._client, 0.0)

    def _wait(self, client: MqttClient, wait_s: float) -> None:
        try:
            client.wait(wait_s)
        except MqttTakenOver as error:
            self._taken_over += 1
            self.warn("another client has connected with the same client id: each reader needs one of its own")
            if self._taken_over >= TAKEN_OVER_MAX:
                raise BrokerMisconfigured(
                    f"{self.name}: another client takes over the session again and again: each reader needs a client "
                    f"id of its own"
                ) from error
            raise

    def _received(self, message: MqttMessage) -> Received:
        topic = message.topic
        of = getattr(message.properties, "SubscriptionIdentifier", ())  # none if the broker has no such
        if not topic_matches_sub(self._topic, topic) or any(each != self._identifier for each in of):
            raise BrokerMisconfigured(
                f"{self.name}: a message of topic {topic} has come: the session has another subscription, perhaps of "
                f"an earlier topic or group; give another client_id, or have that subscription ended"
            )
        ref = int(message.mid)
        if message.qos == 0:
            self._unnumbered += 1
            ref = -self._unnumbered
            self.warn("messages are published with quality of service 0, which are lost in a crash")
        else:
            self._unacknowledged[ref] = False
        if self._dead_letter is not None:
            self._kept[ref] = message
        properties = _user_properties(message)
        raw_event = self._raw_event(message, properties)
        lane = {"message": ref, "topic": topic, "subscription": None}[self._lane]
        return Received(ref, raw_event, self._key_of(message, properties), lane, len(message.payload))

    def _raw_event(self, message: MqttMessage, properties: dict[str, str]) -> Any:
        body = bytes(message.payload)
        size = len(body) + sum(len(name) + len(value) for name, value in properties.items())
        if (too_long := oversized(size, body, self.limits.message_bytes_max)) is not None:
            return too_long
        # What the broker changes from delivery to delivery is left out (DUP, the rest of the time to live).
        given = vars(message.properties)
        more = {"content_type": "ContentType", "response_topic": "ResponseTopic", "correlation_data": "CorrelationData"}
        rest = {
            "topic": message.topic,
            "qos": int(message.qos),
            "retain": bool(message.retain),
            "properties": properties,
            **{name: given[each] for name, each in more.items() if each in given},
        }
        return event_of(decoded_body(body, self._body), rest)

    def _key_of(self, message: MqttMessage, properties: dict[str, str]) -> str | None:
        """Return what the publisher has named the message by; None if it has not."""
        name: object = None
        if self._key == "correlation_data":
            data = getattr(message.properties, "CorrelationData", None)
            name = None if not data else data.hex()
        elif self._key is not None and self._key.startswith("property:"):
            name = properties.get(self._key[9:])
        elif self._key is not None:
            name = field_of(bytes(message.payload), self._key[5:])
        return message_key(f"mqtt:{message.topic}", name, bytes(message.payload))

    # --- outcomes -------------------------------------------------------------------------------------------------

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Acknowledge messages, as soon as all that have come before them may be, too.

        One that has waited for another is acknowledged with that, whose advance shows that we still may (I10).
        """
        for message in messages:
            self._kept.pop(message.ref, None)
            if message.ref in self._unacknowledged:
                self._unacknowledged[message.ref] = True
        self._acknowledge_first()

    def leave(self, messages: Sequence[Received]) -> None:
        """Pass over messages that are never acknowledged on this connection: those behind them do not wait for them."""
        for message in messages:
            self._unacknowledged.pop(message.ref, None)
        self._acknowledge_first()

    def _acknowledge_first(self) -> None:
        acknowledged = []
        for packet_id, may_be in self._unacknowledged.items():
            if not may_be:
                break
            self._client.acknowledge(packet_id)
            acknowledged.append(packet_id)
        for packet_id in acknowledged:
            del self._unacknowledged[packet_id]

    def reject(self, messages: Sequence[Received]) -> None:
        """Publish messages to the topic of rejected ones, and acknowledge each when the broker has confirmed that."""
        self.put_aside(messages, self._publish)

    def _publish(self, message: Received) -> None:
        assert self._dead_letter is not None
        kept = self._kept[message.ref]
        given = getattr(kept.properties, "UserProperty", [])
        properties = [*given, ("headgate-topic", kept.topic)]
        content_type = getattr(kept.properties, "ContentType", None)
        try:
            code = self._client.publish(self._dead_letter, bytes(kept.payload), properties, content_type)
        except MqttPasses as error:
            raise PlaceRefuses(f"the topic {self._dead_letter} of dead_letter takes no message: {error}") from None
        if code == NO_SUBSCRIBERS:
            raise PlaceRefuses(f"nobody subscribes to the topic {self._dead_letter} of dead_letter")

    @property
    def _client(self) -> MqttClient:
        assert self._mqtt is not None
        return self._mqtt


def _identifier_of(topic_filter: str) -> int:
    """Return the identifier of a subscription: an earlier one of the session, with another filter, has another."""
    return zlib.crc32(topic_filter.encode()) % SUBSCRIPTION_IDENTIFIER_MAX + 1


class MqttTrigger(BrokerTrigger):
    """Fires an event for every message of an MQTT subscription; triggers of one session and topic share a reader.

    ``connection`` names a stored connection (see `headgate.brokers.clients.mqtt_client`); ``topic`` may have the
    wildcards ``+`` and ``#``; ``client_id`` names the session at the broker, and no other reader may have it. The raw
    event is ``{"body": ..., "topic": str, "qos": int, "retain": bool, "properties": {str: str}}`` with those of
    ``content_type``, ``response_topic`` and ``correlation_data`` that the publisher has set; the values of a user
    property that comes twice are joined by ``", "``. ``body``: ``"text"`` (UTF-8), ``"json"`` (parsed) or ``"bytes"``.

    ``key``: by what a message that comes again is recognised, together with its topic and content:
    ``"property:NAME"`` (a user property), ``"correlation_data"`` or ``"json:FIELD"``; None: by nothing. ``group``:
    of a shared subscription, whose members get a part of the messages each. ``lane``: ``"message"`` keeps no order,
    ``"topic"`` that of each topic, ``"subscription"`` that in which messages come. ``dead_letter``: a topic to which
    messages are published that subscribers reject; without it they become dead letters of headgate.
    ``session_expiry_s``: for how long the broker keeps the session while nobody is connected. ``accept_drop``: read
    from a broker that keeps no session or grants no acknowledgements. The limits are those of
    `headgate.brokers.threaded.ThreadedProducer`; ``in_flight_max`` is the receive maximum, too. Raises ValueError or
    TypeError for arguments that cannot be used.

    To select or transform messages, subclass it and override ``filter_shared_stream``.
    """

    producer = MqttProducer
    scheme = "mqtt"
    place = ("connection", "client_id", "topic")

    def __init__(
        self,
        connection: str,
        topic: str,
        client_id: str,
        *,
        group: str | None = None,
        key: str | None = "property:message_id",
        body: str = "text",
        lane: str = "message",
        dead_letter: str | None = None,
        session_expiry_s: int = SESSION_EXPIRY_S,
        accept_drop: bool = False,
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(**arguments_of(locals()))


def _user_properties(message: MqttMessage) -> dict[str, str]:
    return joined(getattr(message.properties, "UserProperty", ()))
