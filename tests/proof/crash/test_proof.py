"""The crash sections of docs/proof.md: a section is read as it was written, and runs add up."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.proof.crash.campaign import Result
from tests.proof.crash.processes import SupervisorLogs
from tests.proof.crash.proof import (
    LAYOUTS,
    MAPS,
    PAIR,
    PROGRAMS,
    SIGNALS,
    STREAMS,
    TASKS,
    Layout,
    Tally,
    earlier_in,
    section,
    tally_in,
    tally_of,
    write,
)
from tests.proof.crash.workloads import programs
from tests.proof.history import findings

from headgate.protocol import marks
from headgate.testing.crash.history import Finding

CELL = Result(
    *("store.committed", "kill both", "sqlite", 3),
    is_reached=True,
    counts=Counter(kills=2, events=1200, redelivered=34, dropped=1),
)
RANDOM = Result("random", "kills", "postgresql", 1, counts=Counter(kills=1041, events=90_000, redelivered=12_345))
REPLAYED = Result("replay", "captures", "sqlite", 1, counts=Counter(logs=12, frames=34_567))
LOST = replace(CELL, findings=[Finding("lost", "p0:17", "s1", ("published", "handed out | by 5"))])
UNREACHED = Result("session.greeted", "stop", "sqlite", 1, error="the mark session.greeted: not within 60 s")

TASK_CELL = Result(
    *("defer.committed", "kill all", "sqlite"),
    is_reached=True,
    counts=Counter(kills=5, tasks=26, executions=1060, deferrals=34, tries_lost=7),
)
TASK_RANDOM = Result(
    *("random", "kills", "postgresql"), counts=Counter(kills=1041, tasks=9_000, deferrals=12_345, tries_lost=17)
)
RESUMED_TWICE = findings.Finding("resumed twice", "d/r/t", "after d1, by x1 and by x2", ("made", "begins | x"))
TASK_TWICE = replace(TASK_CELL, findings=[RESUMED_TWICE])
TASK_UNREACHED = Result("resume.by_end", "stop", "postgresql", error="the mark resume.by_end: not within 60 s")

STREAM_CELL = Result(
    *("stream.reopened", "kill all", "sqlite"),
    is_reached=True,
    counts=Counter(kills=5, streams=14, events=168, steps=70, repeated=4),
)
STREAM_RANDOM = Result(
    "random", "kills", "postgresql", counts=Counter(kills=40, streams=700, events=8_400, repeated=31)
)
STREAM_LEFT_OUT = replace(STREAM_CELL, findings=[findings.Finding("event left out", "d/r/t", "events 3 to 4")])

MAP_CELL = Result(
    *("maps.expanded", "kill all", "sqlite"),
    is_reached=True,
    counts=Counter(kills=5, instances=42, executions=50, tries_lost=4),
)
MAP_RANDOM = Result("random", "kills", "postgresql", counts=Counter(kills=40, instances=2_100, tries_lost=31))
MAP_LEFT_OUT = replace(MAP_CELL, findings=[findings.Finding("value left out", "d/r/t[3]", "it is none")])

SIGNAL_CELL = Result(
    *("signals.considered", "kill all", "sqlite"),
    is_reached=True,
    counts=Counter(kills=5, signals=42, acknowledged=50, waits=12, tries_lost=4),
)
SIGNAL_RANDOM = Result("random", "kills", "postgresql", counts=Counter(kills=40, signals=2_100, waits=800))
SIGNAL_TWICE = replace(SIGNAL_CELL, findings=[findings.Finding("version twice", "k", "one signal has two versions")])

PROGRAM_CELL = Result(
    *("redrive.written", "kill program", "postgresql", 3),
    is_reached=True,
    counts=Counter(kills=1, events=120, redelivered=3, redriven=12, handed_over=360, dropped=0),
)
PROGRAM_RANDOM = Result("random", "kills", "sqlite", 1, counts=Counter(kills=40, events=9_000, handed_over=9_000))
PROGRAM_TWICE = replace(PROGRAM_CELL, findings=[programs.Finding("handed over twice", "s1 17")])


def tally(*results: Result, layout: Layout = PAIR, commit: str = "c0ffee") -> Tally:
    return tally_of(results, layout, seed=7, took_s=125.0, commit=commit, ended="2026-01-01 00:00 UTC")


def text_of(tally: Tally, layout: Layout = PAIR) -> str:
    return "\n".join(section(tally, layout, "Python 3"))


@pytest.mark.parametrize(
    ("layout", "results"),
    [
        (PAIR, [CELL, RANDOM, REPLAYED, LOST, UNREACHED]),
        (PROGRAMS, [PROGRAM_CELL, PROGRAM_RANDOM, PROGRAM_TWICE]),
        (TASKS, [TASK_CELL, TASK_RANDOM, TASK_TWICE, TASK_UNREACHED]),
        (STREAMS, [STREAM_CELL, STREAM_RANDOM, STREAM_LEFT_OUT]),
        (MAPS, [MAP_CELL, MAP_RANDOM, MAP_LEFT_OUT]),
        (SIGNALS, [SIGNAL_CELL, SIGNAL_RANDOM, SIGNAL_TWICE]),
    ],
)
def test_a_section_is_read_as_it_was_written(layout: Layout, results: list[Result]) -> None:
    one = tally(*results, layout=layout, commit="c0ffee, with changes that are not committed")
    assert tally_in(text_of(one, layout), layout) == one


def test_runs_add_up_and_each_keeps_its_row(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    write(path, tally(CELL, RANDOM), PAIR, "Python 3")
    write(path, earlier_in(path, PAIR) + tally(CELL, RANDOM, REPLAYED, commit="decaf"), PAIR, "Python 3")
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


def test_runs_of_tasks_add_up_and_each_keeps_its_row(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    write(path, tally(TASK_CELL, TASK_RANDOM, layout=TASKS), TASKS, "Python 3")
    new = tally(TASK_CELL, TASK_RANDOM, layout=TASKS, commit="decaf")
    write(path, earlier_in(path, TASKS) + new, TASKS, "Python 3")
    text = path.read_text()
    assert "**2,092 processes killed with SIGKILL**, in 2 cells" in text
    assert ", ".join(f"**0 {kind}**" for kind in TASKS.kinds) in text
    assert "| postgresql | 2,082 | 18,000 | 24,690 | 34 | 0 |" in text
    assert f"1 of {len(TASKS.workload.marks)} marks reached: `defer.committed`" in text
    cells = ["not run"] * len(TASKS.workload.faults)
    cells[TASKS.workload.faults.index("kill all")] = "2 / 14 / 0"
    assert f"| `defer.committed` | {' | '.join(cells)} |" in text
    assert "What failed" not in text


@pytest.mark.parametrize(
    ("layout", "other"),
    [(layout, "simulation") for layout in LAYOUTS.values()]
    + [(layout, "crash") for layout in (TASKS, STREAMS, MAPS, SIGNALS)],
    ids=lambda of: of if isinstance(of, str) else of.name,
)
def test_the_other_sections_stay_as_they_are(tmp_path: Path, layout: Layout, other: str) -> None:
    path = tmp_path / "proof.md"
    path.write_text(f"<!-- begin {other} -->\n\nthe other one\n\n<!-- end {other} -->\n")
    assert earlier_in(path, layout) == Tally()
    write(path, tally(RANDOM, layout=layout), layout, "Python 3")
    assert f"<!-- begin {other} -->\n\nthe other one\n\n<!-- end {other} -->" in path.read_text()


def test_what_failed_is_told_with_its_story_and_kept() -> None:
    text = text_of(tally(LOST, UNREACHED) + tally(CELL))
    assert "**1 lost**" in text
    assert "- 2 results failed" in text
    assert "**1 failed**" in text
    assert "lost: p0:17 for s1\n    published\n    handed out | by 5" in text
    assert "not within 60 s" in text
    assert "`session.greeted`" not in text.split("marks reached: ")[1].split("\n")[0], "it was not reached"


def test_every_mark_there_is_has_a_matrix() -> None:
    registered = [some for name, some in vars(marks).items() if name == "MARKS" or name.endswith("_MARKS")]
    assert {mark for workload in LAYOUTS for mark in workload.marks} == {mark for some in registered for mark in some}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_the_matrix_shows_every_mark_with_every_fault(layout: Layout) -> None:
    rows = [line for line in text_of(tally(layout=layout), layout).splitlines() if line.startswith("| `")]
    faults = layout.workload.faults
    assert len(rows) == len(layout.workload.marks)
    assert all(line.count("|") == len(faults) + 2 for line in rows)
    assert all(line.count("not run") + line.count(" - ") == len(faults) for line in rows)


def test_an_error_in_the_log_of_a_supervisor_is_told_once_and_not_before_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    log = tmp_path / "b" / "supervisor.log"
    logs = SupervisorLogs(tmp_path)
    assert logs.new_failure() is None
    ours = '{"logger": "headgate.supervisor.tasks.faults", "exception": "Traceback: KeyError"}'
    with log.open("w") as file:
        print('{"logger": "headgate.runner.host", "exception": "Traceback: of users\' code"}', file=file)
        print('{"logger": "headgate.supervisor.tasks.faults", "event": "x"}', file=file)
        file.write(ours)
    assert logs.new_failure() is None
    with log.open("a") as file:
        print(file=file)
        print(ours.replace("Key", "Value"), file=file)
    assert logs.new_failure() == ours
    assert logs.new_failure() is None
