"""Read-only queries about assets: who makes their events, who waits for them, and when the newest came."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import ColumnElement, and_, func, select

from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import NoSuchRow
from headgate.store.inspect.dags import ROWS_PER_PAGE_MAX, near_names
from headgate.store.tables import asset, asset_subscription, asset_watcher, dag, trigger_event, waiting_event

USERS_SHOWN_MAX = 200  # watchers, and DAGs, of one asset


class AssetLine(msgspec.Struct, frozen=True):
    """An asset: the numbers of its watchers and of the DAGs that have runs for its events.

    ``waiting`` counts the pairs of an event and a DAG that has had no run for it yet. ``event_id`` is its newest event.
    """

    id: int
    name: str
    watchers: int
    dags: int
    waiting: int
    event_id: int | None
    stored_at: datetime | None


class AssetWatcher(msgspec.Struct, frozen=True):
    """A watcher whose events are those of an asset."""

    name: str
    trigger_id: int
    event_id: int | None
    stored_at: datetime | None


class AssetUser(msgspec.Struct, frozen=True):
    """A DAG that has runs for the events of an asset. ``dropped``: events beyond the limit on those that wait."""

    dag: str
    contract: str
    waiting: int
    dropped: int


_of_asset = and_(asset_watcher.c.asset_id == asset.c.id, asset_watcher.c.removed_at.is_(None))
_newest_of_watcher = (
    select(func.max(trigger_event.c.id))
    .where(trigger_event.c.trigger_id == asset_watcher.c.trigger_id)
    .correlate(asset_watcher)
    .scalar_subquery()
)
_waits = and_(waiting_event.c.dag_id == asset_subscription.c.dag_id, waiting_event.c.asset_id == asset.c.id)
_ASSETS = select(
    *(asset.c.id, asset.c.name),
    select(func.count()).where(_of_asset).correlate(asset).scalar_subquery().label("watchers"),
    select(func.count())
    .where(asset_subscription.c.asset_id == asset.c.id)
    .correlate(asset)
    .scalar_subquery()
    .label("dags"),
    select(func.count())
    .where(asset_subscription.c.asset_id == asset.c.id, _waits)
    .correlate(asset)
    .scalar_subquery()
    .label("waiting"),
    select(func.max(_newest_of_watcher)).where(_of_asset).correlate(asset).scalar_subquery().label("event_id"),
)


class AssetInspection(Verbs):
    """The queries about assets."""

    @reading
    def assets(
        self, tx: Tx, *, name: str | None = None, beyond: str | None = None, limit: int = ROWS_PER_PAGE_MAX
    ) -> list[AssetLine]:
        """Return the assets by name, those beyond a name; ``name`` is a part of it, in any case of its letters."""
        where: list[ColumnElement[bool]] = []
        if name is not None:
            where.append(asset.c.name.icontains(name, autoescape=True))
        if beyond is not None:
            where.append(asset.c.name > beyond)
        return _lines(tx, *where, limit=limit)

    @reading
    def asset(self, tx: Tx, asset_id: int) -> tuple[AssetLine, list[AssetWatcher], list[AssetUser]]:
        """Return an asset, its watchers, and the DAGs that have runs for its events. Raises `NoSuchRow`."""
        lines = _lines(tx, asset.c.id == asset_id, limit=1)
        if not lines:
            raise NoSuchRow("asset", str(asset_id), near=near_names(tx, str(asset_id), select(asset.c.name)))
        watchers = (
            select(asset_watcher.c.name, asset_watcher.c.trigger_id, _newest_of_watcher.label("event_id"))
            .where(asset_watcher.c.asset_id == asset_id, asset_watcher.c.removed_at.is_(None))
            .order_by(asset_watcher.c.name)
            .limit(USERS_SHOWN_MAX)
        )
        found = tx.connection.execute(watchers).all()
        stored = _stored_at(tx, [row.event_id for row in found])
        waiting = select(func.count()).where(
            waiting_event.c.dag_id == asset_subscription.c.dag_id, waiting_event.c.asset_id == asset_id
        )
        users = (
            select(dag.c.name, asset_subscription.c.contract, waiting.scalar_subquery(), asset_subscription.c.dropped)
            .select_from(asset_subscription.join(dag))
            .where(asset_subscription.c.asset_id == asset_id, dag.c.removed_at.is_(None))
            .order_by(dag.c.name)
            .limit(USERS_SHOWN_MAX)
        )
        return (
            lines[0],
            [AssetWatcher(row.name, row.trigger_id, row.event_id, stored.get(row.event_id)) for row in found],
            [AssetUser(*row) for row in tx.connection.execute(users)],
        )


def _lines(tx: Tx, *where: ColumnElement[bool], limit: int) -> list[AssetLine]:
    rows = tx.connection.execute(_ASSETS.where(*where).order_by(asset.c.name).limit(limit)).all()
    stored = _stored_at(tx, [row.event_id for row in rows])
    return [AssetLine(**row._mapping, stored_at=stored.get(row.event_id)) for row in rows]


def _stored_at(tx: Tx, ids: list[int | None]) -> dict[int | None, datetime]:
    wanted = [id_ for id_ in ids if id_ is not None]
    rows = select(trigger_event.c.id, trigger_event.c.stored_at).where(trigger_event.c.id.in_(wanted))
    return {id_: at for id_, at in tx.connection.execute(rows)}
