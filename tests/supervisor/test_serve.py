"""Whether another supervisor's process is gone: said only where it is certain."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest

from headgate.store.ids import Epoch
from headgate.store.triggers.leases import TriggererRow
from headgate.supervisor import serve
from headgate.supervisor.serve import is_gone, machine_identity, start_of_process, this_process
from headgate.supervisor.triggers.leases import Identity

THEN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        yield process


def row_of(pid: int, *, process_started: float | None = None) -> TriggererRow:
    """The lease of a supervisor on this machine."""
    started = start_of_process(pid) if process_started is None else process_started
    return TriggererRow(Epoch(1), "host", pid, machine_identity(), started, 1, ("default",), THEN, THEN, 0.0)


def end(process: subprocess.Popen[bytes]) -> None:
    """End it, and leave what is left of it for its parent, which is here, to collect."""
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def hidden_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The /proc of hidepid=2, or of systemd's ProtectProc=invisible: others' processes do not seem to be there."""

    def hide(pid: int) -> float:
        raise FileNotFoundError(2, "No such file or directory", f"/proc/{pid}/stat")

    monkeypatch.setattr(serve, "start_of_process", hide)


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process is another user's."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)


def test_a_process_that_runs_is_there_and_one_that_ended_is_gone(other: subprocess.Popen[bytes]) -> None:
    here, row = this_process(), row_of(other.pid)
    assert not is_gone(row, here)
    end(other)
    assert is_gone(row, here), "nobody has collected it yet"
    other.wait()
    assert is_gone(row, here)


def test_a_pid_that_another_process_bears_by_now_is_gone(other: subprocess.Popen[bytes]) -> None:
    assert is_gone(row_of(other.pid, process_started=start_of_process(other.pid) - 1), this_process())


def test_nothing_is_known_of_a_process_elsewhere(other: subprocess.Popen[bytes]) -> None:
    row = row_of(other.pid)
    other.kill()
    other.wait()
    assert not is_gone(msgspec.structs.replace(row, machine="another boot pid:[1]"), this_process())


@pytest.mark.usefixtures("hidden_proc")
def test_a_process_that_proc_does_not_show_is_gone_only_if_the_kernel_says_so(other: subprocess.Popen[bytes]) -> None:
    here, row = Identity("host", os.getpid(), machine_identity(), 1.0), row_of(other.pid, process_started=1.0)
    assert not is_gone(row, here)
    end(other)
    other.wait()
    assert is_gone(row, here)


@pytest.mark.usefixtures("hidden_proc", "forbidden")
def test_a_hidden_process_that_may_not_be_signalled_is_there() -> None:
    here, row = Identity("host", os.getpid(), machine_identity(), 1.0), row_of(1, process_started=1.0)
    assert not is_gone(row, here)


def test_where_proc_is_that_of_other_processes_no_pid_means_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that was given its host's /proc, or ``unshare --pid`` without a /proc of its own."""
    assert machine_identity() == machine_identity()
    read = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else read(path))
    assert machine_identity() != machine_identity()
