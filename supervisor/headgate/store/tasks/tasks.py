"""From ``none`` to a worker: what may run is scheduled, what is scheduled goes to workers by priority and pool.

Several supervisors dispatch at once on PostgreSQL, and none waits for another: whoever has locked a pool counts its
slots and gives them away, the others pass over that pool and hear that they did. A task whose row is locked, because a
user is clearing it this moment, is passed over as well. So no pool ever has more slots in use than it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Integer, TextClause, bindparam, false, func, or_, select, true

from headgate.protocol.messages.dags import POOL_SLOTS_MAX, TaskState
from headgate.scheduling import states
from headgate.store.db.bulk import insert_into
from headgate.store.db.prepared import Prepared
from headgate.store.db.secrets import Secrets
from headgate.store.db.times import UtcDateTime, bound, read
from headgate.store.errors import BadKey, ValueRefused
from headgate.store.ids import TaskInstanceId
from headgate.store.tables import asset, dag, dag_run, dag_run_event, pool, task_instance, trigger_event
from headgate.store.tasks import task_rows, task_values
from headgate.store.tasks.graphs import Graphs
from headgate.store.triggers.watchers import check_name

_C = task_instance.c


class RunEvent(msgspec.Struct, frozen=True):
    """One asset event that a run was made for; ``payload`` is encoded."""

    asset: str
    payload: bytes
    stored_at: datetime


class TaskToRun(msgspec.Struct, frozen=True):
    """One task that a worker is to run now, or soon: everything that it takes, in clear.

    ``next_method`` None: from the beginning. ``event`` is the payload of the event that resumes it. ``next_kwargs`` are
    None where there are none, or none that a key decrypts: then ``error`` says why. ``deadline`` is when its
    execution_timeout ends, ``remaining_s`` how far off that was, by the database's clock. ``file`` is the path of the
    DAG's file, ``conf`` the run's, encoded. ``asset_events`` are those that the run was made for, in the order they
    were stored, without those that newer ones superseded.
    """

    id: TaskInstanceId
    token: str
    dag_run_id: int
    dag: str
    run_id: str
    task_id: str
    try_number: int
    pool: str
    queue: str
    next_method: str | None
    next_kwargs: bytes | None
    event: bytes | None
    deadline: datetime | None
    error: str = ""
    file: str = ""
    logical_date: datetime | None = None
    data_interval: tuple[datetime, datetime] | None = None
    conf: bytes | None = None
    asset_events: tuple[RunEvent, ...] = ()
    remaining_s: float | None = None


class Dispatched(msgspec.Struct, frozen=True):
    """What a dispatch gave away. ``passed_over``: pools that another supervisor was busy with; ask again for these."""

    tasks: list[TaskToRun]
    passed_over: tuple[str, ...]


class Candidate(msgspec.Struct, frozen=True):
    """One scheduled task, as far as it takes to say whether it gets slots of its pool."""

    id: int
    pool: str
    pool_slots: int
    is_resumed: bool
    priority_weight: int


# --- up to scheduled -----------------------------------------------------------------------------


def _retry_due_among(among: TextClause | None) -> Prepared:
    return Prepared(
        task_rows.passing_over(
            select(_C.id, _C.task_id, dag.c.id, dag.c.spec_hash)
            .select_from(task_instance.join(dag_run).join(dag))
            .where(task_rows.is_in(TaskState.UP_FOR_RETRY), _C.retry_at <= bindparam("now", type_=UtcDateTime()))
            .where(true() if among is None else among)
            .order_by(_C.retry_at, _C.id)
            .limit(bindparam("limit", type_=Integer()))
        )
    )


_RETRY_DUE = _retry_due_among(None)


class Retried(msgspec.Struct, frozen=True):
    """A task whose next try begins; its row is locked until the transaction ends."""

    id: int
    task_id: str
    dag_id: int
    spec_hash: str


def retry_due(connection: Connection, now: datetime, graphs: Graphs, *, limit: int) -> list[Retried]:
    """Begin the next try of up to ``limit`` tasks whose retry delay is over, by the database's clock; return them.

    XComs of the earlier try are forgotten. Tasks of DAGs that cannot be read wait for whoever can.
    """
    (row,) = states.of("retry_due")
    among = graphs.readable(connection)
    due = _RETRY_DUE if among is None else _retry_due_among(among)
    found = [Retried(*row) for row in due.run(connection, now=bound(connection, now), limit=limit).fetchall()]
    retried = [task for task in found if graphs.is_readable(connection, task.dag_id, task.spec_hash)]
    for task in retried:
        task_rows.changed(connection, now, row, {"id": task.id})
        task_values.forget_xcoms(connection, task.id)
    return retried


# --- pools ---------------------------------------------------------------------------------------


def set_pool(connection: Connection, name: str, slots: int) -> None:
    """Make a pool, or change how many slots it has. Raises `BadName` and `ValueRefused`."""
    check_name(name, "the name of a pool")
    if not 0 <= slots <= POOL_SLOTS_MAX:
        raise ValueRefused(f"a pool has 0 to {POOL_SLOTS_MAX:,} slots, not {slots:,}")
    statement = insert_into(connection, pool).values(name=name, slots=slots)
    connection.execute(statement.on_conflict_do_update(index_elements=[pool.c.name], set_={"slots": slots}))


_POOLS = Prepared(
    select(pool.c.name, pool.c.slots).order_by(pool.c.name).with_for_update(skip_locked=True, key_share=True)
)
_POOL_NAMES = Prepared(select(pool.c.name))
# What has an owner is what occupies slots (a CHECK holds this), and there is an index of it; the table only grows.
_USED = Prepared(select(_C.pool, func.sum(_C.pool_slots)).where(_C.triggerer_id.is_not(None)).group_by(_C.pool))


def _lock_pools(connection: Connection) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """Lock what pools can be had; return the slots of each, the free ones of each, and the pools passed over."""
    names = {name for (name,) in _POOL_NAMES.run(connection).fetchall()}
    slots = {name: int(count) for name, count in _POOLS.run(connection).fetchall()}
    # Counted after the locks are had: what another dispatched before it let go of a pool is committed, and seen.
    used = {name: int(count) for name, count in _USED.run(connection).fetchall()}
    free = {name: count - used.get(name, 0) for name, count in slots.items()}
    return slots, free, tuple(sorted(names - slots.keys()))


def fit(candidates: Sequence[Candidate], slots: dict[str, int], free: dict[str, int], limit: int) -> list[int]:
    """Return the ids of those that get a worker, most urgent first: what is resumed, then by priority, then by id.

    A task that needs more slots than are free holds up what is less urgent in its pool, or it would never have its
    turn; one that needs more than there are in all holds up nothing.
    """
    left, blocked, chosen = dict(free), set[str](), list[int]()
    for task in sorted(candidates, key=lambda task: (not task.is_resumed, -task.priority_weight, task.id)):
        if len(chosen) == limit:
            break
        if task.pool in blocked or task.pool_slots > slots[task.pool]:
            continue
        if task.pool_slots > left[task.pool]:
            blocked.add(task.pool)
            continue
        left[task.pool] -= task.pool_slots
        chosen.append(task.id)
    return chosen


# --- to a worker ---------------------------------------------------------------------------------


@cache
def _candidates(queues: tuple[str, ...]) -> Prepared:
    resumed = _C.next_method.is_not(None)
    statement = (
        select(_C.id, _C.pool, _C.pool_slots, resumed, _C.priority_weight)
        .join(dag_run, dag_run.c.id == _C.dag_run_id)
        .join(dag, dag.c.id == dag_run.c.dag_id)
        .where(
            task_rows.is_in(TaskState.SCHEDULED),
            _C.pool == bindparam("of_pool"),
            _C.pool_slots <= bindparam("slots"),
            or_(false(), *(_C.queue == queue for queue in queues)),
            dag.c.is_paused.is_(False),
            dag.c.removed_at.is_(None),
        )
        .order_by(resumed.desc(), _C.priority_weight.desc(), _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
    return Prepared(task_rows.passing_over(statement))


class _ToRun(NamedTuple):
    """The columns of `_TO_RUN`, as the driver returns them."""

    dag_run_id: int
    dag: str
    run_id: str
    task_id: str
    try_number: int
    pool: str
    queue: str
    next_method: str | None
    next_kwargs: str | None
    event: bytes | None
    deadline: Any
    execution_timeout_s: float | None
    file: str
    run_type: str
    logical_date: Any
    conf: bytes | None
    interval_start: Any
    interval_end: Any


_TO_RUN = Prepared(
    select(
        *(_C.dag_run_id, dag.c.name, dag_run.c.run_id, _C.task_id, _C.try_number, _C.pool, _C.queue),
        *(_C.next_method, _C.next_kwargs, trigger_event.c.payload, _C.deadline, _C.execution_timeout_s),
        *(dag.c.file, dag_run.c.run_type, dag_run.c.logical_date, dag_run.c.conf),
        *(dag_run.c.data_interval_start, dag_run.c.data_interval_end),
    )
    .select_from(task_instance.join(dag_run).join(dag).outerjoin(trigger_event, trigger_event.c.id == _C.event_id))
    .where(_C.id == bindparam("of_id"))
)
_RUN_EVENTS = Prepared(
    select(asset.c.name, trigger_event.c.payload, trigger_event.c.stored_at)
    .select_from(dag_run_event.join(asset).join(trigger_event))
    .where(dag_run_event.c.dag_run_id == bindparam("of_run"), dag_run_event.c.is_superseded.is_(False))
    .order_by(trigger_event.c.id)
)


def dispatch(
    connection: Connection,
    now: datetime,
    secrets: Secrets,
    epoch: int,
    *,
    limit: int,
    queues: Sequence[str],
) -> Dispatched:
    """Give up to ``limit`` scheduled tasks of these queues to ``epoch``, which has an idle worker for each."""
    slots, free, passed_over = _lock_pools(connection)
    candidates: list[Candidate] = []
    for name, count in free.items():
        if count > 0:
            parameters = {"of_pool": name, "slots": slots[name], "limit": limit}
            rows = _candidates(tuple(queues)).run(connection, **parameters).fetchall()
            candidates += [Candidate(id_, of, needs, bool(resumed), weight) for id_, of, needs, resumed, weight in rows]
    chosen = fit(candidates, slots, free, limit)
    return Dispatched([_give(connection, now, secrets, epoch, task_id) for task_id in chosen], passed_over)


def _give(connection: Connection, now: datetime, secrets: Secrets, epoch: int, task_id: int) -> TaskToRun:
    row = _ToRun._make(_TO_RUN.run(connection, of_id=task_id).fetchone())
    deadline = _deadline(connection, now, row)
    token = task_rows.new_token()
    values: dict[str, Any] = {"token": token, "triggerer_id": epoch}
    values["deadline"] = None if deadline is None else bound(connection, deadline)
    (picked_up,) = states.of("picked_up")
    won = task_rows.changed(connection, now, picked_up, {"id": task_id}, **values)
    assert won, "its row is locked"
    return _to_run(connection, now, secrets, task_id, token, deadline, row)


_TAKEN = Prepared(
    select(_C.id, _C.token, _C.deadline)
    .where(_C.triggerer_id == bindparam("epoch"), task_rows.is_in(TaskState.RUNNING))
    .order_by(_C.id)
)


def taken(connection: Connection, now: datetime, secrets: Secrets, epoch: int) -> list[TaskToRun]:
    """Return the tasks that ``epoch`` should be running, also those of a dispatch whose answer was lost."""
    found = []
    for task_id, token, stored in _TAKEN.run(connection, epoch=epoch).fetchall():
        row = _ToRun._make(_TO_RUN.run(connection, of_id=task_id).fetchone())
        deadline = None if stored is None else read(connection, stored)
        found.append(_to_run(connection, now, secrets, task_id, token, deadline, row))
    return found


def _to_run(
    connection: Connection,
    now: datetime,
    secrets: Secrets,
    task_id: int,
    token: str,
    deadline: datetime | None,
    row: _ToRun,
) -> TaskToRun:
    next_kwargs, error = None, ""
    if row.next_kwargs is not None:
        try:
            next_kwargs = secrets.decrypt(row.next_kwargs)
        except BadKey as bad:
            error = str(bad)
    return TaskToRun(
        id=TaskInstanceId(task_id),
        token=token,
        dag_run_id=row.dag_run_id,
        dag=row.dag,
        run_id=row.run_id,
        task_id=row.task_id,
        try_number=row.try_number,
        pool=row.pool,
        queue=row.queue,
        next_method=row.next_method,
        next_kwargs=next_kwargs,
        event=None if row.event is None else bytes(row.event),
        deadline=deadline,
        error=error,
        file=row.file,
        logical_date=None if row.logical_date is None else read(connection, row.logical_date),
        data_interval=_interval(connection, row.interval_start, row.interval_end),
        conf=None if row.conf is None else bytes(row.conf),
        asset_events=_run_events(connection, row.dag_run_id) if row.run_type == "asset" else (),
        remaining_s=None if deadline is None else (deadline - now).total_seconds(),
    )


def _interval(connection: Connection, start: Any, end: Any) -> tuple[datetime, datetime] | None:
    return None if start is None or end is None else (read(connection, start), read(connection, end))


def _run_events(connection: Connection, dag_run_id: int) -> tuple[RunEvent, ...]:
    rows = _RUN_EVENTS.run(connection, of_run=dag_run_id).fetchall()
    return tuple(RunEvent(name, bytes(payload), read(connection, stored_at)) for name, payload, stored_at in rows)


def _deadline(connection: Connection, now: datetime, row: _ToRun) -> datetime | None:
    """Return the end of the try: set when it begins, and kept over its deferrals."""
    if row.deadline is not None:
        return read(connection, row.deadline)
    return None if row.execution_timeout_s is None else now + timedelta(seconds=row.execution_timeout_s)
