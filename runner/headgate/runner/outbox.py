"""The outbox: events and ends of triggers that are not yet sent to the supervisor.

Triggers append without awaiting; the sender takes rounds out. While one round is in flight the outbox fills, and the
next round carries all of it: that is group commit. If it is full, each trigger waits for room after the event that it
has just fired, so the limit is exceeded by at most one event or dead letter per trigger.
"""

from __future__ import annotations

from collections import deque

import trio

from headgate.protocol.messages.runner import (
    DescribedStream,
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    RedeliveryEnd,
    RefusedEvent,
    StateChanges,
)

OUTBOX_BYTES_MAX = 64 * 1024 * 1024  # of all waiting events: the memory that an unreachable database may cost
ROUND_BYTES_MAX = 32 * 1024 * 1024  # of one round: two or three frames, as its last letter may exceed it

Item = FiredEvent | RefusedEvent | FinishedTrigger | DescribedTrigger | RedeliveryEnd | DescribedStream


class Outbox:
    """A bounded queue of events and ends, emptied in rounds."""

    def __init__(self, *, events_max: int, round_events_max: int) -> None:
        self._events_max = events_max
        self._round_events_max = round_events_max
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._stuck: list[int] = []
        self._not_empty = trio.Event()
        self._room = trio.lowlevel.ParkingLot()
        # Whether a trigger that fires should wait with `wait_room`. No property: it is read after every event.
        self.is_full = False

    def __len__(self) -> int:
        return len(self._items)

    def enqueue(self, item: Item) -> None:
        """Append an item. Synchronous, so that nothing can happen between the binding of an event and this."""
        self._items.append(item)
        self._bytes += len(item.payload) if isinstance(item, FiredEvent) else _bytes_of(item)
        items = len(self._items)
        if items == 1:
            self._not_empty.set()
        self.is_full = items >= self._events_max or self._bytes >= OUTBOX_BYTES_MAX

    def report_stuck(self, trigger_id: int) -> None:
        """Add a trigger to the next round's list of those that do not end when cancelled."""
        self._stuck.append(trigger_id)
        self._not_empty.set()

    async def wait_room(self) -> None:
        """Wait until there may be room, or `wake` is called; the caller checks again."""
        await self._room.park()

    def wake(self) -> None:
        """Wake all tasks that wait for room, so that those being cancelled notice it."""
        self._room.unpark_all()

    async def wait_not_empty(self) -> None:
        """Wait until a round should be sent."""
        await self._not_empty.wait()

    def request_round(self) -> None:
        """Have a round sent even if the outbox is empty."""
        self._not_empty.set()

    def take_round(self, number: int, *, is_heartbeat: bool = False) -> StateChanges:
        """Take the next round out, in order; an empty one for a heartbeat, or if the outbox is empty."""
        events: list[FiredEvent] = []
        refused: list[RefusedEvent] = []
        finished: list[FinishedTrigger] = []
        described: list[DescribedTrigger] = []
        redriven: list[RedeliveryEnd] = []
        streams: list[DescribedStream] = []
        round_bytes = taken = 0
        events_max = 0 if is_heartbeat else self._round_events_max
        while self._items and taken < events_max and round_bytes < ROUND_BYTES_MAX:
            item = self._items.popleft()
            taken += 1
            if isinstance(item, FiredEvent):
                round_bytes += len(item.payload)
                events.append(item)
                continue
            round_bytes += _bytes_of(item)
            if isinstance(item, RefusedEvent):
                refused.append(item)
            elif isinstance(item, FinishedTrigger):
                finished.append(item)
            elif isinstance(item, DescribedTrigger):
                described.append(item)
            elif isinstance(item, RedeliveryEnd):
                redriven.append(item)
            else:
                streams.append(item)
        self._bytes -= round_bytes
        stuck, self._stuck = tuple(self._stuck), []
        if not self._items:
            self._not_empty = trio.Event()
        self.is_full = len(self._items) >= self._events_max or self._bytes >= OUTBOX_BYTES_MAX
        if not self.is_full:
            self._room.unpark_all()
        return StateChanges(
            number,
            tuple(events),
            tuple(refused),
            tuple(finished),
            stuck,
            described=tuple(described),
            redriven=tuple(redriven),
            streams=tuple(streams),
        )


def _bytes_of(item: RefusedEvent | FinishedTrigger | DescribedTrigger | RedeliveryEnd | DescribedStream) -> int:
    """The bytes of an item whose size users' code decides."""
    if isinstance(item, RefusedEvent):
        return len(item.payload_head) + len(item.reason)
    if isinstance(item, DescribedTrigger):
        return len(item.stream_name)
    if isinstance(item, RedeliveryEnd | DescribedStream):
        return len(item.error)
    return len(item.error) + len(item.traceback)
