"""`GrpcSignalService`: signals for programs that do not reach the database, by a server of signals over gRPC.

Each signal is sent with a dedup, one of its own if the caller gives none, so a call whose answer was lost is repeated,
and the signal is stored once. A listener whose link is lost goes on behind the last version that it has seen. What is
never repeated is a call that the server refuses, or one to a server with which TLS cannot be agreed on: this gRPC tells
in words alone (`_tls_problem`).

It needs the extra ``grpc``: ``pip install "headgate[grpc]"``.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import random
import re
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import tenacity

from headgate.protocol.messages.signals import AUTOMATIC, DEFAULT_NAMESPACE, SIGNALS_PER_PAGE_MAX
from headgate.signals import outgoing
from headgate.signals.base import BaseSignalService
from headgate.signals.listening import Hear, Heard
from headgate.signals.versions import Signal, SignalVersion, signals_in, value_of

try:
    import grpc

    from headgate.protocol import signal_rpc
    from headgate.protocol.signal_rpc import signals_pb2 as pb
except ImportError as error:
    raise ImportError(f'signals over gRPC need an extra: pip install "headgate[grpc]" ({error})') from error

log = logging.getLogger(__name__)

RETRY_S: Final = 60.0  # a call is repeated so long if the server does not answer
CALL_S: Final = 30.0  # one try of a call; the server waits for its database no longer than that
PAUSE_MIN_S: Final = 0.05  # before a call is repeated; then twice as long, up to the next one
PAUSE_MAX_S: Final = 2.0

_OPTIONS: Final = (
    ("grpc.max_send_message_length", signal_rpc.REQUEST_BYTES_MAX),
    ("grpc.max_receive_message_length", signal_rpc.RESPONSE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", int(PAUSE_MIN_S * 1000)),
    ("grpc.min_reconnect_backoff_ms", int(PAUSE_MIN_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(PAUSE_MAX_S * 1000)),
    ("grpc.enable_retries", 0),  # calls are repeated here, where it is known that they may be
    *signal_rpc.KEEPALIVE_OPTIONS,
)
_FINAL: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)

Request = TypeVar("Request")
Answer = TypeVar("Answer")


_NO_LINK: Final = "failed to connect to all addresses"  # so begin the details of a call that no server has seen


class SignalsRefused(Exception):
    """The server refuses a call, or TLS cannot be agreed on with it, and it would be so again; the text says why."""


class SignalsUnavailable(Exception):
    """The server has not answered for as long as a call is repeated. What was sent may be stored: send it again."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(f"the server of signals at {target} does not answer: {reason}")
        self.target = target
        self.reason = reason


