"""A PostgreSQL server of the crash tests' own, which may be restarted while a process stands at a mark.

It is made by ``initdb`` in a temporary folder, listens on a port of its own, and is gone afterwards. No other server
is ever touched. PostgreSQL refuses to run as root: then it runs as the user ``postgres``.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

RestartMode = Literal["fast", "immediate"]

START_S_MAX = 60  # and so long for a restart, the recovery after an immediate one included
USER = "postgres"
# What a crash of the server leaves to the operating system is safe from that crash: the syncs (which at a recovery go
# through all its files) would protect from a power cut, which is no fault of this matrix.
SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
port = {port}
max_connections = 40
shared_buffers = 16MB
max_wal_size = 64MB
fsync = off
"""


class NoServer(Exception):
    """No server can be made here; the text says why."""


def find_binaries() -> Path:
    """Return the folder with ``initdb`` and ``pg_ctl``. Raises `NoServer`."""
    candidates = []
    if (config := shutil.which("pg_config")) is not None:
        said = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        candidates.append(Path(said.stdout.strip()))
    # Where Debian has the servers: on nobody's PATH, one folder a version.
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    candidates += sorted(installed, key=lambda path: float(path.parent.name), reverse=True)
    for folder in candidates:
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            return folder
    raise NoServer("the programs of a PostgreSQL server (initdb, pg_ctl) are not installed")


def why_none() -> str:
    """Say why no server can be made here; nothing where one can."""
    try:
        find_binaries()
        _as_user()
    except NoServer as error:
        return str(error)
    return ""


def _as_user() -> tuple[str, ...]:
    """Return how to begin a command that must not be root's."""
    if os.geteuid() != 0:
        return ()
    try:
        pwd.getpwnam(USER)
    except KeyError:
        raise NoServer(f"as root, a PostgreSQL server needs a user {USER!r} to run as") from None
    if (runuser := shutil.which("runuser")) is None:
        raise NoServer("as root, a PostgreSQL server needs `runuser` to be started") from None
    return (runuser, "-u", USER, "--")


class Server:
    """One server. `close` it."""

    def __init__(self) -> None:
        self._binaries = find_binaries()
        self._as_user = _as_user()
        self._folder = Path(tempfile.mkdtemp(prefix="headgate-postgres-"))
        self._data = self._folder / "data"
        if self._as_user:
            shutil.chown(self._folder, USER)
        self._run("initdb", "--username", "postgres", "--auth", "trust", "--encoding", "UTF8", "--no-locale")
        port = _free_port()
        with (self._data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS.format(port=port))
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        self._control("start")

    def restart(self, mode: RestartMode) -> None:
        """Restart it: ``fast`` ends all connections and then itself, ``immediate`` is a crash with its recovery.

        Returns as soon as it answers again.
        """
        self._control("restart", "--mode", mode)

    def close(self) -> None:
        """Stop it, and leave nothing behind."""
        try:
            self._control("stop", "--mode", "immediate")
        finally:
            shutil.rmtree(self._folder)

    def _control(self, *arguments: str) -> None:
        log = self._folder / "server.log"
        self._run("pg_ctl", *arguments, "--wait", "--timeout", str(START_S_MAX), "--log", str(log))

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, str(self._binaries / program), "--pgdata", str(self._data), *arguments]
        # The server inherits what is open here; a pipe would stay open for as long as it runs.
        with (self._folder / "output").open("w+") as output:
            done = subprocess.run(
                command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
            if done.returncode:
                output.seek(0)
                raise NoServer(f"{program} {' '.join(arguments)} failed: {output.read()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
