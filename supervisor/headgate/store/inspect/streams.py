"""Read-only queries about shared streams: who reads each, who runs it, and who holds it up.

A stream waits for a subscriber that has failed or is held, and hands out nothing meanwhile
(`headgate.store.inspect.why_facts.is_absent`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, FromClause, ScalarSelect, and_, func, literal_column, select, union

from headgate.store.db.bulk import chunks
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import NoSuchRow
from headgate.store.facts.drift import StreamDrift, drift_of, is_asked
from headgate.store.facts.supervisor_status import PublishedStatus, StreamStatus, published
from headgate.store.inspect.dags import ROWS_PER_PAGE_MAX
from headgate.store.inspect.why_facts import ABSENCE_COLUMNS, BY_SILENCE, Liveness, absence, is_absent, supervisor_texts
from headgate.store.tables import OPEN_TRIGGER, asset_watcher, dead_letter, redelivery, stream, trigger, trigger_event

SUBSCRIBERS_SHOWN_MAX = 1_000  # of one stream


# The streams that wait for a trigger, which fails or is held: each from a partial index of its own. As it is judged
# whether such a trigger is absent, no stream has to be looked at that does not wait. SQLite would take the index of
# streams if those without one were left out.
_WAITING = union(
    *(
        select(trigger.c.stream_id).where(OPEN_TRIGGER, is_troubled, is_absent())
        for is_troubled in (trigger.c.failure_count > literal_column("0"), trigger.c.hold.is_not(None))
    )
)


class LiveStream(msgspec.Struct, frozen=True):
    """How a stream is, as the supervisor that runs it says with its heartbeats; true at ``as_of``.

    ``in_flight``: messages that are handed out and not advanced, the oldest since ``oldest_at``; ``queued``: waiting
    for subscribers, counted once for each. ``lag``: how much the broker has that is not advanced, in ``lag_unit``
    (None: not known). ``held``: why nothing is pulled, since when, and the names of triggers that cause it. The counts
    are of messages advanced since the runner started; ``ended``: how often the stream was opened anew after an error.
    """

    as_of: datetime
    lag: int | None
    lag_unit: str
    in_flight: int
    queued: int
    lanes: int
    online: int
    absent: int
    held: str | None
    held_since: datetime | None
    held_by: tuple[str, ...]
    oldest_at: datetime | None
    acked: int
    failed: int
    rejected: int
    ended: int
    ended_at: datetime | None
    ended_by: str | None


class StreamLine(msgspec.Struct, frozen=True):
    """A stream that triggers read.

    ``triggerer_id`` is the supervisor that runs it, ``supervisor`` that one in words (None: nobody does).
    ``subscribers`` are its open triggers, ``missing`` those that it waits for. ``stored_at``: when the newest event of
    them was stored. ``last_error``: of the one that has failed last of those that it waits for; None if none of these
    has failed. ``live``: what its supervisor says of it; None if that is nothing, for example because nobody runs
    it. ``unreadable``: why what it says cannot be read.
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
    live: LiveStream | None = None
    unreadable: str | None = None


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
        self,
        tx: Tx,
        *,
        is_waiting: bool = False,
        beyond_id: int = 0,
        limit: int = ROWS_PER_PAGE_MAX,
        liveness: Liveness = BY_SILENCE,
    ) -> list[StreamLine]:
        """Return the streams that open triggers read, by id; ``is_waiting``: that wait for one of them alone."""
        reads = select(trigger.c.id).where(trigger.c.stream_id == stream.c.id, OPEN_TRIGGER)
        where = [stream.c.id > beyond_id, stream.c.id.in_(_WAITING) if is_waiting else reads.exists()]
        return _lines(tx, *where, limit=limit, liveness=liveness)

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
    def newest_key(self, tx: Tx, stream_id: int) -> str | None:
        """Return the key of the event that was stored last for a stream; None if there is none, or if it has none."""
        newest = (
            select(func.max(_newest_of(trigger)))
            .where(trigger.c.stream_id == stream_id, OPEN_TRIGGER)
            .scalar_subquery()
        )
        found = select(trigger_event.c.key).where(trigger_event.c.id == newest)
        return tx.connection.execute(found).scalar_one_or_none()

    @reading
    def drift(self, tx: Tx, stream_ids: Collection[int]) -> dict[int, StreamDrift]:
        """Return what is known of the drift of streams, by id; those of which nothing is known are left out."""
        return drift_of(tx, stream_ids)

    @reading
    def is_drift_asked(self, tx: Tx, stream_ids: Collection[int]) -> bool:
        """Whether the broker of one of these streams is to be asked, and has not answered yet."""
        return is_asked(tx, stream_ids)

    @reading
    def stream(
        self, tx: Tx, stream_id: int, *, limit: int = SUBSCRIBERS_SHOWN_MAX, liveness: Liveness = BY_SILENCE
    ) -> tuple[StreamLine, list[SubscriberLine]]:
        """Return a stream and its subscribers, up to ``limit``. Raises `NoSuchRow`."""
        lines = _lines(tx, stream.c.id == stream_id, limit=1, liveness=liveness)
        if not lines:
            raise NoSuchRow("stream", str(stream_id))
        return lines[0], _subscribers(tx, stream_id, limit)


