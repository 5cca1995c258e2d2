"""What users do in the simulation of tasks, and what goes wrong there beside what `tests.proof.simulation` has."""

from __future__ import annotations

from typing import Literal

from tests.proof.simulation.scenario import Fault, Timed


class KillAtVerb(Fault, frozen=True):
    """A supervisor dies before the ``nth`` call of a verb of the store, or after its ``nth`` commit of a change."""

    verb: str
    nth: int
    is_committed: bool


class FailAtVerb(Fault, frozen=True):
    """The database goes away for a moment, and nobody is told of the commit if there was one; when is as above."""

    verb: str
    nth: int
    is_committed: bool


class KillWorker(Timed, frozen=True):
    """The process dies that has been at its step for the longest time."""


What = Literal["clear", "success", "failed", "redo"]
ACTIONS: tuple[What, ...] = ("clear", "clear", "success", "failed", "redo")


class Act(Timed, frozen=True):
    """A user does something to a task of a run, from ``at`` on as soon as it is in ``state``, and ``delay_s`` later.

    ``redo`` is a mark and a clear, one right after the other: the task begins anew while its old worker is at it.
    ``streams`` is what a clear says about the stream of the task, if it says so.
    """

    task: str
    what: What
    state: str = ""
    delay_s: float = 0.0
    streams: Literal["", "from_start", "go_on"] = ""


class Pause(Timed, frozen=True):
    """A user pauses a DAG, and has it go on later."""

    dag: str
    seconds: float


class Edit(Timed, frozen=True):
    """The author takes a task out of a DAG, and puts it back ``seconds`` later."""

    dag: str
    task: str
    seconds: float


OF_TASKS = (KillAtVerb, FailAtVerb, KillWorker, Act, Pause, Edit)
