"""The section of ``docs/proof.md`` about the crash tests of tasks, written from results by the command.

Like that of the pair, the document itself is where earlier runs are kept: each has a row with its commit, and the
tables are sums over all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from tests.proof import document as proof
from tests.proof.crash.task_campaign import FAULTS, MEANINGS, SIDES, Fault, Result, is_possible
from tests.proof.history.task_history import KINDS

DIALECTS = ("sqlite", "postgresql")

INTRODUCTION = """\
A real `headgate up` with tasks that defer, and are resumed, time out, fail, end in their trigger or begin in it; its
workers, its runner and itself killed, stopped and cut off from the database at every mark of the way, and at random.
Written by `make crash`.
"""
MATRIX_INTRODUCTION = """\
A process is held at the mark, the fault is done there, and everything settles. A cell says: runs / tries that the fault
has cost / findings, over all runs on both databases. A dash: SQLite has no connection to drop.
"""
HOW = """\
Tasks and triggers keep one journal of what they are about to do. It is read from outside together with the tables, and
`tests.proof.history.task_history` judges both; its docstring says what is promised. A worker or a supervisor that dies
costs what ran there its try, and the next try does again what was done; the death of a runner, a worker that stands
still and a dropped connection cost none. A mark that is not reached, tasks that do not end, a wrong exit code, workers
that outlive their supervisor: each fails its cell.
"""


@dataclass(frozen=True)
class Run:
    """What one command counted: a row of the first table, whose columns these are in order."""

    ended: str
    minutes: int
    seed: int
    kills: int
    cells: int
    tasks: int
    executions: int
    deferrals: int
    tries_lost: int
    dropped: int
    failed: int
    found: tuple[int, ...]  # by kind
    commit: str

    def __str__(self) -> str:
        values = [getattr(self, field.name) for field in fields(self)[:-2]] + list(self.found)
        shown = [f"{value:,}" if isinstance(value, int) else value for value in values]
        return f"| {' | '.join(shown)} | `{self.commit}` |"


_COLUMNS = (
    *("ended", "minutes", "seed", "kills", "cells"),
    *("tasks", "steps executed", "deferrals", "tries lost", "dropped"),
)
RUN_HEAD = f"| {' | '.join((*_COLUMNS, 'failed', *KINDS, 'commit'))} |"
_WIDTH = len(_COLUMNS) + len(KINDS) + 2

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """What a document tells: its runs, cells by mark and fault (runs, tries lost, findings, failed), random kills by
    database (kills, tasks, deferrals, tries lost, findings), the marks that were reached, and what failed.
    """

    runs: Sequence[Run] = ()
    cells: Mapping[tuple[str, str], Counts] = field(default_factory=dict)
    random: Mapping[str, Counts] = field(default_factory=dict)
    reached: frozenset[str] = frozenset()
    failures: Sequence[str] = ()


def told_by(results: Sequence[Result], *, seed: int, took_s: float, commit: str, ended: str) -> Told:
    """Return what one run has to tell."""
    failed = [result for result in results if not result.is_good]
    run = Run(
        ended,
        round(took_s / 60),
        seed,
        sum(result.kills for result in results),
        sum(result.mark in SIDES for result in results),
        sum(result.tasks for result in results),
        sum(result.executions for result in results),
        sum(result.deferrals for result in results),
        sum(result.tries_lost for result in results),
        sum(result.dropped for result in results),
        len(failed),
        tuple(sum(result.count(kind) for result in results) for kind in KINDS),
        commit,
    )
    cells: dict[tuple[str, str], Counts] = {}
    random: dict[str, Counts] = {}
    for result in results:
        found, name = len(result.findings), (result.mark, result.fault)
        if result.mark in SIDES:
            cells[name] = _sum(cells.get(name), (1, result.tries_lost, found, int(not result.is_good)))
        elif result.mark == "random":
            counts = (result.kills, result.tasks, result.deferrals, result.tries_lost, found)
            random[result.dialect] = _sum(random.get(result.dialect), counts)
    reached = frozenset(result.mark for result in results if result.is_reached)
    return Told((run,), cells, random, reached, tuple(f"commit {commit}\n{result}" for result in failed))


def _sum(one: Counts | None, other: Counts) -> Counts:
    return other if one is None else tuple(map(sum, zip(one, other, strict=True)))


def told_in(text: str) -> Told:
    """Return what the section of a document tells. Marks and faults that there are no more are left out."""
    runs: list[Run] = []
    cells: dict[tuple[str, str], Counts] = {}
    random: dict[str, Counts] = {}
    faults: list[str] = []
    for line in text.splitlines():
        row = [column.strip() for column in line.strip("|").split("|")] if line.startswith("|") else [""]
        mark = row[0].strip("`")
        if row[0] == "mark":
            faults = row[1:]
        elif mark in SIDES:
            for fault, column in zip(faults, row[1:], strict=True):
                if fault in FAULTS and (numbers := _numbers(column)):
                    cells[mark, fault] = (*numbers, 0)[:4]
        elif row[0] in DIALECTS:
            random[row[0]] = _numbers(" ".join(row[1:]))
        elif len(row) == _WIDTH and row[-1].startswith("`"):
            numbers = _numbers(" ".join(row[1:-1]))
            known = len(numbers) - len(KINDS)
            runs.append(Run(row[0], *numbers[:known], numbers[known:], row[-1].strip("`")))  # type: ignore[arg-type]
    found = re.search(r"marks reached: (.*)$", text, re.MULTILINE)
    reached = frozenset(re.findall(r"`([^`]+)`", found[1])) if found else frozenset()
    failures = tuple(re.findall(r"^```\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE))
    return Told(tuple(runs), cells, random, reached & SIDES.keys(), failures)


def _numbers(text: str) -> Counts:
    return tuple(int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text))


def together(earlier: Told, new: Told) -> Told:
    """Return both as one."""
    cells, random = dict(earlier.cells), dict(earlier.random)
    for name, numbers in new.cells.items():
        cells[name] = _sum(cells.get(name), numbers)
    for dialect, numbers in new.random.items():
        random[dialect] = _sum(random.get(dialect), numbers)
    runs, failures = (*earlier.runs, *new.runs), (*earlier.failures, *new.failures)
    return Told(runs, cells, random, earlier.reached | new.reached, failures)


def earlier_in(path: Path) -> Told:
    """Return what the document at ``path`` tells of earlier runs."""
    return told_in(proof.section_of(path, "task crash"))


def write(path: Path, told: Told, versions: str) -> None:
    """Write the section of the document at ``path``; leave the others."""
    proof.write("task crash", section(told, versions), path)


def section(told: Told, versions: str) -> Iterator[str]:
    """Yield the lines."""
    runs = told.runs

    def total(name: str) -> int:
        return sum(getattr(run, name) for run in runs)

    commits = {run.commit for run in runs}
    yield from ("## Crash tests of tasks", "", INTRODUCTION)
    yield (
        f"- **{total('kills'):,} processes killed with SIGKILL**, in {total('cells'):,} cells of the matrix and at "
        f"random; {total('tasks'):,} tasks, {total('deferrals'):,} deferrals; on {len(commits)} "
        f"commit{'s' * (len(commits) > 1)}"
    )
    found = zip(KINDS, map(sum, zip(*(run.found for run in runs), strict=True)), strict=True)
    yield "- " + ", ".join(f"**{count:,} {kind}**" for kind, count in found)
    yield f"- {total('tries_lost'):,} tries lost to faults, and begun anew; {total('failed'):,} results failed"
    yield f"- {total('dropped'):,} connections dropped; the last run on {versions}"
    yield f"- {len(told.reached)} of {len(SIDES)} marks reached: " + ", ".join(
        f"`{mark}`" for mark in sorted(told.reached)
    )
    yield from ("", RUN_HEAD, "|---" * _WIDTH + "|", *map(str, runs), "")
    yield from ("### Mark of a task by fault", "", MATRIX_INTRODUCTION)
    yield "| mark | " + " | ".join(FAULTS) + " |"
    yield "|---|" + "---|" * len(FAULTS)
    for mark in SIDES:
        yield f"| `{mark}` | " + " | ".join(_cell(told, mark, fault) for fault in FAULTS) + " |"
    yield from ("", "### Random kills among tasks", "")
    yield "| database | kills | tasks | deferrals | tries lost | findings |"
    yield "|---|---|---|---|---|---|"
    for dialect, numbers in sorted(told.random.items()):
        yield f"| {dialect} | " + " | ".join(f"{number:,}" for number in numbers) + " |"
    yield from ("", "### What the marks of tasks mean, and how it is counted", "")
    yield from (f"- `{name}` ({SIDES[name]}): {meaning}" for name, meaning in MEANINGS.items())
    yield from ("", HOW)
    if told.failures:
        yield from ("### What failed among tasks", "")
        for failure in told.failures:
            yield from ("```", failure, "```", "")


def _cell(told: Told, mark: str, fault: Fault) -> str:
    if not any(is_possible(fault, dialect) for dialect in DIALECTS):
        return "-"
    numbers = told.cells.get((mark, fault))
    if numbers is None:
        return "not run"
    *counted, failed = numbers
    text = " / ".join(f"{number:,}" for number in counted)
    return f"{text} **{failed:,} failed**" if failed else text
