"""What systemd is told, over a real socket of its kind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headgate.supervisor.metrics.service_manager import ServiceManager


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as bound:
        bound.bind(str(tmp_path / "notify"))
        yield bound


def told(systemd: socket.socket) -> list[str]:
    lines: list[str] = []
    while True:
        try:
            lines += systemd.recv(4096).decode().split("\n")
        except BlockingIOError:
            return lines


def test_it_is_told_what_has_changed_once(systemd: socket.socket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": systemd.getsockname()})
    for _ in range(2):
        manager.ready()
        manager.status("3 triggers")
    manager.status("4 triggers")
    for _ in range(2):
        manager.stopping(30.0)
    manager.close()
    manager.alive()
    expected = ["READY=1", "STATUS=3 triggers", "STATUS=4 triggers", "STOPPING=1", "EXTEND_TIMEOUT_USEC=30000000"]
    assert told(systemd) == expected


def test_an_abstract_socket_is_told_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as bound:
        bound.bind("")  # the kernel chooses a name
        manager = ServiceManager({"NOTIFY_SOCKET": "@" + bound.getsockname()[1:].decode()})
        manager.ready()
        manager.close()
        assert told(bound) == ["READY=1"]


@pytest.mark.parametrize(
    ("changed", "watchdog_s"),
    [({}, 30.0), ({"WATCHDOG_PID": "12"}, None), ({"WATCHDOG_USEC": "soon"}, None), ({"NOTIFY_SOCKET": ""}, None)],
)
def test_the_watchdog_is_for_the_process_that_it_names(changed: dict[str, str], watchdog_s: float | None) -> None:
    environ = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "11"}
    manager = ServiceManager({**environ, **changed}, pid=11)
    assert manager.watchdog_s == watchdog_s
    manager.close()


def test_a_socket_that_is_gone_harms_nothing_and_is_said_once(tmp_path: Path) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "1000000"})
    with capture_logs() as logs:
        manager.ready()
        manager.alive()
    assert [record["event"] for record in logs] == ["systemd cannot be told"]
    assert manager.watchdog_s is None


def test_without_a_service_manager_nothing_is_sent() -> None:
    manager = ServiceManager({})
    manager.ready()
    manager.alive()
    assert manager.watchdog_s is None
