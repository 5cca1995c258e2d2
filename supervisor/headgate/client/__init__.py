"""For programs that use stored events: `open_client` reads them in commit order, and hands them over exactly once.

The same client sends signals, and listens to them (docs/signals.md).

It touches the database, so it belongs into processes of your own, not into triggers or tasks. It needs no key, because
payloads are not encrypted. See docs/consuming.md.
"""

from headgate.client.client import Client, open_client
from headgate.client.consumer import Batch, Consumer
from headgate.client.signals import Send
from headgate.protocol.messages.signals import SentSignal
from headgate.store.consuming.places import BatchEnded, StatementFailed
from headgate.store.consuming.reading import BATCH_EVENTS, BATCH_EVENTS_MAX, START, Cursor, Event
from headgate.store.errors import (
    ConsumerBusy,
    ConsumerExists,
    CursorRefused,
    DatabaseAway,
    DatabaseFault,
    NoSuchRow,
    NoSuchWatcher,
    SchemaOutOfDate,
    StoreError,
    TransactionOpen,
    ValueRefused,
)
from headgate.store.signals.reading import Signal

__all__ = [
    "BATCH_EVENTS",
    "BATCH_EVENTS_MAX",
    "START",
    "Batch",
    "BatchEnded",
    "Client",
    "Consumer",
    "ConsumerBusy",
    "ConsumerExists",
    "Cursor",
    "CursorRefused",
    "DatabaseAway",
    "DatabaseFault",
    "Event",
    "NoSuchRow",
    "NoSuchWatcher",
    "SchemaOutOfDate",
    "Send",
    "SentSignal",
    "Signal",
    "StatementFailed",
    "StoreError",
    "TransactionOpen",
    "ValueRefused",
    "open_client",
]
