"""Owned triggers that must end for good: when each is cancelled, and when its row is released.

A trigger ends for good if a user has removed it, or if its task does not wait for it any more. One whose event has
resumed its task is ended by the runner, without a request; all others are cancelled as soon as this supervisor knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headgate.protocol.messages.runner import CancelReason, CancelTrigger, FinishedTrigger
from headgate.store.ids import Epoch, TriggerId
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.assignment import ABSENT, AssignmentState
from headgate.supervisor.triggers.assignments import Assignments


class Releases:
    """The triggers of one supervisor that are to be released."""

    def __init__(self, store: Store, assignments: Assignments, *, retry: DatabaseRetry) -> None:
        self._store = store
        self._assignments = assignments
        # If the database does not respond, each release blocks the loop until its timeout: do not retry at once.
        self._retry = retry
        self._ended: set[int] = set()  # their rows may be released

    def cancel(self, trigger_ids: Iterable[int], reason: CancelReason) -> tuple[CancelTrigger, ...]:
        """Cancel these; return the cancellations to send to the runner. Triggers that no runner has end at once."""
        cancels = []
        for trigger_id in trigger_ids:
            cancel = self._assignments.cancel(trigger_id, reason)
            if cancel is not None:
                cancels.append(cancel)
            if trigger_id not in self._assignments:
                self._ended.add(trigger_id)
        return tuple(cancels)

    def expect_ends(self, trigger_ids: Iterable[int]) -> None:
        """Take triggers whose tasks have gone on in the slice that is stored now. Those that run end by themselves."""
        for trigger_id in trigger_ids:
            if trigger_id in self._assignments:
                self._assignments.expect_end(trigger_id)
                if trigger_id not in self._assignments:
                    self._ended.add(trigger_id)

    def is_over(self, trigger_id: int, over: Collection[int]) -> bool:
        """Whether nothing waits for a trigger any more, so that it is not started again, however it ended.

        ``over``: those whose tasks have gone on in the slice that is stored now.
        """
        return trigger_id in over or self._assignments.state_of(trigger_id) is AssignmentState.ENDING

    def end_waits(self, finished: Iterable[FinishedTrigger], over: Collection[int]) -> tuple[CancelTrigger, ...]:
        """Return cancellations of triggers that are not started again, for which streams may wait: failed or held ones.

        For the slice that is stored now, before its ends are taken.
        """
        gone = []
        for one in finished:
            if one.outcome == "returned":
                is_awaited = self._assignments.state_of(one.trigger_id, one.trigger_run_id) in ABSENT
            else:
                is_awaited = one.outcome == "failed" and self.is_over(one.trigger_id, over)
            gone += [CancelTrigger(one.trigger_id, "timeout")] if is_awaited else []
        return tuple(gone)

    def reclaimed(self, trigger_ids: Iterable[int]) -> None:
        """Keep the rows of triggers that were claimed anew: their last run had given them up already."""
        self._ended.difference_update(trigger_ids)

    def ended(self, trigger_id: int, *, for_good: bool) -> None:
        """Note the end of a run of a trigger; ``for_good`` if the trigger is not to run again."""
        if for_good:
            self._ended.add(trigger_id)

    def release(self, epoch: Epoch, now: float, waits: bool) -> bool:
        """Release the rows of those that have ended; return whether one can be claimed again. Raises `LeaseLost`.

        It ``waits`` while rounds of a runner that is gone are not stored. Readers leave a removed trigger as soon as it
        has no owner (`headgate.store.consuming.reading`), so no event of it may come after that.
        """
        if waits or not self._ended or not self._retry.ready(now):
            return False
        reopened: list[TriggerId] = []
        with self._retry.attempt(now):  # if it fails, they stay in the set, and a later step tries again
            reopened = self._store.release_triggers(epoch, sorted(self._ended))
            self._assignments.forget_unreadable(self._ended)
            self._ended.clear()
        return bool(reopened)
