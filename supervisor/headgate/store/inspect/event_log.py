"""Read-only queries about stored events, without the whole table in memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec
from sqlalchemy import ColumnElement, and_, func, select, true

from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import NoSuchRow
from headgate.store.tables import asset_watcher, redelivery, trigger_event
from headgate.store.triggers.watchers import check_known

# Transactions that overlap commit ids that are not in the order of their times: by no more than a few large slices.
UNORDERED_IDS_MAX = 10_000
EVENTS_PER_BATCH_MAX = 100  # each may have a payload of 1 MiB, so a reader needs about 100 MiB


class EventRow(msgspec.Struct, frozen=True):
    """One stored event, its payload encoded by `headgate.protocol.values`. ``redelivered`` counts later deliveries."""

    id: int
    watcher: str | None
    trigger_id: int
    trigger_run_id: str
    sequence_index: int
    key: str | None
    payload: bytes
    is_last: bool
    stored_at: datetime
    kind: str
    position: int
    redelivered: int


_ROWS = select(
    *(trigger_event.c.id, asset_watcher.c.name.label("watcher"), trigger_event.c.trigger_id),
    *(trigger_event.c.trigger_run_id, trigger_event.c.sequence_index, trigger_event.c.key),
    *(trigger_event.c.payload, trigger_event.c.is_last, trigger_event.c.stored_at),
    *(trigger_event.c.kind, trigger_event.c.position),
    func.coalesce(redelivery.c.count, 0).label("redelivered"),
).select_from(
    trigger_event.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger_event.c.trigger_id).outerjoin(
        redelivery
    )
)


class EventInspection(Verbs):
    """The queries about stored events."""

    @reading
    def newest_events(self, tx: Tx, *, watcher: str | None = None, limit: int) -> list[EventRow]:
        """Return the newest ``limit`` events by id, the oldest of them first. Raises `NoSuchWatcher`."""
        check_known(tx, watcher)
        which = true() if watcher is None else asset_watcher.c.name == watcher
        statement = _ROWS.where(which).order_by(trigger_event.c.id.desc()).limit(limit)
        return [EventRow(**row._mapping) for row in tx.connection.execute(statement)][::-1]

    @reading
    def events_before(
        self, tx: Tx, *, trigger_id: int | None = None, beyond_id: int | None = None, limit: int
    ) -> list[EventRow]:
        """Return stored events by id, the newest first, from ``beyond_id`` downwards; of one trigger, or of all."""
        where: list[ColumnElement[bool]] = [true()]
        if trigger_id is not None:
            where.append(trigger_event.c.trigger_id == trigger_id)
        if beyond_id is not None:
            where.append(trigger_event.c.id < beyond_id)
        statement = _ROWS.where(and_(*where)).order_by(trigger_event.c.id.desc()).limit(limit)
        return [EventRow(**row._mapping) for row in tx.connection.execute(statement)]

    @reading
    def event(self, tx: Tx, event_id: int) -> EventRow:
        """Return one stored event. Raises `NoSuchRow`."""
        row = tx.connection.execute(_ROWS.where(trigger_event.c.id == event_id)).first()
        if row is None:
            raise NoSuchRow("event", str(event_id))
        return EventRow(**row._mapping)

    @reading
    def id_before(self, tx: Tx, since: datetime) -> int:
        """Return an id that no event has passed which was stored since a moment; 0 if all were."""
        older = select(trigger_event.c.id).where(trigger_event.c.stored_at < since)
        newest = tx.connection.execute(older.order_by(trigger_event.c.id.desc()).limit(1)).scalar_one_or_none()
        return max(0, (newest or 0) - UNORDERED_IDS_MAX)

    def events(
        self,
        *,
        watcher: str | None = None,
        limit: int | None = None,
        after_id: int = 0,
        since: datetime | None = None,
    ) -> Iterator[EventRow]:
        """Iterate over stored events by id, up to ``limit`` of them, in batches, each in its own transaction.

        ``watcher`` means every watcher that has or had this name. Raises `NoSuchWatcher`. Ids of different triggers
        may be committed out of their order on PostgreSQL, so this is no way to follow the log;
        `headgate.store.consuming.reading` is.
        """
        self._check_known(watcher)
        if since is not None:
            after_id = max(after_id, self.id_before(since))
        return self._iterate_events(watcher, limit, after_id, since)

    def _iterate_events(
        self, watcher: str | None, limit: int | None, after_id: int, since: datetime | None
    ) -> Iterator[EventRow]:
        left = limit
        while left is None or left > 0:
            size = EVENTS_PER_BATCH_MAX if left is None else min(left, EVENTS_PER_BATCH_MAX)
            batch = self._batch(watcher, after_id, size, since)
            yield from batch
            if len(batch) < size:
                return
            after_id = batch[-1].id
            left = None if left is None else left - len(batch)

    @reading
    def _check_known(self, tx: Tx, watcher: str | None) -> None:
        check_known(tx, watcher)

    @reading
    def _batch(self, tx: Tx, watcher: str | None, after_id: int, limit: int, since: datetime | None) -> list[EventRow]:
        which = trigger_event.c.id > after_id
        if watcher is not None:
            which = and_(which, asset_watcher.c.name == watcher)
        if since is not None:
            which = and_(which, trigger_event.c.stored_at >= since)
        statement = _ROWS.where(which).order_by(trigger_event.c.id).limit(limit)
        return [EventRow(**row._mapping) for row in tx.connection.execute(statement)]
