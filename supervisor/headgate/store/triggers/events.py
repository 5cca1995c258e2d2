"""The event log: a slice of a round goes in whole or not at all, and no event goes in twice (I2).

Two unique constraints of the database ensure this. ``(trigger_run_id, sequence_index)`` identifies the event: if it is
unknown whether a commit arrived, the slice is stored again, which has no effect if it did. ``(trigger_id, key,
position)`` identifies the message that the event derives from: if a broker delivers it again, the event is counted in
``redelivery``. In both cases the event is in the database, and this is checked before the caller is told so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, bindparam, func, literal_column, null, or_, select, update

from headgate.protocol.messages.queries import StoredEvent
from headgate.protocol.messages.runner import ERROR_CHARS_MAX, KEY_CHARS_MAX, FinishedTrigger, FiredEvent
from headgate.store.db.bulk import Kind, find, insert_new, insert_or_add
from headgate.store.db.engine import database_name
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, leased, reading
from headgate.store.errors import DatabaseFault, RowsRefused
from headgate.store.tables import redelivery, trigger, trigger_event
from headgate.store.triggers import assets, dead_letters
from headgate.store.triggers.dead_letters import storable_text

Identity = tuple[str, int]  # trigger_run_id, sequence_index

_EVENT = Kind(
    trigger_event,
    ("trigger_id", "trigger_run_id", "sequence_index", "key", "position", "kind", "payload", "is_last", "stored_at"),
)
_IDENTITY = Kind(trigger_event, ("trigger_run_id", "sequence_index"))
_MESSAGE = Kind(trigger_event, ("trigger_id", "key", "position"))
_REDELIVERY = Kind(redelivery, ("trigger_event_id", "count", "last_at"))


class StoredSlice(msgspec.Struct, frozen=True):
    """Result of storing a slice: the number of events stored now and of redelivered ones, and failure counts.

    ``failure_counts`` has, by id, the triggers that the slice reports as failed and the caller owns. ``over``: those of
    them that need not be started again, because the task that waited has been resumed to fail. ``moved_tasks``: whether
    a task may continue, or a run begin, because of this slice.
    """

    stored: int
    redelivered: int
    failure_counts: dict[int, int]
    over: frozenset[int] = frozenset()
    moved_tasks: bool = False


def _identity(event: FiredEvent) -> Identity:
    return event.trigger_run_id, event.sequence_index


def insert_events(tx: Tx, events: Sequence[FiredEvent], of_assets: Mapping[int, int]) -> tuple[int, int]:
    """Store the events that are not stored yet; return the number of these, and of redelivered ones.

    A redelivery that is itself reported again, because it was unknown whether its commit arrived, is counted again. If
    the message of an event became a dead letter earlier, the event is stored if it can be now, because readers follow
    the log; the dead letter stays as the record of the first try.

    ``of_assets`` has the asset of each trigger that may have one. New events of these wait for the runs of DAGs.
    """
    for event in events:
        # PostgreSQL refuses NUL. SQLite stores it, but then measures and shows the text only up to it.
        if "\0" in event.trigger_run_id or (event.key is not None and "\0" in event.key):
            raise RowsRefused(f"the key or the run id of an event of trigger {event.trigger_id} contains NUL")
    stored_at = bound(tx.connection, tx.now)
    rows = [
        (
            event.trigger_id,
            event.trigger_run_id,
            event.sequence_index,
            event.key,
            event.position,
            event.kind,
            event.payload,
            event.is_last,
            stored_at,
        )
        for event in events
    ]
    if any(event.trigger_id in of_assets for event in events):
        inserted = insert_new(tx.connection, _EVENT, rows, returning=(*_IDENTITY.columns, "id", "trigger_id", "kind"))
        _have_wait(tx, of_assets, inserted)
        stored = {row[:2] for row in inserted}
    else:
        stored = set(insert_new(tx.connection, _EVENT, rows, returning=_IDENTITY.columns))
    if len(stored) == len(events):
        return len(stored), 0
    left = {_identity(event): event for event in events if _identity(event) not in stored}
    return len(stored), _count_redeliveries(tx.connection, stored_at, left) if left else 0


def _have_wait(tx: Tx, of_assets: Mapping[int, int], inserted: Sequence[tuple[Any, ...]]) -> None:
    waits = {
        event_id: of_assets[trigger_id]
        for _, _, event_id, trigger_id, kind in inserted
        if trigger_id in of_assets and kind == "event"
    }
    if waits and assets.wait(tx, waits):
        tx.notify()


def _count_redeliveries(connection: Connection, stored_at: Any, events: dict[Identity, FiredEvent]) -> int:
    """Handle events that conflicted with a row: the same event needs nothing, the same message is counted."""
    known = set(find(connection, _IDENTITY, list(events), returning=_IDENTITY.columns))
    again = Counter(
        (event.trigger_id, event.key, event.position) for name, event in events.items() if name not in known
    )
    keyed = [message for message in again if message[1] is not None]
    rows = find(connection, _MESSAGE, keyed, returning=("id", *_MESSAGE.columns))
    first = {(trigger_id, key, position): event_id for event_id, trigger_id, key, position in rows}
    unexplained = again.keys() - first.keys()
    if unexplained:
        # A row conflicted, but none is found. For whatever reason, these events must not count as stored (I1).
        raise DatabaseFault(database_name(connection.engine), f"{len(unexplained)} events are neither new nor stored")
    # By id: two supervisors that count the same events lock them in the same order.
    counts = sorted((event_id, again[message], stored_at) for message, event_id in first.items())
    insert_or_add(connection, _REDELIVERY, counts, add="count")
    return again.total()


class EventVerbs(Verbs):
    """The verbs of the event log, except `Store.store_slice`, which concerns tasks as well."""

    @leased
    def dead_letter_event(self, tx: LeasedTx, event: FiredEvent, reason: str) -> None:
        """Record an event as a dead letter, with its whole payload. Repeating it changes nothing."""
        dead_letters.dead_letter(tx, event, reason)

    @reading
    def last_event(self, tx: Tx, trigger_id: int) -> StoredEvent | None:
        """Return the event of a trigger that was stored last, if there is one; redeliveries do not count."""
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
        row = tx.connection.execute(statement).first()
        return None if row is None else StoredEvent(**row._mapping)


# --- runs of triggers that ended -----------------------------------------------------------------


def finish(tx: LeasedTx, finished: Sequence[FinishedTrigger]) -> dict[int, int]:
    """Record how trigger runs ended; return the failure counts of those that failed, by trigger id.

    A trigger that the epoch does not own is left unchanged. Repeating it changes nothing.
    """
    returned = [run for run in finished if run.outcome == "returned"]
    failed = [run for run in finished if run.outcome == "failed"]
    if returned:
        _record_returned(tx, returned)
    return _record_failed(tx, failed) if failed else {}


_MARK_LAST = Prepared(
    update(trigger_event)
    .where(
        trigger_event.c.trigger_run_id == bindparam("run_id"),
        trigger_event.c.sequence_index == bindparam("last_index"),
        trigger_event.c.trigger_id == bindparam("id_"),
    )
    .values(is_last=True)
)
_MINE = and_(trigger.c.id == bindparam("id_"), trigger.c.triggerer_id == bindparam("epoch"))
_RETURNED = Prepared(
    update(trigger)
    .where(_MINE)
    # It is finished already if the task that waited for it has continued; now its owner has released it, too.
    .values(finished_at=func.coalesce(trigger.c.finished_at, bindparam("now")), triggerer_id=null())
)
_FAILED = Prepared(
    update(trigger)
    .where(_MINE, or_(trigger.c.last_failed_run_id.is_(None), trigger.c.last_failed_run_id != bindparam("run_id")))
    .values(
        failure_count=trigger.c.failure_count + literal_column("1"),
        last_error=bindparam("error"),
        last_failed_at=bindparam("now"),
        last_failed_run_id=bindparam("run_id"),
    )
)
_OWNED = Kind(trigger, ("id", "triggerer_id"))


def _record_returned(tx: LeasedTx, runs: Sequence[FinishedTrigger]) -> None:
    _MARK_LAST.run_many(
        tx.connection,
        [{"run_id": run.trigger_run_id, "last_index": run.events - 1, "id_": run.trigger_id} for run in runs],
    )
    ended = bound(tx.connection, tx.now)
    _RETURNED.run_many(tx.connection, [{"id_": run.trigger_id, "epoch": tx.epoch, "now": ended} for run in runs])


def _record_failed(tx: LeasedTx, runs: Sequence[FinishedTrigger]) -> dict[int, int]:
    failed_at = bound(tx.connection, tx.now)
    rows = [
        {
            "id_": run.trigger_id,
            "epoch": tx.epoch,
            "run_id": storable_text(run.trigger_run_id, KEY_CHARS_MAX),
            "error": _error_of(run),
            "now": failed_at,
        }
        for run in runs
    ]
    _FAILED.run_many(tx.connection, rows)
    mine = sorted({(run.trigger_id, tx.epoch) for run in runs})
    return dict(find(tx.connection, _OWNED, mine, returning=("id", "failure_count")))


def _error_of(run: FinishedTrigger) -> str:
    """Return the error in one line, then the traceback."""
    return storable_text(f"{run.error}\n\n{run.traceback}".strip(), ERROR_CHARS_MAX)
