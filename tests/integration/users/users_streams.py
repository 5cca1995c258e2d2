"""A task with a stream, and its trigger: they stop where a file says go on, so that a test can kill processes there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import trio
from users_tasks import LOOK_S, hold, note  # type: ignore[import-not-found]

from headgate.tasks import BaseOperator, Context, Each
from headgate.tasks.streaming import StreamedEvent
from headgate.triggers.base import BaseTrigger, TriggerEvent


class Numbers(BaseTrigger):
    """Fires the numbers up to ``upto``, after its newest event; before each of ``stops`` it waits for a file.

    In place of the number ``unsound`` it first fires something that cannot be stored.
    """

    def __init__(self, folder: str, upto: int, stops: list[int], unsound: int = 0) -> None:
        self.folder, self.upto, self.stops, self.unsound = folder, upto, stops, unsound

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "users_streams.Numbers", dict(vars(self))

    async def run(self) -> AsyncIterator[TriggerEvent]:
        last = await self.last_event()
        begin = 1 if last is None else last.payload + 1
        note(self.folder, "numbers from", begin, "in", os.getpid())
        for number in range(begin, self.upto + 1):
            if number in self.stops:
                path = trio.Path(self.folder, f"trigger.{number}")
                while not await path.exists():  # noqa: ASYNC110 - another process makes it
                    await trio.sleep(LOOK_S)
            if number == self.unsound and not await trio.Path(self.folder, "unsound").exists():
                await trio.Path(self.folder, "unsound").touch()
                yield TriggerEvent(object())
            yield TriggerEvent(number)

    async def on_kill(self) -> None:
        note(self.folder, "numbers on_kill")


class Sums(BaseOperator):
    """Collects the numbers of its stream; before each of ``stops`` its worker waits for a file."""

    def __init__(
        self,
        *,
        upto: int = 100,
        trigger_stops: Sequence[int] = (),
        stops: Sequence[int] = (),
        ahead: int | None = None,
        unsound: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.upto, self.trigger_stops, self.stops = upto, list(trigger_stops), list(stops)
        self.ahead, self.unsound = ahead, unsound

    def execute(self, context: Context) -> None:
        folder = context["params"]["folder"]
        stream = context["stream"]
        note(folder, "execute", context["ti"].try_number, "handled", 0 if stream is None else stream.handled)
        numbers = Numbers(folder, self.upto, self.trigger_stops, self.unsound)
        if self.ahead is None:
            self.defer(trigger=numbers, stream=True, kwargs={"seen": []})
        self.defer(trigger=numbers, stream=Each(), ahead=self.ahead, kwargs={"seen": []})

    def handle_trigger_events(
        self, events: Sequence[StreamedEvent], context: Context, seen: list[int]
    ) -> dict[str, list[int]]:
        folder = context["params"]["folder"]
        assert context["stream"] is not None
        note(folder, "waiting", context["stream"].waiting)
        for event in events:
            if event.payload in self.stops:
                note(folder, "worker stops at", event.payload, "in", os.getpid())
                hold(folder, f"worker.{event.payload}")
            seen.append(event.payload)
            self.handled(event, seen=seen)
        return {"seen": seen}

    def stream_ended(self, context: Context, seen: list[int]) -> list[int]:
        return seen
