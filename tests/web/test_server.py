"""Connections as a real server has them: none stays without a whole request, or with an answer that nobody reads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, cast

import pytest
import uvicorn
from structlog.testing import capture_logs
from tests.waiting import WITHIN_S, wait_until
from uvicorn.server import ServerState

from headgate.supervisor.logs import repeated
from headgate.supervisor.logs.repeated import Repeated
from headgate.supervisor.metrics.address import Address
from headgate.web import server
from headgate.web.views import Site

WHOLE = b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
FORM = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\nContent-Length: 9\r\n\r\nname"
Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(site: Site) -> Iterator[Connect]:
    """Returns a new connection to pages that are served by a thread."""
    with ExitStack() as opened:
        listener = opened.enter_context(server.listen(Address("127.0.0.1", 0)))
        served = uvicorn.Server(server.config_of(site))
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]})
        thread.start()
        where = listener.getsockname()
        try:
            yield lambda: opened.enter_context(socket.create_connection(where, timeout=WITHIN_S))
        finally:
            served.should_exit = True
            thread.join()


def read_to_end(connection: socket.socket) -> bytes:
    """Return what comes until the server ends the connection."""
    got = b""
    try:
        while part := connection.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


@pytest.mark.parametrize("sent", [b"", WHOLE[:20], WHOLE[:-2], FORM], ids=["nothing", "line", "header", "form"])
def test_a_connection_without_a_whole_request_ends(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "REQUEST_S_MAX", 0.05)
    silent = connect()
    with suppress(ConnectionError):  # on a slow machine it has ended before
        silent.sendall(sent)
    assert read_to_end(silent) == b""


def test_the_second_request_of_a_connection_has_to_come_whole_too(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S_MAX", WITHIN_S)
    connection = connect()
    connection.sendall(WHOLE)
    first = b""
    while not first.rstrip().endswith(b"</html>"):
        first += connection.recv(65536)
    monkeypatch.setattr(server, "REQUEST_S_MAX", 0.05)
    connection.sendall(WHOLE[:20])
    assert read_to_end(connection) == b""


@pytest.mark.parametrize("part", [WHOLE[:20], FORM], ids=["header", "form"])
def test_what_comes_together_with_the_request_before_has_to_come_whole_too(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(server, "REQUEST_S_MAX", 0.2)
    monkeypatch.setattr(server, "IDLE_S_MAX", WITHIN_S)
    connection = connect()
    connection.sendall(WHOLE + part)
    assert read_to_end(connection).startswith(b"HTTP/1.1 404")


def test_silent_connections_keep_nobody_out_for_long(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S_MAX", 0.05)
    for silent in [connect() for _ in range(server.CONNECTIONS_MAX - 1)]:
        assert read_to_end(silent) == b""
    monkeypatch.setattr(server, "REQUEST_S_MAX", WITHIN_S)
    other = connect()
    other.sendall(WHOLE)
    assert other.recv(12) == b"HTTP/1.1 404"


class Timers:
    """A loop that only notes what is to be done later."""

    def __init__(self) -> None:
        self.at: list[tuple[float, Timer]] = []
        self.now = 0.0

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self.at.append((delay, timer))
        return timer

    def create_task(self, running: Coroutine[Any, Any, None]) -> Future[None]:
        running.close()
        return Future()

    def time(self) -> float:
        return self.now


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Transport(asyncio.Transport):
    is_aborted = False
    left = 0  # of what was written
    high: int | None = None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        pass


def test_what_comes_bit_by_bit_gets_no_more_time(site: Site) -> None:
    timers, transport = Timers(), Transport()
    loop = cast("asyncio.AbstractEventLoop", timers)
    connection = server.Connection(server.config_of(site), ServerState(), {}, _loop=loop)
    connection.connection_made(transport)
    for byte in WHOLE[:-1]:
        connection.data_received(bytes([byte]))
    ((delay, timer),) = timers.at
    assert (delay, timer.is_cancelled) == (server.REQUEST_S_MAX, False)
    connection.data_received(WHOLE[-1:])
    assert timer.is_cancelled, "it has come whole"
    assert not transport.is_aborted


def test_the_log_tells_of_connections_that_ended_once_a_minute(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Connection, "silent", Repeated(server.log, "ended"))
    timers, config = Timers(), server.config_of(site)
    loop = cast("asyncio.AbstractEventLoop", timers)
    told = []
    with capture_logs() as logs:
        for now in (0.0, 1.0, repeated.TOLD_EVERY_S - 1, repeated.TOLD_EVERY_S):
            timers.now, transport = now, Transport()
            server.Connection(config, ServerState(), {}, _loop=loop).connection_made(transport)
            timers.at[-1][1].call()
            assert transport.is_aborted
            told.append([record["count"] for record in logs])
    assert told == [[1], [1], [1], [1, 3]]


def test_an_answer_that_nobody_reads_ends_its_connection(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Repeated(server.log, "ended")
    monkeypatch.setattr(server.Connection, "deaf", ends)
    monkeypatch.setattr(server, "ANSWER_S_MAX", 0.05)
    monkeypatch.setattr(repeated, "TOLD_EVERY_S", float("inf"))
    ends._told_at = 0.0
    deaf = connect()
    # More than the buffers of both sides have room for.
    deaf.sendall(b"GET /static/vendor/htmx/htmx.min.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 400)
    wait_until(lambda: ends.count == 1, "the end of the connection")
    other = connect()
    other.sendall(WHOLE)
    assert other.recv(12) == b"HTTP/1.1 404"


def test_a_client_that_takes_a_long_answer_slowly_gets_it_all(site: Site) -> None:
    timers, transport = Timers(), Transport()
    loop = cast("asyncio.AbstractEventLoop", timers)
    connection = server.Connection(server.config_of(site), ServerState(), {}, _loop=loop)
    connection.connection_made(transport)
    assert transport.high == 0, "any byte that is left is told"
    del timers.at[:]
    transport.left = 3 * server.ANSWER_BYTES_MIN
    connection.pause_writing()
    for _ in range(2):
        transport.left -= server.ANSWER_BYTES_MIN
        timers.at[-1][1].call()
        assert not transport.is_aborted
    assert [delay for delay, _ in timers.at] == [server.ANSWER_S_MAX] * 3
    transport.left = 0
    connection.resume_writing()
    assert timers.at[-1][1].is_cancelled
    transport.left = 2 * server.ANSWER_BYTES_MIN
    connection.pause_writing()
    transport.left -= server.ANSWER_BYTES_MIN - 1
    timers.at[-1][1].call()
    assert transport.is_aborted
