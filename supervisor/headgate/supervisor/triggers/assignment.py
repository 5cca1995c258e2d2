"""One owned trigger; `headgate.supervisor.triggers.assignments` draws its states."""

from __future__ import annotations

import enum

import msgspec

from headgate.protocol.messages.runner import AbsentSubscriber
from headgate.store.ids import Hold
from headgate.store.triggers.leases import ClaimedTrigger

SPEC_ROOM_BYTES = 256  # of a frame, for the id of the trigger run, which is not known yet when a trigger is claimed


class AssignmentState(enum.Enum):
    """The state of an assigned trigger."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    HOLDING = "holding"
    HELD = "held"


# The states of a trigger that has a run in the current runner.
IN_RUNNER = (AssignmentState.RUNNING, AssignmentState.ENDING, AssignmentState.HOLDING)
# The states of a trigger for which a stream may wait.
ABSENT = (AssignmentState.WAITING, AssignmentState.HOLDING, AssignmentState.HELD)


class Assignment(msgspec.Struct, gc=False):  # it cannot be part of a cycle
    """One owned trigger. ``start_at`` is used while WAITING, ``started_at`` while RUNNING (core's clock).

    ``after`` is used while WAITING, if it has a stream. ``hold`` is set while HELD. While HOLDING, it is None if the
    trigger is to start again as soon as the run has ended: the hold was released, or a user has changed the trigger.
    ``passed_over``: the keys of messages that it is not given any more, the oldest first. ``is_failing``: the store
    counts failures of it in a row.
    """

    trigger: ClaimedTrigger
    passed_over: tuple[str, ...]
    is_failing: bool
    failures: int = 0  # in a row
    state: AssignmentState = AssignmentState.WAITING
    trigger_run_id: str = ""
    start_at: float = 0.0
    after: int | None = None  # start it when no trigger up to this start has still to be described
    started_at: float = 0.0
    hold: Hold | None = None

    @property
    def absence(self) -> AbsentSubscriber | None:
        """The subscriber for which a stream has to wait if this trigger is not started; None if no stream has to."""
        return absence_of(self.trigger, self.hold)


def absence_of(trigger: ClaimedTrigger, hold: Hold | None) -> AbsentSubscriber | None:
    """Return the subscriber for which a stream has to wait if a trigger is not started; None if no stream has to."""
    is_awaited = hold != "paused" and trigger.stream
    return AbsentSubscriber(trigger.id, trigger.stream or "") if is_awaited else None


def absence_of_lost(lost: ClaimedTrigger) -> AbsentSubscriber | None:
    """Return the absence of a trigger that cannot be started; the task of one fails, and nothing waits for it."""
    return None if lost.task is not None else absence_of(lost, lost.hold)


def spec_bytes(trigger: ClaimedTrigger) -> int:
    """Return the size limit of the spec of a trigger in a frame, without the messages that it is passed over."""
    return len(trigger.kwargs or b"") + 4 * (len(trigger.name) + len(trigger.classpath)) + SPEC_ROOM_BYTES
