"""What is known of the stream of one task, and what has to follow from it: the rules of I20 to I22, said once more."""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.proof.simulation.tasks import records
from tests.proof.simulation.tasks.streams.plans import Stream

EARLY_S: Final = 0.001
# How a run of the trigger may have ended, by what the supervisor says of it.
ENDS: Final = {
    "returned": frozenset(("returns", "is_last")),
    "failed": frozenset(("raises",)),
    "event": frozenset(("success", "failed", "skipped")),
}


class Place(NamedTuple):
    """How far a stream has come: the row of the last event handled, the number of them, and the state."""

    row: int = 0
    handled: int = 0
    left: str = ""


class Given(NamedTuple):
    """The part of a stream that its next step has to get."""

    rows: tuple[int, ...]
    numbers: tuple[int, ...]
    place: int
    left: str
    is_over: bool


class Next(NamedTuple):
    """A state that a task may be in after a look at its stream; ``fails``: it is resumed to fail."""

    state: str
    fails: bool = False


class Book:
    """One stream, from its begin until it is forgotten."""

    def __init__(self, task: str, plan: Stream, trigger: int) -> None:
        self.task = task
        self.plan = plan
        self.trigger = trigger
        self.place = self.before = Place()  # now, and before the transaction that is being told
        self.is_accounted = True  # for every move of the place there was a step
        self.events: list[records.EventStored] = []
        self.ends: list[str] = []  # kinds of the events by which the trigger ended its task
        self.runs: list[str] = []  # that have stored something, in this order
        self.ended_as = ""
        self.reopens = False
        self.one_by_one_to = 0
        self.since = 0.0  # that the task waits, or its newest event
        self.begun_in = 0  # the try that has deferred with it last
        self.ended_in = 0  # the try in which `stream_ended` was called last
        self._current: set[int] = set()  # runs of the trigger since it was opened
        self._ends_of_current: set[str] = set()

    # --- what happens -----------------------------------------------------------------------------

    def begin(self, try_number: int) -> None:
        """A try defers with the stream."""
        self.begun_in, self.ended_in = try_number, 0
        if not self.reopens:
            self.open()

    def open(self) -> None:
        """The trigger is opened: what its runs before this do is over."""
        self._current.clear()
        self._ends_of_current.clear()

    def source_began(self, run: int) -> None:
        """A run of the trigger begins."""
        self._current.add(run)

    def source_ended(self, run: int, how: str) -> None:
        """A run of the trigger has come to its end."""
        if run in self._current:
            self._ends_of_current.add(how)

    def has_ended_so(self, ended_as: str) -> bool:
        """Whether a run since the trigger was opened has ended as the supervisor says."""
        return bool(ENDS[ended_as] & self._ends_of_current)

    # --- what follows -----------------------------------------------------------------------------

    @property
    def waiting(self) -> list[records.EventStored]:
        """The events that are stored and not handled."""
        return [event for event in self.events if event.row > self.place.row]

    @property
    def wanted(self) -> int:
        """How many events a step gets at most."""
        return 1 if self.place.row < self.one_by_one_to else self.plan.step_max

    def handled_to(self, row: int) -> int:
        """Return how many events are handled if the place is behind this row."""
        return sum(event.row <= row for event in self.events)

    def given(self) -> Given:
        """Return what the next step has to get."""
        waiting = self.waiting
        is_latest = self.plan.contract == "latest"
        some = waiting[-1:] if is_latest else waiting[: self.wanted]
        passed = len(waiting) - 1 if is_latest and waiting else 0
        return Given(
            tuple(event.row for event in some),
            tuple(event.number for event in some),
            self.place.handled + passed,
            self.place.left,
            self.ended_as == "returned" and len(some) + passed == len(waiting),
        )

    @property
    def has_to_go_on(self) -> bool:
        """Whether a task that waits may wait no longer, whatever the time is."""
        waiting = len(self.waiting)
        if not waiting or self.ended_as:
            return bool(self.ended_as)
        return self.plan.contract != "batch" or waiting >= self.wanted

    def late_s(self, at: float) -> float | None:
        """Return by how much a batch that is not whole is due, negative if it is not yet; None if it never is."""
        waiting = self.waiting
        return None if self.plan.batch_s is None or not waiting else at - waiting[0].at - self.plan.batch_s

    def next_states(self, at: float, moved: records.Moved) -> set[Next]:
        """Return the states that the task may be in after a look at its stream."""
        if not self.waiting:
            return {self._end_state(moved)} if self.ended_as else {Next("deferred")}
        if self.has_to_go_on:
            return {Next("scheduled")}
        late_s = self.late_s(at)
        if late_s is None or late_s < -EARLY_S:
            return {Next("deferred")}
        return {Next("scheduled")} | ({Next("deferred")} if late_s < EARLY_S else set())

    def _end_state(self, moved: records.Moved) -> Next:
        if self.ended_as != "event":
            return Next("scheduled", self.ended_as == "failed")
        kind = self.ends[-1] if self.ends else "failed"
        has_tries = moved.try_number < moved.tries_max
        return Next("up_for_retry" if kind == "failed" and has_tries else kind)
