"""The spans of a run as a collector gets them: what is below what, for how long, and how it ended."""

from __future__ import annotations

from datetime import timedelta

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.store.harness import QUEUES, Clock, Query
from tests.store.inspect.test_spans import Timed
from tests.supervisor.tasks_harness import WAIT, Tasks
from tests.tracing.conftest import CollectorServer

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepSucceeded
from headgate.store.facts.spans import StepSpan
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd, WorkerLost
from headgate.supervisor.tasks.steps import step_of
from headgate.tracing.collector import Collector
from headgate.tracing.sender import Sender, Sent


def attributes(span: Span) -> dict[str, str | int]:
    return {
        one.key: one.value.string_value if one.value.HasField("string_value") else one.value.int_value
        for one in span.attributes
    }


def tree(spans: list[Span], timed: Timed) -> list[tuple[object, ...]]:
    """Each span with the name of the one above it, its seconds since the beginning, and how it ended."""
    names = {span.span_id: span.name for span in spans} | {b"": ""}
    assert len(names) == len(spans) + 1, "each has an id of its own"
    begin_ns = (timed.began - timed.began.fromtimestamp(0, timed.began.tzinfo)) // timedelta(microseconds=1) * 1000

    def since(ns: int) -> float:
        return (ns - begin_ns) / 1e9

    return [
        (
            span.name,
            names[span.parent_span_id],
            since(span.start_time_unix_nano),
            since(span.end_time_unix_nano),
            attributes(span).get("headgate.outcome"),
        )
        for span in spans
    ]


def send(store: Store, collector: Collector, server: CollectorServer, timed: Timed) -> list[Span]:
    assert Sender(store, collector, timed.began).send_new() == Sent(1)
    return server.spans


def test_a_task_that_fails_defers_and_succeeds(
    store: Store, query: Query, clock: Clock, collector: Collector, server: CollectorServer
) -> None:
    timed = Timed(Tasks(store, query, retries=1, retry_delay_s=10.0), clock)
    tasks = timed.tasks
    tasks.plan()
    timed.run_step(StepFailed("no"), queued_s=2, ran_s=3)
    clock.advance(10)
    assert store.tasks.retry_due(tasks.epoch)
    clock.advance(1)
    (task,) = tasks.dispatch(limit=1)
    told_worker = step_of(task).traceparent
    clock.advance(4)
    outcome = StepDeferred(WAIT.classpath, WAIT.kwargs, WAIT.next_method, WAIT.next_kwargs)
    end = StepEnd(task.id, task.token, outcome, span=StepSpan(2, task.ready_at, 4.0))
    store.tasks.store_ends(tasks.epoch, [end])
    clock.advance(100)
    (trigger,) = store.claim_triggers(tasks.epoch, limit=10, queues=QUEUES)
    store.store_slice(tasks.epoch, events=[FiredEvent(trigger.id, "run", 0, 1, b"1")])
    timed.run_step(StepSucceeded(), queued_s=2, ran_s=1)
    clock.advance(2)
    tasks.plan()

    spans = send(store, collector, server, timed)
    assert tree(spans, timed) == [
        ("etl", "", 0, 125, None),
        ("a", "etl", 0, 5, "failed"),
        ("queued", "a", 0, 2, None),
        ("running", "a", 2, 5, "failed"),
        ("a", "etl", 15, 123, "succeeded"),
        ("queued", "a", 15, 16, None),
        ("running", "a", 16, 20, "deferred"),
        ("deferred", "a", 20, 120, None),
        ("queued", "a", 120, 122, None),
        ("running", "a", 122, 123, "succeeded"),
    ]
    assert {span.trace_id for span in spans} == {spans[0].trace_id}
    failed = [span for span in spans if span.status.code == Status.STATUS_CODE_ERROR]
    assert [(span.name, span.status.message) for span in failed] == [("a", "the try has failed")]
    assert [span.name for span in spans if span.kind == Span.SPAN_KIND_CONSUMER] == ["deferred"]
    # What the author's code makes is below the second try, over its deferral.
    second = spans[4]
    assert told_worker == f"00-{second.trace_id.hex()}-{second.span_id.hex()}-01"
    assert attributes(second) == {
        "headgate.dag_id": "etl",
        "headgate.run_id": "r1",
        "headgate.run_type": "manual",
        "headgate.task": "a",
        "headgate.try_number": 2,
        "headgate.outcome": "succeeded",
    }
    assert [(one["service.name"], bool(one["service.version"])) for one in server.resources] == [("headgate", True)]


def test_a_run_that_fails_with_its_worker(
    store: Store, query: Query, clock: Clock, collector: Collector, server: CollectorServer
) -> None:
    timed = Timed(Tasks(store, query, tasks=(TaskSpec("a", "Op"),)), clock)
    timed.tasks.plan()
    timed.run_step(WorkerLost("killed"), queued_s=1, ran_s=3)
    timed.tasks.plan()
    spans = send(store, collector, server, timed)
    assert [(span.name, span.status.code, span.status.message) for span in spans] == [
        ("etl", Status.STATUS_CODE_ERROR, "the run has failed"),
        ("a", Status.STATUS_CODE_ERROR, "the worker was lost"),
        ("running", Status.STATUS_CODE_UNSET, ""),
    ]
    assert attributes(spans[0])["headgate.state"] == "failed"


def test_a_clock_that_goes_back_makes_no_span_twice_and_none_that_ends_before_it_begins(
    store: Store, query: Query, clock: Clock, collector: Collector, server: CollectorServer
) -> None:
    timed = Timed(Tasks(store, query, retries=1, retry_delay_s=10.0), clock)
    tasks = timed.tasks
    tasks.plan()
    timed.run_step(StepFailed("no"), queued_s=20, ran_s=30)
    clock.advance(10)
    assert store.tasks.retry_due(tasks.epoch)
    clock.advance(-55)
    timed.run_step(StepSucceeded(), queued_s=1, ran_s=2)
    tasks.plan()
    assert Sender(store, collector, timed.began).send_new() == Sent(1)
    spans = server.spans
    assert len({span.span_id for span in spans}) == len(spans)
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    tries = [span for span in spans if span.name == "a"]
    assert [attributes(span)["headgate.outcome"] for span in tries] == ["failed", "succeeded"]
