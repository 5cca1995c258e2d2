"""Which runs are sent, and when: each that ends, once, whatever the collector answers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from tests.store.harness import Clock, Query, migrated_sqlite
from tests.supervisor.tasks_harness import Tasks, clear
from tests.tracing.conftest import CollectorServer

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.steps import StepSucceeded
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseReplaced
from headgate.store.facts.spans import StepSpan
from headgate.store.inspect.spans import EndedRun
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd
from headgate.tracing import sender as sending
from headgate.tracing.collector import Collector, CollectorAway, CollectorUnusable
from headgate.tracing.sender import LOOK_S, OVERLAP, RETRY_S, Sender, Sent, endpoint, shown

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
    assert sender.send_new() == Sent(1)
    clock.advance(1)
    end(tasks, "r2", "r3", "r4", "r5")  # all at the same moment, so that a page ends among them
    clock.advance(OVERLAP_S / 2)
    end(tasks, "r6")
    assert sender.send_new() == Sent(5)
    clock.advance(1)
    end(tasks, "r7")
    tasks.store.tasks.create_run("etl", "r8")  # which goes on
    assert sender.send_new() == Sent(1)
    clock.advance(OVERLAP_S * 2)
    assert sender.send_new() == Sent()
    assert runs_of(server) == [f"r{number}" for number in range(1, 8)]


def test_a_run_whose_end_is_committed_late_is_sent(
    sender: Sender, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    clock.advance(OVERLAP_S - 1)
    end(tasks, "r2")
    assert sender.send_new() == Sent(2)
    clock.advance(-5)  # it ended before the others, by its own words
    end(tasks, "r3")
    assert sender.send_new() == Sent(1)
    assert runs_of(server) == ["r1", "r2", "r3"]


@pytest.mark.parametrize("back_s", [OVERLAP_S * 2, 10 * 365 * 86_400.0])
def test_a_clock_that_is_put_right_leaves_no_run_out(
    sender: Sender, server: CollectorServer, tasks: Tasks, clock: Clock, back_s: float
) -> None:
    clock.advance(back_s)
    end(tasks, "r2")
    assert sender.send_new() == Sent(2)
    clock.advance(-back_s)
    for name in ("r3", "r4"):
        clock.advance(1)
        end(tasks, name)
        sender.send_new()
        assert name in runs_of(server)
    server.requests.clear()
    again = Sender(tasks.store, sender._collector, clock())
    assert again.send_new() == Sent(4)
    clock.advance(1)
    end(tasks, "r5")
    assert again.send_new() == Sent(1)
    assert runs_of(server) == ["r1", "r3", "r4", "r2", "r5"]


def test_a_run_that_is_begun_again_or_deleted_meanwhile_is_left_out(
    sender: Sender, server: CollectorServer, tasks: Tasks, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store.inspect.ended_runs

    def then_cleared(*given: Any, **named: Any) -> list[EndedRun]:
        page = found(*given, **named)
        clear(store, tasks.run, "a")
        return page

    monkeypatch.setattr(store.inspect, "ended_runs", then_cleared)
    assert sender.send_new() == Sent()
    assert server.requests == []


def test_runs_that_ended_before_are_left_out(
    store: Store, collector: Collector, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    clock.advance(OVERLAP_S + 1)
    end(tasks, "r2")
    assert Sender(store, collector, clock()).send_new() == Sent(1)
    assert runs_of(server) == ["r2"]


def test_a_run_that_is_begun_again_is_sent_again_as_the_same_trace(
    sender: Sender, server: CollectorServer, store: Store, tasks: Tasks, clock: Clock
) -> None:
    assert sender.send_new() == Sent(1)
    clock.advance(1)
    assert clear(store, tasks.run, "a")
    end(tasks)
    assert sender.send_new() == Sent(1)
    assert runs_of(server) == ["r1", "r1"]
    assert len({span.trace_id for span in server.spans}) == 1


def test_what_is_sent_again_by_another_process_has_the_same_ids(
    store: Store, collector: Collector, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    for _ in range(2):
        assert Sender(store, collector, clock()).send_new() == Sent(1)
    first, again = server.requests
    assert first == again


def test_a_run_that_is_refused_keeps_no_other_back(
    sender: Sender, server: CollectorServer, tasks: Tasks, clock: Clock
) -> None:
    clock.advance(1)
    end(tasks, "bad", "r3")
    server.refuses, server.says = b"bad", b"a name is bad"
    with structlog.testing.capture_logs() as records:
        assert sender.send_new() == Sent(3, refused=1)
    assert runs_of(server) == ["r1", "r3"]
    (record,) = records
    assert (record["log_level"], record["dag"], record["run"]) == ("error", "etl", "bad")
    assert record["error"] == "400 Bad Request: a name is bad"
    assert sender.send_new() == Sent(), "it is not tried again and again"


def test_spans_that_are_left_out_are_told(sender: Sender, server: CollectorServer) -> None:
    server.refuses, server.code = b"r1", 200
    server.says = ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
    ).SerializeToString()
    with structlog.testing.capture_logs() as records:
        assert sender.send_new() == Sent(1, refused=1)
    assert [record["error"] for record in records] == ["2 of these spans: too old"]


@pytest.mark.parametrize("code", [301, 401, 404, 429, 500, 503])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_collector_that_is_away_gets_all_when_it_is_back(
    impatient: None, sender: Sender, server: CollectorServer, tasks: Tasks, clock: Clock, code: int
) -> None:
    # One that is overloaded takes a request without spans all the while.
    server.refuses, server.code, server.says = b"etl", code, b"not now"
    with pytest.raises(CollectorAway, match=f"^{code} .*: not now$"):
        sender.send_new()
    clock.advance(OVERLAP_S * 5)
    end(tasks, "r2")
    server.refuses = None
    assert sender.send_new() == Sent(2)
    assert runs_of(server) == ["r1", "r2"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_collector_that_is_not_there_is_told(impatient: None, store: Store, tasks: Tasks, clock: Clock) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and it does not listen
        collector = Collector(f"http://127.0.0.1:{taken.getsockname()[1]}/v1/traces")
        with pytest.raises(CollectorAway, match="Connection refused"):
            Sender(store, collector, clock()).send_new()


def test_spans_that_are_too_much_for_one_request_are_left_out(
    store: Store, server: CollectorServer, collector: Collector, tasks: Tasks, clock: Clock
) -> None:
    collector._exporter._max_request_size = 10
    with structlog.testing.capture_logs() as records:
        assert Sender(store, collector, clock()).send_new() == Sent(1, refused=1)
    assert "exceeds max_request_size" in records[0]["error"]


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


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_it_waits_ever_longer_for_a_collector_and_tells_once(
    impatient: None, sender: Sender, server: CollectorServer, tasks: Tasks
) -> None:
    server.refuses, server.code = b"etl", 401
    waited, wait = waits(list, list, lambda: setattr(server, "refuses", None), lambda: end(tasks, "r2"))
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


def test_a_database_file_that_is_replaced_ends_it(
    tmp_path: Path, collector: Collector, server: CollectorServer
) -> None:
    path, other = tmp_path / "headgate.db", tmp_path / "other.db"
    for one in (path, other):
        one.write_bytes(migrated_sqlite())
    _, wait = waits(lambda: other.rename(path), list, list)
    with Store(open_engine(f"sqlite:///{path}"), secrets=Secrets.none()) as store, pytest.raises(DatabaseReplaced):
        Sender(store, collector, store.inspect.now()).run(wait)


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


@pytest.mark.parametrize("url", ["localhost:4318/v1/traces", "http://:4318/v1/traces"])
def test_what_is_not_a_url_of_http_is_refused(url: str) -> None:
    with pytest.raises(CollectorUnusable, match="not a URL of HTTP"):
        Collector(url)


@pytest.mark.parametrize("end", ["%0Ax", "%C5%82"])
def test_a_header_that_cannot_be_sent_is_refused_and_not_shown(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"token=hunter2{end}")
    with pytest.raises(CollectorUnusable, match="a header of OTEL_EXPORTER_OTLP_HEADERS cannot be sent") as told:
        Collector("http://localhost:4318").send([])
    assert "hunter" not in str(told.value)


def test_a_password_in_the_address_is_shown_to_nobody() -> None:
    assert shown("https://ada:secret@otel.example:4318/v1/traces") == "https://otel.example:4318/v1/traces"
    assert shown("http://localhost:4318/v1/traces") == "http://localhost:4318/v1/traces"
    assert shown("http://localhost:4318/?api-key=secret") == "http://localhost:4318/"
    with pytest.raises(CollectorAway) as away:
        Collector("http://127.0.0.1:1/?api-key=secret").send([])
    assert "refused" in str(away.value)
    assert "secret" not in str(away.value)
    assert shown("http://ada:secret@[::1/v1/traces") == "the address of the collector"
