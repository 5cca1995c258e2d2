"""PostgreSQL servers of the tests' own: one for all tests of a process, and those that crash tests restart and kill.

A server is made by ``initdb`` in a temporary folder, listens on a port of its own, and is gone afterwards. No other
server is ever touched.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
import psycopg

from headgate.testing.brokers.postgres_server import PREFIX, NoServer, make_data, run_program, why_none
from headgate.testing.brokers.station import free_port

__all__ = ["NoServer", "RestartMode", "Server", "close", "url_for_tests", "why_none"]

RestartMode = Literal["fast", "immediate"]

URL_VARIABLE = "HEADGATE_TEST_POSTGRES_URL"
MACHINES_URL = os.environ.get(URL_VARIABLE, "postgresql://postgres@127.0.0.1:5432/postgres")

LINES_TOLD_MAX = 20
CONNECT_S_MAX = 2
_KINDS = (" LOG: ", " FATAL: ", " PANIC: ", " DETAIL: ")  # and none of ERROR, which is what statements are told
START_S_MAX = 60  # and so long for a restart, the recovery after an immediate one included
# What a crash of the server leaves to the operating system is safe from that crash: the syncs (which at a recovery go
# through all its files) would protect from a power cut, which no test makes. They take most of the time of a test.
SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
port = {port}
max_connections = 100
shared_buffers = 16MB
max_wal_size = 64MB
fsync = off
"""


class Server:
    """One server. `close` it."""

    def __init__(self) -> None:
        _remove_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._data = make_data(self._folder, "--auth", "trust")
        port = free_port()
        with (self._data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS.format(port=port))
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        self._control("start")

    def restart(self, mode: RestartMode) -> None:
        """Restart it: ``fast`` ends all connections and then itself, ``immediate`` is a crash with its recovery.

        Returns as soon as it answers again.
        """
        self._control("restart", "--mode", mode)

    def last_words(self) -> list[str]:
        """Return what it has last written of deaths of its processes and of connections that were lost."""
        with suppress(psycopg.Error):  # it takes a connection after it has written why it ended others
            psycopg.connect(self.url, connect_timeout=CONNECT_S_MAX).close()
        lines = (self._folder / "server.log").read_text(errors="backslashreplace").splitlines()
        return [line for line in lines if any(kind in line for kind in _KINDS)][-LINES_TOLD_MAX:]

    def close(self) -> None:
        """Stop it, and leave nothing behind."""
        try:
            self._control("stop", "--mode", "fast")  # an immediate one leaves its shared memory behind
        finally:
            shutil.rmtree(self._folder)

    def _control(self, *arguments: str) -> None:
        log = self._folder / "server.log"
        waits = ("--wait", "--timeout", str(START_S_MAX), "--log", str(log))
        run_program(self._folder, "pg_ctl", "--pgdata", str(self._data), *arguments, *waits)


def _remove_abandoned() -> None:
    """Stop servers of tests that were killed: each keeps its memory, and its folder is in memory."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            with suppress(OSError, ValueError, psutil.Error):
                server = psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))
                if str(folder / "data") in server.cmdline():
                    server.send_signal(signal.SIGINT)
                    server.wait(START_S_MAX)
            shutil.rmtree(folder, ignore_errors=True)


# --- the one of this process's tests -------------------------------------------------------------

_of_tests: Server | None = None


def url_for_tests() -> str:
    """Return the URL of the server for the tests of this process: the one that the variable names, or one of our own.

    It is made when first asked for, and stopped by `close` or at the end of the process. Where none can be made it is
    the machine's usual one.
    """
    global _of_tests
    if _of_tests is None:
        if URL_VARIABLE in os.environ or why_none():
            return MACHINES_URL
        _of_tests = Server()
        atexit.register(close)
    return _of_tests.url


def last_words() -> list[str]:
    """Return what the server for the tests of this process, if there is one, says of what it has lost."""
    return [] if _of_tests is None else _of_tests.last_words()


def close() -> None:
    """Stop the server for the tests of this process, if there is one of our own."""
    global _of_tests
    if _of_tests is not None:
        _of_tests.close()
        _of_tests = None
