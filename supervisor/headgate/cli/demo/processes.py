"""The processes of a demo: the writer, the supervisor, and through it the runner; started, killed, cleaned up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path

import psutil

# What `Supervisor` runs with this Python; without -P the folder it runs in would be searched for modules.
SUPERVISOR_ARGUMENTS = ("-P", "-m", "headgate.cli", "triggerer")

STOP_WAIT_MAX_S = 45.0  # a supervisor asked to stop has drained within its own 30 s, or never will
RUNNER_WAIT_MAX_S = 60.0  # a supervisor that is alive has a runner within this time
ORPHAN_WAIT_MAX_S = 5.0  # a runner is gone within a second of its supervisor's death (I7); we wait a little longer
LOOK_INTERVAL_S = 0.01  # between two looks for a process
LOG_TAIL_LINES = 30  # of the supervisor's log, shown when a demo fails
LOG_TAIL_BYTES_MAX = 64 * 1024  # read from the end of the log for them


class DemoFailed(Exception):
    """The demo cannot show what it is to show; the text says why."""


class Supervisor:
    """``headgate triggerer`` in a process of its own, started again after each kill."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = folder / "supervisor.log"

    def start(self) -> None:
        """Start it; its log is appended to the demo's file."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *SUPERVISOR_ARGUMENTS],
                cwd=self._folder,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the demo, which then stops its processes in order.
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise `DemoFailed` if it has left by itself."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise DemoFailed(f"the supervisor left by itself with exit code {code}")

    def kill_and_restart(self) -> float:
        """End it with SIGKILL and start the next; return the moment of the kill.

        Raises `DemoFailed` when its runner goes on without it (I7).
        """
        assert self._process is not None
        runners = self._runners()
        killed_at = time.monotonic()
        self._process.kill()
        self._process.wait()
        self.start()
        while alive := [runner for runner in runners if _is_alive(runner)]:
            if time.monotonic() - killed_at > ORPHAN_WAIT_MAX_S:
                raise DemoFailed(
                    f"the runner {alive[0].pid} is alive {ORPHAN_WAIT_MAX_S:g} s after its supervisor's death"
                )
            time.sleep(LOOK_INTERVAL_S)
        return killed_at

    def kill_runner(self) -> float:
        """End its runner with SIGKILL; return the moment. Raises `DemoFailed` when there is no runner to kill."""
        deadline = time.monotonic() + RUNNER_WAIT_MAX_S
        while time.monotonic() < deadline:
            self.check()
            for runner in self._runners():
                killed_at = time.monotonic()
                with contextlib.suppress(psutil.NoSuchProcess):
                    runner.kill()
                    return killed_at
            time.sleep(LOOK_INTERVAL_S)
        raise DemoFailed(f"the supervisor has had no runner for {RUNNER_WAIT_MAX_S:g} s")

    def stop(self) -> int:
        """Ask it to drain; return its exit code. Raises `DemoFailed` when it does not leave."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(STOP_WAIT_MAX_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"the supervisor did not leave within {STOP_WAIT_MAX_S:g} s of SIGTERM") from None

    def end(self) -> None:
        """Leave nothing behind, however the demo ended. The runner dies with its supervisor."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_TAIL_BYTES_MAX))
            lines = log.read().decode("utf-8", "backslashreplace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _runners(self) -> list[psutil.Process]:
        assert self._process is not None
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                # Between fork and exec a child still looks like the supervisor; a dead one has no command line.
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "headgate.runner" in child.cmdline():
                        found.append(child)
        return found


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process can still do anything; one that nobody has reaped yet cannot."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Writer:
    """The program outside that writes the events: the file log's own command."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, events: int, partitions: int, rate: float) -> None:
        """Start to write ``events`` events at ``rate`` events a second."""
        command = [sys.executable, "-P", "-m", "headgate.brokers.filelog_writer", str(self._folder)]
        command += ["--events", str(events), "--partitions", str(partitions), "--rate", f"{rate:.3f}"]
        self._process = subprocess.Popen(
            command,
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def check(self) -> None:
        """Raise `DemoFailed` if it has failed; having finished, or not having started, is fine."""
        if self._process is not None and self._process.poll():
            assert self._process.stderr is not None
            words = self._process.stderr.read().decode("utf-8", "backslashreplace").strip()
            raise DemoFailed(f"the writer failed with exit code {self._process.returncode}: {words}")

    def end(self) -> None:
        """Leave nothing behind."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()


@contextlib.contextmanager
def termination_as_interrupt() -> Generator[None]:
    """Have SIGTERM end what is inside as Ctrl-C does, so that it cleans up."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
