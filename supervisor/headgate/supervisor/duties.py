"""What a supervisor does beside its triggers, as its core sees it: tasks, where it runs any, and their logs."""

from __future__ import annotations

from typing import Protocol

from headgate.scheduling.names import TryName
from headgate.store.ids import Epoch


class TaskDuty(Protocol):
    """The part for tasks, where this supervisor has one; see `headgate.supervisor.tasks.core`."""

    def notice(self, *, has_fenced: bool = False) -> None:
        """Somebody has written to the database, an event may have resumed a task, or others lost their leases."""
        ...

    def step(self, epoch: Epoch, now: float) -> bool:
        """Do one bounded piece of each duty; return whether triggers may have come to be, or have ended."""
        ...

    def wake_at(self) -> float:
        """When the next step is due."""
        ...

    def drain(self, now: float) -> bool:
        """Give out nothing more; return whether nothing runs any more, and all outcomes are stored."""
        ...

    def end_all(self, reason: str) -> None:
        """End what still runs."""
        ...

    def abandon(self) -> None:
        """End everything, and store nothing more."""
        ...


class SaysToTasks(Protocol):
    """Where the core says something about a task; `headgate.supervisor.logs.task_logs.TaskLogs` is one."""

    def say(self, name: TryName, level: str, event: str, **fields: object) -> None:
        """Put it in the log of this try."""
        ...
