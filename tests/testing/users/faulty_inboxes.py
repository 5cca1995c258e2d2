"""Producers as users might write them, on the files of a folder; all but the first with a fault."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import trio

from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from headgate.triggers.shared_stream import AdvanceItem, SharedStreamProducer

LOOK_INTERVAL_S = 0.02


class Inbox(SharedStreamProducer):
    """Hands out files and removes them once they are stored. There is nothing wrong with it."""

    def __init__(self, folder: str) -> None:
        self.folder = trio.Path(folder)
        self.handed_out: set[trio.Path] = set()

    async def open_stream(self) -> AsyncIterator[tuple[Any, trio.Path]]:
        while True:
            for path in sorted(await self.folder.glob("*.json")):
                if path not in self.handed_out:
                    self.handed_out.add(path)
                    yield await self.read(path), path
            await trio.sleep(LOOK_INTERVAL_S)

    async def read(self, path: trio.Path) -> Any:
        return json.loads(await path.read_text())

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        for item in batch:
            if item.outcome.failed:
                self.handed_out.discard(item.broker_payload)
            else:
                await item.broker_payload.unlink(missing_ok=True)

    def event_key(self, broker_payload: trio.Path) -> str | None:
        return broker_payload.name


class Closed(Inbox):
    """Cannot be opened at all."""

    async def open_stream(self) -> AsyncIterator[tuple[Any, trio.Path]]:
        raise ConnectionRefusedError("the door is closed")
        yield


class Forgetful(Inbox):
    """Removes a file when it hands it out."""

    async def read(self, path: trio.Path) -> Any:
        value = await super().read(path)
        await path.unlink()
        return value


class Nameless(Inbox):
    """Does not say which message it hands out."""

    def event_key(self, broker_payload: trio.Path) -> str | None:
        return None


class Careless(Inbox):
    """Removes what failed, too."""

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        for item in batch:
            await item.broker_payload.unlink(missing_ok=True)


class Deaf(Inbox):
    """Does nothing about what failed, and so never hands it out again."""

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        await super().advance([item for item in batch if not item.outcome.failed])


class FailsOnce(BaseEventTrigger):
    """Of all subscribers the first that sees one message raises, once; reads a careless inbox."""

    def __init__(self, folder: str, fails_at: str) -> None:
        self.folder = folder
        self.fails_at = fails_at

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "faulty_inboxes.FailsOnce", {"folder": self.folder, "fails_at": self.fails_at}

    def shared_stream_key(self) -> tuple[str, str]:
        return ("inbox", self.folder)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return Careless(kwargs["folder"])

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for event in shared_stream:
            if event == self.fails_at and await self.is_first():
                raise ValueError(f"not {event}")
            yield TriggerEvent(event)

    async def is_first(self) -> bool:
        """Whether nobody has seen it yet, in whatever process."""
        try:
            await trio.Path(self.folder, "failed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Counting(BaseEventTrigger):
    """Fires none, one, two or three times for a message, by the last digit of its name; on an inbox without fault.

    ``fires_at_most`` is a fault: of what a message should give, no more is fired. ``raises`` is another.
    """

    def __init__(self, folder: str, fires_at_most: int = 3, raises: bool = False) -> None:
        self.folder = folder
        self.fires_at_most = fires_at_most
        self.raises = raises

    @staticmethod
    def events_of(message: str) -> int:
        """How many events a message is to give."""
        return int(message[-1]) % 4

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kwargs = {"folder": self.folder, "fires_at_most": self.fires_at_most, "raises": self.raises}
        return "faulty_inboxes.Counting", kwargs

    def shared_stream_key(self) -> tuple[str, str]:
        return ("inbox", self.folder)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return Inbox(kwargs["folder"])

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            for number in range(min(self.events_of(message), self.fires_at_most)):
                if self.raises and message.endswith("7"):
                    raise ValueError(f"not {message}")
                yield TriggerEvent([message, number])


class Poller(BaseTrigger):
    """Fires for every file of a folder, with its name as the key; no producer, and nothing is removed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "faulty_inboxes.Poller", {"folder": self.folder}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        seen: set[str] = set()
        while True:
            for path in sorted(await trio.Path(self.folder).glob("*.json")):
                if path.name not in seen:
                    seen.add(path.name)
                    yield TriggerEvent(path.name, key=path.name)
            await trio.sleep(LOOK_INTERVAL_S)
