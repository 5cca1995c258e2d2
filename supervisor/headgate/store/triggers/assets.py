"""Runs for the events of assets: the subscriptions of DAGs to assets, and the events that wait for a run.

An event begins to wait for a run in the transaction that stores it, and ceases in the one that creates the run. So no
event is lost, none gets two runs, and which events a run has does not depend on when a scheduler looks. While a DAG is
paused, or has as many active runs as it may have, its events wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec
import structlog
from sqlalchemy import and_, bindparam, delete, func, insert, literal_column, select, update

from headgate.protocol.messages.dags import DagSpec
from headgate.protocol.messages.schedules import AssetSchedule
from headgate.scheduling.contracts import Backlog, EventRun, Waiting
from headgate.store.db.bulk import Kind, chunks, insert_into, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import read
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRowId, DagRunId
from headgate.store.tables import (
    asset,
    asset_subscription,
    dag,
    dag_run,
    dag_run_event,
    trigger_event,
    waiting_event,
)

log = structlog.get_logger(__name__)

WAITING_EVENTS_MAX = 10_000  # per DAG; beyond it the oldest are dropped, which is counted and logged

_RUN_EVENT = Kind(dag_run_event, ("dag_run_id", "trigger_event_id", "asset_id", "is_superseded"))


class RunEvent(msgspec.Struct, frozen=True):
    """One asset event for which a run was created; ``payload`` is encoded."""

    asset: str
    payload: bytes
    stored_at: datetime


class Backlogged(msgspec.Struct, frozen=True):
    """A DAG with waiting events. ``room``: how many more runs may be active."""

    dag_id: DagRowId
    name: str
    spec_hash: str
    is_held: bool  # paused, or no longer in any file
    room: int
    backlog: Backlog


# --- subscriptions -------------------------------------------------------------------------------


def subscribe(tx: Tx, dag_id: DagRowId, spec: DagSpec) -> None:
    """Subscribe a DAG to exactly the assets of its schedule; events of other assets no longer wait for it."""
    schedule = spec.schedule
    ids: dict[str, int] = {}
    if isinstance(schedule, AssetSchedule):
        for name in sorted(schedule.assets):
            statement = insert_into(tx.connection, asset).values(name=name, created_date=tx.now)
            tx.connection.execute(statement.on_conflict_do_nothing())
        found = select(asset.c.name, asset.c.id).where(asset.c.name.in_(schedule.assets))
        ids = {name: int(id_) for name, id_ in tx.connection.execute(found)}
        for asset_id in sorted(ids.values()):
            terms = {"contract": schedule.contract, "batch_seconds": schedule.batch_seconds}
            new = insert_into(tx.connection, asset_subscription).values(dag_id=dag_id, asset_id=asset_id, **terms)
            keys = [asset_subscription.c.dag_id, asset_subscription.c.asset_id]
            tx.connection.execute(new.on_conflict_do_update(index_elements=keys, set_=terms))
    for table in (asset_subscription, waiting_event):
        others = table.c.dag_id == dag_id, table.c.asset_id.not_in(ids.values())
        gone = tx.connection.execute(delete(table).where(*others)).rowcount
        if table is waiting_event and gone:
            told = "a DAG is not for these events any more, which have waited for its runs: they make none"
            log.warning(told, dag=spec.dag_id, events=gone)


# --- waiting events ------------------------------------------------------------------------------

_WAIT = Prepared(
    insert(waiting_event).from_select(
        ["dag_id", "trigger_event_id", "asset_id", "stored_at"],
        select(
            asset_subscription.c.dag_id, trigger_event.c.id, asset_subscription.c.asset_id, trigger_event.c.stored_at
        )
        .select_from(asset_subscription.join(trigger_event, trigger_event.c.id == bindparam("of_event")))
        .where(asset_subscription.c.asset_id == bindparam("of_asset")),
    )
)
_HAS_SUBSCRIBERS = Prepared(
    select(asset_subscription.c.dag_id).where(asset_subscription.c.asset_id == bindparam("of_asset")).limit(1)
)


def wait(tx: Tx, events: Mapping[int, int]) -> bool:
    """Make new events wait, given as asset ids by event id; return whether any DAG is subscribed to their assets."""
    waited_for = {
        asset_id
        for asset_id in sorted(set(events.values()))
        if _HAS_SUBSCRIBERS.run(tx.connection, of_asset=asset_id).fetchone() is not None
    }
    rows = [
        {"of_event": event_id, "of_asset": asset_id}
        for event_id, asset_id in sorted(events.items())
        if asset_id in waited_for
    ]
    if rows:
        _WAIT.run_many(tx.connection, rows)
    return bool(rows)


_ACTIVE = (
    select(func.count())
    .where(dag_run.c.dag_id == dag.c.id, dag_run.c.ended_at.is_(None))
    .correlate(dag)
    .scalar_subquery()
)
# The columns of a statement for `read_backlogs`; behind them it has the number of sources, and the first moment.
BACKLOG_COLUMNS = (
    *(dag.c.id, dag.c.name, dag.c.spec_hash, dag.c.is_paused, dag.c.removed_at),
    *((dag.c.max_active_runs - _ACTIVE).label("room"), func.count().label("events")),
)
# Not true for an event that was being stored while its subscription was deleted; it gets no run.
SUBSCRIBED = and_(
    asset_subscription.c.dag_id == waiting_event.c.dag_id, asset_subscription.c.asset_id == waiting_event.c.asset_id
)
_BACKLOGS = Prepared(
    select(*BACKLOG_COLUMNS, func.count(waiting_event.c.asset_id.distinct()), func.min(waiting_event.c.stored_at))
    .select_from(waiting_event.join(asset_subscription, SUBSCRIBED).join(dag, dag.c.id == waiting_event.c.dag_id))
    .group_by(dag.c.id)
    .order_by(dag.c.id)
)


def backlogs(tx: Tx) -> list[Backlogged]:
    """Return the DAGs with waiting events."""
    return read_backlogs(tx, _BACKLOGS)


def read_backlogs(tx: Tx, statement: Prepared) -> list[Backlogged]:
    """Return the DAGs for whose runs something waits, of which each is a row."""
    return [
        Backlogged(
            DagRowId(id_),
            name,
            spec_hash,
            bool(is_paused) or removed_at is not None,
            room,
            Backlog(events, sources, read(tx.connection, first_at)),
        )
        for id_, name, spec_hash, is_paused, removed_at, room, events, sources, first_at in (
            statement.run(tx.connection).fetchall()
        )
    ]


_LOCK = Prepared(
    select(dag.c.spec_hash, dag.c.is_paused, dag.c.removed_at)
    .where(dag.c.id == bindparam("of_id"))
    .with_for_update(skip_locked=True, key_share=True)
)


class LockedDag(NamedTuple):
    """The terms of a DAG by which its runs are created, as in `Backlogged`; they hold as long as it is locked."""

    spec_hash: str
    is_held: bool


def lock_dag(tx: Tx, dag_id: DagRowId) -> LockedDag | None:
    """Lock a DAG's row while its runs are counted and created; None if another transaction has locked it."""
    row = _LOCK.run(tx.connection, of_id=dag_id).fetchone()
    return None if row is None else LockedDag(row[0], bool(row[1]) or row[2] is not None)


