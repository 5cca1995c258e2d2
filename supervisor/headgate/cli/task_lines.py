"""Tasks in tables, one line each: what they say of a mapped task, whose instances are counted on its line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.cli.tables import Column
from headgate.presentation.moments import duration
from headgate.scheduling.map_states import counts_text
from headgate.scheduling.states import UNFINISHED
from headgate.scheduling.words import tries

if TYPE_CHECKING:
    from headgate.store.inspect.runs import TaskLine


def instances_of(task: TaskLine) -> str | None:
    """Return how the instances of a mapped task stand: ``9,000 success, 3 failed, 256 open of 12,345``."""
    if task.instances is None:
        return None
    # Of how many is not known as long as there may be more: elements, a worklist, the iterations of a loop.
    so_far = " so far" if task.instances and task.map_length is None and task.state in UNFINISHED else ""
    return counts_text(task.instances, task.map_length) + so_far


def _try(task: TaskLine) -> str:
    return "" if task.is_map else tries(task.try_number, task.tries_max, task.retries, "/")


TASK_COLUMNS: Final[tuple[Column, ...]] = (
    ("task_id", lambda task: task.name),
    "state",
    ("instances", instances_of),
    "map_name",
    ("try", _try),
    "started_at",
    ("took", lambda task: duration(task.started_at, task.ended_at)),
    ("last_error", lambda task: task.error),
)
