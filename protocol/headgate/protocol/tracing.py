"""Ids of traces and spans, derived from names: whoever knows a try knows its span, and nothing of it has to be stored.

A run is a trace, and each try of a task a span of it; see the W3C's recommendation "Trace Context".
"""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import blake2b
from typing import NewType

TraceId = NewType("TraceId", int)  # 128 bits, not 0
SpanId = NewType("SpanId", int)  # 64 bits, not 0

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds(moment: datetime) -> int:
    """Return the microseconds from 1970 to a moment: exactly, as no float can."""
    return (moment - _EPOCH) // datetime.resolution


def trace_of_run(dag_id: str, run_id: str, created_at: datetime) -> TraceId:
    """Return the trace of a run.

    The moment it was created tells it apart from others of its name: one that was deleted, or one in another database.
    """
    return TraceId(_hashed(16, dag_id, run_id, microseconds(created_at)))


def span_of_try(trace: TraceId, task_id: str, map_index: int, try_number: int) -> SpanId:
    """Return the span of a try of a task, over all of its steps; ``map_index`` is -1 unless it is mapped."""
    return SpanId(_hashed(8, trace, task_id, map_index, try_number))


def span_of_part(trace: TraceId, *names: str | int) -> SpanId:
    """Return the span of something else in a trace, by its names, which no try has."""
    return SpanId(_hashed(8, trace, "part", *names))


def traceparent(trace: TraceId, span: SpanId) -> str:
    """Return what is given on to others, so that their spans are below this one: version, ids, and "sampled"."""
    return f"00-{trace:032x}-{span:016x}-01"


def _hashed(size: int, *names: str | int) -> int:
    # The names are quoted, so that no two lists of them are the same text.
    digest = blake2b(repr(names).encode("utf-8", "surrogatepass"), digest_size=size).digest()
    return int.from_bytes(digest) or 1
