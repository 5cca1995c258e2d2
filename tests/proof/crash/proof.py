"""The section of ``docs/proof.md`` about the crash tests, written from results by the command and by nobody else.

Ten thousand kills take more than half an hour, so they may be counted in several runs. The document itself is where
the earlier runs are kept: each has a row with its commit, and the tables are sums over all of them.
"""

from __future__ import annotations

import platform
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from tests.proof import document as proof
from tests.proof.crash.campaign import FAULTS, Fault, Result, counts, is_possible

from headgate.protocol.marks import MARKS

DIALECTS = ("sqlite", "postgresql")
KINDS_SHOWN = ("lost", "stored twice", "advanced before stored", "out of lane order", "commit past a failed offset")

INTRODUCTION = """\
Real processes, killed, stopped and cut off from their database, at every mark and at random. Written by `make crash`.
"""
MATRIX_INTRODUCTION = """\
A process is held at the mark, the fault is done there, and everything settles. A cell says: runs / redelivered / lost
/ stored twice, over all runs, with 1 and with 3 subscribers, on each database. A dash: there is no such cell (SQLite
has no connection to drop and no server; where there is no runner none is killed). What is dropped is the connection
that the supervisor has at that moment: it is gone before the held process goes on, and another one serves afterwards.
The server that is restarted (`restart` ends its connections first, `crash` does not) is one of the test's own.
"""
HOW = """\
The truth is read from outside: the log files, the file of committed offsets, a journal that the producer keeps of what
it hands out and advances, and the tables, in this order; once while the process stands at the mark or after a random
kill, once when everything has come to rest. `headgate.testing.crash.history` judges it; it imports nothing of
headgate. A
mark that is not reached, a pair that does not settle, a dead letter, an orphan, a wrong exit code: each fails its
cell. Every frame is captured meanwhile, and at the end of a campaign its captures are replayed on a fresh database:
one answer that differs fails it.
"""


@dataclass(frozen=True)
class Run:
    """What one command counted: a row of the first table, whose columns these are in order."""

    ended: str
    minutes: int
    seed: int
    kills: int
    cells: int
    events: int
    redelivered: int
    dropped: int
    dropped_busy: int
    logs: int
    frames: int
    failed: int
    lost: int
    stored_twice: int
    advanced_early: int
    disordered: int
    passed_over: int
    commit: str

    def __str__(self) -> str:
        values = [getattr(self, field.name) for field in fields(self)]
        shown = [f"{value:,}" if isinstance(value, int) else value for value in values[:-1]]
        return f"| {' | '.join(shown)} | `{self.commit}` |"


RUN_HEAD = (
    "| ended | minutes | seed | kills | cells | events | redelivered | dropped | in a transaction | logs replayed "
    "| frames | failed | " + " | ".join(KINDS_SHOWN) + " | commit |"
)


Counts = tuple[int, ...]
CELL = 5  # runs, redelivered, lost, stored twice, failed
STRETCH = 5  # kills, events, redelivered, lost, stored twice


@dataclass(frozen=True)
class Told:
    """What a document tells: its runs, the counts of cells by mark and fault, of random kills by database and
    subscribers, the marks that were reached, and the texts of what failed.
    """

    runs: Sequence[Run] = ()
    cells: Mapping[tuple[str, str], Counts] = field(default_factory=dict)
    random: Mapping[tuple[str, str], Counts] = field(default_factory=dict)
    reached: frozenset[str] = frozenset()
    failures: Sequence[str] = ()


# --- from results and documents --------------------------------------------------------------------


def told_by(results: Sequence[Result], *, seed: int, took_s: float, commit: str, ended: str) -> Told:
    """Return what one run has to tell."""
    found = counts(list(results))
    failed = [result for result in results if not result.is_good]
    run = Run(
        ended,
        round(took_s / 60),
        seed,
        sum(result.kills for result in results),
        sum(result.mark in MARKS for result in results),
        sum(result.events for result in results),
        sum(result.redelivered for result in results),
        sum(result.dropped for result in results),
        sum(result.dropped_busy for result in results),
        sum(result.logs for result in results),
        sum(result.frames for result in results),
        len(failed),
        *(found[kind] for kind in KINDS_SHOWN),
        commit,
    )
    cells: dict[tuple[str, str], Counts] = {}
    random: dict[tuple[str, str], Counts] = {}
    for result in results:
        bad = (result.count("lost"), result.count("stored twice"))
        if result.mark in MARKS:
            _add(cells, (result.mark, result.fault), (1, result.redelivered, *bad, int(not result.is_good)))
        elif result.mark == "random":
            which = (result.dialect, str(result.subscribers))
            _add(random, which, (result.kills, result.events, result.redelivered, *bad))
    reached = frozenset(result.mark for result in results if result.is_reached)
    return Told((run,), cells, random, reached, tuple(f"commit {commit}\n{result}" for result in failed))


def _add(to: dict[tuple[str, str], Counts], name: tuple[str, str], numbers: Counts) -> None:
    to[name] = tuple(map(sum, zip(to.get(name, (0,) * len(numbers)), numbers, strict=True)))


