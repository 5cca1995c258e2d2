"""Runs whose tasks have many instances: what a look reads of them, does with them, and does not read.

The instances are rows that the tests insert, as if the task had been expanded.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from tests.store import ends
from tests.store.harness import Query
from tests.store.tasks.plans import insert_rows, plan_of
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.store.db.engine import open_engine
from headgate.store.ids import DagRunId
from headgate.store.store import Store
from headgate.store.tasks import run_states

SPECS = (
    TaskSpec("source", "Op"),
    TaskSpec("each", "Op", upstream=("source",)),
    TaskSpec("other", "Op", upstream=("source",)),
    TaskSpec("total", "Op", upstream=("each",)),
)


class Mapped(Tasks):
    """A run with a task ``each``, and any number of instances of it."""

    def __init__(self, store: Store, query: Query, engine: Engine) -> None:
        super().__init__(store, query, tasks=SPECS)
        self.engine = engine
        self.query("UPDATE task_instance SET state = 'success' WHERE task_id = 'each'")  # all are made

    def add(self, rows: int, state: str, *, task_id: str = "each", first: int = 0) -> None:
        """Insert instances in one state, with the indexes from ``first``."""
        given = {"name": task_id, "state": state, "first": first}
        insert_rows(self.engine, rows, "dag_run_id, :name, :first + i - 1, :state, NULL, priority_weight", **given)

    def move(self, old: str, new: str) -> None:
        self.query("UPDATE task_instance SET state = :new WHERE state = :old AND map_index >= 0", old=old, new=new)

    def seen(self) -> dict[str, set[str]]:
        with self.store.database.reading() as tx:
            found = run_states.read(tx, self.run)
        seen = found.for_rules()
        assert found.ids.keys() == {name for name in seen if not name.startswith("map")}
        return {name: {state.value for state in some} for name, some in seen.items()}

    def counts(self) -> dict[str, int]:
        rows = self.query("SELECT state, count(*) AS n FROM task_instance WHERE map_index >= 0 GROUP BY state")
        return {row["state"]: row["n"] for row in rows}


@pytest.fixture
def mapped(store: Store, query: Query, database_url: str) -> Mapped:
    return Mapped(store, query, open_engine(database_url))


def test_the_states_of_all_tasks_are_read_and_of_instances_each_once(mapped: Mapped) -> None:
    assert mapped.seen() == {"source": {"none"}, "other": {"none"}, "total": {"none"}, "each": {"success"}}
    states = ("success", "none", "upstream_failed", "scheduled")
    for number, state in enumerate(states):
        mapped.add(30, state, first=number * 30)
    for name in ("map-a", "map-b", "map-c"):  # in the order of no index, and beside other runs
        mapped.add(3, "skipped", task_id=name)
    assert mapped.store.tasks.create_run("etl", "r2") is not None
    assert mapped.seen() == {
        **{name: {"none"} for name in ("source", "other", "total")},
        "each": set(states),
        **{name: {"skipped"} for name in ("map-a", "map-b", "map-c")},
    }
    with mapped.store.database.reading() as tx:
        assert run_states.read(tx, DagRunId(mapped.run + 1_000_000)).for_rules() == {}


def test_a_look_moves_the_instances_that_are_in_none_in_pieces(mapped: Mapped) -> None:
    mapped.add(40, "success")
    mapped.add(1200, "none", first=40)
    mapped.query("UPDATE task_instance SET state = 'success' WHERE task_id = 'source'")
    counts = []
    while (planned := mapped.store.scheduling.plan(mapped.epoch)).evaluated:
        counts.append((planned.scheduled, planned.left))
    assert counts == [(500, 1), (500, 1), (201, 0)], "and the task beside them, which is not mapped"
    assert mapped.counts() == {"success": 40, "scheduled": 1200}
    assert mapped.seen()["total"] == {"none"}


def test_what_is_downstream_begins_with_the_last_instance_and_the_run_ends_after_it(mapped: Mapped) -> None:
    mapped.add(20, "success")
    mapped.add(1, "scheduled", first=20)
    mapped.query("UPDATE task_instance SET state = 'success' WHERE task_id IN ('source', 'other')")
    assert mapped.plan().scheduled == 0
    mapped.move("scheduled", "success")
    mapped.query("UPDATE dag_run SET needs_look = true")
    assert mapped.plan().scheduled == 1
    (task,) = mapped.dispatch()
    assert task.task_id == "total"
    assert ends.succeed(mapped.store.tasks, mapped.epoch, task.id, task.token)
    assert mapped.plan().ended == {mapped.run: "success"}


def test_the_failure_of_an_instance_fails_the_run_when_the_others_have_ended(mapped: Mapped) -> None:
    mapped.add(700, "success")
    mapped.add(1, "failed", first=700)
    mapped.add(1, "scheduled", first=701)
    mapped.query("UPDATE task_instance SET state = 'success' WHERE task_id IN ('source', 'other')")
    assert mapped.plan().ended == {}
    assert mapped.seen()["total"] == {"upstream_failed"}
    mapped.move("scheduled", "success")
    mapped.query("UPDATE dag_run SET needs_look = true")
    assert mapped.plan().ended == {mapped.run: "failed"}


def test_instances_of_a_task_that_the_dag_no_longer_has_are_removed_in_pieces(mapped: Mapped) -> None:
    mapped.add(900, "none")
    mapped.add(5, "success", first=900)
    kept = tuple(task for task in SPECS if task.task_id in ("source", "other"))
    mapped.store.tasks.save_file(mapped.epoch, "etl.py", [DagSpec("etl", tasks=kept)])
    removed = []
    while (planned := mapped.store.scheduling.plan(mapped.epoch)).evaluated:
        removed.append(planned.removed)
    assert removed == [500, 401], "with total, which is not mapped"
    assert mapped.counts() == {"removed": 900, "success": 5}


def test_a_cancelled_run_leaves_no_instance_unfinished(mapped: Mapped) -> None:
    mapped.add(30, "none")
    mapped.add(30, "success", first=30)
    cancelled = mapped.store.tasks.cancel_run(mapped.run)
    assert (cancelled.tasks, cancelled.is_ended) == (33, True)
    assert mapped.counts() == {"failed": 30, "success": 30}


# --- what is not read ----------------------------------------------------------------------------


def test_no_statement_of_a_look_reads_the_instances_one_by_one(mapped: Mapped) -> None:
    mapped.add(10_000, "success")
    of_run: dict[str, Any] = {"of_run": mapped.run}
    plan = plan_of(mapped.engine, run_states._STATES, **of_run)
    assert plan.count("ix_task_instance_look") == 3, plan
    if mapped.engine.dialect.name == "sqlite":
        assert (
            "SEARCH task_instance USING INDEX sqlite_autoindex_task_instance_1 (dag_run_id=? AND map_index=?)" in plan
        )
        assert "ix_task_instance_look (dag_run_id=? AND task_id=? AND state>?)" in plan, plan
        assert "SCAN task_instance" not in plan, plan
    else:
        assert "uq_task_instance_dag_run_id_map_index_task_id" in plan, plan
    assert "Seq Scan" not in plan, plan
    instances = plan_of(mapped.engine, run_states._INSTANCES, **of_run, of_task="each", of_state="none", limit=9)
    assert "ix_task_instance_look" in instances, instances
    assert "sort" not in instances.lower(), instances
    assert "b-tree" not in instances.lower(), instances
