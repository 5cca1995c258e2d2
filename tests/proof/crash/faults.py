"""What is done to a supervisor and its children, whatever they are at: the part that all campaigns share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from tests.proof.crash.connections import Backend, Connections
from tests.proof.crash.processes import LOOK_INTERVAL_S, CellFailed, Control, Supervisor, is_alive, send, wait_until

HERE = Path(__file__).parent
FENCED_S_MAX = 15.0  # more than IDLE_IN_TRANSACTION_MAX_S, after which PostgreSQL takes a stopped one's locks away
FENCED_S_MAX_SQLITE = 8.0  # a supervisor that is stopped in a transaction holds SQLite's one lock for as long
EXIT_LEASE_LOST = 3

# Short times, so that every limit that a fault has to wait for is passed in seconds. The runner's silence is the
# longest of them: a runner that starts on a busy machine must not be taken for one that stands still.
SETTINGS = {
    "heartbeat_s": "0.2",
    "lease_silence_max_s": "1.5",
    "poll_interval_s": "0.05",
    "runner_heartbeat_s": "0.3",
    "runner_silence_max_s": "3",
    "respawn_wait_s": "0.01",
    "respawn_wait_max_s": "0.05",
    "retry_wait_s": "0.05",
    "retry_wait_max_s": "0.2",
    "database_retry_wait_s": "0.02",
    "database_retry_wait_max_s": "0.1",
    "drain_s": "3",
    "log_format": "json",
    "import_paths": f"{HERE / 'users'},{HERE.parents[2]}",  # the second for `tests.proof`
    "pass_env": "CRASH_CONTROL",
}


class UnderFault:
    """One supervisor after the other in one folder, on one database; at times two at once.

    ``command`` is that of ``headgate``, ``settings`` are added to those of all.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        keys: str,
        connections: Connections,
        *,
        command: str,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._url = url
        self._keys = keys
        self._connections = connections
        self._command = command
        self._settings = {**SETTINGS, **(settings or {})}
        self._dialect = url.partition(":")[0]
        self._control = Control(folder / "control")
        self._supervisors: list[Supervisor] = []
        self._dropped: set[Backend] = set()

    def end_all(self) -> None:
        """Leave no process behind."""
        for supervisor in self._supervisors:
            supervisor.end()

    @property
    def _main(self) -> Supervisor:
        return self._supervisors[-1]

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        environment |= {f"HEADGATE_{name.upper()}": value for name, value in self._settings.items()}
        environment |= {
            "HEADGATE_HOME": str(self._folder),
            "HEADGATE_DATABASE_URL": self._url,
            "HEADGATE_FERNET_KEYS": self._keys,
            "PYTHONPATH": os.pathsep.join([str(HERE / "armed"), *environment.get("PYTHONPATH", "").split(os.pathsep)]),
            "CRASH_CONTROL": str(self._control.folder),
        }
        self._supervisors.append(Supervisor(environment, self._folder, self._command))

    def _kill_runner(self) -> int:
        """Kill the runner, as soon as there is one; return to how many processes that was done."""
        runner: int | None = None

        def is_found() -> bool:
            nonlocal runner
            runner = self._main.runner()
            return runner is not None

        wait_until(is_found, "a runner to kill")
        assert runner is not None
        return int(send(runner, signal.SIGKILL))

    def _stop_runner(self, pid: int) -> None:
        """A runner that stands still for longer than its limit is replaced."""
        send(pid, signal.SIGSTOP)
        self._control.release()
        try:
            wait_until(lambda: not is_alive(pid), "a runner that stands still is replaced")
        finally:
            send(pid, signal.SIGCONT)

    def _stop_supervisor(self) -> None:
        """A supervisor that stands still for longer than its lease is fenced by a neighbour, and leaves when it wakes.

        Where it stands in a transaction of SQLite, nobody can write, the neighbour included: then it goes on.
        """
        stopped = self._main
        send(stopped.pid, signal.SIGSTOP)
        self._control.release()
        try:
            self._start()
            within_s = FENCED_S_MAX if self._dialect == "postgresql" else FENCED_S_MAX_SQLITE
            deadline = time.monotonic() + within_s
            while not (fenced := self._connections.is_fenced(stopped.pid)) and time.monotonic() < deadline:
                time.sleep(LOOK_INTERVAL_S)
        finally:
            send(stopped.pid, signal.SIGCONT)
        if not fenced and self._dialect == "postgresql":
            raise CellFailed("a supervisor that stood still was not fenced")
        if not fenced:
            # It may still be, in the moment before its next heartbeat; then both leave.
            # One that waits for the lock before it has done anything else does not listen to SIGTERM yet.
            if (code := self._supervisors.pop().drain()) not in (0, -signal.SIGTERM):
                raise CellFailed(f"a neighbour with nothing to do left with exit code {code}")
            if not self._connections.is_fenced(stopped.pid):
                return
            self._start()
        if (code := stopped.leave()) != EXIT_LEASE_LOST:
            raise CellFailed(f"a fenced supervisor left with exit code {code}")

    def _drop_connections(self) -> tuple[int, int]:
        """End all connections of headgate while a process is held; return how many, and how many were at work."""
        dropped = self._note_connections()
        self._connections.terminate(self._dropped)
        self._wait_dropped()
        self._control.release()
        return dropped

    def _note_connections(self) -> tuple[int, int]:
        """Remember which connections the fault is about: there is the supervisor's, and nothing is shown without."""
        backends = self._connections.backends()
        if not backends:
            raise CellFailed("there was no connection to drop")
        self._dropped = set(backends)
        return len(backends), sum(backends.values())

    def _wait_dropped(self) -> None:
        """Wait for their end: a process that goes on before it might commit on them yet."""
        wait_until(lambda: not self._dropped & set(self._connections.backends()), "the end of the connections")

    def _wait_reconnected(self) -> None:
        wait_until(lambda: set(self._connections.backends()) - self._dropped, "another connection in place of the one")
