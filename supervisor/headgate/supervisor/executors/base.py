"""The interface of an executor, which takes steps of tasks and returns their outcomes.

The supervisor has one thread, and calls all of these in it; none may block. An executor decides nothing about tasks: it
runs the steps it is given, and reports each exactly once, by `StepEnded`, `StepLost` or `StepReturned`. The store
decides about the task: an outcome that is too late, because the task was cleared meanwhile, changes nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from headgate.protocol.messages.queries import Query, Response
from headgate.protocol.messages.worker import Step, StepEnded
from headgate.scheduling.bundles import Room

# Why a step is ended before its time. Only a ``user`` has the task's on_kill() called (I14).
EndReason = Literal["user", "timeout", "lost"]


class StepLost(msgspec.Struct, frozen=True):
    """A step without an outcome, because its worker died. ``reason`` is for example a signal or an exit code.

    ``is_blameless``: it was ended because its supervisor leaves.
    """

    token: str
    reason: str
    is_blameless: bool = False


class StepReturned(msgspec.Struct, frozen=True):
    """A step that has not begun, and never will under this token: it waited behind one that was long, or was lost."""

    token: str


class StepQuery(msgspec.Struct, frozen=True):
    """A query of a running step; it waits for `Executor.answer`."""

    token: str
    id: int
    query: Query


ExecutorEvent: TypeAlias = StepEnded | StepLost | StepReturned | StepQuery


class Executor(Protocol):
    """Runs steps."""

    def room(self) -> int:
        """Return how many steps may be submitted now and would begin at once."""
        ...

    def endless_room(self) -> int:
        """Return how many steps of endless tasks may be submitted now, beside the others."""
        ...

    def rooms(self) -> list[Room]:
        """Return what each worker that runs a step may be given beside it."""
        ...

    def submit(self, step: Step, expected_s: float | None = None, *, is_endless: bool = False) -> None:
        """Run a step that is expected to take so many seconds; None: nothing is known.

        Never more than were planned by `headgate.scheduling.bundles.Places`, from `room` and `rooms`, and of endless
        tasks by `endless_room`.
        """
        ...

    def end(self, token: str, why: EndReason, text: str) -> None:
        """End a step that still runs: ``text`` becomes the reason of its `StepLost`, unless its outcome comes first.

        One that has not begun is returned.
        """
        ...

    def answer(self, token: str, answer: Response) -> None:
        """Answer a query of a step; dropped if the step has ended."""
        ...

    def events(self, now: float) -> Sequence[ExecutorEvent]:
        """Return the events since the last call, in order."""
        ...

    def wake_at(self) -> float:
        """Return when `events` has something to do even if nothing happens, for example when a limit is reached."""
        ...

    def drain(self, now: float) -> bool:
        """Take nothing more; return whether no step is running any more."""
        ...

    def close(self) -> None:
        """End all steps and processes."""
        ...
