"""What docs/proof.md says of the simulation: runs add up, and none is counted twice."""

from __future__ import annotations

from pathlib import Path

from tests.proof import document as proof
from tests.proof.simulation.mutants import MUTANTS
from tests.proof.simulation.proof import FAILED_BEFORE, Run, Runs, found_after, runs_in, write

FOUND: dict[str, tuple[int, str] | None] = dict.fromkeys(MUTANTS, (3, "lost"))


def run_of(first: int, last: int, *, failed: int = 0, commit: str = "c0ffee") -> Run:
    return Run(first, last, failed, 150, "2026-01-01 00:00 UTC", commit)


def test_a_row_is_read_as_it_was_written() -> None:
    run = run_of(1_000_000, 1_999_999, failed=1234, commit="c0ffee, with changes")
    assert runs_in(str(run)) == Runs([run], [])


def test_runs_over_other_seeds_add_up(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    write(run_of(0, 999), FOUND, path)
    write(run_of(1000, 2999, failed=2, commit="decaf"), FOUND, path)
    text = path.read_text()
    assert "**3,000 seeds, 2 failed**, on 2 commits" in text
    assert f"**{len(MUTANTS)} of {len(MUTANTS)} deliberate bugs found**" in text


def test_a_run_over_the_same_seeds_takes_the_place_of_the_earlier_one() -> None:
    earlier = Runs([run_of(0, 999), run_of(1000, 1999)], [])
    new = run_of(500, 999, commit="new")
    assert earlier.with_run(new) == Runs([new, run_of(1000, 1999)], [])


def test_a_run_that_failed_still_stands_when_its_seeds_were_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    failed, mended = run_of(0, 999, failed=2, commit="decaf"), run_of(0, 1999)
    write(failed, FOUND, path)
    assert FAILED_BEFORE not in path.read_text()
    write(mended, FOUND, path)
    write(run_of(2000, 2999), FOUND, path)
    text = path.read_text()
    assert runs_in(text) == Runs([mended, run_of(2000, 2999)], [failed])
    assert "**3,000 seeds, 0 failed**, on 1 commit\n" in text


def test_a_failure_that_does_not_happen_again_on_the_same_commit_still_stands() -> None:
    failed, passed = run_of(0, 999, failed=2), run_of(0, 999)
    assert Runs([failed], []).with_run(passed) == Runs([passed], [failed])


def test_how_many_seeds_a_mutant_took_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    of_seeds = [name for name, mutant in MUTANTS.items() if not mutant.directed]
    first, second, third = of_seeds[:3]
    write(run_of(0, 9), FOUND | {first: (1, "lost"), second: (1234, "lost"), third: None}, path)
    read = found_after(proof.section_of(path, "simulation"))
    assert read == {first: 1, second: 1234} | dict.fromkeys(of_seeds[3:], 3)


def test_a_mutant_that_survives_is_named(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    name = next(iter(MUTANTS))
    write(run_of(0, 9), FOUND | {name: None}, path)
    assert f"| {name} | {MUTANTS[name].promise} | **not found** |" in path.read_text()
    simulated = {"simulation", "simulation of tasks", "simulation of groups", "simulation of signals"}
    of_tasks = {"task crash", "stream crash", "map crash", "signal crash"}
    real = {"crash", "harm crash", "program crash", "brokers", "signals over gRPC", "consumers"} | of_tasks
    assert proof.SECTIONS.keys() == real | simulated


def test_mutants_are_looked_for_anew_without_a_run(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    name = next(name for name, mutant in MUTANTS.items() if not mutant.directed)
    write(run_of(0, 9), FOUND, path)
    write(None, FOUND | {name: (8, "lost")}, path)
    text = proof.section_of(path, "simulation")
    assert runs_in(text) == Runs([run_of(0, 9)], [])
    assert found_after(text)[name] == 8
