"""Acts of users on tasks and runs, as the audit tells them; nothing is asked or written where no user acts.

Runs and tasks have the names that commands take: ``run etl manual__1``, ``task etl manual__1 enrich[3]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from sqlalchemy import select

from headgate.protocol.messages.dags import TaskState
from headgate.store.access.audit import Action, Detail
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRunId, Instances, TaskInstanceId, instance_name
from headgate.store.tables import dag, dag_run, task_instance

NAMES_MAX = 50  # of tasks in one row of the audit


class _ClearedSome(Protocol):
    """What one transaction of a clear has done: `headgate.store.tasks.user_actions.Cleared`."""

    @property
    def cleared(self) -> Mapping[str, Any]: ...

    @property
    def instances(self) -> Mapping[str, int]: ...


_Done = TypeVar("_Done", bound=_ClearedSome)


class Tried(Exception):
    """Ends a transaction in which something was only tried. It has what the verb would have returned."""

    def __init__(self, done: Any) -> None:
        super().__init__("this was only tried")
        self.done = done


def run_name(tx: Tx, run: DagRunId) -> str:
    """Return the name of a run; "" if nobody acts."""
    return "" if tx.actor is None else name_of_run(tx, run)


def name_of_run(tx: Tx, run: DagRunId) -> str:
    """Return the name of a run."""
    named = select(dag.c.name, dag_run.c.run_id).select_from(dag_run.join(dag)).where(dag_run.c.id == run)
    row = tx.connection.execute(named).first()
    return f"run {run}" if row is None else f"run {row.name} {row.run_id}"


def task_name(tx: Tx, instance: TaskInstanceId) -> str:
    """Return the name of a task; "" if nobody acts."""
    return "" if tx.actor is None else name_of_task(tx, instance)


def name_of_task(tx: Tx, instance: TaskInstanceId) -> str:
    """Return the name of a task."""
    found = select(task_instance.c.dag_run_id, task_instance.c.task_id, task_instance.c.map_index)
    row = tx.connection.execute(found.where(task_instance.c.id == instance)).first()
    if row is None:
        return f"task {instance}"
    name = instance_name(row.task_id, row.map_index)
    return f"task {name_of_run(tx, row.dag_run_id).removeprefix('run ')} {name}"


def asked(tx: Tx, instance: TaskInstanceId, action: Literal["START", "RESTART", "STOP"], *, changed: bool) -> None:
    """Tell that a user wants a task to start, restart or stop; not ``changed``: it had ended."""
    actions: dict[str, Action] = {"START": "tasks start", "RESTART": "tasks restart", "STOP": "tasks stop"}
    tx.act(actions[action], task_name(tx, instance), changed=changed)


def marked(tx: Tx, instance: TaskInstanceId, mark: str, before: TaskState, *, is_marked: bool) -> None:
    """Tell that a user ended a task, or wanted to end one that had ended."""
    was: Detail = {"state": before.value}
    tx.act(_marked(mark), task_name(tx, instance), before=was, after={"state": mark}, changed=is_marked)


def marked_instances(tx: Tx, run: DagRunId, which: Instances, mark: str, ended: int) -> None:
    """Tell that a user ended instances of a mapped task."""
    subject = f"task {run_name(tx, run).removeprefix('run ')} {which.task_id}"
    bounds: Detail = {"from": which.first, "to": which.last, "state": mark}
    tx.act(_marked(mark), subject, after=bounds, counts={"ended": ended}, changed=ended > 0)


def cleared(tx: Tx, run: DagRunId, names: Sequence[str], done: _Done, *, is_tried_only: bool = False) -> _Done:
    """Tell that a user cleared tasks of a run, and instances of mapped ones; return what was cleared."""
    if is_tried_only:
        raise Tried(done)
    which: Detail = {"tasks": [*names[:NAMES_MAX], *(["..."] if len(names) > NAMES_MAX else [])]}
    counts = {"cleared": len(done.cleared), "instances": sum(done.instances.values())}
    tx.act("tasks clear", run_name(tx, run), after=which, counts=counts, changed=any(counts.values()))
    return done


def cancelled(tx: Tx, run: DagRunId, ended: int) -> None:
    """Tell that a user cancelled a run."""
    tx.act("runs cancel", run_name(tx, run), counts={"ended": ended})


def _marked(mark: str) -> Action:
    return "tasks mark-success" if mark == "success" else "tasks mark-failed"
