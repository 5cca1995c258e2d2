"""Events that are in the database already: the same event, reported again, or the same message, delivered again.

They are counted and not stored again (I2). If a trigger derives something else from a message than it did the first
time, the events of the two deliveries cannot be told apart by position: one of them would be lost without a trace. So
each event is compared with the stored one. The stored one counts; one that differs becomes a dead letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from headgate.protocol.messages.runner import FiredEvent
from headgate.store.db.bulk import Kind, compare, insert_or_replace
from headgate.store.db.engine import database_name
from headgate.store.db.times import bound
from headgate.store.db.transaction import Tx
from headgate.store.errors import DatabaseFault
from headgate.store.tables import redelivery, trigger_event
from headgate.store.triggers import dead_letters

_COMPARED = ("kind", "payload")
_SAME_EVENT = Kind(trigger_event, ("trigger_run_id", "sequence_index", *_COMPARED))
_SAME_MESSAGE = Kind(trigger_event, ("trigger_id", "key", "position", *_COMPARED))
_REDELIVERY = Kind(redelivery, ("trigger_event_id", "count", "last_at"))


class Difference(msgspec.Struct, frozen=True):
    """An event whose kind or payload is not that of the stored event ``stored_id``, though its names are the same."""

    event: FiredEvent
    stored_id: int


def count(tx: Tx, events: Sequence[FiredEvent]) -> tuple[int, tuple[Difference, ...]]:
    """Handle events that conflicted with a row; no two have the same run and index.

    The same event needs nothing, the same message is counted. Return the number of the latter, and all events that
    differ from the stored ones: they are dead letters now, one for each message and position at most, the first.
    """
    same_events = compare(
        tx.connection,
        _SAME_EVENT,
        [(event.trigger_run_id, event.sequence_index, event.kind, event.payload) for event in events],
        keys=2,
        returning=("id",),
    )
    reported = {place for place, _, _ in same_events}
    again = [event for place, event in enumerate(events) if place not in reported]
    keyed = [event for event in again if event.key is not None]
    same_messages = compare(
        tx.connection,
        _SAME_MESSAGE,
        [(event.trigger_id, event.key, event.position, event.kind, event.payload) for event in keyed],
        keys=3,
        returning=("id",),
    )
    if len(same_messages) < len(again):
        # A row conflicted, but none is found. For whatever reason, these events must not count as stored (I1).
        unexplained = len(again) - len(same_messages)
        raise DatabaseFault(database_name(tx.connection.engine), f"{unexplained} events are neither new nor stored")
    _add_counts(tx, Counter(stored_id for _, stored_id, _ in same_messages))
    differing = [Difference(events[place], stored_id) for place, stored_id, is_same in same_events if not is_same]
    differing += [Difference(keyed[place], stored_id) for place, stored_id, is_same in same_messages if not is_same]
    if differing:
        dead_letters.dead_letter_many(tx, [(difference.event, _reason(difference)) for difference in differing])
    return len(again), tuple(differing)


def _add_counts(tx: Tx, counts: Counter[int]) -> None:
    last_at: Any = bound(tx.connection, tx.now)
    # By id: two supervisors that count the same events lock them in the same order.
    rows = sorted((stored_id, number, last_at) for stored_id, number in counts.items())
    insert_or_replace(tx.connection, _REDELIVERY, rows, add="count")


def _reason(difference: Difference) -> str:
    return (
        f"event {difference.stored_id} was stored before with the same names and another payload, and it counts: a "
        f"trigger must derive the same events from a message each time it is delivered"
    )
