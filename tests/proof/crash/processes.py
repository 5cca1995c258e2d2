"""A supervisor and its runner as real processes: found, held at marks, killed, stopped, cleaned up."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil
from tests.waiting import WITHIN_S, wait_until

ORPHAN_S_MAX = 5.0  # I7 says one second; a busy machine gets a little more


class CellFailed(Exception):
    """A cell of the matrix could not show what it is to show; the text says why."""


def is_alive(pid: int) -> bool:
    """Whether a process can still do anything; one that nobody has reaped yet cannot."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children_of(pid: int) -> list[int]:
    """The children of a process: by the kernel's own list, which psutil would gather from all processes there are."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(word) for task in tasks for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except FileNotFoundError:
        if not os.path.exists(f"/proc/{pid}"):
            return []
    with contextlib.suppress(psutil.NoSuchProcess):  # a kernel without these lists, or a thread that has just ended
        return [int(child.pid) for child in psutil.Process(pid).children()]
    return []


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal to a process that may be gone; return whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class SupervisorLogs:
    """The logs of all supervisors of a workload, looked through for errors that nobody foresaw.

    What such an error is about is passed over for a while, and the supervisor goes on: nothing else may tell of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_to = Counter[Path]()  # bytes that were looked through

    def new_failure(self) -> str | None:
        """Return the first record with a traceback that was written since the last call; None if there is none."""
        found = None
        for path in sorted(self._folder.glob("**/supervisor.log")):
            with path.open("rb") as log:
                log.seek(self._read_to[path])
                for line in log:
                    if not line.endswith(b"\n"):
                        break  # half written
                    self._read_to[path] += len(line)
                    if b'"exception": "' in line and b'"logger": "headgate.supervisor.' in line:
                        found = found or line.decode(errors="replace").strip()
        return found


class Supervisor:
    """``headgate triggerer``, or another command that runs a supervisor, in a process of its own."""

    def __init__(self, environment: Mapping[str, str], folder: Path, command: str = "triggerer") -> None:
        with (folder / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headgate.cli", command],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def runner(self) -> int | None:
        """The pid of its runner, if it has one now."""
        return next(iter(self.children("headgate.runner")), None)

    def workers(self) -> list[int]:
        """The pids of its workers."""
        return self.children("headgate.worker")

    def children(self, module: str) -> list[int]:
        """The pids of its children that run ``module``."""
        found = []
        for child in children_of(self.pid):
            # Between fork and exec a child still looks like the supervisor; a dead one has no command line.
            with contextlib.suppress(OSError):
                if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    found.append(child)
        return found

    def kill(self, *, with_children: bool = False) -> int:
        """SIGKILL; return to how many. Raises `NotInTime` when its children go on without it (I7)."""
        runner, workers = self.runner(), self.workers()
        children = [*workers, *([] if runner is None else [runner])]
        self._process.kill()
        killed = 1 + sum([send(child, signal.SIGKILL) for child in children if with_children])
        self._process.wait()
        if runner is not None:
            wait_until(lambda: not is_alive(runner), "the end of a runner whose supervisor is dead", ORPHAN_S_MAX)
        wait_until(lambda: not any(map(is_alive, workers)), "the end of workers whose supervisor is dead", ORPHAN_S_MAX)
        return killed

    def drain(self) -> int:
        """SIGTERM; return the exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        return self.leave()

    def leave(self) -> int:
        """Wait until it has left; return the exit code."""
        try:
            return self._process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            raise CellFailed("a supervisor does not leave") from None

    def end(self) -> None:
        """Leave nothing behind. The children die with their supervisor, even where all of them stand still."""
        if self._process.poll() is None:
            children = [*self.children("headgate.runner"), *self.workers()]
            self._process.kill()
            self._process.wait()
            for child in children:
                send(child, signal.SIGKILL)


class Control:
    """The folder by which the marks of a pair are armed; see ``armed/sitecustomize.py``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._tokens = itertools.count(1)
        self._token = 0

    def arm(self, mark: str, *, skip: int = 0) -> None:
        """Hold the first process that reaches the mark after passing it ``skip`` times."""
        self._token = next(self._tokens)
        draft = self.folder / "armed.draft"
        draft.write_text(f"{self._token} {mark} {skip}")
        draft.rename(self.folder / "armed")

    def held(self) -> int | None:
        """The pid of the process that stands at the mark."""
        try:
            return int((self.folder / f"reached.{self._token}").read_text())
        except FileNotFoundError:
            return None

    def release(self) -> None:
        """Let it go on, and hold nobody any more."""
        (self.folder / "armed").unlink(missing_ok=True)
        (self.folder / f"released.{self._token}").touch()
