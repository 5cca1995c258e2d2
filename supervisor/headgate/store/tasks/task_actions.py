"""What users do to tasks: clear them, mark them, cancel a run. Whatever was under way for them is ended, and its answer
comes too late.

What users do to many tasks at once passes over those that another is changing this moment: a transaction that holds
some rows and waits for others could be waited for by these. The caller repeats it for the tasks it is told are busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec
from sqlalchemy import Connection, select

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import lineage
from headgate.scheduling.states import UNFINISHED, IllegalTransition
from headgate.store.errors import NoSuchRow
from headgate.store.tables import dag, dag_run, task_instance
from headgate.store.tasks import dags, task_rows, task_values
from headgate.store.tasks.graphs import read_spec
from headgate.store.tasks.task_rows import LockedTask

Mark = Literal["success", "failed"]
_C = task_instance.c
_FAILED = frozenset({TaskState.FAILED, TaskState.UPSTREAM_FAILED})


class Cleared(msgspec.Struct, frozen=True):
    """What a clear of many came to: new states by task id. ``busy``: those to ask for again; nothing was done to them.

    ``as_before``: those that are being cleared already.
    """

    cleared: dict[str, TaskState]
    as_before: tuple[str, ...]
    busy: tuple[str, ...]


class Cancelled(msgspec.Struct, frozen=True):
    """What a cancel came to: how many tasks it ended, and whether the run has ended by it. If not, ask again."""

    tasks: int
    is_ended: bool


# --- one task ------------------------------------------------------------------------------------


def _clear(connection: Connection, now: datetime, task: LockedTask) -> TaskState | None:
    try:
        state = task_rows.apply(connection, now, task, "cleared", tries_max=task.try_number + 1 + task.retries)
    except IllegalTransition:
        return None
    _end_trigger(connection, now, task)
    task_values.forget_xcoms(connection, task.id)
    return state


def mark(connection: Connection, now: datetime, task_id: int, mark: Mark) -> bool:
    """End a task as a user says, without a retry; return whether it had not ended. Raises `NoSuchRow`."""
    error = "a user marked it as failed" if mark == "failed" else None
    return _mark(connection, now, _locked(connection, task_id), mark, error)


def _mark(connection: Connection, now: datetime, task: LockedTask, mark: Mark, error: str | None) -> bool:
    try:
        task_rows.apply(connection, now, task, f"marked_{mark}", last_error=error)
    except IllegalTransition:
        return False
    _end_trigger(connection, now, task)
    return True


# --- many tasks of a run -------------------------------------------------------------------------


def clear_many(
    connection: Connection,
    now: datetime,
    dag_run_id: int,
    task_ids: Sequence[str],
    *,
    upstream: bool,
    downstream: bool,
    only_failed: bool,
) -> Cleared:
    """Have tasks of a run begin anew, together with what is up- or downstream of them in its DAG; no ids: all tasks.

    ``only_failed``: of all these the ones in ``failed`` and ``upstream_failed``. Raises `NoSuchRow`.
    """
    row = connection.execute(select(dag.c.name, dag.c.spec).join(dag_run).where(dag_run.c.id == dag_run_id)).first()
    if row is None:
        raise NoSuchRow("run", str(dag_run_id))
    states = dags.task_states(connection, dag_run_id)
    for task_id in task_ids:
        if task_id not in states:
            raise NoSuchRow("task", task_id)
    edges = {task.task_id: task.upstream for task in read_spec(row.name, row.spec).tasks}
    chosen = lineage.related(edges, task_ids or states, upstream=upstream, downstream=downstream)
    wanted = {name for name in chosen if name in states and (not only_failed or states[name] in _FAILED)}
    ids = _ids(connection, dag_run_id)
    cleared: dict[str, TaskState] = {}
    as_before: list[str] = []
    busy: list[str] = []
    for name in sorted(wanted, key=ids.__getitem__):
        task = task_rows.locked_unless_busy(connection, ids[name])
        if task is None:
            busy.append(name)
        elif not only_failed or task.state in _FAILED:
            state = _clear(connection, now, task)
            if state is None:
                as_before.append(name)
            else:
                cleared[name] = state
    if cleared:
        dags.reopen(connection, dag_run_id)
    return Cleared(cleared, tuple(as_before), tuple(busy))


def cancel_run(connection: Connection, now: datetime, dag_run_id: int) -> Cancelled:
    """End all unfinished tasks of a run as failed, and with the last of them the run.

    Triggers of deferred tasks are cancelled, with their on_kill(); workers are ended by their supervisors, which see
    that the tasks are no longer theirs.
    """
    ended = 0
    for task_id in _ids(connection, dag_run_id).values():
        task = task_rows.locked_unless_busy(connection, task_id)
        if task is not None and task.state in UNFINISHED:
            ended += _mark(connection, now, task, "failed", "a user cancelled its run")
    _mark_runs(connection, dag_run_id)
    return Cancelled(ended, dags.end_run(connection, now, dag_run_id, "failed"))


def _mark_runs(connection: Connection, dag_run_id: int) -> None:
    """Have the scheduler look at a run and at those that wait for it to end; their rows are locked from here on.

    All that a transaction does with runs comes last and in the order of their ids: see `task_rows.mark_noted`.
    """
    of_dag = select(dag_run.c.dag_id).where(dag_run.c.id == dag_run_id).scalar_subquery()
    waits = dag_run.c.ended_at.is_(None), dag_run.c.started_at.is_(None)
    for waiting in connection.execute(select(dag_run.c.id).where(dag_run.c.dag_id == of_dag, *waits)).scalars():
        task_rows.note_run(connection, waiting)
    task_rows.note_run(connection, dag_run_id)
    task_rows.mark_noted(connection)


def _ids(connection: Connection, dag_run_id: int) -> dict[str, int]:
    rows = connection.execute(select(_C.task_id, _C.id).where(_C.dag_run_id == dag_run_id).order_by(_C.id))
    return {name: id_ for name, id_ in rows}


def _locked(connection: Connection, task_id: int) -> LockedTask:
    task = task_rows.locked(connection, task_id)
    if task is None:
        raise NoSuchRow("task", str(task_id))
    return task


def _end_trigger(connection: Connection, now: datetime, task: LockedTask) -> None:
    if task.trigger_id is not None:
        task_rows.remove_trigger(connection, now, task.trigger_id)
