"""The facts that `headgate.scheduling.why` explains, read in one transaction.

On PostgreSQL a transaction of several statements sees commits of others in between. That does no harm here, because the
answer then describes the new state.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import and_, func, or_, select

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.why import Pool, RunState, StoredEvent, Supervisor, SupervisorState, TaskFacts, TriggerFacts
from headgate.store.db.transaction import Tx, is_alive
from headgate.store.errors import NoSuchRow, SpecUnreadable
from headgate.store.inspect import runs
from headgate.store.inspect.dags import RUN_STATE
from headgate.store.inspect.runs import TaskRef
from headgate.store.tables import (
    asset_watcher,
    dag,
    dag_run,
    import_error,
    pool,
    redelivery,
    task_instance,
    trigger,
    trigger_event,
    triggerer,
)
from headgate.store.tasks import task_rows

_C = task_instance.c
SUPERVISORS_MAX = 1000  # the newest
HOLDERS_MAX = 20  # of a pool
OTHER_RUNS_MAX = 1000
_OPEN = and_(trigger.c.finished_at.is_(None), trigger.c.removed_at.is_(None))


# --- supervisors ---------------------------------------------------------------------------------


def supervisors(tx: Tx, *, silence_max_s: float) -> list[Supervisor]:
    """Return those that neither ended nor were fenced, newest first."""
    rows = tx.connection.execute(
        select(triggerer).where(is_alive()).order_by(triggerer.c.id.desc()).limit(SUPERVISORS_MAX)
    )
    return [_supervisor(tx, row, silence_max_s) for row in rows.all()]


def supervisor(tx: Tx, epoch: int | None, *, silence_max_s: float) -> Supervisor | None:
    """Return the supervisor of an epoch; None if there is none."""
    if epoch is None:
        return None
    row = tx.connection.execute(select(triggerer).where(triggerer.c.id == epoch)).first()
    return None if row is None else _supervisor(tx, row, silence_max_s)


def _supervisor(tx: Tx, row: Any, silence_max_s: float) -> Supervisor:
    age_s = (tx.now - row.latest_heartbeat).total_seconds()
    state: SupervisorState = "alive" if age_s <= silence_max_s else "silent"
    if row.stopped_at is not None:
        state = "ended"
    elif row.fenced_at is not None:
        state = "fenced"
    triggers = select(func.count()).where(trigger.c.triggerer_id == row.id, _OPEN)
    tasks = select(func.count()).where(_C.triggerer_id == row.id)
    return Supervisor(
        epoch=row.id,
        hostname=row.hostname,
        pid=row.pid,
        state=state,
        heartbeat_age_s=max(age_s, 0.0),
        capacity=row.capacity,
        queues=tuple(queue for queue in row.queues.split(",") if queue),
        workers=row.workers,
        open_triggers=tx.connection.execute(triggers).scalar_one(),
        tasks=tx.connection.execute(tasks).scalar_one(),
    )


# --- triggers ------------------------------------------------------------------------------------


def trigger_facts(tx: Tx, trigger_id: int, *, silence_max_s: float) -> TriggerFacts:
    """Return the facts about a trigger. Raises `NoSuchRow`."""
    row = tx.connection.execute(
        select(trigger, asset_watcher.c.name.label("watcher"))
        .select_from(trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id))
        .where(trigger.c.id == trigger_id)
    ).first()
    if row is None:
        raise NoSuchRow("trigger", str(trigger_id))
    task = tx.connection.execute(
        select(dag.c.name, dag_run.c.run_id, _C.task_id)
        .select_from(task_instance.join(dag_run).join(dag))
        .where(_C.trigger_id == trigger_id)
    ).first()
    return TriggerFacts(
        id=row.id,
        classpath=row.classpath,
        queue=row.queue,
        age_s=_ago(tx.now, row.created_date) or 0.0,
        owner=supervisor(tx, row.triggerer_id, silence_max_s=silence_max_s),
        watcher=row.watcher,
        task=None if task is None else (task.name, task.run_id, task.task_id),
        failure_count=row.failure_count,
        last_error=row.last_error,
        last_failed_age_s=_ago(tx.now, row.last_failed_at),
        finished_age_s=_ago(tx.now, row.finished_at),
        removed_age_s=_ago(tx.now, row.removed_at),
        newest_event=_newest_event(tx, trigger_id),
    )


def _newest_event(tx: Tx, trigger_id: int) -> StoredEvent | None:
    row = tx.connection.execute(
        select(trigger_event.c.id, trigger_event.c.stored_at, redelivery.c.count.label("redelivered"))
        .select_from(trigger_event.outerjoin(redelivery))
        .where(trigger_event.c.trigger_id == trigger_id)
        .order_by(trigger_event.c.id.desc())
        .limit(1)
    ).first()
    return None if row is None else StoredEvent(row.id, _ago(tx.now, row.stored_at) or 0.0, row.redelivered or 0)


def _ago(now: datetime, then: datetime | None) -> float | None:
    return None if then is None else max((now - then).total_seconds(), 0.0)


def _until(now: datetime, then: datetime | None) -> float | None:
    return None if then is None else (then - now).total_seconds()


# --- tasks ---------------------------------------------------------------------------------------


def task_facts(tx: Tx, task: TaskRef, *, silence_max_s: float) -> TaskFacts:
    """Return the facts about a task."""
    row = tx.connection.execute(
        select(
            task_instance,
            *(dag.c.id.label("dag_id"), dag.c.spec, dag.c.is_paused, dag.c.max_active_runs, dag.c.removed_at),
            *(import_error.c.error.label("import_error"), RUN_STATE.label("run_state")),
        )
        .select_from(task_instance.join(dag_run).join(dag).outerjoin(import_error, import_error.c.file == dag.c.file))
        .where(_C.id == task.id)
    ).one()
    state = TaskState(row.state)
    spec, unreadable = None, None
    try:
        spec = runs.task_spec(task.dag, row.spec, task.task_id)
    except SpecUnreadable as error:
        unreadable = str(error)
    upstream = () if spec is None else spec.upstream
    states = runs.states_of(tx, task.dag_run_id, upstream)
    waits_for = None
    if row.trigger_id is not None:
        waits_for = trigger_facts(tx, row.trigger_id, silence_max_s=silence_max_s)
    return TaskFacts(
        dag=task.dag,
        run_id=task.run_id,
        task_id=task.task_id,
        state=state,
        pool=_pool(tx, row.pool),
        run_state=_run_state(row),
        try_number=row.try_number,
        tries_max=row.tries_max,
        since_s=_ago(tx.now, _since(row, state)) if waits_for is None else waits_for.age_s,
        is_paused=bool(row.is_paused),
        is_dag_removed=row.removed_at is not None,
        is_in_dag=spec is not None,
        unreadable=unreadable,
        import_error=row.import_error,
        max_active_runs=row.max_active_runs,
        other_runs=_other_runs(tx, row.dag_id, task.dag_run_id),
        trigger_rule="all_success" if spec is None else spec.trigger_rule,
        upstream=tuple((name, states.get(name, TaskState.NONE)) for name in upstream),
        queue=row.queue,
        pool_slots=row.pool_slots,
        ahead=_ahead(tx, row) if state is TaskState.SCHEDULED else 0,
        owner=supervisor(tx, row.triggerer_id, silence_max_s=silence_max_s),
        trigger=waits_for,
        next_method=row.next_method,
        retry_in_s=_until(tx.now, row.retry_at),
        timeout_in_s=_until(tx.now, row.trigger_timeout),
        deadline_in_s=_until(tx.now, row.deadline),
        last_error=row.last_error,
    )


def _run_state(row: Any) -> RunState:
    state: RunState = row.run_state
    return state


def _since(row: Any, state: TaskState) -> datetime | None:
    """Return the time at which the task entered its state; None if that is not recorded."""
    match state:
        case TaskState.SCHEDULED:
            since = row.scheduled_at
        case TaskState.RUNNING:
            since = row.started_at
        case TaskState.NONE | TaskState.RESTARTING | TaskState.UP_FOR_RETRY | TaskState.DEFERRED:
            since = None
        case _:
            since = row.ended_at
    found: datetime | None = since
    return found


def _other_runs(tx: Tx, dag_id: int, dag_run_id: int) -> tuple[str, ...]:
    active = select(dag_run.c.run_id).where(
        dag_run.c.dag_id == dag_id,
        dag_run.c.ended_at.is_(None),
        dag_run.c.started_at.is_not(None),
        dag_run.c.id != dag_run_id,
    )
    return tuple(tx.connection.execute(active.order_by(dag_run.c.id).limit(OTHER_RUNS_MAX)).scalars())


def _pool(tx: Tx, name: str) -> Pool:
    slots = tx.connection.execute(select(pool.c.slots).where(pool.c.name == name)).scalar_one_or_none()
    holds = and_(_C.pool == name, _C.triggerer_id.is_not(None))
    used = tx.connection.execute(select(func.coalesce(func.sum(_C.pool_slots), 0)).where(holds)).scalar_one()
    holders: Sequence[Any] = tx.connection.execute(
        select(dag.c.name, dag_run.c.run_id, _C.task_id, _C.pool_slots)
        .select_from(task_instance.join(dag_run).join(dag))
        .where(holds)
        .order_by(_C.pool_slots.desc(), _C.id)
        .limit(HOLDERS_MAX)
    ).all()
    return Pool(name, slots, int(used), tuple((row.name, row.run_id, row.task_id, row.pool_slots) for row in holders))


def _ahead(tx: Tx, row: Any) -> int:
    """Count the scheduled tasks of the pool that come first, as `headgate.store.tasks.dispatch.fit` orders them."""
    is_resumed = row.next_method is not None
    before_it = or_(
        _C.priority_weight > row.priority_weight, and_(_C.priority_weight == row.priority_weight, _C.id < row.id)
    )
    before = and_(_C.next_method.is_not(None), before_it) if is_resumed else or_(_C.next_method.is_not(None), before_it)
    statement = (
        select(func.count())
        .select_from(task_instance.join(dag_run).join(dag))
        .where(task_rows.is_in(TaskState.SCHEDULED), _C.pool == row.pool, dag.c.is_paused.is_(False), before)
    )
    return int(tx.connection.execute(statement.where(_C.id != row.id)).scalar_one())
