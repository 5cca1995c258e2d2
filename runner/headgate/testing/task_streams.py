"""The stream of a task in a test: where its events come from, and how far the task has come."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

from headgate.protocol.messages.runner import CancelReason, FinishedTrigger, FiredEvent, TriggerSpec
from headgate.protocol.messages.task_streams import Handled, StreamEvent, StreamOptions, StreamPart
from headgate.protocol.values import decode_value, encode_value
from headgate.testing.clock import SkippingClock
from headgate.testing.hosting import event_of
from headgate.testing.running import TRIGGER_ID
from headgate.triggers.base import TriggerEvent


class Source(Protocol):
    """A trigger that runs, or events that stand for it."""

    @property
    def fired(self) -> Sequence[FiredEvent]:
        """What it has fired so far."""
        ...

    @property
    def finished(self) -> FinishedTrigger | None:
        """How it has ended, None as long as it has not."""
        ...

    def wait(self, events: int, within_s: float) -> None:
        """Return when it has fired as many events, has ended, or the time has passed."""
        ...

    def end(self, reason: CancelReason) -> None:
        """Cancel it, unless it has ended."""
        ...


class FedSource:
    """Events that a test gives in place of a trigger: payloads, trigger events, or at the end an exception."""

    def __init__(self, spec: TriggerSpec, given: Sequence[Any]) -> None:
        self.fired: list[FiredEvent] = []
        error = ""
        for index, item in enumerate(given):
            if isinstance(item, BaseException):
                error = f"{type(item).__name__}: {item}"
                break
            event = item if isinstance(item, TriggerEvent) else TriggerEvent(item)
            payload = encode_value(event.payload, where=f"events[{index}]")
            fired = FiredEvent(
                TRIGGER_ID, spec.trigger_run_id, index, 0, payload, event.key, 0, event.kind, event.is_last
            )
            self.fired.append(fired)
        outcome, events = ("failed" if error else "returned"), len(self.fired)
        self.finished = FinishedTrigger(TRIGGER_ID, spec.trigger_run_id, outcome, events, error)  # type: ignore[arg-type]

    def wait(self, events: int, within_s: float) -> None:
        """Return at once: all are there."""

    def end(self, reason: CancelReason) -> None:
        """Do nothing."""


class TrialStream:
    """All events of a stream, over the tries of its task, and the task's place in it.

    An event's id is its number, from 1. ``payloads`` are those of the events that the task was given and has handled.
    """

    def __init__(self) -> None:
        self.handled = 0
        self.state: bytes | None = None
        self.payloads: list[Any] = []
        self._events: list[FiredEvent] = []
        self._keys: set[str] = set()
        self._taken = 0  # events of the source that are here

    def copy(self) -> TrialStream:
        """Return a stream that goes on from here with another source, and leaves this one as it is."""
        again = copy.deepcopy(self)
        again._taken = 0
        return again

    @property
    def waiting(self) -> Sequence[FiredEvent]:
        """The events that are not handled."""
        return self._events[self.handled :]

    @property
    def last_event(self) -> TriggerEvent | None:
        """The newest event."""
        return event_of(self._events[-1]) if self._events else None

    def wait(self, source: Source, options: StreamOptions, clock: SkippingClock, within_s: float) -> bool:
        """Wait until a step is due, or its trigger has ended; return False if neither has come in time, or no more can.

        Events that wait already, from an earlier try, count as the first of a batch.
        """
        until_s = clock.now_s + within_s
        wanted = options.count if options.contract == "batch" else 1
        batch_until_s: float | None = None
        while True:
            self._store(source)
            waiting = self.waiting
            if source.finished is not None or (waiting and waiting[-1].is_last):
                return bool(waiting) or (source.finished is not None and source.finished.outcome == "returned")
            if len(waiting) >= wanted:
                return True
            if waiting and options.seconds is not None:
                batch_until_s = batch_until_s or clock.now_s + options.seconds
                if clock.now_s >= batch_until_s:
                    return True
            if clock.now_s >= until_s:
                return False
            more = wanted - len(waiting) if waiting else 1
            source.wait(len(source.fired) + more, min(until_s, batch_until_s or until_s) - clock.now_s)

    def _store(self, source: Source) -> None:
        """Add what a source has fired since the last call; an event whose key is there already is dropped (I2)."""
        for event in source.fired[self._taken :]:
            if event.key is None or event.key not in self._keys:
                self._events.append(event)
            if event.key is not None:
                self._keys.add(event.key)
        self._taken = len(source.fired)

    def part(
        self, clock: SkippingClock, options: StreamOptions | None = None, source: Source | None = None
    ) -> StreamPart:
        """Return the part for the next step; without ``options``, for one that gets no events."""
        if options is None or source is None:
            return StreamPart(self.handled, len(self.waiting), self.state)
        plain = [event.kind == "event" for event in self.waiting]
        ready = plain.index(False) if False in plain else len(plain)
        skipped = max(0, ready - 1) if options.contract == "latest" else 0
        first = self.handled + skipped
        last = min(self.handled + ready, first + options.count)
        events = tuple(
            StreamEvent(
                first + number,
                event.trigger_run_id,
                event.sequence_index,
                event.payload,
                event.key,
                event.is_last,
                clock.wall_time(),
            )
            for number, event in enumerate(self._events[first:last], start=1)
        )
        has_returned = source.finished is not None and source.finished.outcome == "returned"
        is_over = last == len(self._events) and (has_returned or (last > 0 and self._events[last - 1].is_last))
        return StreamPart(first, len(self._events) - first, self.state, events, is_over)

    def move(self, handled: Handled | None) -> None:
        """Move behind the events that a step has handled."""
        if handled is None:
            return
        done = self._events[handled.event_id - handled.count : handled.event_id]
        self.payloads += [decode_value(event.payload) for event in done]
        self.handled, self.state = handled.event_id, handled.state
