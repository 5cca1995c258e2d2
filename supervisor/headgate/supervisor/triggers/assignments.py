"""The triggers that this supervisor owns, and the state of each.

::

    claimed ──start──▶ RUNNING ──failed──▶ WAITING ──the wait is over──▶ RUNNING
                        │   │                 │
                        │   └─returned──▶ (gone)
                        └─removed by a user──▶ CANCELLING ──ended──▶ (gone)

When the runner dies, every RUNNING and WAITING trigger is started in the next incarnation, and every CANCELLING one has
ended. Each start is a new trigger run. Its id contains the epoch, the incarnation, the trigger and a count, so it is
unique across all machines.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from headgate.protocol.messages.runner import CancelReason, CancelTrigger, FinishedTrigger, TriggerSpec
from headgate.store.ids import Epoch, TryName
from headgate.store.triggers.leases import ClaimedTrigger
from headgate.supervisor.backoff import Waits

SPEC_ROOM_BYTES = 256  # of a frame, for the id of the trigger run, which is not known yet when a trigger is claimed
# Tasks of triggers that have ended, kept because the last log records of a trigger may arrive after its end.
ENDED_TASKS_MAX = 1000


class AssignmentState(enum.Enum):
    """The state of an assigned trigger."""

    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"


class Assignment(msgspec.Struct, gc=False):  # it cannot be part of a cycle
    """One owned trigger. ``start_at`` is used while WAITING, ``started_at`` while RUNNING (core's clock)."""

    trigger: ClaimedTrigger
    failures: int = 0  # in a row
    state: AssignmentState = AssignmentState.WAITING
    trigger_run_id: str = ""
    start_at: float = 0.0
    started_at: float = 0.0


class Assignments:
    """All owned triggers of one epoch.

    A trigger that fails is started again after a wait, which is reset to ``retry_wait_s`` by a run of ``healthy_s``
    seconds. One that does not fit in a frame of ``frame_bytes_max`` bytes cannot be started.
    """

    def __init__(self, *, retry_wait_s: float, retry_wait_max_s: float, healthy_s: float, frame_bytes_max: int) -> None:
        self._waits = Waits(retry_wait_s, retry_wait_max_s)
        self._healthy_s = healthy_s
        self._frame_bytes_max = frame_bytes_max
        self._unreadable: set[int] = set()
        self._assigned: dict[int, Assignment] = {}
        self._waiting: set[int] = set()
        self._ended_tasks: dict[int, TryName] = {}
        self._starts = 0

    def __len__(self) -> int:
        return len(self._assigned)

    def __contains__(self, trigger_id: int) -> bool:
        return trigger_id in self._assigned

    @property
    def owned(self) -> int:
        """The number of owned triggers, including those that cannot be started."""
        return len(self._assigned) + len(self._unreadable)

    def running(self) -> int:
        """Return the number of triggers that run, as far as is known."""
        return sum(assigned.state is AssignmentState.RUNNING for assigned in self._assigned.values())

    def task_of(self, trigger_id: int) -> TryName | None:
        """Return the try that waits, or recently waited, for a trigger; None if there is none."""
        assigned = self._assigned.get(trigger_id)
        return self._ended_tasks.get(trigger_id) if assigned is None else assigned.trigger.task

    def assign(self, triggers: Iterable[ClaimedTrigger], now: float) -> list[ClaimedTrigger]:
        """Add newly claimed triggers, which are due at once. One that is owned already does not change.

        Return the new ones that cannot be started, because no key decrypts their kwargs or because they do not fit in a
        frame; ``error`` has the reason.
        """
        unreadable = []
        for claimed in triggers:
            trigger = self._fitting(claimed)
            if trigger.kwargs is None:
                if trigger.id not in self._unreadable:
                    self._unreadable.add(trigger.id)
                    unreadable.append(trigger)
            elif trigger.id not in self._assigned:
                self._assigned[trigger.id] = Assignment(trigger, start_at=now)
                self._waiting.add(trigger.id)
        return unreadable

    def forget_unreadable(self, trigger_ids: Iterable[int]) -> None:
        """Forget triggers that could not be started and are not owned any more."""
        self._unreadable.difference_update(trigger_ids)

    def _fitting(self, trigger: ClaimedTrigger) -> ClaimedTrigger:
        """Return the trigger, marked as unreadable if it fits no frame: the limit was larger when it was created."""
        needed = len(trigger.kwargs or b"") + 4 * (len(trigger.name) + len(trigger.classpath)) + SPEC_ROOM_BYTES
        limit = self._frame_bytes_max
        if needed <= limit:
            return trigger
        error = f"its kwargs and names take a frame of up to {needed:,} bytes; the limit is {limit:,} (frame_bytes_max)"
        return msgspec.structs.replace(trigger, kwargs=None, error=error)

    def start_due(self, epoch: Epoch, incarnation: int, now: float) -> tuple[TriggerSpec, ...]:
        """Start every trigger that is due; return their specs for the runner."""
        due = sorted(trigger_id for trigger_id in self._waiting if self._assigned[trigger_id].start_at <= now)
        specs = []
        for trigger_id in due:
            assigned = self._assigned[trigger_id]
            self._starts += 1
            assigned.state = AssignmentState.RUNNING
            assigned.trigger_run_id = f"{epoch}.{incarnation}.{trigger_id}.{self._starts}"
            assigned.started_at = now
            trigger = assigned.trigger
            assert trigger.kwargs is not None, "a trigger without readable kwargs is never assigned"
            specs.append(
                TriggerSpec(trigger_id, assigned.trigger_run_id, trigger.name, trigger.classpath, trigger.kwargs)
            )
        self._waiting.difference_update(due)
        return tuple(specs)

    def next_start_at(self) -> float | None:
        """When the next waiting trigger is due; None while none waits."""
        return min((self._assigned[trigger_id].start_at for trigger_id in self._waiting), default=None)

    def cancel(self, trigger_id: int, reason: CancelReason) -> CancelTrigger | None:
        """Mark a trigger as being cancelled; return the part of a message to send to the runner, or None.

        A trigger that waits for its next start is also cancelled in the runner, because a shared stream may wait for
        it. Nothing is sent if it was cancelled before, or if no runner ever got it.
        """
        assigned = self._assigned.get(trigger_id)
        if assigned is None or assigned.state is AssignmentState.CANCELLING:
            return None
        if assigned.state is AssignmentState.WAITING:
            self._forget(trigger_id)
            return CancelTrigger(trigger_id, reason) if assigned.trigger_run_id else None
        assigned.state = AssignmentState.CANCELLING
        return CancelTrigger(trigger_id, reason)

    def end_run(self, finished: FinishedTrigger, now: float) -> float | None:
        """Record the end of a run; return the seconds until the trigger is started again, None if it is not.

        The report of a run that is not the current one is late, and changes nothing.
        """
        assigned = self._assigned.get(finished.trigger_id)
        if assigned is None or assigned.trigger_run_id != finished.trigger_run_id:
            return None
        if finished.outcome == "returned" or assigned.state is AssignmentState.CANCELLING:
            self._forget(finished.trigger_id)
            return None
        if finished.outcome == "cancelled":
            # We did not cancel this trigger, so its whole runner was drained: it continues in the next one.
            self._wait(assigned, now)
            return None
        if now - assigned.started_at >= self._healthy_s:
            assigned.failures = 0
        assigned.failures += 1
        wait_s = self._waits.after(assigned.failures)
        if assigned.state is AssignmentState.WAITING:
            wait_s = 0.0  # its runner died meanwhile, and it is started together with all others (see hand_over)
        self._wait(assigned, now + wait_s)
        return wait_s

    def hand_over(self, now: float) -> None:
        """Handle the end of the runner: its triggers are due at once in the next one, cancelled ones are forgotten."""
        for trigger_id, assigned in list(self._assigned.items()):
            if assigned.state is AssignmentState.CANCELLING:
                self._forget(trigger_id)
            else:
                # Triggers that wait for their next try are due too: those that share a stream must start together, or
                # the stream would continue without the one that waits. The respawn has its own backoff. The run keeps
                # its id until the next start: the report of its end may still be in the intake, and a trigger that
                # returned must not run again.
                self._wait(assigned, now)

    def cancel_all(self, reason: CancelReason) -> tuple[CancelTrigger, ...]:
        """Cancel all triggers that run, and forget the others."""
        cancels = (self.cancel(trigger_id, reason) for trigger_id in list(self._assigned))
        return tuple(cancel for cancel in cancels if cancel is not None)

    def _wait(self, assigned: Assignment, start_at: float) -> None:
        assigned.state = AssignmentState.WAITING
        assigned.start_at = start_at
        self._waiting.add(assigned.trigger.id)

    def _forget(self, trigger_id: int) -> None:
        task = self._assigned.pop(trigger_id).trigger.task
        self._waiting.discard(trigger_id)
        if task is not None:
            self._ended_tasks[trigger_id] = task
            if len(self._ended_tasks) > ENDED_TASKS_MAX:
                del self._ended_tasks[next(iter(self._ended_tasks))]
