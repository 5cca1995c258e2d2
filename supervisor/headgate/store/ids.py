"""Types of ids: those of rows, which no type checker confuses with each other, and the one users have for a try.

The names that people give (of DAGs, of runs, of a DAG's tasks) are strings, and are called ``dag``, ``run_id`` and
``task_id``. A parameter that takes one of the row ids below is called ``instance``, ``dag_row``, ``dag_run`` and so on.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, NewType, get_args

import msgspec

Epoch = NewType("Epoch", int)  # one lease of one supervisor: the id of a row of ``triggerer``
TriggerId = NewType("TriggerId", int)
DagRowId = NewType("DagRowId", int)
DagRunId = NewType("DagRunId", int)
TaskInstanceId = NewType("TaskInstanceId", int)

# Why a trigger that is owned is not started: a user has paused its watcher, it failed on too many messages, or it
# harmed its runner. The stream of a paused one goes on without it; for the others it waits.
Hold = Literal["paused", "brake", "quarantine"]
HOLDS: Final[tuple[Hold, ...]] = get_args(Hold)

# What has become of a dead letter. ``open``: it can be redriven or discarded. ``at_broker``: only its head is kept, so
# there is nothing to redrive, but its broker has the message. ``redriving``: its message is to be given to its trigger
# once more. ``redriven``: its event was stored from the letter, or its trigger has handled its message;
# ``stored_meanwhile``: there was an event of the same names already. ``discarded``: a user does not want it.
LetterState = Literal["open", "at_broker", "redriving", "redriven", "stored_meanwhile", "discarded"]
# The same of an event that a consumer has set aside. ``redeliver``: it is handed over again with the next batch.
ConsumerLetterState = Literal["open", "redeliver", "handed_over", "discarded"]
# What was done with a dead letter, by users and supervisors. ``failed`` and ``rejected``: a message that is open again.
LetterAction = Literal["redriving", "redriven", "stored_meanwhile", "edited", "discarded", "failed", "rejected"]


class TryName(msgspec.Struct, frozen=True, order=True, gc=False):
    """One try of one task of one run; the first try is 1. ``dag_id`` is the name that the author gave.

    ``map_index`` is that of an instance of a mapped task, else -1.
    """

    dag_id: str
    run_id: str
    task_id: str
    try_number: int
    map_index: int = -1

    @property
    def task(self) -> str:
        """The task without its try, as text for users."""
        return f"{self.dag_id}.{self.run_id}.{instance_name(self.task_id, self.map_index)}"


def instance_name(task_id: str, map_index: int) -> str:
    """Return the name of a row of a task for users: ``enrich[17]`` for an instance, ``enrich`` for the task itself."""
    return task_id if map_index < 0 else f"{task_id}[{map_index}]"


class Instances(NamedTuple):
    """Instances of a mapped task as users name them: ``enrich[17]``, or ``enrich[10-19]`` with both of its ends."""

    task_id: str
    first: int
    last: int


_INSTANCES: Final = re.compile(r"(?P<task_id>.+)\[(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?\]", re.ASCII)


def instances_named(name: str) -> Instances | None:
    """Return the instances of this name, None if it is no name of instances."""
    match = _INSTANCES.fullmatch(name)
    if match is None:
        return None
    return Instances(match["task_id"], int(match["first"]), int(match["last"] or match["first"]))
