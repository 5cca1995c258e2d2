"""A user's trigger on the file log whose producer keeps a journal of what it hands out and of what it advances.

The journal is written before the act, line by line, each with one write: what stands in it survives a SIGKILL.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import trio

from headgate.brokers.filelog import FileLogPosition, FileLogProducer, FileLogTrigger
from headgate.brokers.filelogs.partition import LogFile
from headgate.brokers.filelogs.storage import FileEntry, Seal
from headgate.testing.crash.history import Advanced, AdvancedItem, HandedOut, Record, encode
from headgate.testing.poisonous import MENDED
from headgate.triggers.base import BaseTrigger, TriggerEvent
from headgate.triggers.shared_stream import AdvanceItem

FAILS_ONE_IN = 50  # lines: enough that kills meet streams that rewind, and few enough that events flow


LONG_ONE_IN = 12  # lines: each is a dead letter
PADDING_BYTES = 3_000


class FilterFailed(Exception):
    """What the trigger raises now and then."""


def event_of(position: FileLogPosition) -> str:
    """The name of an event: where its line stands."""
    return f"{position.partition}:{position.offset}"


class JournallingProducer(FileLogProducer):
    """The file log's producer, and a file that says what it did."""

    def __init__(self, path: str, group: str, *, journal: str) -> None:
        super().__init__(path, group)
        self._reader = f"{time.time_ns()}-{os.getpid()}"  # the oldest first, in the order of their names
        self._fd = os.open(os.path.join(journal, f"{self._reader}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def open_stream(self) -> AsyncGenerator[tuple[Any, FileLogPosition], None]:
        async for value, position in super().open_stream():
            self._note(HandedOut(event_of(position), position.partition, self._reader, at=f"{time.time():.6f}"))
            yield value, position

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        items = tuple(
            AdvancedItem(event_of(position), outcome.acked, outcome.failed, outcome.rejected)
            for position, outcome in batch
        )
        lane = batch[0].broker_payload.partition
        self._note(Advanced(lane, self._reader, items, at=f"{time.time():.6f}"))
        await super().advance(batch)

    async def aclose(self) -> None:
        await super().aclose()
        os.close(self._fd)

    def _note(self, record: Record) -> None:
        os.write(self._fd, encode(record))


class CrashTrigger(FileLogTrigger):
    """Fires every line of the log; of some, the first subscriber that gets them fails instead.

    That the producer rewinds is what keeps such a line: a commit of a later one must not pass it.
    """

    def __init__(self, *, journal: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.journal = journal

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncGenerator[TriggerEvent, None]:
        async for line in shared_stream:
            if self._is_to_fail(line["id"]):
                raise FilterFailed(line["id"])
            yield TriggerEvent(line)

    def _is_to_fail(self, event: str) -> bool:
        if zlib.crc32(event.encode()) % FAILS_ONE_IN:
            return False
        try:
            # A file survives whoever fails, so that it is one failure a line, whatever is killed.
            open(os.path.join(self.journal, f"{event}.failed"), "x").close()
        except FileExistsError:
            return False
        return True

    def serialize(self) -> tuple[str, dict[str, Any]]:
        classpath, kwargs = super().serialize()
        return classpath, kwargs | {"journal": self.journal}

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> FileLogProducer:
        return JournallingProducer(kwargs["path"], kwargs["group"], journal=kwargs["journal"])


class LongTrigger(CrashTrigger):
    """Fires every line of the log; the events of some are longer than a supervisor takes."""

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncGenerator[TriggerEvent, None]:
        async for event in super().filter_shared_stream(shared_stream):
            if not zlib.crc32(event.payload["id"].encode()) % LONG_ONE_IN:
                event.payload["padding"] = "." * PADDING_BYTES
            yield event


class PoisonTrigger(CrashTrigger):
    """Fires every line of the log, except those that it cannot take if it ``is_unfit`` and nobody has mended it."""

    def __init__(self, *, is_unfit: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_unfit = is_unfit

    def _is_to_fail(self, event: str) -> bool:
        if not self.is_unfit or zlib.crc32(event.encode()) % FAILS_ONE_IN:
            return False
        return not os.path.exists(os.path.join(self.journal, MENDED))

    def serialize(self) -> tuple[str, dict[str, Any]]:
        classpath, kwargs = super().serialize()
        return classpath, kwargs | {"is_unfit": self.is_unfit}


class Runaway(BaseTrigger):
    """Ends the process of all triggers, each time that it runs."""

    async def run(self) -> AsyncGenerator[TriggerEvent, None]:
        await trio.lowlevel.checkpoint()
        os._exit(3)
        yield TriggerEvent(None)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "crash_triggers.Runaway", {}


class HastyProducer(JournallingProducer):
    """What so many consumers do: it commits what it hands out, and leaves nothing to advance."""

    def __init__(self, path: str, group: str, *, journal: str) -> None:
        super().__init__(path, group, journal=journal)
        self._hasty: dict[str, FileEntry] = {}

    async def open_stream(self) -> AsyncGenerator[tuple[Any, FileLogPosition], None]:
        async for value, position in super().open_stream():
            file = self._files[position.file]
            self._hasty[file.id] = file.entry_at(position.end_offset, file.seal())
            await self._store(self._hasty)
            yield value, position

    async def _commit(self, file: LogFile, offset: int, last: Seal) -> None:
        file.commit_to(offset, last)


class HastyTrigger(CrashTrigger):
    """Fires every line of the log; its producer loses some of them when it is killed."""

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> FileLogProducer:
        return HastyProducer(kwargs["path"], kwargs["group"], journal=kwargs["journal"])
