"""Webhooks: an endpoint of HTTP whose answer is 2xx only after everything derived from the request is stored.

The promise, in the words of ``docs/brokers.md``: **every request that is answered with 2xx is stored, and stored once
where senders name their deliveries**, as Standard Webhooks, GitHub and Stripe do; **else at least once**. Everything
else is answered with an error, upon which the sender tries again, if it does: whether it does, and for how long, is its
own promise.

The runner that has the trigger listens; its listener is shared by all paths of one address. A request is held until
every subscriber's events are stored, for ``answer_within_s`` at most. If it is stored later, it is recognised when the
sender tries again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Any, Final

import structlog
import trio

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.broker_trigger import BrokerTrigger, arguments_of, check_choice, check_name
from headgate.brokers.checked import CheckedProducer
from headgate.brokers.clients.bodies import BODIES, decoded_body, event_of, field_of, message_key
from headgate.brokers.clients.connecting import check_connection, tls_files
from headgate.brokers.incoming.listener import (
    RETRY_AFTER_S,
    TOO_MANY,
    Address,
    Endpoint,
    HttpAnswer,
    HttpRequest,
    Listener,
    listen,
    tls_context,
    try_address,
)
from headgate.brokers.incoming.signatures import SCHEMES, Request, SignatureRefused
from headgate.child.queries import QueryFailed
from headgate.triggers.named_values import ConnectionMissing
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome

__all__ = ["WebhookProducer", "WebhookTrigger"]

IN_FLIGHT_MAX: Final = 256  # requests that were not stored yet, also those whose senders do not wait any more
IN_FLIGHT_BYTES_MAX: Final = 64 * 1024 * 1024  # of these
MESSAGE_BYTES_MAX: Final = 1024 * 1024
ANSWER_WITHIN_S: Final = 9.0  # GitHub gives up after 10 s
ANSWER_WITHIN_S_MAX: Final = 300.0
TOLERANCE_S: Final = 300.0
PARSED_AT_ONCE_BYTES: Final = 32 * 1024  # a longer body is read in a thread, so that it holds up nobody else
SETTINGS_S: Final = 60.0  # after which the connection is read anew, because its secrets may have changed
REFUSALS_EVERY_S: Final = 60.0  # between two lines of the log about signatures
HEADERS_MAX: Final = 32  # that a user names

_log = structlog.get_logger("headgate.brokers.webhooks")


class Delivery:
    """One request that waits to be stored: the broker payload of the stream."""

    __slots__ = ("answer", "body_bytes", "is_answered", "key", "raw_event", "settled")

    def __init__(self, raw_event: Any, key: str | None, body_bytes: int) -> None:
        self.raw_event = raw_event
        self.key = key
        self.body_bytes = body_bytes
        self.answer: HttpAnswer | None = None  # once it is resolved
        self.is_answered = False  # its sender does not wait any more
        self.settled = trio.Event()

    def settle(self, answer: HttpAnswer) -> None:
        """Have the sender get this answer, if it still waits."""
        self.answer = answer
        self.settled.set()


class WebhookProducer(CheckedProducer):
    """Reads one path; the arguments are those of `WebhookTrigger`."""

    keeps_rejected = False

    def __init__(
        self,
        connection: str,
        path: str,
        verify: str,
        *,
        key: str | None = "auto",
        body: str = "json",
        headers: str = "",
        tolerance_s: float = TOLERANCE_S,
        answer_within_s: float = ANSWER_WITHIN_S,
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(connection)
        check_name("path", path)
        check_choice("verify", verify, (*SCHEMES, "none"))
        if key is not None:
            check_choice("key", key, ("auto",), ("header:", "json:"))
        check_choice("body", body, BODIES)
        named = [name.strip().lower() for name in headers.split(",") if name.strip()]
        if len(named) > HEADERS_MAX:
            raise ValueError(f"headers may name {HEADERS_MAX}, not {len(named):,}")
        limits = {"tolerance_s": tolerance_s, "answer_within_s": answer_within_s, "in_flight_max": in_flight_max}
        for name, value in {**limits, "message_bytes_max": message_bytes_max}.items():
            if not value > 0:
                raise ValueError(f"{name} must be more than 0, not {value!r}")
        if answer_within_s > ANSWER_WITHIN_S_MAX:
            raise ValueError(f"answer_within_s must be at most {ANSWER_WITHIN_S_MAX:g} s, not {answer_within_s:g}")
        self._path = "/" + path.removeprefix("/")
        self._scheme = SCHEMES.get(verify)
        if key == "auto":
            key = "header:webhook-id" if self._scheme is None else self._scheme.key
        self._key = key
        self._body = body
        self._headers = frozenset({"content-type", *named, *(() if self._scheme is None else self._scheme.headers)})
        self._tolerance_s = tolerance_s
        self._answer_within_s = answer_within_s
        self._in_flight_max = in_flight_max
        self._message_bytes_max = message_bytes_max
        self._secrets: list[bytes] = []
        self._listener: Listener | None = None
        self._arrived: deque[Delivery] = deque()
        self._in_flight: dict[Delivery, None] = {}
        self._in_flight_bytes = 0
        self._refused = 0  # requests since the last line of the log about them
        self._refused_at = float("-inf")
        self._news = trio.lowlevel.ParkingLot()
        self._parsing = trio.CapacityLimiter(1)  # long bodies one after the other: they share the interpreter

    @property
    def name(self) -> str:
        """The path."""
        return f"webhook {self._path}"

    # --- settings, and what `brokers check` does ------------------------------------------------------------------

    def look(self) -> None:
        """Read the connection, and try whether one can listen."""
        address = self._read_connection()
        tls_context(address)
        if not try_address(address):
            self.warn(f"somebody listens on {address}: a runner with this watcher, or another program")

    def disconnect(self) -> None:
        """Do nothing: `look` has kept nothing."""

    def _read_connection(self) -> Address:
        """Return the address; take the secrets. Raises `BrokerMisconfigured`, which shows none."""
        connection = self.connection
        assert connection is not None
        where = f"{self.name}: the connection {connection.name!r}"
        check_connection(connection, {"http": False, "https": True}, ("previous",))
        if connection.port is None or len(connection.hosts) != 1:
            raise BrokerMisconfigured(f"{where} must name one address to listen on: http://:SECRET@0.0.0.0:8080")
        if connection.schema or connection.login:
            raise BrokerMisconfigured(f"{where} must have no path and no login; the path is one of the watcher")
        texts = [text for text in (connection.password, connection.extra.get("previous", "")) if text]
        if self._scheme is None and texts:
            raise BrokerMisconfigured(f"{where} has a secret, and verify is none")
        if self._scheme is not None and not connection.password:
            raise BrokerMisconfigured(f"{where} has no secret to verify by: http://:SECRET@0.0.0.0:8080")
        try:
            self._secrets = [] if self._scheme is None else [self._scheme.secret_of(text) for text in texts]
        except ValueError as error:
            raise BrokerMisconfigured(f"{where}: {error}") from None
        files = tls_files(connection)
        if connection.scheme == "https" and "ssl_certfile" not in files:
            raise BrokerMisconfigured(f"{where} needs ssl_certfile for https://")
        if "ssl_check_hostname" in connection.extra:
            raise BrokerMisconfigured(f"{where}: ssl_check_hostname is an option of clients")
        return Address(connection.host, connection.port, tuple(sorted(files.items())))

    async def _fetch_connection(self) -> Address:
        try:
            self.connection = await self.get_connection(str(self.connection_name))
        except (ConnectionMissing, ValueError) as error:
            raise BrokerMisconfigured(f"{self.name}: {error}") from None
        return self._read_connection()

    # --- the stream -----------------------------------------------------------------------------------------------

    async def open_stream(self) -> AsyncGenerator[tuple[Any, Delivery], None]:
        """Yield what is posted to the path, for ever."""
        address = await self._fetch_connection()
        self._listener = await listen(address, self._path, Endpoint(self._answer, self._message_bytes_max))
        if self._scheme is None:
            _log.warning("requests are not verified: whoever reaches the address can post", stream=self.name)
        fetch_at = trio.current_time() + SETTINGS_S
        while True:
            while self._arrived:
                delivery = self._arrived.popleft()
                if delivery.is_answered:
                    self._forget(delivery)  # nobody was told that we have it, and its sender tries again
                else:
                    yield delivery.raw_event, delivery
            if self._listener.failure is not None:
                raise self._listener.failure
            if trio.current_time() >= fetch_at:
                fetch_at = trio.current_time() + SETTINGS_S
                await self._fetch_again(address)
            if not self._arrived:
                with trio.move_on_at(fetch_at):
                    await self._news.park()

    async def _fetch_again(self, address: Address) -> None:
        try:
            if await self._fetch_connection() != address:
                raise BrokerMisconfigured(f"{self.name}: its connection has another address now, or other files of TLS")
        except QueryFailed as error:
            _log.warning("the connection could not be read anew", stream=self.name, error=str(error))

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Answer the senders that still wait."""
        for item in batch:
            self._forget(item.broker_payload)
            item.broker_payload.settle(_answer_of(item.outcome))

    def get_advance_lane(self, broker_payload: Delivery) -> Hashable:
        """Return a lane of its own: no request waits for another."""
        return id(broker_payload)

    def event_key(self, broker_payload: Delivery) -> str | None:
        """Return the sender's name for the delivery."""
        return broker_payload.key

    async def aclose(self) -> None:
        """Stop listening; requests that wait are answered with 503."""
        for delivery in list(self._in_flight):
            self._forget(delivery)
            delivery.settle(_LATER)
        if self._listener is not None:
            await self._listener.remove(self._path)

    def _forget(self, delivery: Delivery) -> None:
        if delivery in self._in_flight:
            del self._in_flight[delivery]
            self._in_flight_bytes -= delivery.body_bytes

    # --- one request, in the task of its connection ---------------------------------------------------------------

    async def _answer(self, request: HttpRequest) -> HttpAnswer:
        if self._scheme is not None:
            try:
                signed = Request(request.headers, request.body)
                self._scheme.check(signed, self._secrets, time.time(), self._tolerance_s)
            except SignatureRefused as refused:
                self._note_refused(refused)
                return HttpAnswer(401, str(refused))
        if self._is_full():
            return TOO_MANY
        if len(request.body) <= PARSED_AT_ONCE_BYTES:
            delivery = self._delivery(request)
        else:
            delivery = await trio.to_thread.run_sync(self._delivery, request, limiter=self._parsing)
            if self._is_full():  # of those that came meanwhile
                return TOO_MANY
        self._in_flight[delivery] = None
        self._in_flight_bytes += delivery.body_bytes
        self._arrived.append(delivery)
        self._news.unpark_all()
        with trio.move_on_after(self._answer_within_s):
            await delivery.settled.wait()
        delivery.is_answered = True
        return delivery.answer or _LATER

    def _is_full(self) -> bool:
        return len(self._in_flight) >= self._in_flight_max or self._in_flight_bytes >= IN_FLIGHT_BYTES_MAX

    def _delivery(self, request: HttpRequest) -> Delivery:
        return Delivery(self._raw_event(request), self._key_of(request), len(request.body))

    def _note_refused(self, refused: SignatureRefused) -> None:
        self._refused += 1
        if time.monotonic() - self._refused_at >= REFUSALS_EVERY_S:
            _log.warning("requests are refused", stream=self.name, last=str(refused), requests=self._refused)
            self._refused, self._refused_at = 0, time.monotonic()

    def _raw_event(self, request: HttpRequest) -> Any:
        decoded = decoded_body(request.body, self._body)
        # Only what is the same at each attempt: an event that differs from the one that is stored under its key is a
        # dead letter.
        if self._scheme is not None and isinstance(decoded, dict):
            for name in self._scheme.counters:
                decoded.pop(name, None)
        headers = {name: value for name, value in request.headers.items() if name in self._headers}
        return event_of(decoded, {"path": request.path, "query": request.query, "headers": headers})

    def _key_of(self, request: HttpRequest) -> str | None:
        """Return what the sender has named the delivery by; None if it has not."""
        name: object = None
        if self._key is not None and self._key.startswith("header:"):
            name = request.headers.get(self._key[7:].lower())
        elif self._key is not None:
            name = field_of(request.body, self._key[5:])
        # A sender that proves who it is is believed that its names are one delivery's each; what it sends again may
        # differ (Stripe counts in `pending_webhooks`). Of others the content belongs to the name.
        return message_key(f"webhook:{request.path}", name, b"" if self._scheme is not None else request.body)


