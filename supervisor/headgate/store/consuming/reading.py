"""The events of a watcher in commit order, read from a cursor on.

**Why a cursor names a trigger.** Within one trigger, ids are in commit order, on PostgreSQL too: its events are stored
by one supervisor, in one transaction after the other, and whoever else writes for it excludes that supervisor first
(`headgate.store.triggers.by_hand`). Over several triggers they are not: one supervisor may commit an event with a
smaller id after another has committed one with a greater id, and a reader that was in between would miss it. So a
cursor holds the id of one trigger's event, and is compared with the ids of this trigger only.

**A watcher that was removed and added again** has another trigger. A reader of the name reads the triggers in the order
in which they were added. It leaves a removed one once it has read all of its events and nobody can add to them any
more: the trigger has no owner, or one whose lease is over. Until then the events of the next trigger wait. This is
looked at before the events are read, so that nothing that was committed before is overlooked.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Integer, and_, bindparam, func, or_, select

from headgate.protocol.messages.runner import EventKind
from headgate.protocol.values import decode_value
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import read
from headgate.store.db.transaction import Tx
from headgate.store.errors import CursorRefused, NoSuchWatcher, ValueRefused
from headgate.store.tables import asset_watcher, trigger, trigger_event, triggerer
from headgate.store.triggers.watchers import check_known

BATCH_EVENTS_MAX = 1_000  # read at once; each may have a payload of 1 MiB
BATCH_EVENTS = 100  # if the caller does not say
ID_DIGITS_MAX = 19
ID_MAX = 2**63 - 1  # of both databases


class Cursor(msgspec.Struct, frozen=True, order=True):
    """A place in the events of a watcher: after the event ``event_id`` of the trigger ``trigger_id``.

    Both are 0 before the first event. It can be kept as text: ``str(cursor)``, and `Cursor.parse`.
    """

    trigger_id: int = 0
    event_id: int = 0

    def __str__(self) -> str:
        return f"{self.trigger_id}:{self.event_id}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor that was written as ``text``. Raises `CursorRefused`."""
        trigger_id, colon, event_id = text.partition(":")
        parts = (trigger_id, event_id)
        if not colon or not all(part.isascii() and part.isdecimal() and len(part) <= ID_DIGITS_MAX for part in parts):
            raise CursorRefused(text, "it is written as TRIGGER_ID:EVENT_ID, for example 3:1024")
        return cls(int(trigger_id), int(event_id))


START = Cursor()  # before the first event


class Event(msgspec.Struct, frozen=True):
    """One stored event of a watcher.

    ``id`` is unique in the database. ``key`` and ``position`` name the message that it derives from, and its place
    among the events derived from it; ``key`` is None if the trigger gave none. ``kind`` is "event", except for events
    that end a task. ``is_last``: its trigger has returned after it. ``stored_at`` is aware, in UTC, by the database's
    clock. ``data`` is the encoded payload, which `payload` decodes.
    """

    id: int
    watcher: str
    trigger_id: int
    key: str | None
    position: int
    kind: EventKind
    data: bytes
    is_last: bool
    stored_at: datetime

    @property
    def payload(self) -> Any:
        """The payload, decoded anew at each access.

        Raises `headgate.protocol.errors.ValueMalformed` for a type that is not registered in this process.
        """
        return decode_value(self.data)

    @property
    def cursor(self) -> Cursor:
        """The place right after this event."""
        return Cursor(self.trigger_id, self.id)


