"""Every deliberate bug is found, within its stated number of seeds: otherwise the simulation proves nothing."""

from __future__ import annotations

import pytest
from tests.proof.simulation.families import FamilyName
from tests.proof.simulation.mutants import find
from tests.proof.simulation.proof import SECTIONS

pytestmark = pytest.mark.campaign

MUTANTS_MIN: dict[FamilyName, int] = {"pair": 15, "tasks": 20, "groups": 8, "signals": 72}
ALL = [(name, mutant) for name, section in SECTIONS.items() for mutant in section.mutants]


@pytest.mark.parametrize("name", MUTANTS_MIN)
def test_there_are_enough_mutants(name: FamilyName) -> None:
    assert len(SECTIONS[name].mutants) >= MUTANTS_MIN[name]


@pytest.mark.parametrize(("name", "mutant"), ALL)
def test_a_mutant_does_not_survive(name: FamilyName, mutant: str) -> None:
    bug = SECTIONS[name].mutants[mutant]
    assert find(bug, name) is not None, f"no finding says that this is broken: {bug.promise}"


@pytest.mark.parametrize(("name", "mutant"), ALL)
def test_a_mutant_leaves_nothing_broken_behind(name: FamilyName, mutant: str) -> None:
    bug = SECTIONS[name].mutants[mutant]
    patches = bug.patches()
    before = [owner.__dict__[attribute] for owner, attribute, _ in patches]
    with bug.applied():
        assert [owner.__dict__[attribute] for owner, attribute, _ in patches] != before
    assert [owner.__dict__[attribute] for owner, attribute, _ in patches] == before