def waiting(tx: Tx, dag_id: DagRowId, limit: int | None) -> list[Waiting]:
    """Return the events that wait for a DAG, by id. The caller has locked the DAG."""
    statement = (
        select(
            waiting_event.c.trigger_event_id,
            waiting_event.c.asset_id,
            waiting_event.c.stored_at,
            func.length(trigger_event.c.payload),
        )
        .select_from(waiting_event.join(asset_subscription, SUBSCRIBED).join(trigger_event))
        .where(waiting_event.c.dag_id == dag_id)
        .order_by(waiting_event.c.trigger_event_id)
        .limit(WAITING_EVENTS_MAX if limit is None else limit)
    )
    return [Waiting(*row) for row in tx.connection.execute(statement)]


def take(tx: Tx, dag_id: DagRowId, dag_run_id: DagRunId, run: EventRun) -> None:
    """Assign the events of a run to it; they no longer wait for this DAG."""
    rows = [(dag_run_id, event.event_id, event.source_id, False) for event in run.events]
    rows += [(dag_run_id, event.event_id, event.source_id, True) for event in run.superseded]
    insert_new(tx.connection, _RUN_EVENT, rows, returning=("trigger_event_id",))
    for some in chunks([row[1] for row in rows]):
        taken = waiting_event.c.dag_id == dag_id, waiting_event.c.trigger_event_id.in_(some)
        tx.connection.execute(delete(waiting_event).where(*taken))


def drop_oldest(tx: Tx, dag_id: DagRowId) -> int:
    """Drop the oldest events that wait for a DAG, if there are more than `WAITING_EVENTS_MAX`; return their number.

    The newest of each asset stays: a DAG of several would have no run if those of another had made it be dropped. The
    number is added to that of their subscriptions, too. The events stay in the event log.
    """
    count = select(func.count()).select_from(waiting_event).where(waiting_event.c.dag_id == dag_id)
    events = max(0, tx.connection.execute(count).scalar_one() - WAITING_EVENTS_MAX)
    newest = (
        select(func.max(waiting_event.c.trigger_event_id))
        .where(waiting_event.c.dag_id == dag_id)
        .group_by(waiting_event.c.asset_id)
    )
    oldest = (
        select(waiting_event.c.trigger_event_id, waiting_event.c.asset_id)
        .where(waiting_event.c.dag_id == dag_id, waiting_event.c.trigger_event_id.not_in(newest))
        .order_by(waiting_event.c.trigger_event_id)
        .limit(events)
    )
    by_asset: dict[int, list[int]] = {}
    for event_id, asset_id in tx.connection.execute(oldest):
        by_asset.setdefault(asset_id, []).append(event_id)
    for asset_id, ids in sorted(by_asset.items()):
        for some in chunks(ids):
            gone = waiting_event.c.dag_id == dag_id, waiting_event.c.trigger_event_id.in_(some)
            tx.connection.execute(delete(waiting_event).where(*gone))
        subscription = asset_subscription.c.dag_id == dag_id, asset_subscription.c.asset_id == asset_id
        dropped = asset_subscription.c.dropped + literal_column(str(len(ids)))
        tx.connection.execute(update(asset_subscription).where(*subscription).values(dropped=dropped))
    return sum(map(len, by_asset.values()))


_RUN_EVENTS = Prepared(
    select(asset.c.name, trigger_event.c.payload, trigger_event.c.stored_at)
    .select_from(dag_run_event.join(asset).join(trigger_event))
    .where(dag_run_event.c.dag_run_id == bindparam("of_run"), dag_run_event.c.is_superseded.is_(False))
    .order_by(trigger_event.c.id)
)


def events_of_run(tx: Tx, run: DagRunId) -> tuple[RunEvent, ...]:
    """Return the events of assets for which a run was created, without those that newer ones superseded."""
    rows = _RUN_EVENTS.run(tx.connection, of_run=run).fetchall()
    return tuple(RunEvent(name, bytes(payload), read(tx.connection, at)) for name, payload, at in rows)
