"""The real pair for tests: a supervisor and its runner, as processes, on a database of their own.

Everything is done as a user does it, with the command line; nothing here knows the database.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from headgate.child import parent_death
from headgate.protocol.values import encode_value
from headgate.testing.crash.commands import Commands, PairFailed
from headgate.triggers.base import BaseTrigger

WITHIN_S = 300.0  # the longest any single thing may take; only what hangs waits so long, however busy the machine is
LOOK_INTERVAL_S = 0.01  # between two checks of a condition in another process, which sends no notification
# `Pair` runs these with this Python; without -P it would search its working folder for modules.
SUPERVISOR_ARGUMENTS = ("-P", "-m", "headgate.cli", "triggerer")
READY = "the runner is ready"  # in the supervisor's log
FAILED = "a trigger failed"
LOG_TAIL_LINES = 30  # of the supervisor's log, shown when something fails
KEY_FILE_NAME = "fernet.key"
# Waits are short, so that many deaths take little time; the settings that make events durable keep their defaults.
SETTINGS = {
    "log_format": "human",
    "poll_interval_s": "0.2",
    "respawn_wait_s": "0.02",
    "respawn_wait_max_s": "0.2",
    "retry_wait_s": "0.1",
    "retry_wait_max_s": "1",
}


# A database with tables and without rows, as `headgate db upgrade` made it for the first pair of this process.
# With it goes the key file, because a database is bound to its key.
_migrated: list[dict[str, bytes]] = []


_ERROR = re.compile(r"\[error\s*\]")  # in the human-readable form of the log


class Pair:
    """``headgate triggerer`` on a new SQLite database in ``folder``; a context manager that leaves nothing behind.

    ``import_paths``: folders of the modules of the triggers, besides those that `add` finds by itself.
    ``settings``: headgate's settings by name, such as ``ack_timeout_s="5"``. With ``database_url`` the pair runs on
    that database instead, for example an empty one on PostgreSQL; its tables are created, and it is not removed.
    Without ``has_short_waits`` all other settings keep their defaults, instead of `SETTINGS`. A subclass may set
    ``within_s``, the longest that any single thing may take.
    """

    within_s = WITHIN_S

    def __init__(
        self,
        folder: Path,
        *,
        import_paths: Sequence[str | os.PathLike[str]] = (),
        python_path: Sequence[str | os.PathLike[str]] = (),
        settings: Mapping[str, str] = SETTINGS,
        has_short_waits: bool = True,
    ) -> None:
        self.folder = folder
        self.log_path = folder / "supervisor.log"
        self._import_paths = [os.fspath(path) for path in import_paths]
        self._python_path = [os.fspath(path) for path in python_path]
        self._settings = {**SETTINGS, **settings} if has_short_waits else dict(settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._commands = Commands(folder)
        self._database = folder / "headgate.db"
        # The last list of all events, and the state of the files it was read from.
        self._events: tuple[object, list[dict[str, Any]]] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._has_own_database = "database_url" not in self._settings
        is_new = self._has_own_database and not self._database.exists()
        if is_new and _migrated and "fernet_keys" not in self._settings:
            for name, content in _migrated[0].items():
                (folder / name).touch(mode=0o600)
                (folder / name).write_bytes(content)
        else:
            # The command is slow, and creates the same file each time.
            self._command("db", "upgrade")
            if is_new and "fernet_keys" not in self._settings:
                _migrated.append({path.name: path.read_bytes() for path in (self._database, folder / KEY_FILE_NAME)})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- actions of a user ------------------------------------------------------------------------

    def add(self, trigger: BaseTrigger, name: str) -> None:
        """Add a watcher that runs the trigger. Call it before `start`, or its module may not be found."""
        classpath, kwargs = trigger.serialize()
        encoded = encode_value(kwargs, where="kwargs").decode()
        folder = folder_of(type(trigger))
        if folder not in self._import_paths:
            self._import_paths.append(folder)
        self._command("watchers", "add", name, classpath, "--kwargs", encoded, "--no-check")  # it may be a bad one

    def remove(self, name: str) -> None:
        """Remove a watcher."""
        self._command("watchers", "remove", name)

    def set(self, **settings: str) -> None:
        """Change settings of all commands from now on, and of the next supervisor."""
        self._settings |= settings

    def redrive(self) -> int:
        """Redrive all dead letters; return how many came back. Raises `PairFailed` if not all of them did."""
        lines = self._command("dlq", "redrive", "--all", "--json").splitlines()
        return sum(json.loads(line)["state"] == "redriven" for line in lines)

    def start(self) -> None:
        """Start the supervisor, which starts its runner."""
        assert self._process is None or self._process.poll() is not None, "it runs already"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*_with_this_process(), sys.executable, *self._arguments()],
                cwd=self.folder,
                env=self._environment(os.pathsep.join(self._python_path)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the tests, which then end their processes in order.
                start_new_session=True,
            )

    def stop(self) -> int:
        """Ask it to drain; return its exit code. Raises `PairFailed` if it does not exit."""
        assert self._process is not None, "it was not started"
        self._process.terminate()
        try:
            return self._process.wait(self.within_s)
        except subprocess.TimeoutExpired:
            raise self.failure(f"the supervisor did not leave within {self.within_s:g} s of SIGTERM") from None

    def close(self) -> None:
        """End all processes, however the test ended. The runner dies with its supervisor (I7)."""
        self._commands.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    # --- observations -----------------------------------------------------------------------------

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the stored events, of one watcher or of all, the oldest first, as ``headgate events list`` does."""
        if name is not None:
            return self._listed("--watcher", name)
        # It lists all events, so the last list is used while the files are unchanged.
        files = [_stat(self._database), _stat(Path(f"{self._database}-wal"))]
        is_as_before = self._has_own_database and self.is_running and self._events and self._events[0] == files
        if self._events is None or not is_as_before:
            self._events = (files, self._listed())
        return list(self._events[1])

    def _listed(self, *options: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._command("events", "list", "--json", *options).splitlines()]

    def payloads(self, name: str | None = None) -> list[Any]:
        """Return the payloads of the stored events."""
        return [row["payload"] for row in self.events(name)]

    def wait_events(
        self, count: int, name: str | None = None, *, within_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Wait until ``count`` events are stored; return all of them."""
        rows: list[dict[str, Any]] = []

        def are_there() -> bool:
            rows[:] = self.events(name)
            return len(rows) >= count

        self.wait_until(are_there, f"{count:,} events are stored", within_s=within_s)
        return rows

    def dead_letters(self) -> list[str]:
        """Return the reason of each dead letter, as ``headgate dlq list`` shows it."""
        return [str(row["reason"]) for row in self.dead_letter_rows()]

    def dead_letter_rows(self) -> list[dict[str, Any]]:
        """Return the newest dead letters, the newest first, as ``headgate dlq list --json`` shows them."""
        return [json.loads(line) for line in self._command("dlq", "list", "--json").splitlines()]

    def last_error(self) -> str:
        """Return the last error in the supervisor's log, '' if there is none."""
        lines = self.log_path.read_text(errors="backslashreplace").splitlines() if self.log_path.exists() else []
        return next((line.strip() for line in reversed(lines) if _ERROR.search(line)), "")

    @property
    def tells_ready(self) -> bool:
        """Whether the log says when a runner is ready, which settings may have left out."""
        return self._settings.get("log_level", "info").lower() in ("info", "debug")

    def ready_count(self) -> int:
        """Return how many runners have been ready so far, as the log says."""
        return self._count_in_log(READY)

    def failure_count(self) -> int:
        """Return how often a trigger has failed so far, as the log says."""
        return self._count_in_log(FAILED)

    def _count_in_log(self, text: str) -> int:
        return self.log_path.read_text(errors="backslashreplace").count(text) if self.log_path.exists() else 0

    @property
    def is_running(self) -> bool:
        """Whether the supervisor runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code of a supervisor that has ended, negative if a signal ended it; None while it runs."""
        return None if self._process is None else self._process.poll()

    def runners(self) -> list[psutil.Process]:
        """Return the runner in a list, which is empty while there is none."""
        return self._children("headgate.runner")

    def _children(self, module: str) -> list[psutil.Process]:
        assert self._process is not None, "it was not started"
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                # Between fork and exec a child still looks like the supervisor; a dead one has no command line.
                with contextlib.suppress(psutil.NoSuchProcess):
                    if module in child.cmdline():
                        found.append(child)
        return found

    def wait_until(self, condition: Callable[[], object], what: str, *, within_s: float | None = None) -> None:
        """Wait until a condition is true.

        Raises `PairFailed`, which names it ``what``, after ``within_s`` seconds, and as soon as the supervisor has left
        with an error.
        """
        within_s = self.within_s if within_s is None else within_s
        deadline, pause = time.monotonic() + within_s, threading.Event()
        while not condition():
            if (self.exit_code or 0) > 0:
                raise self.left_by_itself(f", before this: {what}")
            if time.monotonic() > deadline:
                raise self.failure(f"not within {within_s:g} s: {what}")
            pause.wait(LOOK_INTERVAL_S)

    # --- deaths -----------------------------------------------------------------------------------

    def kill_runner(self) -> None:
        """Kill the runner with SIGKILL; return when it is dead. The supervisor starts the next one by itself."""
        victims: list[psutil.Process] = []

        def found() -> bool:
            if not self.is_running:
                raise self.left_by_itself()
            victims[:] = self.runners()
            return bool(victims)

        self.wait_until(found, "there is a runner to kill")
        with contextlib.suppress(psutil.NoSuchProcess):
            victims[0].kill()
        self.wait_until(lambda: not _is_alive(victims[0]), "the runner is dead")

    def kill_supervisor(self) -> None:
        """Kill the supervisor with SIGKILL; return when its runner has died too (I7). `start` starts the next one."""
        assert self._process is not None, "it was not started"
        runners = self.runners()
        self._process.kill()
        self.wait_dead(runners)

    def wait_dead(self, runners: Sequence[psutil.Process] = ()) -> None:
        """Wait until the supervisor and its runners have ended."""
        assert self._process is not None, "it was not started"
        self._process.wait(self.within_s)
        self.wait_until(lambda: not any(map(_is_alive, runners)), "the runner is gone with its supervisor")

    # --- inside -----------------------------------------------------------------------------------

    def _arguments(self) -> Sequence[str]:
        return SUPERVISOR_ARGUMENTS

    def failure(self, text: str) -> PairFailed:
        """Return an error that shows the end of the supervisor's log."""
        if not self.log_path.exists():
            return PairFailed(text)
        lines = self.log_path.read_text(errors="backslashreplace").splitlines()[-LOG_TAIL_LINES:]
        return PairFailed("\n".join([text, f"the end of {self.log_path}:", *lines]))

    def left_by_itself(self, ending: str = "") -> PairFailed:
        """Return the error that the supervisor has ended, though nobody has ended it."""
        return self.failure(f"the supervisor left by itself with exit code {self.exit_code}{ending}")

    def _environment(self, python_path: str = "") -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        environment |= {
            "HEADGATE_HOME": str(self.folder),
            "HEADGATE_DATABASE_URL": f"sqlite:///{self._database}",
            "HEADGATE_IMPORT_PATHS": ",".join(self._import_paths) or ".",
        }
        environment |= {f"HEADGATE_{name.upper()}": value for name, value in self._settings.items()}
        if python_path:
            inherited = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = python_path + (os.pathsep + inherited if inherited else "")
        return environment

    def _command(self, *arguments: str) -> str:
        return self._commands.run(arguments, self._environment(), self.within_s)


def _with_this_process() -> list[str]:
    """Return what a command begins with that is to end with this process, even if that is killed.

    It would end with the thread that started it, so one that another thread starts has to be ended by `Pair.close`.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())]


def folder_of(cls: type[object]) -> str:
    """Return the folder that must be searched for modules to find a class by its classpath.

    Raises `PairFailed` for a class that no other process can import.
    """
    classpath = f"{cls.__module__}.{cls.__qualname__}"
    if "<locals>" in classpath:
        raise PairFailed(f"{classpath} is defined inside a function; the runner can import a class of a module only")
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or cls.__module__ == "__main__":
        raise PairFailed(f"{classpath} is not in a module that the runner could import")
    path = Path(file).resolve()
    names = cls.__module__.split(".")
    parts = list(path.with_suffix("").parts if path.name != "__init__.py" else path.parent.parts)
    if parts[-len(names) :] != names:
        raise PairFailed(f"the runner cannot import {cls.__module__}: it would not find {path} by that name")
    return str(Path(*parts[: -len(names)]))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
