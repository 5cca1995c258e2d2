"""`HttpTrigger`, on a server that the tests run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import trio

from headgate.triggers import http
from headgate.triggers.base import TriggerEvent
from headgate.triggers.http import HttpTrigger, HttpTriggerError

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """A real HTTP server whose answers are given in order; the last one is repeated."""

    def __init__(self, server: ThreadingHTTPServer, answers: list[Answer]) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}/status"
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.answers = answers


def status(code: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(*answers: Answer) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            state.requests.append((self.command, self.path, dict(self.headers)))
            (state.answers.pop(0) if len(state.answers) > 1 else state.answers[0])(self)

        do_GET = do_HEAD = do_POST = answer

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state = Server(server, list(answers))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


async def fire(trigger: HttpTrigger) -> TriggerEvent:
    with trio.fail_after(30):
        (event,) = [event async for event in trigger.run()]
    return event


async def test_the_expected_status_fires_with_status_headers_and_body() -> None:
    with serving(status(200, "grün".encode("latin-1"), Content_Type="text/plain; charset=latin-1")) as server:
        event = await fire(HttpTrigger(server.url, headers={"X-Asked-By": "test"}))
    assert event.payload["status"] == 200
    assert event.payload["body"] == "grün"
    assert event.payload["headers"]["content-type"] == "text/plain; charset=latin-1"
    ((method, path, headers),) = server.requests
    assert (method, path, headers["X-Asked-By"]) == ("GET", "/status", "test")


async def test_it_polls_until_the_expected_status_comes() -> None:
    with serving(status(404), status(202), status(404), status(204)) as server:
        event = await fire(HttpTrigger(server.url, expected_status=204, poll_interval_s=0.001, tries_max=1))
    assert event.payload["status"] == 204
    assert len(server.requests) == 4


async def test_consecutive_failed_tries_raise_an_error_that_names_url_and_last_failure() -> None:
    with (
        serving(status(500), hang_up, status(503)) as server,
        pytest.raises(HttpTriggerError, match=r"3 tries failed.*status 503") as caught,
    ):
        await fire(HttpTrigger(server.url, poll_interval_s=0.001, tries_max=3))
    assert caught.value.url == server.url
    assert len(server.requests) == 3


async def test_an_answer_in_between_starts_the_count_of_failed_tries_anew() -> None:
    with serving(status(500), status(500), status(404), status(500), hang_up, status(200)) as server:
        event = await fire(HttpTrigger(server.url, poll_interval_s=0.001, tries_max=3))
    assert event.payload["status"] == 200


async def test_a_refused_connection_is_not_swallowed() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(HttpTriggerError, match=r"2 tries failed.*ConnectError") as caught:
            await fire(HttpTrigger(url, poll_interval_s=0.001, tries_max=2))
    assert caught.value.__cause__ is not None


async def test_a_server_that_never_answers_is_a_failed_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts in the kernel and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(HttpTriggerError, match=r"no complete answer within 0\.05 s"):
            await fire(HttpTrigger(url, timeout_s=0.05, tries_max=1))


async def test_an_error_shows_no_credentials_and_no_query() -> None:
    with serving(status(401)) as server:
        url = server.url.replace("http://", "http://user:secret@") + "?token=secret"
        with pytest.raises(HttpTriggerError, match="status 401") as caught:
            await fire(HttpTrigger(url, tries_max=1))
    assert "secret" not in str(caught.value)
    assert caught.value.url == server.url
    assert server.requests[0][2]["Authorization"].startswith("Basic ")


async def test_a_body_longer_than_the_limit_is_an_error_and_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "BODY_BYTES_MAX", 1000)
    with serving(status(200, b"x" * 1000), status(200, b"x" * 1001)) as server:
        assert len((await fire(HttpTrigger(server.url))).payload["body"]) == 1000
        with pytest.raises(HttpTriggerError, match="longer than 1,000 bytes"):
            await fire(HttpTrigger(server.url))


async def test_a_redirect_is_followed_unless_it_is_what_is_expected() -> None:
    with serving(status(302, Location="/there"), status(200)) as server:
        assert (await fire(HttpTrigger(server.url))).payload["status"] == 200
        assert server.requests[1][1] == "/there"
    with serving(status(302, Location="/there")) as server:
        event = await fire(HttpTrigger(server.url, expected_status=302))
    assert event.payload["headers"]["location"] == "/there"


async def test_the_certificates_are_read_once_for_all_triggers() -> None:
    with serving(status(200)) as server:
        await fire(HttpTrigger(server.url))
        before = http._certificates.cache_info()
        await fire(HttpTrigger(server.url))
    assert http._certificates.cache_info().misses == before.misses


@pytest.mark.parametrize("url", ["", "ftp://host/", "http://", "//host/", "http://host:port/"])
def test_what_is_not_a_url_of_http_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)url"):
        HttpTrigger(url)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"method": "GET /"},
        {"headers": {"a": "1\r\nb: 2"}},
        {"expected_status": 99},
        {"poll_interval_s": 0},
        {"timeout_s": float("inf")},
        {"tries_max": 0},
    ],
)
def test_arguments_that_no_request_can_have_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        HttpTrigger("http://host/", **kwargs)


def test_an_http_trigger_is_restored_equal() -> None:
    trigger = HttpTrigger("http://host/", method="HEAD", headers={"a": "b"}, expected_status=204, tries_max=2)
    classpath, kwargs = trigger.serialize()
    assert classpath == "headgate.triggers.http.HttpTrigger"
    assert HttpTrigger(**kwargs).serialize() == (classpath, kwargs)
