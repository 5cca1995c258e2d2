"""The simulation of tasks finds nothing, finds the same nothing every time, and finds each deliberate bug."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from tests.proof.simulation import judging, records
from tests.proof.simulation.families import family
from tests.proof.simulation.mutants import find
from tests.proof.simulation.proof import SECTIONS, Run, runs_in, write
from tests.proof.simulation.tasks import rules, scenario
from tests.proof.simulation.tasks.directed import DIRECTED
from tests.proof.simulation.tasks.mutants import MUTANTS
from tests.proof.simulation.test_simulation import JOBS, WITHIN_S, simulate

SEEDS = 300  # what `make test` judges; `make simulate ARGS=--tasks` judges more
MUTANTS_MIN = 20


@pytest.mark.timeout(WITHIN_S)
def test_no_seed_loses_a_task_or_resumes_one_twice() -> None:
    done = simulate("--tasks", "--seeds", str(SEEDS), "--jobs", str(JOBS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [3, 49, 162])
def test_a_seed_gives_the_same_history_byte_for_byte_in_a_new_process(seed: int) -> None:
    first, second = (simulate("--tasks", "--seed", str(seed), "--digest") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert len(first.stdout.strip()) == 64
    assert first.stdout == second.stdout


def test_a_seed_gives_the_same_history_after_another_one_in_the_same_process() -> None:
    run = family("tasks").run
    before = records.digest(run(scenario.draw(3)))
    run(scenario.draw(4))
    assert records.digest(run(scenario.draw(3))) == before


@pytest.mark.parametrize("name", DIRECTED)
def test_a_directed_scenario_finds_nothing(name: str) -> None:
    assert DIRECTED[name]() == []


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= MUTANTS_MIN


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_does_not_survive(name: str) -> None:
    assert find(MUTANTS[name], "tasks") is not None, f"nobody noticed that this is broken: {MUTANTS[name].promise}"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_leaves_nothing_broken_behind(name: str) -> None:
    patches = MUTANTS[name].patches()
    before = [owner.__dict__[attribute] for owner, attribute, _ in patches]
    with MUTANTS[name].applied():
        assert [owner.__dict__[attribute] for owner, attribute, _ in patches] != before
    assert [owner.__dict__[attribute] for owner, attribute, _ in patches] == before


def test_taking_a_fault_away_leaves_the_dags_as_they_are() -> None:
    plan = next(plan for plan in map(scenario.draw, range(100)) if plan.faults)
    without = judging.with_faults(plan, [])
    assert without.faults == ()
    assert (without.seed, without.topology, without.dags) == (plan.seed, plan.topology, plan.dags)


def test_a_failing_seed_prints_the_one_command_that_shows_it() -> None:
    failing = simulate("--tasks", "--mutant", "outcome-stored-without-xcoms", "--seeds", "1")
    assert failing.returncode == 1
    command = next(line.strip() for line in failing.stderr.splitlines() if "python -m tests.proof.simulation" in line)
    assert command == "python -m tests.proof.simulation --tasks --seed 0 --faults none"
    shown = simulate("--mutant", "outcome-stored-without-xcoms", *command.split()[3:])
    assert shown.returncode == 1
    assert "lost XComs" in shown.stdout


def test_seeds_draw_every_kind_of_leg_wait_trouble_and_fault() -> None:
    plans = [scenario.draw(seed) for seed in range(SEEDS)]
    tasks = [task for plan in plans for dag in plan.dags for task in dag.tasks]
    legs = [leg for task in tasks for legs in task.attempts for leg in legs]
    assert {leg.end for leg in legs} == {"return", "fail", "give_up", "skip", "defer", "branch"}
    assert {leg.wait.end for leg in legs if leg.wait} == set(get_args(scenario.WaitEnd))
    assert {leg.trouble for leg in legs} == set(get_args(scenario.Trouble))
    kinds = {type(fault).__name__ for plan in plans for fault in plan.faults}
    assert kinds >= {kind.__name__ for kind in scenario.OF_TASKS}
    assert any(not plan.faults for plan in plans)
    assert any(task.starts_in_trigger for task in tasks)


@pytest.mark.parametrize(
    ("rule", "above", "due"),
    [
        ("all_success", ("success", "running"), "none"),
        ("all_success", ("failed", "running"), "upstream_failed"),
        ("all_success", ("skipped", "running"), "none"),  # it may yet fail, and that goes before a skip
        ("all_success", ("success", "skipped"), "skipped"),
        ("one_success", ("success", "running"), "scheduled"),
        ("one_failed", ("upstream_failed", "none"), "scheduled"),
        ("all_done", ("failed", "none"), "none"),
        ("always", ("none", "none"), "scheduled"),
        ("none_failed_min_one_success", ("skipped", "skipped"), "skipped"),
        ("one_done", ("skipped", "upstream_failed"), "upstream_failed"),
        ("all_success", (), "scheduled"),
    ],
)
def test_a_trigger_rule_decides_when_no_further_end_could_change_it(
    rule: str, above: tuple[str, ...], due: str
) -> None:
    assert rules.decision(rule, above) == due


def test_its_runs_stand_in_a_section_of_their_own(tmp_path: Path) -> None:
    path, run = tmp_path / "proof.md", Run(0, 999, 0, 10, "2026-01-01 00:00 UTC", "c0ffee")
    write(run, dict.fromkeys(MUTANTS, (3, "stuck")), path, SECTIONS["tasks"])
    text = path.read_text()
    assert "## Simulation of tasks" in text
    assert f"**{len(MUTANTS)} of {len(MUTANTS)} deliberate bugs found**" in text
    assert runs_in(text).counted == [run]
