"""One ``headgate up``, one database, one DAG of deferring tasks: cells and random kills, each with its judgement."""

from __future__ import annotations

import itertools
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, assert_never, get_args

from cryptography.fernet import Fernet
from tests.proof.crash.faults import UnderFault
from tests.proof.crash.processes import CellFailed, is_alive, send, wait_until
from tests.proof.crash.task_truth import TaskTruth
from tests.proof.history.task_history import Finding

from headgate.protocol.marks import MARKS, TASK_MARKS
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store

Fault = Literal["kill workers", "kill runner", "kill supervisor", "kill all", "stop", "drop connection"]
FAULTS: tuple[Fault, ...] = get_args(Fault)

# The way of an event that resumes a task, and of a trigger to the runner, leads by these as well.
OF_THE_PAIR = (
    "leases.claim_written",
    "host.event_bound",
    "host.event_queued",
    "runner.frame_half_sent",
    "runner.frame_sent",
    "intake.round_read",
    "store.begun",
    "store.rows_inserted",
    "store.before_commit",
    "store.committed",
    "supervisor.frame_half_sent",
    "session.answer_read",
)
SIDES: dict[str, str] = {name: mark.side for name, mark in TASK_MARKS.items()} | {
    name: MARKS[name].side for name in OF_THE_PAIR
}
MEANINGS: dict[str, str] = {name: mark.meaning for name, mark in TASK_MARKS.items()} | {
    name: MARKS[name].meaning for name in OF_THE_PAIR
}

# Random kills: whom they hit, and for how long the station is left alone before, on average.
TARGETS: dict[Fault, int] = {"kill workers": 40, "kill runner": 30, "kill supervisor": 15, "kill all": 15}
PAUSE_S = 0.4
RUNS_AT_ONCE_MAX = 4  # of random kills: more would only wait for one another

DAG_NAME = "crash"
TASKS = (
    *("plain", "once", "after", "thrice", "again", "gives_up", "times_out", "races"),
    *("breaks", "ended", "skipped", "failed", "begun_in_trigger"),
)
DAG_FILE = """\
from crash_tasks import crash_dag

dag = crash_dag({name!r}, {journal!r})
"""
SKIPS_MAX = 8  # a mark is passed up to so many times first, so that cells meet different tasks
COMPLETE_S_MAX = 60.0  # after a fault everything has ended within this time, or never will
SETTINGS = {"workers": "3", "dags_look_s": "0.2", "worker_grace_s": "2"}


def is_possible(fault: Fault, dialect: str) -> bool:
    """Whether a cell exists: SQLite has no connection to drop."""
    return fault != "drop connection" or dialect == "postgresql"


@dataclass
class Result:
    """What came of one cell, or of one stretch of random kills (``mark`` is ``random`` then)."""

    mark: str
    fault: str
    dialect: str
    is_reached: bool = False  # whether a process stood at the mark
    kills: int = 0
    tasks: int = 0
    executions: int = 0
    deferrals: int = 0
    tries_lost: int = 0  # to faults
    dropped: int = 0  # connections of headgate that were ended
    took_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    error: str = ""  # why the cell could not show anything, an unreached mark above all

    @property
    def is_good(self) -> bool:
        """Whether the cell ran, and nothing was found."""
        return not self.error and not self.findings

    def count(self, kind: str) -> int:
        """How many findings there are of one kind."""
        return sum(finding.kind == kind for finding in self.findings)

    def __str__(self) -> str:
        head = f"{self.mark} x {self.fault}, tasks, {self.dialect}"
        return "\n".join([f"{head}: {self.error or 'ran'}", *map(str, self.findings[:5])])


