"""Holds of owned triggers, as the database has them and as this supervisor decides them.

A hold that this supervisor decides (a quarantine, for example) takes effect at once, and is stored as soon as the
database allows. Those of users are found by polls, and so is every release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from headgate.protocol import marks
from headgate.protocol.messages.runner import AbsentSubscriber, CancelTrigger, StateSync
from headgate.store.ids import Epoch, Hold
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.assignments import Assignments

log = structlog.get_logger(__name__)


class Holds:
    """The holds of one supervisor's triggers. The caller sends the messages that it returns to the runner."""

    def __init__(self, store: Store, assignments: Assignments, *, retry: DatabaseRetry) -> None:
        self._store = store
        self._assignments = assignments
        self._retry = retry
        self._unstored: dict[int, tuple[Hold, str]] = {}

    def wake_at(self) -> float | None:
        """Return the time at which the next hold is to be stored; None if all are."""
        return self._retry.at if self._unstored else None

    @property
    def is_stored(self) -> bool:
        """Whether every hold is stored."""
        return not self._unstored

    def begin(self, trigger_id: int, hold: Hold, reason: str) -> StateSync | None:
        """Hold a trigger; return the message for the runner, None if it needs none. `store` stores it."""
        self._unstored[trigger_id] = (hold, reason)
        return self._sync({trigger_id: hold})

    def take(self, trigger_id: int, hold: Hold) -> StateSync | None:
        """Take a hold that is stored already; return the message for the runner, None if it needs none."""
        return self._sync({trigger_id: hold})

    def store(self, epoch: Epoch, now: float) -> None:
        """Store the holds that are not stored yet. Raises `LeaseLost`."""
        if not self._unstored or not self._retry.ready(now):
            return
        with self._retry.attempt(now):
            for trigger_id, (hold, reason) in list(self._unstored.items()):
                self._store.hold_trigger(epoch, trigger_id, hold, reason)
                marks.reach("holds.stored")
                del self._unstored[trigger_id]

    def found(self, held: Mapping[int, Hold], now: float) -> tuple[StateSync | None, list[int]]:
        """Take the holds that a poll has found; return a message for the runner, and the triggers that are released.

        ``held`` are all open triggers of this epoch with a hold.
        """
        released = sorted(self._assignments.held() - held.keys() - self._unstored.keys())
        for trigger_id in released:
            log.info("a trigger is released, and is started again", trigger_id=trigger_id)
            self._assignments.release(trigger_id, now)
        # Streams go on without those that were paused, and have to wait for those of them that cannot be started.
        absent = self._assignments.absent([each for each in released if each not in self._assignments])
        stored: Mapping[int, Hold] = {id_: hold for id_, hold in held.items() if id_ not in self._unstored}
        return self._sync(stored, absent), released

    def _sync(self, held: Mapping[int, Hold], others: Sequence[AbsentSubscriber] = ()) -> StateSync | None:
        cancels: list[CancelTrigger] = []
        absent = list(others)
        for trigger_id, hold in sorted(held.items()):
            parts = self._assignments.hold(trigger_id, hold)
            if parts is not None:
                log.info("a trigger is held", trigger_id=trigger_id, hold=hold)
                cancels.append(parts[0])
                absent += [parts[1]] if parts[1] is not None else []
        return StateSync(to_cancel=tuple(cancels), absent=tuple(absent)) if cancels or absent else None
