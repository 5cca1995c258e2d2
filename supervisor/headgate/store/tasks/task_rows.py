"""How a task's row changes: the statements come from the table of `headgate.scheduling.states`, row by row.

Whatever moves a task does it in one of two ways. What happens often is one guarded UPDATE (`changed`): old states and
token stand in its WHERE, and the number of rows says whether it won. What has something to decide locks the row first
(`locked`), asks the table what may follow, and then does the same. Whoever comes second waits for the lock, finds the
state or the token changed, and changes nothing: of an event, a timeout and a user's action exactly one wins (I8).

Locks are taken in one order: a task's row first, then that of its trigger, and at the very end those of runs. Whatever
ends a task, or returns it to ``none``, is followed by a look at its run (`note_run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    GenerativeSelect,
    Update,
    and_,
    bindparam,
    func,
    literal_column,
    null,
    or_,
    select,
    update,
)

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.scheduling import states
from headgate.scheduling.retries import retry_wait_s
from headgate.scheduling.states import FAIL_METHOD, OCCUPYING, TERMINAL, Transition
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound, read
from headgate.store.tables import task_instance, trigger
from headgate.store.triggers.dead_letters import storable_text

_C = task_instance.c
_SEEN_BY_RUN = TERMINAL | {TaskState.NONE}  # a task that gets there may change what becomes of others
Statement = TypeVar("Statement", bound=GenerativeSelect)


def new_token() -> str:
    """Return a token that nothing had before."""
    return uuid4().hex


class LockedTask(msgspec.Struct, frozen=True):
    """What has to be known of a task to decide about it. Its row is locked until the transaction ends."""

    id: int
    dag_run_id: int
    state: TaskState
    token: str | None
    trigger_id: int | None
    try_number: int
    tries_max: int
    retries: int
    retry_delay_s: float
    retry_exponential_backoff: bool
    max_retry_delay_s: float | None
    execution_timeout_s: float | None
    deadline: datetime | None
    priority_weight: int
    queue: str

    @property
    def has_tries_left(self) -> bool:
        """Whether a failure is followed by another try."""
        return self.try_number < self.tries_max

    def retry_at(self, now: datetime) -> datetime:
        """Return when the next try is due, this one having failed now."""
        wait_s = retry_wait_s(
            max(self.try_number - (self.tries_max - self.retries - 1), 1),  # a clear begins the delays anew
            delay_s=self.retry_delay_s,
            is_exponential=self.retry_exponential_backoff,
            delay_max_s=self.max_retry_delay_s,
        )
        return now + timedelta(seconds=wait_s)


LOCKED = tuple(_C[name] for name in LockedTask.__struct_fields__)


def locked_task(connection: Connection, row: tuple[Any, ...]) -> LockedTask:
    """Return a row of the columns `LOCKED`, as the driver gave it."""
    fields = dict(zip(LockedTask.__struct_fields__, row, strict=True))
    fields["state"] = TaskState(fields["state"])
    fields["retry_exponential_backoff"] = bool(fields["retry_exponential_backoff"])
    if fields["deadline"] is not None:
        fields["deadline"] = read(connection, fields["deadline"])
    return LockedTask(**fields)


def _locking(condition: ColumnElement[bool]) -> Prepared:
    return Prepared(select(*LOCKED).where(condition).with_for_update(key_share=True))


def passing_over(statement: Statement) -> Statement:
    """Have a statement lock the tasks it finds, and pass over those that another is changing this moment."""
    return statement.with_for_update(skip_locked=True, key_share=True, of=task_instance)


_LOCK = _locking(_C.id == bindparam("of_id"))
_LOCK_UNLESS_BUSY = Prepared(passing_over(select(*LOCKED).where(_C.id == bindparam("of_id"))))
_LOCK_OF_TRIGGER = _locking(_C.trigger_id == bindparam("of_trigger"))


def locked(
    connection: Connection, task_id: int, *, token: str | None = None, state: TaskState | None = None
) -> LockedTask | None:
    """Lock a task and return it; None where there is no such task, or its token or its state is not the one given."""
    row = _LOCK.run(connection, of_id=task_id).fetchone()
    if row is None:
        return None
    task = locked_task(connection, row)
    if token is not None and task.token != token:
        return None
    return task if state is None or task.state is state else None


def locked_unless_busy(connection: Connection, task_id: int) -> LockedTask | None:
    """Lock a task and return it; None where another is changing it this moment."""
    row = _LOCK_UNLESS_BUSY.run(connection, of_id=task_id).fetchone()
    return None if row is None else locked_task(connection, row)


def locked_by_trigger(connection: Connection, trigger_id: int) -> LockedTask | None:
    """Lock the task that waits for this trigger and return it; None where none does."""
    row = _LOCK_OF_TRIGGER.run(connection, of_trigger=trigger_id).fetchone()
    return None if row is None else locked_task(connection, row)


# --- the statements ------------------------------------------------------------------------------


def is_in(*some: TaskState) -> ColumnElement[bool]:
    """Return the condition that a task is in one of these states, written out: partial indexes go by the text."""
    return or_(*(_C.state == literal_column(f"'{state.value}'") for state in some))


def effects(row: Transition) -> dict[str, Any]:
    """Return what a transition sets by itself; what else it sets comes from the caller."""
    values: dict[str, Any] = {"state": row.to.value, "retry_at": null()}
    if row.to not in OCCUPYING:
        values["triggerer_id"] = null()
        if row.to is not TaskState.DEFERRED:
            values["token"] = null()
    if row.trigger_id == "clear":
        values |= {"trigger_id": null(), "trigger_timeout": null()}
    if row.next_method == "clear":
        values |= {"next_method": null(), "next_kwargs": null(), "event_id": null()}
    elif row.next_method == FAIL_METHOD:
        values |= {"next_method": FAIL_METHOD, "event_id": null()}
    if row.to in TERMINAL:
        values["ended_at"] = bindparam("now")
    elif row.to is TaskState.NONE:
        values |= dict.fromkeys(("ended_at", "started_at", "deadline", "last_error"), null())
    elif row.to is TaskState.SCHEDULED:
        values["scheduled_at"] = bindparam("now")
        if row.event in ("scheduled", "retry_due"):
            values |= {"try_number": _C.try_number + 1, "started_at": null(), "deadline": null()}
    elif row.to is TaskState.RUNNING:
        values["started_at"] = func.coalesce(_C.started_at, bindparam("now"))
    return values


@cache
def _change(row: Transition, columns: tuple[str, ...], by: tuple[str, ...]) -> Prepared:
    where = [_C[name] == bindparam(f"of_{name}") for name in by]
    values = effects(row) | {name: bindparam(f"to_{name}", type_=_C[name].type) for name in columns}
    statement = update(task_instance).where(and_(*where), is_in(*sorted(row.from_))).values(values)
    return Prepared(statement.returning(_C.dag_run_id))


def changed(connection: Connection, now: datetime, row: Transition, by: dict[str, Any], **values: Any) -> bool:
    """Move the task named by the columns ``by``, if it is in an old state of ``row``; return whether it was.

    ``values`` are further columns to set, as the driver takes them.
    """
    statement = _change(row, tuple(values), tuple(by))
    parameters = {f"of_{name}": value for name, value in by.items()}
    parameters |= {f"to_{name}": value for name, value in values.items()}
    rows = statement.run(connection, now=bound(connection, now), **parameters).fetchall()
    if rows and row.to in _SEEN_BY_RUN:
        note_run(connection, rows[0][0])
    return bool(rows)


@cache
def _change_all(row: Transition) -> Update:
    ids: BindParameter[Sequence[int]] = bindparam("ids", expanding=True)
    return update(task_instance).where(_C.id.in_(ids), is_in(*sorted(row.from_))).values(effects(row))


def change_all(connection: Connection, now: datetime, row: Transition, ids: Sequence[int]) -> None:
    """Move tasks whose rows are locked, and which are in an old state of ``row``. Their run is looked at already."""
    for some in chunks(ids):
        won = connection.execute(_change_all(row), {"ids": some, "now": now}).rowcount
        assert won == len(some), "the rows are locked"


def apply(connection: Connection, now: datetime, task: LockedTask, event: str, **values: Any) -> TaskState:
    """Move a locked task; return its new state. Raises `IllegalTransition`, and changes nothing then."""
    row = states.move(event, task.state)
    won = changed(connection, now, row, {"id": task.id}, **values)
    assert won, "the row was locked"
    return row.to


def fail(
    connection: Connection, now: datetime, task: LockedTask, event: str, retry_event: str, error: str
) -> TaskState:
    """Move a locked task whose try has failed: to its next try if there is one, else to its end."""
    values: dict[str, Any] = {"last_error": storable_text(error, ERROR_CHARS_MAX)}
    if not task.has_tries_left:
        return apply(connection, now, task, event, **values)
    values["retry_at"] = bound(connection, task.retry_at(now))
    return apply(connection, now, task, retry_event, **values)


# --- the run's side ------------------------------------------------------------------------------


def note_run(connection: Connection, dag_run_id: int) -> None:
    """Have the scheduler look at this run, once the transaction is committed."""
    connection.info["tx"].mark_run_dirty(dag_run_id)


def forget_run(connection: Connection, dag_run_id: int) -> None:
    """What this transaction did to the run was done by looking at it."""
    connection.info["tx"].unmark_run_dirty(dag_run_id)


def mark_noted(connection: Connection) -> None:
    """Mark the runs that were noted; see `Tx.flush`."""
    connection.info["tx"].flush()


# --- the trigger's side --------------------------------------------------------------------------

_OPEN = and_(trigger.c.id == bindparam("of_id"), trigger.c.finished_at.is_(None), trigger.c.removed_at.is_(None))
_FINISH = Prepared(update(trigger).where(_OPEN).values(finished_at=bindparam("now")))
_REMOVE = Prepared(update(trigger).where(_OPEN).values(removed_at=bindparam("now")))


def finish_trigger(connection: Connection, now: datetime, trigger_id: int) -> None:
    """Nothing waits for this trigger any more. Its owner stays: the runner may still be at it."""
    _FINISH.run(connection, of_id=trigger_id, now=bound(connection, now))


def remove_trigger(connection: Connection, now: datetime, trigger_id: int) -> None:
    """A user ended what this trigger works for: it is cancelled, with its on_kill() (I14)."""
    _REMOVE.run(connection, of_id=trigger_id, now=bound(connection, now))
