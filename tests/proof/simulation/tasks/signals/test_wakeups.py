"""No task waits for a poll: whoever makes work, or hears of it, has it done at once.

Supervisors poll the database because a notification may get lost, and as they do, one that is missing is only late. So
they do not poll here: what nobody has woken them for gets stuck, or is late by the checkers' measure. Nothing fails, as
faults take notifications with them; in some of the scenarios there are two supervisors.
"""

from __future__ import annotations

import msgspec
import pytest
from tests.proof.simulation import judging
from tests.proof.simulation.families import FamilyName, family
from tests.proof.simulation.mutants import Mutant
from tests.proof.simulation.tasks import world
from tests.proof.simulation.tasks.scenario import TaskScenario
from tests.proof.simulation.tasks.signals.jobs.mutants import MUTANTS as OF_JOBS
from tests.proof.simulation.tasks.signals.rules.mutants import MUTANTS as OF_RULES

from headgate.supervisor.tasks import scheduler

pytestmark = pytest.mark.campaign

NEVER_S = 1000.0  # longer than a scenario
SEEDS: dict[FamilyName, range] = {"tasks": range(50), "groups": range(30), "signals": range(60, 90)}


@pytest.fixture(autouse=True)
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ASK_INTERVAL_S", NEVER_S)
    monkeypatch.setattr(world, "LOOK_S", NEVER_S)


def findings(name: FamilyName, seed: int) -> list[str]:
    plan = family(name).draw(seed)
    assert isinstance(plan, TaskScenario)
    return list(map(str, judging.judge(msgspec.structs.replace(plan, faults=()))))


@pytest.mark.parametrize("name", SEEDS)
def test_nothing_waits_for_a_poll(name: FamilyName) -> None:
    found = {seed: some for seed in SEEDS[name] if (some := findings(name, seed))}
    assert found == {}


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [
        (OF_JOBS["workers-of-what-it-stops-itself-are-forgotten"], 7018),
        (OF_RULES["a-remembered-start-waits-for-the-retry"], 77),
    ],
)
def test_what_waits_for_a_poll_is_found(mutant: Mutant, seed: int) -> None:
    assert findings("signals", seed) == []
    with mutant.applied():
        assert findings("signals", seed) != []
