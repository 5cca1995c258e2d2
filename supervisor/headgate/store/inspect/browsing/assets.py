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
EVENTS_LOOKED_MAX = 1_000  # the newest, for those of assets
WATCHERS_LOOKED_MAX = 2_000  # of all assets that none of these is of


class AssetLine(msgspec.Struct, frozen=True):
    """An asset: the numbers of its watchers and of the DAGs that have runs for its events.

    ``waiting`` counts the pairs of an event and a DAG that has had no run for it yet. ``event_id`` is its newest event;
    ``is_looked_up``: whether that is known. It is not for an asset that has no event among the newest of all, and too
    many watchers to look at those of each.
    """

    id: int
    name: str
    watchers: int
    dags: int
    waiting: int
    event_id: int | None
    stored_at: datetime | None
    is_looked_up: bool = True


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
    newest = _newest(tx, {row.id: row.watchers for row in rows})
    stored = _stored_at(tx, list(newest.values()))
    return [
        AssetLine(
            **row._mapping,
            event_id=newest.get(row.id),
            stored_at=stored.get(newest.get(row.id)),
            is_looked_up=row.id in newest,
        )
        for row in rows
    ]


def _newest(tx: Tx, watchers: dict[int, int]) -> dict[int, int | None]:
    """Return the newest event of each asset, given the numbers of their watchers; those that are not known are missing.

    The events of an asset have no index of their own: those of a busy one are among the newest of all, and of a silent
    one each watcher is looked at, those of the assets with the fewest first.
    """
    found: dict[int, int | None] = {}
    is_present = asset_watcher.c.removed_at.is_(None)
    newest = select(trigger_event.c.trigger_id, trigger_event.c.id).order_by(trigger_event.c.id.desc())
    newest_ones = newest.limit(EVENTS_LOOKED_MAX).subquery()
    # Not joined: PostgreSQL would read all watchers of assets.
    of_event = select(asset_watcher.c.asset_id).where(
        asset_watcher.c.trigger_id == newest_ones.c.trigger_id, is_present
    )
    rows = select(of_event.scalar_subquery(), newest_ones.c.id)
    for asset_id, event_id in tx.connection.execute(rows):
        if asset_id in watchers:
            found[asset_id] = max(found.get(asset_id) or 0, event_id)
    left, silent = WATCHERS_LOOKED_MAX, []
    for count, asset_id in sorted((count, asset_id) for asset_id, count in watchers.items() if asset_id not in found):
        left -= count
        if left < 0:
            break
        silent.append(asset_id)
    found.update(dict.fromkeys(silent))
    each = select(asset_watcher.c.asset_id, func.max(_newest_of_watcher)).group_by(asset_watcher.c.asset_id)
    for asset_id, event_id in tx.connection.execute(each.where(asset_watcher.c.asset_id.in_(silent), is_present)):
        found[asset_id] = event_id
    return found


def _stored_at(tx: Tx, ids: list[int | None]) -> dict[int | None, datetime]:
    wanted = [id_ for id_ in ids if id_ is not None]
    rows = select(trigger_event.c.id, trigger_event.c.stored_at).where(trigger_event.c.id.in_(wanted))
    return {id_: at for id_, at in tx.connection.execute(rows)}
