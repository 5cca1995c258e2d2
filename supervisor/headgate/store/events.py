"""The event log: a slice of a round goes in whole or not at all, and no event goes in twice (I2).

Two unique rules do the work, and the database holds them. ``(trigger_run_id, sequence_index)`` names the
event: when nobody knows whether a commit happened, the slice is stored again, and nothing comes of it.
``(trigger_id, key, position)`` names what the event derives from: when a broker delivers a message again,
the event is counted in ``redelivery``. Whichever it was, in the end the event is in the database, and this
is checked before the caller hears that it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

import msgspec
from sqlalchemy import BindParameter, Connection, and_, bindparam, or_, select, update

from headgate.protocol.messages import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    FinishedTrigger,
    FiredEvent,
    StoredEvent,
)
from headgate.store.bulk import ROWS_PER_STATEMENT_MAX, chunks, insert_new, insert_or_add, is_one_of
from headgate.store.dead_letters import storable_text
from headgate.store.engine import database_name
from headgate.store.errors import DatabaseFault, RowsRefused
from headgate.store.tables import redelivery, trigger, trigger_event

Identity = tuple[str, int]  # trigger_run_id, sequence_index
Message = tuple[int, str, int]  # trigger_id, key, position


class StoredSlice(msgspec.Struct, frozen=True):
    """What became of a slice: events stored now, events that came again, and failures so far by trigger id.

    ``failure_counts`` has the triggers that the slice reports as failed and the caller owns.
    """

    stored: int
    redelivered: int
    failure_counts: dict[int, int]


def _identity(event: FiredEvent) -> Identity:
    return event.trigger_run_id, event.sequence_index


def insert_events(connection: Connection, now: datetime, events: Sequence[FiredEvent]) -> tuple[int, int]:
    """Store those events that are not stored yet; return how many were, and how many came again.

    A redelivery that is itself reported again, after a commit of which nobody knew, is counted again. An
    event whose message was buried earlier is stored if it can be now: the log is what its readers read, and
    the dead letter stays as the record of the first try.
    """
    for event in events:
        # PostgreSQL refuses NUL. SQLite takes it, but then measures and shows the text only up to there.
        if "\0" in event.trigger_run_id or (event.key is not None and "\0" in event.key):
            raise RowsRefused(f"the key or the run id of an event of trigger {event.trigger_id} contains NUL")
    rows = [
        {
            "trigger_id": event.trigger_id,
            "trigger_run_id": event.trigger_run_id,
            "sequence_index": event.sequence_index,
            "key": event.key,
            "position": event.position,
            "kind": event.kind,
            "payload": event.payload,
            "is_last": event.is_last,
            "stored_at": now,
        }
        for event in events
    ]
    identity = [trigger_event.c.trigger_run_id, trigger_event.c.sequence_index]
    inserted = insert_new(connection, trigger_event, rows, returning=identity)
    stored = {(run_id, index) for run_id, index in inserted}
    left = {_identity(event): event for event in events if _identity(event) not in stored}
    return len(stored), _count_redeliveries(connection, now, left) if left else 0


def _count_redeliveries(connection: Connection, now: datetime, events: dict[Identity, FiredEvent]) -> int:
    """Account for events that met a row: the same event needs nothing, the same message is counted."""
    known = _stored_identities(connection, list(events))
    again = Counter(
        (event.trigger_id, event.key, event.position) for name, event in events.items() if name not in known
    )
    first = _stored_messages(connection, [(id_, key, position) for id_, key, position in again if key is not None])
    unexplained = again.keys() - first.keys()
    if unexplained:
        # They met a row and yet there is none: they must not count as stored, whatever the reason is (I1).
        raise DatabaseFault(database_name(connection.engine), f"{len(unexplained)} events are neither new nor stored")
    counts = [
        {"trigger_event_id": event_id, "count": again[message], "last_at": now}
        for message, event_id in sorted(first.items(), key=lambda item: item[1])
    ]
    insert_or_add(connection, redelivery, counts, add=redelivery.c["count"])
    return again.total()


def _stored_identities(connection: Connection, identities: Sequence[Identity]) -> set[Identity]:
    columns = (trigger_event.c.trigger_run_id, trigger_event.c.sequence_index)
    found: set[Identity] = set()
    for some in chunks(identities, ROWS_PER_STATEMENT_MAX):
        rows = connection.execute(select(*columns).where(is_one_of(connection, columns, some)))
        found.update((run_id, index) for run_id, index in rows)
    return found


def _stored_messages(connection: Connection, messages: Sequence[Message]) -> dict[Message, int]:
    """Return the id of the stored event of each message that has one."""
    columns = (trigger_event.c.trigger_id, trigger_event.c.key, trigger_event.c.position)
    found: dict[Message, int] = {}
    for some in chunks(messages, ROWS_PER_STATEMENT_MAX):
        rows = connection.execute(select(trigger_event.c.id, *columns).where(is_one_of(connection, columns, some)))
        found.update(((trigger_id, key, position), event_id) for event_id, trigger_id, key, position in rows)
    return found


def last(connection: Connection, trigger_id: int) -> StoredEvent | None:
    """Return the event of a trigger that was stored last; events that came again do not count."""
    statement = (
        select(
            trigger_event.c.trigger_run_id,
            trigger_event.c.sequence_index,
            trigger_event.c.payload,
            trigger_event.c.key,
        )
        .where(trigger_event.c.trigger_id == trigger_id)
        .order_by(trigger_event.c.id.desc())
        .limit(1)
    )
    row = connection.execute(statement).first()
    return None if row is None else StoredEvent(**row._mapping)


# --- runs that ended -----------------------------------------------------------------------------


def finish(connection: Connection, epoch: int, now: datetime, finished: Sequence[FinishedTrigger]) -> dict[int, int]:
    """Record how trigger runs ended; return the failures so far of those that failed, by trigger id.

    A trigger that ``epoch`` does not own is left alone. Doing it again changes nothing.
    """
    returned = [run for run in finished if run.outcome == "returned"]
    failed = [run for run in finished if run.outcome == "failed"]
    if returned:
        _record_returned(connection, epoch, now, returned)
    return _record_failed(connection, epoch, now, failed) if failed else {}


def _record_returned(connection: Connection, epoch: int, now: datetime, runs: Sequence[FinishedTrigger]) -> None:
    last_event = and_(
        trigger_event.c.trigger_run_id == bindparam("run_id"),
        trigger_event.c.sequence_index == bindparam("last_index"),
        trigger_event.c.trigger_id == bindparam("id_"),
    )
    connection.execute(
        update(trigger_event).where(last_event).values(is_last=True),
        [{"run_id": run.trigger_run_id, "last_index": run.events - 1, "id_": run.trigger_id} for run in runs],
    )
    mine = and_(trigger.c.id == bindparam("id_"), trigger.c.triggerer_id == epoch, trigger.c.finished_at.is_(None))
    connection.execute(
        update(trigger).where(mine).values(finished_at=now, triggerer_id=None),
        [{"id_": run.trigger_id} for run in runs],
    )


def _record_failed(
    connection: Connection, epoch: int, now: datetime, runs: Sequence[FinishedTrigger]
) -> dict[int, int]:
    run_id: BindParameter[str] = bindparam("run_id")
    not_counted = or_(trigger.c.last_failed_run_id.is_(None), trigger.c.last_failed_run_id != run_id)
    statement = (
        update(trigger)
        .where(trigger.c.id == bindparam("id_"), trigger.c.triggerer_id == epoch, not_counted)
        .values(
            failure_count=trigger.c.failure_count + 1,
            last_error=bindparam("error"),
            last_failed_at=now,
            last_failed_run_id=run_id,
        )
    )
    connection.execute(
        statement,
        [
            {"id_": run.trigger_id, "run_id": storable_text(run.trigger_run_id, KEY_CHARS_MAX), "error": _error_of(run)}
            for run in runs
        ],
    )
    counts: dict[int, int] = {}
    for ids in chunks(sorted({run.trigger_id for run in runs})):
        mine = and_(trigger.c.id.in_(ids), trigger.c.triggerer_id == epoch)
        rows = connection.execute(select(trigger.c.id, trigger.c.failure_count).where(mine))
        counts.update((trigger_id, count) for trigger_id, count in rows)
    return counts


def _error_of(run: FinishedTrigger) -> str:
    """Return the error in one line, then the traceback."""
    return storable_text(f"{run.error}\n\n{run.traceback}".strip(), ERROR_CHARS_MAX)