class Page(msgspec.Struct, frozen=True):
    """Events of a watcher from a cursor on, in commit order. ``cursor`` is the place after the last of them.

    ``is_held_up``: a removed trigger still has an owner, so that the events of the next one are not read yet.
    ``triggers`` are those whose new events may come next. A trigger that is added later has an id above
    ``newest_trigger``. Both are set only if the page is not full: nobody waits then.
    """

    events: tuple[Event, ...]
    cursor: Cursor
    is_held_up: bool = False
    triggers: frozenset[int] = frozenset()
    newest_trigger: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there were no events."""
        return not self.events

    def concerns(self, trigger_id: int) -> bool:
        """Whether new events of this trigger may belong to the next page."""
        return trigger_id in self.triggers or trigger_id > self.newest_trigger


class _Trigger(NamedTuple):
    """A trigger that has or had the name. ``is_over``: it was removed, and nobody adds to its events any more."""

    id: int
    is_over: bool


_OWNER_IS_GONE = or_(
    trigger.c.triggerer_id.is_(None), triggerer.c.fenced_at.is_not(None), triggerer.c.stopped_at.is_not(None)
)
_NEWEST_TRIGGER = select(func.max(trigger.c.id)).scalar_subquery()
_TRIGGERS = Prepared(
    select(
        asset_watcher.c.trigger_id,
        and_(asset_watcher.c.removed_at.is_not(None), _OWNER_IS_GONE),
        _NEWEST_TRIGGER,
    )
    .select_from(
        asset_watcher.join(trigger, trigger.c.id == asset_watcher.c.trigger_id).outerjoin(
            triggerer, triggerer.c.id == trigger.c.triggerer_id
        )
    )
    .where(asset_watcher.c.name == bindparam("of_name"), asset_watcher.c.trigger_id >= bindparam("first"))
    .order_by(asset_watcher.c.trigger_id)
)
_EVENT_COLUMNS = (
    *(trigger_event.c.id, trigger_event.c.key, trigger_event.c.position, trigger_event.c.kind),
    *(trigger_event.c.payload, trigger_event.c.is_last, trigger_event.c.stored_at),
)
_EVENTS = Prepared(
    select(*_EVENT_COLUMNS)
    .where(trigger_event.c.trigger_id == bindparam("of_trigger"), trigger_event.c.id > bindparam("after"))
    .order_by(trigger_event.c.id)
    .limit(bindparam("limit", type_=Integer()))
)


def check_limit(limit: int) -> int:
    """Return ``limit``; raise `ValueRefused` unless it is from 1 to `BATCH_EVENTS_MAX`."""
    if not 1 <= limit <= BATCH_EVENTS_MAX:
        raise ValueRefused(f"limit must be from 1 to {BATCH_EVENTS_MAX:,}: {limit}")
    return limit


def read_page(tx: Tx, watcher: str, after: Cursor, limit: int) -> Page:
    """Return up to ``limit`` events of the watcher that has or had this name, after a cursor that is known to be good.

    If the name is not known any more, because all of its events were cleaned away, there are none.
    """
    # A page that the trigger of the cursor fills takes this one statement: which trigger is next does not matter.
    events = _events_of(tx, watcher, after, limit) if after.trigger_id else []
    cursor = events[-1].cursor if events else after
    if len(events) == limit:
        return Page(tuple(events), cursor)
    rows = _TRIGGERS.run(tx.connection, of_name=watcher, first=after.trigger_id).fetchall()
    if not rows:
        return Page(tuple(events), cursor)
    left = [_Trigger(id_, bool(is_over)) for id_, is_over, _ in rows]
    while True:
        one = left[0]
        if one.id == cursor.trigger_id and not one.is_over:
            break  # its events are read already, and more of them may come
        place = cursor if one.id == cursor.trigger_id else Cursor(one.id, 0)
        found = _events_of(tx, watcher, place, limit - len(events))
        events += found
        cursor = found[-1].cursor if found else place
        if len(events) == limit or not one.is_over or len(left) == 1:
            break
        del left[0]
    is_held_up = len(events) < limit and len(left) > 1
    return Page(tuple(events), cursor, is_held_up, frozenset(one.id for one in left), int(rows[0][2]))


def read_event(tx: Tx, watcher: str, trigger_id: int, event_id: int) -> Event:
    """Return one event that is known to be there."""
    (event,) = _events_of(tx, watcher, Cursor(trigger_id, event_id - 1), 1)
    assert event.id == event_id, event_id
    return event


def _events_of(tx: Tx, watcher: str, after: Cursor, limit: int) -> list[Event]:
    rows = _EVENTS.run(tx.connection, of_trigger=after.trigger_id, after=after.event_id, limit=limit).fetchall()
    return [
        Event(
            id=id_,
            watcher=watcher,
            trigger_id=after.trigger_id,
            key=key,
            position=position,
            kind=kind,
            data=bytes(payload),
            is_last=bool(is_last),
            stored_at=read(tx.connection, stored_at),
        )
        for id_, key, position, kind, payload, is_last, stored_at in rows
    ]


# --- cursors that come from outside --------------------------------------------------------------


def check_is_cursor(after: object) -> None:
    """Raise `CursorRefused` for anything else, the text of one for example."""
    if not isinstance(after, Cursor):
        raise CursorRefused(after, f"it is of type {type(after).__name__}; Cursor.parse makes one of a text")


def check_cursor(tx: Tx, watcher: str, after: Cursor) -> None:
    """Raise `NoSuchWatcher` if no watcher has or had this name, `CursorRefused` if the cursor is not one of its own."""
    check_is_cursor(after)
    check_known(tx, watcher)
    if after.trigger_id < 0 or after.event_id < 0:
        raise CursorRefused(after, "no id is negative")
    if max(after.trigger_id, after.event_id) > ID_MAX:
        raise CursorRefused(after, "no id is that large")
    if after.trigger_id == 0:
        if after.event_id:
            raise CursorRefused(after, "it has an event, but no trigger")
        return
    of = select(asset_watcher.c.name, asset_watcher.c.removed_at).where(asset_watcher.c.trigger_id == after.trigger_id)
    found = tx.connection.execute(of).first()
    if found is None:
        _check_gone(tx, after)
        return
    if found.name != watcher:
        raise CursorRefused(after, f"its trigger is that of the watcher {found.name!r}, not of {watcher!r}")
    newest = select(func.max(trigger_event.c.id)).where(trigger_event.c.trigger_id == after.trigger_id)
    end = tx.connection.execute(newest).scalar_one()
    # Of a trigger that was removed, its newest events may have been cleaned away; of any other the newest is kept.
    if after.event_id > (end or 0) and found.removed_at is None:
        raise CursorRefused(after, _beyond("the newest event of its trigger is", end))


def _check_gone(tx: Tx, after: Cursor) -> None:
    """Check a cursor whose trigger is not that of a watcher: it may have been cleaned away after it was removed."""
    if tx.connection.execute(select(trigger.c.id).where(trigger.c.id == after.trigger_id)).first() is not None:
        raise CursorRefused(after, "its trigger is that of a task, and not of a watcher")
    newest = tx.connection.execute(select(func.max(trigger.c.id))).scalar_one()
    if after.trigger_id > (newest or 0):
        raise CursorRefused(after, _beyond("the newest trigger is", newest))


def _beyond(what: str, newest: int | None) -> str:
    return f"{what} {newest}, so it is beyond the end; is it of another database?"


def newest_cursor(tx: Tx, watcher: str) -> Cursor:
    """Return the place after all events of the watcher of this name that are stored now. Raises `NoSuchWatcher`."""
    named = select(func.max(asset_watcher.c.trigger_id)).where(asset_watcher.c.name == watcher)
    trigger_id = tx.connection.execute(named).scalar_one()
    if trigger_id is None:
        raise NoSuchWatcher(watcher)
    newest = select(func.max(trigger_event.c.id)).where(trigger_event.c.trigger_id == trigger_id)
    return Cursor(int(trigger_id), tx.connection.execute(newest).scalar_one() or 0)
