"""The facts that `headgate.scheduling.why` explains, read in one transaction.

On PostgreSQL a transaction of several statements sees commits of others in between. That does no harm here, because the
answer then describes the new state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, and_, false, func, not_, or_, select

from headgate.protocol.messages.dags import DagSpec, TaskState
from headgate.protocol.messages.rules import decode_predicate
from headgate.scheduling.signal_rules import predicate_text
from headgate.scheduling.why import (
    OWNED_COUNTED_MAX,
    Pool,
    RunState,
    SignalFacts,
    StoredEvent,
    StreamFacts,
    StruckMessage,
    Supervisor,
    SupervisorState,
    TaskFacts,
    TaskStreamFacts,
    TriggerFacts,
)
from headgate.scheduling.words import shortened, span, times
from headgate.store.access.tables import readable
from headgate.store.db.transaction import Tx, is_alive
from headgate.store.errors import NoSuchRow, SpecUnreadable
from headgate.store.facts.supervisor_status import SupervisorStatus, brokers_away, published
from headgate.store.ids import TaskInstanceId, instance_name
from headgate.store.inspect import maps
from headgate.store.inspect.dags import RUN_STATE
from headgate.store.inspect.rule_facts import rules_of
from headgate.store.inspect.runs import TaskRef
from headgate.store.inspect.strikes import count_passed_over, strikes_of
from headgate.store.signals import feeds, waits
from headgate.store.tables import (
    OPEN_TRIGGER,
    asset_watcher,
    dag,
    dag_run,
    import_error,
    pool,
    redelivery,
    signal_key,
    signal_wait,
    stream,
    task_instance,
    trigger,
    trigger_event,
    triggerer,
)
from headgate.store.tasks import run_states, stream_steps, task_rows, task_streams
from headgate.store.tasks.graphs import read_spec
from headgate.store.tasks.outcomes import is_healthy
from headgate.store.triggers.leases import SILENCE_MAX_S, TriggererRow, triggerer_row

_C = task_instance.c
SUPERVISORS_MAX = 1000  # the newest
HOLDERS_MAX = 20  # of a pool, and triggers that hold up a stream
OTHER_RUNS_MAX = 1000


class Liveness(NamedTuple):
    """How to know that a supervisor is not alive: its silence, or ``is_gone``, which knows this machine's processes."""

    silence_max_s: float = SILENCE_MAX_S
    is_gone: Callable[[TriggererRow], bool] = lambda row: False


BY_SILENCE = Liveness()


# --- supervisors ---------------------------------------------------------------------------------


def supervisors(tx: Tx, *, liveness: Liveness, exactly: bool = False) -> list[Supervisor]:
    """Return those that neither ended nor were fenced, newest first.

    ``exactly``: their triggers are counted up to their capacities. Otherwise they are as many as a supervisor that is
    alive said with its last heartbeat; of one that says nothing they are counted up to `OWNED_COUNTED_MAX`.
    """
    found = select(triggerer).where(is_alive()).order_by(triggerer.c.id.desc()).limit(SUPERVISORS_MAX)
    rows = tx.connection.execute(found).all()
    said = {one: each.status for one, each in published(tx, [row.id for row in rows]).items() if not each.unreadable}
    return [_supervisor(tx, row, liveness, exactly=exactly, said=said.get(row.id)) for row in rows]


def supervisor_texts(tx: Tx, epochs: Collection[int], *, liveness: Liveness) -> dict[int, str]:
    """Return which supervisors these are, in words, by their epochs: nothing of them is counted."""
    rows: Sequence[Any] = tx.connection.execute(select(triggerer).where(triggerer.c.id.in_(epochs))).all()
    leases = [triggerer_row(row._mapping, tx.now) for row in rows]
    return {one.id: f"{one.hostname}, process {one.pid}, {state_of(one, liveness)}" for one in leases}


def supervisor(tx: Tx, epoch: int | None, *, liveness: Liveness) -> Supervisor | None:
    """Return the supervisor of an epoch; None if there is none."""
    if epoch is None:
        return None
    row = tx.connection.execute(select(triggerer).where(triggerer.c.id == epoch)).first()
    if row is None:
        return None
    found, said = _supervisor(tx, row, liveness), published(tx, [epoch])
    if found.state != "alive" or epoch not in said:
        return found
    status = said[epoch].status
    return msgspec.structs.replace(found, runner_ends=status.runner_ends, is_draining=status.is_draining)


