"""Webhooks: what requests become, how they are answered, and what a listener does with bad ones."""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import h11
import pytest
import structlog
import trio
import trio.testing
from tests.brokers.servers.certificates import Certify

from headgate.brokers.broker_errors import BrokerMisconfigured
from headgate.brokers.incoming import listener
from headgate.brokers.webhooks import PARSED_AT_ONCE_BYTES, WebhookProducer, WebhookTrigger
from headgate.protocol.values import decode_value
from headgate.testing.brokers.reading import Reading, names
from headgate.testing.brokers.station import WITHIN_S, free_port, wait_until
from headgate.testing.brokers.webhook_station import SHORT_LIMIT_BYTES, Message, WebhookStation, signed


@contextlib.contextmanager
def reading(station: WebhookStation, **kwargs: Any) -> Iterator[Reading]:
    uri = kwargs.pop("uri", station.uri)
    with Reading(station.trigger(**kwargs), uri=uri) as read:
        wait_until(lambda: accepts(station.port), "it listens")
        yield read


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_the_raw_event_has_body_path_query_and_headers_and_no_secrets(station: WebhookStation) -> None:
    with reading(station, body="json", headers="X-Shop, x-other") as read:
        body = '{"name": "Åsa"}'.encode()
        more = {"Authorization": "Bearer hunter22", "Cookie": "a=hunter22", "X-Shop": "eu", "content-type": "text/x"}
        answer = station.request(body, {**signed("m1", body), **more}, "/orders?a=b&c")
        assert (answer.status, answer.text) == (204, "")
        (payload,) = [decode_value(each) for each in read.payloads()]
    headers = {"content-type": "text/x", "webhook-id": "m1", "x-shop": "eu"}
    assert payload == {"body": {"name": "Åsa"}, "path": "/orders", "query": "a=b&c", "headers": headers}


def test_a_request_is_answered_after_it_is_stored_and_with_503_if_that_takes_too_long(
    station: WebhookStation,
) -> None:
    with reading(station, answer_within_s=0.2) as read:
        read.hold()
        body = names(1)[0].encode()
        answer = station.request(body, signed("m1", body))
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        read.confirm()
        while (status := station.request(body, signed("m1", body)).status) == 503:
            pass  # as its sender would: this machine may be as slow as that
        assert status == 204
        assert read.stored() == {names(1)[0]: 1}, "recognised by its id"


@pytest.mark.parametrize(
    ("verify", "headers", "body", "key"),
    [
        ("github", {"X-GitHub-Delivery": "guid"}, b"{}", "guid"),
        ("stripe", {}, b'{"id": "evt_1", "pending_webhooks": 1}', "evt_1"),
        ("none", {"webhook-id": "m1"}, b"{}", "m1"),
    ],
)
def test_a_delivery_is_known_by_what_its_sender_names_it(
    station: WebhookStation, verify: str, headers: dict[str, str], body: bytes, key: str
) -> None:
    secret = "hunter22-hunter22"
    digest = hmac.new(secret.encode(), body, "sha256").hexdigest()
    if verify == "github":
        headers = {**headers, "X-Hub-Signature-256": f"sha256={digest}"}
    elif verify == "stripe":
        at = signed("", b"")["webhook-timestamp"]
        digest = hmac.new(secret.encode(), f"{at}.".encode() + body, "sha256").hexdigest()
        headers = {**headers, "Stripe-Signature": f"t={at},v1={digest}"}
    uri = f"http://127.0.0.1:{station.port}" if verify == "none" else station._uri(secret=secret)
    with reading(station, verify=verify, body="json", uri=uri) as read:
        assert station.request(body, headers).status == 204
        (event,) = list(read._hosted.fired[0])
        assert b"pending_webhooks" not in event.payload, "Stripe counts there"
        assert event.key is not None
        assert event.key.startswith(f"webhook:/orders:{key}:")
        if verify != "none":
            assert (
                station.request(body, {**headers, "X-Hub-Signature-256": "sha256=00", "Stripe-Signature": "t=1"}).status
                == 401
            )


