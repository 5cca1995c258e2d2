"""The triggers that this supervisor owns, and the state of each.

::

    claimed ──start──▶ RUNNING ──failed──▶ WAITING ──the wait is over──▶ RUNNING
                        │   │                 │
                        │   └─returned──▶ (gone)
                        └─cancelled, or its task has gone on──▶ ENDING ──ended──▶ (gone)

    RUNNING ──held──▶ HOLDING ──ended──▶ HELD ──released──▶ WAITING
    RUNNING ──changed by a user──▶ HOLDING ──ended──▶ WAITING

When the runner dies, every RUNNING and WAITING trigger is started in the next incarnation, every ENDING one has
ended, and every HOLDING one is HELD. A trigger that was WAITING is HELD at once, and so is one that is claimed with a
hold. The shared stream of a held trigger waits for it (`AbsentSubscriber`), unless a user has paused it. So does that
of a trigger that cannot be started at all, because its kwargs cannot be read here or fit no frame, unless a task waits
for it, which fails.

Each start is a new trigger run. Its id contains the epoch, the incarnation, the trigger and a count, so it is unique
across all machines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from headgate.protocol.messages.runner import (
    PASSED_OVER_KEYS_MAX,
    AbsentSubscriber,
    CancelReason,
    CancelTrigger,
    DescribedTrigger,
    FinishedTrigger,
    TriggerSpec,
)
from headgate.store.ids import Epoch, Hold, TryName
from headgate.store.triggers.leases import ClaimedTrigger
from headgate.store.triggers.streams import Placed
from headgate.supervisor.backoff import Waits
from headgate.supervisor.triggers.assignment import IN_RUNNER, Assignment, AssignmentState, absence_of_lost, spec_bytes

KEY_HEADER_BYTES = 5  # of one string in a frame, at most
# Tasks of triggers that have ended, kept because the last log records of a trigger may arrive after its end.
ENDED_TASKS_MAX = 1000


class Assignments:
    """All owned triggers of one epoch.

    A trigger that fails is started again after a wait, which is reset to ``retry_wait_s`` by a run of ``healthy_s``
    seconds. One that does not fit in a frame of ``frame_bytes_max`` bytes cannot be started.
    """

    def __init__(self, *, retry_wait_s: float, retry_wait_max_s: float, healthy_s: float, frame_bytes_max: int) -> None:
        self._waits = Waits(retry_wait_s, retry_wait_max_s)
        self._healthy_s = healthy_s
        self._frame_bytes_max = frame_bytes_max
        self._unreadable: dict[int, ClaimedTrigger] = {}  # those that cannot be started
        self._assigned: dict[int, Assignment] = {}
        self._waiting: set[int] = set()
        self._held: set[int] = set()  # those with a hold
        self._recovers_at: dict[int, float] = {}  # of failing triggers that run; the earliest first
        self._ended_tasks: dict[int, TryName] = {}
        self._starts = 0
        # Triggers that run, as far as is known, and whose streams are not known yet, with the numbers of their starts:
        # the oldest first.
        self._undescribed: dict[int, int] = {}

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
                    unreadable.append(trigger)
                self._unreadable[trigger.id] = trigger
            elif trigger.id not in self._assigned:
                keys, is_failing = self._known(trigger, trigger.passed_over), trigger.failure_count > 0
                assigned = self._assigned[trigger.id] = Assignment(trigger, keys, is_failing, start_at=now)
                if trigger.hold is None:
                    self._waiting.add(trigger.id)
                else:
                    assigned.state, assigned.hold = AssignmentState.HELD, trigger.hold
                    self._held.add(trigger.id)
        return unreadable

    def forget_unreadable(self, trigger_ids: Iterable[int]) -> None:
        """Forget triggers that could not be started and are not owned any more."""
        for trigger_id in trigger_ids:
            self._unreadable.pop(trigger_id, None)

    def is_startable(self, trigger: ClaimedTrigger) -> bool:
        """Whether a trigger can be started: its kwargs are readable and fit in a frame."""
        return self._fitting(trigger).kwargs is not None

    def _fitting(self, trigger: ClaimedTrigger) -> ClaimedTrigger:
        """Return the trigger, marked as unreadable if it fits no frame: the limit was larger when it was created."""
        needed, limit = spec_bytes(trigger), self._frame_bytes_max
        if needed <= limit:
            return trigger
        error = f"its kwargs and names take a frame of up to {needed:,} bytes; the limit is {limit:,} (frame_bytes_max)"
        return msgspec.structs.replace(trigger, kwargs=None, error=error)

    def _known(self, trigger: ClaimedTrigger, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the newest keys of messages passed over, as many as its spec may have and a frame can hold.

        The trigger gets the others once more: their strikes are in the database.
        """
        room_bytes = self._frame_bytes_max - spec_bytes(trigger)
        newest = keys[-PASSED_OVER_KEYS_MAX:]
        for number, key in enumerate(reversed(newest)):
            room_bytes -= KEY_HEADER_BYTES + 4 * len(key)
            if room_bytes < 0:
                return newest[len(newest) - number :]
        return newest

    def start_due(self, epoch: Epoch, incarnation: int, now: float) -> tuple[TriggerSpec, ...]:
        """Start every trigger that is due; return their specs for the runner.

        The triggers of a stream have to start together. So one whose stream is known waits until the streams of all
        triggers that were started before are known, too: they may have the same one.
        """
        alone, streamed = self.due(now)
        specs = [self._start(self._assigned[trigger_id], epoch, incarnation, now) for trigger_id in alone]
        oldest = self._oldest_undescribed()
        for trigger_id in streamed:
            assigned = self._assigned[trigger_id]
            if assigned.after is None:
                assigned.after = self._starts
            if assigned.after < oldest:
                specs.append(self._start(assigned, epoch, incarnation, now))
        return tuple(specs)

    def due(self, now: float) -> tuple[list[int], list[int]]:
        """Return the triggers whose wait is over, by id: those of which no stream is known, and the others."""
        due = sorted(trigger_id for trigger_id in self._waiting if self._assigned[trigger_id].start_at <= now)
        streamed = [trigger_id for trigger_id in due if self._assigned[trigger_id].trigger.stream]
        return sorted(set(due).difference(streamed)), streamed

    def _start(self, assigned: Assignment, epoch: Epoch, incarnation: int, now: float) -> TriggerSpec:
        trigger = assigned.trigger
        self._starts += 1
        self._waiting.discard(trigger.id)
        assigned.state = AssignmentState.RUNNING
        assigned.trigger_run_id = f"{epoch}.{incarnation}.{trigger.id}.{self._starts}"
        assigned.started_at = now
        if trigger.stream is None:
            self._undescribed.pop(trigger.id, None)
            self._undescribed[trigger.id] = self._starts
        if assigned.is_failing:
            self._recovers_at[trigger.id] = now + self._healthy_s
        assert trigger.kwargs is not None, "a trigger without readable kwargs is never assigned"
        return TriggerSpec(
            trigger.id,
            assigned.trigger_run_id,
            trigger.name,
            trigger.classpath,
            trigger.kwargs,
            stream=trigger.stream,
            passed_over=assigned.passed_over,
            takes_one_event=trigger.task is not None and not trigger.is_task_stream,
            credit=0 if trigger.is_task_stream else None,
        )

    def _oldest_undescribed(self) -> float:
        return next(iter(self._undescribed.values()), math.inf)

    def next_start_at(self) -> float | None:
        """When the next waiting trigger is due; None while none waits, except for descriptions."""
        oldest = self._oldest_undescribed()
        waiting = (self._assigned[trigger_id] for trigger_id in self._waiting)
        return min((one.start_at for one in waiting if one.after is None or one.after < oldest), default=None)

    def describe(self, described: DescribedTrigger, placed: Placed, now: float) -> bool:
        """Take the stream of a trigger, and the store's decision about it; return whether the trigger is over.

        If it may run here, it is due at once, with its stream. One that the store refused continues to count as
        running: its failure is to be reported to `end_run`.
        """
        trigger_id, assigned = described.trigger_id, self._assigned.get(described.trigger_id)
        if assigned is None or assigned.trigger_run_id != described.trigger_run_id:
            return False
        self._undescribed.pop(trigger_id, None)
        if trigger_id in placed.elsewhere:
            self._forget(trigger_id)
            return True
        runs_on = not described.stream and assigned.trigger.stream is None
        stream = "" if runs_on else placed.here.get(trigger_id)
        assigned.trigger = msgspec.structs.replace(assigned.trigger, stream=stream)
        if runs_on or any(run.trigger_id == trigger_id for run in placed.refused):
            return False
        if assigned.state is AssignmentState.ENDING:
            self._forget(trigger_id)
            return True
        if assigned.state in (AssignmentState.HOLDING, AssignmentState.HELD):
            self._end_held_run(assigned, now)
        else:
            # A stream that was cleaned away at this moment has to be described once more.
            self._wait(assigned, now if stream is not None else now + self._waits.after(1))
        return False

    def cancel(self, trigger_id: int, reason: CancelReason) -> CancelTrigger | None:
        """Mark a trigger as being cancelled; return the part of a message to send to the runner, or None.

        A trigger that waits for its next start, or is held, is also cancelled in the runner, because a shared stream
        may wait for it. Nothing is sent if it was cancelled before, or if no runner ever heard of it.
        """
        assigned = self._assigned.get(trigger_id)
        if assigned is None:
            lost = self._unreadable.pop(trigger_id, None)
            return CancelTrigger(trigger_id, reason) if lost is not None and lost.stream else None
        if assigned.state is AssignmentState.ENDING:
            return None
        if assigned.state is AssignmentState.WAITING:
            self._forget(trigger_id)
            return CancelTrigger(trigger_id, reason) if assigned.trigger_run_id else None
        if assigned.state is AssignmentState.HELD:
            self._forget(trigger_id)
            return CancelTrigger(trigger_id, reason)
        assigned.state = AssignmentState.ENDING
        return CancelTrigger(trigger_id, reason)

    def expect_end(self, trigger_id: int) -> None:
        """Note that the task of a trigger has gone on: the trigger is not started again, and its run ends by itself."""
        assigned = self._assigned.get(trigger_id)
        if assigned is not None and assigned.state in (AssignmentState.WAITING, AssignmentState.HELD):
            self._forget(trigger_id)
        elif assigned is not None:
            assigned.state = AssignmentState.ENDING

    def state_of(self, trigger_id: int, trigger_run_id: str | None = None) -> AssignmentState | None:
        """Return the state of a trigger; None if it is not owned, or if ``trigger_run_id`` is not its last run."""
        assigned = self._assigned.get(trigger_id)
        if assigned is None or trigger_run_id not in (None, assigned.trigger_run_id):
            return None
        return assigned.state

    def end_run(self, finished: FinishedTrigger, now: float, strikes: int | None = None) -> float | None:
        """Record the end of a run; return the seconds until the trigger is started again, None if it is not.

        ``strikes``: how often it has failed on the message that it has failed on, if any. The wait is for that message:
        in a stream without order each run may fail on another one, each of which needs its tries.
        The report of a run that is not the current one is late, and changes nothing.
        """
        assigned = self._assigned.get(finished.trigger_id)
        if assigned is None or assigned.trigger_run_id != finished.trigger_run_id:
            return None
        self._undescribed.pop(finished.trigger_id, None)
        if finished.outcome == "returned" or assigned.state is AssignmentState.ENDING:
            self._forget(finished.trigger_id)
            return None
        if assigned.state in (AssignmentState.HOLDING, AssignmentState.HELD):
            self._end_held_run(assigned, now)
            return None
        if finished.outcome == "cancelled":
            # We did not cancel this trigger, so its whole runner was drained: it continues in the next one.
            self._wait(assigned, assigned.start_at if assigned.state is AssignmentState.WAITING else now)
            return None
        if now - assigned.started_at >= self._healthy_s:
            assigned.failures = 0
        assigned.failures += 1
        assigned.is_failing = True
        wait_s = self._waits.after(assigned.failures if strikes is None else min(assigned.failures, strikes))
        if assigned.state is AssignmentState.WAITING:
            # Its runner died meanwhile, and it is started together with all others, unless it is held back.
            return max(0.0, assigned.start_at - now)
        self._wait(assigned, now + wait_s)
        return wait_s

    def pass_over(self, trigger_id: int, key: str) -> None:
        """Do not give a trigger this message any more. It can go on now, so its failures in a row are forgotten."""
        assigned = self._assigned.get(trigger_id)
        if assigned is None:
            return
        others = tuple(known for known in assigned.passed_over if known != key)
        assigned.passed_over = self._known(assigned.trigger, (*others, key))
        assigned.failures = 0

    def give_again(self, trigger_id: int, key: str) -> None:
        """Give the next runs of a trigger a message that it was passed over: it has handled it since."""
        assigned = self._assigned.get(trigger_id)
        if assigned is not None:
            assigned.passed_over = tuple(known for known in assigned.passed_over if known != key)

    def next_recovery_at(self) -> float | None:
        """When the next trigger that had failed will have run for long enough; None if there is none."""
        return next(iter(self._recovers_at.values()), None)

    def recovered(self, now: float) -> list[int]:
        """Return the triggers that do not count as failing any more; they are returned again until `forgive`."""
        return [trigger_id for trigger_id, at in self._recovers_at.items() if at <= now]

    def forgive(self, trigger_ids: Iterable[int]) -> None:
        """Forget the failures in a row of these, as the store has."""
        for trigger_id in trigger_ids:
            self._recovers_at.pop(trigger_id, None)
            assigned = self._assigned[trigger_id]
            assigned.failures = 0
            assigned.is_failing = False

    def hand_over(self, now: float, start_at: Mapping[int, float] | None = None) -> None:
        """Handle the end of the runner: its triggers are due at once in the next one, cancelled ones are forgotten.

        ``start_at`` holds the times of those that are held back: their streams wait for them (`absent`).
        """
        start_at = start_at or {}
        self._undescribed.clear()
        for trigger_id, assigned in list(self._assigned.items()):
            if assigned.state is AssignmentState.ENDING:
                self._forget(trigger_id)
            elif assigned.state in (AssignmentState.HOLDING, AssignmentState.HELD):
                self._end_held_run(assigned, now)
            else:
                # Triggers that wait for their next try are due too: those that share a stream must start together, or
                # the stream would continue without the one that waits. The respawn has its own backoff. The run keeps
                # its id until the next start: the report of its end may still be in the intake, and a trigger that
                # returned must not run again.
                self._wait(assigned, start_at.get(trigger_id, now))

    def start_at(self, trigger_ids: Iterable[int], at: float) -> None:
        """Have triggers that wait for their next start be due at a time."""
        for trigger_id in trigger_ids:
            assigned = self._assigned.get(trigger_id)
            if assigned is not None and assigned.state is AssignmentState.WAITING:
                assigned.start_at = at

    # --- what runs --------------------------------------------------------------------------------

    def name_of(self, trigger_id: int) -> str:
        """Return the name of a trigger; "" if it is not owned."""
        assigned = self._assigned.get(trigger_id)
        return "" if assigned is None else assigned.trigger.name

    def is_running(self, trigger_id: int) -> bool:
        """Whether a trigger runs, as far as is known, and is not being cancelled."""
        return self.state_of(trigger_id) is AssignmentState.RUNNING

    def run_of(self, trigger_id: int) -> str | None:
        """Return the id of the run of a trigger in the current runner; None if it has none there."""
        assigned = self._assigned.get(trigger_id)
        return None if assigned is None or assigned.state not in IN_RUNNER else assigned.trigger_run_id

    def trigger_of_run(self, trigger_run_id: str) -> int | None:
        """Return the trigger of a run in the current runner; None for any other text."""
        for trigger_id, assigned in self._assigned.items():
            if assigned.trigger_run_id == trigger_run_id and assigned.state in IN_RUNNER:
                return trigger_id
        return None

    def running_newest_first(self, now: float) -> tuple[list[int], float]:
        """Return the triggers in the current runner, those claimed last first, and the age of the newest start."""
        running = [number for number, assigned in self._assigned.items() if assigned.state in IN_RUNNER]
        newest = max((self._assigned[number].started_at for number in running), default=now)
        return running[::-1], now - newest

    def cancel_all(self, reason: CancelReason) -> tuple[CancelTrigger, ...]:
        """Cancel all triggers that run, and forget the others."""
        cancels = (self.cancel(trigger_id, reason) for trigger_id in list(self._assigned))
        return tuple(cancel for cancel in cancels if cancel is not None)

    # --- holds ------------------------------------------------------------------------------------

    def held(self) -> frozenset[int]:
        """Return the triggers that are held, or are being cancelled because of a hold."""
        return frozenset(self._held) | {id_ for id_, lost in self._unreadable.items() if lost.hold is not None}

    def absent(self, among: Collection[int] | None = None) -> tuple[AbsentSubscriber, ...]:
        """Return the triggers for which streams have to wait: all of them, or those ``among`` some.

        They are the held ones, those that cannot be started, and those that wait for their next start: for a new
        runner, after `start_due`.
        """
        ids = self._held | self._waiting | self._unreadable.keys()
        found = (self._absence(number) for number in sorted(ids if among is None else ids.intersection(among)))
        return tuple(absence for absence in found if absence is not None)

    def not_started(self, trigger_ids: Iterable[int]) -> list[int]:
        """Return those of these triggers that are held, or cannot be started."""
        return [each for each in trigger_ids if each in self._held or each in self._unreadable]

    def absence_as(self, changed: ClaimedTrigger) -> list[AbsentSubscriber]:
        """Return the absence of a trigger whose new values cannot be started; its stream is the old one until then."""
        absence = absence_of_lost(msgspec.structs.replace(changed, stream=self._assigned[changed.id].trigger.stream))
        return [] if absence is None else [absence]

    def _absence(self, trigger_id: int) -> AbsentSubscriber | None:
        lost = self._unreadable.get(trigger_id)
        return self._assigned[trigger_id].absence if lost is None else absence_of_lost(lost)

    def hold(self, trigger_id: int, hold: Hold) -> tuple[CancelTrigger, AbsentSubscriber | None] | None:
        """Hold a trigger; return the parts of a message to the runner, None if nothing changes.

        The cancellation ends its run, and a wait of its stream; the second part, if there is one, begins another wait.
        The run is cut short (I13), and no user has killed it (I14).
        """
        assigned = self._assigned.get(trigger_id)
        lost = self._unreadable.get(trigger_id)
        if lost is not None and lost.hold != hold:
            self._unreadable[trigger_id] = msgspec.structs.replace(lost, hold=hold)
            return CancelTrigger(trigger_id, "reassigned"), self._absence(trigger_id)
        if assigned is None or assigned.state is AssignmentState.ENDING or assigned.hold == hold:
            return None
        assigned.hold = hold
        self._held.add(trigger_id)
        self._recovers_at.pop(trigger_id, None)
        if assigned.state is AssignmentState.RUNNING:
            assigned.state = AssignmentState.HOLDING
        elif assigned.state is AssignmentState.WAITING:
            assigned.state = AssignmentState.HELD
            self._waiting.discard(trigger_id)
        return CancelTrigger(trigger_id, "reassigned"), assigned.absence

    def release(self, trigger_id: int, now: float) -> None:
        """Release a held trigger: it is due at once, or as soon as its run has ended, if it can be started."""
        if (lost := self._unreadable.get(trigger_id)) is not None:
            self._unreadable[trigger_id] = msgspec.structs.replace(lost, hold=None)
        assigned = self._assigned.get(trigger_id)
        if assigned is None or assigned.hold is None:
            return
        assigned.hold = None
        self._held.discard(trigger_id)
        assigned.failures = 0
        if assigned.state is AssignmentState.HELD:
            self._wait(assigned, now)

    def change(self, changed: ClaimedTrigger, now: float) -> tuple[CancelTrigger, AbsentSubscriber | None] | None:
        """Take the new values of a trigger; return the parts of a message to the runner as `hold` does, or None.

        It is due at once, or as soon as its run has ended, unless it is held or ends for good. Its stream is the old
        one until the runner has described another.
        """
        assigned = self._assigned[changed.id]
        if assigned.state is AssignmentState.ENDING:
            return None
        assigned.trigger = msgspec.structs.replace(changed, stream=assigned.trigger.stream)
        assigned.passed_over = self._known(assigned.trigger, changed.passed_over)
        assigned.failures = 0
        self._recovers_at.pop(changed.id, None)
        if assigned.state is AssignmentState.WAITING:
            self._wait(assigned, now)
        if assigned.state is not AssignmentState.RUNNING:
            return None
        assigned.state = AssignmentState.HOLDING
        return CancelTrigger(changed.id, "reassigned"), assigned.absence

    def _end_held_run(self, assigned: Assignment, now: float) -> None:
        if assigned.hold is None:
            self._wait(assigned, now)
        else:
            assigned.state = AssignmentState.HELD

    # --- changes of state -------------------------------------------------------------------------

    def _wait(self, assigned: Assignment, start_at: float) -> None:
        assigned.state = AssignmentState.WAITING
        assigned.start_at = start_at
        assigned.after = None
        self._waiting.add(assigned.trigger.id)
        self._recovers_at.pop(assigned.trigger.id, None)

    def _forget(self, trigger_id: int) -> None:
        task = self._assigned.pop(trigger_id).trigger.task
        self._waiting.discard(trigger_id)
        self._held.discard(trigger_id)
        self._recovers_at.pop(trigger_id, None)
        self._undescribed.pop(trigger_id, None)
        if task is not None:
            self._ended_tasks[trigger_id] = task
            if len(self._ended_tasks) > ENDED_TASKS_MAX:
                del self._ended_tasks[next(iter(self._ended_tasks))]
