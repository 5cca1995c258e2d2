"""The tries of tasks that wait for claimed triggers, or have them as their streams."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import bindparam, literal_column, select, union_all

from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import TryName
from headgate.store.tables import dag, dag_run, task_instance, task_stream

GAP_MAX = 100  # ids of triggers between two that are asked for together


class WaitingTask(NamedTuple):
    """The try that a trigger belongs to, and whether the trigger is its stream."""

    name: TryName
    is_stream: bool


_RUNS = dag_run.join(dag, dag.c.id == dag_run.c.dag_id)
_TASK = task_instance.c
_TRY = (dag.c.name, dag_run.c.run_id, _TASK.task_id, _TASK.try_number, _TASK.map_index)
# Asked apart, and only where a trigger is no watcher's: most claims are of watchers, and have no more columns for it.
# The trigger of a stream is found by its stream whether its task waits or not.
_TASKS = Prepared(
    union_all(
        select(task_instance.c.trigger_id, literal_column("0"), *_TRY)
        .select_from(task_instance.join(_RUNS, dag_run.c.id == task_instance.c.dag_run_id))
        .where(
            task_instance.c.trigger_id.is_not(None),
            task_instance.c.trigger_id.between(bindparam("first"), bindparam("last")),
        ),
        select(task_stream.c.trigger_id, literal_column("1"), *_TRY)
        .select_from(
            task_stream.join(task_instance, task_instance.c.id == task_stream.c.task_instance_id).join(
                _RUNS, dag_run.c.id == task_instance.c.dag_run_id
            )
        )
        .where(task_stream.c.trigger_id.between(bindparam("first"), bindparam("last"))),
    )
)


def _ranges(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of ids that lie near to each other: of what is between, little is read."""
    first = last = ids[0]
    for id_ in ids[1:]:
        if id_ - last > GAP_MAX:
            yield first, last
            first = id_
        last = id_
    yield first, last


def of(tx: Tx, trigger_ids: Collection[int]) -> dict[int, WaitingTask]:
    """Return the tries that wait for these triggers, or have them as their streams, by the trigger's id."""
    ids = frozenset(trigger_ids)
    if not ids:
        return {}
    found = [
        row
        for first, last in _ranges(sorted(ids))
        for row in _TASKS.run(tx.connection, first=first, last=last).fetchall()
    ]
    return {  # the row of a stream comes after that of its task, if the task waits
        id_: WaitingTask(TryName(sys.intern(dag_id), sys.intern(run_id), sys.intern(task_id), *numbers), bool(stream))
        for id_, stream, dag_id, run_id, task_id, *numbers in found
        if id_ in ids
    }
