"""What `status` finds in the database, on both databases; the test moves the clock."""

from __future__ import annotations

import pytest
from sqlalchemy import update
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query, add, register
from tests.supervisor.tasks_harness import WAIT, Tasks

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger, FiredEvent, RefusedEvent
from headgate.scheduling.status_facts import Problem
from headgate.store.inspect import status_facts
from headgate.store.store import Store
from headgate.store.tables import consumer


class Watched:
    """A store, its clock, and what its status is."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store, self.clock = store, clock
        self.runs = 0

    def status(self) -> list[Problem]:
        return self.store.inspect.status()

    def reasons(self) -> list[str]:
        return [problem.reason for problem in self.status()]

    def fail(self, epoch: int, trigger_id: int, *, run_id: str | None = None) -> None:
        self.runs += 1
        run = FinishedTrigger(trigger_id, f"run {self.runs}" if run_id is None else run_id, "failed", 0, "boom")
        self.store.store_slice(epoch, finished=[run])  # type: ignore[arg-type]


@pytest.fixture
def at(open_store: OpenStore) -> Watched:
    clock = Clock()
    return Watched(open_store(clock=clock), clock)


def test_an_empty_database_with_a_supervisor_is_well(at: Watched) -> None:
    assert at.reasons() == ["no_supervisor"]
    register(at.store)
    assert at.status() == []


def test_triggers_without_a_supervisor_stand_still(at: Watched) -> None:
    add(at.store, "w")
    (problem,) = at.status()
    assert (problem.severity, problem.reason) == ("broken", "no_supervisor")
    epoch = register(at.store, queues=("other",))
    (problem,) = at.status()
    assert (problem.severity, problem.reason) == ("broken", "queue_unserved")
    at.clock.advance(40)
    assert at.reasons() == ["no_supervisor", "supervisor_silent"]
    at.store.heartbeat(epoch)
    at.store.remove_watcher("w")
    assert at.status() == []


def test_what_nobody_claims_is_told_with_its_stream_after_a_minute(at: Watched) -> None:
    dead = register(at.store)
    ids = add(at.store, "one", "two")
    at.store.claim_triggers(dead, limit=9, queues=QUEUES)
    at.store.store_slice(dead, described=[DescribedTrigger(id_, f"d{id_}", "d", "the log") for id_ in ids])
    at.clock.advance(status_facts.UNCLAIMED_S - 20)
    epoch = register(at.store, capacity=9)
    assert at.store.fence_triggerers(epoch, dead=[dead]) == [dead]
    assert at.status() == []
    at.clock.advance(21)
    (problem,) = at.status()
    assert problem.text == (
        "no supervisor has claimed 2 triggers of the queue 'default', and nobody owns 1 stream: the log; "
        "the oldest, one, was added 1 min 1 s ago"
    )
    assert problem.details == ("one of the log", "two of the log")
    at.store.claim_triggers(epoch, limit=9, queues=QUEUES)
    assert at.status() == []


def test_a_watcher_that_returned_out_of_its_stream_is_told_until_it_is_restarted(at: Watched) -> None:
    epoch = register(at.store)
    one, two = add(at.store, "one", "two")
    at.store.claim_triggers(epoch, limit=9, queues=QUEUES)
    at.store.store_slice(epoch, described=[DescribedTrigger(one, "d1", "d", "the log")])
    at.store.store_slice(epoch, finished=[FinishedTrigger(id_, f"r{id_}", "returned", 0) for id_ in (one, two)])
    at.clock.advance(2)
    (problem,) = at.status()
    assert (problem.reason, problem.details) == (
        "watcher_returned",
        ("the watcher one left the stream the log 2.0 s ago, because its trigger returned",),
    )
    at.store.restart_watcher("one")
    assert at.status() == []


def test_a_stream_that_waits_is_told_until_its_subscriber_is_back(at: Watched) -> None:
    epoch = register(at.store)
    raw, big = add(at.store, "raw", "big")
    at.store.claim_triggers(epoch, limit=9, queues=QUEUES)
    at.store.store_slice(epoch, described=[DescribedTrigger(id_, f"d{id_}", "d", "the log") for id_ in (raw, big)])
    for _ in range(3):
        at.fail(epoch, big)
    at.clock.advance(2)
    (problem,) = at.status()
    assert (problem.severity, problem.text) == (
        "broken",
        "the stream the log stands still until big is back; big: it has failed 3 times, the last time 2.0 s ago: boom",
    )
    at.store.store_slice(epoch, events=[FiredEvent(big, "run x", 0, 1, b"\x01")])
    assert at.status() == []
    at.store.hold_trigger(epoch, big, "quarantine", "it blocks")
    assert at.reasons() == ["stream_waits", "quarantine"]
    at.store.pause_watcher("big")
    (problem,) = at.status()
    assert (problem.severity, problem.reason) == ("notice", "paused")


def test_triggers_that_fail_and_those_that_cannot_be_read_are_told_apart(at: Watched) -> None:
    epoch = register(at.store)
    one, two = add(at.store, "one", "two")
    at.store.claim_triggers(epoch, limit=9, queues=QUEUES)
    at.fail(epoch, one)
    at.fail(epoch, two, run_id="")
    told = {problem.reason: problem.next for problem in at.status()}
    assert told == {"unreadable": "headgate why two", "failing": "headgate why one"}


def test_a_consumer_whose_events_nobody_takes_for_a_day_is_told(at: Watched) -> None:
    epoch = register(at.store)
    (one,) = add(at.store, "one")
    at.store.claim_triggers(epoch, limit=9, queues=QUEUES)
    for name in ("billing", "shipping", "idle"):
        at.store.consumers.add(name, "one")
    at.store.store_slice(epoch, events=[FiredEvent(one, "run", 0, 1, b"\x01")])
    at.store.remove_watcher("one")
    add(at.store, "one")  # what is stored is of the trigger before
    newest = at.store.consumers.consumer("billing")
    assert newest.oldest_at == at.clock.now
    with at.store.database.writing() as tx:
        moved = update(consumer).where(consumer.c.name == "idle")
        tx.connection.execute(moved.values(trigger_id=one, event_id=10_000))
    at.clock.advance(status_facts.NOT_TAKEN_S)
    at.store.heartbeat(epoch)
    assert "not_taken" not in at.reasons()
    at.clock.advance(3600)
    at.store.heartbeat(epoch)
    (problem,) = [problem for problem in at.status() if problem.reason == "not_taken"]
    assert (problem.severity, problem.text) == (
        "notice",
        "nobody takes the events of 2 consumers, for which they are kept: billing, for 1 d 1 h, shipping, for 1 d 1 h",
    )
    ages = at.store.consumers.oldest(limit=9)
    assert ages == {"billing": 90_000.0, "shipping": 90_000.0, "idle": 0.0}
    assert list(at.store.consumers.oldest(limit=1)) == ["billing"]


def test_dead_letters_are_counted_by_watcher(at: Watched) -> None:
    epoch = register(at.store)
    (one,) = add(at.store, "one")
    at.store.claim_triggers(epoch, limit=9, queues=QUEUES)
    letters = [RefusedEvent(id_, "run", number, 0, "no", 1, b"x") for number, id_ in enumerate((one, one, 4711))]
    at.store.store_slice(epoch, refused=letters)
    at.clock.advance(3)
    (problem,) = at.status()
    assert problem.text == "3 open dead letters, the newest stored 3.0 s ago: one (2), trigger-4711 (1)"
    for letter in at.store.inspect.dead_letters():
        at.store.letters.discard(letter.id, by="ann")
    assert at.status() == []


# --- tasks ---------------------------------------------------------------------------------------


@pytest.fixture
def etl(at: Watched, query: Query) -> Tasks:
    return Tasks(at.store, query, tasks=(TaskSpec("a", "Op", retries=1, execution_timeout_s=600.0),))


def alive_after(at: Watched, etl: Tasks, seconds: float) -> list[str]:
    at.clock.advance(seconds)
    at.store.heartbeat(etl.epoch)
    return at.reasons()


def test_tasks_that_nobody_runs_are_told(at: Watched, etl: Tasks) -> None:
    etl.plan()
    assert at.status() == []
    assert alive_after(at, etl, status_facts.SCHEDULED_LATE_S + 1) == ["tasks_scheduled"]
    register(at.store, workers=0)
    at.store.release_triggerer(etl.epoch)
    assert set(at.reasons()) == {"tasks_unserved", "no_workers", "tasks_scheduled"}
    at.store.tasks.set_paused("etl", is_paused=True)
    assert "tasks_scheduled" not in at.reasons()
    assert "no_workers" not in at.reasons()


def test_a_pool_that_there_is_not_is_told_at_once(at: Watched, query: Query) -> None:
    tasks = Tasks(at.store, query, tasks=(TaskSpec("a", "Op", pool="the gpus"), TaskSpec("b", "Op", pool="the gpus")))
    assert tasks.plan().scheduled == 2
    (problem,) = at.status()
    assert (problem.severity, problem.reason, problem.text, problem.next) == (
        "broken",
        "no_such_pool",
        "there is no pool named 'the gpus', for which 2 tasks wait: etl r1 a",
        "headgate pools set 'the gpus' SLOTS",
    )
    assert alive_after(at, tasks, status_facts.SCHEDULED_LATE_S + 1) == ["no_such_pool"], "once"
    at.store.tasks.set_paused("etl", is_paused=True)
    assert at.status() == []
    at.store.tasks.set_paused("etl", is_paused=False)
    at.store.tasks.set_pool("the gpus", 1)
    assert at.reasons() == ["tasks_scheduled"]


def test_a_task_that_runs_on_after_its_end_and_one_of_a_supervisor_that_is_gone_are_told(
    at: Watched, etl: Tasks
) -> None:
    etl.run_it()
    assert alive_after(at, etl, 601) == []
    assert alive_after(at, etl, status_facts.LATE_S) == ["tasks_deadline_over"]
    other = etl.register()
    at.store.fence_triggerers(other, dead=[etl.epoch])
    etl.epoch = other
    assert alive_after(at, etl, status_facts.LATE_S + 1) == ["tasks_owner_gone"]


def test_a_wait_that_has_timed_out_and_a_retry_that_does_not_begin_are_told(at: Watched, etl: Tasks) -> None:
    token = etl.run_it()
    ends.fail(at.store.tasks, etl.epoch, etl.a, token, "no")
    (retry,) = etl.query("SELECT retry_at FROM task_instance")
    assert retry["retry_at"] is not None
    assert at.status() == []
    assert alive_after(at, etl, 3600) == ["tasks_retry_due"]


def test_a_wait_that_has_timed_out_is_told(at: Watched, etl: Tasks) -> None:
    token = etl.run_it()
    ends.defer(at.store.tasks, etl.epoch, etl.a, token, WAIT)
    etl.query("UPDATE task_instance SET trigger_timeout = '2025-12-31 23:00:00.000000'")
    at.store.claim_triggers(etl.epoch, limit=9, queues=QUEUES)
    (problem,) = at.status()
    assert problem.text.endswith("have timed out; the longest for 1 h: etl r1 a")


def test_runs_whose_dag_is_in_no_file_any_more_are_told(at: Watched, etl: Tasks) -> None:
    at.store.tasks.save_file(etl.epoch, "etl.py", [])
    assert alive_after(at, etl, status_facts.GONE_S - 1) == []
    assert alive_after(at, etl, 2) == ["dag_gone"]
    (problem,) = at.status()
    assert problem.text == "1 run of the DAG 'etl', which etl.py has not had for 2 min 1 s, cannot go on"
    assert problem.next == "headgate runs list etl"
    at.store.tasks.cancel_run(etl.run)
    assert "dag_gone" not in at.reasons()


def test_broken_files_failed_runs_and_rotations_that_have_not_ended_are_told(
    at: Watched, etl: Tasks, query: Query
) -> None:
    at.store.tasks.save_import_error(etl.epoch, "new.py", "Traceback (most recent call last):\n  x\nNameError: y")
    at.store.tasks.cancel_run(etl.run)
    query("INSERT INTO encryption_key VALUES ('old', '2026-01-01 00:00:00', '2026-01-01 00:00:00', NULL)")
    files, runs, keys = at.status()
    assert files.text == "1 DAG file cannot be parsed: new.py: NameError: y"
    assert (runs.reason, runs.details) == ("failed_runs", ("etl r1",))
    assert keys.reason == "keys"
    assert alive_after(at, etl, status_facts.FAILED_RUNS_S + 1) == ["import_errors", "keys"]
