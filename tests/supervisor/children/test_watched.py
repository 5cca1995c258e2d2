"""The end of a watched child, with a real process."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import WITHIN_S

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.runner import FromRunner
from headgate.supervisor.children.link import RunnerLink
from headgate.supervisor.children.process import ChildProcess, kill_rest_of_session
from headgate.supervisor.children.watched import WatchedChild

# Logs a line and dies, and leaves a fork behind that keeps the sockets open.
LEAVES_A_FORK = """
import os, sys, time
logs = int(sys.argv[sys.argv.index("--logs-fd") + 1])
if os.fork() == 0:
    time.sleep(60)
os.write(logs, b'{"event": "the last words"}\\n')
os._exit(3)
"""


class Owner:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def child_said(self, pid: int, message: FromRunner) -> None:
        raise AssertionError("it says nothing")

    def child_logged(self, pid: int, record: dict[str, Any]) -> None:
        self.events.append(record["event"])

    def child_printed(self, pid: int, line: str) -> None:
        self.events.append(line)

    def child_broke_protocol(self, pid: int, error: RemoteProtocolError) -> None:
        raise AssertionError(str(error))

    def child_ended(self, pid: int, explanation: str) -> None:
        self.events.append(explanation)


def test_a_descriptor_that_was_ready_in_the_turn_of_the_end_is_not_read_afterwards(tmp_path: Path) -> None:
    """The selector may report the end of the process before its records: by then they are read, and all is closed."""
    (tmp_path / "leaves_a_fork.py").write_text(LEAVES_A_FORK)
    process = ChildProcess("leaves_a_fork", (), {**os.environ, "PYTHONPATH": str(tmp_path)})
    owner = Owner()
    with selectors.DefaultSelector() as selector:
        link = RunnerLink(process.frames, Connection(RunnerDialect(1), Role.SUPERVISOR), "runner")
        WatchedChild(process, link, selector, owner)
        with selectors.DefaultSelector() as of_end:
            of_end.register(process.pidfd, selectors.EVENT_READ)
            assert of_end.select(30)
        ready = [key for key, _ in selector.select(0)]
        assert len(ready) == 2, "the end and the records; the fork keeps the rest open"
        for key in sorted(ready, key=lambda key: key.fileobj != process.pidfd):
            key.data()
        assert owner.events == ["the last words", "exited with code 3"]
        assert not selector.get_map()


def test_a_process_that_the_kernel_cannot_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a device, and SIGKILL with it; the supervisor must leave all the same. Here it was not killed."""
    (tmp_path / "goes_on.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("headgate.supervisor.children.process.REAP_WAIT_S", 0.01)
    child = ChildProcess("goes_on", (), {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert child.reap() == "it cannot be killed: it waits for a device"
    monkeypatch.undo()
    child.kill("the test is over")
    assert child.reap() == "killed by SIGKILL (we did it: the test is over)"
    child.close()


def test_without_a_free_descriptor_the_group_of_a_dead_child_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor() -> list[int]:
        raise OSError(24, "Too many open files", "/proc")

    monkeypatch.setattr(psutil, "pids", no_descriptor)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as left:
        kill_rest_of_session(left.pid)
        assert left.wait(WITHIN_S) == -signal.SIGKILL
