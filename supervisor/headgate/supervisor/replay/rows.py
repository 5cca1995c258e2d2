"""Checks the event log of a replay's database: the same event never twice, none of the others missing (I1, I2).

This is the rule of the event log in a second implementation: in memory, one event after the other, from the events
that the runner reported in the log. The database is compared with it row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.protocol.messages.runner import KEY_CHARS_MAX, FiredEvent
from headgate.store.inspect.event_log import EventRow
from headgate.supervisor.replay.database import ReplayStore


class Rows:
    """Follows the event log of a replay's database. Each event costs some hundred bytes of memory."""

    def __init__(self, store: ReplayStore) -> None:
        self._store = store
        self._reported: list[FiredEvent] = []
        # Hashes of the names of events, and of the messages they derive from: of 64 bits, so even among a hundred
        # million events a collision is very unlikely.
        self._events: set[int] = set()
        self._messages: set[int] = set()
        self._last_id = 0
        self.stored = 0
        self.redelivered = 0
        self.dead_letters = 0

    def report(self, events: Sequence[FiredEvent]) -> None:
        """Take events that were given to the core, with the run ids of the replay."""
        self._reported += events

    def check(self) -> str | None:
        """Compare the events reported since the last call, which must all be stored by now; return the problem."""
        reported, self._reported = self._reported, []
        if not reported:
            return None
        new = {
            (row.trigger_run_id, row.sequence_index): row for row in self._store.inspect.events(after_id=self._last_id)
        }
        self._last_id = max((row.id for row in new.values()), default=self._last_id)
        for event in reported:
            problem = self._account(event, new)
            if problem is not None:
                return problem
        if new:
            return f"the event log has a row that was never reported: {_name(next(iter(new.values())))}"
        return None

    def _account(self, event: FiredEvent, new: dict[tuple[str, int], EventRow]) -> str | None:
        name = (event.trigger_run_id, event.sequence_index)
        message = None if event.key is None else hash((event.trigger_id, event.key, event.position))
        if hash(name) in self._events:
            return None
        if message is not None and message in self._messages:
            self.redelivered += 1
            return None
        row = new.pop(name, None)
        if row is None:
            if self._store.is_dead_letter(*name) or not _can_be_named(event):
                self.dead_letters += 1
                return None
            return f"an event was reported and confirmed, and has no row: {_name(event)}"
        self._events.add(hash(name))
        if message is not None:
            self._messages.add(message)
        self.stored += 1
        for field in ("trigger_id", "key", "position", "kind", "payload"):
            reported, stored = getattr(event, field), getattr(row, field)
            if reported != stored:
                return f"the row of {_name(event)} has the {field} {stored!a:.80}, reported {reported!a:.80}"
        return None

    def check_totals(self) -> str | None:
        """Compare the numbers of rows and of redeliveries with those counted here; return the problem."""
        rows = redelivered = 0
        for row in self._store.inspect.events():
            rows += 1
            redelivered += row.redelivered
        if rows != self.stored:
            return f"the event log has {rows:,} rows where {self.stored:,} events were to be stored"
        if redelivered != self.redelivered:
            return f"the database counts {redelivered:,} redeliveries where {self.redelivered:,} came"
        return None


def _can_be_named(event: FiredEvent) -> bool:
    """Whether the dead letter of an event has its coordinates unchanged; see `headgate.store.triggers.dead_letters`."""
    numbers = (event.trigger_id, event.sequence_index, event.position)
    has_name = len(event.trigger_run_id) <= KEY_CHARS_MAX and "\0" not in event.trigger_run_id
    return has_name and all(-(2**63) <= number < 2**63 for number in numbers)


def _name(event: FiredEvent | EventRow) -> str:
    key = "" if event.key is None else f", key {event.key!a:.80}"
    return f"trigger {event.trigger_id}, run {event.trigger_run_id!a:.80}, event {event.sequence_index}{key}"
