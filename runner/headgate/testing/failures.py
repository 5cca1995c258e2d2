"""The assertions that the kit raises about a trigger or a task."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.triggers.base import TriggerEvent


class TriggerFailed(AssertionError):
    """The trigger raised an exception, which is the cause, returned before its first event, or fired after its last.

    ``events`` are those that it had fired.
    """

    def __init__(self, text: str, events: Sequence[TriggerEvent] = ()) -> None:
        super().__init__(text)
        self.events = list(events)


class TooFewEvents(TriggerFailed):
    """The trigger did not fire the expected number of events in time."""


class RoundTripFailed(AssertionError):
    """The result of `serialize` does not construct an equal trigger.

    Or an instance of a mapped task that begins in its trigger would give it something else than its value.
    """


class LoopBlocked(AssertionError):
    """A step of a trigger blocked the loop for too long; the text names the line."""


class LeftBehind(AssertionError):
    """The trigger left a task, a socket or a file open."""


class Misbehaved(AssertionError):
    """The trigger did something that the runner logs as an error: a hook failed, or an event was refused."""


class TaskNotSuccessful(AssertionError):
    """`TaskResult.value` was read of a task that failed or was skipped; the text has the error and traceback."""


class TaskNeverEnds(AssertionError):
    """The task's trigger did not fire in time, or the task deferred too often."""
