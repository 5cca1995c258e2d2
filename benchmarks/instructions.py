"""Instructions for each event, counted by valgrind: a figure that other load on the machine does not change.

::

    python -m benchmarks.instructions [--only "1 subscriber"]

A time says how fast a machine is; a number of instructions says which of two commits does more for an event, to within
one percent. So run it in a worktree of each. Every case is run twice, with few and with many events, and the difference
is divided by the events that the second had more: start and end cancel out. The runner's supervisor is this process. It
answers a round when the runner sleeps, so that rounds are equally long in every run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.board import Board
from benchmarks.harness import BenchFailed
from benchmarks.pairs import ROOT
from headgate.protocol.black_box import BOX_BYTES
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FromRunner,
    FromSupervisor,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)
from headgate.protocol.values import encode_value

INCARNATION = 1
WITHIN_S = 300.0  # for one run: valgrind takes fifty times as long
LOOK_INTERVAL_S = 0.005
LOOKS_ASLEEP = 4  # in a row: valgrind sleeps for moments, too
NEVER_S = 3600.0  # of heartbeats and of the watchdog, which would depend on the time
DRAIN_S = 60.0
SETTINGS = RunnerSettings(heartbeat_s=NEVER_S, blocked_after_s=NEVER_S, import_paths=(str(ROOT),))


class Case(NamedTuple):
    """``few`` and ``many`` are the numbers of raw events, or of the supervisor's frames; each has ``rows`` rows."""

    label: str
    few: int
    many: int
    rows: int
    trigger: str = "MemoryTrigger"  # of `benchmarks.users.streams`; empty for a supervisor


CASES = (
    Case("runner, 1 subscriber", 2000, 6000, 1),
    Case("runner, 100 subscribers", 20, 60, 100),
    Case("runner, one event at a time", 500, 1500, 1, "SteppedTrigger"),
    Case("supervisor, 100 events a frame", 10, 40, 100, ""),
)


def measure(case: Case) -> float:
    """Return the instructions for each row of a case. Raises `BenchFailed`."""
    run = run_runner if case.trigger else run_supervisor
    return (run(case, case.many) - run(case, case.few)) / ((case.many - case.few) * case.rows)


