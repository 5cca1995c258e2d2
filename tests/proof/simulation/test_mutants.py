"""Every deliberate bug is found, within its stated number of seeds: otherwise the simulation proves nothing.

That each still fits the code takes no seed, and is tested with everything else.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType

import pytest
from tests.proof import document
from tests.proof.simulation.families import FamilyName
from tests.proof.simulation.mutants import find
from tests.proof.simulation.proof import SECTIONS, found_after

MUTANTS_MIN: dict[FamilyName, int] = {"pair": 15, "tasks": 20, "groups": 8, "signals": 72}
ALL = [(name, mutant) for name, section in SECTIONS.items() for mutant in section.mutants]


@cache
def found_before(name: FamilyName) -> dict[str, int]:
    """Return the number of seeds that each mutant took when docs/proof.md was written."""
    return found_after(document.section_of(document.PATH, SECTIONS[name].name))


@pytest.mark.parametrize("name", MUTANTS_MIN)
def test_there_are_enough_mutants(name: FamilyName) -> None:
    assert len(SECTIONS[name].mutants) >= MUTANTS_MIN[name]


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "mutant"), ALL)
def test_a_mutant_does_not_survive(name: FamilyName, mutant: str) -> None:
    bug = SECTIONS[name].mutants[mutant]
    found = find(bug, name, found_after=found_before(name).get(mutant))
    assert found is not None, f"no finding says that this is broken: {bug.promise}"


@pytest.mark.campaign
@pytest.mark.parametrize(("before", "after"), [(4, 4), (1, 4), (51, 4)])
def test_a_mutant_that_its_last_seed_no_longer_finds_is_looked_for_from_the_first(before: int, after: int) -> None:
    bug = SECTIONS["pair"].mutants["dedup-dropped"]
    assert bug.seeds < 51
    found = find(bug, found_after=before)
    assert found is not None
    assert found[0] == after


@pytest.mark.parametrize(("name", "mutant"), ALL)
def test_a_mutant_takes_what_it_stands_for(name: FamilyName, mutant: str) -> None:
    """Otherwise it breaks by its signature, and is found, or is not, for that reason."""
    for owner, attribute, bug in SECTIONS[name].mutants[mutant].patches():
        original = owner.__dict__[attribute]
        if not isinstance(original, FunctionType) or not isinstance(bug, FunctionType):
            continue
        if hasattr(original, "__wrapped__"):  # a verb, whose decorator takes anything
            continue
        parameters = inspect.signature(original).parameters.values()
        by_name = {one.name: one for one in parameters if one.kind is one.KEYWORD_ONLY}
        by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        inspect.signature(bug).bind(*by_place, **by_name)


@pytest.mark.parametrize(("name", "mutant"), ALL)
def test_a_mutant_leaves_nothing_broken_behind(name: FamilyName, mutant: str) -> None:
    bug = SECTIONS[name].mutants[mutant]
    patches = bug.patches()
    before = [owner.__dict__[attribute] for owner, attribute, _ in patches]
    with bug.applied():
        assert [owner.__dict__[attribute] for owner, attribute, _ in patches] != before
    assert [owner.__dict__[attribute] for owner, attribute, _ in patches] == before
