"""Triggers that had failed and have run well since: the store does not count them as failing any more."""

from __future__ import annotations

from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.assignments import Assignments


class Recoveries:
    """The triggers of one supervisor whose failures in a row are over. It costs nothing while none had failed."""

    def __init__(self, store: Store, assignments: Assignments, *, retry: DatabaseRetry) -> None:
        self._store = store
        self._assignments = assignments
        self._retry = retry

    def wake_at(self) -> float | None:
        """Return the time at which `step` has to be called; None if there is none."""
        due_at = self._assignments.next_recovery_at()
        return None if due_at is None else max(due_at, self._retry.at)

    def step(self, epoch: Epoch, now: float) -> None:
        """Have the store forget the failures of those that are due, in one transaction. Raises `LeaseLost`."""
        due_at = self.wake_at()
        if due_at is None or now < due_at:
            return
        recovered = self._assignments.recovered(now)
        with self._retry.attempt(now):
            self._store.reset_failures(epoch, recovered)
            self._assignments.forgive(recovered)
