"""One pair, one database, one log: cells of the matrix and random kills, one after another, each with its judgement."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, assert_never, get_args

from cryptography.fernet import Fernet
from tests.proof.crash.databases import MIGRATING
from tests.proof.crash.faults import UnderFault
from tests.proof.crash.processes import CellFailed, wait_until
from tests.proof.crash.server import RestartMode, Server
from tests.proof.crash.truth import Log, Truth

from headgate.protocol.marks import MARKS
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.supervisor.replay.run import LogIncomplete, ReplayStuck, open_replay_store, replay
from headgate.testing.crash.history import KINDS, Finding

Fault = Literal[
    "kill runner",
    "kill supervisor",
    "kill both",
    "stop",
    "drop connection",
    "database away",
    "restart server",
    "crash server",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
SERVER_FAULTS: dict[Fault, RestartMode] = {"restart server": "fast", "crash server": "immediate"}  # on one of our own

# Random kills: whom they hit, how many of them wait until events flow again, and for how long on average after that.
TARGETS = {"runner": 75, "supervisor": 10, "both": 15}  # a supervisor takes three times as long to start as a runner
KILLS_AT_WORK = 0.7
PAUSE_S = 0.1

GROUP = "g"
PARTITIONS = 2
APPENDED_AT_ONCE = 3  # lines a partition: rounds stay short, so that there are many of them
APPEND_INTERVAL_S = 0.01
CAPTURES_MAX = 10_000  # files of the frame log, one a supervisor: none is removed, all are replayed
SKIPS_MAX = 20  # marks of the flow are passed up to so many times first, so that cells meet different moments
COMPLETE_S_MAX = 60.0  # after a fault everything is stored and acknowledged within this time, or never will be
# A database that only loses a connection is asked again in milliseconds, and a confirmation that left too early is
# true by then. While it stays away, such a confirmation has the time to become an advance that somebody can see.
AWAY_S = 1.0


def is_possible(mark: str, fault: Fault, dialect: str) -> bool:
    """Whether a cell exists: SQLite has no connection to drop, and some marks are reached while there is no runner."""
    if fault in ("drop connection", "database away", *SERVER_FAULTS):
        return dialect == "postgresql"
    if fault in ("kill runner", "kill both"):
        return mark not in ("arbiter.reaped", "arbiter.before_spawn", "leases.registered")
    return True


@dataclass
class Result:
    """What came of one cell, or of one stretch of random kills (``mark`` is ``random`` then)."""

    mark: str
    fault: str
    subscribers: int
    dialect: str
    is_reached: bool = False  # whether a process stood at the mark
    kills: int = 0
    events: int = 0
    redelivered: int = 0
    dropped: int = 0  # connections of headgate that were ended
    dropped_busy: int = 0  # of these, in a transaction
    logs: int = 0  # captures of supervisors replayed, and what is in them
    frames: int = 0
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
        head = f"{self.mark} x {self.fault}, {self.subscribers} subscribers, {self.dialect}"
        return "\n".join([f"{head}: {self.error or 'ran'}", *map(str, self.findings[:5])])


class Campaign(UnderFault):
    """A pair in a folder of its own; ``with`` it. ``url`` is an empty, migrated database.

    ``server`` is the one that holds it, where that may be restarted. ``trigger`` is the class in
    ``users/crash_triggers.py`` that all subscribers are of. A cell fails that takes longer than ``complete_s_max`` to
    come to its mark, or to rest after its fault.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        subscribers: int,
        seed: int,
        server: Server | None = None,
        trigger: str = "CrashTrigger",
        complete_s_max: float = COMPLETE_S_MAX,
    ) -> None:
        self._server = server
        self._subscribers = subscribers
        self._random = random.Random(seed)
        self._complete_s_max = complete_s_max
        keys = Fernet.generate_key().decode()
        journals = folder / "journals"
        journals.mkdir()
        log = Log(folder / "log", PARTITIONS)
        engine = open_engine(url)
        with Store(engine, secrets=Secrets([keys], source="the tests")) as store:
            kwargs = {"path": str(log.folder), "group": GROUP, "journal": str(journals)}
            for number in range(subscribers):
                store.add_watcher(f"s{number}", f"crash_triggers.{trigger}", kwargs)
        engine.dispose()
        self.truth = Truth(log, GROUP, journals, url)
        captured = {"capture": str(folder / "capture"), "capture_files_max": str(CAPTURES_MAX)}
        super().__init__(folder, url, keys, self.truth, command="triggerer", settings=captured)
        self._known: set[tuple[str, str, str]] = set()  # findings that an earlier cell has reported
        self._redelivered = 0

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        self.truth.close()

    # --- one cell ---------------------------------------------------------------------------------

    def run_cell(self, mark: str, fault: Fault) -> Result:
        """Let events flow, hold a process at the mark, do the fault, let everything settle, judge."""
        result = Result(mark, fault, self._subscribers, self._dialect)
        started_at, events_before = time.monotonic(), self.truth.events
        try:
            self._begin_flow()
            held = self._reach(mark, result)
            result.is_reached = True
            # Everything stands still, at the very point: what is acknowledged by now must be stored by now.
            self.truth.look(f"held at {mark}")
            self._do(fault, held, result)
            self.truth.append(APPENDED_AT_ONCE)
            self._settle()
            if result.dropped:
                self._wait_reconnected()
        except CellFailed as error:
            result.error = str(error)
        finally:
            self._control.release()
        self._judge(result, "at rest")
        result.events = self.truth.events - events_before
        result.took_s = time.monotonic() - started_at
        return result

    def finish(self) -> Result | None:
        """Drain the pair; return a result only where that went wrong."""
        result = Result("drain", "SIGTERM", self._subscribers, self._dialect)
        try:
            # One that was started a moment ago may have nothing to do, and not listen to SIGTERM yet.
            wait_until(lambda: self._main.runner() or self._main.exit_code() is not None, "a runner before the drain")
            codes = [supervisor.drain() for supervisor in self._supervisors if supervisor.exit_code() is None]
            if any(codes):
                result.error = f"exit codes {codes} after a drain"
        except CellFailed as error:
            result.error = str(error)
        self._judge(result, "after the drain")
        return None if result.is_good else result

    def replay(self) -> Result:
        """Play what the supervisors recorded again, after the end of all of them: every answer has to be the same.

        The record that a kill tore off is passed over. Everything else must be there: it is the whole campaign.
        """
        result = Result("replay", "captures", self._subscribers, self._dialect)
        started_at = time.monotonic()
        files = sorted((self._folder / "capture").glob("*.hgframe"))
        result.logs = len(files)
        try:
            with ExitStack() as stack:
                with MIGRATING:
                    store = stack.enter_context(open_replay_store(None))
                replayed = replay(files, store)
            result.frames = replayed.frames
            if not replayed.is_clean:
                result.error = f"a capture does not replay clean: {replayed.difference}"
        except (LogIncomplete, ReplayStuck) as error:
            result.error = f"a capture cannot be replayed: {error}"
        result.took_s = time.monotonic() - started_at
        return result

    def _judge(self, result: Result, at: str) -> None:
        """Look, and give the cell what is new: the history of a campaign goes on from cell to cell."""
        # What has not come to rest may have something on its way yet, and is no good result as it is.
        self.truth.look(at, at_rest=not result.error)
        report = self.truth.report()
        result.redelivered = report.redelivered - self._redelivered
        self._redelivered = report.redelivered
        for finding in report.findings:
            name = (finding.kind, finding.event, finding.subscriber)
            if name not in self._known:
                self._known.add(name)
                result.findings.append(finding)
        if not result.error and self.truth.dead_letters():
            result.error = "events were put aside as dead letters"
        if not result.is_good:
            self.truth.write_history(self._folder / "history.jsonl")

    # --- the flow ---------------------------------------------------------------------------------

    def _begin_flow(self) -> None:
        """Have events stored, so that what follows meets a pair at work."""
        if not self._supervisors or self._main.exit_code() is not None:
            self._start()
        rows = self.truth.rows()
        self.truth.append(APPENDED_AT_ONCE)
        wait_until(lambda: self.truth.rows() > rows, "the flow of events")

    def _reach(self, mark: str, result: Result) -> int:
        """Arm the mark, make the pair come by, write events until it does; return the pid held there."""
        when = MARKS[mark].when
        self._control.arm(mark, skip=self._random.randrange(SKIPS_MAX) if when == "flow" else 0)
        if when == "respawn":
            result.kills += self._kill_runner()
        elif when == "start":
            result.kills += self._main.kill()
            self._start()
        appended_at = 0.0

        def is_reached() -> bool:
            nonlocal appended_at
            if time.monotonic() - appended_at >= APPEND_INTERVAL_S and when == "flow":
                self.truth.append(APPENDED_AT_ONCE)
                appended_at = time.monotonic()
            return self._control.held() is not None

        wait_until(is_reached, f"the mark {mark}", self._complete_s_max)
        held = self._control.held()
        assert held is not None
        return held

    def _settle(self) -> None:
        """Wait until everything is stored for everybody, and acknowledged."""
        if self._main.exit_code() is not None:
            raise CellFailed(f"the supervisor left by itself with exit code {self._main.exit_code()}")
        wait_until(self.truth.is_complete, "everything is stored and acknowledged", self._complete_s_max)

    # --- faults -----------------------------------------------------------------------------------

    def _do(self, fault: Fault, held: int, result: Result) -> None:
        match fault:
            case "kill runner":
                result.kills += self._kill_runner()
                self._control.release()
            case "kill supervisor" | "kill both":
                result.kills += self._main.kill(with_children=fault == "kill both")
                self._control.release()
                self._start()
            case "stop" if held == self._main.pid:
                self._stop_supervisor()
            case "stop":
                self._stop_runner(held)
            case "drop connection":
                result.dropped, result.dropped_busy = self._drop_connections()
            case "database away":
                result.dropped, result.dropped_busy = self._note_connections()
                with self.truth.away():
                    self._wait_dropped()
                    self._control.release()
                    time.sleep(AWAY_S)
                    self.truth.look("while the database is away")
            case "restart server" | "crash server":
                assert self._server is not None, "this server is everybody's"
                result.dropped, result.dropped_busy = self._note_connections()
                self._server.restart(SERVER_FAULTS[fault])
                self._wait_dropped()
                self._control.release()
            case _:
                assert_never(fault)

    # --- random kills -----------------------------------------------------------------------------

    def run_random(self, kills: int) -> Result:
        """Kill at random moments while events flow, the runner mostly, then let everything settle, and judge."""
        result = Result("random", "kills", self._subscribers, self._dialect)
        started_at, events_before = time.monotonic(), self.truth.events
        try:
            self._begin_flow()
            while result.kills < kills:
                rows, pause_s = self.truth.rows(), self._random.expovariate(1 / PAUSE_S)
                until = time.monotonic() + pause_s

                def has_moved(rows: int = rows, until: float = until) -> bool:
                    self.truth.append(1)
                    return time.monotonic() >= until and self.truth.rows() > rows

                # Most kills wait for rows of the new incarnation, the others catch it while it begins.
                if self._random.random() < KILLS_AT_WORK:
                    wait_until(has_moved, "rows after a kill")
                else:
                    time.sleep(pause_s)
                result.kills += self._kill_somebody()
                self.truth.look(f"after kill {result.kills}")
            self._settle()
        except CellFailed as error:
            result.error = str(error)
        self._judge(result, "at rest")
        result.events = self.truth.events - events_before
        result.took_s = time.monotonic() - started_at
        return result

    def _kill_somebody(self) -> int:
        (target,) = self._random.choices(list(TARGETS), TARGETS.values())
        if target == "runner":
            return self._kill_runner()
        killed = self._main.kill(with_children=target == "both")
        self._start()
        return killed


def counts(results: list[Result]) -> dict[str, int]:
    """Sum up findings by kind."""
    return {kind: sum(result.count(kind) for result in results) for kind in KINDS}
