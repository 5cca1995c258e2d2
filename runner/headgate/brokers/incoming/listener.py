"""A listener of HTTP/1.1 in the runner: one for each address, shared by all streams that read a path there.

h11 reads and writes HTTP; this module has the connections and their limits. It lives in system tasks of trio, because
the streams that share it come and go; nothing that happens to a connection gets out of its task. It opens with its
first path and closes with its last one.
"""

from __future__ import annotations

import errno
import math
import socket
import ssl
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import h11
import structlog
import trio

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured
from headgate.brokers.clients.bodies import joined

CONNECTIONS_MAX: Final = 256  # of one listener; further ones are closed at once
REQUESTS_OF_PATH_MAX: Final = 192  # of these at once, so that one path whose requests wait leaves some to the others
BODIES_BYTES_MAX: Final = 128 * 1024 * 1024  # of the bodies of these requests; a single one may exceed it
HEAD_BYTES_MAX: Final = 32 * 1024  # of a request that are kept until its headers are whole; one read may exceed it
HEAD_TIMEOUT_S: Final = 15.0  # for these, and so for how long a connection may do nothing
BODY_TIMEOUT_S: Final = 10.0
SEND_TIMEOUT_S: Final = 5.0
HANDSHAKE_TIMEOUT_S: Final = 5.0  # of TLS
LISTEN_WITHIN_S: Final = 10.0  # a runner that is being replaced has this long to leave the port
LISTEN_AGAIN_S: Final = 0.2
CLOSE_GRACE_S: Final = 2.0  # for answers that are under way when the listener closes
LINGER_S: Final = 1.0  # for a sender to read an answer that came before it had sent all
READ_BYTES: Final = 32 * 1024
PIECES_IN_A_ROW: Final = 64  # of a body that come with one read, before others have a turn
BACKLOG: Final = 128
_PAUSE_S: Final = 0.1  # after an accept that failed: the process has no descriptors left

_log = structlog.get_logger("headgate.brokers.webhooks")


class HttpRequest(NamedTuple):
    """One request, whole. ``headers``: by their names in lower case; values of one name are joined by ``", "``."""

    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


class HttpAnswer(NamedTuple):
    """What a sender gets: a status, a sentence, and after how many seconds it should try again, if it should."""

    status: int
    text: str = ""
    retry_after_s: int | None = None


RETRY_AFTER_S: Final = 5  # what a sender is told
TOO_MANY: Final = HttpAnswer(503, "too many requests wait to be stored", RETRY_AFTER_S)


class Endpoint(NamedTuple):
    """What is read at one path: bodies up to ``body_bytes_max`` bytes, which ``answer`` answers within its own time."""

    answer: Callable[[HttpRequest], Awaitable[HttpAnswer]]
    body_bytes_max: int


class Address(NamedTuple):
    """Where to listen. ``tls``: the paths of the files of TLS by their options, sorted; empty without TLS."""

    host: str
    port: int
    tls: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.host or '*'}:{self.port}"


class Refused(Exception):
    """A request that no endpoint gets."""

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(answer.text)
        self.answer = answer


class _Open:
    """The listeners of one run of trio."""

    def __init__(self) -> None:
        # One for each address: who waits for a port that is taken holds up nobody who listens elsewhere.
        self.locks: defaultdict[tuple[str, int], trio.Lock] = defaultdict(trio.Lock)
        self.listeners: dict[tuple[str, int], Listener] = {}


_open: Final = trio.lowlevel.RunVar[_Open]("headgate listeners")


