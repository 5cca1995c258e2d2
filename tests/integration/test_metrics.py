"""A supervisor that is scraped, as Prometheus does it, while it works."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.conftest import StartPair
from tests.integration.test_pair import add_subscribers, wait_all_stored, write_log
from tests.waiting import WITHIN_S, wait_until

from headgate.store.store import Store

EVENTS = 50


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WITHIN_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(port: int) -> dict[str, float]:
    _, body = get(port, "/metrics")
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def hear(systemd: socket.socket, beginning: bytes) -> None:
    """Wait until systemd is told something that begins like this; until then it hears how the service is."""
    while not (told := systemd.recv(4096)).startswith(beginning):
        assert told.startswith(b"STATUS="), told


def test_a_supervisor_says_how_it_is_what_it_has_stored_and_that_its_runner_died(
    start_pair: StartPair, users_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "log", events=EVENTS)
    names = add_subscribers(users_store, tmp_path / "log", 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(WITHIN_S)
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
        pair = start_pair(metrics_listen="127.0.0.1:0", respawn_wait_s="0.1")
        port = int(pair.wait_log("answering /metrics")["port"])
        runner = pair.wait_ready()
        hear(systemd, b"READY=1")
        wait_all_stored(users_store, names, EVENTS)

        status, body = get(port, "/readyz")
        assert (status, json.loads(body)["ready"]) == (200, True)
        values = scrape(port)
        assert values["headgate_events_stored_total"] == 2 * EVENTS
        assert values["headgate_triggers running"] == 2
        assert values["headgate_process_memory_bytes runner"] > 0
        assert (values["headgate_runner_ends_total"], values["headgate_runner_up"]) == (0, 1)

        os.kill(runner, signal.SIGKILL)
        wait_until(lambda: scrape(port)["headgate_runner_ends_total"] == 1, "the end of the runner in a scrape")
        wait_until(lambda: get(port, "/readyz")[0] == 200, "another runner")
        assert pair.stop() == 0
        hear(systemd, b"STOPPING=1\nEXTEND_TIMEOUT_USEC=")
