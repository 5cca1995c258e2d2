"""Scrapes and health checks over real sockets; the loop is a function that answers at once, or not at all."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from tests.waiting import WITHIN_S

from headgate.supervisor.metrics import asking, catalogue, endpoint
from headgate.supervisor.metrics.address import parse_address
from headgate.supervisor.metrics.asking import Loop, Report
from headgate.supervisor.metrics.endpoint import Endpoint
from headgate.supervisor.metrics.figures import Figures, Labels, Snapshot

WELL = {"lease": (True, "held"), "runner": (True, "running")}
HERE = parse_address("127.0.0.1:0")


class Answering:
    """A loop that answers each question at once, while `checks` are set."""

    def __init__(self) -> None:
        self.checks: dict[str, tuple[bool, str]] | None = dict(WELL)
        self.asked = 0
        self.loop = Loop(self._wake)

    def _wake(self) -> None:
        self.asked += 1
        if self.checks is not None:
            figures = Figures()
            gauges: dict[tuple[str, Labels], float] = {
                (catalogue.READY.name, ()): 1.0,
                (catalogue.DATABASE_AWAY.name, ()): 70.0,
            }
            snapshot = Snapshot(figures.counts(), figures.histograms(), gauges)
            self.loop.answer(Report(snapshot, self.checks, catalogue.READY))


@pytest.fixture
def answering() -> Answering:
    return Answering()


@pytest.fixture
def served(answering: Answering) -> Iterator[Endpoint]:
    opened = Endpoint(HERE, answering.loop)
    yield opened
    opened.close()


def get(served: Endpoint, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=WITHIN_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_scrape_asks_the_loop_each_time(answering: Answering, served: Endpoint) -> None:
    for _ in range(2):
        status, body = get(served, "/metrics")
        assert status == 200
        assert "headgate_events_stored_total 0.0" in body.splitlines()
    assert answering.asked == 2


def test_a_supervisor_that_does_all_its_work_is_ready(served: Endpoint) -> None:
    status, body = get(served, "/readyz")
    checks = {"lease": {"ok": True, "says": "held"}, "runner": {"ok": True, "says": "running"}}
    assert (status, json.loads(body)) == (200, {"ready": True, "checks": checks})


def test_one_check_that_does_not_hold_makes_it_unready_and_is_named(answering: Answering, served: Endpoint) -> None:
    answering.checks = {**WELL, "runner": (False, "the runner is absent")}
    status, body = get(served, "/readyz")
    assert status == 503
    assert json.loads(body)["checks"]["runner"] == {"ok": False, "says": "the runner is absent"}
    assert get(served, "/livez")[0] == 200


def test_a_loop_that_is_busy_is_told_of_and_is_alive(
    answering: Answering, served: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking.Loop.ask, "__defaults__", (0.01,))
    answering.checks = None
    answering.loop.turn_began_at = time.monotonic() - 2.0
    status, body = get(served, "/metrics")
    assert (status, body.startswith("the supervisor's loop has been busy for 2.")) == (503, True)
    status, body = get(served, "/readyz")
    assert (status, json.loads(body)["ready"]) == (503, False)
    assert get(served, "/livez") == (200, "ok\n")


def test_what_a_busy_loop_said_last_is_repeated_as_unready_so_that_alerts_go_on(
    answering: Answering, served: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "headgate_ready 1.0" in get(served, "/metrics")[1].splitlines()
    monkeypatch.setattr(asking.Loop.ask, "__defaults__", (0.01,))
    answering.checks = None
    for _ in range(2):
        status, body = get(served, "/metrics")
        assert status == 200
        assert {"headgate_ready 0.0", "headgate_database_away_seconds 70.0"} <= set(body.splitlines())
    assert get(served, "/readyz")[0] == 503
    answering.checks = WELL
    assert "headgate_ready 1.0" in get(served, "/metrics")[1].splitlines()


def test_a_loop_that_does_not_turn_any_more_is_not_alive(answering: Answering, served: Endpoint) -> None:
    answering.loop.turn_began_at = time.monotonic() - asking.TURN_MAX_S - 1.0
    assert get(served, "/livez")[0] == 503
    assert answering.asked == 0


def test_other_paths_and_methods_are_refused(answering: Answering, served: Endpoint) -> None:
    assert get(served, "/")[0] == 404
    assert get(served, "/metrics/../livez")[0] == 404
    assert get(served, "/metrics", method="POST")[0] == 501
    assert answering.asked == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8781", "127.0.0.1.evil.example", "[2001:db8::1]:1", ""])
def test_a_page_of_another_name_cannot_read_what_only_this_machine_may(
    answering: Answering, served: Endpoint, host: str
) -> None:
    assert get(served, "/metrics", Host=host)[0] == 421
    assert answering.asked == 0


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8781", "127.0.0.1:1", "[::1]:8781", "127.8.8.8"])
def test_this_machine_has_several_names(served: Endpoint, host: str) -> None:
    assert get(served, "/livez", Host=host)[0] == 200


def test_an_address_for_all_machines_takes_every_name(answering: Answering) -> None:
    opened = Endpoint(parse_address("0.0.0.0:0"), answering.loop)
    try:
        assert get(opened, "/livez", Host="headgate.example")[0] == 200
    finally:
        opened.close()


def test_clients_that_say_nothing_are_few_and_are_left(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(endpoint.REQUESTS_MAX)]
    one_more = socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN_S)
    assert one_more.recv(1) == b"", "more than REQUESTS_MAX at a time are served"
    for connection in (*silent, one_more):
        connection.close()


def test_a_client_that_does_not_go_on_is_left(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.05)
    opened = Endpoint(HERE, answering.loop)
    try:
        with socket.create_connection(("127.0.0.1", opened.port), timeout=WITHIN_S) as slow:
            slow.sendall(b"GET /metr")
            assert slow.recv(1) == b""
        assert get(opened, "/livez")[0] == 200
    finally:
        opened.close()


def test_an_address_that_is_taken_is_an_error(answering: Answering, served: Endpoint) -> None:
    with pytest.raises(OSError, match="in use"):
        Endpoint(parse_address(f"127.0.0.1:{served.port}"), answering.loop)


@pytest.mark.parametrize("text", ["8781", ":8781", "localhost", "localhost:x", "::1:8781", "[]:1", "a:70000", "a:-1"])
def test_an_address_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT, for example 127\.0\.0\.1:8781"):
        parse_address(text)


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    address = parse_address("[::1]:8781")
    assert (address.host, address.port, address.is_loopback) == ("::1", 8781, True)
    assert not parse_address("[::]:8781").is_loopback
