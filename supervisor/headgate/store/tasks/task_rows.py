"""How a task's row changes: each statement is made from a row of the table in `headgate.scheduling.states`.

A task is moved in one of two ways. Frequent transitions are one guarded UPDATE (`changed`): the old states and the
token are in its WHERE, and its row count says whether it won. Transitions that depend on more of the row lock it first
(`locked`), look up what the table allows, and then do the same UPDATE. The second of two that want the same task waits
for the lock, finds the state or the token changed, and changes nothing: of an event, a timeout and a user's action
exactly one wins (I8).

Locks are taken in one order: a task's row first, then its trigger's row, and rows of runs last of all. A transition to
a terminal state, to ``none`` or to ``up_for_retry`` marks the run dirty, so that the scheduler evaluates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    FromClause,
    GenerativeSelect,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.scheduling import states
from headgate.scheduling.planning import retry_wait_s
from headgate.scheduling.states import FAIL_METHOD, OCCUPYING, TERMINAL, Transition
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound, read
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRunId, TaskInstanceId, TriggerId
from headgate.store.tables import OPEN_TRIGGER, task_instance, trigger, triggerer
from headgate.store.triggers.dead_letters import storable_text

_C = task_instance.c
# States in which a task may let others of its run begin, or end it; or be begun by signals that it was too busy for.
_SEEN_BY_RUN = TERMINAL | {TaskState.NONE, TaskState.UP_FOR_RETRY}
Statement = TypeVar("Statement", bound=GenerativeSelect)


def new_token() -> str:
    """Return a new random token."""
    return uuid4().hex


class LockedTask(msgspec.Struct, frozen=True):
    """The columns of a task on which its transitions depend. Its row is locked until the transaction ends."""

    id: TaskInstanceId
    dag_run_id: DagRunId
    state: TaskState
    token: str | None
    trigger_id: TriggerId | None
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
    is_endless: bool
    moves: int
    started_at: datetime | None

    @property
    def has_tries_left(self) -> bool:
        """Whether a failure is followed by another try."""
        return self.try_number < self.tries_max

    def retry_at(self, now: datetime) -> datetime:
        """Return when the next try is due, this one having failed now."""
        wait_s = retry_wait_s(
            max(self.try_number - (self.tries_max - self.retries - 1), 1),  # a clear restarts the delays
            delay_s=self.retry_delay_s,
            is_exponential=self.retry_exponential_backoff,
            delay_max_s=self.max_retry_delay_s,
        )
        return now + timedelta(seconds=wait_s)


LOCKED = tuple(_C[name] for name in LockedTask.__struct_fields__)


def locked_task(tx: Tx, row: tuple[Any, ...]) -> LockedTask:
    """Return a row of the columns `LOCKED`, as the driver returned it."""
    fields = dict(zip(LockedTask.__struct_fields__, row, strict=True))
    fields["state"] = TaskState(fields["state"])
    for name in ("retry_exponential_backoff", "is_endless"):
        fields[name] = bool(fields[name])
    for name in ("deadline", "started_at"):
        if fields[name] is not None:
            fields[name] = read(tx.connection, fields[name])
    return LockedTask(**fields)


def _locking(condition: ColumnElement[bool]) -> Prepared:
    return Prepared(select(*LOCKED).where(condition).with_for_update(key_share=True))


def skip_locked(statement: Statement) -> Statement:
    """Make a statement lock the tasks it finds, and skip those that another transaction has locked."""
    return statement.with_for_update(skip_locked=True, key_share=True, of=task_instance)


_LOCK = _locking(_C.id == bindparam("of_id"))
_LOCK_UNLESS_BUSY = Prepared(skip_locked(select(*LOCKED).where(_C.id == bindparam("of_id"))))
_LOCK_OF_TRIGGER = _locking(_C.trigger_id == bindparam("of_trigger"))


def locked(
    tx: Tx, instance: TaskInstanceId, *, token: str | None = None, state: TaskState | None = None
) -> LockedTask | None:
    """Lock a task and return it; None if there is no such task, or its token or its state is not the one given."""
    row = _LOCK.run(tx.connection, of_id=instance).fetchone()
    if row is None:
        return None
    task = locked_task(tx, row)
    if token is not None and task.token != token:
        return None
    return task if state is None or task.state is state else None


def locked_unless_busy(tx: Tx, instance: TaskInstanceId) -> LockedTask | None:
    """Lock a task and return it; None if another transaction has it locked."""
    row = _LOCK_UNLESS_BUSY.run(tx.connection, of_id=instance).fetchone()
    return None if row is None else locked_task(tx, row)


def locked_of(tx: Tx, instances: Sequence[TaskInstanceId]) -> dict[TaskInstanceId, LockedTask]:
    """Lock tasks and return them by id, without those that another transaction has locked."""
    found: dict[TaskInstanceId, LockedTask] = {}
    for some in chunks(instances):
        rows = tx.connection.execute(skip_locked(select(*LOCKED).where(_C.id.in_(some)).order_by(_C.id)))
        for row in rows.mappings():
            fields: dict[str, Any] = {**row, "state": TaskState(row["state"])}
            found[fields["id"]] = LockedTask(**fields)
    return found


def lock_fresh(tx: Tx, instances: Iterable[TaskInstanceId]) -> set[TaskInstanceId]:
    """Lock those of these tasks that are in ``none`` and not locked by another transaction; return their ids."""
    found: set[TaskInstanceId] = set()
    for some in chunks(sorted(instances)):
        statement = select(_C.id).where(_C.id.in_(some), is_in(TaskState.NONE)).order_by(_C.id)
        found.update(tx.connection.execute(skip_locked(statement)).scalars())
    return found


def locked_by_trigger(tx: Tx, trigger_id: int) -> LockedTask | None:
    """Lock the task that waits for this trigger and return it; None if no task does."""
    row = _LOCK_OF_TRIGGER.run(tx.connection, of_trigger=trigger_id).fetchone()
    return None if row is None else locked_task(tx, row)


# --- the statements ------------------------------------------------------------------------------


def is_in(*some: TaskState) -> ColumnElement[bool]:
    """Return the condition that a task is in one of these states.

    It has literals in place of parameters, because a partial index serves only a statement with the same text.
    """
    return or_(*(_C.state == literal_column(f"'{state.value}'") for state in some))


def unmapped_of(run: Any) -> ColumnElement[bool]:
    """Return the condition that a row is of this run and of a task itself: only then its task_id is unique in the run.

    ``run`` is the id of the run, or an expression for it.
    """
    return own_of(task_instance, run)


def own_of(table: FromClause, run: Any) -> ColumnElement[bool]:
    """Return the same condition for an alias of the table."""
    return and_(table.c.dag_run_id == run, table.c.map_index == literal_column("-1"))


def effects(row: Transition) -> dict[str, Any]:
    """Return the columns that a transition sets whatever its caller sets besides."""
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
        of_try = ("ended_at", "started_at", "deadline", "last_error", "map_name")
        values |= dict.fromkeys((*of_try, "map_length"), null())
        values["given_digest"] = case((_C.map_index >= literal_column("0"), _C.given_digest))  # of a task itself: null
    if row.from_ & OCCUPYING and row.by == "user" and row.to not in OCCUPYING:
        # Its worker is there until it has been ended: `let_go`.
        has_worker = _C.triggerer_id.is_not(None)
        values["old_token"] = case((has_worker, _C.token), else_=_C.old_token)
        values["old_owner_id"] = func.coalesce(_C.triggerer_id, _C.old_owner_id)
    if row.event == "cleared":
        values |= {"tries_max": _C.try_number + 1 + _C.retries, "moves": 0, "begins_at": null()}
    if row.to is TaskState.SCHEDULED:
        if row.event != "returned":  # that has waited for a worker all the time
            values["scheduled_at"] = bindparam("now")
        if row.event in ("scheduled", "retry_due"):
            values |= {"try_number": _C.try_number + 1, "started_at": null(), "deadline": null()}
        elif row.event == "moved":
            values["started_at"] = null()
        elif row.event == "returned":
            # A try that had begun before it was resumed goes on with its times.
            values |= {name: case((_C.next_method.is_not(None), _C[name])) for name in ("started_at", "deadline")}
    elif row.to is TaskState.RUNNING:
        values |= {"old_token": null(), "old_owner_id": null()}
        values["started_at"] = func.coalesce(_C.started_at, bindparam("now"))
    return values


@cache
def _change(row: Transition, columns: tuple[str, ...], by: tuple[str, ...]) -> Prepared:
    where = [_C[name] == bindparam(f"of_{name}") for name in by]
    values = effects(row) | {name: bindparam(f"to_{name}", type_=_C[name].type) for name in columns}
    statement = update(task_instance).where(and_(*where), is_in(*sorted(row.from_))).values(values)
    return Prepared(statement.returning(_C.dag_run_id))


def changed(tx: Tx, row: Transition, by: dict[str, Any], **values: Any) -> bool:
    """Move the task identified by the columns ``by``, if it is in an old state of ``row``; return whether it was.

    ``values`` are further columns to set, in the form that the driver takes.
    """
    (won,) = changed_each(tx, row, [by], [values])
    return won


def changed_each(tx: Tx, row: Transition, by: Sequence[dict[str, Any]], values: Sequence[dict[str, Any]]) -> list[bool]:
    """Do what `changed` does for each of several tasks, with the same columns; return of each whether it was moved."""
    if not by:
        return []
    statement = _change(row, tuple(values[0]), tuple(by[0]))
    now = bound(tx.connection, tx.now)
    parameters = [
        {"now": now}
        | {f"of_{name}": value for name, value in of_one.items()}
        | {f"to_{name}": value for name, value in to.items()}
        for of_one, to in zip(by, values, strict=True)
    ]
    results = statement.run_each(tx.connection, parameters)
    if row.to in _SEEN_BY_RUN:
        for ((dag_run,),) in filter(None, results):
            tx.mark_run_dirty(dag_run)
    return [bool(result) for result in results]


@cache
def _change_all(row: Transition, columns: tuple[str, ...]) -> Update:
    ids: BindParameter[Sequence[int]] = bindparam("ids", expanding=True)
    values = effects(row) | {name: bindparam(f"to_{name}", type_=_C[name].type) for name in columns}
    return update(task_instance).where(_C.id.in_(ids), is_in(*sorted(row.from_))).values(values)


def change_all(tx: Tx, row: Transition, ids: Sequence[TaskInstanceId], **values: Any) -> None:
    """Move locked tasks that are in an old state of ``row``. It marks no run: the caller sees to that.

    ``values`` are further columns to set.
    """
    statement = _change_all(row, tuple(values))
    parameters = {"now": tx.now} | {f"to_{name}": value for name, value in values.items()}
    for some in chunks(ids):
        won = tx.connection.execute(statement, {"ids": some, **parameters}).rowcount
        assert won == len(some), "the rows are locked"


def apply(tx: Tx, task: LockedTask, event: str, **values: Any) -> TaskState:
    """Move a locked task; return its new state. Raises `IllegalTransition` without changing anything."""
    row = states.move(event, task.state)
    won = changed(tx, row, {"id": task.id}, **values)
    assert won, "the row was locked"
    return row.to


# The worker that had a task when a user, or a signal, ended it is gone, or the lease is over under which that ran.
IS_LEFT_ALONE = or_(
    _C.old_owner_id.is_(None),
    ~exists(ONE).where(
        triggerer.c.id == _C.old_owner_id, triggerer.c.fenced_at.is_(None), triggerer.c.stopped_at.is_(None)
    ),
)
_LET_GO = Prepared(
    update(task_instance)
    .where(_C.id == bindparam("of_id"), _C.old_token == bindparam("of_token"))
    .values(old_token=null(), old_owner_id=null())
)


def let_go(tx: Tx, instance: TaskInstanceId, token: str) -> None:
    """Record that the worker is gone that had a task when a user, or a signal, ended it: another may have it now."""
    if _LET_GO.run(tx.connection, of_id=instance, of_token=token).rowcount:
        tx.notify()


def fail(tx: Tx, task: LockedTask, event: str, retry_event: str, error: str, **values: Any) -> TaskState:
    """Move a locked task whose try has failed: to ``up_for_retry`` if it has tries left, else to its end.

    ``values`` are further columns to set.
    """
    values["last_error"] = storable_text(error, ERROR_CHARS_MAX)
    if not task.has_tries_left:
        return apply(tx, task, event, **values)
    values["retry_at"] = bound(tx.connection, task.retry_at(tx.now))
    return apply(tx, task, retry_event, **values)


def trigger_timeout(tx: Tx, since: datetime, timeout_s: float | None, deadline: datetime | None) -> Any:
    """Return when a wait for a trigger is over, in the driver's form, or None: it lasts ``timeout_s`` after ``since``.

    ``deadline`` is the end of the try, and so of the wait.
    """
    limits = [] if timeout_s is None else [since + timedelta(seconds=timeout_s)]
    limits += [] if deadline is None else [deadline]
    return bound(tx.connection, min(limits)) if limits else None


# --- the row of its trigger ----------------------------------------------------------------------

_INSERT = Prepared(
    insert(trigger)
    .values({name: bindparam(name) for name in ("classpath", "kwargs", "created_date", "queue", "priority")})
    .returning(trigger.c.id)
)
_OPEN = and_(trigger.c.id == bindparam("of_id"), OPEN_TRIGGER)
_FINISH = Prepared(update(trigger).where(_OPEN).values(finished_at=bindparam("now")))
_REMOVE = Prepared(update(trigger).where(_OPEN).values(removed_at=bindparam("now")))


def insert_trigger(tx: Tx, task: LockedTask, classpath: str, kwargs: bytes, *, queue: str | None = None) -> TriggerId:
    """Make the trigger that a task is to wait for; ``kwargs`` are encoded, in clear. Its queue is that of the task."""
    row = _INSERT.run(
        tx.connection,
        classpath=classpath,
        kwargs=tx.encrypt(kwargs),
        created_date=bound(tx.connection, tx.now),
        queue=queue
        or task.queue,  # supervisors that serve the task's queue can run its trigger, and the task afterwards
        priority=task.priority_weight,
    ).fetchone()
    return TriggerId(row[0])


def finish_trigger(tx: Tx, trigger_id: int) -> bool:
    """Record that no task waits for this trigger any more; return whether it was open.

    It keeps its owner, whose runner may still run it.
    """
    return _FINISH.run(tx.connection, of_id=trigger_id, now=bound(tx.connection, tx.now)).rowcount > 0


def remove_trigger(tx: Tx, trigger_id: int) -> bool:
    """Record that a user ended the work of this trigger: its runner cancels it, and calls its on_kill() (I14).

    Return whether it was open.
    """
    return _REMOVE.run(tx.connection, of_id=trigger_id, now=bound(tx.connection, tx.now)).rowcount > 0
