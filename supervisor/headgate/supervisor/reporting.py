"""What a supervisor says of itself, to those who scrape it, check its health, or started it as a service.

The loop calls `turn_began` and `turn_ended`. A report is made only while somebody waits for one
(`headgate.supervisor.metrics.endpoint`), so nothing is computed for nobody.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import psutil
import structlog

from headgate.scheduling.words import counted
from headgate.store.errors import StoreError
from headgate.store.inspect.why_facts import Liveness
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseOutage
from headgate.supervisor.children.process import ChildStatistics, statistics_of
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.address import Address
from headgate.supervisor.metrics.asking import Loop, Report, database_check, staying_check
from headgate.supervisor.metrics.figures import Figures, Labels, Snapshot
from headgate.supervisor.metrics.service_manager import ServiceManager
from headgate.supervisor.metrics.streams import stream_series
from headgate.supervisor.runner_lifecycle import RunnerState

if TYPE_CHECKING:
    from headgate.supervisor.metrics.endpoint import Endpoint

log = structlog.get_logger(__name__)

DATABASE_LOOK_S = 15.0  # between two questions to the database
STATUS_INTERVAL_S = 10.0  # between two lines for systemd


class Reported(NamedTuple):
    """What a report is about."""

    core: SupervisorCore
    store: Store
    figures: Figures
    outage: DatabaseOutage
    liveness: Liveness


class Reporter:
    """Counts the loop's turns, answers the endpoint if there is one, and tells systemd. `close` it.

    ``leaves_within_s`` is how long a drain may take. Raises `OSError` if ``address`` cannot be listened on.
    """

    def __init__(
        self,
        reported: Reported,
        selector: selectors.BaseSelector,
        *,
        address: Address | None = None,
        service_manager: ServiceManager | None = None,
        leaves_within_s: float = 0.0,
    ) -> None:
        self._core, self._store, self._figures, self._outage, self._liveness = reported
        self._leaves_within_s = leaves_within_s
        self._manager = ServiceManager({}) if service_manager is None else service_manager
        self._told_at = -math.inf
        self._process = psutil.Process()
        self._of_database: dict[tuple[str, Labels], float] = {}
        self._looked_at = -math.inf
        self._selector = selector
        self._loop = Loop(self._wake)
        self._endpoint: Endpoint | None = None
        self._read_end, self._write_end = socket.socketpair()
        for end in (self._read_end, self._write_end):
            end.setblocking(False)
        selector.register(self._read_end, selectors.EVENT_READ, self._woken)
        if address is not None:
            # Loaded here: most supervisors are not scraped, and need neither its time nor its memory.
            from headgate.supervisor.metrics.endpoint import Endpoint

            self._endpoint = Endpoint(address, self._loop)
            log.info("answering /metrics, /livez and /readyz", host=address.host, port=self._endpoint.port)

    def close(self) -> None:
        """Answer nobody any more."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._selector.unregister(self._read_end)
        self._read_end.close()
        self._write_end.close()
        self._manager.close()

    # --- the loop ---------------------------------------------------------------------------------

    def wake_at(self) -> float:
        """Return the time at which a turn is due even if nothing happens: systemd wants to hear that the loop turns."""
        if not self._manager.is_there:
            return math.inf
        watchdog_s = self._manager.watchdog_s
        return self._told_at + min(STATUS_INTERVAL_S, math.inf if watchdog_s is None else watchdog_s / 3)

    def turn_began(self) -> None:
        """The loop has waited, and begins a turn."""
        self._loop.turn_began_at = time.monotonic()

    def turn_ended(self, runner: Callable[[], ChildStatistics | None]) -> None:
        """The loop has done what was due; ``runner`` says what the runner uses."""
        if self._loop.is_asked:
            self._loop.answer(self._report(time.monotonic(), runner()))
        now = time.monotonic()
        self._tell_manager(now)
        began_at, self._loop.turn_began_at = self._loop.turn_began_at, None
        if began_at is not None:
            self._figures.observe(catalogue.LOOP_TURN, now - began_at)

    def _wake(self) -> None:
        try:
            self._write_end.send(b"\0")
        except OSError:
            pass  # it is full, so the loop will wake; or closed, and nobody answers any more

    def _woken(self) -> None:
        self._read_end.recv(4096)

    # --- systemd ----------------------------------------------------------------------------------

    def _tell_manager(self, now: float) -> None:
        if self._core.is_leaving:
            self._manager.stopping(self._leaves_within_s)
        elif self._core.leases.is_held and self._core.runner.state is RunnerState.RUNNING:
            self._manager.ready()
        if now >= self.wake_at():
            self._told_at = now
            self._manager.alive()
            self._manager.status(self._status(now))

    def _status(self, now: float) -> str:
        failed = [words for holds, words in self._checks(now).values() if not holds]
        return (
            "; ".join(failed)
            or f"{counted(self._core.assignments.running(), 'trigger')}, {counted(self._steps(), 'step')} of tasks"
        )

    # --- the report -------------------------------------------------------------------------------

    def _report(self, now: float, runner: ChildStatistics | None) -> Report:
        checks = self._checks(now)
        gauges = self._gauges(now)
        for name, (holds, _) in checks.items():
            gauges[catalogue.CHECK.name, (name,)] = holds
        gauges[catalogue.READY.name, ()] = all(holds for holds, _ in checks.values())
        counts = self._figures.counts()
        of_streams, counts_of_streams = stream_series(self._core.runner.told, time.time(), self._core.drift.level)
        gauges |= of_streams
        counts |= counts_of_streams
        for process, statistics in (("supervisor", statistics_of(self._process)), ("runner", runner)):
            if statistics is None:
                del counts[catalogue.CPU.name, (process,)]
            else:
                counts[catalogue.CPU.name, (process,)] = statistics.cpu_s
                gauges[catalogue.MEMORY.name, (process,)] = statistics.rss_bytes
        self._look_at_database(now)
        gauges |= self._of_database
        kind = self._store.database.engine.dialect.name
        return Report(Snapshot(counts, self._figures.histograms(), gauges, kind), checks, catalogue.READY)

    def _checks(self, now: float) -> dict[str, tuple[bool, str]]:
        leases, runner = self._core.leases, self._core.runner
        lasts_s = leases.lasts_s(now) if leases.is_held else 0.0
        held = f"the lease lasts {lasts_s:.0f} s unless it is renewed" if lasts_s else "the lease has run out"
        return {
            "lease": (lasts_s > 0, held if leases.is_held else "no lease yet"),
            "runner": (runner.state is RunnerState.RUNNING, f"the runner is {runner.state.value}"),
            "database": database_check(self._outage.away_s(now), self._outage.reason()),
            "staying": staying_check(is_leaving=self._core.is_leaving),
        }

    def _gauges(self, now: float) -> dict[tuple[str, Labels], float]:
        assignments, leases = self._core.assignments, self._core.leases
        running, held = assignments.running(), len(assignments.held())
        gauges: dict[tuple[str, Labels], float] = {
            (catalogue.RUNNER_UP.name, ()): self._core.runner.state is RunnerState.RUNNING,
            (catalogue.DATABASE_AWAY.name, ()): self._outage.away_s(now),
            (catalogue.TRIGGERS.name, ("running",)): running,
            (catalogue.TRIGGERS.name, ("held",)): held,
            (catalogue.TRIGGERS.name, ("waiting",)): max(0, assignments.owned - running - held),
            (catalogue.TRIGGER_CAPACITY.name, ()): self._core.leases.capacity,
            (catalogue.INTAKE_WAITING.name, ()): self._core.intake.waiting_events,
            (catalogue.WORKERS.name, ()): self._core.leases.workers,
            (catalogue.STEPS_RUNNING.name, ()): self._steps(),
        }
        if leases.is_held:
            gauges[catalogue.LEASE_LASTS.name, ()] = leases.lasts_s(now)
        return gauges

    def _steps(self) -> int:
        return 0 if self._core.tasks is None else len(self._core.tasks.running())

    def _look_at_database(self, now: float) -> None:
        """Ask the database what `headgate status` would say, now and then; while it is away, nothing is known."""
        if now < self._looked_at + DATABASE_LOOK_S:
            return
        self._looked_at = now
        self._of_database = {}
        if self._outage.away_s(now):
            return
        try:
            found = Counter(problem.severity for problem in self._store.inspect.status(liveness=self._liveness))
            oldest_s = self._store.consumers.oldest(limit=catalogue.CONSUMERS_TOLD_MAX)
        except StoreError as error:
            log.info("the problems of the database are not known", error=str(error))
            return
        ((_, severities),) = catalogue.PROBLEMS.labels
        for severity in severities:
            self._of_database[catalogue.PROBLEMS.name, (severity,)] = found[severity]  # type: ignore[index]
        for name, age_s in oldest_s.items():
            self._of_database[catalogue.CONSUMER_OLDEST.name, (name,)] = age_s