# --- counting --------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(arguments: Sequence[str], folder: Path, pass_fds: Sequence[int] = ()) -> Generator[subprocess.Popen[bytes]]:
    """Start Python under valgrind; end it after the block. `count_of` returns its instructions when it has ended."""
    counter = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--log-file={folder / 'count'}"]
    environment = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [*counter, sys.executable, *arguments],
            pass_fds=pass_fds,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def count_of(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Wait for the end of a counted process; return its instructions. Raises `BenchFailed`."""
    code = process.wait(WITHIN_S)
    found = re.search(r"Collected : (\d+)", (folder / "count").read_text())
    if code != 0 or found is None:
        raise BenchFailed(f"the counted process left with {code}:\n{(folder / 'log').read_text(errors='replace')}")
    return int(found[1])


def run_supervisor(case: Case, frames: int) -> int:
    """Feed frames to a supervisor's core, as `benchmarks.bench_intake` does; return the instructions of the process."""
    call = f"from benchmarks.bench_intake import run_core; run_core('sqlite', frames={frames}, events_per_frame=100)"
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as name, counted(["-c", call], Path(name)) as process:
        return count_of(process, Path(name))


# --- the runner ------------------------------------------------------------------------------------


def run_runner(case: Case, events: int) -> int:
    """Have a runner hand so many raw events to its subscribers; return the instructions of the process."""
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        frames, theirs = (stack.enter_context(end) for end in socket.socketpair())
        logs, their_logs = (stack.enter_context(end) for end in socket.socketpair())
        box = stack.enter_context(open(os.memfd_create("black box"), "r+b"))
        box.truncate(BOX_BYTES)
        descriptors = {"--frames-fd": theirs.fileno(), "--logs-fd": their_logs.fileno(), "--box-fd": box.fileno()}
        arguments = ["-P", "-m", "headgate.runner", f"--incarnation={INCARNATION}", f"--supervisor-pid={os.getpid()}"]
        arguments += [f"{option}={descriptor}" for option, descriptor in descriptors.items()]
        process = stack.enter_context(counted(arguments, folder, tuple(descriptors.values())))
        theirs.close()
        their_logs.close()
        threading.Thread(target=_discard, args=[logs], daemon=True).start()
        board = Board(str(folder / "board"), 0)
        _Supervisor(case, events, board, frames, process.pid).serve()
        return count_of(process, folder)


def _discard(logs: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while logs.recv(65536):
            pass


class _Supervisor:
    """Confirms all events at once, and drains the runner when all of them are advanced."""

    def __init__(self, case: Case, events: int, board: Board, frames: socket.socket, pid: int) -> None:
        self._case = case
        self._rows = events * case.rows
        self._events = events
        self._board = board
        self._frames = frames
        self._state = Path(f"/proc/{pid}/stat")
        self._link: Connection[FromSupervisor, FromRunner] = Connection(RunnerDialect(INCARNATION), Role.SUPERVISOR)
        kwargs = {"board": board.path, "stream": 0, "subscribers": case.rows, "events": events}
        classpath, encoded = f"benchmarks.users.streams.{case.trigger}", encode_value(kwargs, where="kwargs")
        self._specs = {
            number: TriggerSpec(number, f"run-{number}", f"t{number}", classpath, encoded)
            for number in range(1, case.rows + 1)
        }

    def serve(self) -> None:
        """Return when the runner has left. Raises `BenchFailed`."""
        deadline = time.monotonic() + WITHIN_S
        is_draining = False
        self._frames.settimeout(LOOK_INTERVAL_S)
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                data = self._frames.recv(1 << 20)
                if not data:
                    return
                self._link.receive_data(data)
                while (message := self._link.next_message()) is not None:
                    self._take(message)
            if not is_draining and self._board["acked"] >= self._rows:
                is_draining = True
                self._frames.sendall(self._link.send(Drain(DRAIN_S)))
        raise BenchFailed(f"{self._case.label}: {self._board['acked']:,.0f} of {self._rows:,} in {WITHIN_S:g} s")

    def _take(self, message: FromRunner) -> None:
        match message:
            case Hello():
                self._frames.sendall(self._link.send(Welcome(PROTOCOL_VERSION, INCARNATION, SETTINGS)))
                self._frames.sendall(self._link.send(StateSync(to_create=tuple(self._specs.values()))))
            case StateChanges():
                self._answer(message)
            case _:
                raise BenchFailed(f"the runner asks for something: {message!r:.300}")

    def _answer(self, changes: StateChanges) -> None:
        self._wait_asleep()
        again = [
            msgspec.structs.replace(self._specs[described.trigger_id], stream=described.stream)
            for described in changes.described
        ]
        seqs = tuple([event.seq for event in changes.events])
        sync = StateSync(changes.round, persisted=seqs, to_create=tuple(again), more=changes.more)
        self._frames.sendall(self._link.send(sync))

    def _wait_asleep(self) -> None:
        looks = 0
        while looks < LOOKS_ASLEEP:
            time.sleep(LOOK_INTERVAL_S)
            state = self._state.read_text().rpartition(")")[2].split()[0]
            looks = looks + 1 if state == "S" else 0


def main() -> int:
    """Run the cases as a command; return its exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.instructions", description="Count the instructions of an event.")
    parser.add_argument("--only", default="", help="only cases whose label contains this")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("the command valgrind is not there; it is in the package valgrind of the distribution", file=sys.stderr)
        return 1
    try:
        for case in CASES:
            if options.only in case.label:
                print(f"{case.label}: {measure(case):,.0f} instructions a row", flush=True)
    except BenchFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
