"""The pages beside a supervisor: from a process of their own, without its key, and not for longer than it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.integration.conftest import StartStation
from tests.waiting import WITHIN_S, wait_until

from headgate.cli.commands import up
from headgate.cli.commands.up import PAGES_WAIT_S
from headgate.store.db import schema
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store


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


def test_pages_that_die_are_started_again_and_that_is_logged(start_station: StartStation) -> None:
    station = start_station("--web", web_listen="127.0.0.1:0")
    pages = station.wait_log("serving pages")
    os.kill(pages["pid"], signal.SIGKILL)
    ended = station.wait_log("the process of the pages has ended", exit_code=-signal.SIGKILL)
    assert 0 < ended["again_in_s"] <= 2 * PAGES_WAIT_S
    again = station.wait_log("serving pages")
    assert again["pid"] != pages["pid"]
    wait_until(lambda: is_served(again["address"]), "the page to log in")
    assert station.stop() == 0
    assert not Path(f"/proc/{again['pid']}").exists()


def test_what_always_dies_is_started_later_and_later_until_the_end(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    dying = [sys.executable, "-c", f"open({str(starts)!r}, 'a').write('x')"]
    with capture_logs() as told:
        beside = up.Beside(dying, {}, wait_s=0.001)
        wait_until(lambda: starts.exists() and len(starts.read_text()) >= 3, "three starts")
        beside.end()
    assert not beside._thread.is_alive()
    waits = [record["again_in_s"] for record in told]
    assert waits == sorted(set(waits))
    assert 0 <= len(starts.read_text()) - len(waits) <= 1, "one after each end but the last"


def test_an_end_does_not_wait_for_the_next_start(tmp_path: Path) -> None:
    beside = up.Beside([sys.executable, "-c", "raise SystemExit(3)"], {}, wait_s=2 * WITHIN_S)
    wait_until(lambda: beside._backoff.failures == 1, "its end")
    beside.end()
    assert not beside._thread.is_alive()
    assert beside._process.returncode == 3, "it was not started again"


REACHED = {"HEADGATE_WEB_LISTEN": "0.0.0.0:0", "HEADGATE_WEB_HOSTS": "ops.example.org"}


def pages_at(home: Path, **settings: str) -> subprocess.Popen[str]:
    """Start ``headgate web`` in a home folder, with its output as one text."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    environment = kept | {"HEADGATE_HOME": str(home), "HEADGATE_LOG_FORMAT": "json"} | settings
    command = [sys.executable, "-m", "headgate.cli", "web"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_an_address_that_others_reach_is_refused_until_it_is_safe(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/headgate.db")
    schema.upgrade(engine)

    def refusal(**settings: str) -> str:
        with pages_at(tmp_path, **settings) as process:
            said, _ = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 2, said
        return said

    assert "say in web_hosts by which names" in refusal(HEADGATE_WEB_LISTEN="0.0.0.0:0")
    assert "web_trusted_proxies" in refusal(**REACHED)
    assert "headgate users add" in refusal(**REACHED, HEADGATE_WEB_PLAIN_HTTP="true")
    with Store(engine, secrets=Secrets.none()) as store:
        store.access.add_user("ada", "viewer")
    with pages_at(tmp_path, **REACHED, HEADGATE_WEB_PLAIN_HTTP="true") as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving pages" in line)
        address = json.loads(line)["address"].replace("0.0.0.0", "127.0.0.1")
        wait_until(lambda: is_served(address), "the page to log in")
        process.terminate()
        assert "/login?token=" not in process.stdout.read(), "there is no link"
