"""The series of shared streams, from what the runner told of them last."""

from __future__ import annotations

from collections.abc import Callable

from headgate.protocol.messages.runner import RunnerFigures, StreamFigures
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.catalogue import Metric
from headgate.supervisor.metrics.figures import Labels

Series = dict[tuple[str, Labels], float]

NAME_CHARS_MAX = 120  # of the label
DIGEST_CHARS = 8  # of two streams that would have the same label


def stream_series(figures: RunnerFigures, now: float, drift: Callable[[str], int]) -> tuple[Series, Series]:
    """Return the gauges and the counters of all streams told; ``now`` is in seconds since 1970.

    ``drift`` returns the level of a stream by its digest (`headgate.scheduling.drift.LEVELS`).
    """
    gauges: Series = {}
    counts: Series = {}
    names: set[str] = set()
    for stream in figures.streams:
        name = stream.name[:NAME_CHARS_MAX]
        if name in names:
            name = f"{name} {stream.stream[:DIGEST_CHARS]}"
        if name not in names:
            names.add(name)
            _add(stream, name, now, gauges, counts)
            gauges[catalogue.STREAM_DRIFT.name, (name,)] = drift(stream.stream)
    return gauges, counts


def _add(stream: StreamFigures, name: str, now: float, gauges: Series, counts: Series) -> None:
    def gauge(metric: Metric, value: float, *labels: str) -> None:
        gauges[metric.name, (name, *labels)] = value

    def since(at: float | None) -> float:
        return 0.0 if at is None else max(0.0, now - at)

    if stream.lag is not None:
        gauge(catalogue.STREAM_LAG, stream.lag, stream.lag_unit)
    gauge(catalogue.STREAM_IN_FLIGHT, stream.in_flight)
    gauge(catalogue.STREAM_QUEUED, stream.queued)
    gauge(catalogue.STREAM_SUBSCRIBERS, stream.online, "online")
    gauge(catalogue.STREAM_SUBSCRIBERS, stream.absent, "absent")
    gauge(catalogue.STREAM_HELD, since(stream.held_since))
    gauge(catalogue.STREAM_OLDEST, since(stream.oldest_at))
    for outcome, count in (("acked", stream.acked), ("failed", stream.failed), ("rejected", stream.rejected)):
        counts[catalogue.STREAM_ADVANCED.name, (name, outcome)] = count
    counts[catalogue.STREAM_ENDS.name, (name,)] = stream.ended
