"""What new events of watchers go to, beside the log: to the DAGs on an asset, and to a key of signals.

This is done in the transaction that stores the event, and the log has each event once (I2): so each is a signal exactly
once, in the order of the log. Keys of signals are locked until the commit (`headgate.store.signals.sending`), after the
rows of tasks: whoever stores events calls `feed` last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from uuid import uuid4

from sqlalchemy import func, select

from headgate.protocol.encoded_values import encoding_problem
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.messages.signals import AUTOMATIC, SIGNAL_BYTES_MAX
from headgate.protocol.values import encode_value
from headgate.store.db.transaction import Tx
from headgate.store.signals import sending
from headgate.store.signals.sending import SENDER_CHARS_MAX, NewSignal
from headgate.store.tables import signal, signal_key
from headgate.store.triggers import assets
from headgate.store.triggers.watchers import Feed, Replaced

NEWEST_LOOKED_AT: Final = 100  # versions of a key: few are read, and it is told if most events do not fit
_SENDER: Final = "watcher "
_ID_ALONE: Final = re.compile(rb'\{"event_id": ?\d+, ?"bytes": ?\d+\}')


class Fed(NamedTuple):
    """Whether events were sent as signals, and the first of each watcher whose signal does not have its payload."""

    has_sent: bool
    replaced: tuple[Replaced, ...]


NOTHING_FED: Final = Fed(False, ())


def feed(tx: Tx, events: Mapping[int, FiredEvent], feeds: Mapping[int, Feed]) -> Fed:
    """Have new events, by their ids, wait for runs of DAGs, and send them as signals.

    ``feeds`` are those of their triggers.
    """
    waits: dict[int, int] = {}
    signals: list[NewSignal] = []
    replaced: dict[str, Replaced] = {}
    for event_id, event in sorted(events.items()):
        to = feeds[event.trigger_id]
        if to.asset_id is not None:
            waits[event_id] = to.asset_id
        if to.signal is not None:
            fits = len(event.payload) <= SIGNAL_BYTES_MAX and encoding_problem(event.payload) is None
            signals.append(_signal(event_id, event, to.watcher, *to.signal, fits=fits))
            if not fits:
                replaced.setdefault(to.watcher, Replaced(to.watcher, event_id, len(event.payload)))
    if waits and assets.wait(tx, waits):
        tx.notify()
    if signals:
        # A watcher adds one key at most, and its events must be stored: they count for no limit of keys.
        sending.send(tx, signals, is_limited=False)
    return Fed(bool(signals), tuple(replaced.values()))


def count_replaced(tx: Tx, key: str, namespace: str) -> int:
    """Return how many of the newest `NEWEST_LOOKED_AT` versions of a key do not have the payload of their event."""
    newest = (
        select(signal.c.value, signal.c.sender)
        .select_from(signal.join(signal_key))
        .where(signal_key.c.namespace == namespace, signal_key.c.key == key)
        .where(signal.c.version > signal_key.c.last_version - NEWEST_LOOKED_AT)
        .subquery()
    )
    short = select(newest.c.value).where(newest.c.sender.startswith(_SENDER), func.length(newest.c.value) < 100)
    return sum(_ID_ALONE.fullmatch(bytes(value)) is not None for value in tx.connection.execute(short).scalars())


def _signal(event_id: int, event: FiredEvent, watcher: str, namespace: str, key: str, *, fits: bool) -> NewSignal:
    value = event.payload
    if not fits:
        # The event is stored, so it is not refused for that: whoever reads the signal finds it by its id.
        value = encode_value({"event_id": event_id, "bytes": len(value)}, where="the signal of an event")
    # What has an event sent once is that the log has it once. A dedup that somebody else could guess would keep it out.
    dedup = f"{AUTOMATIC}event {event_id} {uuid4().hex}"
    return NewSignal(key, value, dedup, f"{_SENDER}{watcher}"[:SENDER_CHARS_MAX], namespace)
