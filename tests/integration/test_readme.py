"""The commands of the README's first trigger and of docs/dags.md's first DAG, run as written in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from tests.brokers.servers.absent import skip_or_fail
from tests.waiting import ALL_WITHIN_S

from headgate.testing import run_trigger

ROOT = Path(__file__).parents[2]


def section(page: str, heading: str) -> str:
    """The text under a heading of the second level."""
    text = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text, f"{page} has no section {heading!r}"
    return text


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_commands(text: str, folder: Path) -> str:
    """Run all commands of a section as one script in a folder; return what they printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-eu", "-c", "set -m\n" + "\n".join(blocks(text, "sh"))],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate(timeout=ALL_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        printed, _ = shell.communicate()
        printed += "\n--- not within its time ---"
    assert shell.returncode == 0, printed
    return printed


def test_a_first_trigger_runs_as_the_readme_says(tmp_path: Path) -> None:
    text = section("README.md", "A first trigger")
    (orders,) = blocks(text, "python")
    (tmp_path / "orders.py").write_text(orders)
    printed = run_commands(text, tmp_path)
    assert "added watcher big-orders" in printed
    listed = [line for line in printed.splitlines() if '"order":' in line or '"order": ' in line]
    assert len(listed) == 2, printed
    assert "1800" in listed[0], printed
    assert "5000" in listed[1], printed


def test_a_real_broker_is_read_as_the_readme_says(tmp_path: Path) -> None:
    text = section("README.md", "A real broker")
    stream = f"payments-{os.getpid()}"  # the server is the machine's
    with redis.Redis() as server:
        try:
            server.ping()
        except redis.ConnectionError as error:
            skip_or_fail(f"no Redis server answers: {error}")
        assert shutil.which("redis-cli"), "the page uses it"
        try:
            begin = "```sh\nexport HEADGATE_HOME=$PWD/home\nheadgate db upgrade\n```\n"
            printed = run_commands(begin + text.replace("payments", stream), tmp_path)
        finally:
            server.delete(stream)
    assert f"added watcher {stream}" in printed
    assert '{"id":7,"amount":90}' in printed, printed


def test_the_heartbeat_of_the_document_fires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (heartbeat,) = blocks(section("docs/brokers.md", "A trigger without a broker"), "python")
    (tmp_path / "heartbeat.py").write_text(heartbeat)
    monkeypatch.syspath_prepend(tmp_path)
    from heartbeat import Heartbeat  # type: ignore[import-not-found,unused-ignore]

    events = run_trigger(Heartbeat(every_s=60), events=3)
    assert [event.payload for event in events] == [0, 1, 2]


def test_a_first_dag_runs_as_the_page_says(tmp_path: Path) -> None:
    printed = run_commands(section("docs/dags.md", "A first DAG"), tmp_path)
    printed += (tmp_path / "up.log").read_text()
    assert "created run manual__" in printed
    assert re.search(r"^wait +deferred ", printed, re.MULTILINE), printed
    assert "runs it, and it has not fired" in printed
    assert "inbox/orders.csv has 2 rows" in printed
    assert "its trigger has ended" in printed
    assert re.search(r"^wait_for_file +manual__\S+ +success ", printed, re.MULTILINE), printed
