"""Sends the traces of runs that end, for as long as it is asked to; a collector that is away is waited for.

It keeps no place: whoever starts it again sends what ended lately once more, which is the same traces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

import structlog

from headgate.store.errors import DATABASE_UNUSABLE
from headgate.store.ids import DagRunId
from headgate.store.inspect.spans import EndedRun, Phase
from headgate.store.store import Store
from headgate.supervisor.backoff import Backoff
from headgate.tracing.collector import Collector, CollectorAway
from headgate.tracing.spans import resource, spans_of

DEFAULT_ENDPOINT = "http://localhost:4318"
RUNS_PER_PAGE_MAX = 100
SPANS_PER_REQUEST_MAX = 2000
# A transaction that takes longer than this to commit the end of its run may leave that run out.
OVERLAP = timedelta(seconds=30)
LOOK_S = 2.0  # between two looks for runs that have ended
RETRY_S, RETRY_S_MAX = 1.0, 60.0  # between two tries of a collector, or a database, that is away

log = structlog.get_logger(__name__)


class Sent(NamedTuple):
    """How many runs were sent, and how many of these were refused, at least in part."""

    runs: int = 0
    refused: int = 0


def endpoint() -> str:
    """Return the URL that traces are sent to, by the variables that the specification of OpenTelemetry names."""
    if of_traces := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return of_traces
    return (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/") + "/v1/traces"


def shown(url: str) -> str:
    """Return a URL without the name, password and parameters in it; what is not a URL is not shown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the address of the collector"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


class Sender:
    """Sends runs that have ended since ``since``, each once unless it is begun again and ends again."""

    def __init__(self, store: Store, collector: Collector, since: datetime) -> None:
        self._store = store
        self._collector = collector
        self._resource = resource()
        self._newest = since  # all that ended before this, but for `OVERLAP`, is sent
        self._sent: dict[tuple[DagRunId, datetime], None] = {}  # of those that are read again

    def send_new(self) -> Sent:
        """Send the runs that have ended since.

        Raises `CollectorAway`, `CollectorUnusable`, and the errors of a database that is away; the next call goes on
        with what is left.
        """
        # A clock that was put right may have left ends that are still to come, and newest ones that never were.
        now = self._store.inspect.now()
        self._newest = min(self._newest, now)
        done, after = Sent(), (self._newest - OVERLAP, DagRunId(0))
        while page := self._store.inspect.ended_runs(*after, limit=RUNS_PER_PAGE_MAX):
            for run in page:
                if (run.id, run.ended_at) in self._sent:
                    continue
                phases = self._store.inspect.ended_spans(run)
                if phases is not None:
                    done = Sent(done.runs + 1, done.refused + self._is_refused(run, phases))
                self._sent[run.id, run.ended_at] = None
            after = page[-1].ended_at, page[-1].id
            self._newest = min(now, max(self._newest, page[-1].ended_at))
            self._sent = {key: None for key in self._sent if key[1] >= self._newest - OVERLAP}
        return done

    def _is_refused(self, run: EndedRun, phases: Sequence[Phase]) -> bool:
        """Send one; return whether it is refused."""
        spans = spans_of(run, phases, self._resource)
        while some := list(islice(spans, SPANS_PER_REQUEST_MAX)):
            if why := self._collector.send(some):
                log.error("the collector refuses the trace of a run", dag=run.dag, run=run.run_id, error=why)
                return True
        return False

    def run(self, wait: Callable[[float], None]) -> NoReturn:
        """Send for ever; ``wait`` is given the seconds to wait. Raises `DatabaseReplaced` and `CollectorUnusable`."""
        backoff, database = Backoff(RETRY_S, RETRY_S_MAX), self._store.database
        while True:
            try:
                self.send_new()
            except (CollectorAway, *DATABASE_UNUSABLE) as error:
                if not backoff.failures:
                    log.warning("traces cannot be sent; they wait", error=str(error))
                pause_s = backoff.fail()
            else:
                if backoff.failures:
                    log.info("traces are sent again")
                    backoff.succeed()
                pause_s = LOOK_S
            if database.engine.dialect.name == "sqlite":
                database.close()  # a connection stays with a file that was replaced; a new one finds that out
            wait(pause_s)