_LATER: Final = HttpAnswer(503, "it is not stored yet", RETRY_AFTER_S)


def _answer_of(outcome: AdvanceOutcome) -> HttpAnswer:
    if outcome.failed or not (outcome.acked or outcome.rejected):
        return HttpAnswer(503, "it could not be handled", RETRY_AFTER_S)
    if outcome.rejected:
        return HttpAnswer(422, "it is refused")
    return HttpAnswer(204)


class WebhookTrigger(BrokerTrigger):
    """Fires an event for every request to a path; triggers of one connection and path share a reader.

    ``connection`` names a stored connection: the address to listen on, with the secret as its password
    (``http://:SECRET@0.0.0.0:8080``; ``https://`` with ``ssl_certfile`` and ``ssl_keyfile``; ``previous``: an earlier
    secret that is taken, too). Connections of one address share a listener. ``path``: of the requests. ``verify``: by
    which scheme they are signed, ``"standard"`` (Standard Webhooks), ``"github"``, ``"stripe"``, or ``"none"``. The raw
    event is ``{"body": ..., "path": str, "query": str, "headers": {str: str}}``, with names in lower case: the type of
    the content, those of the scheme, and those that ``headers`` names, separated by commas. Name none that differs from
    one attempt to deliver to the next: an event that comes again with another payload is a dead letter.

    ``key``: by what a delivery that comes again is recognised: ``"header:NAME"`` or ``"json:FIELD"``; ``"auto"``: the
    one that the scheme has (``webhook-id`` without one); None: by nothing. If requests are not verified, the content
    belongs to it. ``body``: ``"json"`` (parsed), ``"text"`` (UTF-8) or ``"bytes"``. ``tolerance_s``: by how many
    seconds a signed time may differ from ours. ``answer_within_s``: after so many seconds a sender gets 503 if its
    request is not stored yet. ``in_flight_max`` requests wait at once, of up to ``message_bytes_max`` bytes each.
    Raises ValueError for arguments that cannot be used.

    To select or transform requests, subclass it and override ``filter_shared_stream``.
    """

    producer = WebhookProducer
    scheme = "webhook"
    place = ("connection", "path")

    def __init__(
        self,
        connection: str,
        path: str,
        verify: str,
        *,
        key: str | None = "auto",
        body: str = "json",
        headers: str = "",
        tolerance_s: float = TOLERANCE_S,
        answer_within_s: float = ANSWER_WITHIN_S,
        in_flight_max: int = IN_FLIGHT_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        super().__init__(**arguments_of(locals()))
