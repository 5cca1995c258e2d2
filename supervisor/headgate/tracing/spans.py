"""The spans of a run that has ended: the run over the tries of its tasks over what each try did.

Their ids are derived (`headgate.protocol.tracing`), so a run that is sent twice is the same trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from headgate.protocol import tracing
from headgate.protocol.tracing import SpanId
from headgate.protocol.version import VERSION
from headgate.store.ids import instance_name
from headgate.store.inspect.spans import EndedRun, Phase

_PROBLEMS = {"failed": "the try has failed", "lost": "the worker was lost"}
Attributes = Mapping[str, str | int]


def resource() -> Resource:
    """Return what all spans are of: this program, unless ``OTEL_SERVICE_NAME`` or the like say something else."""
    return Resource({"service.name": "headgate", "service.version": VERSION}).merge(OTELResourceDetector().detect())


def spans_of(run: EndedRun, phases: Iterable[Phase], of: Resource) -> Iterator[ReadableSpan]:
    """Yield the spans of a run, each below one that was yielded before it. ``phases`` are in the order of its tasks."""
    trace = _Trace(run, of)
    yield trace.span(
        run.dag,
        trace.root,
        None,
        (run.created_date, run.ended_at),
        {"headgate.state": run.state},
        problem="the run has failed" if run.state == "failed" else "",
    )
    for _, of_task in groupby(phases, key=lambda phase: (phase.task_id, phase.map_index)):
        # In order of their ends tries are mixed if a clock has gone back. The wait between two tries is of neither.
        in_tries = sorted((one for one in of_task if one.phase != "retry wait"), key=lambda one: one.try_number)
        for _, of_try in groupby(in_tries, key=lambda phase: phase.try_number):
            yield from trace.spans_of_try(list(of_try))


class _Trace:
    """The trace of one run."""

    def __init__(self, run: EndedRun, of: Resource) -> None:
        self._run = run
        self._resource = of
        self._id = tracing.trace_of_run(run.dag, run.run_id, run.created_date)
        self._attributes: Attributes = {
            "headgate.dag_id": run.dag,
            "headgate.run_id": run.run_id,
            "headgate.run_type": run.run_type,
        }
        self.root = tracing.span_of_part(self._id, "run")

    def spans_of_try(self, phases: Sequence[Phase]) -> Iterator[ReadableSpan]:
        """Yield the span of a try, and those of its phases."""
        first = phases[0]
        place = (first.task_id, first.map_index, first.try_number)
        named: Attributes = {
            "headgate.task": instance_name(first.task_id, first.map_index),
            "headgate.try_number": first.try_number,
        }
        of_try = tracing.span_of_try(self._id, *place)
        outcome = next((phase.outcome for phase in reversed(phases) if phase.outcome is not None), None)
        problem = _PROBLEMS.get(outcome or "", "")
        times = (first.began_at, phases[-1].ended_at)
        yield self.span(first.task_id, of_try, self.root, times, _with(named, outcome), problem=problem)
        for phase in phases:
            # Not by their number: only the newest steps of a task are kept.
            yield self.span(
                phase.phase,
                tracing.span_of_part(self._id, *place, phase.phase, _ns(phase.began_at)),
                of_try,
                (phase.began_at, phase.ended_at),
                _with(named, phase.outcome),
                kind=SpanKind.CONSUMER if phase.phase == "deferred" else SpanKind.INTERNAL,
            )

    def span(
        self,
        name: str,
        id_: SpanId,
        parent: SpanId | None,
        times: tuple[datetime, datetime | None],
        more: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        problem: str = "",
    ) -> ReadableSpan:
        """Return a span; what has no end has that of the run. None ends before it begins, whatever the clocks said."""
        began_at, ended_at = times
        return ReadableSpan(
            name,
            self._context(id_),
            None if parent is None else self._context(parent),
            self._resource,
            {**self._attributes, **more},
            kind=kind,
            status=Status(StatusCode.ERROR, problem) if problem else Status(),
            start_time=_ns(began_at),
            end_time=_ns(max(began_at, ended_at or self._run.ended_at)),
        )

    def _context(self, span: SpanId) -> SpanContext:
        return SpanContext(self._id, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _with(named: Attributes, outcome: str | None) -> Attributes:
    return named if outcome is None else {**named, "headgate.outcome": outcome}


def _ns(moment: datetime) -> int:
    return tracing.microseconds(moment) * 1000
