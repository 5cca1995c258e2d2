"""Many triggers that only wait: how they are started, and how long that takes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Generator

from benchmarks import pairs
from benchmarks.databases import Database, add_triggers, fresh
from benchmarks.harness import Figures
from benchmarks.pairs import ROOT, Pair

CLASSPATH = "benchmarks.users.streams.Idle"
WITHIN_S = 200.0
COUNT_MAX = 1_000_000  # the largest value of the setting; the benchmark decides how many triggers it adds


@contextlib.contextmanager
def pair_ready_for(kind: str, *, command: tuple[str, ...] = pairs.PLAIN) -> Generator[Pair]:
    """Yield a pair without triggers, with capacity for any number."""
    with fresh(kind) as database, running_on(database, command=command) as pair:
        yield pair


@contextlib.contextmanager
def running_on(database: Database, *, command: tuple[str, ...] = pairs.PLAIN) -> Generator[Pair]:
    """Yield such a pair on an existing database."""
    with pairs.running(database, pairs.new_board(database), command=command, capacity=COUNT_MAX) as pair:
        yield pair


def add_idle(pair: Pair, count: int) -> float:
    """Add triggers that wait for ever; return the seconds from their commit until the last of them runs."""
    if not count:
        return 0.0
    before = pair.board["running"]
    committed_at = add_triggers(pair.database, CLASSPATH, [{"board": pair.board.path}] * count)
    pair.wait_board("running", before + count, WITHIN_S)
    return pair.board["running_at"] - committed_at


def bare_trio(count: int) -> Figures:
    """Run as many bare generators in bare trio tasks, in a process of their own; see `benchmarks.bare_trio`."""
    command = [sys.executable, "-m", "benchmarks.bare_trio", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=WITHIN_S)
    found: dict[str, float] = json.loads(done.stdout)
    return found
