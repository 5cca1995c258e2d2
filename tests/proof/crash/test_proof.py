"""What docs/proof.md says of the crash tests: what was written is read again, and runs add up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tests.proof.crash.campaign import FAULTS, Result
from tests.proof.crash.proof import Told, earlier_in, section, together, told_by, told_in, write

from headgate.protocol.marks import MARKS
from headgate.testing.crash.history import Finding

CELL = Result(
    "store.committed", "kill both", 3, "sqlite", is_reached=True, kills=2, events=1200, redelivered=34, dropped=1
)
RANDOM = Result("random", "kills", 1, "postgresql", kills=1041, events=90_000, redelivered=12_345)
REPLAYED = Result("replay", "captures", 1, "sqlite", logs=12, frames=34_567)
LOST = replace(CELL, findings=[Finding("lost", "p0:17", "s1", ("published", "handed out | by 5"))])
UNREACHED = Result("session.greeted", "stop", 1, "sqlite", error="the mark session.greeted: not within 60 s")


def told(*results: Result, commit: str = "c0ffee") -> Told:
    return told_by(results, seed=7, took_s=125.0, commit=commit, ended="2026-01-01 00:00 UTC")


def text_of(told: Told) -> str:
    return "\n".join(section(told, "Python 3"))


def test_a_section_is_read_as_it_was_written() -> None:
    one = told(CELL, RANDOM, REPLAYED, LOST, UNREACHED, commit="c0ffee, with changes that are not committed")
    assert told_in(text_of(one)) == one


def test_runs_add_up_and_each_keeps_its_row(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    write(path, told(CELL, RANDOM), "Python 3")
    write(path, together(earlier_in(path), told(CELL, RANDOM, REPLAYED, commit="decaf")), "Python 3")
    text = path.read_text()
    assert "**2,086 processes killed with SIGKILL**, in 2 cells" in text
    assert "on 2 commits" in text
    assert "**0 lost**, **0 stored twice**" in text
    assert "12 captures with 34,567 frames replayed" in text
    assert "2 connections dropped" in text
    assert re.search(r"`store.committed` \| [^|]+ \| [^|]+ \| 2 / 68 / 0 / 0 \|", text)
    assert "| postgresql | 1 | 2,082 | 180,000 | 24,690 | 0 | 0 |" in text
    assert "1 of 28 marks reached: `store.committed`" in text
    assert "What failed" not in text


def test_the_other_sections_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    path.write_text("<!-- begin simulation -->\n\nof the simulation\n\n<!-- end simulation -->\n")
    assert earlier_in(path) == Told()
    write(path, told(RANDOM), "Python 3")
    assert "of the simulation" in path.read_text()


def test_what_failed_is_told_with_its_story_and_kept() -> None:
    text = text_of(together(told(LOST, UNREACHED), told(CELL)))
    assert "**1 lost**" in text
    assert "- 2 results failed" in text
    assert "**1 failed**" in text
    assert "lost: p0:17 for s1\n    published\n    handed out | by 5" in text
    assert "not within 60 s" in text
    assert "`session.greeted`" not in text.split("marks reached: ")[1].split("\n")[0], "it was not reached"


def test_the_matrix_shows_every_mark_with_every_fault() -> None:
    rows = [line for line in text_of(told()).splitlines() if line.startswith("| `")]
    assert len(rows) == len(MARKS)
    assert all(line.count("|") == len(FAULTS) + 2 for line in rows)
    assert all(line.count("not run") + line.count(" - ") == len(FAULTS) for line in rows)
