"""What seeds of tasks mean, the trigger rules of their checker, and their section of docs/proof.md."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from tests.proof.simulation.database import WRITES
from tests.proof.simulation.proof import SECTIONS, Run, runs_in, write
from tests.proof.simulation.tasks import faults, rules, scenario
from tests.proof.simulation.tasks.database import DEADLY, OF_STEPS, READS
from tests.proof.simulation.tasks.mutants import MUTANTS
from tests.proof.simulation.tasks.streams.plans import CallEnd, SourceEnd, Trouble

from headgate.protocol.messages.task_streams import StreamContract
from headgate.store.scheduling_verbs import SchedulingVerbs
from headgate.store.store import Store
from headgate.store.task_verbs import TaskVerbs

SEEDS = 300
MUTANTS_MIN = 20


def test_seeds_draw_every_kind_of_leg_wait_trouble_and_fault() -> None:
    plans = [scenario.draw(seed) for seed in range(SEEDS)]
    tasks = [task for plan in plans for dag in plan.dags for task in dag.tasks]
    legs = [leg for task in tasks for legs in task.attempts for leg in legs]
    assert {leg.end for leg in legs} == {"return", "fail", "give_up", "skip", "defer", "branch"}
    assert {leg.wait.end for leg in legs if leg.wait} == set(get_args(scenario.WaitEnd))
    streams = [task.stream for task in tasks if task.stream is not None]
    assert {stream.contract for stream in streams} == set(get_args(StreamContract))
    assert {stream.ending for stream in streams} == set(get_args(SourceEnd))
    assert {call.end for stream in streams for call in stream.calls} == set(get_args(CallEnd))
    assert {leg.trouble for leg in legs} == set(get_args(Trouble))
    maps = [task.mapped for task in tasks if task.mapped is not None]
    assert {bool(one.of) for one in maps} == {one.fail_fast for one in maps} == {True, False}
    assert {one.failures_max for one in maps} == {None, 1, 2} == {one.active_max for one in maps}
    kinds = {type(fault).__name__ for plan in plans for fault in plan.faults}
    assert kinds >= {kind.__name__ for kind in faults.OF_TASKS}
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


def test_faults_name_verbs_that_exist() -> None:
    parts = (Store, TaskVerbs, SchedulingVerbs)
    verbs = {*scenario.VERBS, *scenario.VERBS_OF_STREAMS, *READS, "store_ends", *WRITES, *DEADLY}
    named = verbs - set(DEADLY.values()) - set(OF_STEPS.values())
    assert [verb for verb in named if not any(hasattr(part, verb) for part in parts)] == []
