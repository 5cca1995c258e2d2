"""A real pair, started as ``headgate triggerer`` or ``up`` starts it, on a database and with a board of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal

from benchmarks.board import Board
from benchmarks.databases import KEYS, Database
from benchmarks.harness import BenchFailed

ROOT = Path(__file__).parent.parent
PLAIN = ("-P", "-m", "headgate.cli")  # what the `headgate` command runs
Subcommand = Literal["triggerer", "up"]
LOOK_INTERVAL_S = 0.01  # between two reads of the board; it may be coarse, because the board has the exact moments
READY_WAIT_MAX_S = 60.0
STOP_WAIT_MAX_S = 45.0  # a supervisor that is asked to stop drains within its own limit of 30 s
LOG_TAIL_LINES = 20  # shown if a pair fails


class Pair:
    """One supervisor and its runner. ``settings`` are headgate's, by their names."""

    def __init__(
        self,
        database: Database,
        board: Board,
        *,
        command: tuple[str, ...] = PLAIN,
        subcommand: Subcommand = "triggerer",
        **settings: object,
    ) -> None:
        self.database = database
        self.board = board
        self._log = database.folder / "pair.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        given = {
            "home": database.folder,
            "database_url": database.url,
            "fernet_keys": KEYS,
            "import_paths": ROOT,
            "log_format": "json",
            **settings,
        }
        environment |= {f"HEADGATE_{name.upper()}": str(value) for name, value in given.items()}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command, subcommand],
                env=environment,
                cwd=ROOT if command != PLAIN else database.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def supervisor_pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    def runner_pids(self) -> list[int]:
        """Return the process ids of all runners that were ever ready, the newest last."""
        return [int(record["pid"]) for record in self.records() if record.get("event") == "the runner is ready"]

    def wait_ready(self) -> int:
        """Wait for the first runner to be ready; return its process id."""
        self.wait(lambda: bool(self.runner_pids()), "a runner is ready", READY_WAIT_MAX_S)
        return self.runner_pids()[-1]

    def wait(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        """Wait until ``condition`` is true. Raises `BenchFailed` if it is not in time, or the supervisor has ended."""
        deadline = time.monotonic() + within_s
        while not condition():
            if self._process.poll() is not None:
                raise self._failure(f"the supervisor left with {self._process.returncode} before: {what}")
            if time.monotonic() > deadline:
                raise self._failure(f"not within {within_s:g} s: {what}")
            time.sleep(LOOK_INTERVAL_S)

    def wait_board(self, slot: str, least: float, within_s: float) -> None:
        """Wait until a number of the board has grown to ``least``."""
        self.wait(lambda: self.board[slot] >= least, f"{slot} = {least:,.0f}", within_s)

    def kill_runner(self) -> float:
        """End the newest runner with SIGKILL; return the moment."""
        pid = self.runner_pids()[-1]
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return killed_at

    def stop(self) -> None:
        """Ask it to drain, and wait until it has. Raises `BenchFailed`."""
        self._process.terminate()
        try:
            code = self._process.wait(STOP_WAIT_MAX_S)
        except subprocess.TimeoutExpired:
            raise self._failure(f"the supervisor did not leave within {STOP_WAIT_MAX_S:g} s") from None
        if code != 0:
            raise self._failure(f"the supervisor left with {code}")

    def end(self) -> None:
        """End all processes; the runner dies with its supervisor."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the log so far."""
        found = []
        for line in self._log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def _failure(self, what: str) -> BenchFailed:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        numbers = {slot: self.board[slot] for slot in ("running", "subscribed", "advanced", "acked", "failed")}
        return BenchFailed(f"{what}\nthe board: {numbers}\nits log:\n{tail}")


def new_board(database: Database, events: int = 0) -> Board:
    """Make the board of a run."""
    return Board(str(database.folder / "board"), events)


@contextlib.contextmanager
def running(
    database: Database,
    board: Board,
    *,
    command: tuple[str, ...] = PLAIN,
    subcommand: Subcommand = "triggerer",
    **settings: object,
) -> Generator[Pair]:
    """Yield a pair whose runner is ready; it is drained afterwards. Raises `BenchFailed`."""
    pair = Pair(database, board, command=command, subcommand=subcommand, **settings)
    try:
        pair.wait_ready()
        yield pair
        pair.stop()
    finally:
        pair.end()
