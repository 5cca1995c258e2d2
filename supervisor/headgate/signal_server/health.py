"""What the server of signals says of itself: what it has counted, and whether it can do its work."""

from __future__ import annotations

import threading
import time

import psutil

from headgate.supervisor.backoff import DatabaseOutage
from headgate.supervisor.children.process import statistics_of
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.asking import Report, database_check, staying_check
from headgate.supervisor.metrics.catalogue import Metric
from headgate.supervisor.metrics.figures import Figures, Labels, Snapshot


class Health:
    """Any thread counts; the outage and the report are of the thread that has the database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what several threads count
        self._figures = Figures(catalogue.OF_SIGNAL_SERVERS)
        self._process = psutil.Process()
        self.outage = DatabaseOutage(self._figures)
        self.is_leaving = False

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """Add to a counter. Raises `KeyError` for labels that it has not."""
        with self._lock:
            self._figures.add(metric, *labels, by=by)

    def report(self, database: str, listeners: int, listeners_max: int) -> Report:
        """Return how it is now, with this kind of a database and so many who listen."""
        away_s = self.outage.away_s(time.monotonic())
        checks = {
            "database": database_check(away_s, self.outage.reason()),
            "staying": staying_check(is_leaving=self.is_leaving),
        }
        gauges: dict[tuple[str, Labels], float] = {
            (catalogue.SIGNALS_LISTENERS.name, ()): listeners,
            (catalogue.SIGNALS_LISTENERS_MAX.name, ()): listeners_max,
            (catalogue.DATABASE_AWAY.name, ()): away_s,
            (catalogue.SIGNALS_READY.name, ()): all(holds for holds, _ in checks.values()),
        }
        gauges |= {(catalogue.SIGNALS_CHECK.name, (name,)): holds for name, (holds, _) in checks.items()}
        with self._lock:
            counts = self._figures.counts()
        if (statistics := statistics_of(self._process)) is not None:
            gauges[catalogue.SIGNALS_MEMORY.name, ()] = statistics.rss_bytes
            counts[catalogue.SIGNALS_CPU.name, ()] = statistics.cpu_s
        snapshot = Snapshot(counts, self._figures.histograms(), gauges, database, catalogue.OF_SIGNAL_SERVERS)
        return Report(snapshot, checks, catalogue.SIGNALS_READY)
