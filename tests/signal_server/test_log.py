"""What the server of signals logs: where it listens, callers without the token, the database, and its end."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.signal_server.rig import TOKEN, Bare, away, database_of, serving, status_of
from tests.signal_server.test_command import serving as serving_process
from tests.signals.test_remote import identity_in
from tests.waiting import WITHIN_S, wait_until

from headgate.protocol.signal_rpc import signals_pb2 as pb
from headgate.signal_server import store_thread
from headgate.signal_server.health import Health
from headgate.signal_server.refusals import RefusedTokens
from headgate.signal_server.server import SignalServer
from headgate.store.db import engine
from headgate.store.errors import DatabaseReplaced
from headgate.supervisor.logs import repeated

REFUSED = "calls without the right token are refused"
Logs = list[MutableMapping[str, Any]]


def events(logs: Logs) -> list[str]:
    return [record["event"] for record in logs]


@pytest.mark.parametrize(("log_format", "read"), [("json", json.loads), ("human", str)])
def test_its_log_has_the_format_that_is_set(
    database_url: str, tmp_path: Path, log_format: str, read: Callable[[str], Any]
) -> None:
    log = tmp_path / "log"
    with log.open("w") as stderr:
        with serving_process(
            database_url, stderr=stderr, HEADGATE_SIGNALS_TOKEN=TOKEN, HEADGATE_LOG_FORMAT=log_format
        ) as (process, address):
            process.send_signal(signal.SIGTERM)
            assert process.wait(WITHIN_S) == 0
    text = log.read_text()
    assert TOKEN not in text
    lines = [read(line) for line in text.splitlines()]
    if log_format == "human":
        assert [f"address={address}" in line and "serving signals" in line for line in lines] == [True, False, False]
        return
    assert events(lines) == ["serving signals", "the server of signals stops", "the server of signals has ended"]
    assert {name: lines[0][name] for name in ("address", "tls", "token")} == {
        "address": address,
        "tls": False,
        "token": True,
    }
    assert (lines[0]["level"], lines[0]["logger"]) == ("info", "headgate.signal_server.server")
    assert lines[1]["signal"] == "SIGTERM"


def test_a_handshake_that_fails_adds_no_line_of_another_form(sqlite_url: str, tmp_path: Path) -> None:
    log, (certificate, key, _) = tmp_path / "log", identity_in(tmp_path)
    (tmp_path / "key.pem").write_bytes(key)
    tls = ("--certificate", str(certificate), "--key", str(tmp_path / "key.pem"))
    with log.open("w") as stderr:
        with serving_process(sqlite_url, "--no-token", *tls, stderr=stderr) as (process, address):
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), WITHIN_S) as link:
                link.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with suppress(ConnectionResetError):
                    while link.recv(1000):
                        pass  # until the server has closed it
            process.send_signal(signal.SIGTERM)
            assert process.wait(WITHIN_S) == 0
    first, *_ = [json.loads(line) for line in log.read_text().splitlines()]
    assert (first["event"], first["tls"]) == ("serving signals", True)


def test_callers_without_the_token_are_told_of_now_and_then(sqlite_url: str) -> None:
    with capture_logs() as logs:
        with serving(sqlite_url) as server, Bare(server.address) as bare:
            for _ in range(3):
                assert status_of(lambda: bare.send(pb.NewSignal(key="a"), metadata=()))[0] == "UNAUTHENTICATED"
            (told,) = (record for record in logs if record["event"] == REFUSED)
            assert (told["log_level"], told["calls"]) == ("warning", 1)
            assert told["last_from"].startswith("ipv4:127.0.0.1:")
        assert [record["calls"] for record in logs if record["event"] == REFUSED] == [1, 2], "the rest at its end"


def test_a_caller_who_repeats_refused_calls_makes_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    refused = RefusedTokens(Health())
    with capture_logs() as logs:
        for number in range(100):
            refused.add(f"peer {number}")
        now += repeated.TOLD_EVERY_S
        refused.add("the next")
        refused.tell_rest()
    assert [(record["calls"], record["last_from"]) for record in logs] == [(1, "peer 0"), (100, "the next")]


def test_the_beginning_and_the_end_of_an_outage_are_logged_once_though_nobody_asks_any_more(
    own_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SQLITE_BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(store_thread, "RETRY_S", 0.05)
    with capture_logs() as logs, serving(own_database_url) as server, Bare(server.address) as bare:
        bare.send(pb.NewSignal(key="a"))
        with away(own_database_url):
            for _ in range(3):
                assert status_of(lambda: bare.send(pb.NewSignal(key="a")))[0] == "UNAVAILABLE"
            assert "the database is back" not in events(logs)
        wait_until(lambda: "the database is back" in events(logs), lambda: f"the end of the outage: {logs}")
        told = [record for record in logs if "database" in record["event"]]
        assert told[-1]["log_level"] == "info"
        assert told[-1]["away_s"] > 0
        # A database that goes away may say so in two ways, of which each is told once.
        assert {record["event"] for record in told[:-1]} == {"the database cannot be used"}
        errors = [record["error"].partition(":")[0] for record in told[:-1]]
        assert 1 <= len(errors) <= 2


def test_an_error_that_ends_it_is_logged(sqlite_url: str, tmp_path: Path) -> None:
    has_failed = threading.Event()
    server = SignalServer(database_of(sqlite_url), "127.0.0.1:0", token=TOKEN, failed=has_failed.set)
    with capture_logs() as logs, Bare(server.address) as bare:
        bare.send(pb.NewSignal(key="a"))
        (tmp_path / "headgate.db").rename(tmp_path / "moved.db")
        status_of(lambda: bare.send(pb.NewSignal(key="a")))
        assert has_failed.wait(WITHIN_S)
        with pytest.raises(DatabaseReplaced):
            server.stop()
    (told,) = (record for record in logs if record["event"] == "the server of signals cannot go on")
    assert told["log_level"] == "error"
    assert told["error"].startswith("DatabaseReplaced: ")
