"""The families of scenarios: the pair of supervisor and runner, that with tasks, with groups of tasks, with signals.

Each has seeds of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from tests.proof.simulation.scenario import Scenario

FamilyName = Literal["pair", "tasks", "groups", "signals"]
FAMILIES: tuple[FamilyName, ...] = get_args(FamilyName)


class Family(NamedTuple):
    """How the scenarios of a family are drawn, run and judged. ``option`` selects it on the command line."""

    name: FamilyName
    option: str
    draw: Callable[[int], Any]
    run: Callable[[Any], list[Any]]
    check: Callable[[Any, Any], list[Any]]
    directed: Mapping[str, Callable[[], list[str]]]


@cache
def family(name: FamilyName) -> Family:
    """Return a family; its modules are imported only now."""
    if name == "pair":
        from tests.proof.simulation import checker, directed, drawing, world

        return Family(name, "", drawing.draw, world.run, checker.check, directed.DIRECTED)
    from tests.proof.simulation.tasks import directed as tasks_directed
    from tests.proof.simulation.tasks import scenario as tasks_scenario
    from tests.proof.simulation.tasks import world as tasks_world
    from tests.proof.simulation.tasks.maps import directed as maps_directed
    from tests.proof.simulation.tasks.streams import checker as of_tasks
    from tests.proof.simulation.tasks.streams import directed as streams_directed

    if name == "signals":
        from tests.proof.simulation.tasks.signals import directed as signals_directed
        from tests.proof.simulation.tasks.signals import drawing as signals_drawing
        from tests.proof.simulation.tasks.signals import world as signals_world
        from tests.proof.simulation.tasks.signals.jobs import directed as jobs_directed
        from tests.proof.simulation.tasks.signals.rules import directed as rules_directed
        from tests.proof.simulation.tasks.signals.runs import checker as of_signals
        from tests.proof.simulation.tasks.signals.runs import directed as runs_directed

        draw, run = signals_drawing.draw, signals_world.run
        scenarios = (
            signals_directed.DIRECTED | rules_directed.DIRECTED | jobs_directed.DIRECTED | runs_directed.DIRECTED
        )
        return Family(name, "--signals ", draw, run, of_signals.check, scenarios)
    if name == "groups":
        from tests.proof.simulation.tasks.groups import directed as groups_directed
        from tests.proof.simulation.tasks.groups import drawing as groups_drawing

        return Family(name, "--groups ", groups_drawing.draw, tasks_world.run, of_tasks.check, groups_directed.DIRECTED)
    scenarios = tasks_directed.DIRECTED | streams_directed.DIRECTED | maps_directed.DIRECTED
    return Family(name, "--tasks ", tasks_scenario.draw, tasks_world.run, of_tasks.check, scenarios)


def family_of(plan: Scenario) -> Family:
    """Return a family that runs and judges a scenario as its own does."""
    from tests.proof.simulation.tasks.scenario import TaskScenario
    from tests.proof.simulation.tasks.signals.drawing import SignalScenario

    if isinstance(plan, SignalScenario):
        return family("signals")
    return family("tasks" if isinstance(plan, TaskScenario) else "pair")
