"""Which runs are sent, and when: each that ends, once, whatever the collector answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import structlog
from tests.store.harness import Clock, Query
from tests.supervisor.tasks_harness import Tasks, clear
from tests.tracing.conftest import CollectorServer

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.steps import StepSucceeded
from headgate.store.facts.spans import StepSpan
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd
from headgate.tracing import sender as sending
from headgate.tracing.sender import LOOK_S, OVERLAP, RETRY_S, TRIES_MAX, Collector, CollectorAway, Sender, endpoint

OVERLAP_S = OVERLAP.total_seconds()


@pytest.fixture
def tasks(store: Store, query: Query) -> Tasks:
    """A DAG ``etl`` of one task, and a run ``r1`` of it that has succeeded."""
    tasks = Tasks(store, query, tasks=(TaskSpec("a", "Op"),))
    end(tasks)
    return tasks


@pytest.fixture
def sender(store: Store, collector: Collector, tasks: Tasks, clock: Clock) -> Sender:
    return Sender(store, collector, clock())


def end(tasks: Tasks, *created: str) -> None:
    """Create these runs, and have all that there are succeed."""
    for name in created:
        tasks.store.tasks.create_run("etl", name)
    tasks.plan()
    ended = [
        StepEnd(one.id, one.token, StepSucceeded(), span=StepSpan(one.try_number, one.ready_at, 0.0))
        for one in tasks.dispatch()
    ]
    tasks.store.tasks.store_ends(tasks.epoch, ended)
    tasks.plan()


def runs_of(server: CollectorServer) -> list[str]:
    """The runs that came, by their spans that are below no other."""
    roots = [span for span in server.spans if not span.parent_span_id]
    return [one.value.string_value for span in roots for one in span.attributes if one.key == "headgate.run_id"]


def test_each_run_is_sent_once_in_the_order_of_ends(
    sender: Sender, server: CollectorServer, tasks: Tasks, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "RUNS_PER_PAGE_MAX", 2)
    assert sender.send_new() == 1
    clock.advance(1)
    end(tasks, "r2", "r3", "r4", "r5")  # all at the same moment, so that a page ends among them
    clock.advance(OVERLAP_S / 2)
    end(tasks, "r6")
    assert sender.send_new() == 5
    clock.advance(1)
    end(tasks, "r7")
    tasks.store.tasks.create_run("etl", "r8")  # which goes on
    assert sender.send_new() == 1
    clock.advance(OVERLAP_S * 2)
    assert sender.send_new() == 0
    assert runs_of(server) == [f"r{number}" for number in range(1, 8)]


def test_a_run_whose_end_is_committed_late_is_sent(
    sender: Sender, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    clock.advance(OVERLAP_S - 1)
    end(tasks, "r2")
    assert sender.send_new() == 2
    clock.advance(-5)  # it ended before the others, by its own words
    end(tasks, "r3")
    assert sender.send_new() == 1
    assert runs_of(server) == ["r1", "r2", "r3"]


def test_runs_that_ended_before_are_left_out(
    store: Store, collector: Collector, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    clock.advance(OVERLAP_S + 1)
    end(tasks, "r2")
    assert Sender(store, collector, clock()).send_new() == 1
    assert runs_of(server) == ["r2"]


def test_a_run_that_is_begun_again_is_sent_again_as_the_same_trace(
    sender: Sender, server: CollectorServer, store: Store, tasks: Tasks, clock: Clock
) -> None:
    assert sender.send_new() == 1
    clock.advance(1)
    assert clear(store, tasks.run, "a")
    end(tasks)
    assert sender.send_new() == 1
    assert runs_of(server) == ["r1", "r1"]
    assert len({span.trace_id for span in server.spans}) == 1


def test_what_is_sent_again_by_another_process_has_the_same_ids(
    store: Store, collector: Collector, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    for _ in range(2):
        assert Sender(store, collector, clock()).send_new() == 1
    first, again = server.requests
    assert first == again


def test_a_run_that_is_refused_keeps_no_other_back(
    sender: Sender, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    clock.advance(1)
    end(tasks, "bad", "r3")
    server.refuses = b"bad"
    with structlog.testing.capture_logs() as records:
        assert sender.send_new() == 3
    assert runs_of(server) == ["r1", "r3"]
    (record,) = records
    assert (record["log_level"], record["dag"], record["run"]) == ("error", "etl", "bad")
    assert "400" in record["error"]
    assert sender.send_new() == 0, "it is not tried again and again"


def test_a_collector_that_refuses_once_is_asked_again(sender: Sender, server: CollectorServer) -> None:
    server.refuses, server.refusals_left = b"etl", TRIES_MAX - 1
    assert sender.send_new() == 1
    assert runs_of(server) == ["r1"]


def test_a_collector_that_is_away_gets_all_when_it_is_back(
    sender: Sender, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    server.is_away = True
    for _ in range(2):
        with pytest.raises(CollectorAway, match="timeout"):
            sender.send_new()
    clock.advance(OVERLAP_S * 5)
    end(tasks, "r2")
    server.is_away = False
    assert sender.send_new() == 2
    assert runs_of(server) == ["r1", "r2"]


def test_a_big_run_goes_in_several_requests(
    sender: Sender, server: CollectorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "SPANS_PER_REQUEST_MAX", 2)
    sender.send_new()
    assert [span.name for span in server.spans] == ["etl", "a", "running"]
    assert len(server.requests) == 2


class Stopped(Exception):
    """The test has seen enough."""


def waits(*each: Callable[[], object]) -> tuple[list[float], Callable[[float], None]]:
    """What to wait with: it does one of these things each time, and then raises `Stopped`."""
    left, waited = list(each), []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if not left:
            raise Stopped
        left.pop(0)()

    return waited, wait


def test_it_waits_ever_longer_for_a_collector_and_tells_once(
    sender: Sender, server: CollectorServer, tasks: Tasks
) -> None:
    server.is_away = True
    waited, wait = waits(list, list, lambda: setattr(server, "is_away", False), lambda: end(tasks, "r2"))
    with structlog.testing.capture_logs() as records, pytest.raises(Stopped):
        sender.run(wait)
    first, second, third, *rest = waited
    assert RETRY_S <= first < second < third
    assert rest == [LOOK_S, LOOK_S]
    assert [(one["log_level"], one["event"]) for one in records] == [
        ("warning", "traces cannot be sent; they wait"),
        ("info", "traces are sent again"),
    ]
    assert runs_of(server) == ["r1", "r2"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "http://localhost:4318/v1/traces"),
        ({"ENDPOINT": "https://otel.example/base/"}, "https://otel.example/base/v1/traces"),
        ({"ENDPOINT": "http://a", "TRACES_ENDPOINT": "http://b/as/it/is"}, "http://b/as/it/is"),
    ],
)
def test_the_variables_of_opentelemetry_say_where(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert endpoint() == expected
