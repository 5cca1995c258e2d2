"""The tries of tasks that wait for claimed triggers."""

from __future__ import annotations

import sys
from collections.abc import Collection

from sqlalchemy import bindparam, select

from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import TryName
from headgate.store.tables import dag, dag_run, task_instance

# Asked apart, and only where a trigger is no watcher's: most claims are of watchers, and have no more columns for it.
_TASKS = Prepared(
    select(
        task_instance.c.trigger_id,
        dag.c.name,
        dag_run.c.run_id,
        task_instance.c.task_id,
        task_instance.c.try_number,
    )
    .select_from(
        task_instance.join(dag_run, dag_run.c.id == task_instance.c.dag_run_id).join(dag, dag.c.id == dag_run.c.dag_id)
    )
    .where(
        task_instance.c.trigger_id.is_not(None),
        task_instance.c.trigger_id.between(bindparam("first"), bindparam("last")),
    )
)


def of(tx: Tx, trigger_ids: Collection[int]) -> dict[int, TryName]:
    """Return the tries that wait for these triggers, by the trigger's id."""
    ids = frozenset(trigger_ids)
    if not ids:
        return {}
    found = _TASKS.run(tx.connection, first=min(ids), last=max(ids)).fetchall()
    return {
        id_: TryName(sys.intern(dag_id), sys.intern(run_id), sys.intern(task_id), try_number)
        for id_, dag_id, run_id, task_id, try_number in found
        if id_ in ids
    }
