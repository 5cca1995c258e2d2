"""A Redis stream of the benchmarks, whose producer counts what it has acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.board import Board, open_board
from headgate.brokers.redis_streams import RedisStreamProducer, RedisStreamTrigger
from headgate.brokers.threaded import Received


class CountedRedisStream(RedisStreamProducer):
    """Records its progress on the board: ``advanced`` are entries that the server knows to be acknowledged."""

    def __init__(self, board: Board, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.board = board

    def connect(self) -> None:
        """Connect; the time counts from here."""
        self.board.mark("first_at")
        super().connect()

    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Acknowledge, then count."""
        super().acknowledge(messages)
        self.board.add("advanced", len(messages))
        self.board.add("acked", len(messages))
        self.board.mark("advanced_at")


class CountedRedisStreamTrigger(RedisStreamTrigger):
    """Fires every entry of the stream."""

    def __init__(self, *, board: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.board = board

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class, and the board beside the arguments of the stream."""
        _, kwargs = super().serialize()
        return f"{__name__}.{type(self).__name__}", kwargs | {"board": self.board}

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> CountedRedisStream:
        """Return the counting producer."""
        given = {name: value for name, value in kwargs.items() if name != "board"}
        return CountedRedisStream(open_board(kwargs["board"]), **given)
