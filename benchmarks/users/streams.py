"""Shared streams of the benchmarks: producers of events from memory, and a file log that counts its advances."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Sequence
from typing import Any

import trio

from benchmarks.board import Board, open_board
from headgate.brokers.filelog import FileLogPosition, FileLogProducer, FileLogTrigger
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from headgate.triggers.shared_stream import AdvanceItem, SharedStreamProducer

_all_subscribed: dict[str, trio.Event] = {}  # by the path of the board


def _gate(board: Board) -> trio.Event:
    return _all_subscribed.setdefault(board.path, trio.Event())


def note_subscribed(board: Board, subscribers: int) -> None:
    """Count one more subscriber; the last of them lets all producers of this board begin."""
    board.add("subscribed")
    if board["subscribed"] >= subscribers:
        _gate(board).set()


def note_advanced(board: Board, batch: Sequence[AdvanceItem]) -> None:
    """Count the events that were advanced, and their outcomes."""
    board.add("advanced", len(batch))
    board.add("acked", sum([item.outcome.acked for item in batch]))
    board.add("failed", sum([item.outcome.failed + item.outcome.rejected for item in batch]))
    board.mark("advanced_at")


class MemoryProducer(SharedStreamProducer):
    """Numbers, handed out as fast as they are taken."""

    def __init__(self, board: Board, events: int) -> None:
        self.board = board
        self.events = events

    async def open_stream(self) -> AsyncGenerator[tuple[int, int], None]:
        await _gate(self.board).wait()
        if not self.board["first_at"]:
            self.board.mark("first_at")
        for number in range(self.events):
            yield number, number
        await trio.sleep_forever()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        note_advanced(self.board, batch)

    def event_key(self, broker_payload: int) -> str:
        return str(broker_payload)


class SteppedProducer(MemoryProducer):
    """Numbers, each of them handed out when the last one has been advanced."""

    def __init__(self, board: Board, events: int) -> None:
        super().__init__(board, events)
        self.is_advanced = trio.Event()

    async def open_stream(self) -> AsyncGenerator[tuple[int, int], None]:
        await _gate(self.board).wait()
        for number in range(self.events):
            self.is_advanced = trio.Event()
            yield number, number
            await self.is_advanced.wait()
        await trio.sleep_forever()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        await super().advance(batch)
        self.is_advanced.set()


class PacedProducer(MemoryProducer):
    """Numbers at one rate after the other; records when each was handed out and advanced."""

    def __init__(self, board: Board, paces: Sequence[tuple[float, int]]) -> None:
        super().__init__(board, sum(events for _, events in paces))
        self.paces = paces

    async def open_stream(self) -> AsyncGenerator[tuple[int, int], None]:
        await _gate(self.board).wait()
        self.board.mark("first_at")
        number = 0
        for rate, events in self.paces:
            begun = trio.current_time()
            for turn in range(events):
                await trio.sleep_until(begun + turn / rate)
                self.board.handed_at[number] = time.monotonic()
                yield number, number
                number += 1
            await trio.sleep(1 / rate)
        await trio.sleep_forever()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        now = time.monotonic()
        for item in batch:
            self.board.advanced_at[item.broker_payload] = now
        await super().advance(batch)


class _Kwargs(BaseTrigger):
    """Serializes as its own kwargs; ``board`` is the path of the board."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__name__}", self.kwargs

    @property
    def board(self) -> Board:
        return open_board(self.kwargs["board"])


class MemoryTrigger(_Kwargs, BaseEventTrigger):
    """Fires every number of its stream once. ``subscribers``: of all streams; they begin when all have subscribed."""

    def shared_stream_key(self) -> Hashable:
        return "memory", self.kwargs["stream"]

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return MemoryProducer(open_board(kwargs["board"]), kwargs["events"])

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncGenerator[TriggerEvent, None]:
        note_subscribed(self.board, self.kwargs["subscribers"])
        async for number in shared_stream:
            yield TriggerEvent(number)


class SteppedTrigger(MemoryTrigger):
    """Fires every number of a stream that waits for each of them."""

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return SteppedProducer(open_board(kwargs["board"]), kwargs["events"])


class PacedTrigger(MemoryTrigger):
    """Fires every number of a stream that has a pace."""

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return PacedProducer(open_board(kwargs["board"]), kwargs["paces"])


class CountedFileLog(FileLogProducer):
    """A file log that records its progress on the board."""

    def __init__(self, path: str, group: str, board: Board) -> None:
        super().__init__(path, group)
        self.board = board

    async def open_stream(self) -> AsyncGenerator[tuple[Any, FileLogPosition], None]:
        self.board.mark("first_at")
        async for item in super().open_stream():
            yield item

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        await super().advance(batch)
        note_advanced(self.board, batch)


class CountedFileLogTrigger(FileLogTrigger):
    """Fires every line of the log."""

    def __init__(self, *, board: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.board = board

    def serialize(self) -> tuple[str, dict[str, Any]]:
        _, kwargs = super().serialize()
        return f"{__name__}.{type(self).__name__}", kwargs | {"board": self.board}

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> FileLogProducer:
        return CountedFileLog(kwargs["path"], kwargs["group"], open_board(kwargs["board"]))


class Idle(_Kwargs):
    """Records that it runs, and waits for ever."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.board.add("running")
        self.board.mark("running_at")
        await trio.sleep_forever()
        yield TriggerEvent()


class Ticks(_Kwargs):
    """Fires once a second, for ever."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.board.add("running")
        self.board.mark("running_at")
        while True:
            await trio.sleep(1.0)
            yield TriggerEvent("tick")


class Exits(_Kwargs):
    """Ends its process a second after its start."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.sleep(1.0)
        os._exit(3)
        yield TriggerEvent("never")
