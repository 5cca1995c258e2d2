"""The simulation finds nothing, finds the same nothing every time, and knows how to make a failure small."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
from tests.proof.simulation import judging, records
from tests.proof.simulation.database import MIGRATED
from tests.proof.simulation.families import FAMILIES, FamilyName, family
from tests.store.harness import migrated_sqlite
from tests.waiting import ALL_WITHIN_S

from headgate.store.scheduling.planning import _Evaluation

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[3]
SEEDS: dict[FamilyName, int] = {
    "pair": 500,
    "tasks": 100,
    "groups": 30,
    "signals": 30,
}  # in `make proof`; `make simulate SEEDS=N` judges more
SEEDS_REPEATED: list[tuple[FamilyName, int]] = [
    *(("pair", seed) for seed in (1, 79, 456, 919)),
    *(("tasks", seed) for seed in (3, 49, 162)),
    ("groups", 12),
    ("signals", 7),
]
JOBS = 2
MANY_FAULTS_FROM = 1000  # a range of seeds in which there are some with several faults


class Simulate(Protocol):
    """Runs the command in a process of its own: the simulation silences logs and seeds the scheduler for good."""

    def __call__(self, name: FamilyName, *arguments: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    migrated = tmp_path_factory.mktemp("simulation") / "migrated.db"
    migrated.write_bytes(migrated_sqlite())
    return partial(_simulate, migrated)


def _simulate(migrated: Path, name: FamilyName, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.proof.simulation", *family(name).option.split(), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "random", MIGRATED: str(migrated)},
        capture_output=True,
        text=True,
        timeout=ALL_WITHIN_S,
        check=False,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_no_seed_loses_an_event_or_a_task_or_takes_one_twice(simulate: Simulate, name: FamilyName) -> None:
    done = simulate(name, "--seeds", str(SEEDS[name]), "--jobs", str(JOBS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "seed"), SEEDS_REPEATED)
def test_a_seed_gives_the_same_history_byte_for_byte_in_a_new_process(
    simulate: Simulate, name: FamilyName, seed: int
) -> None:
    first, second = (simulate(name, "--seed", str(seed), "--digest") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert len(first.stdout.strip()) == 64
    assert first.stdout == second.stdout


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_give_the_same_histories_in_whatever_order_they_come(name: FamilyName) -> None:
    of, seeds = family(name), range(MANY_FAULTS_FROM, MANY_FAULTS_FROM + 10)
    forwards = {seed: records.digest(of.run(of.draw(seed))) for seed in seeds}
    backwards = {seed: records.digest(of.run(of.draw(seed))) for seed in reversed(seeds)}
    assert forwards == backwards


@pytest.mark.parametrize("name", FAMILIES)
def test_taking_a_fault_away_leaves_all_else_as_it_is(name: FamilyName) -> None:
    plans = map(family(name).draw, range(MANY_FAULTS_FROM, 2 * MANY_FAULTS_FROM))
    plan = next(plan for plan in plans if plan.faults)
    without = judging.with_faults(plan, [])
    assert without.faults == ()
    assert msgspec.structs.replace(without, faults=plan.faults) == plan


@pytest.mark.parametrize(
    ("name", "scenario"), [(name, scenario) for name in FAMILIES for scenario in family(name).directed]
)
def test_a_directed_scenario_finds_nothing(name: FamilyName, scenario: str) -> None:
    assert family(name).directed[scenario]() == []


@pytest.mark.parametrize("needed", [[], [3], [0, 5], [1, 2, 6]])
def test_shrinking_leaves_what_a_failure_needs_and_no_more(needed: list[int]) -> None:
    def still_fails(items: Sequence[int]) -> bool:
        return set(needed) <= set(items)

    assert judging.shrink(range(7), still_fails) == needed


@pytest.mark.parametrize(
    ("name", "mutant", "finding"),
    [
        ("pair", "advance-before-confirmation", "advanced before stored"),
        ("tasks", "outcome-stored-without-xcoms", "lost XComs"),
    ],
)
def test_a_failing_seed_prints_the_one_command_that_shows_it(
    simulate: Simulate, name: FamilyName, mutant: str, finding: str
) -> None:
    failing = simulate(name, "--mutant", mutant, "--seeds", "1")
    assert failing.returncode == 1
    command = next(line.strip() for line in failing.stderr.splitlines() if "python -m tests.proof.simulation" in line)
    assert command == f"python -m tests.proof.simulation {family(name).option}--seed 0 --faults none"
    shown = simulate("pair", "--mutant", mutant, *command.split()[3:])  # with the option that the command names
    assert shown.returncode == 1
    assert finding in shown.stdout


def test_an_error_that_costs_a_run_no_more_than_a_moment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler passes it over, and all goes well in the end: the promises are kept, and there is a bug."""
    plan = family("tasks").draw(3)
    assert judging.judge(plan) == []
    inner, raised = _Evaluation.evaluate, list[KeyError]()

    def fail_once(evaluation: _Evaluation, run: Any) -> bool:
        if not raised:
            raised.append(KeyError("nobody foresaw it"))
            raise raised[0]
        return inner(evaluation, run)

    monkeypatch.setattr(_Evaluation, "evaluate", fail_once)
    found = judging.judge(plan)
    assert [finding.kind for finding in found] == ["broke"]
    assert "nobody foresaw it" in found[0].what
