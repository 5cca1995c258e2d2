"""How the databases find tasks among many, read from their plans."""

from __future__ import annotations

from tests.store.harness import Query
from tests.store.tasks.plans import insert_rows, plan_of
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.messages.dags import DEFAULT_POOL, TaskSpec
from headgate.store.db.engine import open_engine
from headgate.store.db.times import bound
from headgate.store.store import Store
from headgate.store.tasks import dispatch


def test_a_dispatch_reads_the_most_urgent_tasks_first_and_sorts_none(
    store: Store, query: Query, database_url: str
) -> None:
    tasks = Tasks(store, query, tasks=(TaskSpec("a", "Op"),))
    engine = open_engine(database_url)
    resumed = "CASE WHEN i % 100 = 0 THEN 'resume' END"
    insert_rows(engine, 10_000, f"dag_run_id, 'many' || i, -1, 'scheduled', {resumed}, i % 7")
    with store.database.reading() as tx:
        now = bound(tx.connection, tx.now)
    asked = {"of_pool": DEFAULT_POOL, "of_queue": "default", "slots": 128, "limit": 4, "now": now}
    plan = plan_of(engine, dispatch._CANDIDATES, **asked)
    assert "ix_task_instance_scheduled" in plan, plan
    assert "sort" not in plan.lower(), plan
    assert "b-tree" not in plan.lower(), plan  # with which SQLite sorts
    given = tasks.dispatch(limit=4)
    assert [task.next_method for task in given] == ["resume"] * 4
    assert [task.task_id for task in given] == ["many300", "many1000", "many1700", "many2400"], "the highest weight"
