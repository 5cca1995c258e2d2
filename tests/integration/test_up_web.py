"""The pages beside a supervisor: from a process of their own, without its key, and not for longer than it."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.integration.conftest import StartStation
from tests.integration.pair import WITHIN_S, wait_until


def is_served(address: str) -> bool:
    """Whether the page to log in is there."""
    try:
        with urllib.request.urlopen(f"http://{address}/login", timeout=WITHIN_S) as answer:
            return "Log in" in answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return False


def test_pages_are_served_beside_a_supervisor_and_die_with_it(start_station: StartStation, keys: str) -> None:
    station = start_station("--web", web_listen="127.0.0.1:0")
    pages = station.wait_log("serving pages")
    wait_until(lambda: is_served(pages["address"]), "the page to log in")
    environ = Path(f"/proc/{pages['pid']}/environ")
    if os.geteuid() == 0:
        assert b"HEADGATE_DATABASE_URL=" in environ.read_bytes()
        assert keys.encode() not in environ.read_bytes()
    else:  # as from users' code
        with pytest.raises(PermissionError):
            environ.read_bytes()

    station.kill()
    wait_until(lambda: not is_served(pages["address"]), "the end of the pages")


def test_pages_leave_with_a_supervisor_that_is_stopped(start_station: StartStation) -> None:
    station = start_station("--web", web_listen="127.0.0.1:0")
    pages = station.wait_log("serving pages")
    if not any("the runner is ready" in str(record["event"]) for record in station.records):
        station.wait_ready()
    assert station.stop() == 0
    assert not Path(f"/proc/{pages['pid']}").exists()
