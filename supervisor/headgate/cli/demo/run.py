"""The course of a demo: set up, write, kill, recover, kill again, stop, and look at everything once more."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from headgate.cli.demo.processes import DemoFailed, Supervisor, Writer
from headgate.cli.demo.truth import Audit, WrittenLog, open_reader
from headgate.supervisor.config import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

GROUP = "demo"
TRIGGER_CLASSPATH = "headgate.brokers.filelog.FileLogTrigger"
WATCHER_PREFIX = "demo-"

LOOK_INTERVAL_S = 0.02  # between two looks at offsets and tables
# Kills are spread over this part of the stored rows: after the first events, and while some are still to come.
FIRST_KILL_AT, LAST_KILL_AT = 0.03, 0.92
KILL_DELAY_MAX_S = 0.1  # a random wait before each kill, so that none follows from the rhythm of our looks
# The writer takes about this long for each kill, so that it is still writing at the last one: at least so many
# seconds, and at least so many times what the pair took to start on this machine.
WRITE_S_PER_KILL_MIN = 1.5
WRITE_STARTS_PER_KILL = 1.5
WRITE_S_MIN = 3.0
RATE_MAX = 5_000.0  # events a second: above it the writer is done before anything is killed

# Everything is written and acknowledged, and for this long nothing more is stored: nothing ever will be.
SETTLED_AFTER_S = 15.0

# The limit of the whole demo, after which it fails: generous, a machine may be slow, but it ends.
TIME_LIMIT_S = 120.0
TIME_LIMIT_S_PER_KILL = 15.0
TIME_LIMIT_ROWS_PER_S = 200.0

Target = Literal["runner", "supervisor"]


@dataclass(frozen=True)
class Plan:
    """What a demo is to do."""

    events: int
    kills: int
    subscribers: int
    partitions: int
    seed: int

    @property
    def rows(self) -> int:
        """How many rows there are when all is stored."""
        return self.events * self.subscribers

    @property
    def time_limit_s(self) -> float:
        """After how many seconds the demo gives up."""
        return TIME_LIMIT_S + TIME_LIMIT_S_PER_KILL * (self.kills + 1) + self.rows / TIME_LIMIT_ROWS_PER_S

    def schedule(self) -> list[ScheduledKill]:
        """Return the kills in order: one at a random place in each of as many equal parts of the stored rows."""
        randomness = random.Random(self.seed)
        count = self.kills + 1
        part = (LAST_KILL_AT - FIRST_KILL_AT) / count
        of_supervisor = randomness.randrange(count)
        return [
            ScheduledKill(
                target="supervisor" if number == of_supervisor else "runner",
                at_rows=int(self.rows * (FIRST_KILL_AT + part * (number + randomness.random()))),
                delay_s=randomness.uniform(0, KILL_DELAY_MAX_S),
            )
            for number in range(count)
        ]


@dataclass(frozen=True)
class ScheduledKill:
    """One kill: when so many rows are stored, and then a moment later."""

    target: Target
    at_rows: int
    delay_s: float


@dataclass(frozen=True)
class Kill:
    """One kill that was done. ``recovery_s``: until every subscriber had stored an event of a new trigger run.

    It is None where nothing was left to store.
    """

    target: Target
    recovery_s: float | None


@dataclass
class Result:
    """What came of a demo. ``audit`` has read everything anew at the end."""

    audit: Audit
    exit_code: int
    redelivered: int
    dead_letters: int
    looks: int
    rows_per_s: float
    kills: list[Kill] = field(default_factory=list)
    acknowledged_before_stored: int = 0

    def faults(self, plan: Plan) -> list[str]:
        """Return what is wrong, in words; nothing is, if the list is empty."""
        audit = self.audit
        found = {
            f"{audit.lost:,} events are lost": audit.lost,
            f"{audit.stored_twice:,} rows are stored twice": audit.stored_twice,
            f"{self.acknowledged_before_stored:,} events were acknowledged before they were stored": (
                self.acknowledged_before_stored
            ),
            f"{audit.written:,} of {plan.events:,} events were written": (
                sorted(audit.log.ids()) != list(range(plan.events))
            ),
            "not every event is stored for every subscriber": (
                len(audit.copies) != plan.subscribers
                or any(audit.stored(trigger_id) != plan.events for trigger_id in audit.copies)
            ),
            "not every event is acknowledged": not audit.log.is_committed_to_the_end(),
            f"{self.dead_letters:,} events are dead letters": self.dead_letters,
            f"the supervisor left with exit code {self.exit_code} when it was asked to stop": self.exit_code,
            f"{len(self.kills)} kills were done instead of {plan.kills + 1}": len(self.kills) != plan.kills + 1,
        }
        return [words for words, is_so in found.items() if is_so]


class Reporter(Protocol):
    """Who is told how far the demo is."""

    def update(self, rows: int, written: int, kills: int) -> None:
        """So many rows are stored, so many events written, so many kills done."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line has happened."""
        ...


