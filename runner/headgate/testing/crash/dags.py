"""`crash_test_dag`: run an author's DAG on a real ``headgate up``, kill its processes, and compare the author's rows.

A run is made for each kill, and a worker, the runner or the supervisor kills itself with SIGKILL when it comes to a
mark. When the run has ended, what its tasks have written for it must be what is wanted, each row once.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headgate.protocol.values import encode_value
from headgate.testing.crash.campaign import overrides
from headgate.testing.crash.deaths import Death, plan_deaths_of_tasks
from headgate.testing.crash.killing import MarkedDeaths
from headgate.testing.crash.pair import Pair

KILLS = 8
MARK_WAIT_S = 10.0  # a mark that a run does not reach within this time, it does not reach at all
ENDED_WITHIN_S = 120.0  # a run, with all of its tries
LOOK_INTERVAL_S = 0.2  # between two looks at a run: each is a command
SHOWN_MAX = 5  # rows, in the text of a failure
UP: Final = ("-P", "-m", "headgate.cli", "up")
# The steps of a task with a stream, and the way of its events; what a task without one does not reach is passed over.
MARKS: Final = (
    *("host.event_queued", "store.committed", "tasks.dispatched", "worker.step_received", "worker.step_done"),
    *("worker.outcome_half_sent", "worker.outcome_sent", "executor.outcome_read", "stream.handled_written"),
    *("stream.handled_committed", "tasks.outcome_stored"),
)


@dataclass(kw_only=True)
class DagCrashReport:
    """What `crash_test_dag` has seen.

    ``deaths``: each kill as text, and whether the process died at the planned mark. ``missing`` and ``surplus``: rows
    that are not there, or that should not be, or not as often, by run. ``failed``: runs that did not succeed.
    """

    dag: str
    seed: int
    seconds: float = 0.0
    deaths: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    missing: dict[str, Counter[Hashable]] = field(default_factory=dict[str, "Counter[Hashable]"])
    surplus: dict[str, Counter[Hashable]] = field(default_factory=dict[str, "Counter[Hashable]"])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def faults(self) -> list[str]:
        """Return the faults, in words; the test has passed if there are none."""
        killed = {_run(number): death for number, (death, _) in enumerate(self.deaths)}
        found = [f"{run} (killed: {killed[run]}) is {state}" for run, state in self.failed.items()]
        for what, rows in (("missing", self.missing), ("written too often, or by mistake", self.surplus)):
            found += [f"{run} (killed: {killed[run]}): {_shown(some)} {what}" for run, some in rows.items()]
        return found

    def __str__(self) -> str:
        kills = ", ".join(text if reached else f"{text} (not reached)" for text, reached in self.deaths)
        return f"crash test of the DAG {self.dag}, seed {self.seed}, {self.seconds:.0f} s, killed: {kills or 'nothing'}"


class DagCrashTestFailed(AssertionError):
    """A crash test of a DAG found something; ``report`` holds all of it."""

    def __init__(self, report: DagCrashReport, last_error: str) -> None:
        self.report = report
        error = [f"the last error in the log: {last_error}"] if last_error else []
        super().__init__("\n".join([*report.faults(), str(report), *error]))


def crash_test_dag(
    dags: Path,
    dag_id: str,
    *,
    rows: Callable[[str], Iterable[Hashable]],
    wanted: Sequence[Hashable],
    conf: Mapping[str, Any] | None = None,
    kills: int = KILLS,
    marks: Sequence[str] = MARKS,
    import_paths: Sequence[Path] = (),
    settings: Mapping[str, str] | None = None,
    seed: int | None = None,
    folder: Path | None = None,
) -> DagCrashReport:
    """Run a DAG ``kills`` times on a real ``headgate up``, and kill a process in each run; raise if its rows differ.

    ``dags`` is the folder of its file, ``import_paths`` those of its modules, ``conf`` the params of its runs. ``rows``
    is called with a run_id when that run has ended, and returns what its tasks have written for it, from wherever that
    is; these must be the ``wanted`` ones, each as often as it stands there, in any order. The DAG must not be paused or
    scheduled, and its tasks need ``retries``, because a worker's death costs a try. ``marks`` are the places in
    headgate at which a process is killed, in an order that ``seed`` determines. ``settings`` are headgate's.

    Raises `DagCrashTestFailed`, and `PairFailed` if the supervisor does not work at all, or does not know the DAG.
    """
    begun_at = time.monotonic()
    kills = overrides.get("kills", kills)
    seed = overrides.get("seed", secrets.randbelow(2**32) if seed is None else seed)
    place = folder or Path(tempfile.mkdtemp(prefix="headgate-crash-"))
    deaths = MarkedDeaths(place / "deaths")
    paths = [str(path.resolve()) for path in import_paths]
    of_dags = {"dags_folder": str(dags.resolve()), "workers": "2", "dags_look_s": "0.5", "worker_grace_s": "2"}
    given = {**of_dags, **(settings or {})}
    with _Station(place / "pair", import_paths=paths, python_path=[place / "deaths"], settings=given) as station:
        station.start()
        station.wait_until(lambda: station.knows(dag_id), f"the DAG {dag_id!r} is known")
        report = DagCrashReport(dag=dag_id, seed=seed)
        for number, death in enumerate(plan_deaths_of_tasks(kills, seed, marks)):
            run_id = _run(number)
            assert death.mark is not None, "no kill is at a random moment: a run may be over by then"
            deaths.ask(death.mark, skips=death.skips)
            station.trigger(dag_id, run_id, conf)
            report.deaths.append((str(death), station.wait_death(death.mark, death, deaths)))
            state = station.wait_ended(dag_id, run_id)
            there, due = Counter(rows(run_id)), Counter(wanted)
            if state != "success":
                report.failed[run_id] = state
            if left_out := due - there:
                report.missing[run_id] = left_out
            if too_many := there - due:
                report.surplus[run_id] = too_many
        station.stop()
        report.seconds = time.monotonic() - begun_at
        if report.faults():
            raise DagCrashTestFailed(report, station.last_error())
    if folder is None:
        shutil.rmtree(place)
    return report


class _Station(Pair):
    """``headgate up`` with workers."""

    def _arguments(self) -> Sequence[str]:
        return UP

    def knows(self, dag_id: str) -> bool:
        """Whether the DAG is known, and can be run."""
        return any(json.loads(line)["name"] == dag_id for line in self._command("dags", "list", "--json").splitlines())

    def trigger(self, dag_id: str, run_id: str, conf: Mapping[str, Any] | None) -> None:
        """Make a run."""
        encoded = encode_value(dict(conf or {}), where="conf").decode()
        self._command("dags", "trigger", dag_id, "--run-id", run_id, "--conf", encoded)

    def wait_ended(self, dag_id: str, run_id: str) -> str:
        """Wait until a run has ended; return its state, or the one that it is in for ever."""
        deadline, pause = time.monotonic() + ENDED_WITHIN_S, threading.Event()
        while True:
            runs = [json.loads(line) for line in self._command("runs", "list", dag_id, "--json").splitlines()]
            (state,) = [str(run["state"]) for run in runs if run["run_id"] == run_id]
            if state in ("success", "failed") or time.monotonic() > deadline:
                return state
            pause.wait(LOOK_INTERVAL_S)

    def wait_death(self, mark: str, death: Death, deaths: MarkedDeaths) -> bool:
        """Wait until a process has died at the mark, and start a supervisor anew; return False if none came there."""
        deadline, pause = time.monotonic() + MARK_WAIT_S, threading.Event()
        while not deaths.has_died(mark) and time.monotonic() < deadline:
            pause.wait(0.01)
        if deaths.take_back(mark):
            return False
        if death.victim == "supervisor":
            self.wait_dead()
            self.start()
        return True


def _run(number: int) -> str:
    return f"crash-{number}"


def _shown(rows: Counter[Hashable]) -> str:
    some = [f"{row!r:.100}" for row in rows.elements()]
    more = f" and {len(some) - SHOWN_MAX:,} more" if len(some) > SHOWN_MAX else ""
    return ", ".join(some[:SHOWN_MAX]) + more
