"""The server of signals: its address, its limits, who may call it, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import structlog

from headgate.protocol import signal_rpc
from headgate.signal_server.health import Health
from headgate.signal_server.refusals import RefusedTokens
from headgate.signal_server.service import Service, TokenRequired
from headgate.signal_server.store_thread import StoreThread
from headgate.store.db.transaction import Database
from headgate.supervisor.logs import process_log
from headgate.supervisor.metrics.address import Address, parse_address
from headgate.supervisor.metrics.endpoint import Endpoint
from headgate.supervisor.metrics.service_manager import ServiceManager

log = structlog.get_logger(__name__)

CALLS_MAX = 32  # for which there is room however many listen; they wait for the one thread that has the database
LISTENERS_MAX = 200  # each has a thread, and one answer (`headgate.signal_server.service.LISTEN_BYTES`)
CONNECTIONS_MAX = 500
CALLS_A_CONNECTION_MAX = CALLS_MAX + LISTENERS_MAX
METADATA_BYTES_MAX = 8 * 1024
DRAIN_S = 5.0  # that calls have to end in when it stops
TOKEN_CHARS_MIN = 16

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers must not share a port without knowing it
    ("grpc.max_receive_message_length", signal_rpc.REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", signal_rpc.RESPONSE_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.max_concurrent_streams", CALLS_A_CONNECTION_MAX),
    # With it a connection counts calls that were cancelled, many at once, as open ones for ever, and takes no more.
    ("grpc.http.overload_protection", 0),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    *signal_rpc.KEEPALIVE_OPTIONS,
    # Clients that listen ask as well whether the link is there, oftener than gRPC allows by itself.
    ("grpc.http2.min_ping_interval_without_data_ms", signal_rpc.KEEPALIVE_S * 1000 // 3),
    ("grpc.keepalive_permit_without_calls", 1),
)


class ServerRefused(Exception):
    """The server cannot be started as it was asked to; the text says why, and what to do."""


def check_token(token: str, source: str) -> str:
    """Return a token as it is sent; ``source`` says where it is from. Raises `ServerRefused`."""
    try:
        token = signal_rpc.sendable_token(token)
    except ValueError as error:
        raise ServerRefused(f"the token in {source} {error}") from None
    if len(token) < TOKEN_CHARS_MIN:
        raise ServerRefused(f"the token in {source} must have {TOKEN_CHARS_MIN} characters or more, not {len(token)}")
    return token


def check_address(address: str, *, has_token: bool, is_encrypted: bool) -> None:
    """Raise `ServerRefused` for an address that is no HOST:PORT, or that others reach without a token or in clear."""
    try:
        where = parse_address(address)
    except ValueError:
        raise ServerRefused(f"{address!r} is not an address: give HOST:PORT, for example 127.0.0.1:50551") from None
    if where.is_loopback:
        return
    if not has_token:
        raise ServerRefused(f"{address} is reached from other machines: without a token give an address of this one")
    if not is_encrypted:
        raise ServerRefused(
            f"{address} is reached from other machines, and the token would be sent in clear: give --certificate and "
            f"--key, or --plaintext if something else encrypts the link"
        )


def metrics_address(text: str | None) -> Address | None:
    """Return where metrics are answered; None if they are not. Raises `ServerRefused`."""
    try:
        return None if text is None else parse_address(text)
    except ValueError as error:
        raise ServerRefused(f"--metrics: {error}") from None


def _try_address(address: str) -> None:
    """Raise `ServerRefused` if nothing can listen at an address: gRPC does not say why, and logs lines of its own."""
    where = parse_address(address)
    try:
        family, kind, _, _, bound = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(bound)
            probe.listen()
    except OSError as error:
        raise _not_open(address, error, "--grpc") from None


def _not_open(address: str, error: OSError, option: str) -> ServerRefused:
    return ServerRefused(f"cannot listen on {address}: {error.strerror or error}; choose another address with {option}")


class SignalServer:
    """A running server. Use it in a ``with`` block, at whose end it stops."""

    def __init__(
        self,
        database: Database,
        address: str,
        *,
        token: str | None,
        identity: tuple[bytes, bytes] | None = None,
        metrics: Address | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Open ``address`` and answer on it; port 0 takes a free one, which `address` has then.

        ``metrics`` is where it answers /metrics, /livez and /readyz over HTTP, if it does; `metrics_port` is the port.

        Without a ``token`` everybody who reaches it may call. ``identity``: the key and the certificates for TLS, as
        PEM. ``failed`` is called, in another thread, if it can answer no more. Raises `ServerRefused`.
        """
        _try_address(address)
        self._health = Health()
        self._refused = RefusedTokens(self._health)
        self._pool = ThreadPoolExecutor(CALLS_MAX + LISTENERS_MAX, thread_name_prefix="call")
        self._server = grpc.server(
            self._pool,
            interceptors=[] if token is None else [TokenRequired(token, self._refused)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=CALLS_MAX + LISTENERS_MAX,
        )
        try:
            if identity is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([identity]))
        except RuntimeError as error:
            self._pool.shutdown()
            raise ServerRefused(f"{address} cannot be opened: {error}") from None
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._store = StoreThread(database, listeners_max=LISTENERS_MAX, failed=failed, health=self._health)
        try:
            self._endpoint = None if metrics is None else Endpoint(metrics, self._store.loop)
        except OSError as error:
            self._server.stop(None)
            self._store.close()
            self._pool.shutdown()
            raise _not_open(str(metrics), error, "--metrics") from None
        self.metrics_port = None if self._endpoint is None else self._endpoint.port
        self._server.add_generic_rpc_handlers((Service(self._store, self._health).handlers(),))
        self._server.start()
        if metrics is not None:
            log.info("answering /metrics, /livez and /readyz", host=metrics.host, port=self.metrics_port)
        log.info(
            "serving signals",
            address=self.address,
            tls=identity is not None,
            token=token is not None,
            database=database.engine.dialect.name,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take no more calls, end those that listen, let the others end within `DRAIN_S`.

        Raises what the thread with the database has failed with.
        """
        self._health.is_leaving = True
        self._store.end_listeners()
        self._server.stop(DRAIN_S).wait()
        if self._endpoint is not None:
            self._endpoint.close()
        try:
            self._store.close()
        finally:
            self._pool.shutdown()
            self._refused.tell_rest()


def serve(
    database: Database,
    address: str,
    *,
    token: str | None,
    identity: tuple[bytes, bytes] | None,
    metrics: Address | None = None,
    tell: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; ``tell`` is given the address once it is open, and systemd is told as well.

    Raises `ServerRefused`, and `DatabaseReplaced` if nothing more can be stored.
    """
    ends = {signal.SIGTERM, signal.SIGINT}
    manager = ServiceManager(os.environ)
    # Blocked before there are other threads, so that all of them leave these to `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        with process_log.in_background():
            with SignalServer(
                database,
                address,
                token=token,
                identity=identity,
                metrics=metrics,
                failed=lambda: os.kill(os.getpid(), signal.SIGTERM),
            ) as server:
                tell(server.address)
                manager.ready()
                asked = signal.Signals(signal.sigwait(ends))
                manager.stopping(DRAIN_S)
                log.info("the server of signals stops", signal=asked.name, within_s=DRAIN_S)
            log.info("the server of signals has ended")
    finally:
        while signal.sigpending() & ends:
            signal.sigwait(ends)  # a second one changes nothing
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        manager.close()


def read_identity(certificate: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    """Return what TLS needs from two files of PEM; None without them. Raises `ServerRefused`."""
    if certificate is None or key is None:
        if certificate is key:
            return None
        raise ServerRefused("--certificate and --key go together")
    try:
        # gRPC would only say that it could not bind.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        return key.read_bytes(), certificate.read_bytes()
    except ssl.SSLError as error:
        raise ServerRefused(f"{certificate} and {key} are not PEM of a certificate and its key: {error}") from None
    except OSError as error:
        raise ServerRefused(f"{error.filename or certificate}: {error.strerror}") from None
