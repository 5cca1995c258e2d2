"""Ends that are stored together, beside a slice of another supervisor: tasks are locked in the order of their ids."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.store.harness import WAITED_MAX_S, OpenStore, Query, wait_until_blocked
from tests.supervisor.tasks_harness import S, Tasks, task_states

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.steps import Emitted, StepSucceeded
from headgate.store.db.engine import open_engine
from headgate.store.tasks import task_rows
from headgate.store.tasks.outcomes import StepEnd


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_later_task_that_has_emitted_is_not_locked_first(
    open_store: OpenStore, query: Query, database_url: str
) -> None:
    one, two = open_store(), open_store()
    tasks = Tasks(one, query, tasks=(TaskSpec("a", "Op"), TaskSpec("b", "Op", emits=True)))
    tasks.plan()
    a, b = sorted(tasks.dispatch(), key=lambda task: task.id)
    ends = [
        StepEnd(a.id, a.token, StepSucceeded()),
        StepEnd(b.id, b.token, StepSucceeded(emitted=Emitted(0, (b"1",)))),
    ]
    with ThreadPoolExecutor(1) as pool:
        with two.database.leased(tasks.register()) as tx:
            task_rows.locked(tx, a.id)  # as a slice does with the tasks of streams
            stored = pool.submit(one.tasks.store_ends, tasks.epoch, ends)
            wait_until_blocked(open_engine(database_url))
            task_rows.locked(tx, b.id)
        assert stored.result(WAITED_MAX_S) == [S.SUCCESS, S.SUCCESS]
    assert set(task_states(one, tasks.run).values()) == {S.SUCCESS}
