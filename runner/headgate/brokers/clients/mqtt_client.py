"""Connections to MQTT 5 from stored ones, driven by a thread: packets come and go only inside a call.

``mqtt://login:password@host:1883``, and ``mqtts://`` (port 8883) for TLS. In the query: ``keepalive`` (seconds), and
the options of `headgate.brokers.clients.connecting`. Several hosts are tried in order.

The client library acknowledges nothing by itself and makes no connection anew: the producer does both.
"""

from __future__ import annotations

import contextlib
import logging
import select
import ssl
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.clients.connecting import ask_for_refusal, certificate_error, check_connection, tls_context
from headgate.triggers.named_values import Connection

try:
    from paho.mqtt import MQTTException
    from paho.mqtt.client import Client, MQTTMessage, MQTTv5, topic_matches_sub
    from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode
    from paho.mqtt.subscribeoptions import SubscribeOptions
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("MQTT needs the client paho-mqtt: pip install 'headgate[mqtt]'", name="paho") from missing

__all__ = ["TROUBLE", "MqttClient", "MqttLost", "MqttMessage", "MqttPasses", "MqttTakenOver", "topic_matches_sub"]

MqttMessage = MQTTMessage

SCHEMES: Final = {"mqtt": False, "mqtts": True}
OPTIONS: Final = ("keepalive",)
PORT, TLS_PORT = 1883, 8883
KEEPALIVE_S: Final = 20
KEEPALIVE_S_MAX: Final = 3_600
CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 5.0  # for the answer to one packet
ERRORS_MAX: Final = 3  # of the client library, kept as the reason of an end
READ_MAX: Final = 250  # messages read at once
MAXIMUM_QOS: Final = 1
RETAINED_IF_NEW: Final = 1  # of a subscription: what is retained comes if the session does not have it yet

TROUBLE: Final = (OSError,)

_TAKEN_OVER: Final = 0x8E
# Reasons for which another attempt would not help (MQTT 5.0, 2.4).
_REFUSALS: Final = frozenset({0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C, 0x8F, 0x90, 0x9A, 0x9B, 0x9D, 0x9E, 0xA2})
_UNANSWERED: Final = "the broker does not answer"


class MqttLost(ConnectionError):
    """The connection is closed, or the broker refuses something for now; among `TROUBLE`."""


class MqttPasses(MqttLost):
    """The broker refuses one packet for now."""


class MqttTakenOver(MqttLost):
    """Another client has connected with the same client id, and has the session now."""


class _Errors(logging.Handler):
    """Keeps what the client library says of errors that it does not raise: why a certificate was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: deque[str] = deque(maxlen=ERRORS_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class _TlsSocket(ssl.SSLSocket):
    """Is closed if its handshake fails, which the client library leaves to the collection of garbage."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise


