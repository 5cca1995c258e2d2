"""A run with more rows than one transaction may delete goes in pieces, and nobody finds what is left of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import select
from tests.store.harness import Clock, OpenStore, Query, wait_until_blocked
from tests.store.test_cleaning import DAY_S, claim_watcher, clean, fired
from tests.supervisor.tasks_harness import Tasks
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.steps import Emitted
from headgate.store import cleaning
from headgate.store.db.engine import open_engine
from headgate.store.errors import NoSuchRow
from headgate.store.removal import runs
from headgate.store.store import Store
from headgate.store.tables import asset, dag_run_event, trigger_event, xcom


def large_run(store: Store, clock: Clock, query: Query, *, tasks: int) -> Tasks:
    """Make a run with so many tasks, which ended long ago, and another one with the same tasks, which is young."""
    made = Tasks(store, query, tasks=tuple(TaskSpec(f"t{n}", "Op") for n in range(tasks)))
    store.tasks.cancel_run(made.run)
    clock.pass_days(40)
    store.heartbeat(made.epoch)
    store.tasks.create_run("etl", "r2")
    return made


def test_a_run_with_more_tasks_than_a_transaction_deletes_goes_in_pieces(
    old: Store, clock: Clock, query: Query
) -> None:
    large_run(old, clock, query, tasks=2300)

    tried = clean(old, 30, kinds=("runs",), is_tried_only=True)
    done = [cleaned for _, cleaned in old.cleaning.clean(30 * DAY_S, kinds=["runs"])]

    assert [cleaned.rows.get("task_instance", 0) for cleaned in done] == [1000, 1000, 300, 0]
    assert [cleaned.runs for cleaned in done] == [(), (), (("etl", "r1"),), ()]
    assert tried == {"task_instance": 2300, "dag_run": 1}
    assert [row["run_id"] for row in query("SELECT run_id FROM dag_run")] == ["r2"]


def test_what_is_left_of_a_run_is_found_by_nobody_and_deleted_by_the_next_clean(
    old: Store, clock: Clock, query: Query
) -> None:
    large_run(old, clock, query, tasks=2300)

    next(piece for _, piece in old.cleaning.clean(30 * DAY_S, kinds=["runs"]) if piece.rows)  # and its process dies

    assert [line.run_id for line in old.inspect.runs(dag="etl")] == ["r2"]
    assert {line.run_id for line in old.inspect.tasks(dag="etl")} == {"r2"}
    with pytest.raises(NoSuchRow):
        old.inspect.run("etl", "r1")
    standing = old.tasks.run_standing("etl", run_id="r1")
    assert standing is not None
    assert standing.run_id is None
    assert clean(old, 3000, kinds=("runs",)) == {"task_instance": 1300, "dag_run": 1}, "however young it would be"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_clear_that_has_found_a_run_before_a_part_of_it_was_deleted_is_refused(
    old: Store, clock: Clock, open_store: OpenStore, query: Query, database_url: str
) -> None:
    """It has locked the last task, waits for the run, and would open it again without the tasks that are gone."""
    tasks = large_run(old, clock, query, tasks=1200)
    other = open_store(clock=clock)
    with ThreadPoolExecutor(1) as pool:
        with old.database.writing() as tx:
            piece = cleaning.clean_batch(tx, "runs", clock.now - timedelta(days=30), after_id=0, rows_max=100)
            assert piece.rows == {"task_instance": 1000}
            clearing = pool.submit(other.tasks.clear_many, tasks.run, ["t1199"])
            wait_until_blocked(open_engine(database_url))
        with pytest.raises(NoSuchRow):
            clearing.result(WITHIN_S)

    assert clean(old, 30, kinds=("runs",)) == {"task_instance": 200, "dag_run": 1}


def test_the_elements_of_one_task_go_in_pieces_too(old: Store, clock: Clock, query: Query) -> None:
    tasks = Tasks(old, query, emits=True)
    token = tasks.run_it()
    for first in range(0, 2500, 500):
        emitted = Emitted(first, tuple(b"%d" % number for number in range(first, first + 500)))
        assert old.tasks.emit(tasks.epoch, tasks.a, token, emitted) is not None
    old.tasks.cancel_run(tasks.run)
    clock.pass_days(40)
    old.heartbeat(tasks.epoch)

    tried = clean(old, 30, kinds=("runs",), is_tried_only=True)
    done = [cleaned.rows for _, cleaned in old.cleaning.clean(30 * DAY_S, kinds=["runs"])]

    rest = {"element": 500, "emitter": 1, "task_instance": 1, "dag_run": 1}
    assert done == [{"element": 1000}, {"element": 1000}, rest, {}]
    assert tried == rest | {"element": 2500}


def test_what_belongs_to_runs_and_tasks_counts_as_well(
    old: Store, clock: Clock, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "DEPENDENT_ROWS_MAX", 9)
    tasks = large_run(old, clock, query, tasks=4)
    r2 = query("SELECT id FROM dag_run WHERE run_id = 'r2'")[0]["id"]
    old.tasks.cancel_run(r2)
    clock.pass_days(40)
    old.heartbeat(tasks.epoch)
    ids = [row["id"] for row in query("SELECT id FROM task_instance ORDER BY id")]
    each = [(id_, f"k{key}") for place, id_ in enumerate(ids) for key in range(4 if place < 4 else 2)]
    values = [{"task_instance_id": id_, "key": key, "value": b"1", "stored_at": clock.now} for id_, key in each]
    with old.database.writing() as tx:
        tx.connection.execute(xcom.insert(), values)

    tried = clean(old, 30, kinds=("runs",), is_tried_only=True)
    done = [cleaned.rows for _, cleaned in old.cleaning.clean(30 * DAY_S, kinds=["runs"])]

    two = {"xcom": 8, "task_instance": 2}
    assert done == [two, two | {"dag_run": 1}, {"xcom": 8, "task_instance": 4, "dag_run": 1}, {}]
    assert tried == {"xcom": 24, "task_instance": 8, "dag_run": 2}


def test_a_run_of_more_events_than_go_at_once_goes_in_pieces_too(
    old: Store, clock: Clock, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "CLEAN_ROWS_MAX", 10)
    monkeypatch.setattr(runs, "DEPENDENT_ROWS_MAX", 20)
    made = large_run(old, clock, query, tasks=3)
    trigger = claim_watcher(old, made.epoch, asset="orders")
    old.store_slice(made.epoch, events=[fired(trigger, index) for index in range(35)])
    with old.database.writing() as tx:
        (asset_id,) = tx.connection.execute(select(asset.c.id)).scalars()
        events = tx.connection.execute(select(trigger_event.c.id)).scalars()
        rows = [{"dag_run_id": made.run, "trigger_event_id": event, "asset_id": asset_id} for event in events]
        tx.connection.execute(dag_run_event.insert(), rows)

    done = [cleaned for _, cleaned in old.cleaning.clean(30 * DAY_S, kinds=["runs"])]

    assert [cleaned.rows.get("dag_run_event", 0) for cleaned in done][:4] == [0, 10, 10, 15]
    assert [row["run_id"] for row in query("SELECT run_id FROM dag_run")] == ["r2"]
