"""The event log: a slice of a round goes in whole or not at all, and no event goes in twice (I2).

Two unique constraints of the database ensure this. ``(trigger_run_id, sequence_index)`` identifies the event: if it is
unknown whether a commit arrived, the slice is stored again, which has no effect if it did. ``(trigger_id, key,
position)`` identifies the message that the event derives from: if a broker delivers it again, the event is counted in
``redelivery``. In both cases the event is in the database, and this is checked before the caller is told so.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import and_, bindparam, case, func, literal_column, null, or_, select, update

from headgate.protocol.messages.queries import StoredEvent
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    FinishedTrigger,
    FiredEvent,
    RefusedEvent,
)
from headgate.store.db.bulk import Kind, find, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import RowsRefused
from headgate.store.tables import trigger, trigger_event
from headgate.store.triggers import redeliveries, strikes
from headgate.store.triggers.dead_letters import storable_text
from headgate.store.triggers.redeliveries import Difference
from headgate.store.triggers.streams import NOTHING_PLACED, Placed
from headgate.store.triggers.watchers import Replaced

REDRIVEN_RUN = "redriven "  # instead of a run, of an event that a stream gets once more; the id of its letter follows
Identity = tuple[str, int]  # trigger_run_id, sequence_index
Message = tuple[int, str]  # a trigger, and the key of the message
RunId = tuple[int, str]  # a trigger, and the id of one of its runs
Struck = Mapping[Message, strikes.Strikes]

EVENT = Kind(
    trigger_event,
    ("trigger_id", "trigger_run_id", "sequence_index", "key", "position", "kind", "payload", "is_last", "stored_at"),
)
_IDENTITY = Kind(trigger_event, ("trigger_run_id", "sequence_index"))


class StoredSlice(msgspec.Struct, frozen=True):
    """Result of storing a slice: the number of events stored now and of redelivered ones, and failure counts.

    ``failure_counts`` has, by id, the triggers that the slice reports as failed and the caller owns. ``over``: triggers
    that are not to be started again, because the task that waited has gone on in this slice. ``moved_tasks``: whether a
    task may continue, or a run begin, because of this slice. ``struck``: the messages that a trigger has failed on, by
    trigger and key. ``differing``: events that differ from those stored under their names, and are dead letters now.
    ``placed``: which described triggers may be started. ``fired``: how many events the runs of triggers have fired that
    feed streams of tasks, as far as is stored. ``has_sent``: whether some were sent as signals.
    ``replaced``: the first of each watcher whose signal has its id in place of its payload.
    """

    stored: int
    redelivered: int
    failure_counts: dict[int, int]
    over: frozenset[int] = frozenset()
    moved_tasks: bool = False
    struck: Struck = msgspec.field(default_factory=dict)
    differing: tuple[Difference, ...] = ()
    placed: Placed = NOTHING_PLACED
    fired: Mapping[RunId, int] = msgspec.field(default_factory=dict)
    has_sent: bool = False
    replaced: tuple[Replaced, ...] = ()

    @property
    def passed_over(self) -> list[Message]:
        """The messages that their trigger is not given any more, because it has failed on them too often."""
        return [message for message, strikes in self.struck.items() if strikes.is_passed_over]

    @property
    def braked(self) -> dict[int, str]:
        """The triggers that are held from now on because they were passed over too many messages, and why."""
        return {trigger_id: struck.brake for (trigger_id, _), struck in self.struck.items() if struck.brake}


def _identity(event: FiredEvent) -> Identity:
    return event.trigger_run_id, event.sequence_index


def fired_by_runs(items: Iterable[FiredEvent | RefusedEvent], triggers: Collection[int]) -> dict[RunId, int]:
    """Return the number of events that the runs of these triggers have fired, by the last ones among the items."""
    fired: dict[RunId, int] = {}
    for item in items:
        if item.trigger_id in triggers:
            run = item.trigger_id, item.trigger_run_id
            fired[run] = max(item.sequence_index + 1, fired.get(run, 0))
    return fired


def rows_of(events: Sequence[FiredEvent], stored_at: Any) -> list[tuple[Any, ...]]:
    """Return events as rows of the columns `EVENT`; ``stored_at`` is in the driver's form."""
    return [
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


class Inserted(NamedTuple):
    """What storing events has done: how many are new, and redelivered, and which differ from those stored.

    ``fed`` has the new ones of triggers that have a feed, by the ids of their rows.
    """

    stored: int
    redelivered: int
    differing: tuple[Difference, ...]
    fed: Mapping[int, FiredEvent]


def insert_events(tx: Tx, events: Sequence[FiredEvent], feeds: Container[int] = ()) -> Inserted:
    """Store the events that are not stored yet. ``feeds`` has the triggers whose new events are returned.

    A redelivery that is itself reported again, because it was unknown whether its commit arrived, is counted again. If
    the message of an event became a dead letter earlier, the event is stored if it can be now, because readers follow
    the log; the dead letter stays as the record of the first try.
    """
    for event in events:
        # PostgreSQL refuses NUL. SQLite stores it, but then measures and shows the text only up to it.
        if "\0" in event.trigger_run_id or (event.key is not None and "\0" in event.key):
            raise RowsRefused(f"the key or the run id of an event of trigger {event.trigger_id} contains NUL")
    rows = rows_of(events, bound(tx.connection, tx.now))
    feeding = {_identity(event): event for event in events if event.kind == "event" and event.trigger_id in feeds}
    if feeding:
        inserted = insert_new(tx.connection, EVENT, rows, returning=(*_IDENTITY.columns, "id"))
        stored = {row[:2] for row in inserted}
        fed = {row[2]: feeding[row[:2]] for row in inserted if row[:2] in feeding}
    else:
        stored, fed = set(insert_new(tx.connection, EVENT, rows, returning=_IDENTITY.columns)), {}
    if len(stored) == len(events):
        return Inserted(len(stored), 0, (), fed)
    left = {_identity(event): event for event in events if _identity(event) not in stored}
    redelivered, differing = redeliveries.count(tx, list(left.values())) if left else (0, ())
    return Inserted(len(stored), redelivered, differing, fed)


def with_key(tx: Tx, trigger_id: int, key: str) -> int | None:
    """Return the first event of a trigger that has this key, by its id; None if there is none."""
    keyed = trigger_event.c.trigger_id == trigger_id, trigger_event.c.key == key
    found: int | None = tx.connection.execute(select(func.min(trigger_event.c.id)).where(*keyed)).scalar_one()
    return found


def id_of(tx: Tx, event: FiredEvent) -> int:
    """Return the id of an event that is stored under its own names."""
    named = zip(_IDENTITY.columns, _identity(event), strict=True)
    found = select(trigger_event.c.id).where(*(trigger_event.c[name] == value for name, value in named))
    return int(tx.connection.execute(found).scalar_one())


class EventVerbs(Verbs):
    """The verbs of the event log, except those of `headgate.store.store.Store`, which concern tasks as well."""

    @reading
    def last_event(self, tx: Tx, trigger_id: int) -> StoredEvent | None:
        """Return the event of a trigger that was stored last, if there is one.

        Redeliveries do not count, nor an event that is given to a task's stream once more: it is as old as it was.
        """
        statement = (
            select(
                trigger_event.c.trigger_run_id,
                trigger_event.c.sequence_index,
                trigger_event.c.payload,
                trigger_event.c.key,
            )
            .where(trigger_event.c.trigger_id == trigger_id, ~trigger_event.c.trigger_run_id.startswith(REDRIVEN_RUN))
            .order_by(trigger_event.c.id.desc())
            .limit(1)
        )
        row = tx.connection.execute(statement).first()
        return None if row is None else StoredEvent(**row._mapping)


# --- runs of triggers that ended -----------------------------------------------------------------


def finish(tx: LeasedTx, finished: Sequence[FinishedTrigger]) -> tuple[dict[int, int], Struck]:
    """Record how trigger runs ended; return the `StoredSlice.failure_counts`, and the strikes of messages.

    A trigger that the epoch does not own is left unchanged. Repeating it changes nothing.
    """
    returned = [run for run in finished if run.outcome == "returned"]
    failed = [run for run in finished if run.outcome == "failed"]
    if returned:
        _record_returned(tx, returned)
    if not failed:
        return {}, {}
    counts = _record_failed(tx, failed)
    struck = [
        strikes.Failure(run.trigger_id, run.message_key, run.trigger_run_id, _error_of(run))
        for run in failed
        if run.message_key is not None
    ]
    return counts, strikes.count(tx, struck) if struck else {}


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
    # It is finished already if the task that waited for it has continued; now its owner has released it, too. If a user
    # has changed or restarted it since its owner last read it, it is not finished: whoever claims it starts it again.
    .values(
        finished_at=case(
            (trigger.c.changed_at.is_not(None), trigger.c.finished_at),
            else_=func.coalesce(trigger.c.finished_at, bindparam("now")),
        ),
        triggerer_id=null(),
    )
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