class MqttClient:
    """One connection with one session. Every method but `close` raises what `TROUBLE` names, or `BrokerMisconfigured`.

    ``client_id`` names the session, which the broker keeps for ``session_expiry_s`` seconds after the connection; with
    ``is_clean`` it begins with none. ``receive_max``: how many messages the broker may send that are not acknowledged.
    `arrived` has no more of them, whatever the broker sends, and no more than ``bytes_max`` bytes but for the last one:
    then nothing is read until some are taken.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        client_id: str,
        session_expiry_s: int,
        receive_max: int,
        bytes_max: int,
        is_clean: bool = False,
    ) -> None:
        self.name = name
        self.arrived: deque[MQTTMessage] = deque()
        self.has_session = False  # whether the broker knew the session
        self.granted: Mapping[str, Any] = {}  # what the broker has answered to the connection, by the names of MQTT
        self._arrived_max = receive_max
        self._bytes_max = bytes_max
        self._bytes = 0  # of `arrived`
        self._answers: dict[tuple[str, int], ReasonCode] = {}  # by kind and packet id
        self._reason: ReasonCode | None = None  # why the broker has ended the connection
        self._poll = select.poll()
        self._errors = _Errors()
        asked = _properties(PacketTypes.CONNECT)
        asked.SessionExpiryInterval = session_expiry_s
        asked.ReceiveMaximum = receive_max
        context, keepalive_s = _options(connection)
        failure: Exception | None = None
        for host, port in connection.hosts or (("localhost", None),):
            self._client = client = self._made(connection, client_id)
            if context is not None:
                context.sslsocket_class = _TlsSocket
                client.tls_set_context(context)
                client.tls_insecure_set(not context.check_hostname)  # this is about the name of the host alone
            address = host or "localhost", port or (PORT if context is None else TLS_PORT)
            try:
                self._reason = None
                client.connect(*address, keepalive_s, clean_start=is_clean, properties=asked)
                self._poll.register(self._socket, select.POLLIN)
                self._wait_answer("CONNACK", 0, f"refuses access to the client id {client_id}")
                return
            except TROUBLE as error:
                self.close()
                if (refusal := certificate_error(error)) is not None:
                    raise BrokerMisconfigured(f"{name}: {refusal}") from None
                if context is not None:
                    ask_for_refusal(connection, name, *address)
                failure = error
            except BaseException:
                self.close()
                raise
        assert failure is not None
        raise failure

    def _made(self, connection: Connection, client_id: str) -> Client:
        client = Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=MQTTv5, reconnect_on_failure=False, manual_ack=True
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        logger = logging.Logger("headgate.brokers.mqtt", logging.ERROR)  # of its own: nothing is written anywhere
        logger.addHandler(self._errors)
        client.enable_logger(logger)
        if connection.login:
            client.username_pw_set(connection.login, connection.password or None)

        def connected(_: Client, __: object, flags: Any, reason: ReasonCode, properties: Properties | None) -> None:
            self.has_session = bool(flags.session_present)
            self.granted = {} if properties is None else dict(vars(properties))
            self._answers["CONNACK", 0] = reason

        def subscribed(_: Client, __: object, mid: int, reasons: Sequence[ReasonCode], ___: object) -> None:
            self._answers["SUBACK", mid] = reasons[0]

        def published(_: Client, __: object, mid: int, reason: ReasonCode, ___: object) -> None:
            self._answers["PUBACK", mid] = reason

        def disconnected(_: Client, __: object, flags: Any, reason: ReasonCode, ___: object) -> None:
            if flags.is_disconnect_packet_from_server:
                self._reason = reason

        client.on_connect, client.on_subscribe, client.on_publish = connected, subscribed, published
        client.on_disconnect = disconnected

        def arrived(_: Client, __: object, message: MQTTMessage) -> None:
            self.arrived.append(message)
            self._bytes += len(message.payload)

        client.on_message = arrived
        return client

    # --- packets ------------------------------------------------------------------------------------

    def wait(self, wait_s: float) -> None:
        """Let packets come and go, until some have come, and for so long at most."""
        # While there is no room nothing is read, so that the broker's sends are held up, and what it has to say stays
        # in the buffers of the network. That is only so with brokers that do not keep to `receive_max`
        # (eclipse-mosquitto/mosquitto#2301). They lose the connection after two keepalives, and keep the session.
        if self._is_readable(wait_s, has_room=self._has_room):
            for _ in range(READ_MAX):
                before = len(self.arrived)
                if self._has_room:
                    self._read_packet()
                if len(self.arrived) == before:
                    break  # there was no message, or only a part of one
        self._check(self._client.loop_misc())

    @property
    def _has_room(self) -> bool:
        return len(self.arrived) < self._arrived_max and self._bytes < self._bytes_max

    def next_arrived(self) -> MQTTMessage:
        """Take the oldest message of `arrived`."""
        message = self.arrived.popleft()
        self._bytes -= len(message.payload)
        return message

    def _is_readable(self, wait_s: float, *, has_room: bool = True) -> bool:
        """Return whether something has come within this time; what waits to be sent is sent meanwhile."""
        sock = self._socket
        if has_room and hasattr(sock, "pending") and sock.pending():
            return True  # TLS has read it already
        self._poll.modify(
            sock, (select.POLLIN if has_room else 0) | (select.POLLOUT if self._client.want_write() else 0)
        )
        events = self._poll.poll(wait_s * 1000)
        flags = events[0][1] if events else 0
        if flags & select.POLLOUT:
            self._check(self._client.loop_write())
        return bool(flags & ~select.POLLOUT)

    def _read_packet(self) -> None:
        try:
            self._check(self._client.loop_read())
        except (MQTTException, LookupError, ValueError, struct.error) as error:
            raise MqttLost(f"the broker sends what is not MQTT 5: {error!r}") from error

    def acknowledge(self, packet_id: int) -> None:
        """Acknowledge a message of quality of service 1."""
        self._check(self._client.ack(packet_id, MAXIMUM_QOS))

    def subscribe(self, topic_filter: str, identifier: int) -> int:
        """Subscribe, for at least once; return the quality of service that the broker grants.

        Messages of the subscription have its identifier, if the broker has such.
        """
        # `retain` is that of the publisher, so that a message is the same whenever it comes: live or retained.
        options = SubscribeOptions(qos=MAXIMUM_QOS, retainAsPublished=True, retainHandling=RETAINED_IF_NEW)
        given = _properties(PacketTypes.SUBSCRIBE)
        if self.granted.get("SubscriptionIdentifierAvailable", 1):
            given.SubscriptionIdentifier = identifier
        try:
            code, packet_id = self._client.subscribe(topic_filter, options=options, properties=given)
        except ValueError as error:
            raise BrokerMisconfigured(
                f"{self.name}: the topic {topic_filter!r} cannot be subscribed: {error}"
            ) from None
        self._check(code)
        assert packet_id is not None
        return self._wait_answer("SUBACK", packet_id, f"refuses a subscription of {topic_filter}")

    def publish(
        self, topic: str, payload: bytes, properties: Sequence[tuple[str, str]], content_type: str | None
    ) -> int:
        """Publish a message; return the reason code with which the broker confirms that it has it."""
        given = _properties(PacketTypes.PUBLISH)
        if properties:
            given.UserProperty = list(properties)
        if content_type is not None:
            given.ContentType = content_type
        info = self._client.publish(topic, payload, qos=MAXIMUM_QOS, properties=given)
        self._check(info.rc)
        return self._wait_answer("PUBACK", info.mid, f"refuses a message to {topic}")

    def _wait_answer(self, kind: str, packet_id: int, refusal: str) -> int:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (reason := self._answers.pop((kind, packet_id), None)) is None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise MqttLost(_UNANSWERED)
            try:
                if self._is_readable(left_s):
                    self._read_packet()
            except MqttLost:
                if (kind, packet_id) not in self._answers:  # the library closes the connection behind a refusal
                    raise
        if reason.is_failure:
            self._refuse(reason, refusal)
            raise MqttPasses(f"the broker {refusal} for now: {reason}")
        return int(reason.value)

    # --- its end ------------------------------------------------------------------------------------

    @property
    def _socket(self) -> Any:
        sock = self._client.socket()
        if sock is None:
            raise self._lost()
        return sock

    def _check(self, code: MQTTErrorCode) -> None:
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or self._client.socket() is None:
            raise self._lost()

    def _lost(self) -> Exception:
        reason = self._reason
        if reason is None:
            return MqttLost("; ".join(("the connection is closed", *self._errors.texts)))
        if reason.value == _TAKEN_OVER:
            return MqttTakenOver("another client has connected with the same client id")
        try:
            self._refuse(reason, "has ended the connection")
        except BrokerMisconfigured as refusal:
            return refusal
        return MqttLost(f"the broker has ended the connection: {reason}")

    def _refuse(self, reason: ReasonCode, refusal: str) -> None:
        if reason.value in _REFUSALS:
            raise BrokerMisconfigured(f"{self.name}: the broker {refusal}: {reason}") from None

    def close(self) -> None:
        """Close the connection; the session stays, if it was to last."""
        client = self._client
        sock: Any = client.socket()
        with contextlib.suppress(Exception):
            client.disconnect()  # the library closes the socket once it is written
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()


def _properties(packet_type: int) -> Any:
    return Properties(packet_type)  # type: ignore[no-untyped-call]


def _options(connection: Connection) -> tuple[ssl.SSLContext | None, int]:
    """Return what TLS is made with, if it is, and the keepalive in seconds."""
    where = f"the connection {connection.name!r}"
    check_connection(connection, SCHEMES, OPTIONS)
    if connection.schema:
        raise BrokerMisconfigured(f"{where} has a path; the topic is an argument of the trigger")
    if connection.password and not connection.login:
        raise BrokerMisconfigured(f"{where} has a password and no login")
    keepalive = connection.extra.get("keepalive", str(KEEPALIVE_S))
    if not (keepalive.isascii() and keepalive.isdigit() and 0 < int(keepalive) <= KEEPALIVE_S_MAX):
        raise BrokerMisconfigured(f"{where}: keepalive must be 1..{KEEPALIVE_S_MAX:,} seconds, not {keepalive!r}")
    return tls_context(connection) if SCHEMES[connection.scheme] else None, int(keepalive)
