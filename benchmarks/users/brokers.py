"""A trigger of any broker for the benchmarks, whose producer counts what it has acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.board import Board, open_board
from headgate.brokers.broker_trigger import BrokerTrigger
from headgate.brokers.threaded import Received, ThreadedProducer
from headgate.runner.loading import import_class
from headgate.triggers.base import BaseEventTrigger


class Counted(ThreadedProducer):
    """Records its progress on the board: ``advanced`` are messages that the broker was told of."""

    board: Board

    def connect(self) -> None:
        """Connect; the time counts from here."""
        self.board.mark("first_at")
        super().connect()  # type: ignore[safe-super] # of the adapter that it is made with

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Acknowledge, then count."""
        super().acknowledge(messages)  # type: ignore[safe-super] # as above
        self.board.add("advanced", len(messages))
        self.board.add("acked", len(messages))
        self.board.mark("advanced_at")


class CountedTrigger(BaseEventTrigger):
    """Does what the trigger of ``classpath`` and ``kwargs`` does, and counts on ``board``."""

    def __init__(self, *, board: str, classpath: str, kwargs: dict[str, Any]) -> None:
        self._given = {"board": board, "classpath": classpath, "kwargs": kwargs}
        inner = import_class(classpath)(**kwargs)
        assert isinstance(inner, BrokerTrigger)
        self._inner = inner

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class, and what it was given."""
        return f"{__name__}.{type(self).__name__}", dict(self._given)

    def shared_stream_key(self) -> tuple[str, ...]:
        """Return that of the trigger."""
        return self._inner.shared_stream_key()

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> ThreadedProducer:
        """Return the trigger's producer, made to count."""
        inner = import_class(kwargs["classpath"])
        assert issubclass(inner, BrokerTrigger)
        made: Any = type("CountedProducer", (Counted, inner.producer), {})(**kwargs["kwargs"])
        made.board = open_board(kwargs["board"])
        return made  # type: ignore[no-any-return]