def test_an_earlier_secret_is_taken_while_it_is_named(station: WebhookStation) -> None:
    old = b"an older secret of the same size"
    query = f"/?previous=whsec_{base64.b64encode(old).decode().replace('+', '%2B')}"
    with reading(station, uri=station._uri(query=query)):
        for secret in (old, None):
            given = {} if secret is None else {"secret": secret}
            assert station.request(b"{}", signed("m1", b"{}", **given)).status == 204  # type: ignore[arg-type]
    with reading(station), structlog.testing.capture_logs() as records:
        answers = [station.request(b"{}", signed("m1", b"{}", secret=old)) for _ in range(3)]
        assert [(answer.status, answer.text) for answer in answers] == [(401, "its signature does not fit\n")] * 3
        assert len([each for each in records if each["event"] == "requests are refused"]) == 1
        assert station.request(b"{}", signed("m1", b"{}", at=1)).status == 401


def test_what_is_no_request_for_us_is_answered_by_what_is_wrong(station: WebhookStation) -> None:
    with reading(station) as read:
        good = signed("m1", b"{}")
        assert station.request(b"{}", good, "/else").status == 404
        got = station.request(b"", good, method="GET")
        assert (got.status, got.headers["allow"]) == (405, "POST")
        for body in (b"x" * (SHORT_LIMIT_BYTES + 1), iter([b"x" * SHORT_LIMIT_BYTES] * 9)):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                assert station.request(body, good).status == 413  # type: ignore[arg-type]
        endless = b"POST /orders HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2 * listener.HEAD_BYTES_MAX
        assert said(station, endless).startswith(b"HTTP/1.1 431 ")
        for bad in (b"hello", b"POST http://[ HTTP/1.1\r\nHost: a", b"POST /orders HTTP/1.1\r\nContent-Length: -1"):
            assert said(station, bad + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert read.payloads() == []
        assert station.request(b"{}", good).status == 204


def test_an_answer_to_head_has_no_body(station: WebhookStation) -> None:
    with reading(station):
        for path, status in (("/orders", b"405"), ("/else", b"404")):
            answer = said(station, b"HEAD %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
            assert answer.startswith(b"HTTP/1.1 %b " % status)
            assert answer.endswith(b"\r\n\r\n")


def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_read(station: WebhookStation) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in signed("m1", b"{}").items())
    head = f"POST /orders HTTP/1.1\r\nHost: a\r\n{lines}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    request = head.encode() + b"2\r\n{}\r\n0\r\n\r\n"
    with reading(station) as read:
        answer = said(station, request * 2)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert read.payloads() == []


def said(station: WebhookStation, request: bytes) -> bytes:
    """Return what is answered to these bytes."""
    with socket.create_connection(("127.0.0.1", station.port), 10) as link:
        link.sendall(request)
        return b"".join(iter(lambda: link.recv(4096), b""))


def test_a_connection_has_many_requests_and_one_may_ask_before_it_sends(station: WebhookStation) -> None:
    with reading(station) as read:
        connection = http.client.HTTPConnection("127.0.0.1", station.port, timeout=WITHIN_S)
        for name in names(3):
            connection.request("POST", "/orders", name.encode(), signed(name, name.encode()))
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (204, b"")
        connection.close()
        name = names(1, 3)[0]
        lines = [f"{key}: {value}\r\n" for key, value in signed(name, name.encode()).items()]
        head = f"POST /orders HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {len(name)}\r\n"
        with socket.create_connection(("127.0.0.1", station.port), 10) as link:
            link.sendall((head + "".join(lines) + "Connection: close\r\n\r\n").encode())
            assert link.recv(4096).startswith(b"HTTP/1.1 100 ")
            link.sendall(name.encode())
            assert link.recv(4096).startswith(b"HTTP/1.1 204 ")
        read.wait_stored(names(4))


def test_slow_and_many_connections_hold_up_no_others(station: WebhookStation, monkeypatch: Any) -> None:
    monkeypatch.setattr(listener, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(listener, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 4)
    head = b"POST /orders HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n"
    with reading(station):
        assert said(station, b"POST /or") == b"", "its head does not come"
        assert said(station, head + b"{").startswith(b"HTTP/1.1 408 ")
        monkeypatch.setattr(listener, "HEAD_TIMEOUT_S", 60.0)
        with contextlib.ExitStack() as idle:
            for _ in range(8):
                idle.enter_context(socket.create_connection(("127.0.0.1", station.port), 10))
            with contextlib.suppress(OSError):  # it is reset, perhaps while it sends
                assert said(station, head) == b"", "there are too many"
        # They are gone: there is room again.
        wait_until(lambda: works(station), "requests are answered")


async def test_chunks_of_a_byte_leave_others_their_turns() -> None:
    pieces = 100 * listener.PIECES_IN_A_ROW
    link = h11.Connection(h11.SERVER)
    head = b"POST /orders HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    link.receive_data(head + b"1\r\nx\r\n" * pieces + b"0\r\n\r\n")
    asked = link.next_event()
    assert isinstance(asked, h11.Request)
    listening = listener.Listener(listener.Address("127.0.0.1", 1), None)
    listening._endpoints["/orders"] = listener.Endpoint(echo, pieces)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        answer = await listening._answered(link, None, asked)
        nursery.cancel_scope.cancel()
    assert answer.text == "x" * pieces
    assert turns >= 99, "one for each 64 pieces"


async def echo(request: listener.HttpRequest) -> listener.HttpAnswer:
    return listener.HttpAnswer(200, request.body.decode())


async def never(_: listener.HttpRequest) -> listener.HttpAnswer:
    raise AssertionError("it is not asked")


def half_sent(path: str, sent: bytes = b"") -> tuple[h11.Connection, Any]:
    link = h11.Connection(h11.SERVER)
    link.receive_data(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\n".encode() + sent)
    return link, link.next_event()


async def test_a_request_is_of_the_reader_that_is_there_when_it_is_whole() -> None:
    listening = listener.Listener(listener.Address("127.0.0.1", 1), None)
    listening._endpoints["/orders"] = listener.Endpoint(never, 10)

    class Link:
        async def receive_some(self, _: int) -> bytes:
            listening._endpoints["/orders"] = listener.Endpoint(echo, 10)  # its watcher is started again
            return b"rest"

    link, asked = half_sent("/orders", b"half")
    assert (await listening._answered(link, Link(), asked)).text == "halfrest"


class Silent:
    """The connection of a sender that sends nothing more."""

    async def receive_some(self, _: int) -> bytes:
        await trio.sleep_forever()
        raise AssertionError


async def refused(listening: listener.Listener, link: h11.Connection, asked: Any) -> listener.HttpAnswer:
    with pytest.raises(listener.Refused) as caught:
        await listening._answered(link, None, asked)
    return caught.value.answer


async def test_the_requests_of_one_path_leave_room_for_those_of_others(monkeypatch: Any) -> None:
    monkeypatch.setattr(listener, "REQUESTS_OF_PATH_MAX", 2)
    listening = listener.Listener(listener.Address("127.0.0.1", 1), None)
    for path in ("/orders", "/returns"):
        listening._endpoints[path] = listener.Endpoint(echo, 10)
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            link, asked = half_sent("/orders")
            nursery.start_soon(listening._answered, link, Silent(), asked)
        await trio.testing.wait_all_tasks_blocked()
        assert (await refused(listening, *half_sent("/orders"))) == listener.TOO_MANY
        link, asked = half_sent("/returns", b"12345678")
        assert (await listening._answered(link, None, asked)).text == "12345678"
        nursery.cancel_scope.cancel()
    link, asked = half_sent("/orders", b"12345678")
    assert (await listening._answered(link, None, asked)).text == "12345678", "they have gone"


async def test_bodies_that_are_read_have_a_limit_together(monkeypatch: Any) -> None:
    monkeypatch.setattr(listener, "BODIES_BYTES_MAX", 7)
    listening = listener.Listener(listener.Address("127.0.0.1", 1), None)
    listening._endpoints["/orders"] = listener.Endpoint(echo, 10)
    async with trio.open_nursery() as nursery:
        link, asked = half_sent("/orders", b"half")
        nursery.start_soon(listening._answered, link, Silent(), asked)
        await trio.testing.wait_all_tasks_blocked()
        assert (await refused(listening, *half_sent("/orders", b"half"))) == listener.TOO_MANY
        nursery.cancel_scope.cancel()
    link, asked = half_sent("/orders", b"12345678")
    assert (await listening._answered(link, None, asked)).text == "12345678", (
        "one alone may be as long as its path says"
    )
    assert listening._bodies_bytes == 0


async def test_a_port_that_is_taken_holds_up_no_other_address() -> None:
    endpoint = listener.Endpoint(never, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken, trio.fail_after(WITHIN_S):
        address = listener.Address("127.0.0.1", taken.getsockname()[1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.listen, address, "/orders", endpoint)
            await trio.testing.wait_all_tasks_blocked()
            opened = await listener.listen(listener.Address("127.0.0.1", free_port()), "/orders", endpoint)
            await opened.remove("/orders")
            nursery.cancel_scope.cancel()  # before it has given up


def test_a_long_body_is_read_while_others_are_answered(station: WebhookStation, monkeypatch: Any) -> None:
    began, may_end = threading.Event(), threading.Event()
    raw_event = WebhookProducer._raw_event

    def slow(self: WebhookProducer, request: listener.HttpRequest) -> Any:
        if len(request.body) > PARSED_AT_ONCE_BYTES:
            began.set()
            assert may_end.wait(WITHIN_S)
        return raw_event(self, request)

    monkeypatch.setattr(WebhookProducer, "_raw_event", slow)
    body = b'"' + b"x" * PARSED_AT_ONCE_BYTES + b'"'
    limits = {"answer_within_s": WITHIN_S, "message_bytes_max": 2 * PARSED_AT_ONCE_BYTES}
    with reading(station, **limits) as read, ThreadPoolExecutor() as pool:
        long = pool.submit(station.request, body, signed("m0", body))
        try:
            assert began.wait(WITHIN_S)
            assert works(station)
        finally:
            may_end.set()
        assert long.result(WITHIN_S).status == 204
        assert len(read.payloads()) == 2


def works(station: WebhookStation, path: str = "/orders") -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return bool(station.request(b"{}", signed("m1", b"{}"), path).status == 204)
    return False


def test_more_requests_than_may_wait_are_told_to_come_again(station: WebhookStation) -> None:
    with reading(station, in_flight_max=2) as read:
        read.hold()
        station.post([Message(name, name.encode()) for name in names(2)])
        read.wait_stored(names(2))
        answer = station.request(b"{}", signed("m9", b"{}"))
        assert (answer.status, answer.text) == (503, "too many requests wait to be stored\n")
        read.confirm()
        wait_until(lambda: not station.pending(), "both are answered")


def test_requests_that_wait_are_answered_when_the_stream_is_closed(station: WebhookStation) -> None:
    answers: list[int] = []
    body = names(1)[0].encode()
    with reading(station) as read:
        read.hold()
        thread = threading.Thread(target=lambda: answers.append(station.request(body, signed("m1", body)).status))
        thread.start()
        read.wait_stored(names(1))
    thread.join(WITHIN_S)
    assert answers == [503]
    assert not accepts(station.port)


def test_paths_of_one_address_share_a_listener_and_end_alone(station: WebhookStation) -> None:
    triggers = [station.trigger(path=path) for path in ("orders", "/returns/eu")]
    with Reading(*triggers, uri=station.uri) as read:
        wait_until(lambda: accepts(station.port), "it listens")
        for path in ("/orders", "/returns/eu"):
            wait_until(partial(works, station, path), "it is read")
        assert [len(read.payloads(number)) for number in range(2)] == [1, 1]


def test_two_connections_cannot_have_one_path(station: WebhookStation) -> None:
    async def twice() -> None:
        endpoint = listener.Endpoint(lambda _: None, 1)  # type: ignore[arg-type, return-value]
        address = listener.Address("127.0.0.1", station.port)
        opened = await listener.listen(address, "/orders", endpoint)
        try:
            with pytest.raises(BrokerMisconfigured, match="is read over another connection already"):
                await listener.listen(address, "/orders", endpoint)
            with pytest.raises(BrokerMisconfigured, match="with other files of TLS"):
                await listener.listen(address._replace(tls=(("ssl_certfile", "x"),)), "/returns", endpoint)
        finally:
            await opened.remove("/orders")

    trio.run(twice)


def test_the_address_is_tried_and_a_running_listener_is_left_alone(station: WebhookStation) -> None:
    checked = station.trigger().check(station.uri)
    assert (checked.problem, checked.warnings, checked.lag) == ("", (), None)
    with reading(station):
        checked = station.trigger().check(station.uri)
        assert checked.problem == ""
        assert checked.warnings[0].startswith(f"somebody listens on 127.0.0.1:{station.port}")
    checked = station.trigger().check(station._uri(at="192.0.2.1"))
    assert "one cannot listen on 192.0.2.1" in checked.problem


def test_requests_come_over_tls_and_of_known_clients_only(station: WebhookStation, certify: Certify) -> None:
    server, clients, other = certify("server"), certify("clients"), certify("other")
    client = certify("client", issuer=clients)
    query = f"/?ssl_certfile={server[0]}&ssl_keyfile={server[1]}&ssl_ca_certs={clients[0]}"
    with reading(station, uri=station._uri("https", query=query)) as read:

        def status(*own: Any) -> int:
            context = ssl.create_default_context(cafile=str(server[0]))
            context.load_cert_chain(*own)
            connection = http.client.HTTPSConnection("127.0.0.1", station.port, context=context, timeout=WITHIN_S)
            with contextlib.closing(connection):
                connection.request("POST", "/orders", b"{}", signed("m1", b"{}"))
                return connection.getresponse().status

        assert status(*client) == 204
        with pytest.raises(OSError):  # noqa: PT011 - whatever TLS says first
            status(*other)
        assert said(station, b"POST /orders HTTP/1.1\r\n\r\n")[:4] != b"HTTP"
        assert len(read.payloads()) == 1


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"path": ""}, r"path must have 1\.\.256 printable characters"),
        ({"verify": "hmac"}, 'verify must be "standard", "github", "stripe" or "none", not \'hmac\''),
        ({"key": "id"}, 'key must be "auto", "header:FIELD" or "json:FIELD"'),
        ({"body": "xml"}, 'body must be "text", "json" or "bytes"'),
        ({"headers": ",".join(map(str, range(33)))}, "headers may name 32, not 33"),
        ({"answer_within_s": 0}, "answer_within_s must be more than 0"),
        ({"answer_within_s": 1_000}, "answer_within_s must be at most 300 s"),
        ({"in_flight_max": -1}, "in_flight_max must be more than 0"),
        ({"tolerance_s": float("nan")}, "tolerance_s must be more than 0"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WebhookTrigger(**{"connection": "hooks", "path": "orders", "verify": "standard", **kwargs})
    assert json.dumps(WebhookTrigger("hooks", "orders", "github").serialize())
