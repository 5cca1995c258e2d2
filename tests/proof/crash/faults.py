"""Fault injection: what is done to a supervisor and its children, whatever they are at."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import assert_never

from tests.postgres import RestartMode, Server
from tests.proof.crash.connections import Backend
from tests.proof.crash.processes import CellFailed, Control, Supervisor, is_alive, send
from tests.proof.crash.workload import Fault, Workload
from tests.waiting import LOOK_INTERVAL_S, wait_until

HERE = Path(__file__).parent
FENCED_S_MAX = 15.0  # more than IDLE_IN_TRANSACTION_MAX_S, after which PostgreSQL takes a stopped one's locks away
FENCED_S_MAX_SQLITE = 8.0  # a supervisor that is stopped in a transaction holds SQLite's one lock for as long
EXIT_LEASE_LOST = 3
# A database that only loses a connection is asked again in milliseconds, and a confirmation that left too early is
# true by then. While it stays away, such a confirmation has the time to become an advance that somebody can see.
AWAY_S = 1.0
SERVER_FAULTS: dict[Fault, RestartMode] = {"restart server": "fast", "crash server": "immediate"}  # on one of our own

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
    "import_paths": f"{HERE / 'users'},{HERE.parents[2]}",  # users' tasks journal in records of `tests.proof`
    "pass_env": "CRASH_CONTROL",
}


def environment_of(folder: Path, url: str, keys: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a supervisor on a database, with `SETTINGS` unless ``settings`` say otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    environment |= {f"HEADGATE_{name.upper()}": value for name, value in {**SETTINGS, **settings}.items()}
    return environment | {
        "HEADGATE_HOME": str(folder),
        "HEADGATE_DATABASE_URL": url,
        "HEADGATE_FERNET_KEYS": keys,
    }


class FaultInjector:
    """One supervisor after the other for one workload; at times two at once.

    ``server`` holds the database, if a fault may restart it. ``counts`` are the ``kills``, and the connections that
    were ``dropped``, ``dropped_busy`` of them in a transaction.
    """

    def __init__(self, workload: Workload, server: Server | None = None) -> None:
        self.counts = Counter[str]()
        self.control = Control(workload.folder / "control")
        self.dialect = workload.url.partition(":")[0]
        self._workload = workload
        self._truth = workload.truth
        self._server = server
        self._supervisors: list[Supervisor] = []
        self._dropped: set[Backend] = set()
        environment = environment_of(workload.folder, workload.url, workload.keys, workload.settings)
        python_path = [str(HERE / "armed"), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        armed = {"PYTHONPATH": os.pathsep.join(python_path), "CRASH_CONTROL": str(self.control.folder)}
        workload.environment = environment | armed

    @property
    def main(self) -> Supervisor:
        """The newest supervisor."""
        return self._supervisors[-1]

    @property
    def is_running(self) -> bool:
        """Whether there is a supervisor, and it has not left."""
        return bool(self._supervisors) and self.main.exit_code() is None

    def start(self) -> None:
        """Start a supervisor."""
        work = self._workload
        self._supervisors.append(Supervisor(work.environment, work.folder, work.command))

    def drain(self) -> None:
        """Have all supervisors leave. Raises `CellFailed` when one does not leave well."""
        # One that was started a moment ago may have nothing to do, and not listen to SIGTERM yet.
        wait_until(lambda: self.main.runner() or self.main.exit_code() is not None, "a runner before the drain")
        codes = [supervisor.drain() for supervisor in self._supervisors if supervisor.exit_code() is None]
        if any(codes):
            raise CellFailed(f"exit codes {codes} after a drain")

    def end_all(self) -> None:
        """Leave no process behind."""
        for supervisor in self._supervisors:
            supervisor.end()

    def inject(self, fault: Fault, held: int = 0) -> None:
        """Do it, while the process ``held`` stands at a mark, and let that process go on."""
        match fault:
            case "kill program":
                self._kill_programs(held)
            case "kill workers":
                self._kill_workers()
            case "kill runner":
                self.kill_runner()
            case "kill supervisor" | "kill both" | "kill all":
                self.kill_supervisor(with_children=fault != "kill supervisor")
                self.control.release()
                self.start()
            case "stop" if held == self.main.pid:
                self._stop_supervisor()
            case "stop" if held in self.main.workers():
                self._stop_worker(held)
            case "stop":
                self._stop_runner(held)
            case "drop connection":
                self._note_connections()
                self._truth.terminate(self._dropped)
                self._wait_dropped()
            case "database away":
                self._note_connections()
                with self._truth.away():
                    self._wait_dropped()
                    self.control.release()
                    time.sleep(AWAY_S)
                    self._truth.look("while the database is away")
            case "restart server" | "crash server":
                assert self._server is not None, "this server is everybody's"
                self._note_connections()
                self._server.restart(SERVER_FAULTS[fault])
                self._wait_dropped()
            case _:
                assert_never(fault)
        self.control.release()

    def wait_reconnected(self) -> None:
        """Wait for a connection in place of those that were dropped."""
        wait_until(lambda: set(self._truth.backends()) - self._dropped, "another connection in place of the one")

    # --- SIGKILL ----------------------------------------------------------------------------------

    def kill_supervisor(self, *, with_children: bool = False) -> None:
        """Kill the newest supervisor; its children die with it, or find out."""
        self._truth.note_fault("kill all" if with_children else "kill supervisor")
        self.counts["kills"] += self.main.kill(with_children=with_children)

    def kill_runner(self) -> None:
        """Kill the runner, as soon as there is one."""
        found: list[int] = []

        def is_found() -> bool:
            found.extend(self.main.children("headgate.runner")[:1])
            return bool(found)

        wait_until(is_found, "a runner to kill")
        self.counts["kills"] += send(found[0], signal.SIGKILL)

    def _kill_programs(self, held: int) -> None:
        """Kill the program of a user that is held, or all of them."""
        pids = [held] if held else self._workload.programs()
        self.counts["kills"] += sum(send(pid, signal.SIGKILL) for pid in pids)

    def _kill_workers(self) -> None:
        """Kill all workers. A step that is given to one of them afterwards is given to another."""
        workers = self.main.workers()
        for pid in workers:
            self._truth.note_fault("kill workers", pid)
            send(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, workers)), "the end of killed workers")
        self.counts["kills"] += len(workers)

    # --- SIGSTOP ----------------------------------------------------------------------------------

    def _stop_worker(self, pid: int) -> None:
        """A worker that stands still keeps its step and goes on where it was, unless others wait behind that step."""
        send(pid, signal.SIGSTOP)
        self.control.release()
        try:
            self._workload.wait_progress()
        finally:
            # Not before: it may be given, and lose, a task that is made while it stands still.
            self._truth.note_fault("stop", pid)
            send(pid, signal.SIGCONT)

    def _stop_runner(self, pid: int) -> None:
        """A runner that stands still for longer than its limit is replaced."""
        send(pid, signal.SIGSTOP)
        self.control.release()
        try:
            wait_until(lambda: not is_alive(pid), "a runner that stands still is replaced")
        finally:
            send(pid, signal.SIGCONT)

    def _stop_supervisor(self) -> None:
        """A supervisor that stands still for longer than its lease is fenced by a neighbour, and leaves when it wakes.

        Where it stands in a transaction of SQLite, nobody can write, the neighbour included: then it goes on.
        """
        stopped = self.main
        self._truth.note_fault("stop")
        send(stopped.pid, signal.SIGSTOP)
        self.control.release()
        try:
            self.start()
            within_s = FENCED_S_MAX if self.dialect == "postgresql" else FENCED_S_MAX_SQLITE
            deadline = time.monotonic() + within_s
            while not (fenced := self._truth.is_fenced(stopped.pid)) and time.monotonic() < deadline:
                time.sleep(LOOK_INTERVAL_S)
        finally:
            send(stopped.pid, signal.SIGCONT)
        if not fenced and self.dialect == "postgresql":
            raise CellFailed("a supervisor that stood still was not fenced")
        if not fenced:
            # It may still be, in the moment before its next heartbeat; then both leave.
            # One that waits for the lock before it has done anything else does not listen to SIGTERM yet.
            if (code := self._supervisors.pop().drain()) not in (0, -signal.SIGTERM):
                raise CellFailed(f"a neighbour with nothing to do left with exit code {code}")
            if not self._truth.is_fenced(stopped.pid):
                return
            self.start()
        if (code := stopped.leave()) != EXIT_LEASE_LOST:
            raise CellFailed(f"a fenced supervisor left with exit code {code}")

    # --- the database -----------------------------------------------------------------------------

    def _note_connections(self) -> None:
        """Remember which connections the fault is about. Raises `CellFailed` when there is none."""
        backends = self._truth.backends()
        if not backends:
            raise CellFailed("there was no connection to drop")
        self._dropped = set(backends)
        self.counts.update(dropped=len(backends), dropped_busy=sum(backends.values()))

    def _wait_dropped(self) -> None:
        """Wait for their end: a process that goes on before it might commit on them yet."""
        wait_until(lambda: not self._dropped & set(self._truth.backends()), "the end of the connections")
