"""Records the golden captures: real pairs, real kills, every frame recorded.

    python tests/replay/capture.py [NAME ...]

Run it only if the wire was changed on purpose: every later headgate must be able to replay what is in ``captured/``
afterwards. Without names all captures are recorded. A capture that is useless (a kill that hit nothing, too many
frames) is refused, and the old one stays.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import WITHIN_S

from headgate.brokers.filelog import FileLogTrigger
from headgate.protocol.framelog.log import Record, read_frames, verify
from headgate.testing import Pair
from headgate.testing.demo import Writer

CAPTURED = Path(__file__).parent / "captured"
SUBSCRIBERS = 2
PARTITIONS = 2
RATE = 40.0  # events a second: slow enough that a round carries few of them, and that kills come in between
IMPORT_PATHS = ""  # they travel in the handshake: no path of whoever makes the captures may be among them
FRAMES_MAX = 900  # of one capture: it has to be read by people when it fails
BYTES_MAX = 200_000  # of one capture: it stands in the repository


class CapturedPair:
    """A pair under capture, with a writer outside."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.captured = folder / "captured"
        self._written = 0
        settings = {"capture": str(self.captured), "heartbeat_s": "1", "import_paths": IMPORT_PATHS}
        self.pair = Pair(folder, settings=settings)
        self._writers = contextlib.ExitStack()
        for number in range(SUBSCRIBERS):
            self.pair.add(FileLogTrigger(str(folder / "log"), "captured"), f"subscriber-{number}")

    def write(self, events: int, *, until: float = 1.0, rows: int | None = None) -> None:
        """Write events and wait until this share of their rows is stored; the writer goes on meanwhile.

        With ``rows``, wait until so many more are stored than before: not all subscribers get all events.
        """
        before = self._rows()
        writer = Writer(self._folder / "log", events=events, partitions=PARTITIONS, rate=RATE)
        self._writers.enter_context(writer)
        wanted = int((self._written + events * until) * SUBSCRIBERS) if rows is None else before + rows
        self._written += events
        self.pair.wait_until(lambda: self._rows() >= wanted, f"{wanted} rows")
        writer.check()

    def wait_ready(self, runners: int) -> None:
        """Wait until so many runners have been ready, over all supervisors."""
        log = self.pair.log_path
        self.pair.wait_until(lambda: log.read_text().count("the runner is ready") >= runners, f"{runners} runners")

    def act(self, *words: str, logged: str = "") -> None:
        """Do as a user does with ``headgate watchers``, and wait until the supervisor has logged it once more."""
        log = self.pair.log_path
        before = log.read_text().count(logged)
        self.pair._command("watchers", *words)
        if logged:
            self.pair.wait_until(lambda: log.read_text().count(logged) > before, logged)

    def set_kwargs(self, name: str, **kwargs: Any) -> None:
        """Change the kwargs of a subscriber."""
        given = {"path": str(self._folder / "log"), "group": "captured", **kwargs}
        self.act("set", name, "--kwargs", json.dumps(given), logged="a trigger is changed by a user")

    def _rows(self) -> int:
        # A connection that stayed open would spare a killed supervisor's successor its recovery.
        with contextlib.closing(sqlite3.connect(self._folder / "headgate.db", timeout=WITHIN_S)) as connection:
            return int(connection.execute("SELECT count(*) FROM trigger_event").fetchone()[0])

    def restart_supervisor(self) -> None:
        """SIGKILL to the supervisor, and the next one."""
        self.pair.kill_supervisor()
        self.pair.start()

    def stop(self) -> None:
        """Have the supervisor drain."""
        if self.pair.stop() != 0:
            raise self.pair.failure("the drain failed")

    def end(self) -> None:
        """Leave nothing behind."""
        self._writers.close()
        self.pair.close()


def plain(pair: CapturedPair) -> None:
    """From the first event to the drain, with nothing in between."""
    pair.pair.start()
    pair.wait_ready(1)
    pair.write(150)


def runner_killed(pair: CapturedPair) -> None:
    """The runner dies three times; the supervisor hands its triggers over."""
    pair.pair.start()
    for number in range(1, 4):
        pair.wait_ready(number)
        pair.write(70, until=0.6)
        pair.pair.kill_runner()
    pair.wait_ready(4)
    pair.write(30)


def supervisor_killed(pair: CapturedPair) -> None:
    """The supervisor dies twice, and its runner with it."""
    pair.pair.start()
    for number in range(1, 3):
        pair.wait_ready(number)
        pair.write(80, until=0.6)
        pair.restart_supervisor()
    pair.wait_ready(3)
    pair.write(40)


def both_and_drain(pair: CapturedPair) -> None:
    """A runner dies, then its supervisor; the next one drains in the middle of the events, the last at their end."""
    pair.pair.start()
    pair.wait_ready(1)
    pair.write(70, until=0.6)
    pair.pair.kill_runner()
    pair.wait_ready(2)
    pair.write(70, until=0.6)
    pair.restart_supervisor()
    pair.wait_ready(3)
    pair.write(70, until=0.6)
    pair.stop()
    pair.pair.start()
    pair.wait_ready(4)
    pair.write(30)


def users_act(pair: CapturedPair) -> None:
    """A user pauses, resumes, changes, restarts and removes watchers while events flow and a runner dies."""
    pair.pair.start()
    pair.wait_ready(1)
    pair.write(60)
    pair.act("pause", "subscriber-0", logged="a trigger is held")
    pair.write(40, rows=40)
    pair.act("resume", "subscriber-0", logged="a trigger is released")
    pair.write(60, rows=80)
    pair.set_kwargs("subscriber-1", line_bytes_max=100_000)
    pair.write(60, rows=80)
    pair.act("restart", "subscriber-0", logged="a trigger is changed by a user")
    pair.write(60, rows=80)
    pair.act("pause", "subscriber-0", logged="a trigger is held")
    pair.pair.kill_runner()
    pair.wait_ready(2)
    pair.write(40, rows=40)
    pair.restart_supervisor()
    pair.wait_ready(3)
    pair.set_kwargs("subscriber-0", lock_timeout_s=7)
    pair.act("resume", "subscriber-0", logged="a trigger is released")
    pair.write(40, rows=60)
    pair.act("remove", "subscriber-1")
    pair.write(40, rows=40)


COURSES: dict[str, Callable[[CapturedPair], None]] = {
    "plain": plain,
    "runner-killed": runner_killed,
    "supervisor-killed": supervisor_killed,
    "both-and-drain": both_and_drain,
    "users-act": users_act,
}


def make(name: str) -> None:
    """Make one capture and put it in the place of the old one."""
    with tempfile.TemporaryDirectory(prefix="headgate-capture-") as temporary, contextlib.ExitStack() as stack:
        pair = CapturedPair(Path(temporary))
        stack.callback(pair.end)
        COURSES[name](pair)
        pair.stop()
        files = sorted(pair.captured.glob("*.hgframe"))
        frames = sum(isinstance(item, Record) for file in files for item in read_frames(file))
        size = sum(file.stat().st_size for file in files)
        if frames > FRAMES_MAX or size > BYTES_MAX or not all(verify(file).ok for file in files):
            raise SystemExit(f"{name}: {frames} frames in {size:,} bytes are too many, or not in order")
        shutil.rmtree(CAPTURED / name, ignore_errors=True)
        shutil.copytree(pair.captured, CAPTURED / name)
    (CAPTURED / name).chmod(0o755)
    for file in (CAPTURED / name).iterdir():
        file.chmod(0o644)
    print(f"{name}: {frames} frames, {size:,} bytes, {len(files)} files")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or COURSES:
        make(chosen)
