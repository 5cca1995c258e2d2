"""Serving the pages over HTTP: the address, the link to log in with, and the end of the process."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import ClassVar

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headgate.supervisor.logs.repeated import Repeated
from headgate.supervisor.metrics.address import Address
from headgate.web.app import make_app
from headgate.web.senders import Front
from headgate.web.views import Site

log = structlog.get_logger(__name__)

CONNECTIONS_MAX = 200
IDLE_S_MAX = 30  # of a connection that a browser keeps open
REQUEST_S_MAX = 10.0  # from the begin of a connection, or of a request on it, until the request has come whole
ANSWER_S_MAX = 30.0  # until a client has taken what there is of an answer, or at least `ANSWER_BYTES_MIN` more of it
ANSWER_BYTES_MIN = 16 * 1024
KERNEL_BUFFER_BYTES = 32 * 1024  # of an answer, twice as many for Linux
DRAIN_S = 3  # that requests have to end in when it stops
BACKLOG = 64
HEADER_BYTES_MAX = 32 * 1024  # of one request


class ServerRefused(Exception):
    """The pages cannot be served at this address; the text says why, and what to do."""


def check_address(address: Address, front: Front, *, is_plain: bool, has_users: Callable[[], bool]) -> None:
    """Raise `ServerRefused` for an address that other machines reach, unless its visitors are told apart and protected.

    ``is_plain``: the operator has said that passwords may go over the network as they are.
    """
    if address.is_loopback:
        return
    reached = f"{address.host} is reached from other machines"
    if not front.hosts:
        raise ServerRefused(
            f"{reached}: say in web_hosts by which names, or serve this machine alone, at 127.0.0.1:{address.port}, "
            f"and reach it from elsewhere by `ssh -L {address.port}:127.0.0.1:{address.port}`"
        )
    if not front.proxies and not is_plain:
        raise ServerRefused(
            f"{reached}, and pages have no TLS of their own: name the proxy that has it in web_trusted_proxies, or set "
            f"web_plain_http if passwords and pages may be read on the way"
        )
    if not has_users():
        raise ServerRefused(
            f"{reached}, and there is no user to tell them apart: `headgate users add NAME --role ROLE` makes one"
        )


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at an address of this machine. Raises `ServerRefused`."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ServerRefused(
            f"cannot listen on {address.host}:{address.port}: {error.strerror or error}; "
            f"choose another with --listen or web_listen"
        ) from error
    return listener


def url_of(listener: socket.socket, token: str) -> str:
    """Return the link that logs in."""
    host, port, *_ = listener.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/login?token={token}"


class Connection(H11Protocol):
    """A connection that ends if a request, with its form, does not come whole within `REQUEST_S_MAX`.

    It ends, too, if the client does not take the answer within `ANSWER_S_MAX`. Otherwise `CONNECTIONS_MAX` of them
    that send nothing, or never read, would keep everybody out. Between requests `IDLE_S_MAX` holds.
    """

    silent: ClassVar[Repeated] = Repeated(log, "connections were ended that sent no whole request")
    deaf: ClassVar[Repeated] = Repeated(log, "connections were ended that did not take their answers")
    _end_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None
    _answer_left = 0  # bytes, when it was looked at last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so `pause_writing` tells of any byte that was not taken
        # The kernel says that there is room when a third of its own buffer is free, which may be megabytes: a client
        # that takes what it has slowly would seem to take nothing.
        if (accepted := transport.get_extra_info("socket")) is not None:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER_BYTES)
        self._await_request()

    def pause_writing(self) -> None:
        """Wait for the client to take what was written."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """All that was written was taken."""
        self._stop_awaiting_reader()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request. What comes bit by bit has no more time than the rest."""
        super().data_received(data)
        self._look(has_begun=True)

    def on_response_complete(self) -> None:
        """Go on with what came behind the request that is answered: it may be a part of the next one."""
        super().on_response_complete()
        self._look(has_begun=bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        self._stop_awaiting_reader()
        super().connection_lost(exc)

    def _look(self, *, has_begun: bool) -> None:
        if self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and has_begun):
            self._await_request()
        else:
            self._stop_waiting()

    def _await_request(self) -> None:
        if self._end_timer is None:
            self._end_timer = self.loop.call_later(REQUEST_S_MAX, self._end)

    def _stop_waiting(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None

    def _end(self) -> None:
        self.transport.abort()
        self.silent.note(self.loop.time(), limit_s=REQUEST_S_MAX)

    def _await_reader(self) -> None:
        self._answer_left = self.transport.get_write_buffer_size()
        self._answer_timer = self.loop.call_later(ANSWER_S_MAX, self._look_at_reader)

    def _stop_awaiting_reader(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def _look_at_reader(self) -> None:
        """Wait on for a client that takes a long answer slowly, and for no other."""
        if self._answer_left - self.transport.get_write_buffer_size() >= ANSWER_BYTES_MIN:
            self._await_reader()
            return
        self.transport.abort()
        self.deaf.note(self.loop.time(), limit_s=ANSWER_S_MAX)


def config_of(site: Site) -> uvicorn.Config:
    """Return how the pages are served."""
    return uvicorn.Config(
        make_app(site),
        http=Connection,
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=IDLE_S_MAX,
        timeout_graceful_shutdown=DRAIN_S,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
    )


def serve(site: Site, listener: socket.socket, *, tell: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or Ctrl-C. ``tell`` is given the link to log in with, once it can be opened.

    There is no link if other machines reach the pages: who listens on the way would have it, too.
    """
    if site.front.has_links:
        tell(url_of(listener, site.links.new()))
    host, port, *_ = listener.getsockname()
    log.info("serving pages", address=f"{host}:{port}", pid=os.getpid())
    uvicorn.Server(config_of(site)).run(sockets=[listener])
