"""Tasks that start every so often while their run is open (I29)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from tests.store.harness import Clock, Query
from tests.store.signals.rules_harness import GO, PLAIN, Jobs, ruled
from tests.supervisor.tasks_harness import S, clear

from headgate.protocol.messages.rules import ClockRule, CronRule
from headgate.store.ids import DagRunId
from headgate.store.store import Store

MINUTE = ClockRule(60.0)


@pytest.fixture
def store(old: Store) -> Store:
    return old


def due_in_s(jobs: Jobs) -> float | None:
    return jobs.store.scheduling.next_due(jobs.tasks.epoch).in_s


def test_it_starts_with_its_run_and_then_again_and_again(store: Store, query: Query, clock: Clock) -> None:
    jobs = Jobs(store, query, ruled(MINUTE), ruled(GO, name="other"))
    assert jobs.state() is S.SCHEDULED
    assert jobs.signals()[0] == [("every", clock.now)]
    begun_at = clock.now
    for number in (1, 2, 3):
        task = jobs.dispatch()
        assert task.try_number == number
        jobs.end(task)
        assert (jobs.state(), due_in_s(jobs)) == (S.SUCCESS, 60.0)
        clock.advance(59.0)
        assert store.scheduling.tick(jobs.tasks.epoch) == 0
        clock.advance(1.0)
        assert store.scheduling.tick(jobs.tasks.epoch) == 1
        jobs.settle()
        assert jobs.state() is S.SCHEDULED
        assert jobs.signals()[0] == [("every", begun_at + timedelta(minutes=number))]


def test_starts_that_were_missed_are_one_and_the_next_keeps_its_time(store: Store, query: Query, clock: Clock) -> None:
    jobs = Jobs(store, query, ruled(MINUTE), ruled(GO, name="other"))
    jobs.end(jobs.dispatch())
    clock.advance(60.0 * 5 + 20)
    assert store.scheduling.tick(jobs.tasks.epoch) == 1
    assert store.scheduling.tick(jobs.tasks.epoch) == 0
    jobs.settle()
    jobs.end(jobs.dispatch())
    assert (jobs.state(), due_in_s(jobs)) == (S.SUCCESS, 40.0)
    (ref,) = store.inspect.find_tasks("etl", "r1", "job")
    assert ("rule", "START: every 60 s; the next start is due in 40 s") in store.inspect.why_task(ref).facts


def test_a_start_while_it_runs_is_remembered_once(store: Store, query: Query, clock: Clock) -> None:
    jobs = Jobs(store, query, ruled(MINUTE), ruled(GO, name="other"))
    task = jobs.dispatch()
    for _ in range(3):
        clock.advance(60.0)
        store.scheduling.tick(jobs.tasks.epoch)
        jobs.settle()
    jobs.end(task)
    assert jobs.state() is S.SCHEDULED
    jobs.end(jobs.dispatch())
    assert jobs.state() is S.SUCCESS


def test_it_does_not_keep_its_run_open(store: Store, query: Query, clock: Clock) -> None:
    jobs = Jobs(store, query, ruled(MINUTE), PLAIN)
    tasks = {task.task_id: task for task in jobs.tasks.dispatch()}
    jobs.end(tasks["plain"])
    assert jobs.run_state() == "running", "its first start is under way"
    jobs.end(tasks["job"])
    assert jobs.run_state() == "success"
    assert due_in_s(jobs) is None
    clock.advance(600.0)
    assert store.scheduling.tick(jobs.tasks.epoch) == 0
    clear(store, jobs.tasks.run, "plain")
    jobs.settle()
    assert due_in_s(jobs) == 0.0, "it goes on with its run"


def test_a_run_that_is_to_end_starts_it_no_more(store: Store, query: Query, clock: Clock) -> None:
    jobs = Jobs(store, query, ruled(MINUTE))
    task = jobs.dispatch()
    store.signals.end_run(DagRunId(jobs.tasks.run))
    clock.advance(60.0)
    store.scheduling.tick(jobs.tasks.epoch)
    jobs.settle()
    jobs.end(task)
    assert (jobs.state(), jobs.run_state()) == (S.SUCCESS, "success")


def test_a_cron_expression_starts_it_at_its_times_alone(store: Store, query: Query, clock: Clock) -> None:
    clock.now = datetime(2026, 3, 28, 12, tzinfo=UTC)  # the next night a summer begins in Berlin
    jobs = Jobs(store, query, ruled(CronRule("30 4 * * *", "Europe/Berlin")), ruled(GO, name="other"))
    assert jobs.state() is S.NONE
    for moment in (datetime(2026, 3, 29, 2, 30, tzinfo=UTC), datetime(2026, 3, 30, 2, 30, tzinfo=UTC)):
        clock.now = moment - timedelta(seconds=1)
        assert (store.scheduling.tick(jobs.tasks.epoch), due_in_s(jobs)) == (0, 1.0)
        clock.now = moment
        assert store.scheduling.tick(jobs.tasks.epoch) == 1
        jobs.settle()
        assert jobs.signals()[0] == [("every", moment)]
        jobs.end(jobs.dispatch())
    clock.now = datetime(2026, 4, 5, 12, tzinfo=UTC)
    assert (store.scheduling.tick(jobs.tasks.epoch), store.scheduling.tick(jobs.tasks.epoch)) == (1, 0)
    jobs.settle()
    assert due_in_s(jobs) == timedelta(hours=14, minutes=30).total_seconds(), "what was missed is one"


def test_a_cron_expression_goes_on_with_a_run_that_goes_on(store: Store, query: Query, clock: Clock) -> None:
    clock.now = datetime(2026, 11, 1, 12, tzinfo=UTC)
    jobs = Jobs(store, query, ruled(CronRule("0 * * * *")), PLAIN)
    jobs.end_plain()
    assert (jobs.run_state(), due_in_s(jobs)) == ("success", None)
    clock.advance(90.0)
    clear(store, jobs.tasks.run, "plain")
    jobs.settle()
    assert due_in_s(jobs) == 3600 - 90.0
