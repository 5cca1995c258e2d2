"""Sends the traces of runs that end, for as long as it is asked to; a collector that is away is waited for.

It keeps no place: whoever starts it again sends what ended lately once more, which is the same traces.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import islice
from typing import NoReturn

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from headgate.store.errors import DATABASE_UNUSABLE, NoSuchRow
from headgate.store.ids import DagRunId
from headgate.store.inspect.spans import EndedRun
from headgate.store.store import Store
from headgate.supervisor.backoff import Backoff
from headgate.tracing.spans import resource, spans_of

DEFAULT_ENDPOINT = "http://localhost:4318"
RUNS_PER_PAGE_MAX = 100
SPANS_PER_REQUEST_MAX = 2000
TRIES_MAX = 3  # of spans that a collector refuses which takes a request without any
# A transaction that takes longer than this to commit the end of its run may leave that run out.
OVERLAP = timedelta(seconds=30)
LOOK_S = 2.0  # between two looks for runs that have ended
RETRY_S, RETRY_S_MAX = 1.0, 60.0  # between two tries of a collector, or a database, that is away
WORDS_CHARS_MAX = 500

log = structlog.get_logger(__name__)


class CollectorAway(Exception):
    """The collector takes nothing at all, not even a request without spans; the text says what it answered."""


class Collector:
    """Where spans are sent to, over OTLP with HTTP; ``OTEL_EXPORTER_OTLP_*`` say how, as for all that uses the SDK."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._said = _LastWords()
        logger = logging.getLogger("opentelemetry.exporter")
        logger.addHandler(self._said)
        logger.propagate = False  # what it says is said here

    def send(self, spans: list[ReadableSpan]) -> str:
        """Send spans; return why they are refused, an empty text if they are not. Raises `CollectorAway`."""
        why = ""
        for _ in range(TRIES_MAX):
            self._said.text = "the request has failed"
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                return ""
            why = self._said.text
            if self._exporter.export([]) is not SpanExportResult.SUCCESS:
                raise CollectorAway(why)
        return why


def endpoint() -> str:
    """Return the URL that traces are sent to, by the variables that the specification of OpenTelemetry names."""
    if of_traces := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return of_traces
    return (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/") + "/v1/traces"


def open_collector(url: str) -> Collector:
    """Return the collector at this URL."""
    return Collector(OTLPSpanExporter(url))


class Sender:
    """Sends runs that have ended at ``since`` or later, each once unless it is begun again and ends again."""

    def __init__(self, store: Store, collector: Collector, since: datetime) -> None:
        self._store = store
        self._collector = collector
        self._resource = resource()
        self._newest = since
        self._sent: dict[tuple[DagRunId, datetime], None] = {}

    def send_new(self) -> int:
        """Send the runs that have ended since; return how many.

        Raises `CollectorAway`, and the errors of a database that is away; the next call goes on with what is left.
        """
        count, after = 0, (self._newest - OVERLAP, DagRunId(0))
        while page := self._store.inspect.ended_runs(*after, limit=RUNS_PER_PAGE_MAX):
            for run in page:
                if (run.id, run.ended_at) not in self._sent:
                    self._send(run)
                    self._sent[run.id, run.ended_at] = None
                    count += 1
            after = page[-1].ended_at, page[-1].id
            self._newest = max(self._newest, page[-1].ended_at)
            self._sent = {key: None for key in self._sent if key[1] >= self._newest - OVERLAP}
        return count

    def _send(self, run: EndedRun) -> None:
        try:
            phases = self._store.inspect.spans(run.dag, run.run_id)
        except NoSuchRow:
            return  # it was deleted meanwhile
        spans = spans_of(run, phases, self._resource)
        while some := list(islice(spans, SPANS_PER_REQUEST_MAX)):
            if why := self._collector.send(some):
                log.error("the collector refuses the trace of a run", dag=run.dag, run=run.run_id, error=why)
                return

    def run(self, wait: Callable[[float], None]) -> NoReturn:
        """Send for ever; ``wait`` is given the seconds to wait."""
        backoff = Backoff(RETRY_S, RETRY_S_MAX)
        while True:
            try:
                self.send_new()
            except (CollectorAway, *DATABASE_UNUSABLE) as error:
                if not backoff.failures:
                    log.warning("traces cannot be sent; they wait", error=str(error))
                wait(backoff.fail())
                continue
            if backoff.failures:
                log.info("traces are sent again")
                backoff.succeed()
            wait(LOOK_S)


class _LastWords(logging.Handler):
    """Keeps what the exporter has said last: it returns no reason."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.text = record.getMessage()[:WORDS_CHARS_MAX]