class GrpcSignalService(BaseSignalService):
    """Sends, lists and hears signals of one namespace over gRPC, in any threads::

        # notify_far.py
        import os

        from headgate.signals.remote import GrpcSignalService

        with GrpcSignalService("127.0.0.1:50551", os.environ["HEADGATE_SIGNALS_TOKEN"]) as signals:
            print("sent version", signals.send_signal("model", {"auc": 0.93}, dedup="run-7").version)

    It lists and hears all versions of a key; those for one run alone name it as their ``run``. Do not use it over a
    fork.
    """

    def __init__(
        self,
        target: str,
        token: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        certificate: Path | str | None = None,
        plaintext: bool = False,
        sender: str = "",
        retry_s: float = RETRY_S,
    ) -> None:
        """``target`` is the HOST:PORT of the server, and ``token`` what it was started with.

        Line breaks at the end of the token are left out, as the server does it. The link is TLS, unless the target is
        of this machine and no ``certificate`` is given, or with ``plaintext``. ``certificate`` is a file with the PEM
        that the server's is checked by; without it those of the system are. ``sender`` is text for people, which is
        stored with each signal. A call is repeated for ``retry_s`` seconds if the server does not answer. Nothing is
        connected yet. Raises ValueError, and OSError for the file.
        """
        super().__init__(namespace)
        if token is not None:
            try:
                token = signal_rpc.sendable_token(token)
            except ValueError as error:
                raise ValueError(f"the token {error}") from None
        if plaintext and certificate is not None:
            raise ValueError("plaintext=True is without TLS, which checks a certificate: give one of them")
        if target.startswith(("http://", "https://")) or not target.rpartition(":")[0]:
            raise ValueError(f"the target must be HOST:PORT, not {target!r:.100}")
        self.target = target
        self._sender = sender
        self._retry_s = retry_s
        self._metadata = () if token is None else ((signal_rpc.AUTHORIZATION, signal_rpc.BEARER + token),)
        self._is_plaintext = plaintext or (certificate is None and _is_of_this_machine(target))
        if self._is_plaintext:
            self._channel = grpc.insecure_channel(target, _OPTIONS)
        else:
            roots = None if certificate is None else Path(certificate).read_bytes()
            if roots is not None and b"-----BEGIN CERTIFICATE-----" not in roots:
                raise ValueError(f"{certificate} has no certificate in the form of PEM")
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(roots), _OPTIONS)
        self._send = self._channel.unary_unary(
            signal_rpc.SEND, pb.SendRequest.SerializeToString, pb.SendResponse.FromString
        )
        self._list = self._channel.unary_unary(
            signal_rpc.LIST, pb.ListRequest.SerializeToString, pb.ListResponse.FromString
        )
        self._listen = self._channel.unary_stream(
            signal_rpc.LISTEN, pb.ListenRequest.SerializeToString, pb.ListenResponse.FromString
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the link; whoever listens ends with an error."""
        self._channel.close()

    def send_signal(
        self, key: str, value: Any = None, *, dedup: str | None = None, run: tuple[str, str] | None = None
    ) -> SignalVersion:
        """Send a signal; return its version. ``run``, a dag_id and a run_id, sends it to that run alone.

        Sent again with the same ``dedup``, it keeps the version of the first. Raises ValueError for a malformed key or
        dedup, `ValueNotSerializable` and `ValueTooLong` for a value, `SignalsRefused` and `SignalsUnavailable`.
        """
        (sent,) = self.send_signals([Signal(key, value, dedup)], run=run)
        return sent

    def send_signals(self, signals: Iterable[Signal], *, run: tuple[str, str] | None = None) -> list[SignalVersion]:
        """Send signals in one transaction, as `send_signal` does one; return their versions.

        At most 1,000, whose values take 1 MiB: raises `TooManySignals` for more.
        """
        signals, of_run = signals_in(signals), _named(run)
        sends = [outgoing.encoded(one.key, one.value, dedup=one.dedup, namespace=self.namespace) for one in signals]
        outgoing.check_size(sends, "at once")
        if not sends:
            return []
        news = [
            pb.NewSignal(key=one.key, namespace=one.namespace, value=one.value, dedup=one.dedup, run=of_run)
            for one in sends
        ]
        answer = self._call(self._send, pb.SendRequest(signals=news, sender=self._sender))
        return [
            SignalVersion(one.key, one.value, one.dedup, sent.version, sent.is_new, run=run, namespace=self.namespace)
            for one, sent in zip(signals, answer.sent, strict=True)
        ]

    def list_stored(self, key: str, version: int | None, after: int, limit: int) -> list[SignalVersion]:
        """See `BaseSignalService.list_stored`. Raises `SignalsRefused` and `SignalsUnavailable`."""
        request = pb.ListRequest(key=key, namespace=self.namespace, version=version, after=after, limit=limit)
        return [_listed(key, self.namespace, one) for one in self._call(self._list, request).signals]

    def hear(self, key: str, after: int | None, within_s: float) -> Heard:
        """See `BaseSignalService.hear`. Raises `SignalsRefused` and `SignalsUnavailable`."""
        with self.listening(key) as hear:
            return hear(after, within_s)

    @contextmanager
    def listening(self, key: str) -> Generator[Hear]:
        """Keep one call open in the block."""
        stream = _Stream(self, key)
        try:
            yield stream.hear
        finally:
            stream.close()

    def _call(self, method: grpc.UnaryUnaryMultiCallable[Request, Answer], request: Request) -> Answer:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_be_repeated),
            stop=tenacity.stop_after_delay(self._retry_s),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_MIN_S, max=PAUSE_MAX_S),
            reraise=True,
        )
        try:
            return retrying(method, request, timeout=CALL_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self.told(error) from error

    def open_stream(self, key: str, after: int | None) -> _ListenCall:
        """Begin a call that listens; used by `_Stream`."""
        request = pb.ListenRequest(key=key, namespace=self.namespace, after=after)
        return self._listen(request, metadata=self._metadata)

    def told(self, error: grpc.RpcError) -> SignalsRefused | SignalsUnavailable:
        """Return what the caller of this service is told of an error of the link."""
        reason = _details_of(error)
        if (problem := _tls_problem(reason)) is not None:
            return SignalsRefused(f"no link to the server of signals at {self.target}: {problem}")
        if not _may_be_repeated(error):
            return SignalsRefused(reason)
        if self._is_plaintext and reason.startswith(_NO_LINK) and "Socket closed" in reason:
            # A server that is just ending does the same, so it is not known before.
            reason += "; the link is without TLS, and a server that has a certificate closes it: then give certificate="
        return SignalsUnavailable(self.target, reason)

    @property
    def retry_s(self) -> float:
        """How long a call is repeated, in seconds."""
        return self._retry_s


class _ListenCall(Protocol):
    """A call that listens, as gRPC gives it."""

    def __next__(self) -> pb.ListenResponse: ...

    def cancel(self) -> object: ...


class _Stream:
    """One call that listens, or the next one if its link was lost."""

    def __init__(self, service: GrpcSignalService, key: str) -> None:
        self._service = service
        self._key = key
        self._call: _ListenCall | None = None
        self._has_answered = False

    def hear(self, after: int | None, within_s: float) -> Heard:
        """See `BaseSignalService.hear`."""
        if after is None:
            answer = self._next(None, math.inf)
            self.close()
            assert answer is not None, "it waits until there is one"
            return Heard((), answer.seen)
        ends_at = time.monotonic() + within_s
        while (left_s := ends_at - time.monotonic()) > 0 and (answer := self._next(after, left_s)) is not None:
            # The call may have begun before versions that were listed below.
            of = self._key, self._service.namespace
            signals = [_listed(*of, one) for one in answer.signals if one.version > after]
            if signals or answer.seen > after:
                return Heard(signals, max(after, answer.seen))
        # What was under way when the time was over, or is not there: this answer is of now.
        listed = self._service.list_stored(self._key, None, after, SIGNALS_PER_PAGE_MAX)
        return Heard(listed, listed[-1].version if listed else after)

    def close(self) -> None:
        """End the call."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _next(self, after: int | None, within_s: float) -> pb.ListenResponse | None:
        """Return the next answer, of a new call if there is none; None if the time is over."""
        ends_at = time.monotonic() + within_s
        gives_up_at = math.inf if self._has_answered else time.monotonic() + self._service.retry_s
        pause_s = PAUSE_MIN_S
        while (left_s := ends_at - time.monotonic()) > 0:
            call = self._call = self._call or self._service.open_stream(self._key, after)
            try:
                with _cancelled_after(call, left_s):
                    answer = next(call)
            except (grpc.RpcError, StopIteration) as error:
                self._call = None
                if time.monotonic() >= ends_at:
                    return None
                if isinstance(error, grpc.RpcError):
                    if not _may_be_repeated(error) or time.monotonic() >= gives_up_at:
                        raise self._service.told(error) from error
                    log.info("listening for %r goes on after a pause: %s", self._key, _details_of(error))
                time.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, ends_at - time.monotonic())))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                continue
            self._has_answered = True
            return answer
        return None


