"""A user's tasks with streams of numbers, which keep a journal of what they handle, and a DAG of them.

A line of the journal is written before the act that it tells of. What a step leaves as an XCom is there only if the
step is committed. `tests.proof.history.stream_history` says what is right.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import trio
from tests.proof.history.stream_history import PART, TOTAL, Handling, Part, encode, link

from headgate.tasks import DAG, BaseOperator, Batch, Context, Each, StartTriggerArgs
from headgate.tasks.options import TaskOptions
from headgate.tasks.streaming import Stream, StreamedEvent
from headgate.triggers.base import BaseTrigger, TriggerEvent

RETRIES = 100  # more than faults of a campaign
ENDLESS = 1_000_000
AHEAD = 6  # less than a trigger fires while a task waits for a worker
BREAKS_AT = 5  # the number that a trigger fails in front of, or a handler in its first try


class Numbers(BaseTrigger):
    """Fires the numbers up to ``total``: with keys from 0 on, whenever it runs, or else after its last event.

    ``breaks``: a run that comes to `BREAKS_AT` from below fails. ``is_last``: the last event says that it is the last.
    """

    def __init__(
        self,
        *,
        total: int = TOTAL,
        keyed: bool = False,
        breaks: bool = False,
        is_last: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        self.total = total
        self.keyed = keyed
        self.breaks = breaks
        self.is_last = is_last
        self.wait_s = wait_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "crash_streams.Numbers", dict(vars(self))

    async def run(self) -> AsyncIterator[TriggerEvent]:
        last = None if self.keyed else await self.last_event()
        first = 0 if last is None else last.payload + 1
        for number in range(first, self.total):
            if self.breaks and first < number == BREAKS_AT:
                raise RuntimeError(f"it fails in front of {number}, as it was to")
            yield TriggerEvent(
                number, key=str(number) if self.keyed else None, is_last=self.is_last and number == self.total - 1
            )
            await trio.sleep(self.wait_s)


class Chain(BaseOperator):
    """Chains the numbers of its stream; its result is how many there were, and the chain.

    ``fails``: the first try fails at `BREAKS_AT`, and has handled what is in front of it. ``stops``: it ends its stream
    itself, after `TOTAL`. ``numbers`` are kwargs of its trigger.
    """

    def __init__(
        self,
        *,
        journal: str,
        takes: Stream = True,
        numbers: dict[str, Any] | None = None,
        fails: bool = False,
        stops: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.journal = journal
        self.takes = takes
        self.numbers = numbers or {}
        self.fails = fails
        self.stops = stops

    def execute(self, context: Context) -> None:
        """Begin a try."""
        self.defer(trigger=Numbers(**self.numbers), stream=self.takes, ahead=AHEAD, kwargs={"count": 0, "chain": ""})

    def handle_trigger_events(
        self, events: Sequence[StreamedEvent], context: Context, count: int, chain: str
    ) -> dict[str, Any]:
        """Add the numbers to the chain."""
        execution, first = f"{os.getpid()}-{time.monotonic_ns()}", count
        self._note(context, execution, events, count, chain)
        for event in events:
            if self.fails and event.payload == BREAKS_AT and context["try_number"] == 1:
                self._fail(context, execution, events, first, count, chain)
            count, chain = count + 1, link(chain, event.payload)
        self._leave(context, execution, Part(first, count, chain))
        if self.stops and count >= TOTAL:
            self.end_stream()
        return {"count": count, "chain": chain}

    def stream_ended(self, context: Context, count: int, chain: str) -> list[Any]:
        """Return the state."""
        return [count, chain]

    def _note(self, context: Context, execution: str, events: Sequence[StreamedEvent], count: int, chain: str) -> None:
        record = Handling(
            f"{context['dag_id']}/{context['run_id']}/{context['task_id']}",
            context["try_number"],
            execution,
            place=events[0].position,
            count=count,
            chain=chain,
            numbers=tuple(event.payload for event in events),
            at=f"{time.time():.6f}",
        )
        fd = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, encode(record))
        finally:
            os.close(fd)

    def _fail(
        self,
        context: Context,
        execution: str,
        events: Sequence[StreamedEvent],
        first: int,
        count: int,
        chain: str,
    ) -> None:
        if count > first:
            self._leave(context, execution, Part(first, count, chain))
            self.handled(events[count - first - 1], count=count, chain=chain)
        raise RuntimeError(f"it fails at {count}, as it was to")

    def _leave(self, context: Context, execution: str, part: Part) -> None:
        context["ti"].xcom_push(PART + execution, msgspec.to_builtins(part))


class BegunInTrigger(Chain):
    """Begins in its trigger."""

    def __init__(self, *, journal: str, **options: Any) -> None:
        start = StartTriggerArgs(
            trigger_cls="crash_streams.Numbers",
            trigger_kwargs={"is_last": True},
            next_kwargs={"count": 0, "chain": ""},
            stream=True,
            ahead=AHEAD,
        )
        super().__init__(journal=journal, start_trigger_args=start, start_from_trigger=True, **options)


def stream_dag(name: str, journal: str) -> DAG:
    """Return a DAG with every way through a stream."""
    options: TaskOptions = {"retries": RETRIES, "retry_delay": timedelta(0)}
    with DAG(name, default_args=options, max_active_runs=100) as dag:
        Chain(task_id="available", journal=journal, numbers={"wait_s": 0.01})
        Chain(task_id="keyed", journal=journal, numbers={"keyed": True, "is_last": True})
        Chain(task_id="batches", journal=journal, takes=Batch(count=5, seconds=0.2), numbers={"keyed": True})
        Chain(task_id="breaks", journal=journal, numbers={"breaks": True})
        Chain(task_id="fails", journal=journal, fails=True)
        Chain(task_id="stops", journal=journal, takes=Each(), numbers={"total": ENDLESS}, stops=True)
        BegunInTrigger(task_id="begun_in_trigger", journal=journal)
    return dag