class Listener:
    """Sockets of one address, and the endpoints behind them by their paths."""

    def __init__(self, address: Address, context: ssl.SSLContext | None) -> None:
        self.address = address
        self.failure: BaseException | None = None
        self._context = context
        self._endpoints: dict[str, Endpoint] = {}
        self._sockets: list[trio.SocketListener] = []
        self._connections = 0
        self._requests = Counter[str]()  # by their paths: their bodies are being read, or they wait for their answers
        self._bodies_bytes = 0  # what of these has come
        self._turned_away = 0
        self._idle: set[trio.CancelScope] = set()  # connections that wait for a request
        self._is_closing = False
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def _listen(self) -> None:
        deadline = trio.current_time() + LISTEN_WITHIN_S
        while True:
            try:
                host = self.address.host or None
                self._sockets = await trio.open_tcp_listeners(self.address.port, host=host, backlog=BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise refusal(self.address, error) from None
                if trio.current_time() >= deadline:
                    raise BrokerError(f"another program listens on {self.address}") from None
                await trio.sleep(LISTEN_AGAIN_S)
            else:
                break
        trio.lowlevel.spawn_system_task(self._serve, name=f"headgate listener {self.address}")

    async def _serve(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for each in self._sockets:
                        nursery.start_soon(self._accept, each, nursery)
        except Exception as error:  # a system task that raises would end the runner
            self.failure = error
            _log.error("a listener has failed", address=str(self.address), exc_info=error)
        finally:
            self._ended.set()

    async def _accept(self, listening: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            try:
                stream = await listening.accept()
            except trio.ClosedResourceError:
                return
            except OSError as error:
                _log.warning("a connection could not be accepted", address=str(self.address), error=repr(error))
                await trio.sleep(_PAUSE_S)
                continue
            if self._connections >= CONNECTIONS_MAX:
                self._turned_away += 1
                if self._turned_away & (self._turned_away - 1) == 0:  # 1, 2, 4, ...: not one line for each
                    _log.warning("connections were turned away", address=str(self.address), so_far=self._turned_away)
                await trio.aclose_forcefully(stream)
                continue
            self._connections += 1
            nursery.start_soon(self._handle, stream)

    async def _handle(self, stream: trio.SocketStream) -> None:
        try:
            await self._converse(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, h11.LocalProtocolError):
            pass  # the sender is gone, or too slow
        except Exception as error:
            _log.error("a connection has failed", address=str(self.address), exc_info=error)
        finally:
            self._connections -= 1
            await trio.aclose_forcefully(stream)

    async def _converse(self, raw: trio.SocketStream) -> None:
        stream: Any = raw
        if self._context is not None:
            stream = trio.SSLStream(raw, self._context, server_side=True, https_compatible=True)
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                await stream.do_handshake()
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        while await self._answer_one(http, stream) and not self._is_closing:
            http.start_next_cycle()

    async def _answer_one(self, http: h11.Connection, stream: Any) -> bool:
        """Answer one request; return whether another one may follow on this connection."""
        head: h11.Request | None = None
        try:
            head = await self._head(http, stream)
            if head is None:
                return False
            answer = await self._answered(http, stream, head)
        except Refused as refused:
            answer = refused.answer
        except h11.RemoteProtocolError as error:
            answer = HttpAnswer(error.error_status_hint, "this is no request of HTTP/1.1 that can be read")
        state: Any = http.our_state
        if state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        with trio.fail_after(SEND_TIMEOUT_S):
            await _send(http, stream, answer, to_head=head is not None and head.method == b"HEAD")
        if (http.our_state, http.their_state) == (h11.DONE, h11.DONE):
            return True
        await _linger(stream)
        return False

    async def _head(self, http: h11.Connection, stream: Any) -> h11.Request | None:
        """Return the head of the next request; None if there is none any more, or if we close meanwhile."""
        with trio.CancelScope() as scope:
            self._idle.add(scope)
            try:
                with trio.fail_after(HEAD_TIMEOUT_S):
                    event = await _next_event(http, stream)
            finally:
                self._idle.discard(scope)
            return event if isinstance(event, h11.Request) else None
        return None

    async def _answered(self, http: h11.Connection, stream: Any, head: h11.Request) -> HttpAnswer:
        """Read the rest of a request, and return the answer of its path. Raises `Refused`."""
        headers = _headers(head)
        try:
            target = urlsplit(head.target.decode("latin-1"))
            path = unquote(target.path)
        except ValueError:
            raise Refused(HttpAnswer(400, "the path cannot be read")) from None
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            raise Refused(HttpAnswer(404, "nobody reads this path at the moment"))
        if head.method != b"POST":
            raise Refused(HttpAnswer(405, "only POST is answered"))
        if self._requests[path] >= REQUESTS_OF_PATH_MAX:
            raise Refused(TOO_MANY)
        if int(headers.get("content-length", "0")) > endpoint.body_bytes_max:
            raise _too_long(endpoint.body_bytes_max)
        self._requests[path] += 1
        body, size = bytearray(), 0
        try:
            await self._read_body(http, stream, body, endpoint.body_bytes_max)
            size, request = len(body), HttpRequest(path, target.query, headers, bytes(body))
            body.clear()  # so that it is there once while the request waits
            # Whoever reads the path now: its watcher may have been started again meanwhile.
            return await self._endpoints.get(path, endpoint).answer(request)
        finally:
            self._requests[path] -= 1
            self._bodies_bytes -= size + len(body)

    async def _read_body(self, http: h11.Connection, stream: Any, body: bytearray, bytes_max: int) -> None:
        pieces = 0
        with trio.move_on_after(BODY_TIMEOUT_S) as scope:
            while not isinstance(event := await _next_event(http, stream), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    raise trio.BrokenResourceError
                body += event.data
                self._bodies_bytes += len(event.data)
                if len(body) > bytes_max:
                    raise _too_long(bytes_max)
                if len(body) < self._bodies_bytes > BODIES_BYTES_MAX:
                    raise Refused(TOO_MANY)
                pieces += 1
                if pieces % PIECES_IN_A_ROW == 0:  # chunks of a byte each: one read has thousands
                    await trio.lowlevel.checkpoint()
        if scope.cancelled_caught:
            raise Refused(HttpAnswer(408, f"the body did not come within {BODY_TIMEOUT_S:g} s"))

    async def remove(self, path: str) -> None:
        """Take a path away. With the last one the listener closes: answers under way have `CLOSE_GRACE_S` left."""
        self._endpoints.pop(path, None)
        if self._endpoints or self._is_closing:
            return
        self._is_closing = True
        opened = _open.get().listeners
        if opened.get((self.address.host, self.address.port)) is self:
            del opened[self.address.host, self.address.port]
        for each in self._sockets:
            await trio.aclose_forcefully(each)
        for scope in list(self._idle):
            scope.cancel()
        self._scope.deadline = trio.current_time() + CLOSE_GRACE_S
        await self._ended.wait()


async def listen(address: Address, path: str, endpoint: Endpoint) -> Listener:
    """Return the listener of an address, which has this endpoint from now on.

    Raises `BrokerMisconfigured` if one cannot listen there, if there is an endpoint with that path, or a listener with
    other files of TLS, and `BrokerError` if another program listens there.
    """
    try:
        here = _open.get()
    except LookupError:
        here = _Open()
        _open.set(here)
    at = address.host, address.port
    async with here.locks[at]:
        listener = here.listeners.get(at)
        if listener is not None and listener.failure is not None:
            del here.listeners[at]
            listener = None
        if listener is None:
            listener = Listener(address, tls_context(address))
            await listener._listen()
            here.listeners[at] = listener
        if listener.address != address:
            raise BrokerMisconfigured(f"another connection listens on {address} with other files of TLS, or without")
        if path in listener._endpoints:
            raise BrokerMisconfigured(f"the path {path} of {address} is read over another connection already")
        listener._endpoints[path] = endpoint
        return listener


def tls_context(address: Address) -> ssl.SSLContext | None:
    """Return what TLS is made with; None without TLS. Raises `BrokerMisconfigured`."""
    if not address.tls:
        return None
    files = dict(address.tls)
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"))
        if "ssl_ca_certs" in files:
            context.load_verify_locations(files["ssl_ca_certs"])
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise BrokerMisconfigured(f"a file of TLS for {address} cannot be used: {error}") from None
    return context


def try_address(address: Address) -> bool:
    """Return whether the address is free; raises `BrokerMisconfigured` if nobody could listen there. It blocks."""
    try:
        found = socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise refusal(address, error) from None
    return True


def refusal(address: Address, error: OSError) -> BrokerMisconfigured:
    """Return what is wrong with an address on which one cannot listen."""
    return BrokerMisconfigured(f"one cannot listen on {address}: {error.strerror or error}")


def _headers(head: h11.Request) -> dict[str, str]:
    headers = joined((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers)
    if "transfer-encoding" in headers and "content-length" in headers:
        # A proxy may read the other one of the two, and take for a request what we take for a body. What is not read
        # whole is the last one of its connection.
        raise Refused(HttpAnswer(400, "a request may have only one of transfer-encoding and content-length"))
    return headers


def _too_long(bytes_max: int) -> Refused:
    return Refused(HttpAnswer(413, f"a body may have at most {bytes_max:,} bytes"))


async def _next_event(http: h11.Connection, stream: Any) -> Any:
    while (event := http.next_event()) is h11.NEED_DATA:
        if http.they_are_waiting_for_100_continue:
            with trio.fail_after(SEND_TIMEOUT_S):
                await stream.send_all(http.send(h11.InformationalResponse(status_code=100, headers=[])))
        http.receive_data(await stream.receive_some(READ_BYTES))
    return event


async def _send(http: h11.Connection, stream: Any, answer: HttpAnswer, *, to_head: bool) -> None:
    """Send an answer; to a request of HEAD without its body, whose size it tells."""
    body = b"" if answer.status == 204 else answer.text.encode() + b"\n"
    headers = [("date", formatdate(time.time(), usegmt=True))]
    if body:
        headers += [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body)))]
    if answer.retry_after_s is not None:
        headers.append(("retry-after", str(math.ceil(answer.retry_after_s))))
    if answer.status == 405:
        headers.append(("allow", "POST"))
    data = http.send(h11.Response(status_code=answer.status, headers=headers))
    for event in (h11.Data(data=b"" if to_head else body), h11.EndOfMessage()):
        data = (data or b"") + (http.send(event) or b"")
    await stream.send_all(data)


async def _linger(stream: Any) -> None:
    """Let the sender read the answer: a connection that is closed with unread bytes is reset, and the answer lost."""
    with trio.move_on_after(LINGER_S):
        if isinstance(stream, trio.SocketStream):
            await stream.send_eof()
        while await stream.receive_some(READ_BYTES):
            pass
