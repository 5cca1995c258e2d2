"""Actions of users on tasks: clear them, mark them, cancel a run.

They end the worker or the trigger of a task, whose later answers change nothing.

Actions on many tasks at once skip the tasks whose rows another transaction has locked: waiting for a row while holding
others could deadlock. The caller repeats the action for the tasks that are reported as busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from sqlalchemy import select

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.planning import related
from headgate.scheduling.states import UNFINISHED, IllegalTransition
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, writing
from headgate.store.errors import NoSuchRow
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.tables import dag, dag_run, task_instance
from headgate.store.tasks import dags, elements, task_rows, task_streams, values
from headgate.store.tasks.graphs import read_spec
from headgate.store.tasks.task_rows import LockedTask

Mark = Literal["success", "failed"]
StreamClear = Literal["from_start", "go_on"]
_C = task_instance.c
_ENDED_WELL = frozenset({TaskState.SUCCESS, TaskState.SKIPPED})
_FAILED = frozenset({TaskState.FAILED, TaskState.UPSTREAM_FAILED})


class Cleared(msgspec.Struct, frozen=True):
    """Result of `clear_many`: the new states of cleared tasks by task id.

    Nothing was done to ``busy`` tasks: clear them again. ``as_before`` are tasks that are being cleared already.
    """

    cleared: dict[str, TaskState]
    as_before: tuple[str, ...]
    busy: tuple[str, ...]


class Cancelled(msgspec.Struct, frozen=True):
    """Result of `cancel_run`: how many tasks it ended, and whether the run has ended by it. If not, cancel again."""

    tasks: int
    is_ended: bool


class UserActionVerbs(Verbs):
    """The verbs by which users act on tasks."""

    @writing
    def mark(self, tx: Tx, instance: TaskInstanceId, mark: Mark) -> bool:
        """End a task as a user says, without a retry; return whether it was unfinished. Raises `NoSuchRow`."""
        tx.notify()
        task = task_rows.locked(tx, instance)
        if task is None:
            raise NoSuchRow("task", str(instance))
        return _mark(tx, task, mark, "a user marked it as failed" if mark == "failed" else None)

    @writing
    def clear_many(
        self,
        tx: Tx,
        run: DagRunId,
        task_ids: Sequence[str] = (),
        *,
        upstream: bool = False,
        downstream: bool = False,
        only_failed: bool = False,
        streams: StreamClear | None = None,
    ) -> Cleared:
        """Clear tasks of a run, and those up- or downstream of them in its DAG; without ids all tasks.

        A cleared task begins again with all its tries; one that runs is ``restarting`` until its worker is gone. A run
        that has ended is running again. ``only_failed``: of all these only tasks in ``failed`` and ``upstream_failed``.
        ``streams``: whether tasks begin their streams from the start, or go on behind the last event handled; if it is
        not given, those that have ended well begin from the start.
        Raises `NoSuchRow`.
        """
        tx.notify()
        names = _chosen(tx, run, task_ids, upstream=upstream, downstream=downstream, only_failed=only_failed)
        ids = _ids(tx, run)
        cleared: dict[str, TaskState] = {}
        as_before: list[str] = []
        busy: list[str] = []
        for name in sorted(names, key=ids.__getitem__):
            task = task_rows.locked_unless_busy(tx, ids[name])
            if task is None:
                busy.append(name)
            elif not only_failed or task.state in _FAILED:
                state = _clear(tx, task, streams)
                if state is None:
                    as_before.append(name)
                else:
                    cleared[name] = state
        if cleared:
            dags.reopen(tx, run)
        return Cleared(cleared, tuple(as_before), tuple(busy))

    @writing
    def cancel_run(self, tx: Tx, run: DagRunId) -> Cancelled:
        """End all unfinished tasks of a run as failed, and with the last of them the run. Cancel again if it goes on.

        Triggers of deferred tasks are cancelled, with their on_kill(); workers are ended by their supervisors, which
        find that the tasks are no longer theirs.
        """
        tx.notify()
        ended = 0
        of_run = select(_C.id).where(_C.dag_run_id == run).order_by(_C.id)
        for instance in tx.connection.execute(of_run).scalars().all():
            task = task_rows.locked_unless_busy(tx, instance)
            if task is not None and task.state in UNFINISHED:
                ended += _mark(tx, task, "failed", "a user cancelled its run")
        _mark_runs(tx, run)
        return Cancelled(ended, dags.end_run(tx, run, "failed"))


# --- one task ------------------------------------------------------------------------------------


def _clear(tx: Tx, task: LockedTask, streams: StreamClear | None) -> TaskState | None:
    try:
        state = task_rows.apply(tx, task, "cleared", tries_max=task.try_number + 1 + task.retries)
    except IllegalTransition:
        return None
    _end_trigger(tx, task)
    if streams == "from_start" or (streams is None and task.state in _ENDED_WELL):
        task_streams.forget(tx, task.id)
    values.delete_xcoms(tx, task.id)
    elements.forget(tx, task.id)
    return state


def _mark(tx: Tx, task: LockedTask, mark: Mark, error: str | None) -> bool:
    try:
        task_rows.apply(tx, task, f"marked_{mark}", last_error=error)
    except IllegalTransition:
        return False
    _end_trigger(tx, task)
    return True


def _end_trigger(tx: Tx, task: LockedTask) -> None:
    task_streams.close(tx, task.id, by_user=True)
    if task.trigger_id is not None:
        task_rows.remove_trigger(tx, task.trigger_id)


# --- many tasks of a run -------------------------------------------------------------------------


def _chosen(
    tx: Tx, run: DagRunId, task_ids: Sequence[str], *, upstream: bool, downstream: bool, only_failed: bool
) -> set[str]:
    row = tx.connection.execute(select(dag.c.name, dag.c.spec).join(dag_run).where(dag_run.c.id == run)).first()
    if row is None:
        raise NoSuchRow("run", str(run))
    states = dags.task_states(tx, run)
    for task_id in task_ids:
        if task_id not in states:
            raise NoSuchRow("task", task_id)
    edges = {task.task_id: task.upstream for task in read_spec(row.name, row.spec).tasks}
    chosen = related(edges, task_ids or states, upstream=upstream, downstream=downstream)
    return {name for name in chosen if name in states and (not only_failed or states[name] in _FAILED)}


def _ids(tx: Tx, run: DagRunId) -> dict[str, TaskInstanceId]:
    rows = tx.connection.execute(select(_C.task_id, _C.id).where(task_rows.unmapped_of(run)).order_by(_C.id))
    return {name: id_ for name, id_ in rows}


def _mark_runs(tx: Tx, run: DagRunId) -> None:
    """Have the scheduler evaluate a run and those that wait for its end; their rows are locked from here on.

    Every transaction touches runs last, and in the order of their ids (`Tx.flush`).
    """
    of_dag = select(dag_run.c.dag_id).where(dag_run.c.id == run).scalar_subquery()
    waits = dag_run.c.ended_at.is_(None), dag_run.c.started_at.is_(None)
    for waiting in tx.connection.execute(select(dag_run.c.id).where(dag_run.c.dag_id == of_dag, *waits)).scalars():
        tx.mark_run_dirty(waiting)
    tx.mark_run_dirty(run)
    tx.flush()
