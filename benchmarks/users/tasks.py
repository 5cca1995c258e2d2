"""Tasks that record their moments on a board; the params of a run have the board, and the number of the run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.board import Board, open_board
from headgate.signals import SignalAction, SignalService, SignalVersion
from headgate.tasks.context import Context
from headgate.tasks.operator import BaseOperator
from headgate.tasks.schedule import Batch, Each
from headgate.triggers.base import BaseTrigger, TriggerEvent


def board_of(context: Context) -> tuple[Board, int]:
    """Return the board of a run, and the run's number."""
    return open_board(context["params"]["board"]), context["params"]["number"]


class Empty(BaseOperator):
    """Does nothing."""

    def execute(self, context: Context) -> None:
        """Do nothing."""


class Taking(BaseOperator):
    """Does nothing with its value."""

    def __init__(self, *, value: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value

    def execute(self, context: Context) -> None:
        """Do nothing."""


class Listening(BaseOperator):
    """Listens to as many signals as the params of its run say; leaves the times at which it had them, in seconds."""

    def execute(self, context: Context) -> list[float]:
        """Listen from the first signal on."""
        signals = SignalService().listen_signal("the bench", "bench", after=0)
        return [time.time() for _ in zip(range(context["params"]["sends"]), signals, strict=False)]


class Deciding(Empty):
    """Starts by every signal, as its own code says."""

    def on_signal(self, signal: SignalVersion) -> SignalAction:
        """Start."""
        return SignalAction.START


class Sending(BaseOperator):
    """Sends a signal."""

    def execute(self, context: Context) -> None:
        """Send it at once."""
        SignalService().send_signal("bench", context["run_id"])


class AtOnce(BaseTrigger):
    """Fires as soon as it runs, and notes when."""

    def __init__(self, board: str, number: int) -> None:
        self.board = board
        self.number = number

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class and the board."""
        return f"{__name__}.AtOnce", {"board": self.board, "number": self.number}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event."""
        open_board(self.board).stored_at[self.number] = time.monotonic()
        yield TriggerEvent(None)


class Deferring(BaseOperator):
    """Defers to a trigger that fires at once; notes when it does so, and when it goes on."""

    def execute(self, context: Context) -> None:
        """Defer."""
        board, number = board_of(context)
        trigger = AtOnce(board.path, number)
        board.handed_at[number] = time.monotonic()
        self.defer(trigger=trigger, method_name="resume")

    def resume(self, context: Context, event: Any = None) -> None:
        """Go on."""
        now = time.monotonic()
        board, number = board_of(context)
        board.advanced_at[number] = now


class First(BaseOperator):
    """Notes when it is done."""

    def execute(self, context: Context) -> None:
        """End."""
        board, number = board_of(context)
        board.handed_at[number] = time.monotonic()


class Second(BaseOperator):
    """Notes when it begins."""

    def execute(self, context: Context) -> None:
        """Begin."""
        now = time.monotonic()
        board, number = board_of(context)
        board.advanced_at[number] = now


class Counting(BaseTrigger):
    """Fires the numbers up to ``upto``, after its newest one."""

    def __init__(self, upto: int) -> None:
        self.upto = upto

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class and the last number."""
        return f"{__name__}.Counting", {"upto": self.upto}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield the numbers."""
        last = await self.last_event()
        for number in range(1 if last is None else last.payload + 1, self.upto + 1):
            yield TriggerEvent(number)


class Pages(Counting):
    """Fires them as pages with one number each."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class and the last number."""
        return f"{__name__}.Pages", {"upto": self.upto}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield the pages."""
        last = await self.last_event()
        for number in range(1 if last is None else last.payload[0] + 1, self.upto + 1):
            yield TriggerEvent([number], is_last=number == self.upto)


class Emitting(BaseOperator):
    """Emits the numbers of pages, as many in a step as there are."""

    emits = True

    def __init__(self, *, upto: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.upto = upto

    def execute(self, context: Context) -> None:
        """Defer once."""
        self.defer(trigger=Pages(self.upto), stream=True)

    def handle_trigger_events(self, events: Any, context: Context) -> None:
        """Emit what has come."""
        for event in events:
            self.emit(event.payload[0])


class Streaming(BaseOperator):
    """Adds up the numbers of a stream, so many in a step."""

    def __init__(self, *, events: int, batch: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.events, self.batch = events, batch

    def execute(self, context: Context) -> None:
        """Defer once."""
        stream = Each() if self.batch == 1 else Batch(count=self.batch)
        self.defer(trigger=Counting(self.events), stream=stream, ahead=4 * self.batch, kwargs={"total": 0})

    def handle_trigger_events(self, events: Any, context: Context, total: int) -> dict[str, int]:
        """Add them up."""
        return {"total": total + sum(event.payload for event in events)}

    def stream_ended(self, context: Context, total: int) -> int:
        """Return the sum."""
        return total


class Repeating(BaseOperator):
    """Adds up as many numbers as `Streaming`, and defers anew for each."""

    def __init__(self, *, events: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.events = events

    def execute(self, context: Context) -> None:
        """Defer for the first one."""
        self.defer(trigger=Counting(1), method_name="add", kwargs={"number": 1, "total": 0})

    def add(self, context: Context, event: Any, number: int, total: int) -> int:
        """Add one, and defer for the next one."""
        total += number
        if number == self.events:
            return total
        self.defer(trigger=Counting(1), method_name="add", kwargs={"number": number + 1, "total": total})
