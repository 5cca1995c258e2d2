"""The three calls: messages of protobuf to verbs of the store and back, and errors to status codes.

What a status says is read by programs elsewhere: it has the sentences about what they have sent, and nothing about the
database or this process, whose errors are in the log.

A call runs in a thread of its own. `Listen` sends a page and reads the next one when gRPC has taken it: HTTP/2 holds it
up while its caller reads nothing, so such a one has a page here, its thread, and no more.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
import msgspec
import structlog
from google.protobuf.message import DecodeError, Message

from headgate.client.signals import automatic_dedup
from headgate.protocol import signal_rpc
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.protocol.messages.signals import (
    DEFAULT_NAMESPACE,
    SIGNALS_PER_PAGE_MAX,
    SignalSend,
    text_problem,
)
from headgate.protocol.signal_rpc import signals_pb2 as pb
from headgate.signal_server.health import Health
from headgate.signal_server.refusals import RefusedTokens
from headgate.signal_server.store_thread import Stopping, StoreThread, TooManyListeners, Waiter
from headgate.store.errors import (
    DATABASE_UNUSABLE,
    DatabaseAway,
    DatabaseReplaced,
    NoSuchRow,
    RowsRefused,
    ValueRefused,
)
from headgate.store.ids import DagRunId
from headgate.store.signal_verbs import SignalVerbs
from headgate.store.signals import reading
from headgate.store.signals.reading import Signal, SignalPage
from headgate.store.signals.sending import NewSignal, check_count
from headgate.supervisor.metrics import catalogue

log = structlog.get_logger(__name__)
Request = TypeVar("Request", bound=Message)

SENDER_CHARS_MAX = 200  # of what a caller says of itself
# A listener who reads nothing has one answer here, so those with large values have few of them.
LISTEN_BYTES = 128 * 1024  # of values, about
LISTEN_SIGNALS_MIN = 4  # of unknown size: 192 KiB at the most
DETAILS_CHARS_MAX = min(1000, ERROR_CHARS_MAX)  # of an error: it travels in a header

_SAYS_WHY = "the log of the server of signals says why"
# The first that fits: its code, and what the caller is told; None: the text of the error. The others are bugs.
_CODES: tuple[tuple[tuple[type[Exception], ...], grpc.StatusCode, str | None], ...] = (
    ((NoSuchRow,), grpc.StatusCode.NOT_FOUND, None),
    ((ValueRefused, RowsRefused), grpc.StatusCode.INVALID_ARGUMENT, None),
    ((DatabaseAway,), grpc.StatusCode.UNAVAILABLE, f"the database is away: {_SAYS_WHY}"),
    ((*DATABASE_UNUSABLE, DatabaseReplaced), grpc.StatusCode.UNAVAILABLE, f"the database cannot be used: {_SAYS_WHY}"),
    ((Stopping,), grpc.StatusCode.UNAVAILABLE, None),
    ((TooManyListeners,), grpc.StatusCode.RESOURCE_EXHAUSTED, None),
    ((Exception,), grpc.StatusCode.INTERNAL, f"the server of signals has failed: {_SAYS_WHY}"),
)
_REFUSALS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)  # they would be the same again


class Service:
    """Answers the calls by the thread that has the database."""

    def __init__(self, store: StoreThread, health: Health) -> None:
        self._store = store
        self._health = health

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a server of gRPC is given."""
        package, _, name = signal_rpc.SEND.strip("/").rpartition("/")
        assert name == "Send"
        return grpc.method_handlers_generic_handler(
            package,
            {
                # Requests come as bytes: gRPC would answer those that it cannot read with INTERNAL, and a traceback.
                "Send": grpc.unary_unary_rpc_method_handler(
                    self._send, response_serializer=pb.SendResponse.SerializeToString
                ),
                "List": grpc.unary_unary_rpc_method_handler(
                    self._list, response_serializer=pb.ListResponse.SerializeToString
                ),
                "Listen": grpc.unary_stream_rpc_method_handler(
                    self._listen, response_serializer=pb.ListenResponse.SerializeToString
                ),
            },
        )

    def _send(self, data: bytes, context: grpc.ServicerContext) -> pb.SendResponse:
        with self._answering("send", context):
            request = _read(pb.SendRequest, data)
            check_count(len(request.signals))
            sender = _sender_of(request)
            runs: dict[tuple[str, str], DagRunId] = {}
            news = []
            for one in request.signals:
                run = (one.run.dag, one.run.run_id) if one.HasField("run") else None
                if run is not None and run not in runs:
                    runs[run] = self._run(*run)
                news.append(_new(one, sender, None if run is None else runs[run]))
            sent = self._store.send(news) if news else []
            known = sum(not one.is_new for one in sent)
            self._health.count(catalogue.SIGNALS_SENT, "stored", by=len(sent) - known)
            self._health.count(catalogue.SIGNALS_SENT, "known", by=known)
            return pb.SendResponse(sent=[pb.SentSignal(version=one.version, is_new=one.is_new) for one in sent])

    def _run(self, dag: str, run_id: str) -> DagRunId:
        return self._store.call(lambda verbs: verbs.run(dag, run_id))

    def _list(self, data: bytes, context: grpc.ServicerContext) -> pb.ListResponse:
        with self._answering("list", context):
            request = _read(pb.ListRequest, data)
            key, namespace = request.key, request.namespace or DEFAULT_NAMESPACE
            limit = request.limit if request.HasField("limit") else SIGNALS_PER_PAGE_MAX

            def look(verbs: SignalVerbs) -> Sequence[Signal]:
                if request.HasField("version"):
                    found = verbs.version(key, namespace, request.version)
                    return () if found is None else (found,)
                return verbs.page(key, namespace, after=request.after, limit=limit).signals

            return pb.ListResponse(signals=map(_told, self._store.call(look)))

    def _listen(self, data: bytes, context: grpc.ServicerContext) -> Iterator[pb.ListenResponse]:
        with self._answering("listen", context), suppress(_CallerGone):
            request = _read(pb.ListenRequest, data)
            waiter = Waiter(request.namespace or DEFAULT_NAMESPACE, request.key)
            with self._store.joined(waiter):
                # Its thread is free again as soon as the caller has gone.
                if context.add_callback(lambda: waiter.wake(_CallerGone())):
                    yield from self._pages(request, waiter)

    def _pages(self, request: pb.ListenRequest, waiter: Waiter) -> Iterator[pb.ListenResponse]:
        namespace, key = waiter.address
        reading.check_address(key, namespace)
        waiter.seen = request.after if request.HasField("after") else self._newest(key, namespace)
        is_first = True
        limit = LISTEN_SIGNALS_MIN
        while True:
            page = self._store.call(partial(self._page, key, namespace, waiter.seen, limit))
            waiter.key_id = page.key_id
            if page.signals:
                waiter.seen = page.signals[-1].version
            limit = _next_limit(limit, page)
            if page.signals or is_first:
                yield pb.ListenResponse(signals=map(_told, page.signals), seen=waiter.seen)
            is_first = False
            if page.is_empty:
                waiter.wait()

    @contextmanager
    def _answering(self, call: str, context: grpc.ServicerContext) -> Generator[None]:
        """Answer with the status of an error of the block, and count the call."""
        outcome = "answered"
        try:
            yield
        except Exception as error:
            code, told = next((code, told) for kinds, code, told in _CODES if isinstance(error, kinds))
            outcome = "refused" if code in _REFUSALS else "failed"
            if code in _REFUSALS:
                context.set_trailing_metadata(((signal_rpc.REFUSED, "1"),))
            if code is grpc.StatusCode.INTERNAL:
                log.error("a call has failed", call=call, exc_info=True)
            context.abort(code, (told or str(error))[:DETAILS_CHARS_MAX])
        finally:
            self._health.count(catalogue.SIGNALS_CALLS, call, outcome)

    @staticmethod
    def _page(key: str, namespace: str, after: int, limit: int, verbs: SignalVerbs) -> SignalPage:
        return verbs.page(key, namespace, after=after, limit=limit)

    def _newest(self, key: str, namespace: str) -> int:
        newest = self._store.call(lambda verbs: verbs.newest(key, namespace))
        return newest[-1].version if newest else 0


