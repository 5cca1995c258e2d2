"""Events that a consumer does not take: which one it is, how often it was tried, and when it is set aside.

A batch that fails is rolled back, so nothing in it can count the failure. It is counted afterwards, in a transaction of
its own, and only while the consumer is still at the place of that batch. From then on events are handed over one by
one, up to the end of that batch: the bad one is found, and the others are taken. An event that has failed alone
``max_deliveries`` times becomes a letter (`headgate.store.consuming.set_aside`), and the place moves past it in the
same transaction.

**A process that dies** counts nothing. So a batch is recorded before it is handed over, in a transaction of its own:
the first of each process, and each of a single event that may be bad. Not every batch, because that would be a second
commit for each. If a record is older than `UNFINISHED_AFTER_S` when the next worker has locked the place, nobody is
handing that batch over any more, and its end counts as a failure.

**If everything fails** the events are not the reason: after `ASIDE_IN_A_ROW_MAX` events set aside without one taken in
between, no more are. The consumer then stays where it is until its next event is taken.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import update

from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.store.consuming import places, reading, set_aside
from headgate.store.consuming.places import Place
from headgate.store.consuming.reading import Cursor
from headgate.store.db.transaction import Tx
from headgate.store.tables import consumer
from headgate.store.triggers.dead_letters import storable_text

MAX_DELIVERIES = 5  # of one event alone, if the caller does not say
ASIDE_IN_A_ROW_MAX = 10  # then what is wrong is not the events
# A batch begins right after its record: within this time, unless its process stands still.
UNFINISHED_AFTER_S = 5.0
UNFINISHED = "the process that had it ended, or lost the database, before it had taken it"


class Recorded(NamedTuple):
    """A batch as its consumer has it recorded: since when, and up to where."""

    at: datetime
    to: Cursor


def record(tx: Tx, place: Place, limit: int, own: Recorded | None = None) -> Recorded | None:
    """Count a batch that has not ended, and record the one that is handed over next, for a locked consumer.

    Return the record; None if there is no event, or the record is another worker's. ``own`` is that of this process, if
    it could not hand it over afterwards: nothing has failed then but the wait for the database, or for another worker.
    """
    if place.taken_at is not None and Recorded(place.taken_at, place.taken_to) != own:
        if (tx.now - place.taken_at).total_seconds() < UNFINISHED_AFTER_S:
            return None  # another worker is about to hand it over, or has died at once: the next one will see
        count(tx, place, place.taken_to, UNFINISHED)
        place = places.lock(tx, place.name)
    page = reading.read_page(tx, place.watcher, place.cursor, 1 if place.is_careful else limit)
    if not page.events:
        return None
    _set(tx, place, taken_to=str(page.cursor), taken_at=tx.now)
    return Recorded(tx.now, page.cursor)


def count_failure(tx: Tx, before: Place, to: Cursor, error: str, traceback: str) -> None:
    """Count a batch from a place up to ``to`` whose transaction was rolled back; nothing if the consumer has moved."""
    place = places.lock(tx, before.name)
    if place.id == before.id and place.cursor == before.cursor:
        count(tx, place, to, error, traceback)


def count(tx: Tx, place: Place, to: Cursor, error: str, traceback: str = "") -> None:
    """Count that the events from the place of a locked consumer up to ``to`` were not taken.

    Only an event that was alone in its batch can be told to be bad, and is set aside at the limit.
    """
    first = reading.read_page(tx, place.watcher, place.cursor, 1)
    if not first.events:
        return
    failures = place.failures + (first.cursor == to)
    error, traceback = storable_text(error, ERROR_CHARS_MAX), storable_text(traceback, ERROR_CHARS_MAX)
    values: dict[str, Any] = {"failures": failures, "last_error": error, "failed_at": tx.now}
    if 0 < place.max_deliveries <= failures and place.aside_in_a_row < ASIDE_IN_A_ROW_MAX:
        set_aside.add(tx, place, first.events[0], failures, error, traceback)
        values |= {"trigger_id": first.cursor.trigger_id, "event_id": first.cursor.event_id, "failures": 0}
        values |= {"aside_in_a_row": place.aside_in_a_row + 1}
    _set(tx, place, careful_to=str(max(place.careful_to, to)), taken_to=None, taken_at=None, **values)


def _set(tx: Tx, place: Place, **values: Any) -> None:
    tx.connection.execute(update(consumer).where(consumer.c.id == place.id).values(**values))
