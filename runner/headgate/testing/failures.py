"""How the kit says that a trigger or a task is not fit to be run: assertions, each with its own name."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.triggers.base import TriggerEvent


class TriggerFailed(AssertionError):
    """The trigger raised, or returned before its first event; what it raised is the cause.

    ``events`` are those it had fired.
    """

    def __init__(self, text: str, events: Sequence[TriggerEvent] = ()) -> None:
        super().__init__(text)
        self.events = list(events)


class TooFewEvents(TriggerFailed):
    """The time was over before the trigger had fired what was asked for."""


class RoundTripFailed(AssertionError):
    """What `serialize` says does not make an equal trigger in another process."""


class LoopBlocked(AssertionError):
    """A step of a trigger took so long that all others would have waited; the text names the line."""


class LeftBehind(AssertionError):
    """After its end something of the trigger was still there: a task, a socket, a file."""


class Misbehaved(AssertionError):
    """Something the trigger did would be an error in the runner's log: a failing hook, a refused event."""


class TaskNotSuccessful(AssertionError):
    """What the task returned was asked for, and it has failed or was skipped; the text says why, and where."""


class TaskNeverEnds(AssertionError):
    """The time was over before the trigger the task waits for had fired, or the task defers on and on."""
