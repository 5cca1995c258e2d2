"""Every deliberate bug is found, within its stated number of seeds: otherwise the simulation proves nothing."""

from __future__ import annotations

import pytest
from tests.proof.simulation.mutants import MUTANTS, find

MUTANTS_MIN = 15


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= MUTANTS_MIN


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_does_not_survive(name: str) -> None:
    mutant = MUTANTS[name]
    assert find(mutant) is not None, f"nobody noticed that this is broken: {mutant.promise}"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_leaves_nothing_broken_behind(name: str) -> None:
    patches = MUTANTS[name].patches()
    before = [owner.__dict__[attribute] for owner, attribute, _ in patches]
    with MUTANTS[name].applied():
        assert [owner.__dict__[attribute] for owner, attribute, _ in patches] != before
    assert [owner.__dict__[attribute] for owner, attribute, _ in patches] == before
