"""The null pipeline: one process, the same producer, the same rows, the same advance, and nothing else.

What stands between this and a pair is what headgate adds: two processes, isolation, deduplication, the persist gate.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import trio

from benchmarks.board import Board
from benchmarks.databases import BareDriver, Database, EventRow, bare_driver, moment
from benchmarks.harness import BenchFailed
from benchmarks.users.streams import MemoryProducer, note_subscribed
from headgate.protocol.values import encode_value
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome

ROWS_PER_COMMIT = 100


def event_row(trigger_id: int, number: int, key: str, payload: bytes, stored_at: Any) -> EventRow:
    """Return a row of the event log as a bare driver takes it. ``stored_at`` comes from `moment`."""
    return trigger_id, f"run-{trigger_id}", number, key, 0, "event", payload, False, stored_at


def drain_memory(
    database: Database, board: Board, *, events: int, subscribers: int, driver: BareDriver | None = None
) -> float:
    """Store ``events`` numbers for each subscriber; return the rows a second, from the first to the last advance."""
    note_subscribed(board, 1)
    producer = MemoryProducer(board, events)
    return _drain(database, driver or bare_driver(database), board, producer, events, subscribers)


def drain_lines(database: Database, path: Path) -> float:
    """Store the lines of a file, and after every commit where the next line begins, durably; return the seconds."""
    driver = bare_driver(database)
    offsets = os.open(database.folder / "offsets", os.O_WRONLY | os.O_CREAT)
    begun = time.monotonic()
    rows: list[EventRow] = []
    number = offset = 0
    stored_at = moment(database.kind)
    with path.open("rb") as lines:
        for line in lines:
            payload = encode_value(json.loads(line), where="payload")
            rows.append(event_row(1, number, f"{path.name}:{offset}", payload, stored_at))
            number += 1
            offset += len(line)
            if len(rows) >= ROWS_PER_COMMIT:
                _store_and_commit_offset(driver, offsets, rows, offset)
                rows, stored_at = [], moment(database.kind)
    if rows:
        _store_and_commit_offset(driver, offsets, rows, offset)
    took_s = time.monotonic() - begun
    os.close(offsets)
    driver.close()
    return took_s


def _store_and_commit_offset(driver: BareDriver, offsets: int, rows: list[EventRow], offset: int) -> None:
    driver.store(rows)
    os.pwrite(offsets, b"%020d" % offset, 0)
    os.fdatasync(offsets)


def _drain(
    database: Database, driver: BareDriver, board: Board, producer: MemoryProducer, events: int, subscribers: int
) -> float:
    try:
        trio.run(_store_all, database.kind, driver, producer, events, subscribers)
    finally:
        driver.close()
    if board["acked"] != events * subscribers:
        raise BenchFailed(f"the null pipeline stored {board['acked']:,.0f} of {events * subscribers:,} rows")
    return events * subscribers / (board["advanced_at"] - board["first_at"])


async def _store_all(kind: str, driver: BareDriver, producer: MemoryProducer, events: int, subscribers: int) -> None:
    async with contextlib.aclosing(producer.open_stream()) as stream:
        await _store_stream(kind, driver, producer, stream, events, subscribers)
    await producer.aclose()


async def _store_stream(
    kind: str,
    driver: BareDriver,
    producer: MemoryProducer,
    stream: AsyncGenerator[tuple[int, int], None],
    events: int,
    subscribers: int,
) -> None:
    outcome = AdvanceOutcome(acked=subscribers)
    rows: list[EventRow] = []
    items: list[AdvanceItem] = []
    number = 0
    stored_at = moment(kind)
    async for raw_event, broker_payload in stream:
        key = producer.event_key(broker_payload)
        payload = encode_value(raw_event, where="payload")
        rows += [event_row(trigger_id, number, key, payload, stored_at) for trigger_id in range(1, subscribers + 1)]
        items.append(AdvanceItem(broker_payload, outcome))
        number += 1
        if len(rows) >= ROWS_PER_COMMIT or number == events:
            driver.store(rows)
            await producer.advance(items)
            rows, items, stored_at = [], [], moment(kind)
        if number == events:
            return


def commit_moments_s(database: Database, commits: int) -> list[float]:
    """Store one row a commit; return how long each commit took, in seconds."""
    driver = bare_driver(database)
    took = []
    for number in range(commits):
        row = event_row(1, number, str(number), b"\x01", moment(database.kind))
        begun = time.monotonic()
        driver.store([row])
        took.append(time.monotonic() - begun)
    driver.close()
    return took