def state_of(lease: TriggererRow, liveness: Liveness) -> SupervisorState:
    """Return the state of a supervisor."""
    if lease.stopped_at is not None:
        return "ended"
    if lease.fenced_at is not None:
        return "fenced"
    if liveness.is_gone(lease):
        return "gone"
    return "alive" if lease.heartbeat_age_s <= liveness.silence_max_s else "silent"


def _supervisor(
    tx: Tx, row: Any, liveness: Liveness, *, exactly: bool = False, said: SupervisorStatus | None = None
) -> Supervisor:
    """Return a supervisor; ``said``: how it is, as it has said itself."""
    lease = triggerer_row(row._mapping, tx.now)
    state = state_of(lease, liveness)
    # By its queues, so that the index of claims has all that is looked at.
    served = trigger.c.queue.in_(lease.queues)
    counted = select(trigger.c.id).where(served, trigger.c.triggerer_id == row.id, OPEN_TRIGGER)
    counted = counted.limit(row.capacity if exactly else OWNED_COUNTED_MAX)
    triggers = select(func.count()).select_from(counted.subquery())
    tasks = select(func.count()).where(_C.triggerer_id == row.id)
    endless = tasks.where(_C.is_endless)
    return Supervisor(
        epoch=row.id,
        hostname=row.hostname,
        pid=row.pid,
        state=state,
        heartbeat_age_s=lease.heartbeat_age_s,
        capacity=row.capacity,
        queues=tuple(queue for queue in row.queues.split(",") if queue),
        workers=row.workers,
        endless_workers=row.endless_workers,
        endless_tasks=tx.connection.execute(endless).scalar_one(),
        open_triggers=(
            tx.connection.execute(triggers).scalar_one() if exactly or said is None or state != "alive" else said.owned
        ),
        passed_over=() if said is None else said.passed_over,
        runner_ends=None if said is None else said.runner_ends,
        dag_folder=None if said is None else said.dag_folder,
        dag_folder_age_s=tx.now.timestamp() - said.dag_folder.since if said is not None and said.dag_folder else 0.0,
        is_draining=said is not None and said.is_draining and state == "alive",
        tasks=tx.connection.execute(tasks).scalar_one(),
    )


# --- triggers ------------------------------------------------------------------------------------


def trigger_facts(tx: Tx, trigger_id: int, *, liveness: Liveness) -> TriggerFacts:
    """Return the facts about a trigger. Raises `NoSuchRow`."""
    row = tx.connection.execute(
        select(*readable(trigger), asset_watcher.c.name.label("watcher"))
        .select_from(trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id))
        .where(trigger.c.id == trigger_id)
    ).first()
    if row is None:
        raise NoSuchRow("trigger", str(trigger_id))
    task = tx.connection.execute(
        select(dag.c.name, dag_run.c.run_id, _C.task_id, _C.map_index)
        .select_from(task_instance.join(dag_run).join(dag))
        .where(_C.trigger_id == trigger_id)
    ).first()
    return TriggerFacts(
        id=row.id,
        classpath=row.classpath,
        queue=row.queue,
        age_s=_ago(tx.now, row.created_date) or 0.0,
        owner=supervisor(tx, row.triggerer_id, liveness=liveness),
        watcher=row.watcher,
        task=None if task is None else (task.name, task.run_id, instance_name(task.task_id, task.map_index)),
        failure_count=row.failure_count,
        last_error=row.last_error,
        last_failed_age_s=_ago(tx.now, row.last_failed_at),
        finished_age_s=_ago(tx.now, row.finished_at),
        removed_age_s=_ago(tx.now, row.removed_at),
        newest_event=_newest_event(tx, trigger_id),
        hold=row.hold,
        hold_reason=row.hold_reason,
        held_age_s=_ago(tx.now, row.held_at),
        struck=_struck(tx, row),
        passed_over=count_passed_over(tx, trigger_id),
        others_of_stream=_others_of_stream(tx, row),
        stream=_stream(tx, row.stream_id, trigger_id, liveness),
        signal=_signal(tx, trigger_id),
    )


