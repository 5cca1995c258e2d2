"""Serving the pages over HTTP: the address, the link to log in with, and the end of the process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import structlog
import uvicorn

from headgate.supervisor.metrics.address import Address
from headgate.web.app import make_app
from headgate.web.views import Site

log = structlog.get_logger(__name__)

CONNECTIONS_MAX = 200
IDLE_S_MAX = 30  # of a connection that a browser keeps open
DRAIN_S = 3  # that requests have to end in when it stops
BACKLOG = 64
HEADER_BYTES_MAX = 32 * 1024  # of one request


class ServerRefused(Exception):
    """The pages cannot be served at this address; the text says why, and what to do."""


def check_address(address: Address) -> None:
    """Raise `ServerRefused` for an address that other machines reach: there are no users to tell apart yet."""
    if not address.is_loopback:
        raise ServerRefused(
            f"{address.host} is reached from other machines, and pages are for users of this one: give 127.0.0.1:PORT, "
            f"and reach it from elsewhere by `ssh -L {address.port}:127.0.0.1:{address.port}`"
        )


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at an address of this machine. Raises `ServerRefused`."""
    check_address(address)
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


def serve(site: Site, listener: socket.socket, *, tell: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or Ctrl-C. ``tell`` is given the link to log in with, once it can be opened."""
    tell(url_of(listener, site.links.new()))
    host, port, *_ = listener.getsockname()
    log.info("serving pages", address=f"{host}:{port}", pid=os.getpid())
    config = uvicorn.Config(
        make_app(site),
        http="h11",
        ws="none",
        lifespan="off",
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
    uvicorn.Server(config).run(sockets=[listener])