def _newest_of(table: FromClause) -> ScalarSelect[Any]:
    """Return the id of the newest event of a trigger: one look at an index, whatever the trigger has."""
    newest = select(func.max(trigger_event.c.id)).where(trigger_event.c.trigger_id == table.c.id)
    return newest.correlate(table).scalar_subquery()


def _live(tx: Tx, rows: Sequence[Any], statuses: Mapping[int, PublishedStatus]) -> dict[int, LiveStream]:
    """Return what the supervisors of these streams say of them, by the ids of the streams."""
    by_owner = {epoch: {one.stream: one for one in each.status.streams} for epoch, each in statuses.items()}
    said = {row.id: by_owner.get(row.triggerer_id, {}).get(row.digest) for row in rows}
    names = _names(tx, {trigger_id for one in said.values() if one is not None for trigger_id in one.held_by})
    return {
        row.id: _live_stream(one, statuses[row.triggerer_id].as_of, names)
        for row in rows
        if (one := said[row.id]) is not None
    }


def _live_stream(said: StreamStatus, as_of: datetime, names: Mapping[int, str]) -> LiveStream:
    return LiveStream(
        as_of=as_of,
        lag=said.lag,
        lag_unit=said.lag_unit,
        in_flight=said.in_flight,
        queued=said.queued,
        lanes=said.lanes,
        online=said.online,
        absent=said.absent,
        held=said.held,
        held_since=_moment(said.held_since),
        held_by=tuple(names.get(trigger_id, f"trigger-{trigger_id}") for trigger_id in said.held_by),
        oldest_at=_moment(said.oldest_at),
        acked=said.acked,
        failed=said.failed,
        rejected=said.rejected,
        ended=said.ended,
        ended_at=_moment(said.last_error_at),
        ended_by=said.last_error or None,
    )


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _names(tx: Tx, trigger_ids: Collection[int]) -> dict[int, str]:
    """Return the names of those of these triggers that are watchers'."""
    found: dict[int, str] = {}
    for ids in chunks(sorted(trigger_ids)):
        rows = select(asset_watcher.c.trigger_id, asset_watcher.c.name).where(asset_watcher.c.trigger_id.in_(ids))
        found.update({trigger_id: name for trigger_id, name in tx.connection.execute(rows)})
    return found


