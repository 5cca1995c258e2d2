"""What new events of watchers go to, beside the log: to the DAGs on an asset, and to a key of signals.

This is done in the transaction that stores the event, and the log has each event once (I2): so each is a signal exactly
once, in the order of the log. Keys of signals are locked until the commit (`headgate.store.signals.sending`), after the
rows of tasks: whoever stores events calls `feed` last.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from headgate.protocol.encoded_values import encoding_problem
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.messages.signals import AUTOMATIC, SIGNAL_BYTES_MAX
from headgate.protocol.values import encode_value
from headgate.store.db.transaction import Tx
from headgate.store.signals import sending
from headgate.store.signals.sending import SENDER_CHARS_MAX, NewSignal
from headgate.store.triggers import assets
from headgate.store.triggers.watchers import Feed


def feed(tx: Tx, events: Mapping[int, FiredEvent], feeds: Mapping[int, Feed]) -> bool:
    """Have new events, by their ids, wait for runs of DAGs, and send them as signals; return whether some are signals.

    ``feeds`` are those of their triggers.
    """
    waits: dict[int, int] = {}
    signals: list[NewSignal] = []
    for event_id, event in sorted(events.items()):
        to = feeds[event.trigger_id]
        if to.asset_id is not None:
            waits[event_id] = to.asset_id
        if to.signal is not None:
            signals.append(_signal(event_id, event, to.watcher, *to.signal))
    if waits and assets.wait(tx, waits):
        tx.notify()
    if signals:
        # A watcher adds one key at most, and its events must be stored: they count for no limit of keys.
        sending.send(tx, signals, is_limited=False)
    return bool(signals)


def _signal(event_id: int, event: FiredEvent, watcher: str, namespace: str, key: str) -> NewSignal:
    value = event.payload
    if len(value) > SIGNAL_BYTES_MAX or encoding_problem(value) is not None:
        # The event is stored, so it is not refused for that: whoever reads the signal finds it by its id.
        value = encode_value({"event_id": event_id, "bytes": len(value)}, where="the signal of an event")
    # What has an event sent once is that the log has it once. A dedup that somebody else could guess would keep it out.
    dedup = f"{AUTOMATIC}event {event_id} {uuid4().hex}"
    return NewSignal(key, value, dedup, f"watcher {watcher}"[:SENDER_CHARS_MAX], namespace)