def _signal(tx: Tx, trigger_id: int) -> SignalFacts | None:
    last = signal_key.c.last_version
    row = tx.connection.execute(
        select(signal_wait, func.coalesce(last, 0).label("last_version"))
        .select_from(signal_wait.outerjoin(signal_key, waits.SAME_KEY))
        .where(signal_wait.c.trigger_id == trigger_id)
    ).first()
    if row is None:
        return None
    replaced = feeds.count_replaced(tx, row.key, row.namespace)
    predicate = decode_predicate(row.predicate)
    condition = "" if predicate is None else predicate_text(predicate)
    return SignalFacts(row.key, row.namespace, row.seen_version, row.last_version, condition, replaced)


def _struck(tx: Tx, row: Any) -> StruckMessage | None:
    """Return the message on which a trigger has failed last, unless it has run well or was passed over it since."""
    if row.failure_count == 0:
        return None
    newest = strikes_of(tx, row.id, limit=1)
    if not newest or newest[0].is_passed_over or newest[0].last_run_id != row.last_failed_run_id:
        return None
    return StruckMessage(newest[0].key, newest[0].strikes, newest[0].kills, row.max_deliveries)


def _others_of_stream(tx: Tx, row: Any) -> int:
    if row.stream_id is None:
        return 0
    others = select(func.count()).where(trigger.c.stream_id == row.stream_id, trigger.c.id != row.id, OPEN_TRIGGER)
    return int(tx.connection.execute(others).scalar_one())


def _stream(tx: Tx, stream_id: int | None, trigger_id: int, liveness: Liveness) -> StreamFacts | None:
    found = tx.connection.execute(select(stream).where(stream.c.id == stream_id)).first()
    if found is None:
        return None
    of_it = and_(trigger.c.stream_id == stream_id, OPEN_TRIGGER)
    count = tx.connection.execute(select(func.count()).select_from(trigger).where(of_it)).scalar_one()
    others = (
        select(*ABSENCE_COLUMNS)
        .select_from(trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id))
        .where(of_it, is_absent(), trigger.c.id != trigger_id)
        .order_by(trigger.c.id)
        .limit(HOLDERS_MAX)
    )
    held_up_by = tuple((row.name or f"trigger-{row.id}", absence(tx, row)) for row in tx.connection.execute(others))
    owner = supervisor(tx, found.triggerer_id, liveness=liveness)
    away = {} if owner is None else brokers_away(tx, published(tx, [owner.epoch]))
    return StreamFacts(found.name, count, owner, held_up_by, *away.get((found.triggerer_id, found.digest), (None, "")))


def has_stored_since() -> ColumnElement[bool]:
    """Return the condition that a trigger has stored an event since its last failure."""
    newest = select(trigger_event.c.stored_at).where(trigger_event.c.trigger_id == trigger.c.id)
    newest_at = newest.order_by(trigger_event.c.id.desc()).limit(1).correlate(trigger).scalar_subquery()
    return func.coalesce(newest_at > trigger.c.last_failed_at, false())


def is_absent() -> ColumnElement[bool]:
    """Return the condition that a trigger is missing on its stream, which then waits for it: it is held, or has failed.

    A user who pauses a trigger lets its stream go on. One that has stored an event since its last failure is back.
    """
    has_failed = and_(trigger.c.failure_count > 0, trigger.c.hold.is_(None), not_(has_stored_since()))
    return or_(has_failed, and_(trigger.c.hold.is_not(None), trigger.c.hold != "paused"))


ABSENCE_COLUMNS = (
    *(trigger.c.id, asset_watcher.c.name, trigger.c.hold, trigger.c.hold_reason, trigger.c.held_at),
    *(trigger.c.failure_count, trigger.c.last_error, trigger.c.last_failed_at),
)


def absence(tx: Tx, row: Any) -> str:
    """Return why a trigger with `ABSENCE_COLUMNS` is missing on its stream, and since when, in one line."""
    if row.hold:
        since_s = _ago(tx.now, row.held_at)
        since = "" if since_s is None else f" for {span(since_s)}"
        return f"{row.hold}{since}: {shortened(row.hold_reason)}"
    since_s = _ago(tx.now, row.last_failed_at)
    last = "" if since_s is None else f", the last time {span(since_s)} ago"
    return f"it has failed {times(row.failure_count)}{last}: {shortened(row.last_error)}"


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


