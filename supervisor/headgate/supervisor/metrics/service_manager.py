"""What systemd is told of a service with ``Type=notify``: ready, how it is, that the loop turns, and that it stops.

The protocol is that of sd_notify(3): datagrams of ``KEY=value`` lines to the socket that the environment names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import structlog

log = structlog.get_logger(__name__)

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"


class ServiceManager:
    """Sends what has changed. Without a socket in the environment it does nothing; an error of it harms nothing."""

    def __init__(self, environ: Mapping[str, str] = os.environ, *, pid: int | None = None) -> None:
        name = environ.get(SOCKET_VARIABLE, "")
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if name else None
        self.watchdog_s = _watchdog_s(environ, os.getpid() if pid is None else pid) if name else None
        self._is_ready = self._is_stopping = False
        self._status = ""

    @property
    def is_there(self) -> bool:
        """Whether somebody is told."""
        return self._socket is not None

    def ready(self) -> None:
        """Say once that the service has started."""
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1")

    def status(self, text: str) -> None:
        """Say how it is, in one line that ``systemctl status`` shows."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def alive(self) -> None:
        """Say that the loop turns: within `watchdog_s` of the last time."""
        if self.watchdog_s is not None:
            self._send("WATCHDOG=1")

    def stopping(self, within_s: float) -> None:
        """Say once that it stops, and how long that may take."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={round(within_s * 1e6)}")

    def close(self) -> None:
        """Send nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(lines.encode(), self._address)
        except OSError as error:
            log.warning("systemd cannot be told", error=str(error))
            self.close()
            self.watchdog_s = None


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Return within how many seconds systemd wants to hear from this process; None if it does not."""
    if environ.get(WATCHDOG_PID_VARIABLE, str(pid)) != str(pid):
        return None
    microseconds = environ.get(WATCHDOG_VARIABLE, "")
    return int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) else None
