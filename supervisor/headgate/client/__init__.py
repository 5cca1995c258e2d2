"""For programs that use stored events: `open_client` reads them in commit order, and hands them over exactly once.

It touches the database, so it belongs into processes of your own, not into triggers or tasks. It needs no key, because
payloads are not encrypted. See docs/consuming.md.
"""

from headgate.client.client import Client, open_client
from headgate.client.consumer import Batch, BatchEnded, Consumer
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
)

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
    "StoreError",
    "open_client",
]