def _next_limit(limit: int, page: SignalPage) -> int:
    """Return how many signals the next answer to one who listens has, by the size of those in this one."""
    if page.is_empty:
        return limit
    bytes_each = sum(len(one.data) for one in page.signals) // len(page.signals)
    fitting = LISTEN_BYTES // max(1, bytes_each)
    return max(LISTEN_SIGNALS_MIN, min(fitting, 4 * limit, SIGNALS_PER_PAGE_MAX))


class _CallerGone(Exception):
    """Nobody hears the answer any more."""


def _read(kind: type[Request], data: bytes) -> Request:
    """Return the message in these bytes. Raises `ValueRefused`."""
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise ValueRefused(f"the request is not a message {name} of signals.proto in the form of protobuf") from None


def _sender_of(request: pb.SendRequest) -> str:
    if not request.sender:
        return "a client over gRPC"
    if (problem := text_problem(request.sender, SENDER_CHARS_MAX)) is not None:
        raise ValueRefused(f"the sender {problem}")
    return f"client {request.sender}"


def _new(one: pb.NewSignal, sender: str, run: DagRunId | None) -> NewSignal:
    said = SignalSend(one.key, one.value or b"null", one.dedup or automatic_dedup(), one.namespace or DEFAULT_NAMESPACE)
    checked = NewSignal.of(said, sender, None)
    return checked if run is None else msgspec.structs.replace(checked, dag_run=run)


def _told(one: Signal) -> pb.Signal:
    run = None if one.run_id is None else pb.Run(dag=one.dag or "", run_id=one.run_id)
    return pb.Signal(
        version=one.version,
        value=one.data,
        sender=one.sender,
        sent_at_s=one.sent_at.timestamp(),
        dedup=one.dedup,
        run=run,
    )


class TokenRequired(grpc.ServerInterceptor):
    """Lets those calls through that carry the token."""

    def __init__(self, token: str, refused: RefusedTokens) -> None:
        self._expected = (signal_rpc.BEARER + token).encode()
        self._refused = refused

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        for name, value in handler_call_details.invocation_metadata:
            if name == signal_rpc.AUTHORIZATION:
                said = value.encode() if isinstance(value, str) else value
                if hmac.compare_digest(said, self._expected):
                    return continuation(handler_call_details)
        # As of a stream: a call whose one message never comes would keep a place among those of the server.
        return grpc.stream_unary_rpc_method_handler(self._refuse)

    def _refuse(self, _requests: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
        self._refused.add(context.peer())
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
