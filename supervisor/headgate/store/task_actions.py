"""What users do to a task: clear it, mark it. Whatever was under way for it is ended, and its answer comes too late."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from sqlalchemy import Connection, select

from headgate.protocol.dags import TaskState
from headgate.scheduling.states import IllegalTransition
from headgate.store import dags, task_rows, task_values
from headgate.store.errors import NoSuchRow
from headgate.store.tables import task_instance
from headgate.store.task_rows import LockedTask

Mark = Literal["success", "failed"]


def clear(connection: Connection, now: datetime, task_id: int) -> TaskState | None:
    """Have a task begin anew, with all its tries; return its new state, None where it is being cleared already.

    One that runs becomes ``restarting`` until its worker is gone. A run that had ended goes on. Raises `NoSuchRow`.
    """
    task = _locked(connection, task_id)
    try:
        state = task_rows.apply(connection, now, task, "cleared", tries_max=task.try_number + 1 + task.retries)
    except IllegalTransition:
        return None
    _end_trigger(connection, now, task)
    task_values.forget_xcoms(connection, task_id)
    run = connection.execute(select(task_instance.c.dag_run_id).where(task_instance.c.id == task_id)).scalar_one()
    dags.reopen(connection, run)
    return state


def mark(connection: Connection, now: datetime, task_id: int, mark: Mark) -> bool:
    """End a task as a user says, without a retry; return whether it had not ended. Raises `NoSuchRow`."""
    task = _locked(connection, task_id)
    error = "a user marked it as failed" if mark == "failed" else None
    try:
        task_rows.apply(connection, now, task, f"marked_{mark}", last_error=error)
    except IllegalTransition:
        return False
    _end_trigger(connection, now, task)
    return True


def _locked(connection: Connection, task_id: int) -> LockedTask:
    task = task_rows.locked(connection, task_id)
    if task is None:
        raise NoSuchRow("task", str(task_id))
    return task


def _end_trigger(connection: Connection, now: datetime, task: LockedTask) -> None:
    if task.trigger_id is not None:
        task_rows.remove_trigger(connection, now, task.trigger_id)
