"""`/metrics`, `/livez` and `/readyz` of the server of signals."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from tests.signal_server.rig import TOKEN, Bare, away, database_of, serving, status_of
from tests.signal_server.test_command import run
from tests.signal_server.test_command import serving as serving_process
from tests.waiting import WITHIN_S, wait_until

from headgate.protocol.signal_rpc import signals_pb2 as pb
from headgate.signal_server import store_thread
from headgate.signal_server.server import ServerRefused, SignalServer, metrics_address
from headgate.store.db import engine
from headgate.supervisor.metrics import asking
from headgate.supervisor.metrics.address import parse_address
from headgate.supervisor.metrics.catalogue import OF_SIGNAL_SERVERS, PREFIX

HERE = parse_address("127.0.0.1:0")


def get(port: int | None, path: str) -> tuple[int, str]:
    assert port is not None
    connection = HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scraped(server: SignalServer) -> dict[tuple[str, ...], float]:
    status, body = get(server.metrics_port, "/metrics")
    assert status == 200
    return {
        (sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is decides about no test."""
    monkeypatch.setattr(asking.Loop.ask, "__defaults__", (WITHIN_S,))


@contextmanager
def scrapable(url: str) -> Generator[tuple[SignalServer, Bare]]:
    with serving(url, metrics=HERE) as server, Bare(server.address) as bare:
        yield server, bare


def test_it_says_what_it_has_done(database_url: str) -> None:
    with scrapable(database_url) as (server, bare):
        before = scraped(server)
        counters = [metric for metric in OF_SIGNAL_SERVERS if metric.kind == "counter"]
        assert all(value == 0 for (name, *_), value in before.items() if name in ("signals_calls_total",))
        assert {metric.full_name.removeprefix(PREFIX) for metric in counters} <= {name for name, *_ in before}
        bare.send(pb.NewSignal(key="a", dedup="d"), pb.NewSignal(key="a"))
        bare.send(pb.NewSignal(key="a", dedup="d"))
        assert status_of(lambda: bare.list(""))[0] == "INVALID_ARGUMENT"
        assert status_of(lambda: bare.list("a", metadata=()))[0] == "UNAUTHENTICATED"
        stream = bare.listen("a", after=0)
        next(stream)
        after = scraped(server)
        stream.cancel()
        assert {
            name: after[name]
            for name in (
                ("signals_calls_total", "send", "answered"),
                ("signals_calls_total", "list", "refused"),
                ("signals_calls_total", "listen", "answered"),
                ("signals_sent_total", "stored"),
                ("signals_sent_total", "known"),
                ("signals_tokens_refused_total",),
                ("signals_listeners",),
                ("signals_listeners_max",),
                ("signals_ready",),
                ("database_away_seconds",),
            )
        } == {
            ("signals_calls_total", "send", "answered"): 2,
            ("signals_calls_total", "list", "refused"): 1,
            ("signals_calls_total", "listen", "answered"): 0,
            ("signals_sent_total", "stored"): 2,
            ("signals_sent_total", "known"): 1,
            ("signals_tokens_refused_total",): 1,
            ("signals_listeners",): 1,
            ("signals_listeners_max",): 200,
            ("signals_ready",): 1,
            ("database_away_seconds",): 0,
        }
        assert after["signals_memory_bytes",] > 0
        ended = ("signals_calls_total", "listen", "answered")
        wait_until(lambda: scraped(server)[ended] == 1, "the end of the call that listened")


def test_it_is_ready_unless_its_database_is_away_which_it_asks_itself(
    own_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SQLITE_BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(asking, "AWAY_S_MAX", 0.0)
    monkeypatch.setattr(store_thread, "FRESH_S", 0.0)
    monkeypatch.setattr(store_thread, "RETRY_S", 0.05)
    with scrapable(own_database_url) as (server, _):
        # Nobody has called yet.
        status, body = get(server.metrics_port, "/readyz")
        checks = {
            "database": {"ok": True, "says": "the database is used"},
            "staying": {"ok": True, "says": "not asked to stop"},
        }
        assert (status, json.loads(body)) == (200, {"ready": True, "checks": checks})
        with capture_logs() as logs, away(own_database_url):
            status, body = get(server.metrics_port, "/readyz")
            database = json.loads(body)["checks"]["database"]
            assert (status, database["ok"]) == (503, False)
            assert database["says"].startswith("the database cannot be used for ")
            assert logs[0]["event"] == "the database cannot be used"
            assert get(server.metrics_port, "/livez") == (200, "ok\n")
        wait_until(lambda: get(server.metrics_port, "/readyz")[0] == 200, "the database is back")


def test_a_thread_that_does_not_turn_any_more_is_not_alive(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking.Loop, "turns_for_s", lambda loop: asking.TURN_MAX_S)
    with scrapable(sqlite_url) as (server, _):
        status, body = get(server.metrics_port, "/livez")
    assert (status, body) == (503, "the thread that has the database has been busy for 60.0 s\n")


def test_the_command_answers_where_it_is_told(sqlite_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def answering_at() -> int | None:
        text = log.read_text()
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return next((record["port"] for record in records if record["event"].startswith("answering /metrics")), None)

    with log.open("w") as stderr:
        with serving_process(sqlite_url, "--no-token", "--metrics", "127.0.0.1:0", stderr=stderr) as (process, _):
            port = wait_until(answering_at, "a record with the port")
            status, body = get(port, "/metrics")
            assert (status, "headgate_signals_ready 1.0" in body.splitlines()) == (200, True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WITHIN_S) == 0


def test_an_address_that_cannot_be_used_is_refused_and_nothing_is_left_behind(sqlite_url: str) -> None:
    assert metrics_address(None) is None
    with pytest.raises(ServerRefused, match="--metrics: '8782' is not HOST:PORT"):
        metrics_address("8782")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerRefused, match=f"cannot listen on {address}: .*; choose another .* with --metrics"):
            SignalServer(database_of(sqlite_url), "127.0.0.1:0", token=TOKEN, metrics=parse_address(address))
        code, said = run(sqlite_url, "--grpc", "127.0.0.1:0", "--no-token", "--metrics", address)
    assert (code, "with --metrics" in said) == (2, True), said
