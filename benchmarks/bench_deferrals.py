"""Many sensors that wait for one file at the same time, with four workers: how long they take, and what of the slots.

A slot is taken from the moment a step is given to a worker until its outcome is stored, by the supervisor's words in
the task's log.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from benchmarks import stations
from benchmarks.harness import Bench, Case, Figure, Figures, Options, main
from benchmarks.stations import WORKERS, Station, StepTimes

Mode = Literal["deferrable", "poke"]

POKE_INTERVAL_S = 1.0
DAG = """
from datetime import timedelta

from headgate.tasks.graph import DAG
from headgate.tasks.sensors import FileSensor

with DAG("warm"):
    FileSensor(task_id="warm", filepath="/", mode="poke")

with DAG("waiting", max_active_runs={count}):
    FileSensor(
        task_id="sensor", filepath={path!r}, mode={mode!r}, poke_interval=timedelta(seconds={poke_interval_s})
    )
"""
WITHIN_S = 200.0
DEFERRED, ENDED, SLOT = "first begun to all deferred", "file there to all ended", "slot taken by one that waited"


class Waits:
    """Sensors of both modes; those that block wait as long as those that had deferred did last, on average."""

    def __init__(self, kind: str, count: int) -> None:
        self._kind = kind
        self._count = count
        self._wait_s = 0.0

    def deferrable(self) -> Figures:
        """Have all of them wait in triggers, and the file come then."""
        with self._station("deferrable") as (station, path):
            station.wait_states("deferred", self._count, WITHIN_S)
            there_at = _make(path)
            station.wait_ended(WITHIN_S)
            steps = self._steps(station)
        deferred_at = max(first.ended_at for first, *_ in steps)
        self._wait_s = statistics.mean((there_at - first.ended_at).total_seconds() for first, *_ in steps)
        return {
            DEFERRED: (deferred_at - min(first.begun_at for first, *_ in steps)).total_seconds(),
            ENDED: _last_end_s(steps, there_at),
            SLOT: statistics.mean(sum(step.slot_s for step in of_one) for of_one in steps),
        }

    def blocking(self) -> Figures:
        """Have as many as there are workers wait in them, and all go through once the file is there."""
        with self._station("poke") as (station, path):
            station.wait_states("running", min(WORKERS, self._count), WITHIN_S)
            time.sleep(self._wait_s)
            there_at = _make(path)
            station.wait_ended(WITHIN_S)
            steps = self._steps(station)
        waited = [sum(step.slot_s for step in of_one) for of_one in steps if of_one[0].begun_at < there_at]
        return {ENDED: _last_end_s(steps, there_at), SLOT: statistics.mean(waited)}

    @contextlib.contextmanager
    def _station(self, mode: Mode) -> Generator[tuple[Station, Path]]:
        """Give a station with warm workers, in which the sensors begin to wait, and the path of the file."""
        with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
            path = Path(folder) / "there"
            dag_file = DAG.format(count=self._count, path=str(path), mode=mode, poke_interval_s=POKE_INTERVAL_S)
            with stations.running(self._kind, dag_file) as station:
                station.warm_up("warm")
                station.wait_dag("waiting")
                for number in range(self._count):
                    station.create_run("waiting", f"run-{number}")
                yield station, path

    def _steps(self, station: Station) -> list[list[StepTimes]]:
        return [station.steps_of("waiting", f"run-{number}", "sensor") for number in range(self._count)]


def _make(path: Path) -> datetime:
    path.touch()
    return datetime.now(UTC)


def _last_end_s(steps: list[list[StepTimes]], since: datetime) -> float:
    return (max(of_one[-1].ended_at for of_one in steps) - since).total_seconds()


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    return [case(kind, options.of(1000, 100, 8)) for kind in options.databases]


def case(kind: str, count: int) -> Case:
    """Return the case of so many sensors."""
    waits = Waits(kind, count)
    figures = [Figure(DEFERRED, "s", baseline=ENDED), Figure(ENDED, "s"), Figure(SLOT, "s")]
    return Case(f"{kind}, {count:,} sensors, {WORKERS} workers", figures, waits.deferrable, waits.blocking)


BENCH = Bench(
    "deferrals",
    "deferrals: sensors that wait for one file at the same time",
    'the same with mode="poke": as many as there are workers wait as long; the others find the file there',
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
