"""One workload on one database: cells of the matrix and random kills, one after another, each with its judgement."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from tests.postgres import Server
from tests.proof.crash.databases import MIGRATING
from tests.proof.crash.faults import SERVER_FAULTS, FaultInjector
from tests.proof.crash.processes import CellFailed, SupervisorLogs
from tests.proof.crash.workload import Fault, Workload
from tests.waiting import ALL_WITHIN_S, NotInTime, wait_until

from headgate.store.errors import DatabaseAway
from headgate.supervisor.replay.run import LogIncomplete, ReplayStuck, open_replay_store, replay

# A quarantine is stored between the end of the runner and the start of the next.
RUNNERLESS_MARKS = ("arbiter.reaped", "arbiter.before_spawn", "leases.registered", "holds.written", "holds.stored")


def is_possible(mark: str, fault: Fault, dialect: str) -> bool:
    """Whether a cell exists: SQLite has no connection to drop, and some marks are reached while there is no runner."""
    if fault in ("drop connection", "database away", *SERVER_FAULTS):
        return dialect == "postgresql"
    return fault not in ("kill runner", "kill both") or mark not in RUNNERLESS_MARKS


class Finding(Protocol):
    """A violated promise. The first line of its text identifies it; the others tell its story."""

    @property
    def kind(self) -> str: ...


@dataclass
class Result:
    """The outcome of one cell, or of one stretch of random kills (``mark`` is ``random`` then).

    ``counts`` are those of `FaultInjector` and `Workload`, and of the ``logs`` and ``frames`` that were replayed.
    ``error``: why the cell could not show anything, for example a mark that was not reached.
    """

    mark: str
    fault: str
    dialect: str
    subscribers: int = 0
    is_reached: bool = False  # whether a process stood at the mark
    counts: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the cell ran, and nothing was found."""
        return not self.error and not self.findings

    def count(self, kind: str) -> int:
        """Return the number of findings of one kind."""
        return sum(finding.kind == kind for finding in self.findings)

    def __str__(self) -> str:
        load = f"{self.subscribers} subscribers" if self.subscribers else "tasks"
        head = f"{self.mark} x {self.fault}, {load}, {self.dialect}"
        return "\n".join([f"{head}: {self.error or 'ran'}", *map(str, self.findings[:5])])


