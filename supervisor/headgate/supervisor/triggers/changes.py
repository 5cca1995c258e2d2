"""Triggers that a user has changed or restarted: each is started again with its new values (`Store.take_changes`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog

from headgate.protocol.messages.runner import AbsentSubscriber, CancelTrigger, FinishedTrigger, StateSync
from headgate.store.triggers.leases import ClaimedTrigger
from headgate.supervisor.triggers.assignments import Assignments
from headgate.supervisor.triggers.releases import Releases

log = structlog.get_logger(__name__)


class Changes:
    """The changes of one supervisor's triggers, which serves ``queues``."""

    def __init__(self, assignments: Assignments, releases: Releases, *, queues: Sequence[str]) -> None:
        self._assignments = assignments
        self._releases = releases
        self._queues = frozenset(queues)
        self._changed: dict[int, str] = {}  # owned triggers, with the last run that each began before its change

    def take(self, changed: Sequence[ClaimedTrigger], now: float) -> tuple[StateSync | None, list[ClaimedTrigger]]:
        """Take changed triggers; return a message for the runner, and those that must be assigned.

        A run is cancelled, and its stream waits until the trigger is started again. A trigger that cannot be started
        here any more, because it was moved to another queue or is too big, is released when its run has ended. Those
        to be assigned could not be started before.
        """
        cancels: list[CancelTrigger] = []
        absent: list[AbsentSubscriber] = []
        new: list[ClaimedTrigger] = []
        self._changed = {each: run for each, run in self._changed.items() if each in self._assignments}
        self._changed |= {one.id: run for one in changed if (run := self._assignments.run_of(one.id))}
        for trigger in changed:
            is_served = trigger.queue in self._queues
            log.info("a trigger is changed by a user", trigger_id=trigger.id, trigger_name=trigger.name, here=is_served)
            is_here = trigger.id in self._assignments
            if not is_served or (is_here and not self._assignments.is_startable(trigger)):
                if is_served:  # it comes back as one that cannot be started
                    absent += self._assignments.absence_as(trigger)
                cancels += self._releases.cancel([trigger.id], "reassigned")
            elif not is_here:
                self._assignments.forget_unreadable([trigger.id])
                new.append(trigger)
            elif (parts := self._assignments.change(trigger, now)) is not None:
                cancels.append(parts[0])
                absent += [parts[1]] if parts[1] is not None else []
        return (StateSync(to_cancel=tuple(cancels), absent=tuple(absent)) if cancels else None), new

    def end_of(self, finished: FinishedTrigger) -> FinishedTrigger:
        """Return the end of a run as it is to be stored.

        One that returned after a user has changed its trigger, or restarted it, counts as cancelled for that: the
        trigger has not returned with its new values. The store does the same with a change that was not read yet.
        """
        if finished.outcome != "returned" or self._changed.get(finished.trigger_id) != finished.trigger_run_id:
            return finished
        return msgspec.structs.replace(finished, outcome="cancelled", reason="reassigned")
