"""Scenarios of mapped tasks that are not drawn: for promises about a moment that random ones meet by chance at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.proof.simulation.scenario import Fault, Topology
from tests.proof.simulation.tasks import records, world
from tests.proof.simulation.tasks.directed import TASK, judged
from tests.proof.simulation.tasks.faults import Act
from tests.proof.simulation.tasks.maps.plans import Mapped, task_of
from tests.proof.simulation.tasks.scenario import Dag, Leg, Task, TaskScenario
from tests.proof.simulation.tasks.streams.checker import check


def ends_of(history: list[Any], task: str) -> list[str]:
    """Return the states of the instances of a task in the end."""
    last = {record.task: record.state for record in history if isinstance(record, records.Moved)}
    return [state for name, state in sorted(last.items()) if "[" in name and task_of(name) == task]


def run_judged(tasks: tuple[Task, ...], *faults: Fault, workers: int) -> tuple[list[str], list[Any]]:
    """Run one run of a DAG of these tasks; return what is found, and the history."""
    plan = TaskScenario(0, Topology(), dags=(Dag("d1", tasks, (0.5,)),), workers=workers, faults=faults)
    history = world.run(plan)
    return [str(finding) for finding in check(plan, history)], history


def a_task_that_is_cleared_with_its_source_has_as_many_instances_as_there_are_values_now() -> list[str]:
    """A source leaves five values, is cleared with all that is below it, and leaves three."""
    tasks = (Task("a", leaves=1), Task("b", ("a",), mapped=Mapped("a")), Task("c", ("b",)))
    found, history = run_judged(tasks, Act(4.0, TASK, "clear", "success"), workers=3)
    if (ends := ends_of(history, "d1/r1/b")) != ["success"] * 3 + ["removed"] * 2:
        found.append(f"a value left out: the instances are {ends}")
    return found


def with_fail_fast_what_is_scheduled_does_not_begin() -> list[str]:
    """There is one worker for three instances, of which the first fails."""
    task = Task("a", attempts=((Leg("fail", 1.5),),), mapped=Mapped(count=3, fail_fast=True))
    found, history = run_judged((task,), workers=1)
    if (ends := ends_of(history, TASK)) != ["failed", "upstream_failed", "upstream_failed"]:
        found.append(f"began after too many failures: the instances are {ends}")
    return found


def no_instance_begins_anew_while_another_restarts() -> list[str]:
    """A task with four instances is cleared while three of them are with workers, which take their time to stop."""
    task = Task("a", attempts=((Leg(seconds=1.2, trouble="stubborn"),),), mapped=Mapped(count=4))
    found, history = judged(task, Act(0.6, TASK, "clear", "success", 0.3))
    if "restarting" not in [record.state for record in history if isinstance(record, records.Moved)]:
        found.append("none was restarting")
    return found


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "cleared with its source": a_task_that_is_cleared_with_its_source_has_as_many_instances_as_there_are_values_now,
    "fail fast": with_fail_fast_what_is_scheduled_does_not_begin,
    "restarting": no_instance_begins_anew_while_another_restarts,
}
