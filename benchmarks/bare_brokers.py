"""What the benchmarks of brokers share: a pair that stores all messages of a source, beside a bare client that does.

The bare client is one process with the same client library: it reads 100 messages, stores them in one commit by the
bare driver, and then acknowledges them.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from benchmarks import nothing, pairs
from benchmarks.bench_filelog import require_no_failure
from benchmarks.bench_pair import WITHIN_S, require_all
from benchmarks.databases import add_triggers, bare_driver, fresh, moment
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target
from headgate.protocol.values import encode_value

CLASSPATH = "benchmarks.users.brokers.CountedTrigger"
CONNECTION = "bench"  # the setting `conn_bench` of a pair
STORED = "stored rows"
TOOK = "to acknowledge all"
BASELINE = (
    "one process with the same client: 100 messages read, stored in one commit by the bare driver, then acknowledged"
)


class BareMessage(NamedTuple):
    """A message as the bare client has read it."""

    handle: Any  # by which it is acknowledged
    key: str
    payload: Any  # what the trigger would fire


class BareSource(abc.ABC):
    """A source that is full of messages, and a client for it."""

    uri: str  # of the connection
    classpath: str  # of the trigger
    kwargs: dict[str, Any]  # of the trigger, without its connection

    @abc.abstractmethod
    def read(self, count: int) -> Sequence[BareMessage]:
        """Return up to so many messages, and at least one."""

    @abc.abstractmethod
    def acknowledge(self, messages: Sequence[BareMessage]) -> None:
        """Acknowledge messages."""

    @abc.abstractmethod
    def unacknowledged(self) -> int:
        """Return how many messages the broker still has."""


Filled = Callable[[int], AbstractContextManager[BareSource]]


def run_pair(filled: Filled, kind: str, messages: int) -> Figures:
    """Have a pair store the messages of a source; return the pace and the time."""
    with fresh(kind) as database, filled(messages) as source:
        board = pairs.new_board(database)
        kwargs = {"connection": CONNECTION, **source.kwargs}
        add_triggers(database, CLASSPATH, [{"board": board.path, "classpath": source.classpath, "kwargs": kwargs}])
        with pairs.running(database, board, conn_bench=source.uri) as pair:
            pair.wait_board("advanced", messages, WITHIN_S)
            require_all(pair, messages, 1)
            require_no_failure(pair)
        require_acknowledged(source)
    took_s = board["advanced_at"] - board["first_at"]
    return {STORED: messages / took_s, TOOK: took_s}


def run_bare(filled: Filled, kind: str, messages: int) -> Figures:
    """Have one process store 100 messages a commit, and acknowledge them after it."""
    with fresh(kind) as database, filled(messages) as source:
        add_triggers(database, CLASSPATH, [{}])
        driver = bare_driver(database)
        begun, number = time.monotonic(), 0
        while number < messages:
            found = source.read(min(nothing.ROWS_PER_COMMIT, messages - number))
            rows, stored_at = [], moment(kind)
            for message in found:
                payload = encode_value(message.payload, where="payload")
                rows.append(nothing.event_row(1, number, message.key, payload, stored_at))
                number += 1
            driver.store(rows)
            source.acknowledge(found)
        took_s = time.monotonic() - begun
        driver.close()
        require_acknowledged(source)
        if (stored := database.count("trigger_event")) != messages:
            raise BenchFailed(f"the bare client stored {stored:,} of {messages:,} messages")
    return {STORED: messages / took_s, TOOK: took_s}


def require_acknowledged(source: BareSource) -> None:
    """Raise `BenchFailed` if the broker still has messages."""
    if left := source.unacknowledged():
        raise BenchFailed(f"the broker still has {left:,} messages")


def bench_of(name: str, what: str, filled: Filled, *, messages_share: float = 1.0) -> Bench:
    """Return the benchmark of a broker: one case for each database. A slow one may have a share of the messages."""

    def cases(options: Options) -> list[Case]:
        messages = max(50, int(options.of(60_000, 20_000, 200) * messages_share))
        return [case(kind, messages) for kind in options.databases]

    def case(kind: str, messages: int) -> Case:
        return Case(
            f"{kind}, {messages:,} messages",
            [Figure(STORED, "rows/s", Target(ratio_min=0.3)), Figure(TOOK, "s")],
            lambda: run_pair(filled, kind, messages),
            lambda: run_bare(filled, kind, messages),
        )

    return Bench(name, f"{name}: {what}", BASELINE, cases)