def task_facts(tx: Tx, task: TaskRef, *, liveness: Liveness) -> TaskFacts:
    """Return the facts about a task."""
    row = tx.connection.execute(
        select(
            *readable(task_instance),
            *(dag.c.id.label("dag_id"), dag.c.spec, dag.c.is_paused, dag.c.max_active_runs, dag.c.removed_at),
            *(import_error.c.error.label("import_error"), RUN_STATE.label("run_state"), dag_run.c.is_ending),
        )
        .select_from(task_instance.join(dag_run).join(dag).outerjoin(import_error, import_error.c.file == dag.c.file))
        .where(_C.id == task.id)
    ).one()
    state = TaskState(row.state)
    whole, unreadable = _read_spec(task.dag, row.spec)
    spec = None if whole is None else next((one for one in whole.tasks if one.task_id == task.task_id), None)
    of_run = run_states.read(tx, task.dag_run_id)
    of_map = None if spec is None or whole is None else maps.map_facts(tx, spec, task.map_index, whole, of_run)
    states, seen = of_run.of_tasks(), of_run.for_rules()
    upstream = {} if spec is None else {name: name for name in spec.upstream}
    if task.map_index >= 0 and of_map is not None and of_map.group is not None:
        # Of its group an instance waits for those at its own index.
        for name, at in of_map.group.at:
            if name in upstream:
                upstream[name] = instance_name(name, task.map_index)
                states[name], seen[name] = at, frozenset({at})
    waits_for = None if row.trigger_id is None else trigger_facts(tx, row.trigger_id, liveness=liveness)
    runs_well = state is TaskState.RUNNING and is_healthy(tx, row.started_at)
    return TaskFacts(
        dag=task.dag,
        run_id=task.run_id,
        task_id=task.task_id,
        state=state,
        pool=_pool(tx, row.pool),
        run_state=_run_state(row),
        try_number=row.try_number,
        tries_max=row.tries_max,
        retries=row.retries,
        since_s=_ago(tx.now, _since(row, state)) if waits_for is None else waits_for.age_s,
        is_paused=bool(row.is_paused),
        is_dag_removed=row.removed_at is not None,
        is_in_dag=spec is not None,
        unreadable=unreadable,
        import_error=row.import_error,
        max_active_runs=row.max_active_runs,
        other_runs=_other_runs(tx, row.dag_id, task.dag_run_id),
        trigger_rule="all_success" if spec is None else spec.trigger_rule,
        upstream=tuple((shown, states.get(name, TaskState.NONE)) for name, shown in upstream.items()),
        queue=row.queue,
        pool_slots=row.pool_slots,
        ahead=_ahead(tx, row) if state is TaskState.SCHEDULED else 0,
        owner=supervisor(tx, row.triggerer_id, liveness=liveness),
        trigger=waits_for,
        next_method=row.next_method,
        retry_in_s=_until(tx.now, row.retry_at),
        timeout_in_s=_until(tx.now, row.trigger_timeout),
        deadline_in_s=_until(tx.now, row.deadline),
        last_error=row.last_error,
        stream=_task_stream(tx, task.id),
        map_index=task.map_index,
        map=of_map,
        map_state=of_run.own.get(task.task_id),
        seen={shown: seen[name] for name, shown in upstream.items() if name in seen},
        rules=rules_of(tx, task.id, spec, is_open=row.run_state not in ("success", "failed")),
        is_ending=bool(row.is_ending),
        old_owner=supervisor(tx, row.old_owner_id, liveness=liveness),
        is_endless=bool(row.is_endless),
        moves=row.moves if row.is_endless and not runs_well else 0,
        begins_in_s=_until(tx.now, row.begins_at),
    )


def _read_spec(name: str, data: bytes) -> tuple[DagSpec | None, str | None]:
    """Return the spec of a DAG, or why it cannot be read."""
    try:
        return read_spec(name, data), None
    except SpecUnreadable as error:
        return None, str(error)


def _task_stream(tx: Tx, instance: TaskInstanceId) -> TaskStreamFacts | None:
    stream = task_streams.read_of(tx, instance)
    if stream is None:
        return None
    waiting = stream_steps.count_waiting(tx, stream)
    return TaskStreamFacts(stream.handled, waiting, stream.wanted, stream.contract, stream.reopens, stream.ended_as)


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
        select(dag.c.name, dag_run.c.run_id, _C.task_id, _C.map_index, _C.pool_slots)
        .select_from(task_instance.join(dag_run).join(dag))
        .where(holds)
        .order_by(_C.pool_slots.desc(), _C.id)
        .limit(HOLDERS_MAX)
    ).all()
    held_by = tuple(
        (one.name, one.run_id, instance_name(one.task_id, one.map_index), one.pool_slots) for one in holders
    )
    return Pool(name, slots, int(used), held_by)


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
