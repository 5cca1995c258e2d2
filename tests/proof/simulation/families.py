"""The two seed spaces: the pair of supervisor and runner, and the pair with tasks. A seed means something in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from tests.proof.simulation.scenario import Scenario

FamilyName = Literal["pair", "tasks"]
FAMILIES: tuple[FamilyName, ...] = get_args(FamilyName)


class Family(NamedTuple):
    """How one of them is drawn, run and judged. ``option`` chooses it on the command line, before all others."""

    name: FamilyName
    option: str
    draw: Callable[[int], Any]
    run: Callable[[Any], list[Any]]
    check: Callable[[Any, Any], list[Any]]
    directed: Mapping[str, Callable[[], list[str]]]


@cache
def family(name: FamilyName) -> Family:
    """Return a family; what it is made of is imported when it is asked for."""
    if name == "pair":
        from tests.proof.simulation import checker, directed, scenario, world

        return Family(name, "", scenario.draw, world.run, checker.check, directed.DIRECTED)
    from tests.proof.simulation.tasks import checker as of_tasks
    from tests.proof.simulation.tasks import directed as tasks_directed
    from tests.proof.simulation.tasks import scenario as tasks_scenario
    from tests.proof.simulation.tasks import world as tasks_world

    return Family(name, "--tasks ", tasks_scenario.draw, tasks_world.run, of_tasks.check, tasks_directed.DIRECTED)


def family_of(plan: Scenario) -> Family:
    """Return the family that a scenario belongs to."""
    from tests.proof.simulation.tasks.scenario import TaskScenario

    return family("tasks" if isinstance(plan, TaskScenario) else "pair")