class TaskCampaign(UnderFault):
    """A station in a folder of its own; ``with`` it. ``url`` is an empty, migrated database.

    A cell fails that takes longer than ``complete_s_max`` to come to its mark, or to rest after its fault.
    """

    def __init__(self, folder: Path, url: str, *, seed: int, complete_s_max: float = COMPLETE_S_MAX) -> None:
        keys = Fernet.generate_key().decode()
        journal = folder / "journal.jsonl"
        self.truth = TaskTruth(url, journal)
        super().__init__(folder, url, keys, self.truth, command="up", settings=SETTINGS)
        self._random = random.Random(seed)
        self.complete_s_max = complete_s_max
        self._numbers = itertools.count(1)
        self._known: set[Finding] = set()  # what an earlier cell has reported
        self._counted = self.truth.report()
        dags = folder / "dags"
        dags.mkdir()
        (dags / "crash.py").write_text(DAG_FILE.format(name=DAG_NAME, journal=str(journal)))

    def __enter__(self) -> TaskCampaign:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        self.truth.close()

    # --- one cell ---------------------------------------------------------------------------------

    def run_cell(self, mark: str, fault: Fault) -> Result:
        """Have tasks run, hold a process at the mark, do the fault, let everything settle, judge."""
        result = Result(mark, fault, self._dialect)
        started_at = time.monotonic()
        try:
            self._warm_up()
            held = self._reach(mark)
            result.is_reached = True
            self.truth.look(f"held at {mark}")
            self._do(fault, held, result)
            self._make_run()
            self._settle()
            if result.dropped:
                self._wait_reconnected()
        except CellFailed as error:
            result.error = str(error)
        finally:
            self._control.release()
        self._judge(result)
        result.took_s = time.monotonic() - started_at
        return result

    def run_random(self, kills: int) -> Result:
        """Kill at random moments while tasks run, then let everything settle, and judge."""
        result = Result("random", "kills", self._dialect)
        started_at = time.monotonic()
        try:
            self._warm_up()
            while result.kills < kills:
                if self.truth.unfinished() < len(TASKS) * RUNS_AT_ONCE_MAX:
                    self._make_run()
                time.sleep(self._random.expovariate(1 / PAUSE_S))
                (fault,) = self._random.choices(list(TARGETS), TARGETS.values())
                self._do(fault, 0, result)
                self.truth.look(f"after kill {result.kills}")
            self._settle()
        except CellFailed as error:
            result.error = str(error)
        self._judge(result)
        result.took_s = time.monotonic() - started_at
        return result

    def finish(self) -> Result | None:
        """Let go of what is over, and drain the station; return a result only where that went wrong."""
        result = Result("drain", "SIGTERM", self._dialect)
        try:
            # Its owner lets what has fired come to its end by itself, and cancels it only after a while.
            wait_until(self.truth.is_released, "nobody has a trigger any more")
            wait_until(lambda: self._main.runner() or self._main.exit_code() is not None, "a runner before the drain")
            if (code := self._main.drain()) != 0:
                raise CellFailed(f"exit code {code} after a drain")
        except CellFailed as error:
            result.error = str(error)
        self._judge(result, is_over=True)
        return None if result.is_good else result

    def _judge(self, result: Result, *, is_over: bool = False) -> None:
        """Look, and give the cell what is new: the history of a campaign goes on from cell to cell."""
        self.truth.look(f"after {result.mark} x {result.fault}", at_rest=True, is_over=is_over)
        report, before = self.truth.report(), self._counted
        self._counted = report
        result.tasks = report.tasks - before.tasks
        result.executions = report.executions - before.executions
        result.deferrals = report.deferrals - before.deferrals
        result.tries_lost = report.tries_lost - before.tries_lost
        for finding in report.findings:
            name = Finding(finding.kind, finding.about, finding.why)
            if name not in self._known:
                self._known.add(name)
                result.findings.append(finding)
        if not result.error and self.truth.dead_letters():
            result.error = "events were put aside as dead letters"
        if not result.is_good:
            self.truth.write_history(self._folder / "history.jsonl")

    # --- the flow ---------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Have all that a run needs be there, and nothing under way: what follows begins with the next run."""
        if self._supervisors and self._main.exit_code() is None:
            return
        is_first = not self._supervisors
        self._start()
        if is_first:
            wait_until(self.truth.has_dag, "the DAG")
            self._make_run()
            self._settle()

    def _make_run(self) -> None:
        run_id = f"r{next(self._numbers)}"
        # As a user's command does: its connection is gone afterwards, and none that a fault is about.
        engine = open_engine(self._url)
        with Store(engine, secrets=Secrets([self._keys], source="the tests")) as store:
            store.tasks.create_run(DAG_NAME, run_id)
        engine.dispose()
        self.truth.made([f"{DAG_NAME}/{run_id}/{task}" for task in TASKS], run_id)

    def _reach(self, mark: str) -> int:
        """Arm the mark, make one run after the other until a process comes by; return the pid held there."""
        self._control.arm(mark, skip=self._random.randrange(SKIPS_MAX))
        deadline = time.monotonic() + self.complete_s_max
        while self._control.held() is None:
            if time.monotonic() >= deadline:
                raise CellFailed(f"the mark {mark}: not within {self.complete_s_max:g} s")
            # Only now: a process that is held in a transaction of SQLite would not let it be made.
            self._make_run()
            wait_until(
                lambda: self._control.held() is not None or self.truth.is_complete(),
                f"the mark {mark}, or the end of a run",
                self.complete_s_max,
            )
        held = self._control.held()
        assert held is not None
        return held

    def _settle(self) -> None:
        """Wait until all tasks have ended."""
        if self._main.exit_code() is not None:
            raise CellFailed(f"the supervisor left by itself with exit code {self._main.exit_code()}")
        wait_until(self.truth.is_complete, "everything has ended", self.complete_s_max)

    # --- faults -----------------------------------------------------------------------------------

    def _do(self, fault: Fault, held: int, result: Result) -> None:
        match fault:
            case "kill workers":
                result.kills += self._kill_workers(fault)
                self._control.release()
            case "kill runner":
                result.kills += self._kill_runner()
                self._control.release()
            case "kill supervisor" | "kill all":
                self.truth.fault(fault)
                result.kills += self._main.kill(with_children=fault == "kill all")
                self._control.release()
                self._start()
            case "stop" if held == self._main.pid:
                self.truth.fault(fault)
                self._stop_supervisor()
            case "stop" if held in self._main.workers():
                self._stop_worker(held)
            case "stop":
                self._stop_runner(held)
            case "drop connection":
                result.dropped, _ = self._drop_connections()
            case _:
                assert_never(fault)

    def _kill_workers(self, fault: Fault) -> int:
        """Kill all there are; return how many. What is given to one of them afterwards is given to another."""
        workers = self._main.workers()
        for pid in workers:
            self.truth.fault(fault, pid)
            send(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, workers)), "the end of killed workers")
        return len(workers)

    def _stop_worker(self, pid: int) -> None:
        """A worker that stands still keeps its step, and nobody waits for it; it goes on where it was."""
        send(pid, signal.SIGSTOP)
        self._control.release()
        try:
            self._make_run()
            # All but the stopped one: its own task, and what is below that.
            wait_until(lambda: self.truth.unfinished() <= 2, "the others go on")
        finally:
            send(pid, signal.SIGCONT)
