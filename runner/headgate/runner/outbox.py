"""What the triggers of this runner have to say and the supervisor has not yet been told.

Triggers put events in without awaiting; the sender takes them out as rounds. While one round is in flight
the outbox fills, and the next round carries all of it: that is group commit. When it is full, the triggers
wait for room, each after the event it has just fired, so the limit is exceeded by one event a trigger at most.
"""

from __future__ import annotations

from collections import deque

import trio

from headgate.protocol.messages.runner import FinishedTrigger, FiredEvent, RefusedEvent, StateChanges

OUTBOX_BYTES_MAX = 64 * 1024 * 1024  # what waits: what a database that is away may cost in memory
ROUND_BYTES_MAX = 32 * 1024 * 1024  # of one round: two frames, stored in one go

Item = FiredEvent | RefusedEvent | FinishedTrigger


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
        self._put_total = self._taken_total = self._stored_total = 0
        self._stored = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_full(self) -> bool:
        """Whether whoever fires should wait with `wait_room`."""
        return len(self._items) >= self._events_max or self._bytes >= OUTBOX_BYTES_MAX

    def enqueue(self, item: Item) -> None:
        """Append. Synchronous, so that nothing comes between the binding of an event and its place here."""
        self._items.append(item)
        self._put_total += 1
        self._bytes += len(item.payload) if isinstance(item, FiredEvent) else _bytes_of(item)
        if len(self._items) == 1:
            self._not_empty.set()

    def report_stuck(self, trigger_id: int) -> None:
        """Add a trigger to the next round's list of those that do not end when cancelled."""
        self._stuck.append(trigger_id)
        self._not_empty.set()

    async def wait_room(self) -> None:
        """Wait until there may be room, or `wake` is called; the caller looks again."""
        await self._room.park()

    def wake(self) -> None:
        """Wake everyone who waits for room, so that those who are being cancelled notice it."""
        self._room.unpark_all()

    async def wait_not_empty(self) -> None:
        """Wait until there is something for a round."""
        await self._not_empty.wait()

    def request_round(self) -> None:
        """Have a round sent even if there is nothing for it."""
        self._not_empty.set()

    def take_round(self, number: int, *, is_heartbeat: bool = False) -> StateChanges:
        """Take out the next round, in order; an empty one if there is nothing, or it is to be a heartbeat."""
        events: list[FiredEvent] = []
        refused: list[RefusedEvent] = []
        finished: list[FinishedTrigger] = []
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
            else:
                finished.append(item)
        self._taken_total += taken
        self._bytes -= round_bytes
        stuck, self._stuck = tuple(self._stuck), []
        if not self._items:
            self._not_empty = trio.Event()
        if not self.is_full:
            self._room.unpark_all()
        return StateChanges(number, tuple(events), tuple(refused), tuple(finished), stuck)

    def note_stored(self) -> None:
        """Note that every round taken so far has been answered: what was in it is stored."""
        self._stored_total = self._taken_total
        self._stored.unpark_all()

    async def wait_stored(self) -> None:
        """Wait until everything that is in here now is stored."""
        put_total = self._put_total
        while self._stored_total < put_total:
            await self._stored.park()


def _bytes_of(item: RefusedEvent | FinishedTrigger) -> int:
    """What an item holds in memory beside its fixed fields, as far as users' code decides it."""
    if isinstance(item, RefusedEvent):
        return len(item.payload_head)
    return len(item.error) + len(item.traceback)
