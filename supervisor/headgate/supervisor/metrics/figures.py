"""The counts of one process: plain numbers, added where something happens, read by `Figures.snapshot`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from headgate.supervisor.metrics.catalogue import ALL, Metric

Labels = tuple[str, ...]


class HistogramCount(msgspec.Struct, frozen=True):
    """``counts`` has one number for each bound of the metric, and one for what is larger; ``total`` is their sum."""

    counts: tuple[int, ...]
    total: float


class Snapshot(msgspec.Struct, frozen=True):
    """All values at one time, by the metric's name and the values of its labels.

    A gauge that is not there has no series: what it measures does not exist, or is not known.
    """

    counts: Mapping[tuple[str, Labels], float]
    histograms: Mapping[str, HistogramCount]
    gauges: Mapping[tuple[str, Labels], float]
    database: str = ""  # the kind of the database
    metrics: Sequence[Metric] = tuple(ALL)  # that there are


class Figures:
    """Counters and histograms. Everything starts at 0, so that a rate can be computed from the first increase on."""

    def __init__(self, metrics: Sequence[Metric] = ALL) -> None:
        """``metrics`` are those that this process has; a supervisor's unless it is said."""
        self._counts: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[str, tuple[list[int], list[float]]] = {}
        for metric in metrics:
            if metric.kind == "counter" and not metric.is_of_streams:
                self._counts.update({(metric.name, labels): 0.0 for labels in label_sets(metric)})
            elif metric.kind == "histogram":
                self._histograms[metric.name] = [0] * (len(metric.bounds) + 1), [0.0]

    def add(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """Add to a counter. Raises `KeyError` for labels that it has not."""
        self._counts[metric.name, labels] += by

    def observe(self, metric: Metric, value: float) -> None:
        """Count a value in a histogram."""
        counts, total = self._histograms[metric.name]
        counts[bisect_left(metric.bounds, value)] += 1
        total[0] += value

    def counts(self) -> dict[tuple[str, Labels], float]:
        """Return all counters as they are now, by the metric's name and the labels' values."""
        return dict(self._counts)

    def histograms(self) -> dict[str, HistogramCount]:
        """Return all histograms as they are now, by the metric's name."""
        return {name: HistogramCount(tuple(counts), total[0]) for name, (counts, total) in self._histograms.items()}


def label_sets(metric: Metric) -> list[Labels]:
    """Return all combinations of labels of a metric; of one without labels, the empty one."""
    sets: list[Labels] = [()]
    for _, values in metric.labels:
        sets = [(*labels, value) for labels in sets for value in values]
    return sets
