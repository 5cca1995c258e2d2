"""The acts from outside that a log shows: of users, of other supervisors, and of time.

Most messages of a supervisor follow from those of its runner, which are in the log. The others follow from something
that happened in its database, or from time. The log shows only the consequence, so the act is taken from that, and made
in the database of the replay before the core is stepped. The core then has to find it, and to say what the log says. If
it says anything else, the replay differs::

    the supervisor                                                and so
    ------------------------------------------------------------  ------------------------------------------------
    cancels a trigger as "user"                                   a user has removed it
    cancels it as "timeout"                                       its task does not wait any more
    cancels all as "reassigned", and says its lease is lost       another supervisor has fenced it
    cancels one that runs as "reassigned", and its stream waits   a user has changed or restarted it
    for it, or it starts again as soon as its run has ended
    cancels another as "reassigned", and its stream waits for it  a brake holds it
    cancels another as "reassigned"                               a user has paused it, or moved it to another queue
    starts the others in a new runner without it                  it is held, if the log names it again; if not, a
                                                                  user has removed it
    names one as absent that it has not owned                     it is held
    starts one that is held                                       a user has released it
    starts one with another class, or another size of kwargs      a user has changed it
    starts one that has returned                                  a user has restarted it
    starts one that was removed, or that nothing waited for       the stream of its task goes on with it
    gives one a message of a dead letter                          a user has redriven the letter
    starts one that had failed                                    its wait is over
    does not start one whose stream was described                 another supervisor owns the stream

Every such cause is here: `CAUSES` has, for each part of a `StateSync` that answers no round, the method that causes it.
`ReplayStore` counts the acts of users and of other supervisors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from headgate.protocol.messages.runner import (
    AbsentSubscriber,
    CancelTrigger,
    Redelivery,
    StateChanges,
    StateSync,
    TriggerSpec,
)
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.replay.compare import Differs
from headgate.supervisor.replay.database import TRIGGER_ID_MAX, ReplayStore
from headgate.supervisor.replay.look_ahead import LogIndex

Parts = Sequence[Any]  # of one field of a `StateSync`


class Acts:
    """Makes the acts during one supervisor of a log."""

    def __init__(self, store: ReplayStore, core: SupervisorCore, index: LogIndex) -> None:
        self._store = store
        self._core = core
        self._index = index
        self._claimable: list[int] = []

    def check_start(self, spec: TriggerSpec) -> None:
        """Raise `Differs` if the core starts a trigger that is held by an act."""
        if spec.trigger_id in self._store.held:
            raise Differs(f"trigger {spec.trigger_id} is held, and the replay starts it", StateSync(to_create=(spec,)))

    def fence(self) -> None:
        """Have another supervisor take the lease."""
        self._store.fence(self._core.leases.epoch)

    def before_round(self, changes: StateChanges) -> None:
        """Make the acts that decide what follows from a round: who owns the streams that it describes."""
        for described in changes.described:
            if described.trigger_run_id in self._index.elsewhere:
                self._store.take_stream(described)

    def cause(self, message: StateSync, missing: Mapping[str, Parts], frame: int, now: float) -> None:
        """Cause parts of a message that the core has not sent by itself; ``now`` is its time, ``frame`` the message's.

        Nothing else can be claimed from then on.
        """
        self._claimable = []
        for name, cause in CAUSES.items():
            cause(self, missing.get(name, ()), message, frame, now)
        self._store.allow(self._claimable)

    def before_runner(self, first: StateSync, frame: int, now: float) -> None:
        """Make the acts before a runner starts, which is given triggers by the message ``first``.

        It is given all that the core owns, except those that the core itself makes wait: for the others that may have
        the same stream, for example.
        """
        alone, streamed = self._core.assignments.due(now)
        if any(spec.stream is None for spec in first.to_create):
            streamed = []
        starting = {spec.trigger_id for spec in first.to_create}
        absent = {subscriber.trigger_id for subscriber in first.absent}
        for trigger_id in {*alone, *streamed} - starting:
            if trigger_id in absent:
                self._store.hold(trigger_id, "brake")
            elif self._index.named.get(trigger_id, 0) > frame:
                self._store.hold(trigger_id, "paused")
            else:
                self._store.remove(trigger_id)
        self.cause(first, {"to_create": first.to_create, "absent": first.absent}, frame, now)

    # --- the parts of a message -------------------------------------------------------------------

    def _cancel(self, missing: Sequence[CancelTrigger], message: StateSync, frame: int, now: float) -> None:
        absent = {subscriber.trigger_id for subscriber in message.absent}
        for cancel in missing:
            trigger_id = cancel.trigger_id
            if cancel.reason == "timeout":
                self._store.finish(trigger_id)
            elif cancel.reason != "reassigned":
                self._store.remove(trigger_id)
            elif not self._core.assignments.is_running(trigger_id):
                self._store.hold(trigger_id, "brake" if trigger_id in absent else "paused")
            elif (frame, trigger_id) in self._index.changed:
                self._store.change(self._index.changed[frame, trigger_id])
            elif trigger_id in absent:
                self._store.change(self._store.made[trigger_id])  # the log ends before it is started again
            else:
                self._store.hold(trigger_id, "paused")

    def _wait(self, missing: Sequence[AbsentSubscriber], message: StateSync, frame: int, now: float) -> None:
        """Have held triggers claimed; those that are owned already are absent because they are cancelled, or wait."""
        states = self._store.states([subscriber.trigger_id for subscriber in missing])
        for subscriber in missing:
            trigger_id = subscriber.trigger_id
            _check_id(trigger_id)
            if trigger_id in self._core.assignments:
                continue
            if trigger_id not in self._store.made:
                self._store.make_unknown(subscriber)
            hold, _ = states.get(trigger_id, (None, False))
            if hold is None:
                self._store.hold(trigger_id, "brake")
            self._claimable.append(trigger_id)

    def _start(self, missing: Sequence[TriggerSpec], message: StateSync, frame: int, now: float) -> None:
        states = self._store.states([spec.trigger_id for spec in missing])
        for spec in missing:
            trigger_id = spec.trigger_id
            _check_id(trigger_id)
            hold, is_finished = states.get(trigger_id, (None, False))
            if trigger_id not in self._store.made:
                self._store.make(spec)
            elif not self._store.is_as_made(spec):
                self._store.change(spec)
            elif spec.stream:
                self._store.give_back(spec.stream)
            if hold is not None:
                self._store.release(trigger_id)
            if is_finished:
                self._store.open_again(trigger_id)
            self._store.pass_over(spec)
            if trigger_id not in self._core.assignments:
                self._claimable.append(trigger_id)
            for key in spec.passed_over:
                self._core.assignments.pass_over(trigger_id, key)
        self._core.assignments.start_at([spec.trigger_id for spec in missing], now)

    def _redrive(self, missing: Sequence[Redelivery], message: StateSync, frame: int, now: float) -> None:
        for redelivery in missing:
            self._store.redrive(redelivery)


# In this order: a trigger that is cancelled is not absent for another cause.
CAUSES: Final[Mapping[str, Callable[[Acts, Parts, StateSync, int, float], None]]] = {
    "to_cancel": Acts._cancel,
    "absent": Acts._wait,
    "to_create": Acts._start,
    "redeliveries": Acts._redrive,
}


def _check_id(trigger_id: int) -> None:
    if not 1 <= trigger_id <= TRIGGER_ID_MAX:
        raise Differs(f"no trigger has the id {trigger_id}")
