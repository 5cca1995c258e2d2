"""Dispatch: scheduled tasks are given to workers, by priority and as their pools have free slots.

Several supervisors may dispatch at once on PostgreSQL, and none waits for another: the one that has locked a pool
counts its free slots and uses them; the others skip that pool, and say so in their result. A task whose row is locked,
because a user is clearing it at this moment, is skipped as well. So no pool ever has more slots in use than it has.

Tasks may be given to workers that run others (`headgate.scheduling.bundles`). They are ``running`` like these, because
the database cannot say which of them has begun, and they use slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Integer, and_, bindparam, case, exists, func, literal_column, or_, select

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import OwnValue
from headgate.protocol.messages.task_streams import StreamPart
from headgate.scheduling import states
from headgate.scheduling.bundles import Places, StepKind
from headgate.store.db.faults import blaming
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound, read
from headgate.store.db.transaction import LeasedTx, Tx, wait_for_inflight
from headgate.store.db.verbs import leased, writing
from headgate.store.errors import BadKey
from headgate.store.ids import DagRowId, DagRunId, Epoch, TaskInstanceId, TriggerId, TryName
from headgate.store.tables import dag, dag_run, emitter, pool, task_instance, task_stream, trigger_event
from headgate.store.tasks import deferral, outcomes, stream_steps, task_rows, values
from headgate.store.tasks.graphs import GraphVerbs, ReadableOnly
from headgate.store.tasks.run_states import HELD
from headgate.store.triggers import assets
from headgate.store.triggers.assets import RunEvent

_C = task_instance.c
RETRIES_MAX = 500  # tasks of one transaction: some tens of milliseconds


class TaskToRun(msgspec.Struct, frozen=True):
    """One task that a worker is to run now: everything it needs, in clear.

    ``next_method`` is None if the task runs from the beginning. ``event`` is the payload of the event that resumes it.
    ``next_kwargs`` is None if there are none, or if no key decrypts them; then ``error`` says so. ``deadline`` is the
    end of its execution_timeout, and ``remaining_s`` the time left until then by the database's clock. ``file`` is the
    path of the DAG's file, ``conf`` the run's, encoded. ``asset_events`` are those for which the run was created, in
    the order they were stored, without those that newer ones superseded. ``stream`` is the part of its stream that the
    step gets, and ``stream_trigger`` its trigger. ``map_index`` is -1 unless it is mapped, ``map_length`` the number of
    its values, None if more may come, ``given_digest`` says which of them stood in the file, and ``own`` is the one at
    its index, if it is known here. ``emitted`` are of earlier steps. ``is_endless``: its worker is beside the pool.
    """

    id: TaskInstanceId
    token: str
    dag_run_id: DagRunId
    dag: str
    run_id: str
    task_id: str
    run_created_at: datetime
    try_number: int
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
    stream: StreamPart | None = None
    stream_trigger: TriggerId | None = None
    map_index: int = -1
    emitted: int = 0
    map_length: int | None = None
    given_digest: str = ""
    is_endless: bool = False
    is_of_signals: bool = False  # its run is
    own: OwnValue | None = None
    ready_at: datetime | None = None  # since when it has waited for a worker

    @property
    def kind(self) -> StepKind:
        """Which steps take as long as this one."""
        return StepKind(self.dag, self.task_id, self.next_method is not None)

    @property
    def name(self) -> TryName:
        """The name of the try."""
        return TryName(self.dag, self.run_id, self.task_id, self.try_number, self.map_index)


class Dispatched(msgspec.Struct, frozen=True):
    """The tasks that this epoch owns now; ``endless_in_s`` is when another one may begin that was moved.

    ``passed_over`` are pools that another supervisor had locked; dispatch again for these. ``has_more``: dispatch again
    at once, because tasks stood before others of which as many are running now as may.
    """

    tasks: list[TaskToRun]
    passed_over: tuple[str, ...]
    has_more: bool = False
    endless_in_s: float | None = None


class Candidate(msgspec.Struct, frozen=True):
    """The columns of a scheduled task that decide whether it gets slots of its pool."""

    id: TaskInstanceId
    pool: str
    pool_slots: int
    is_resumed: bool
    priority_weight: int
    dag_run_id: DagRunId
    task_id: str
    active_room: int | None  # how many more of its task's instances may be with workers in this run; None: any number
    dag: str = ""
    has_tries_left: bool = False
    is_endless: bool = False  # it needs a worker beside the pool

    @property
    def kind(self) -> StepKind:
        """Which steps take as long as its next one."""
        return StepKind(self.dag, self.task_id, self.is_resumed)


class DispatchVerbs(GraphVerbs):
    """The verbs by which tasks come to workers."""

    @leased
    def retry_due(self, tx: LeasedTx, *, limit: int = RETRIES_MAX) -> list[TaskInstanceId]:
        """Begin the next try of up to ``limit`` tasks whose retry delay is over, by the database's clock; return them.

        XComs of the earlier try are deleted. A task that begins in its trigger is deferred at once. Tasks of DAGs that
        are paused, gone, or unreadable for this version wait. Raises `ItemFailed` for one that cannot begin.
        """
        run = partial(_RETRY_DUE.run, tx, self.graphs.unreadable(tx), now=bound(tx.connection, tx.now))
        rows = tx.passed_over.read("task", limit, run)
        due = [task for task in map(_DueTask._make, rows) if self.graphs.is_readable(tx, task.dag_row, task.spec_hash)]
        for task in due:
            with blaming("task", task.id):
                outcomes.begin_next_try(tx, task.id)
                start = self.graphs.get(tx, task.dag_row, task.spec_hash).start_triggers.get(task.task_id)
                if start is not None:
                    deferral.start_in_trigger(tx, task.id, start)
        if due:
            tx.notify()
        return [task.id for task in due]

    @leased
    def dispatch(
        self, tx: LeasedTx, *, limit: int, queues: Sequence[str], places: Places | None = None, endless: int = 0
    ) -> Dispatched:
        """Give up to ``limit`` scheduled tasks of these queues to workers, as priorities, pools and ``places`` allow.

        They are ``running`` from now on, with a new token each. If ``places`` is None, there is one for each. Beside
        these up to ``endless`` endless tasks get workers.
        """
        names, has_endless = _pool_names(tx)
        endless = endless if has_endless else 0
        if not (limit or endless):
            return Dispatched([], ())
        slots, free, passed_over = _lock_pools(tx, names)
        now, candidates = bound(tx.connection, tx.now), list[Candidate]()
        for name in [name for name, count in free.items() if count > 0]:
            for queue in dict.fromkeys(queues):
                of = {"of_pool": name, "of_queue": queue, "slots": slots[name], "now": now}
                rows = list(_CANDIDATES.run(tx.connection, **of, limit=limit).fetchall()) if limit else []
                if endless:
                    rows += _ENDLESS.run(tx.connection, **of, limit=endless).fetchall()
                candidates += [Candidate(*row) for row in rows]
        chosen, has_more = fit(candidates, slots, free, limit, places, endless)
        return Dispatched(self._give(tx, chosen), passed_over, has_more, _endless_in_s(tx) if endless else None)

    @writing  # it writes nothing, but its lock is a writer's
    def owned_running(self, tx: Tx, epoch: Epoch) -> list[TaskToRun]:
        """Return the tasks that this epoch's workers should be running, including those of a `dispatch` in doubt.

        No dispatch that was begun before can add to them: one that is still being committed is waited for.
        """
        wait_for_inflight(tx.connection, epoch)
        of_epoch = select(_C.id, _C.token, _C.deadline).where(_C.triggerer_id == epoch)
        running = tx.connection.execute(of_epoch.where(task_rows.is_in(TaskState.RUNNING)).order_by(_C.id)).all()
        rows = self._read_tasks(tx, [row.id for row in running])
        return [_to_run(tx, id_, token, ends, row) for (id_, token, ends), row in zip(running, rows, strict=True)]

    def _give(self, tx: LeasedTx, chosen: Sequence[TaskInstanceId]) -> list[TaskToRun]:
        each = zip(chosen, self._read_tasks(tx, chosen), strict=True)
        tasks = [_to_run(tx, id_, task_rows.new_token(), _deadline(tx, row), row) for id_, row in each]
        columns = [
            {
                "token": task.token,
                "triggerer_id": tx.epoch,
                "deadline": None if task.deadline is None else bound(tx.connection, task.deadline),
                "given_digest": task.given_digest or None,
            }
            for task in tasks
        ]
        (picked_up,) = states.of("picked_up")
        won = task_rows.changed_each(tx, picked_up, [{"id": instance} for instance in chosen], columns)
        assert all(won), "their rows are locked"
        return tasks

    def _read_tasks(self, tx: Tx, ids: Sequence[TaskInstanceId]) -> list[_ToRun]:
        rows = _TO_RUN.run_each(tx.connection, [{"of_id": instance} for instance in ids])
        known = values.OwnValues(tx)
        return [self._with_values(tx, _ToRun(*row), known) for (row,) in rows]

    def _with_values(self, tx: Tx, row: _ToRun, known: values.OwnValues) -> _ToRun:
        """Add what is known without a worker of the values over which a task is expanded.

        If a user has cleared an instance alone since, those that stand in the file now are taken as those for it.
        """
        if row.map_index < 0 or not self.graphs.is_readable(tx, row.dag_row, row.spec_hash):
            return row
        graph = self.graphs.get(tx, row.dag_row, row.spec_hash)
        task = graph.tasks.get(row.task_id)
        if task is None or task.map is None:
            return row
        own = known.of(row.dag_run_id, row.map_index, row.map_length, task, graph.maps)
        return row._replace(own=own, given_digest=row.given_digest or task.map.given_digest)


class _DueTask(NamedTuple):
    """The columns of `_RETRY_DUE`."""

    id: TaskInstanceId
    task_id: str
    dag_row: DagRowId
    spec_hash: str


_RETRY_DUE = ReadableOnly(
    lambda readable: task_rows.skip_locked(
        select(_C.id, _C.task_id, dag.c.id, dag.c.spec_hash)
        .select_from(task_instance.join(dag_run).join(dag))
        .where(task_rows.is_in(TaskState.UP_FOR_RETRY), _C.retry_at <= bindparam("now", type_=UtcDateTime()), readable)
        .where(dag.c.is_paused.is_(False), dag.c.removed_at.is_(None))
        .order_by(_C.retry_at, _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
)


# --- pools ---------------------------------------------------------------------------------------


_POOLS = Prepared(
    select(pool.c.name, pool.c.slots).order_by(pool.c.name).with_for_update(skip_locked=True, key_share=True)
)
# As text, because a partial index serves only a statement with the same condition.
_WAITS_ENDLESS = and_(task_rows.is_in(TaskState.SCHEDULED), literal_column("task_instance.is_endless"))
_POOL_NAMES = Prepared(select(pool.c.name, exists(select(_C.id).where(_WAITS_ENDLESS)).correlate(None)))
_BEGINS_NEXT = Prepared(
    select(func.min(_C.begins_at)).where(_WAITS_ENDLESS, _C.begins_at > bindparam("now", type_=UtcDateTime()))
)
# A task has an owner if and only if it occupies slots (a CHECK), and owners have an index; the table only grows.
_USED = Prepared(select(_C.pool, func.sum(_C.pool_slots)).where(_C.triggerer_id.is_not(None)).group_by(_C.pool))


def _pool_names(tx: Tx) -> tuple[set[str], bool]:
    """Return the names of the pools, and whether an endless task waits for a worker."""
    rows = _POOL_NAMES.run(tx.connection).fetchall()
    return {name for name, _ in rows}, any(waits for _, waits in rows)


def _endless_in_s(tx: Tx) -> float | None:
    """Return in how many seconds the next of the endless tasks may begin that were moved."""
    ((begins_at,),) = _BEGINS_NEXT.run(tx.connection, now=bound(tx.connection, tx.now)).fetchall()
    return None if begins_at is None else (read(tx.connection, begins_at) - tx.now).total_seconds()


def _lock_pools(tx: Tx, names: set[str]) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """Lock the pools that are not locked; return the slots of each, the free ones of each, and the pools skipped."""
    slots = {name: int(count) for name, count in _POOLS.run(tx.connection).fetchall()}
    # Counted with the locks held: dispatches of others, which held them before, are committed and visible.
    used = {name: int(count) for name, count in _USED.run(tx.connection).fetchall()}
    free = {name: count - used.get(name, 0) for name, count in slots.items()}
    return slots, free, tuple(sorted(names - slots.keys()))


def fit(
    candidates: Sequence[Candidate],
    slots: dict[str, int],
    free: dict[str, int],
    limit: int,
    places: Places | None = None,
    endless: int = 0,
) -> tuple[list[TaskInstanceId], bool]:
    """Return the ids of those that get a worker, most urgent first: resumed tasks, then by priority, then by id.

    Up to ``limit`` get one of the pool, and up to ``endless`` one beside it. A task that needs more slots than are free
    blocks less urgent ones of its pool, because it would starve otherwise. One that needs more slots than the pool has
    blocks none, and neither does one of a mapped task of which as many run as may. Whether there was such a one is
    returned as well: others may stand behind it that were not read. One for which there is no place blocks all that
    need one: a worker that always gets short ones would never be free for it.
    """
    left, blocked, chosen, has_full = dict(free), set[str](), list[TaskInstanceId](), False
    active: Counter[tuple[DagRunId, str]] = Counter()
    room = {False: limit, True: endless}
    for task in sorted(candidates, key=lambda task: (not task.is_resumed, -task.priority_weight, task.id)):
        if not room[task.is_endless] or task.pool in blocked or task.pool_slots > slots[task.pool]:
            continue
        of_task = task.dag_run_id, task.task_id
        if task.active_room is not None and active[of_task] >= task.active_room:
            has_full = True
            continue
        if task.pool_slots > left[task.pool]:
            blocked.add(task.pool)
            continue
        if places is not None and not task.is_endless:
            if not places.take(task.kind, has_tries_left=bool(task.has_tries_left)):
                room[False], has_full = 0, False
                continue
        room[task.is_endless] -= 1
        left[task.pool] -= task.pool_slots
        active[of_task] += 1
        chosen.append(task.id)
    return chosen, has_full and room[False] > 0


# --- to a worker ---------------------------------------------------------------------------------


_IS_RESUMED = _C.next_method.is_not(None)
# A subquery, and no join, which could be begun with the DAGs: then all scheduled tasks would be read, and sorted.
_IS_ACTIVE = (
    select(and_(dag.c.is_paused.is_(False), dag.c.removed_at.is_(None)))
    .select_from(dag_run.join(dag))
    .where(dag_run.c.id == _C.dag_run_id)
    .correlate(task_instance)
    .scalar_subquery()
)
_OF_DAG = (
    select(dag.c.name)
    .select_from(dag_run.join(dag))
    .where(dag_run.c.id == _C.dag_run_id)
    .correlate(task_instance)
    .scalar_subquery()
)
# How many more instances of the same task may be with workers. Those that are have an owner, which has an index.
_active = task_instance.alias("active")
_ACTIVE_ROOM = _C.active_max - (
    select(func.count())
    .where(_active.c.triggerer_id.is_not(None))
    .where(_active.c.dag_run_id == _C.dag_run_id, _active.c.task_id == _C.task_id)
    .correlate(task_instance)
    .scalar_subquery()
)
_MAY_BEGIN = or_(_C.begins_at.is_(None), _C.begins_at <= bindparam("now", type_=UtcDateTime()))
_ACTIVE_ROOM_IF_LIMITED = case((_C.active_max.is_not(None), _ACTIVE_ROOM))


def _candidates(kind: str, *which: ColumnElement[bool]) -> Prepared:
    """Return the statement for the most urgent tasks of one pool and one queue; their index has them in this order."""
    statement = (
        select(
            *(_C.id, _C.pool, _C.pool_slots, _IS_RESUMED, _C.priority_weight),
            *(_C.dag_run_id, _C.task_id, _ACTIVE_ROOM_IF_LIMITED, _OF_DAG, _C.try_number < _C.tries_max),
            literal_column(kind),
        )
        .where(
            *which,
            _C.pool == bindparam("of_pool"),
            _C.queue == bindparam("of_queue"),
            _C.pool_slots <= bindparam("slots"),
            *(_MAY_BEGIN, _IS_ACTIVE, task_rows.IS_LEFT_ALONE),
            or_(_C.active_max.is_(None), _ACTIVE_ROOM_IF_LIMITED > 0),
        )
        .order_by(_IS_RESUMED.desc(), _C.priority_weight.desc(), _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
    return Prepared(task_rows.skip_locked(statement))


_CANDIDATES = _candidates("0", task_rows.is_in(TaskState.SCHEDULED), literal_column("NOT task_instance.is_endless"))
_ENDLESS = _candidates("1", _WAITS_ENDLESS)


class _ToRun(NamedTuple):
    """The columns of `_TO_RUN`, as the driver returns them."""

    dag_run_id: DagRunId
    dag: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int
    next_method: str | None
    next_kwargs: str | None
    event: bytes | None
    deadline: Any
    execution_timeout_s: float | None
    file: str
    run_type: str
    run_created_at: Any
    logical_date: Any
    conf: bytes | None
    interval_start: Any
    interval_end: Any
    event_id: int | None
    stream_trigger: TriggerId | None
    emitted: int | None
    map_length: int | None
    given_digest: str | None
    is_endless: bool
    dag_row: DagRowId
    spec_hash: str
    scheduled_at: Any
    own: OwnValue | None = None  # looked for when all of these are known


_own = task_instance.alias("own")
_GIVEN = func.coalesce(_C.given_digest, _own.c.given_digest)  # "" of an instance that a user has cleared alone
_TO_RUN = Prepared(
    select(
        *(_C.dag_run_id, dag.c.name, dag_run.c.run_id, _C.task_id, _C.map_index, _C.try_number),
        *(_C.next_method, _C.next_kwargs, trigger_event.c.payload, _C.deadline, _C.execution_timeout_s),
        *(dag.c.file, dag_run.c.run_type, dag_run.c.created_date, dag_run.c.logical_date, dag_run.c.conf),
        *(dag_run.c.data_interval_start, dag_run.c.data_interval_end, _C.event_id, task_stream.c.trigger_id),
        *(
            emitter.c.place,
            _own.c.map_length,
            _GIVEN,
            _C.is_endless,
            dag.c.id,
            dag.c.spec_hash,
            _C.scheduled_at,
        ),
    )
    .select_from(
        task_instance.join(dag_run)
        .join(dag)
        .outerjoin(trigger_event, trigger_event.c.id == _C.event_id)
        .outerjoin(task_stream, task_stream.c.task_instance_id == _C.id)
        .outerjoin(emitter, emitter.c.task_instance_id == _C.id)
        .outerjoin(_own, and_(task_rows.own_of(_own, _C.dag_run_id), _own.c.task_id == _C.task_id))
    )
    .where(_C.id == bindparam("of_id"))
)


def _deadline(tx: Tx, row: _ToRun) -> datetime | None:
    """Return the end of the try: set when it begins, and kept over its deferrals."""
    if row.deadline is not None:
        return read(tx.connection, row.deadline)
    return None if row.execution_timeout_s is None else tx.now + timedelta(seconds=row.execution_timeout_s)


def _to_run(tx: Tx, instance: TaskInstanceId, token: str, deadline: datetime | None, row: _ToRun) -> TaskToRun:
    next_kwargs, stream, error = None, None, ""
    try:
        if row.next_kwargs is not None:
            next_kwargs = tx.decrypt(row.next_kwargs)
        if row.stream_trigger is not None:
            stream = stream_steps.part_of(tx, instance, row.next_method, row.event_id)
    except BadKey as bad:
        error = str(bad)
    return TaskToRun(
        id=instance,
        token=token,
        dag_run_id=row.dag_run_id,
        dag=row.dag,
        run_id=row.run_id,
        task_id=row.task_id,
        run_created_at=read(tx.connection, row.run_created_at),
        try_number=row.try_number,
        next_method=row.next_method,
        next_kwargs=next_kwargs,
        event=None if row.event is None else bytes(row.event),
        deadline=deadline,
        error=error,
        file=row.file,
        logical_date=None if row.logical_date is None else read(tx.connection, row.logical_date),
        data_interval=_interval(tx, row.interval_start, row.interval_end),
        conf=None if row.conf is None else bytes(row.conf),
        asset_events=assets.events_of_run(tx, row.dag_run_id) if row.run_type == "asset" else (),
        remaining_s=None if deadline is None else (deadline - tx.now).total_seconds(),
        stream=stream,
        stream_trigger=row.stream_trigger,
        map_index=row.map_index,
        emitted=row.emitted or 0,
        map_length=None if row.map_length == HELD else row.map_length,
        given_digest=row.given_digest or "",
        is_endless=bool(row.is_endless),
        is_of_signals=row.run_type == "signal",
        own=row.own,
        ready_at=None if row.scheduled_at is None else read(tx.connection, row.scheduled_at),
    )


def _interval(tx: Tx, start: Any, end: Any) -> tuple[datetime, datetime] | None:
    return None if start is None or end is None else (read(tx.connection, start), read(tx.connection, end))
