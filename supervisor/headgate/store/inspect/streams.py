"""Read-only queries about shared streams: who reads each, who runs it, and who holds it up.

A stream waits for a subscriber that has failed or is held, and hands out nothing meanwhile
(`headgate.store.inspect.why_facts.is_absent`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, and_, func, select

from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import NoSuchRow
from headgate.store.inspect.dags import ROWS_PER_PAGE_MAX
from headgate.store.inspect.why_facts import ABSENCE_COLUMNS, BY_SILENCE, Liveness, absence, is_absent, supervisor
from headgate.store.tables import asset_watcher, dead_letter, redelivery, stream, trigger, trigger_event

SUBSCRIBERS_SHOWN_MAX = 1_000  # of one stream
_OPEN = and_(trigger.c.finished_at.is_(None), trigger.c.removed_at.is_(None))


class StreamLine(msgspec.Struct, frozen=True):
    """A stream that triggers read.

    ``triggerer_id`` is the supervisor that runs it, ``supervisor`` that one in words (None: nobody does).
    ``subscribers`` are its open triggers, ``missing`` those that it waits for. ``stored_at``: when the newest event of
    them was stored. ``last_error``: of the subscriber that has failed last.
    """

    id: int
    name: str
    queue: str
    triggerer_id: int | None
    supervisor: str | None
    subscribers: int
    missing: int
    stored_at: datetime | None
    last_failed_at: datetime | None
    last_error: str | None


class SubscriberLine(msgspec.Struct, frozen=True):
    """An open trigger of a stream. ``missing``: why the stream waits for it; None: it does not.

    ``redelivered``: how often its newest event came again. ``open_letters``: messages and events that it could not
    take.
    """

    trigger_id: int
    name: str
    missing: str | None
    hold: str | None
    newest_event_id: int | None
    stored_at: datetime | None
    redelivered: int
    open_letters: int
    failure_count: int
    last_failed_at: datetime | None
    last_error: str | None


class StreamInspection(Verbs):
    """The queries about shared streams."""

    @reading
    def streams(
        self, tx: Tx, *, beyond_id: int = 0, limit: int = ROWS_PER_PAGE_MAX, liveness: Liveness = BY_SILENCE
    ) -> list[StreamLine]:
        """Return the streams that open triggers read, by id."""
        in_use = select(trigger.c.id).where(trigger.c.stream_id == stream.c.id, _OPEN).exists()
        wanted = select(stream).where(stream.c.id > beyond_id, in_use).order_by(stream.c.id).limit(limit)
        return [_line(tx, row, liveness) for row in tx.connection.execute(wanted).all()]

    @reading
    def find_stream(self, tx: Tx, name: str) -> int:
        """Return the id of a stream by its number, or by the name of a watcher that reads it. Raises `NoSuchRow`."""
        watched = select(trigger.c.stream_id).join(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id)
        named = watched.where(asset_watcher.c.name == name).order_by(asset_watcher.c.id.desc()).limit(1)
        found = tx.connection.execute(named).scalar_one_or_none()
        if found is None and name.isascii() and name.isdecimal() and len(name) <= 18:
            found = tx.connection.execute(select(stream.c.id).where(stream.c.id == int(name))).scalar_one_or_none()
        if found is None:
            raise NoSuchRow("stream, or watcher that is known to read one,", name)
        return int(found)

    @reading
    def stream(
        self, tx: Tx, stream_id: int, *, liveness: Liveness = BY_SILENCE
    ) -> tuple[StreamLine, list[SubscriberLine]]:
        """Return a stream and its subscribers, up to `SUBSCRIBERS_SHOWN_MAX`. Raises `NoSuchRow`."""
        row = tx.connection.execute(select(stream).where(stream.c.id == stream_id)).first()
        if row is None:
            raise NoSuchRow("stream", str(stream_id))
        return _line(tx, row, liveness), _subscribers(tx, stream_id)


def _line(tx: Tx, row: Any, liveness: Liveness) -> StreamLine:
    of_it = and_(trigger.c.stream_id == row.id, _OPEN)
    missing = _count(tx, and_(of_it, is_absent()))
    newest = (
        select(trigger_event.c.stored_at)
        .where(trigger_event.c.trigger_id.in_(select(trigger.c.id).where(of_it)))
        .order_by(trigger_event.c.id.desc())
        .limit(1)
    )
    failed = select(trigger.c.last_failed_at, trigger.c.last_error).where(of_it, trigger.c.last_failed_at.is_not(None))
    failure = tx.connection.execute(failed.order_by(trigger.c.last_failed_at.desc()).limit(1)).first()
    owner = supervisor(tx, row.triggerer_id, liveness=liveness)
    return StreamLine(
        id=row.id,
        name=row.name,
        queue=row.queue,
        triggerer_id=row.triggerer_id,
        supervisor=None if owner is None else f"{owner.hostname}, process {owner.pid}, {owner.state}",
        subscribers=_count(tx, of_it),
        missing=missing,
        stored_at=tx.connection.execute(newest).scalar_one_or_none(),
        last_failed_at=None if failure is None else failure.last_failed_at,
        last_error=None if failure is None else failure.last_error,
    )


def _count(tx: Tx, where: ColumnElement[bool]) -> int:
    return int(tx.connection.execute(select(func.count()).select_from(trigger).where(where)).scalar_one())


def _subscribers(tx: Tx, stream_id: int) -> list[SubscriberLine]:
    statement = (
        select(*ABSENCE_COLUMNS, is_absent().label("is_absent"))
        .select_from(trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id))
        .where(trigger.c.stream_id == stream_id, _OPEN)
        .order_by(trigger.c.id)
        .limit(SUBSCRIBERS_SHOWN_MAX)
    )
    lines = []
    for row in tx.connection.execute(statement).all():
        newest = (
            select(trigger_event.c.id, trigger_event.c.stored_at, redelivery.c.count.label("redelivered"))
            .select_from(trigger_event.outerjoin(redelivery))
            .where(trigger_event.c.trigger_id == row.id)
            .order_by(trigger_event.c.id.desc())
            .limit(1)
        )
        event = tx.connection.execute(newest).first()
        letters = select(func.count()).where(dead_letter.c.trigger_id == row.id, dead_letter.c.state == "open")
        lines.append(
            SubscriberLine(
                trigger_id=row.id,
                name=row.name or f"trigger-{row.id}",
                missing=absence(tx, row) if row.is_absent else None,
                hold=row.hold,
                newest_event_id=None if event is None else event.id,
                stored_at=None if event is None else event.stored_at,
                redelivered=0 if event is None else event.redelivered or 0,
                open_letters=int(tx.connection.execute(letters).scalar_one()),
                failure_count=row.failure_count,
                last_failed_at=row.last_failed_at,
                last_error=row.last_error,
            )
        )
    return lines
