"""What docs/proof.md says of the crash tests of tasks: what was written is read again, and runs add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.proof.crash.task_campaign import FAULTS, SIDES, Result
from tests.proof.crash.task_proof import Told, earlier_in, section, together, told_by, told_in, write
from tests.proof.history.task_history import KINDS, Finding

CELL = Result(
    *("defer.committed", "kill all", "sqlite"),
    **{"is_reached": True, "kills": 5, "tasks": 26, "executions": 1060, "deferrals": 34, "tries_lost": 7},
)
RANDOM = Result("random", "kills", "postgresql", kills=1041, tasks=9_000, deferrals=12_345, tries_lost=17)
TWICE = replace(CELL, findings=[Finding("resumed twice", "d/r/t", "after d1, by x1 and by x2", ("made", "begins | x"))])
UNREACHED = Result("resume.by_end", "stop", "postgresql", error="the mark resume.by_end: not within 60 s")


def told(*results: Result, commit: str = "c0ffee") -> Told:
    return told_by(results, seed=7, took_s=125.0, commit=commit, ended="2026-01-01 00:00 UTC")


def text_of(told: Told) -> str:
    return "\n".join(section(told, "Python 3"))


def test_a_section_is_read_as_it_was_written() -> None:
    one = told(CELL, RANDOM, TWICE, UNREACHED, commit="c0ffee, with changes that are not committed")
    assert told_in(text_of(one)) == one


def test_runs_add_up_and_each_keeps_its_row(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    write(path, told(CELL, RANDOM), "Python 3")
    write(path, together(earlier_in(path), told(CELL, RANDOM, commit="decaf")), "Python 3")
    text = path.read_text()
    assert "**2,092 processes killed with SIGKILL**, in 2 cells" in text
    assert "on 2 commits" in text
    assert ", ".join(f"**0 {kind}**" for kind in KINDS) in text
    assert "| postgresql | 2,082 | 18,000 | 24,690 | 34 | 0 |" in text
    assert f"1 of {len(SIDES)} marks reached: `defer.committed`" in text
    cells = ["not run"] * len(FAULTS)
    cells[FAULTS.index("kill all")] = "2 / 14 / 0"
    assert f"| `defer.committed` | {' | '.join(cells)} |" in text
    assert "What failed" not in text


def test_the_other_sections_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    path.write_text("<!-- begin crash -->\n\nof the pair\n\n<!-- end crash -->\n")
    assert earlier_in(path) == Told()
    write(path, told(RANDOM), "Python 3")
    assert "<!-- begin crash -->\n\nof the pair\n\n<!-- end crash -->" in path.read_text()
