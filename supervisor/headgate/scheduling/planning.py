"""What becomes of the tasks of a run, by the states of all of them: which begin, which never will, and whether it ends.

The order in which tasks ended does not matter, only where they stand: a look at a run always begins from all of it, so
nothing is lost that happened while nobody looked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from headgate.protocol.messages.dags import DagSpec, StartTrigger, TaskSpec, TaskState
from headgate.scheduling import states, trigger_rules

_BROKEN = frozenset({TaskState.FAILED, TaskState.UPSTREAM_FAILED})
RunEnd = Literal["success", "failed"]


class Graph:
    """The tasks of a DAG in an order in which each comes after all that is upstream of it. Never changed."""

    def __init__(self, spec: DagSpec) -> None:
        self.spec = spec
        self.tasks = {task.task_id: task for task in spec.tasks}
        self.start_triggers: dict[str, StartTrigger] = {
            task.task_id: task.start_trigger for task in spec.tasks if task.start_trigger is not None
        }
        self.in_order = _in_order(self.tasks)
        above = {upstream for task in spec.tasks for upstream in task.upstream}
        self.leaves = tuple(task.task_id for task in spec.tasks if task.task_id not in above)


class Decisions(msgspec.Struct, frozen=True):
    """What a look at a run comes to: the task ids by what becomes of them, and how the run ends, None if not now."""

    scheduled: tuple[str, ...] = ()
    upstream_failed: tuple[str, ...] = ()
    upstream_skipped: tuple[str, ...] = ()
    end: RunEnd | None = None


def decide(graph: Graph, now: Mapping[str, TaskState], *, may_start: bool = True) -> Decisions:
    """Evaluate the trigger rules of all tasks in ``none``; a skip or a failure upstream goes all the way down at once.

    ``now`` has the tasks of the run, which are those of the DAG, and maybe some that it no longer has: a run does not
    end before they have, but their end does not count. ``may_start`` False, because the DAG is paused: nothing begins.
    """
    after = dict(now)
    decided: dict[trigger_rules.Readiness, list[str]] = {"run": [], "upstream_failed": [], "skipped": []}
    for task in graph.in_order:
        if after.get(task.task_id) is not TaskState.NONE:
            continue
        readiness = trigger_rules.ready(task.trigger_rule, [after[upstream] for upstream in task.upstream])
        match readiness:
            case "wait":
                continue
            case "run":
                if not may_start:
                    continue
                after[task.task_id] = TaskState.SCHEDULED
            case "upstream_failed":
                after[task.task_id] = TaskState.UPSTREAM_FAILED
            case "skipped":
                after[task.task_id] = TaskState.SKIPPED
        decided[readiness].append(task.task_id)
    end: RunEnd | None = None
    if not any(state in states.UNFINISHED for state in after.values()):
        end = "failed" if any(after.get(leaf) in _BROKEN for leaf in graph.leaves) else "success"
    return Decisions(tuple(decided["run"]), tuple(decided["upstream_failed"]), tuple(decided["skipped"]), end)


def _in_order(tasks: Mapping[str, TaskSpec]) -> tuple[TaskSpec, ...]:
    """Return the tasks by their place: depth first, without recursion, since a chain may be as long as a DAG."""
    done: set[str] = set()
    order: list[TaskSpec] = []
    for root in tasks:
        pending = [(root, False)]
        while pending:
            task_id, is_above_done = pending.pop()
            if task_id in done:
                continue
            if is_above_done:
                done.add(task_id)
                order.append(tasks[task_id])
                continue
            pending.append((task_id, True))
            pending += [(upstream, False) for upstream in tasks[task_id].upstream if upstream not in done]
    return tuple(order)