class Campaign:
    """A workload in the folder that it is in; ``with`` it.

    A cell fails that takes longer than ``complete_s_max`` to reach its mark, or to come to rest after its fault.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        seed: int,
        server: Server | None = None,
        complete_s_max: float = ALL_WITHIN_S,
    ) -> None:
        self._workload = workload
        self._truth = workload.truth
        self._faults = FaultInjector(workload, server)
        self._random = random.Random(seed)
        self.complete_s_max = complete_s_max
        self._is_new = True
        self._known: set[str] = set()  # findings that an earlier cell has reported
        self._logs = SupervisorLogs(workload.folder)
        self.counted = Counter[str]()  # everything, as of the end of the last cell

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._faults.end_all()
        self._workload.close()

    # --- results ----------------------------------------------------------------------------------

    def run_cell(self, mark: str, fault: Fault) -> Result:
        """Let work flow, hold a process at the mark, do the fault, let everything settle, judge."""
        with self._judged(mark, fault) as result:
            self._begin()
            held = self._reach(mark)
            result.is_reached = True
            # Everything stands still, at the very point: what is acknowledged by now must be stored by now.
            self._truth.look(f"held at {mark}")
            dropped = self._faults.counts["dropped"]
            self._faults.inject(fault, held)
            self._workload.feed()
            self._settle()
            if self._faults.counts["dropped"] > dropped:
                self._faults.wait_reconnected()
        return result

    def run_random(self, kills: int) -> Result:
        """Kill at random moments while work flows, then let everything settle, and judge."""
        weights = self._workload.kill_weights
        with self._judged("random", "kills") as result:
            self._begin()
            killed = self._faults.counts["kills"]
            while self._faults.counts["kills"] - killed < kills:
                self._workload.work_until_kill(self._random)
                (fault,) = self._random.choices(list(weights), list(weights.values()))
                self._faults.inject(fault)
                self._truth.look(f"after kill {self._faults.counts['kills'] - killed}")
            self._settle()
        return result

    def finish(self) -> Result | None:
        """Drain the supervisors; return a result only if that went wrong."""
        with self._judged("drain", "SIGTERM", is_over=True) as result:
            wait_until(self._workload.is_drainable, "nothing is left to cancel")
            self._faults.drain()
        return None if result.is_good else result

    def replay(self) -> Result:
        """Replay the captures of all supervisors, after the end of all of them: every answer has to be the same.

        The record that a kill tore off is passed over. Everything else must be there: it is the whole campaign.
        """
        result = self._result("replay", "captures")
        started_at = time.monotonic()
        files = sorted((self._workload.folder / "capture").glob("*.hgframe"))
        result.counts["logs"] = len(files)
        try:
            with ExitStack() as stack:
                with MIGRATING:
                    store = stack.enter_context(open_replay_store(None))
                replayed = replay(files, store)
            result.counts["frames"] = replayed.frames
            if not replayed.is_clean:
                result.error = f"a capture does not replay clean: {replayed.difference}"
        except (LogIncomplete, ReplayStuck) as error:
            result.error = f"a capture cannot be replayed: {error}"
        result.took_s = time.monotonic() - started_at
        return result

    def _result(self, mark: str, fault: str) -> Result:
        return Result(mark, fault, self._faults.dialect, self._workload.subscribers)

    @contextmanager
    def _judged(self, mark: str, fault: str, *, is_over: bool = False) -> Iterator[Result]:
        """Give a result to fill; at the end look, and add the findings and counts that are new.

        The history of a campaign goes on from cell to cell.
        """
        result = self._result(mark, fault)
        started_at = time.monotonic()
        try:
            yield result
        except (CellFailed, NotInTime) as error:
            result.error = str(error)
        finally:
            self._faults.control.release()
        at_rest = not result.error or self._workload.is_stuck_after_error
        self._truth.look(f"after {mark} x {fault}", at_rest=at_rest, is_over=is_over)
        counts = self._faults.counts + self._workload.counts()
        result.counts = counts - self.counted
        self.counted = counts
        for finding in self._truth.report().findings:
            name = str(finding).partition("\n")[0]
            if name not in self._known:
                self._known.add(name)
                result.findings.append(finding)
        if not result.error and self._truth.dead_letters():
            result.error = "events were put aside as dead letters"
        if (failed := self._logs.new_failure()) is not None and not result.error:
            result.error = f"a fault of headgate: {failed}"
        if not result.is_good:
            self._truth.write_history(self._workload.folder / "history.jsonl")
        result.took_s = time.monotonic() - started_at

    # --- the flow of work -------------------------------------------------------------------------

    def _begin(self) -> None:
        """Have a supervisor at work, so that the fault meets it there."""
        if not self._faults.is_running:
            self._faults.start()
        self._workload.warm_up(is_new=self._is_new)
        self._is_new = False

    def _reach(self, mark: str) -> int:
        """Arm the mark, add work until a process reaches it, and return the pid held there."""
        when = self._workload.marks[mark].when if mark in self._workload.marks else "flow"
        self._faults.control.arm(mark, skip=self._random.randrange(self._workload.skips_max) if when == "flow" else 0)
        if when == "respawn":
            self._faults.kill_runner()
        elif when == "start":
            self._faults.kill_supervisor()
            self._faults.start()
        deadline = time.monotonic() + self.complete_s_max
        while (held := self._faults.control.held()) is None:
            if time.monotonic() >= deadline:
                raise CellFailed(f"the mark {mark}: not within {self.complete_s_max:g} s")
            if when == "flow":
                self._feed()
            wait_until(
                lambda: self._faults.control.held() is not None or (when == "flow" and self._workload.is_hungry()),
                f"the mark {mark}, or the end of the work",
                self.complete_s_max,
            )
        return held

    def _feed(self) -> None:
        """Add work, unless a process is held in a transaction meanwhile, which on SQLite lets nobody write."""
        try:
            self._workload.feed()
        except DatabaseAway:
            if self._faults.control.held() is None:
                raise

    def _settle(self) -> None:
        """Wait until all work is done."""
        if (code := self._faults.main.exit_code()) is not None:
            raise CellFailed(f"the supervisor left by itself with exit code {code}")
        wait_until(self._truth.is_complete, self._workload.at_rest, self.complete_s_max)
