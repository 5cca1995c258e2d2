"""The triggers this supervisor owns, and where each of them stands.

::

    claimed ──start──▶ RUNNING ──failed──▶ WAITING ──its time has come──▶ RUNNING
                        │   │                 │
                        │   └─returned──▶ (gone)
                        └─removed by a user──▶ CANCELLING ──ended──▶ (gone)

When the runner dies, every RUNNING and WAITING trigger is started in the next incarnation, and every
CANCELLING one is gone with it. Each start is a trigger run of its own, named after the epoch, the incarnation, the
trigger and a count, so no run is ever mistaken for another, on whichever machine it ran.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from headgate.protocol.messages.runner import CancelReason, CancelTrigger, FinishedTrigger, TriggerSpec
from headgate.store.ids import Epoch, TryName
from headgate.store.triggers.leases import ClaimedTrigger
from headgate.supervisor.backoff import Waits

SPEC_ROOM_BYTES = 256  # of a frame, for what is not known of a trigger when it is claimed: the id of its run
# Tasks of triggers that have ended, remembered because what these logged last may come later than their end.
ENDED_TASKS_MAX = 1000


class AssignmentState(enum.Enum):
    """Where an assigned trigger stands."""

    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"


class Assignment(msgspec.Struct, gc=False):  # it can be in no cycle
    """One owned trigger. ``start_at`` counts while WAITING, ``started_at`` while RUNNING (core's clock)."""

    trigger: ClaimedTrigger
    failures: int = 0  # in a row
    state: AssignmentState = AssignmentState.WAITING
    trigger_run_id: str = ""
    start_at: float = 0.0
    started_at: float = 0.0


class Assignments:
    """All owned triggers of one epoch.

    One that fails is started again after a wait, which starts over at ``retry_wait_s`` after a run of ``healthy_s``
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
        """How many triggers are owned, those included that cannot be started."""
        return len(self._assigned) + len(self._unreadable)

    def running(self) -> int:
        """How many of them run, as far as is known."""
        return sum(assigned.state is AssignmentState.RUNNING for assigned in self._assigned.values())

    def task_of(self, trigger_id: int) -> TryName | None:
        """Return the try that waits, or waited a short time ago, for a trigger; None where there is none."""
        assigned = self._assigned.get(trigger_id)
        return self._ended_tasks.get(trigger_id) if assigned is None else assigned.trigger.task

    def assign(self, triggers: Iterable[ClaimedTrigger], now: float) -> list[ClaimedTrigger]:
        """Take newly claimed triggers; they are due at once. One that is owned already stays as it is.

        Return those that are new here and cannot be started, because no key decrypts their kwargs or because they do
        not fit in a frame; ``error`` says why.
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
        """Return it as it is, or as unreadable if it fits no frame: the limit was larger when it was made."""
        needed = len(trigger.kwargs or b"") + 4 * (len(trigger.name) + len(trigger.classpath)) + SPEC_ROOM_BYTES
        limit = self._frame_bytes_max
        if needed <= limit:
            return trigger
        error = f"its kwargs and names take a frame of up to {needed:,} bytes; the limit is {limit:,} (frame_bytes_max)"
        return msgspec.structs.replace(trigger, kwargs=None, error=error)

    def start_due(self, epoch: Epoch, incarnation: int, now: float) -> tuple[TriggerSpec, ...]:
        """Start every trigger whose time has come; return what the runner needs to run them."""
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
        """Mark a trigger as being cancelled; return what to send to the runner, None if there is nothing to send.

        That includes one that waits for its next start, because a shared stream may wait for it, too. There is nothing
        to send if it was cancelled before, or if no runner was ever given it.
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
        """Take the end of a run; return the seconds until it is started again, None where it is not.

        The report of a run that is not the current one changes nothing: it comes late.
        """
        assigned = self._assigned.get(finished.trigger_id)
        if assigned is None or assigned.trigger_run_id != finished.trigger_run_id:
            return None
        if finished.outcome == "returned" or assigned.state is AssignmentState.CANCELLING:
            self._forget(finished.trigger_id)
            return None
        if finished.outcome == "cancelled":
            # Not by our wish for this trigger, so with its whole runner: it goes on in the next one.
            self._wait(assigned, now)
            return None
        if now - assigned.started_at >= self._healthy_s:
            assigned.failures = 0
        assigned.failures += 1
        wait_s = self._waits.after(assigned.failures)
        if assigned.state is AssignmentState.WAITING:
            wait_s = 0.0  # its runner died meanwhile, and it begins again with all the others (see hand_over)
        self._wait(assigned, now + wait_s)
        return wait_s

    def hand_over(self, now: float) -> None:
        """The runner is gone: what ran is due at once in the next incarnation, what was cancelled is over."""
        for trigger_id, assigned in list(self._assigned.items()):
            if assigned.state is AssignmentState.CANCELLING:
                self._forget(trigger_id)
            else:
                # Also what waits for its next try is due: triggers that share a stream must begin together,
                # or the stream would go on without the one that waits. The respawn has a backoff of its own.
                # The run keeps its name until the next start: a report of its end may still be on its way
                # through the intake, and a trigger that returned must not run again.
                self._wait(assigned, now)

    def cancel_all(self, reason: CancelReason) -> tuple[CancelTrigger, ...]:
        """Cancel everything that runs and forget the rest."""
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