def _lines(tx: Tx, *where: ColumnElement[bool], limit: int, liveness: Liveness) -> list[StreamLine]:
    of_it = and_(trigger.c.stream_id == stream.c.id, OPEN_TRIGGER)
    subscribers = select(func.count()).select_from(trigger).where(of_it).correlate(stream).scalar_subquery()
    missing = select(func.count()).select_from(trigger).where(of_it, is_absent()).correlate(stream).scalar_subquery()
    newest = select(func.max(_newest_of(trigger))).where(of_it).correlate(stream).scalar_subquery()
    is_current = (trigger.c.last_failed_at.is_not(None), is_absent())  # not an error that is over
    failed = select(trigger.c.id).where(of_it, *is_current).correlate(stream)
    failed_last = failed.order_by(trigger.c.last_failed_at.desc()).limit(1).scalar_subquery()
    counts = (subscribers.label("subscribers"), missing.label("missing"))
    columns = (*stream.c, *counts, newest.label("newest"), failed_last.label("failed_last"))
    rows = tx.connection.execute(select(*columns).where(*where).order_by(stream.c.id).limit(limit)).all()
    newest_ids = [row.newest for row in rows if row.newest is not None]
    stored = select(trigger_event.c.id, trigger_event.c.stored_at).where(trigger_event.c.id.in_(newest_ids))
    stored_at: dict[int, datetime] = {id_: at for id_, at in tx.connection.execute(stored)}
    statuses = published(tx, {row.triggerer_id for row in rows if row.triggerer_id is not None})
    live = _live(tx, rows, statuses)
    owners = supervisor_texts(tx, {row.triggerer_id for row in rows if row.triggerer_id is not None}, liveness=liveness)
    failing_ids = [row.failed_last for row in rows if row.failed_last is not None]
    of_failure = select(trigger.c.id, trigger.c.last_failed_at, trigger.c.last_error).where(
        trigger.c.id.in_(failing_ids)
    )
    failures = {failure.id: failure for failure in tx.connection.execute(of_failure)}
    lines = []
    for row in rows:
        failure, said = failures.get(row.failed_last), statuses.get(row.triggerer_id)
        lines.append(
            StreamLine(
                id=row.id,
                name=row.name,
                queue=row.queue,
                triggerer_id=row.triggerer_id,
                supervisor=owners.get(row.triggerer_id),
                subscribers=row.subscribers,
                missing=row.missing,
                stored_at=stored_at.get(row.newest),
                last_failed_at=None if failure is None else failure.last_failed_at,
                last_error=None if failure is None else failure.last_error,
                live=live.get(row.id),
                unreadable=None if said is None else said.unreadable,
            )
        )
    return lines


def _subscribers(tx: Tx, stream_id: int, limit: int) -> list[SubscriberLine]:
    newest = _newest_of(trigger).label("newest")
    statement = (
        select(*ABSENCE_COLUMNS, is_absent().label("is_absent"), newest)
        .select_from(trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id))
        .where(trigger.c.stream_id == stream_id, OPEN_TRIGGER)
        .order_by(trigger.c.id)
        .limit(limit)
    )
    rows = tx.connection.execute(statement).all()
    stored = (
        select(trigger_event.c.id, trigger_event.c.stored_at, redelivery.c.count.label("redelivered"))
        .select_from(trigger_event.outerjoin(redelivery))
        .where(trigger_event.c.id.in_([row.newest for row in rows if row.newest is not None]))
    )
    events = {event.id: event for event in tx.connection.execute(stored)}
    of_it = and_(dead_letter.c.trigger_id.in_([row.id for row in rows]), dead_letter.c.state == "open")
    counted = select(dead_letter.c.trigger_id, func.count()).where(of_it).group_by(dead_letter.c.trigger_id)
    letters: dict[int, int] = {id_: count for id_, count in tx.connection.execute(counted)}
    lines = []
    for row in rows:
        event = events.get(row.newest)
        lines.append(
            SubscriberLine(
                trigger_id=row.id,
                name=row.name or f"trigger-{row.id}",
                missing=absence(tx, row) if row.is_absent else None,
                hold=row.hold,
                newest_event_id=row.newest,
                stored_at=None if event is None else event.stored_at,
                redelivered=0 if event is None else event.redelivered or 0,
                open_letters=letters.get(row.id, 0),
                failure_count=row.failure_count,
                last_failed_at=row.last_failed_at,
                last_error=row.last_error,
            )
        )
    return lines
