"""The facts that `headgate.scheduling.status` judges, read in one transaction.

Each question is answered from an index, for rows that are few if everything is well, and for at most `COUNTED_MAX` of
them if it is not: the answer takes as long with a million events and a hundred thousand triggers as with none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Select, false, func, literal_column, or_, select

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.status_facts import (
    COUNTED_MAX,
    BrokerAway,
    Drifted,
    FullBacklog,
    GoneDag,
    Letters,
    MissingPool,
    Overdue,
    ReturnedWatcher,
    StatusFacts,
    TroubledConsumer,
    TroubledTask,
    TroubledTrigger,
    Unclaimed,
)
from headgate.scheduling.words import shortened
from headgate.store.consuming.consumers import OLDEST_AT
from headgate.store.db.bulk import chunks
from headgate.store.db.transaction import Tx, is_alive
from headgate.store.facts.drift import drifted
from headgate.store.facts.supervisor_status import PublishedStatus, SupervisorStatus, brokers_away, published
from headgate.store.ids import instance_name
from headgate.store.inspect.why_facts import ABSENCE_COLUMNS, Liveness, absence, has_stored_since, supervisors
from headgate.store.signals import waits
from headgate.store.tables import (
    OPEN_TRIGGER,
    asset_subscription,
    asset_watcher,
    consumer,
    consumer_letter,
    dag,
    dag_run,
    dead_letter,
    encryption_key,
    import_error,
    pool,
    signal_wait,
    stream,
    task_instance,
    trigger,
    triggerer,
    waiting_event,
)
from headgate.store.tasks import task_rows
from headgate.store.triggers.assets import WAITING_EVENTS_MAX

UNCLAIMED_S = 60.0  # a trigger that is added is claimed within `poll_interval_s`
AWAY_S = 10.0  # a broker that is restarted is back by then
LATE_S = 60.0  # a scheduler looks at what is due about every second
SCHEDULED_LATE_S = 15 * 60.0  # tasks wait for workers and pools by design, but not so long
FAILED_RUNS_S = 86_400.0
GONE_S = 120.0  # for so long the file of a DAG may be away, as in a deployment
TROUBLE_OF_RULES_S = 86_400.0
NOT_TAKEN_S = 86_400.0  # a program may take the events of its consumer once a day
QUEUES_MAX = 100  # of open triggers
POOLS_MAX = 100  # that there are not, each with a sentence of its own
OWNERS_MAX = 1000  # of triggers, and of tasks

_C = task_instance.c
_WATCHED = trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id)
_W = signal_wait.c
_RUNS = task_instance.join(dag_run).join(dag)
_NAMES = (dag.c.name, dag_run.c.run_id, _C.task_id, _C.map_index)


def _told(
    said: Mapping[int, PublishedStatus], words_of: Callable[[SupervisorStatus], str]
) -> tuple[tuple[int, str], ...]:
    told = ((epoch, words_of(one.status)) for epoch, one in sorted(said.items()))
    return tuple((epoch, words) for epoch, words in told if words)


def status_facts(tx: Tx, *, liveness: Liveness) -> StatusFacts:
    """Return everything that `headgate.scheduling.status.problems` looks at."""
    queues = _trigger_queues(tx)
    unclaimed = _unclaimed(tx, queues)
    alive = tx.connection.execute(select(triggerer.c.id).where(is_alive()).limit(OWNERS_MAX)).scalars().all()
    said = published(tx, alive)
    missing = _missing_pools(tx)
    return StatusFacts(
        supervisors=tuple(supervisors(tx, liveness=liveness, exactly=bool(unclaimed))),
        trigger_queues=queues,
        task_queues=_task_queues(tx),
        has_active_runs=_has_active_runs(tx),
        unclaimed=unclaimed,
        troubled=_troubled(tx),
        returned=_returned(tx),
        missing_pools=missing,
        overdue=_overdue(tx, [one.name for one in missing]),
        away=_away(tx, said),
        impeded=_told(said, lambda status: status.trouble),
        passing_over=_told(said, SupervisorStatus.passed_over_told),
        unlogged=_told(said, lambda status: status.logs_trouble),
        drifted=tuple(Drifted(*each) for each in drifted(tx, limit=COUNTED_MAX)),
        letters=_letters(tx),
        consumers=_consumers(tx),
        undecided=_troubled_tasks(tx, _W.undecided, _W.undecided_at, _W.decision_error),
        failed_starts=_troubled_tasks(tx, _W.failed_starts, _W.failed_at, _W.failed_error),
        import_errors=_import_errors(tx),
        gone_dags=_gone_dags(tx),
        full_backlogs=_full_backlogs(tx),
        failed_runs=_failed_runs(tx),
        old_keys=_old_keys(tx),
    )


def _name(row: Any) -> str:
    return row.name or f"trigger-{row.id}"


# --- streams -------------------------------------------------------------------------------------


def _away(tx: Tx, said: Mapping[int, PublishedStatus]) -> tuple[BrokerAway, ...]:
    """Return the streams whose supervisors say that a broker is away."""
    away = {where: of for where, of in brokers_away(tx, said).items() if of[0] >= AWAY_S}
    found: list[BrokerAway] = []
    for some in chunks(sorted({digest for _, digest in away})):
        columns = (stream.c.id, stream.c.name, stream.c.triggerer_id, stream.c.digest)
        for row in tx.connection.execute(select(*columns).where(stream.c.digest.in_(some)).order_by(stream.c.id)):
            if (of := away.get((row.triggerer_id, row.digest))) is not None:
                found.append(BrokerAway(row.id, row.name, *of))
    return tuple(found[:COUNTED_MAX])


# --- triggers ------------------------------------------------------------------------------------


def _trigger_queues(tx: Tx) -> tuple[str, ...]:
    """Return the queues of open triggers: each takes one look at the index of claims, however many triggers it has.

    Nobody is to claim the triggers of waits for signals.
    """
    found: list[str] = []
    least = select(func.min(trigger.c.queue)).where(OPEN_TRIGGER)
    queue = tx.connection.execute(least).scalar_one()
    while queue is not None and len(found) < QUEUES_MAX:
        if queue != waits.QUEUE:
            found.append(queue)
        queue = tx.connection.execute(least.where(trigger.c.queue > queue)).scalar_one()
    return tuple(found)


def _owners(tx: Tx, owner: ColumnElement[Any]) -> tuple[list[int], list[int]]:
    """Return the supervisors in this column that are alive, and those that are fenced or have ended.

    Each takes one look at the index of the column.
    """
    found: list[int] = []
    least = select(func.min(owner)).where(owner.is_not(None))
    epoch = tx.connection.execute(least).scalar_one()
    while epoch is not None and len(found) < OWNERS_MAX:
        found.append(epoch)
        epoch = tx.connection.execute(least.where(owner > epoch)).scalar_one()
    is_over = or_(triggerer.c.fenced_at.is_not(None), triggerer.c.stopped_at.is_not(None))
    gone = list(tx.connection.execute(select(triggerer.c.id).where(triggerer.c.id.in_(found), is_over)).scalars())
    return [epoch for epoch in found if epoch not in gone], gone


def _unclaimed(tx: Tx, queues: tuple[str, ...]) -> tuple[Unclaimed, ...]:
    _, gone = _owners(tx, trigger.c.triggerer_id)
    added_before = tx.now - timedelta(seconds=UNCLAIMED_S)
    found: list[Unclaimed] = []
    for queue in queues:
        for has_no_owner in (trigger.c.triggerer_id.is_(None), *(trigger.c.triggerer_id == epoch for epoch in gone)):
            # Their ids alone first, and in no order: to have them in one, SQLite would read all triggers.
            some = select(trigger.c.id).where(OPEN_TRIGGER, trigger.c.queue == queue, has_no_owner)
            some = some.limit(COUNTED_MAX - len(found))
            rows = (
                select(trigger.c.id, asset_watcher.c.name, trigger.c.created_date, stream.c.name.label("stream"))
                .select_from(_WATCHED.outerjoin(stream, stream.c.id == trigger.c.stream_id))
                .where(trigger.c.id.in_(some.scalar_subquery()), trigger.c.created_date < added_before)
                .order_by(trigger.c.id)
            )
            found += [
                Unclaimed(_name(row), queue, (tx.now - row.created_date).total_seconds(), row.stream)
                for row in tx.connection.execute(rows)
            ]
            if len(found) >= COUNTED_MAX:
                return tuple(found)
    return tuple(found)


def _troubled(tx: Tx) -> tuple[TroubledTrigger, ...]:
    # Not joined to the streams: for some hundred triggers PostgreSQL would read all of them.
    of_stream = select(stream.c.name).where(stream.c.id == trigger.c.stream_id).correlate(trigger).scalar_subquery()
    columns = (*ABSENCE_COLUMNS, trigger.c.last_failed_run_id, of_stream.label("stream"))
    is_failing = trigger.c.failure_count > literal_column("0")
    found: dict[int, TroubledTrigger] = {}
    # Two statements, so that each is answered from a partial index of its own.
    for is_troubled, is_back in ((is_failing, has_stored_since()), (trigger.c.hold.is_not(None), false())):
        some = select(trigger.c.id).where(OPEN_TRIGGER, is_troubled).limit(COUNTED_MAX)
        ids = list(tx.connection.execute(some).scalars())
        rows = select(*columns, is_back.label("is_back")).select_from(_WATCHED).where(trigger.c.id.in_(ids))
        for row in tx.connection.execute(rows):
            found[row.id] = TroubledTrigger(
                name=_name(row),
                absence=absence(tx, row),
                failures=row.failure_count,
                hold=row.hold,
                stream=row.stream,
                is_back=row.hold is None and bool(row.is_back),
                is_unreadable=row.failure_count > 0 and row.last_failed_run_id == "",
            )
    return tuple(found[id_] for id_ in sorted(found))


def _returned(tx: Tx) -> tuple[ReturnedWatcher, ...]:
    """Return the watchers whose triggers have returned out of a shared stream."""
    rows = (
        select(asset_watcher.c.name, stream.c.name.label("stream"), trigger.c.finished_at)
        .select_from(asset_watcher.join(trigger, trigger.c.id == asset_watcher.c.trigger_id))
        .join(stream, stream.c.id == trigger.c.stream_id)
        .where(trigger.c.finished_at.is_not(None), trigger.c.removed_at.is_(None))
        .order_by(trigger.c.id)
        .limit(COUNTED_MAX)
    )
    return tuple(
        ReturnedWatcher(row.name, row.stream, (tx.now - row.finished_at).total_seconds())
        for row in tx.connection.execute(rows)
    )


# --- tasks ---------------------------------------------------------------------------------------


def _task_queues(tx: Tx) -> tuple[str, ...]:
    some = select(_C.queue).where(task_rows.is_in(TaskState.SCHEDULED)).limit(COUNTED_MAX).subquery()
    return tuple(tx.connection.execute(select(some.c.queue).distinct().order_by(some.c.queue)).scalars())


def _has_active_runs(tx: Tx) -> bool:
    active = select(dag_run.c.id).select_from(dag_run.join(dag))
    active = active.where(dag_run.c.ended_at.is_(None), dag.c.is_paused.is_(False))
    return tx.connection.execute(active.limit(1)).first() is not None


def _missing_pools(tx: Tx) -> tuple[MissingPool, ...]:
    """Return the pools that there are not, and that tasks wait for.

    Each pool that tasks wait for takes one look at their index.
    """
    waits = task_rows.is_in(TaskState.SCHEDULED)
    there = set(tx.connection.execute(select(pool.c.name)).scalars())
    found: list[MissingPool] = []
    least = select(func.min(_C.pool)).where(waits)
    name = tx.connection.execute(least).scalar_one()
    while name is not None and len(found) < POOLS_MAX:
        if name not in there:
            rows = select(*_NAMES).select_from(_RUNS).where(waits, _C.pool == name, dag.c.is_paused.is_(False))
            if tasks := tx.connection.execute(rows.limit(COUNTED_MAX)).all():
                dag_name, run_id, task_id, index = min(map(tuple, tasks))  # the same each time, as far as they are read
                found.append(MissingPool(name, len(tasks), (dag_name, run_id, instance_name(task_id, index))))
        name = tx.connection.execute(least.where(_C.pool > name)).scalar_one()
    return tuple(found)


def _overdue(tx: Tx, missing_pools: Sequence[str]) -> tuple[Overdue, ...]:
    is_deferred, is_scheduled = task_rows.is_in(TaskState.DEFERRED), task_rows.is_in(TaskState.SCHEDULED)
    goes_on = dag.c.is_paused.is_(False)
    alive, gone = _owners(tx, _C.triggerer_id)
    found = [
        *_late(tx, "wait_timed_out", _C.trigger_timeout, LATE_S, is_deferred),
        *_late(tx, "retry_due", _C.retry_at, LATE_S, goes_on),
        *_late(tx, "deadline_over", _C.deadline, LATE_S, _C.triggerer_id.in_(alive)),
        *_late(
            tx, "scheduled", _C.scheduled_at, SCHEDULED_LATE_S, is_scheduled, goes_on, _C.pool.not_in(missing_pools)
        ),
    ]
    ended = (
        select(*_NAMES, func.coalesce(triggerer.c.fenced_at, triggerer.c.stopped_at))
        .select_from(_RUNS.join(triggerer, triggerer.c.id == _C.triggerer_id))
        .where(_C.triggerer_id.in_(gone))
    )
    for name, run_id, task_id, index, since in tx.connection.execute(ended.order_by(_C.id).limit(COUNTED_MAX)):
        late_s = (tx.now - since).total_seconds()
        if late_s > LATE_S:
            found.append(Overdue("owner_gone", name, run_id, instance_name(task_id, index), late_s))
    return tuple(found)


def _late(
    tx: Tx,
    what: Literal["wait_timed_out", "deadline_over", "retry_due", "scheduled"],
    due: ColumnElement[Any],
    late_s: float,
    *where: ColumnElement[bool],
) -> list[Overdue]:
    """Return tasks for which a moment is further past than ``late_s`` seconds."""
    rows = (
        select(*_NAMES, due)
        .select_from(_RUNS)
        .where(due < tx.now - timedelta(seconds=late_s), *where)
        .order_by(due)
        .limit(COUNTED_MAX)
    )
    return [
        Overdue(what, name, run_id, instance_name(task_id, index), (tx.now - then).total_seconds())
        for name, run_id, task_id, index, then in tx.connection.execute(rows)
    ]


# --- what has failed -----------------------------------------------------------------------------


def _letters(tx: Tx) -> tuple[Letters, ...]:
    unresolved = select(dead_letter.c.trigger_id, dead_letter.c.stored_at).where(dead_letter.c.resolved_at.is_(None))
    some = unresolved.order_by(dead_letter.c.id.desc()).limit(COUNTED_MAX).subquery()
    last_at = func.max(some.c.stored_at).label("last_at")
    rows = (
        select(some.c.trigger_id.label("id"), asset_watcher.c.name, func.count().label("letters"), last_at)
        .select_from(some.outerjoin(asset_watcher, asset_watcher.c.trigger_id == some.c.trigger_id))
        .group_by(some.c.trigger_id, asset_watcher.c.name)
        .order_by(func.count().desc(), some.c.trigger_id)
    )
    return tuple(
        Letters(_name(row), row.letters, (tx.now - row.last_at).total_seconds()) for row in tx.connection.execute(rows)
    )


def _consumers(tx: Tx) -> tuple[TroubledConsumer, ...]:
    unresolved = select(consumer_letter.c.consumer_id, consumer_letter.c.set_aside_at)
    unresolved = unresolved.where(consumer_letter.c.resolved_at.is_(None))
    some = unresolved.order_by(consumer_letter.c.event_id.desc()).limit(COUNTED_MAX).subquery()
    counted = select(some.c.consumer_id, func.count(), func.max(some.c.set_aside_at)).group_by(some.c.consumer_id)
    letters = {of: (count, last_at) for of, count, last_at in tx.connection.execute(counted)}
    columns = (consumer.c.id, consumer.c.name, consumer.c.failures, consumer.c.last_error, OLDEST_AT.label("oldest_at"))
    is_late = OLDEST_AT < tx.now - timedelta(seconds=NOT_TAKEN_S)
    is_troubled = or_(consumer.c.failures > 0, consumer.c.id.in_(letters), is_late)
    rows = select(*columns).where(is_troubled).order_by(consumer.c.name).limit(COUNTED_MAX)
    found = []
    for row in tx.connection.execute(rows):
        count, last_at = letters.get(row.id, (0, tx.now))
        age_s = (tx.now - last_at).total_seconds()
        waits_s = 0.0 if row.oldest_at is None else (tx.now - row.oldest_at).total_seconds()
        waits_s = waits_s if waits_s > NOT_TAKEN_S else 0.0
        found.append(TroubledConsumer(row.name, row.failures, shortened(row.last_error), count, age_s, waits_s))
    return tuple(found)


def _troubled_tasks(
    tx: Tx, times: ColumnElement[int], last_at: ColumnElement[datetime], error: ColumnElement[str]
) -> tuple[TroubledTask, ...]:
    """Return the tasks of which a rule has these columns of the last day; a task may have several rules."""
    rows = (
        select(*_NAMES, times, last_at, error)
        .select_from(_RUNS.join(signal_wait, _W.task_instance_id == _C.id))
        .where(last_at > tx.now - timedelta(seconds=TROUBLE_OF_RULES_S))
        .order_by(last_at.desc())
        .limit(COUNTED_MAX)
    )
    found: dict[tuple[str, str, str], TroubledTask] = {}
    for name, run_id, task_id, index, of_rule, at, text in tx.connection.execute(rows):
        task = (name, run_id, instance_name(task_id, index))
        newest = found.setdefault(task, TroubledTask(*task, 0, (tx.now - at).total_seconds(), shortened(text)))
        found[task] = msgspec.structs.replace(newest, times=newest.times + of_rule)
    return tuple(found.values())


def _import_errors(tx: Tx) -> tuple[tuple[str, str], ...]:
    rows = select(import_error.c.file, import_error.c.error).order_by(import_error.c.file).limit(COUNTED_MAX)
    return tuple((row.file, shortened(row.error)) for row in tx.connection.execute(rows))


def _gone_dags(tx: Tx) -> tuple[GoneDag, ...]:
    """Return the DAGs that are in no file any more, and whose runs have not ended."""
    columns = (dag.c.name, dag.c.file, dag.c.removed_at)
    rows = (
        select(*columns, func.count().label("runs"))
        .select_from(dag_run.join(dag))
        .where(dag_run.c.ended_at.is_(None), dag.c.removed_at < tx.now - timedelta(seconds=GONE_S))
        .group_by(*columns)
        .order_by(dag.c.name)
        .limit(COUNTED_MAX)
    )
    return tuple(
        GoneDag(row.name, row.file, row.runs, (tx.now - row.removed_at).total_seconds())
        for row in tx.connection.execute(rows)
    )


def _full_backlogs(tx: Tx) -> tuple[FullBacklog, ...]:
    """Return the DAGs of which events were dropped, and for whose runs as many wait as may."""
    waiting = (
        select(func.count()).select_from(waiting_event).where(waiting_event.c.dag_id == dag.c.id).scalar_subquery()
    )
    dropped = (
        select(dag.c.name, func.sum(asset_subscription.c.dropped).label("dropped"), waiting.label("waiting"))
        .select_from(asset_subscription.join(dag))
        .where(asset_subscription.c.dropped > 0, dag.c.removed_at.is_(None))
        .group_by(dag.c.id, dag.c.name)
        .order_by(dag.c.name)
        .limit(COUNTED_MAX)
    )
    rows = tx.connection.execute(dropped)
    return tuple(FullBacklog(row.name, int(row.dropped)) for row in rows if row.waiting >= WAITING_EVENTS_MAX)


def _failed_runs(tx: Tx) -> tuple[tuple[str, str], ...]:
    since = tx.now - timedelta(seconds=FAILED_RUNS_S)
    rows: Select[str, str] = (
        select(dag.c.name, dag_run.c.run_id)
        .select_from(dag_run.join(dag))
        .where(dag_run.c.state == literal_column("'failed'"), dag_run.c.ended_at > since)
        .order_by(dag_run.c.ended_at.desc())
        .limit(COUNTED_MAX)
    )
    return tuple((name, run_id) for name, run_id in tx.connection.execute(rows))


def _old_keys(tx: Tx) -> int:
    needed = (encryption_key.c.superseded_at.is_not(None), encryption_key.c.retired_at.is_(None))
    return int(tx.connection.execute(select(func.count()).select_from(encryption_key).where(*needed)).scalar_one())
