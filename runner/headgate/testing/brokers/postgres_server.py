"""How a private PostgreSQL server is made and started. It refuses to run as root: then it runs as ``postgres``."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

USER = "postgres"  # who runs a server for root
PREFIX = "headgate-postgres-"  # of a server's folder; behind it the process of the tests


class NoServer(Exception):
    """No server can be made here; the text says why."""


def find_binaries() -> Path:
    """Return the folder with ``initdb``, ``postgres`` and ``pg_ctl``. Raises `NoServer`."""
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


def as_user() -> tuple[str, ...]:
    """Return how to begin a command that must not be root's; it ends with what it starts. Raises `NoServer`."""
    if os.geteuid() != 0:
        return ()
    try:
        pwd.getpwnam(USER)
    except KeyError:
        raise NoServer(f"as root, a PostgreSQL server needs a user {USER!r} to run as") from None
    if (setpriv := shutil.which("setpriv")) is None:
        raise NoServer("as root, a PostgreSQL server needs `setpriv` to be started") from None
    return (setpriv, "--reuid", USER, "--regid", USER, "--clear-groups", "--")


def why_none() -> str:
    """Say why no server can be made here; nothing where one can."""
    try:
        find_binaries()
        as_user()
    except NoServer as error:
        return str(error)
    return ""


def give_to_user(*paths: Path) -> None:
    """Have files and folders belong to whom the server runs as."""
    if os.geteuid() == 0:
        for path in paths:
            shutil.chown(path, USER)


def run_program(folder: Path, program: str, *arguments: str) -> None:
    """Run one of its programs in a folder. Raises `NoServer` with its output if it fails."""
    command = [*as_user(), str(find_binaries() / program), *arguments]
    # The server inherits what is open here; a pipe would stay open for as long as it runs.
    with (folder / "output").open("w+") as output:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
        if done.returncode:
            output.seek(0)
            raise NoServer(f"{program} {' '.join(arguments)} failed: {output.read()[-2000:]}")


def make_data(folder: Path, *options: str) -> Path:
    """Return a new data folder within ``folder``, made by ``initdb``."""
    give_to_user(folder)
    data = folder / "data"
    given = ("--pgdata", str(data), "--username", USER, "--encoding", "UTF8", "--no-locale", "--no-sync")
    run_program(folder, "initdb", *given, *options)
    return data
