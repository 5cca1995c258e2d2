"""What a task raises to say how it ended, and what is raised at its author."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from headgate.triggers.base import BaseTrigger

# What resumes a task that is not to go on: its trigger failed, or was not done in time (seed 004).
FAIL_METHOD: Final = "__fail__"
REASON_TIMEOUT: Final = "trigger_timeout"
REASON_FAILURE: Final = "trigger_failure"


class TaskDeferred(BaseException):
    """Raised to give up the worker until ``trigger`` fires; `BaseOperator.defer` raises it, and so may anybody.

    The task goes on in ``method_name(context, event=..., **kwargs)`` of a new instance of its operator. It fails if
    the trigger has not fired ``timeout`` after the deferral was stored.

    It is no `Exception`: a deferral is no error, and an ``except Exception`` between the author's code and headgate
    must not take it for one. It may be raised from any depth.
    Raises TypeError or ValueError for arguments that no deferral can have.
    """

    def __init__(
        self,
        *,
        trigger: BaseTrigger,
        method_name: str,
        kwargs: dict[str, Any] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(f"deferred to {type(trigger).__name__}, to go on in {method_name!r:.100}")
        if not isinstance(method_name, str) or not method_name.isidentifier() or method_name == FAIL_METHOD:
            raise ValueError(f"method_name must be the name of a method, not {method_name!r:.100}")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
        if taken := {"context", "event", "self"} & (kwargs or {}).keys():
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
    """Raised to end the task as skipped: there was nothing to do."""


class TaskFailed(Exception):
    """Raised to end the task as failed without another try: the next one would fail as well."""


class SensorTimeout(TaskFailed):
    """What a sensor waits for has not come in time; there is no other try, as the wait would begin anew."""


class TaskDeferralError(Exception):
    """The trigger the task waited for has failed, or ``execution_timeout`` was over while it waited.

    ``trigger_traceback`` is where the trigger failed, as text.
    """

    def __init__(self, error: str, trigger_traceback: str = "") -> None:
        super().__init__(error if not trigger_traceback else f"{error}\n{trigger_traceback}".rstrip())
        self.error = error
        self.trigger_traceback = trigger_traceback


class TriggerTimeout(TaskDeferralError):
    """The trigger the task waited for had not fired when the deferral's timeout was over."""


class XComMissing(Exception):
    """A task wants a value of another one, which has left none."""