@contextmanager
def _cancelled_after(call: _ListenCall, within_s: float) -> Generator[None]:
    """End a call if the block takes longer."""
    if math.isinf(within_s):
        yield
        return
    timer = threading.Timer(min(within_s, threading.TIMEOUT_MAX), call.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _may_be_repeated(error: BaseException) -> bool:
    if not isinstance(error, grpc.Call):
        return False
    is_refused = any(name == signal_rpc.REFUSED for name, _ in error.trailing_metadata() or ())
    return not is_refused and error.code() not in _FINAL and _tls_problem(error.details() or "") is None


def _tls_problem(details: str) -> str | None:
    """Return why TLS can never be agreed on, and what to do, if that is what gRPC says; None if it may be later."""
    if not details.startswith(_NO_LINK):
        return None
    if (found := re.search(r"CERTIFICATE_VERIFY_FAILED(?:: ([\w ()-]+))?", details)) is not None:
        return (
            f"its certificate is not trusted ({found[1] or 'no reason is given'}): certificate= has to be the file of "
            f"that certificate, or of the authority that has issued it"
        )
    if "Hostname Verification Check failed" in details:
        return "its certificate is for another host: use a name or an address that the certificate has"
    if "WRONG_VERSION_NUMBER" in details:
        return (
            "it does not speak TLS: start it with --certificate and --key, or give plaintext=True, on its own machine "
            "no certificate="
        )
    return None


def _details_of(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call), "the errors of calls are calls"
    return error.details() or error.code().name


def _named(run: object) -> pb.Run | None:
    match run:
        case None:
            return None
        case (str(dag_id), str(run_id)):
            return pb.Run(dag=dag_id, run_id=run_id)
        case _:
            raise TypeError(f"run is a tuple of a dag_id and a run_id, not {run!r:.100}")


def _listed(key: str, namespace: str, one: pb.Signal) -> SignalVersion:
    return SignalVersion(
        key,
        value_of(one.value),
        None if one.dedup.startswith(AUTOMATIC) else one.dedup,
        one.version,
        sender=one.sender,
        sent_at=datetime.fromtimestamp(one.sent_at_s, UTC),
        run=(one.run.dag, one.run.run_id) if one.HasField("run") else None,
        namespace=namespace,
    )


def _is_of_this_machine(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
