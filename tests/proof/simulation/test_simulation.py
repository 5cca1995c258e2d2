"""The simulation finds nothing, finds the same nothing every time, and knows how to make a failure small."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.proof.simulation import judging, records, scenario, world
from tests.proof.simulation.directed import DIRECTED

ROOT = Path(__file__).parents[3]
SEEDS = 2000  # what `make test` judges; `make simulate SEEDS=N` judges more
JOBS = 2
WITHIN_S = 900.0  # the longest a busy machine may take
MANY_FAULTS_FROM = 1000  # a range of seeds in which there are some with several faults


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: the simulation silences logs and seeds the scheduler for good."""
    return subprocess.run(
        [sys.executable, "-m", "tests.proof.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "random"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


@pytest.mark.timeout(WITHIN_S)
def test_no_seed_loses_an_event_or_stores_one_twice() -> None:
    done = simulate("--seeds", str(SEEDS), "--jobs", str(JOBS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [1, 79, 456, 919])
def test_a_seed_gives_the_same_history_byte_for_byte_in_a_new_process(seed: int) -> None:
    first, second = (simulate("--seed", str(seed), "--digest") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert len(first.stdout.strip()) == 64
    assert first.stdout == second.stdout


def test_seeds_give_the_same_histories_in_whatever_order_they_come() -> None:
    seeds = range(MANY_FAULTS_FROM, MANY_FAULTS_FROM + 10)
    forwards = {seed: records.digest(world.run(scenario.draw(seed))) for seed in seeds}
    backwards = {seed: records.digest(world.run(scenario.draw(seed))) for seed in reversed(seeds)}
    assert forwards == backwards


def test_taking_a_fault_away_leaves_the_topology_and_the_workload_as_they_are() -> None:
    plan = next(plan for plan in map(scenario.draw, range(MANY_FAULTS_FROM, 2 * MANY_FAULTS_FROM)) if plan.faults)
    without = judging.with_faults(plan, [])
    assert without.faults == ()
    assert (without.seed, without.topology, without.lanes) == (plan.seed, plan.topology, plan.lanes)


@pytest.mark.parametrize("name", DIRECTED)
def test_a_directed_scenario_finds_nothing(name: str) -> None:
    assert DIRECTED[name]() == []


@pytest.mark.parametrize("needed", [[], [3], [0, 5], [1, 2, 6]])
def test_shrinking_leaves_what_a_failure_needs_and_no_more(needed: list[int]) -> None:
    def still_fails(items: Sequence[int]) -> bool:
        return set(needed) <= set(items)

    assert judging.shrink(range(7), still_fails) == needed


def test_a_failing_seed_prints_the_one_command_that_shows_it() -> None:
    failing = simulate("--mutant", "advance-before-confirmation", "--seeds", "1")
    assert failing.returncode == 1
    command = next(line.strip() for line in failing.stderr.splitlines() if "python -m tests.proof.simulation" in line)
    assert command == "python -m tests.proof.simulation --seed 0 --faults none"
    shown = simulate("--mutant", "advance-before-confirmation", *command.split()[3:])
    assert shown.returncode == 1
    assert "advanced before stored" in shown.stdout
