"""When a database that failed is tried again, and what the log says of the outage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headgate.store.errors import DatabaseAway, DatabaseFault
from headgate.supervisor.backoff import KINDS_LOGGED_MAX, DatabaseOutage, DatabaseRetry, RateBackoff

AWAY = DatabaseAway("postgresql://db", "connection refused")


@pytest.fixture
def outage() -> DatabaseOutage:
    return DatabaseOutage()


def retry_of(duty: str, outage: DatabaseOutage | None = None) -> DatabaseRetry:
    return DatabaseRetry(duty, 1.0, 8.0, outage)


def without_waits(records: list[Any]) -> list[dict[str, object]]:
    return [{name: value for name, value in record.items() if name != "retry_in_s"} for record in records]


def test_a_duty_is_ready_until_it_fails_and_again_after_its_wait() -> None:
    retry = retry_of("events")
    assert retry.ready(0.0)
    retry_at = retry.failed(AWAY, 10.0)
    assert 11.0 <= retry_at <= 11.5
    assert not retry.ready(10.99)
    assert retry.ready(retry_at)


def test_waits_double_until_the_duty_succeeds() -> None:
    retry = retry_of("events")
    assert 1.0 <= retry.failed(AWAY, 0.0) <= 1.5
    assert 2.0 <= retry.failed(AWAY, 0.0) <= 2.5
    retry.succeeded(5.0)
    assert 1.0 <= retry.failed(AWAY, 0.0) <= 1.5


def test_an_outage_is_logged_once_for_all_duties_and_once_when_all_are_back(outage: DatabaseOutage) -> None:
    events, leases = retry_of("events", outage), retry_of("leases", outage)
    with capture_logs() as logs:
        events.failed(AWAY, 10.0)
        leases.failed(AWAY, 10.5)
        events.failed(AWAY, 11.5)
        events.succeeded(14.0)
        events.succeeded(14.5)
        leases.succeeded(15.0)
    assert without_waits(logs) == [
        {"event": "the database cannot be used", "log_level": "warning", "duty": "events", "error": str(AWAY)},
        {"event": "the database is back", "log_level": "info", "away_s": 5.0},
    ]


def test_a_duty_that_fails_again_and_again_is_told_until_it_succeeds(outage: DatabaseOutage) -> None:
    tasks, leases = retry_of("tasks", outage), retry_of("leases", outage)
    for number in range(3):
        assert outage.trouble() == ""
        tasks.failed(DatabaseFault("db", "no key" * number), float(number))
        leases.failed(AWAY, float(number))
        leases.succeeded(float(number))
    assert outage.trouble() == "tasks: the database db cannot be used: no keyno key"
    tasks.succeeded(4.0)
    assert outage.trouble() == ""


def test_another_class_of_error_during_an_outage_is_logged_too(outage: DatabaseOutage) -> None:
    events = retry_of("events", outage)
    read_only = DatabaseFault("postgresql://db", "cannot execute INSERT in a read-only transaction")
    with capture_logs() as logs:
        events.failed(AWAY, 0.0)
        events.failed(read_only, 1.0)
        events.failed(AWAY, 2.0)
    assert [record["error"] for record in logs] == [str(AWAY), str(read_only)]


def test_another_kind_of_error_of_the_same_class_is_logged_too_and_is_the_reason(outage: DatabaseOutage) -> None:
    events = retry_of("events", outage)
    reasons = ["refused (port 5432)", "cannot execute INSERT", "refused (port 5433)", 'FATAL: no slot for "a"']
    with capture_logs() as logs:
        assert outage.reason() == ""
        for now, reason in enumerate(reasons):
            events.failed(DatabaseAway("postgresql://db", reason), float(now))
            assert outage.reason() == reason
        events.succeeded(10.0)
        assert outage.reason() == ""
    told = [record["error"] for record in logs if record["log_level"] == "warning"]
    assert told == [str(DatabaseAway("postgresql://db", reasons[index])) for index in (0, 1, 3)]


def test_an_outage_with_ever_new_errors_does_not_fill_the_log(outage: DatabaseOutage) -> None:
    events = retry_of("events", outage)
    with capture_logs() as logs:
        for number in range(100):
            events.failed(DatabaseFault("db", "x" * number), float(number))
    assert len(logs) == KINDS_LOGGED_MAX


def test_the_next_outage_is_logged_like_the_first(outage: DatabaseOutage) -> None:
    events = retry_of("events", outage)
    with capture_logs() as logs:
        for now in (0.0, 100.0):
            events.failed(AWAY, now)
            events.succeeded(now + 2.0)
    assert [(record["event"], record.get("away_s")) for record in logs] == [
        ("the database cannot be used", None),
        ("the database is back", 2.0),
    ] * 2


def test_a_retry_without_an_outage_logs_nothing() -> None:
    questions = retry_of("questions")
    with capture_logs() as logs:
        questions.failed(AWAY, 0.0)
        questions.succeeded(1.0)
    assert logs == []


@given(st.lists(st.floats(min_value=60.001, max_value=7200.0), max_size=50))
def test_failures_that_are_a_window_apart_always_wait_the_first_wait(gaps: list[float]) -> None:
    backoff, now = RateBackoff(0.1, 30.0, 60.0), 0.0
    for gap in gaps:
        assert backoff.fail(now) <= 0.15
        now += gap


@given(st.lists(st.floats(min_value=0.0, max_value=5.0), min_size=1, max_size=200))
def test_a_process_that_keeps_dying_is_started_a_bounded_number_of_times_a_minute(lives: list[float]) -> None:
    backoff, now, deaths = RateBackoff(0.1, 30.0, 60.0), 0.0, []
    for life in lives:
        now += life
        deaths.append(now)
        wait_s = backoff.fail(now)
        assert 0.1 <= wait_s <= 30.0 + 0.05
        now += wait_s
    for at in deaths:
        # The n-th wait of a window is 0.1 * 2**(n-1): ten of them take longer than the window.
        assert sum(at <= death < at + 60.0 for death in deaths) <= 11
