"""The credit of triggers that feed the streams of tasks: how far each of their runs may go (I22).

A run begins without credit. Its credit is the number of its events that are stored, and as many more as its task lets
wait (``ahead``), less those that wait. So what is stored and not handled never exceeds ``ahead``, however fast the
trigger is, and a trigger without credit stands in its ``yield`` and holds up nobody else.

More credit is given when a quarter of ``ahead`` is free, and not for each event, unless the task waits for a batch that
is nearly as long as ``ahead``. The database is asked what is free:
when a run begins, and when it has little credit left and so many events have been stored, or handled, that it may be
worth it. Steps of the task that another supervisor has stored are noticed as any other change of others.

Elements that the task has emitted, and of which no instance is made yet, take room as events that wait: a trigger that
is far ahead of what is expanded over its task stands as well. It is asked for again when instances were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from headgate.protocol import marks
from headgate.protocol.messages.runner import Credit, StateSync, TriggerSpec
from headgate.protocol.messages.task_streams import AHEAD, AHEAD_MAX
from headgate.store.ids import TriggerId
from headgate.store.task_verbs import TaskVerbs
from headgate.store.triggers.events import RunId
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.assignments import Assignments


class _Run(msgspec.Struct):
    """The current run of a trigger, and its credit; ``missing`` events have to come or go before it may get more."""

    trigger_run_id: str
    fired: int = 0  # its events that are stored, or that were stored before, or are dead letters
    credit: int = 0
    ahead: int = AHEAD
    batch: int = 1  # so many have to wait before its task begins a step
    is_latest: bool = False  # a step of its task handles all that wait, and counts one
    missing: int = 0
    has_elements: bool = False  # that take room until instances of them are made

    @property
    def step(self) -> int:
        """The least credit that is given at once; a batch that is not whole always gets the events that it lacks."""
        return max(1, min(self.ahead // 4, self.ahead - self.batch + 1))

    @property
    def is_low(self) -> bool:
        """Whether it has little credit left."""
        return self.credit - self.fired <= self.ahead - self.step


class Credits:
    """The credit of the runs of one supervisor. It costs nothing while no task has a stream."""

    def __init__(self, store: TaskVerbs, assignments: Assignments, *, retry: DatabaseRetry) -> None:
        self._store = store
        self._assignments = assignments
        self._retry = retry
        self._runs: dict[int, _Run] = {}
        self._due: set[int] = set()

    def wake_at(self) -> float | None:
        """Return the time at which `step` has to be called; None if it has nothing to do."""
        return self._retry.at if self._due else None

    def started(self, specs: Iterable[TriggerSpec]) -> None:
        """Take the runs that begin."""
        for spec in specs:
            if spec.credit is not None:
                self._runs[spec.trigger_id] = _Run(spec.trigger_run_id)
                self._due.add(spec.trigger_id)

    def fired(self, events: Mapping[RunId, int]) -> None:
        """Take how many events of some runs are stored now; for others than the current ones it is too late."""
        for (trigger_id, trigger_run_id), number in events.items():
            run = self._runs.get(trigger_id)
            if run is not None and run.trigger_run_id == trigger_run_id and number > run.fired:
                moved, run.fired = number - run.fired, number
                self._note(trigger_id, run, moved)

    def handled(self, events: Mapping[TriggerId, int]) -> None:
        """Take how many events of the streams of some triggers are handled now, as outcomes of steps say.

        Of the contract ``latest`` they say only that there was a step.
        """
        for trigger_id, number in events.items():
            run = self._runs.get(trigger_id)
            if run is not None:
                self._note(trigger_id, run, max(number, run.missing) if run.is_latest else number)

    def expanded(self) -> None:
        """Take that instances of mapped tasks were made: elements may take less room."""
        self._due.update(trigger_id for trigger_id, run in self._runs.items() if run.has_elements and run.is_low)

    def _note(self, trigger_id: int, run: _Run, moved: int) -> None:
        run.missing -= moved
        if run.is_low and run.missing <= 0:
            self._due.add(trigger_id)

    def __contains__(self, trigger_id: int) -> bool:
        return trigger_id in self._runs

    def look(self) -> None:
        """Ask for all runs that have little credit: others have written to the database. Forget those that are over."""
        self._forget_ended(list(self._runs))
        self._due.update(trigger_id for trigger_id, run in self._runs.items() if run.is_low)

    def step(self, now: float) -> StateSync | None:
        """Give the next runs that are due what credit there is; return the message for the runner, if any."""
        if not self._due or not self._retry.ready(now):
            return None
        self._forget_ended(list(self._due))
        if not (some := self._next()):
            return None
        credits_: list[Credit] = []
        with self._retry.attempt(now):
            for trigger_id, room in self._store.stream_rooms(some).items():
                run = self._runs[trigger_id]
                run.ahead, run.batch, run.is_latest = room.ahead, room.batch, room.is_latest
                run.has_elements = room.elements > 0
                credit = run.fired + max(0, room.ahead - room.waiting - room.elements)
                run.missing = run.step - (credit - run.credit)
                if run.missing <= 0:
                    run.credit = credit
                    credits_.append(Credit(trigger_id, run.trigger_run_id, credit))
            self._due.difference_update(some)
        if not credits_:
            return None
        marks.reach("credit.given")
        return StateSync(credits=tuple(credits_))

    def _forget_ended(self, triggers: Iterable[int]) -> None:
        for trigger_id in triggers:
            if self._assignments.run_of(trigger_id) != self._runs[trigger_id].trigger_run_id:
                self._due.discard(trigger_id)
                del self._runs[trigger_id]

    def _next(self) -> list[int]:
        """Return runs that are due: as many as wait for no more than `AHEAD_MAX` events, which are counted."""
        some: list[int] = []
        counted = 0
        for trigger_id in sorted(self._due):
            counted += self._runs[trigger_id].ahead
            if some and counted > AHEAD_MAX:
                break
            some.append(trigger_id)
        return some