class Demo:
    """One demo, in a folder of its own, on a database of its own."""

    def __init__(
        self, plan: Plan, folder: Path, url: str, supervisor: Supervisor, writer: Writer, reporter: Reporter
    ) -> None:
        self._plan = plan
        self._log_folder = folder / "log"
        self._settings = Settings(home=folder, database_url=url)
        self._supervisor = supervisor
        self._writer = writer
        self._reporter = reporter
        self._deadline = time.monotonic() + plan.time_limit_s
        self._kills: list[Kill] = []
        self._first_row_at: float | None = None
        self._last_row_at = 0.0
        self._last_change_at = time.monotonic()
        self.summary = "nothing was written yet"  # of what was seen so far, for a demo that fails

    def run(self) -> Result:
        """Run it to its end. Raises `DemoFailed` when it cannot get there."""
        self._log_folder.mkdir()
        self._set_up_database()
        reader = open_reader(self._settings.database_url)
        try:
            audit = Audit(reader, WrittenLog(self._log_folder, GROUP), self._plan.events)
            started_in_s = self._start_pair(audit)
            self._writer.start(
                events=self._plan.events, partitions=self._plan.partitions, rate=self._rate(started_in_s)
            )
            for kill in self._plan.schedule():
                self._kill(audit, kill)
            self._look_until(audit, lambda: audit.is_complete, "everything is stored and acknowledged")
            exit_code = self._supervisor.stop()
            return self._result(audit, reader, exit_code)
        finally:
            reader.dispose()

    def _set_up_database(self) -> None:
        from headgate.store.db import schema
        from headgate.store.db.engine import open_engine
        from headgate.store.db.secrets import Secrets
        from headgate.store.store import Store

        engine = open_engine(self._settings.database_url)
        try:
            schema.upgrade(engine)
            store = Store(engine, secrets=Secrets.open(self._settings.home, None))
            with store:
                for number in range(self._plan.subscribers):
                    kwargs = {"path": str(self._log_folder), "group": GROUP}
                    store.add_watcher(f"{WATCHER_PREFIX}{number}", TRIGGER_CLASSPATH, kwargs)
        finally:
            engine.dispose()

    def _start_pair(self, audit: Audit) -> float:
        """Start the supervisor and wait until it has taken the triggers; return the seconds that took."""
        started_at = time.monotonic()
        self._supervisor.start()
        self._look_until(audit, lambda: audit.unclaimed() == 0, "the supervisor has taken the triggers")
        return time.monotonic() - started_at

    def _rate(self, started_in_s: float) -> float:
        """Return the events a second at which the writer is still writing when the last kill is done."""
        per_kill_s = max(WRITE_S_PER_KILL_MIN, WRITE_STARTS_PER_KILL * started_in_s)
        return min(RATE_MAX, self._plan.events / (WRITE_S_MIN + per_kill_s * (self._plan.kills + 1)))

    def _kill(self, audit: Audit, kill: ScheduledKill) -> None:
        """Wait for the moment of a kill, do it, and wait until events are stored again."""
        if not self._look_until(audit, lambda: audit.rows >= kill.at_rows, f"{kill.at_rows:,} rows are stored"):
            return
        time.sleep(kill.delay_s)
        if kill.target == "runner":
            killed_at = self._supervisor.kill_runner()
        else:
            killed_at = self._supervisor.kill_and_restart()
        # What the supervisor has received of the dead runner it still stores; that is no recovery.
        audit.look()
        runs_before = {trigger_id: frozenset(runs) for trigger_id, runs in audit.runs.items()}
        self._look_until(
            audit,
            lambda: audit.flows_again_since(runs_before) or audit.is_complete,
            f"rows are stored after a kill of the {kill.target}",
        )
        recovery_s = time.monotonic() - killed_at if audit.flows_again_since(runs_before) else None
        self._kills.append(Kill(kill.target, recovery_s))
        after = "nothing was left to store" if recovery_s is None else f"events flow again after {recovery_s:.2f} s"
        self._reporter.note(f"SIGKILL to the {kill.target} at {audit.rows:,} rows: {after}")

    def _look_until(self, audit: Audit, is_done: Callable[[], bool], what: str) -> bool:
        """Look at offsets and tables again and again until something is so; False if it never will be.

        Raises `DemoFailed` at the time limit, and when a process fails.
        """
        while True:
            self._look(audit)
            if is_done():
                return True
            if self._is_settled(audit):
                return False
            self._supervisor.check()
            self._writer.check()
            if time.monotonic() > self._deadline:
                raise DemoFailed(f"the time limit of {self._plan.time_limit_s:,.0f} s came before {what}")
            time.sleep(LOOK_INTERVAL_S)

    def _look(self, audit: Audit) -> None:
        """Look once, and note when the first and the last rows came."""
        rows_before, written_before = audit.rows, audit.written
        audit.look()
        now = time.monotonic()
        if audit.rows > rows_before:
            self._last_row_at = now
            self._first_row_at = self._first_row_at or now
        if (audit.rows, audit.written) != (rows_before, written_before):
            self._last_change_at = now
        self.summary = (
            f"{audit.written:,} of {self._plan.events:,} events written, {audit.rows:,} of {self._plan.rows:,} rows "
            f"stored, {len(audit.acknowledged_before_stored):,} acknowledged before stored, {len(self._kills)} kills"
        )
        self._reporter.update(audit.rows, audit.written, len(self._kills))

    def _is_settled(self, audit: Audit) -> bool:
        """Whether nothing will change any more: the pair thinks that it is done, whether or not it is."""
        return (
            audit.written >= self._plan.events
            and time.monotonic() - self._last_change_at > SETTLED_AFTER_S
            and audit.log.is_committed_to_the_end()
        )

    def _result(self, audit: Audit, reader: Engine, exit_code: int) -> Result:
        """Read everything anew, by an audit that has seen nothing yet, and put the findings of both together."""
        audit.look()
        anew = Audit(reader, WrittenLog(self._log_folder, GROUP), self._plan.events)
        anew.look()
        flow_s = self._last_row_at - (self._first_row_at or 0.0)
        return Result(
            audit=anew,
            exit_code=exit_code,
            redelivered=anew.redelivered(),
            dead_letters=anew.dead_letters(),
            looks=audit.looks + anew.looks,
            rows_per_s=anew.rows / flow_s if flow_s > 0 else 0.0,
            kills=self._kills,
            acknowledged_before_stored=len(audit.acknowledged_before_stored | anew.acknowledged_before_stored),
        )
