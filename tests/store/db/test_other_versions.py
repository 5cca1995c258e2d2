"""DAGs stored by a newer version: this one cannot read them, says so, and goes on with all others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.supervisor.tasks_harness import Tasks, event_of

from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, DagSpec, TaskSpec, encode_dag
from headgate.protocol.messages.queries import ElementRoom
from headgate.protocol.messages.steps import Emitted
from headgate.store.errors import SpecUnreadable
from headgate.store.scheduling.element_verbs import AHEAD_MAX
from headgate.store.store import Store

DAY_S = 86_400.0
# A schedule of a kind that is not known yet.
OF_A_NEWER_VERSION = encode_dag(DagSpec("etl", CronSchedule("0 0 * * *"))).replace(b"cron", b"moon")


class Newer(Tasks):
    """A run whose DAG a newer version stores again."""

    def store_by_newer_version(self, dag: str = "etl") -> None:
        self.query(
            "UPDATE dag SET spec = :spec, spec_hash = 'newer' WHERE name = :dag", spec=OF_A_NEWER_VERSION, dag=dag
        )

    def save(self, schedule: Any = None, tasks: tuple[TaskSpec, ...] = (TaskSpec("a", "Op"),)) -> None:
        self.store.tasks.save_file(self.epoch, "etl.py", [DagSpec("etl", schedule, tasks=tasks)])


@pytest.fixture
def run(store: Store, query: Query) -> Newer:
    return Newer(store, query)


def test_it_is_of_the_form_that_cannot_be_read() -> None:
    assert msgspec.msgpack.decode(OF_A_NEWER_VERSION)[1][0] == "moon"


def test_a_look_says_so_and_goes_on_with_other_dags(run: Newer) -> None:
    run.store.tasks.save_file(run.epoch, "other.py", [DagSpec("other", tasks=(TaskSpec("a", "Op"),))])
    other = run.store.tasks.create_run("other", "r1")
    assert other is not None
    run.store_by_newer_version()
    planned = run.store.scheduling.plan(run.epoch)
    assert (planned.evaluated, planned.scheduled, planned.left) == (2, 1, 0)
    assert list(planned.unreadable) == ["etl"]
    assert "moon" in planned.unreadable["etl"]
    assert run.store.scheduling.plan(run.epoch).evaluated == 0  # not again and again
    assert [task.dag for task in run.dispatch()] == ["other"]


def test_its_runs_go_on_when_its_file_has_been_parsed(run: Newer) -> None:
    run.store_by_newer_version()
    run.store.scheduling.plan(run.epoch)
    run.save()
    assert run.store.scheduling.plan(run.epoch).scheduled == 1


def test_whoever_can_read_it_goes_on_with_its_runs_meanwhile(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    run = Newer(open_store(clock=clock), query)
    run.save(CronSchedule("0 0 * * *"))
    (before,) = query("SELECT spec, spec_hash, next_run_at FROM dag")
    clock.advance(DAY_S)
    run.store_by_newer_version()
    for _ in range(3):
        run.store.scheduling.plan(run.epoch)
        run.store.scheduling.create_due_runs(run.epoch)
    (row,) = query("SELECT next_run_at FROM dag")
    assert row["next_run_at"] == before["next_run_at"]
    (row,) = query("SELECT needs_look, started_at FROM dag_run")
    assert (bool(row["needs_look"]), row["started_at"]) == (True, None)
    # The newer supervisor, which reads what it has stored: here this very version, with the spec that it knows.
    statement = "UPDATE dag SET spec = :spec, spec_hash = :hash"
    query(statement, spec=before["spec"], hash=before["spec_hash"])
    newer = open_store(clock=clock)
    assert newer.scheduling.plan(run.epoch).scheduled == 1
    assert len(newer.scheduling.create_due_runs(run.epoch).made) == 1


def test_many_of_them_starve_nobody(run: Newer) -> None:
    for number in range(3):
        run.store.tasks.create_run("etl", f"more{number}")
    run.store_by_newer_version()
    run.store.tasks.save_file(run.epoch, "other.py", [DagSpec("other", tasks=(TaskSpec("a", "Op"),))])
    run.store.tasks.create_run("other", "r1")
    first, second = (run.store.scheduling.plan(run.epoch, limit=1) for _ in range(2))
    assert (first.scheduled, first.has_more) == (0, True)
    assert second.scheduled == 1


def test_a_retry_of_one_of_its_tasks_waits_for_whoever_can_read_it(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    run = Newer(open_store(clock=clock), query, retries=1, retry_delay_s=1.0)
    token = run.run_it()
    ends.fail(run.store.tasks, run.epoch, run.a, token, "error")
    run.store_by_newer_version()
    clock.advance(2)
    assert run.store.tasks.retry_due(run.epoch) == []
    due_in_s = run.store.scheduling.next_due(run.epoch).in_s
    assert due_in_s is None or due_in_s <= 0  # the first time nobody knows yet
    assert run.store.tasks.retry_due(run.epoch) == []
    assert run.store.scheduling.next_due(run.epoch).in_s is None
    run.save(tasks=(TaskSpec("a", "Op", retries=1, retry_delay_s=1.0),))
    assert run.store.tasks.retry_due(run.epoch) == [run.a]
    assert run.dispatch()[0].try_number == 2


def test_it_has_no_run_by_the_clock_until_it_has_been_parsed(open_store: OpenStore, query: Query) -> None:
    clock = Clock()
    run = Newer(open_store(clock=clock), query)
    run.save(CronSchedule("0 0 * * *"))
    run.store_by_newer_version()
    clock.advance(DAY_S)
    new = run.store.scheduling.create_due_runs(run.epoch)
    assert not new.made
    assert "moon" in new.unreadable["etl"]
    assert new.more
    again = run.store.scheduling.create_due_runs(run.epoch)  # not again and again
    assert (again.unreadable, again.more) == ({}, False)
    assert run.store.scheduling.next_due(run.epoch).in_s is None, "its date hides no later one"
    run.save(CronSchedule("0 0 * * *"))
    clock.advance(DAY_S)
    assert len(run.store.scheduling.create_due_runs(run.epoch).made) == 1


def test_any_number_of_them_costs_one_look_each(run: Newer, query: Query) -> None:
    for number in range(150):
        run.store.tasks.save_file(run.epoch, f"{number}.py", [DagSpec(f"d{number}", tasks=(TaskSpec("a", "Op"),))])
        run.store.tasks.create_run(f"d{number}", "r1")
    query("UPDATE dag SET spec = :spec, spec_hash = 'newer'", spec=OF_A_NEWER_VERSION)
    told: list[str] = []
    looks = 0
    while (planned := run.store.scheduling.plan(run.epoch)).has_more:
        told += planned.unreadable
        looks += 1
        assert looks < 20
    assert len(told) == len(set(told)) == 151
    assert run.store.scheduling.plan(run.epoch).evaluated == 0


def test_the_events_of_its_assets_wait(run: Newer) -> None:
    run.save(AssetSchedule(("x",), "each"))
    trigger_id = run.store.add_watcher("w", "a.B", {}, asset="x")
    run.store.claim_triggers(run.epoch, limit=1, queues=QUEUES)
    run.store.store_slice(run.epoch, events=[event_of(trigger_id)])
    run.store_by_newer_version()
    assert not run.store.scheduling.create_event_runs(run.epoch).made
    run.save(AssetSchedule(("x",), "each"))
    assert len(run.store.scheduling.create_event_runs(run.epoch).made) == 1


def test_whoever_asks_for_it_is_told(run: Newer) -> None:
    run.store_by_newer_version()
    (line,) = run.store.inspect.dags(is_paused=None, limit=10)
    assert line.schedule == "?"
    assert line.import_error is not None
    assert "moon" in line.import_error
    for ask in (
        lambda: run.store.inspect.dag("etl"),
        lambda: run.store.tasks.create_run("etl", "r2"),
        lambda: run.store.tasks.clear_many(run.run, ["a"]),
    ):
        with pytest.raises(SpecUnreadable, match="the DAG 'etl' as it is stored cannot be read by this version"):
            ask()


def test_its_tasks_are_shown_as_far_as_they_can_be(run: Newer) -> None:
    run.store_by_newer_version()
    run.store.scheduling.plan(run.epoch)
    task = run.store.inspect.find_task("etl", "r1", "a")
    detail = run.store.inspect.task(task)
    assert (detail.line.state, detail.operator, detail.upstream) == ("none", None, None)
    answer = run.store.inspect.why_task(task)
    assert answer.reason == "dag_unreadable"
    assert "cannot be read by this version" in answer.headline


def test_a_task_that_emits_goes_on_and_waits_for_nobody(store: Store, query: Query) -> None:
    run = Newer(store, query, emits=True)
    token = run.run_it()
    run.store_by_newer_version()
    assert store.tasks.emit(run.epoch, run.a, token, Emitted(0, (b"1",))) == ElementRoom(AHEAD_MAX)
