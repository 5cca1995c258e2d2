"""The ends of a try: its worker reports an outcome, the worker is lost, or its supervisor is.

Only the worker that runs a task can end it: ``token`` is in the WHERE, and any other transition has given the task
another token or none. A late outcome therefore matches no row, and its XComs are not stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
from sqlalchemy import Integer, bindparam, or_, select

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import states
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import read
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, leased, reading
from headgate.store.ids import Epoch, TaskInstanceId, TryName
from headgate.store.tables import dag, dag_run, task_instance, triggerer
from headgate.store.tasks import task_rows, values

_C = task_instance.c
ADOPTED_MAX = 500  # tasks of one transaction: some tens of milliseconds


class Adopted(msgspec.Struct, frozen=True):
    """A task taken from a lost supervisor: the try it was in, its new state, and the error if that try has failed."""

    id: TaskInstanceId
    name: TryName
    state: TaskState
    error: str = ""


class OwnedTask(msgspec.Struct, frozen=True):
    """One task that a worker of a supervisor has, as the database sees it.

    If the task of a worker is not among these, has another token, or is ``restarting``, then a user has cleared or
    marked it, and the worker must be ended. ``is_overdue``: it has used up its execution_timeout, by the database's
    clock.
    """

    id: TaskInstanceId
    token: str
    state: TaskState
    is_overdue: bool


class OutcomeVerbs(Verbs):
    """The verbs that end a try."""

    @leased
    def succeed(
        self,
        tx: LeasedTx,
        instance: TaskInstanceId,
        token: str,
        *,
        end: Literal["succeeded", "skipped"] = "succeeded",
        xcoms: Mapping[str, bytes] | None = None,
        skips: Collection[str] = (),
    ) -> bool:
        """End a running task well, with its encoded XComs; return whether the token was the task's.

        ``skips`` are the tasks of its run to be skipped with it, if they have not begun. Raises `ValueRefused` for an
        XCom over the limit, without storing anything: then fail the task with that error.
        """
        (row,) = states.of(end)
        if not task_rows.changed(tx, row, {"id": instance, "token": token}, last_error=None):
            return False
        if xcoms:
            values.push_xcoms(tx, instance, xcoms)
        if skips:
            _skip(tx, instance, skips)
        return True

    @leased
    def fail(
        self,
        tx: LeasedTx,
        instance: TaskInstanceId,
        token: str,
        error: str,
        *,
        may_retry: bool = True,
        xcoms: Mapping[str, bytes] | None = None,
    ) -> TaskState | None:
        """Fail the try of a running task; return the task's new state, None if the token was not the task's.

        Raises `ValueRefused` as `succeed` does: then fail it without XComs.
        """
        task = task_rows.locked(tx, instance, token=token, state=TaskState.RUNNING)
        if task is None:
            return None
        values.push_xcoms(tx, instance, xcoms or {})
        if not may_retry:
            task = msgspec.structs.replace(task, tries_max=task.try_number)
        return task_rows.fail(tx, task, "failed", "failed_to_retry", error)

    @leased
    def lose_worker(self, tx: LeasedTx, instance: TaskInstanceId, token: str, reason: str) -> TaskState | None:
        """Record that the worker of a task is gone; return the task's new state, None if it is not this worker's.

        A running task has failed this try, with the reason. One that was cleared while it ran begins again.
        """
        task = task_rows.locked(tx, instance, token=token)
        if task is None:
            return None
        match task.state:
            case TaskState.RUNNING:
                return task_rows.fail(tx, task, "worker_lost", "worker_lost_to_retry", reason)
            case TaskState.RESTARTING:
                return task_rows.apply(tx, task, "restarted")
            case _:
                return None  # deferred: the token is the trigger's

    @leased
    def adopt(self, tx: LeasedTx, *, limit: int = ADOPTED_MAX) -> list[Adopted]:
        """Take up to ``limit`` tasks from supervisors that are fenced or have ended; return them.

        Such a supervisor writes nothing more, and its workers die with it. A task that ran there has failed this try;
        one that was being restarted begins again. Deferred tasks are not adopted: their triggers are claimed.
        """
        adopted = []
        for owner, dag_id, run_id, task_id, *row in _ORPHANS.run(tx.connection, limit=limit).fetchall():
            task = task_rows.locked_task(tx, tuple(row))
            error = ""
            if task.state is TaskState.RUNNING:
                error = f"its supervisor (epoch {owner}) is gone, and its worker with it"
                state = task_rows.fail(tx, task, "adopted", "adopted_to_retry", error)
            else:
                state = task_rows.apply(tx, task, "adopted")
            adopted.append(Adopted(task.id, TryName(dag_id, run_id, task_id, task.try_number), state, error))
        return adopted

    @reading
    def owned(self, tx: Tx, epoch: Epoch) -> list[OwnedTask]:
        """Return the tasks that the workers of an epoch have."""
        return [_owned(tx, *row) for row in _OWNED.run(tx.connection, epoch=epoch).fetchall()]


def _skip(tx: Tx, instance: TaskInstanceId, names: Collection[str]) -> None:
    of_run = select(_C.dag_run_id).where(_C.id == instance).scalar_subquery()
    (row,) = states.of("upstream_skipped")
    for some in chunks(sorted(set(names))):
        fresh = select(_C.id).where(
            _C.dag_run_id == of_run, _C.task_id.in_(some), task_rows.is_in(*sorted(row.from_)), _C.id != instance
        )
        # One after the other, by id, so that two transactions that skip the same tasks do not deadlock.
        for skipped in sorted(tx.connection.execute(fresh).scalars()):
            task_rows.changed(tx, row, {"id": skipped})


_ORPHANS = Prepared(
    task_rows.skip_locked(
        select(_C.triggerer_id, dag.c.name, dag_run.c.run_id, _C.task_id, *task_rows.LOCKED)
        .select_from(task_instance.join(dag_run).join(dag).join(triggerer, triggerer.c.id == _C.triggerer_id))
        # IS NOT NULL is implied by the join, but the partial index and the order need it in the text.
        .where(
            _C.triggerer_id.is_not(None), or_(triggerer.c.fenced_at.is_not(None), triggerer.c.stopped_at.is_not(None))
        )
        .order_by(_C.triggerer_id, _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
)
_OWNED = Prepared(
    select(_C.id, _C.token, _C.state, _C.deadline).where(_C.triggerer_id == bindparam("epoch")).order_by(_C.id)
)


def _owned(tx: Tx, instance: TaskInstanceId, token: str, state: str, deadline: Any) -> OwnedTask:
    is_overdue = deadline is not None and read(tx.connection, deadline) <= tx.now
    return OwnedTask(instance, token, TaskState(state), is_overdue)
