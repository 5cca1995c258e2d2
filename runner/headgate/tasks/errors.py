"""Exceptions that a task raises to end in a certain way, and those that headgate raises in a task."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from headgate.protocol.messages.task_streams import HANDLER_METHOD, PoisonRule
from headgate.tasks.streaming import Stream, read_stream

if TYPE_CHECKING:
    from headgate.triggers.base import BaseTrigger

# The method that a task is resumed in if its trigger failed, or had not fired in time.
FAIL_METHOD: Final = "__fail__"
# The method of a deferral without one: its trigger has to end the task.
END_METHOD: Final = "__end__"
REASON_TIMEOUT: Final = "trigger_timeout"
REASON_EXECUTION_TIMEOUT: Final = "execution_timeout"
REASON_FAILURE: Final = "trigger_failure"


class TaskDeferred(BaseException):
    """Raised to release the worker until ``trigger`` fires; by `BaseOperator.defer`, or by any code of the task.

    The task resumes in ``method_name(context, event=..., **kwargs)`` of a new instance of its operator; None if the
    trigger ends the task itself, by a `TaskSuccessEvent` for example. It fails if the trigger has not fired ``timeout``
    after the deferral was stored.

    With ``stream`` the task takes many events of the trigger (`headgate.tasks.streaming`): ``True`` for whatever waits,
    `Each`, `Batch` or `Latest`. It resumes in its ``handle_trigger_events(events, context, **kwargs)``, or for each
    event in the method that ``method_name`` names. ``timeout`` is then the longest wait for the next event. ``ahead``
    bounds the events that are stored and not handled. ``poison="skip"`` puts an event on which the last try fails
    among the dead letters, and goes on behind it.

    It does not derive from `Exception`, because a deferral is not an error, and an ``except Exception`` in the task
    must not catch it. It may be raised at any depth. Raises TypeError or ValueError for invalid arguments.
    """

    def __init__(
        self,
        *,
        trigger: BaseTrigger,
        method_name: str | None = HANDLER_METHOD,
        kwargs: dict[str, Any] | None = None,
        timeout: timedelta | None = None,
        stream: Stream = None,
        ahead: int | None = None,
        poison: PoisonRule = "fail",
    ) -> None:
        self.stream = read_stream(stream, ahead=ahead, poison=poison)
        if self.stream is not None and method_name is None:
            method_name = HANDLER_METHOD
        super().__init__(f"deferred to {type(trigger).__name__}, to resume in {method_name!r:.100}")
        if self.stream is None and method_name == HANDLER_METHOD:
            raise TypeError(
                f"a deferral needs method_name, the method to resume in, or None if its trigger ends the task; only "
                f"one with stream= resumes in {HANDLER_METHOD}"
            )
        if method_name is None:
            method_name = END_METHOD
            if kwargs:
                raise ValueError(f"kwargs are for the method to resume in, and method_name is None: {kwargs!r:.100}")
        elif (
            not isinstance(method_name, str)
            or not method_name.isidentifier()
            or method_name in (FAIL_METHOD, END_METHOD)
        ):
            raise ValueError(f"method_name must be the name of a method, not {method_name!r:.100}")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
        passed = {"context", "self", "event" if method_name != HANDLER_METHOD else "events"}
        if taken := passed & (kwargs or {}).keys():
            raise ValueError(f"kwargs may not have {', '.join(sorted(taken))}: headgate passes that itself")
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a timedelta, not {type(timeout).__name__}")
        if timeout is not None and timeout <= timedelta(0):
            raise ValueError(f"timeout must be more than 0, not {timeout}")
        self.trigger = trigger
        self.method_name = method_name
        self.kwargs = dict(kwargs or {})
        self.timeout = timeout


class TaskSkipped(Exception):
    """Raised to end the task as skipped."""


class TaskFailed(Exception):
    """Raised to end the task as failed without another try, because the next try would fail as well."""


class SensorTimeout(TaskFailed):
    """A sensor's timeout is over; there is no other try, because it would wait for the whole timeout again."""


class TaskDeferralError(Exception):
    """The trigger that the task waited for has failed, or ``execution_timeout`` was over during the wait.

    ``trigger_traceback`` is the trigger's traceback as text.
    """

    def __init__(self, error: str, trigger_traceback: str = "") -> None:
        super().__init__(error if not trigger_traceback else f"{error}\n{trigger_traceback}".rstrip())
        self.error = error
        self.trigger_traceback = trigger_traceback


class TriggerTimeout(TaskDeferralError):
    """The trigger that the task waited for had not fired when the deferral's timeout was over.

    ``waited`` is the length of this deferral, None if it is not known.
    """

    def __init__(self, error: str, *, waited: timedelta | None = None) -> None:
        super().__init__(error)
        self.waited = waited


class XComMissing(Exception):
    """An argument of a task is an XCom that the other task has not pushed."""
