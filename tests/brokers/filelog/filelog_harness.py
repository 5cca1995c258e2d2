"""A reader of a file log, and what the log holds of a group."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from tests.waiting import WITHIN_S

from headgate.brokers.filelog import (
    FileLogPosition,
    FileLogProducer,
)
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome

CLEAN = AdvanceOutcome(acked=1)
FAILED = AdvanceOutcome(failed=1)
REJECTED = AdvanceOutcome(rejected=1)
NOBODY = AdvanceOutcome()


class Reader:
    """A producer under test, driven as a group drives it."""

    def __init__(self, producer: FileLogProducer) -> None:
        self.producer = producer
        self.stream = producer.open_stream()

    async def take(self, count: int) -> list[tuple[Any, FileLogPosition]]:
        """Pull events; a test that waits for one that never comes fails."""
        with trio.fail_after(WITHIN_S):
            return [await anext(self.stream) for _ in range(count)]

    async def values(self, count: int) -> list[Any]:
        return [value for value, _ in await self.take(count)]

    async def advance(self, taken: list[tuple[Any, FileLogPosition]], *outcomes: AdvanceOutcome) -> None:
        batch = [AdvanceItem(position, outcome) for (_, position), outcome in zip(taken, outcomes, strict=True)]
        await self.producer.advance(batch)


@asynccontextmanager
async def reading(folder: Path, group: str = "g", **limits: Any) -> AsyncIterator[Reader]:
    reader = Reader(FileLogProducer(folder, group, **{"rewind_delay_s": 0.001, "rewind_delay_max_s": 0.001, **limits}))
    try:
        async with aclosing(reader.stream):
            yield reader
    finally:
        await reader.producer.aclose()


def offsets(folder: Path, group: str = "g") -> dict[str, int]:
    """Return the committed offsets of the partitions of which anything is committed."""
    path = folder / ".groups" / f"{group}.json"
    stored = json.loads(path.read_text())["offsets"] if path.exists() else {}
    return {partition: offset for partition, offset in stored.items() if offset}


def rejected(folder: Path, group: str = "g") -> list[dict[str, Any]]:
    path = folder / ".groups" / f"{group}.rejected.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
