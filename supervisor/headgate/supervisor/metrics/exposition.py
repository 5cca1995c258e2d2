"""A snapshot as the text that Prometheus scrapes. Only this module imports prometheus-client."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from headgate.protocol.version import VERSION
from headgate.supervisor.metrics.catalogue import PREFIX, Metric
from headgate.supervisor.metrics.figures import HistogramCount, Labels, Snapshot


def render(snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
    """Return the body and the content type for a scraper that accepts these."""
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Collector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        yield InfoMetricFamily(
            f"{PREFIX}build",
            "Versions.",
            {"version": VERSION, "python": platform.python_version(), "database": self._snapshot.database},
        )
        for metric in self._snapshot.metrics:
            if metric.kind == "histogram":
                yield _histogram(metric, self._snapshot.histograms[metric.name])
            else:
                yield _simple(metric, self._snapshot.gauges if metric.kind == "gauge" else self._snapshot.counts)


def _simple(metric: Metric, values: Mapping[tuple[str, Labels], float]) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(f"{PREFIX}{metric.name}", metric.help, labels=metric.label_names)
    for (name, labels), value in values.items():
        if name == metric.name:
            family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, counted: HistogramCount) -> Family:
    family = HistogramMetricFamily(f"{PREFIX}{metric.name}", metric.help)
    buckets: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip((*map(str, metric.bounds), "+Inf"), counted.counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    family.add_metric([], buckets, counted.total)
    return family