def told_in(text: str) -> Told:
    """Return what the section of a document tells. Marks and faults that there are no more are left out."""
    runs = []
    cells: dict[tuple[str, str], Counts] = {}
    random: dict[tuple[str, str], Counts] = {}
    faults: list[str] = []
    for line in text.splitlines():
        row = [column.strip() for column in line.strip("|").split("|")] if line.startswith("|") else [""]
        if row[0] == "mark":
            faults = row[1:]
        elif row[0].strip("`") in MARKS:
            for fault, column in zip(faults, row[1:], strict=True):
                if fault in FAULTS and (numbers := _numbers(column)):
                    cells[row[0].strip("`"), fault] = (*numbers, 0)[:CELL]
        elif row[0] in DIALECTS and len(row) == STRETCH + 2:
            random[row[0], row[1]] = _numbers(" ".join(row[2:]))
        elif len(row) == len(fields(Run)) and row[-1].startswith("`"):
            runs.append(Run(row[0], *_numbers(" ".join(row[1:-1])), row[-1].strip("`")))  # type: ignore[arg-type]
    reached = re.search(r"marks reached: (.*)$", text, re.MULTILINE)
    names = frozenset(re.findall(r"`([^`]+)`", reached[1])) if reached else frozenset()
    failures = tuple(re.findall(r"^```\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE))
    return Told(tuple(runs), cells, random, names & MARKS.keys(), failures)


def _numbers(text: str) -> Counts:
    return tuple(int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text))


def together(earlier: Told, new: Told) -> Told:
    """Return both as one."""
    cells, random = dict(earlier.cells), dict(earlier.random)
    for name, numbers in new.cells.items():
        _add(cells, name, numbers)
    for name, numbers in new.random.items():
        _add(random, name, numbers)
    runs, failures = (*earlier.runs, *new.runs), (*earlier.failures, *new.failures)
    return Told(runs, cells, random, earlier.reached | new.reached, failures)


# --- into a document -------------------------------------------------------------------------------


def earlier_in(path: Path) -> Told:
    """Return what the document at ``path`` tells of earlier runs."""
    return told_in(proof.section_of(path, "crash"))


def write(path: Path, told: Told, versions: str) -> None:
    """Write the section of the document at ``path``; leave the others."""
    proof.write("crash", section(told, versions), path)


def versions(postgres: str, without_server: str) -> str:
    """Say what the run ran on, and what is missing from it."""
    database = f"PostgreSQL {postgres}" if postgres else "without PostgreSQL"
    missing = f"; no server was restarted: {without_server}" if without_server else ""
    return f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {database}{missing}"


def section(told: Told, versions: str) -> Iterator[str]:
    """Yield the lines."""
    runs = told.runs

    def total(name: str) -> int:
        return sum(getattr(run, name) for run in runs)

    kinds = [column.name for column in fields(Run)][-len(KINDS_SHOWN) - 1 : -1]
    commits = {run.commit for run in runs}
    yield from ("## Crash tests", "", INTRODUCTION)
    yield (
        f"- **{total('kills'):,} processes killed with SIGKILL**, in {total('cells'):,} cells of the matrix and at "
        f"random; {total('events'):,} events written; on {len(commits)} commit{'s' * (len(commits) > 1)}"
    )
    yield "- " + ", ".join(f"**{total(name):,} {kind}**" for name, kind in zip(kinds, KINDS_SHOWN, strict=True))
    yield f"- {total('redelivered'):,} events redelivered, and recognised"
    yield f"- {total('failed'):,} results failed"
    yield (
        f"- {total('dropped'):,} connections dropped, {total('dropped_busy'):,} of them in a transaction; "
        f"{total('logs'):,} captures with {total('frames'):,} frames replayed, every answer compared"
    )
    yield f"- the last run on {versions}"
    yield f"- {len(told.reached)} of {len(MARKS)} marks reached: " + ", ".join(
        f"`{mark}`" for mark in sorted(told.reached)
    )
    yield from ("", RUN_HEAD, "|---" * len(fields(Run)) + "|", *map(str, runs), "")
    yield from ("### Mark by fault", "", MATRIX_INTRODUCTION)
    yield "| mark | " + " | ".join(FAULTS) + " |"
    yield "|---|" + "---|" * len(FAULTS)
    for mark in MARKS:
        yield f"| `{mark}` | " + " | ".join(_cell(told, mark, fault) for fault in FAULTS) + " |"
    yield from (
        "",
        "### Random kills",
        "",
        "| database | subscribers | kills | events | redelivered | lost | stored twice |",
    )
    yield "|---|---|---|---|---|---|---|"
    for name, numbers in sorted(told.random.items()):
        yield f"| {' | '.join(name)} | " + " | ".join(f"{number:,}" for number in numbers) + " |"
    yield from ("", "### What the marks mean, and how it is counted", "")
    yield from (f"- `{name}` ({mark.side}): {mark.meaning}" for name, mark in MARKS.items())
    yield from ("", HOW)
    if told.failures:
        yield from ("### What failed", "")
        for failure in told.failures:
            yield from ("```", failure, "```", "")


def _cell(told: Told, mark: str, fault: Fault) -> str:
    if not any(is_possible(mark, fault, dialect) for dialect in DIALECTS):
        return "-"
    numbers = told.cells.get((mark, fault))
    if numbers is None:
        return "not run"
    *counted, failed = numbers
    text = " / ".join(f"{number:,}" for number in counted)
    return f"{text} **{failed:,} failed**" if failed else text
