"""How a try ends: the worker says so, the worker is gone, or the supervisor that had it is.

Only the worker that has the task can end it: ``token`` is in the WHERE, and is another one since whatever happened to
the task in the meantime. A late answer matches nothing, and its XComs reach no table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Integer, bindparam, or_, select

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import states
from headgate.scheduling.names import TryName
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import read
from headgate.store.ids import TaskInstanceId
from headgate.store.tables import dag, dag_run, task_instance, triggerer
from headgate.store.tasks import task_rows, task_values

_C = task_instance.c


def succeed(
    connection: Connection,
    now: datetime,
    task_id: int,
    token: str,
    end: Literal["succeeded", "skipped"],
    xcoms: Mapping[str, bytes],
    skips: Collection[str] = (),
) -> bool:
    """End a running task well; return whether it was the token's to end. Raises `ValueRefused`: then fail it.

    The tasks of its run in ``skips`` are skipped with it, as far as they are still in ``none``.
    """
    (row,) = states.of(end)
    if not task_rows.changed(connection, now, row, {"id": task_id, "token": token}, last_error=None):
        return False
    if xcoms:
        task_values.push_xcoms(connection, now, task_id, xcoms)
    if skips:
        _skip(connection, now, task_id, skips)
    return True


def _skip(connection: Connection, now: datetime, task_id: int, names: Collection[str]) -> None:
    of_run = select(_C.dag_run_id).where(_C.id == task_id).scalar_subquery()
    (row,) = states.of("upstream_skipped")
    for some in chunks(sorted(set(names))):
        fresh = select(_C.id).where(
            _C.dag_run_id == of_run, _C.task_id.in_(some), task_rows.is_in(*sorted(row.from_)), _C.id != task_id
        )
        # One after the other, by id: two that skip the same tasks do not wait for each other.
        for skipped in sorted(connection.execute(fresh).scalars()):
            task_rows.changed(connection, now, row, {"id": skipped})


def fail(
    connection: Connection,
    now: datetime,
    task_id: int,
    token: str,
    error: str,
    *,
    may_retry: bool,
    xcoms: Mapping[str, bytes],
) -> TaskState | None:
    """End the try of a running task badly; return the task's new state, None where it was not the token's to end."""
    task = task_rows.locked(connection, task_id, token=token, state=TaskState.RUNNING)
    if task is None:
        return None
    task_values.push_xcoms(connection, now, task_id, xcoms)
    if not may_retry:
        task = msgspec.structs.replace(task, tries_max=task.try_number)
    return task_rows.fail(connection, now, task, "failed", "failed_to_retry", error)


# --- orphans -------------------------------------------------------------------------------------


class Adopted(msgspec.Struct, frozen=True):
    """A task that was taken from a supervisor that is gone: the try it was in, its new state, and why that failed."""

    id: int
    name: TryName
    state: TaskState
    error: str = ""


_ORPHANS = Prepared(
    task_rows.passing_over(
        select(_C.triggerer_id, dag.c.name, dag_run.c.run_id, _C.task_id, *task_rows.LOCKED)
        .select_from(task_instance.join(dag_run).join(dag).join(triggerer, triggerer.c.id == _C.triggerer_id))
        # Said though the join says it, and in this order: an index of what has an owner goes by both.
        .where(
            _C.triggerer_id.is_not(None), or_(triggerer.c.fenced_at.is_not(None), triggerer.c.stopped_at.is_not(None))
        )
        .order_by(_C.triggerer_id, _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
)


def adopt(connection: Connection, now: datetime, *, limit: int) -> list[Adopted]:
    """Take up to ``limit`` tasks from supervisors that are fenced or have ended; return them.

    Such a supervisor writes nothing more, and its workers die with it. A task that one of them ran has failed this try;
    the others go on where they were. Deferred tasks are none of these: their triggers are claimed.
    """
    adopted = []
    for owner, dag_id, run_id, task_id, *row in _ORPHANS.run(connection, limit=limit).fetchall():
        task = task_rows.locked_task(connection, tuple(row))
        error = ""
        if task.state is TaskState.RUNNING:
            error = f"its supervisor (epoch {owner}) is gone, and its worker with it"
            state = task_rows.fail(connection, now, task, "adopted", "adopted_to_retry", error)
        else:
            state = task_rows.apply(connection, now, task, "adopted")
        adopted.append(Adopted(task.id, TryName(dag_id, run_id, task_id, task.try_number), state, error))
    return adopted


class OwnedTask(msgspec.Struct, frozen=True):
    """One task that a supervisor's workers have, as the database sees it.

    A worker whose task is not among these, or has another token, or is ``restarting``, is to be ended: a user has
    cleared or marked the task. ``is_overdue``: it has used up its execution_timeout, by the database's clock.
    """

    id: TaskInstanceId
    token: str
    state: TaskState
    is_overdue: bool


_OWNED = Prepared(
    select(_C.id, _C.token, _C.state, _C.deadline).where(_C.triggerer_id == bindparam("epoch")).order_by(_C.id)
)


def owned(connection: Connection, now: datetime, epoch: int) -> list[OwnedTask]:
    """Return the tasks that the workers of ``epoch`` have."""
    return [_owned(connection, now, row) for row in _OWNED.run(connection, epoch=epoch).fetchall()]


def _owned(connection: Connection, now: datetime, row: tuple[Any, ...]) -> OwnedTask:
    id_, token, state, deadline = row
    return OwnedTask(id_, token, TaskState(state), deadline is not None and read(connection, deadline) <= now)
