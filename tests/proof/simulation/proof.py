"""The section of ``docs/proof.md`` about the simulation: seeds judged, on which commit, and the mutants found.

A million seeds take hours, so they may be judged in several runs, one after the other or on several days. A row stands
for some thousand seeds of a run, and its commit with it; a run over any of them again takes its place. A row with seeds
that failed is not forgotten over that: it goes on to stand in a table of its own, which counts for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.proof import document as proof
from tests.proof.simulation.families import FamilyName
from tests.proof.simulation.mutants import MUTANTS, Mutant, find
from tests.proof.simulation.tasks.groups.mutants import MUTANTS as GROUP_MUTANTS
from tests.proof.simulation.tasks.mutants import MUTANTS as TASK_MUTANTS
from tests.proof.simulation.tasks.signals.jobs.mutants import MUTANTS as JOB_MUTANTS
from tests.proof.simulation.tasks.signals.mutants import MUTANTS as SIGNAL_MUTANTS
from tests.proof.simulation.tasks.signals.rules.mutants import MUTANTS as RULE_MUTANTS
from tests.proof.simulation.tasks.signals.runs.mutants import MUTANTS as RUN_MUTANTS

_ROW = re.compile(r"\| ([\d,]+) to ([\d,]+) \| ([\d,]+) \| (\d+) \| ([^|]+) \| `([^`]+)` \|")
_FOUND = re.compile(r"^\| ([\w-]+) \| [^|]+ \| ([\d,]+) seeds? \| [\d,]+ seeds \|$", re.MULTILINE)

OF_PAIR = """\
Both halves in one process: the real stream manager, host, session, intake and store, with clock, link, processes and
broker simulated. A seed decides the topology, the workload and the faults. Written by
`make simulate SEEDS=N ARGS=--proof`.
"""
OF_TASKS = """\
The same with tasks, from seeds of their own: the supervisor's part for tasks, the scheduler, the store and the steps of
operators are real; workers, what users do, DAG files and what goes wrong are simulated. Each seed draws DAGs (chains,
diamonds, forks, branches), what each step and each wait of each try does, what users clear, mark, pause and edit, and
the faults. In half of the seeds some tasks take [streams](streaming.md): the seed draws what their triggers fire and
how these end, and what each call of a handler does; each step, each place and each wait is held against a model.
Written by `make simulate SEEDS=N ARGS="--tasks --proof"`.
"""
OF_GROUPS = """\
The same, from seeds of their own, with one DAG each that has a [mapped group, a loop, a worklist or a task that emits
elements](dags.md#groups-loops-and-worklists): with a task outside that one of the group waits for, trigger rules,
windows of 1 to 4, failures, retries and branches at single indexes, keys that repeat, gates that stop sooner or later
in another try, and users who clear and mark single indexes and whole tasks. The checker holds I24, I26 and I27 against
the rows of every transaction. Written by `make simulate SEEDS=N ARGS="--groups --proof"`.
"""
OF_SIGNALS = """\
The same, from seeds of their own, with [signals](signals.md): steps that send at once, with their outcomes and for
their own runs, with dedups that several senders use; sensors for a value or for any, since the run or with the newest
before; steps that listen, with and without a watcher; watchers whose events are signals, and triggers that send; users
who send, sometimes without hearing of it, put events, forget keys, clean, clear and mark. In half of the seeds there is
a DAG whose tasks have [rules](signals.md#starting-restarting-and-stopping-tasks): sufficient and necessary ones that
start, restart and stop, about signals, the ends of other tasks and the time, with each `overlap` and `stopped_as`;
users start, stop and clear these tasks, pause their DAG and end its runs. In a third of the seeds there is one with
tasks whose [operators decide](signals.md#deciding-in-code), sometimes slowly, or after errors and deaths of the process
that they are asked in; with [endless tasks](signals.md#endless-jobs), which lose workers and supervisors, and fail by
themselves; and with tasks that the time starts. In half of the seeds from 5,500 on there is one that has [runs for
signals](signals.md#runs-for-signals), by each contract: some users send with a run unless one is open, rules go on from
the run before, the DAG is paused and may have one run or many, and `end_on` ends some of them. The limits of the log
are low, so that versions are trimmed, and looks and pages end in the middle. The checker holds I25, I28 to I30 and I32
against the rows of every transaction. Written by `make simulate SEEDS=N ARGS="--signals --proof"`.
"""
MUTANTS_INTRODUCTION = """\
Each breaks one promise by a small patch of the real code or of its tables. It has to be found among so many random
seeds from 0 on, or, where only one order of events shows it, by a scenario of its own.
"""


FAILED_BEFORE = "### Failed before"
FAILED_BEFORE_INTRODUCTION = """\
Runs with seeds that failed, and whose place a later run has taken. What they found is in CHANGELOG.md.
"""
_HEADER = ["| seeds | failed | seeds a second | ended | commit |", "|---|---|---|---|---|"]


class Section(NamedTuple):
    """Where the document tells of one family of seeds: its section's name, its heading, and what stands below that."""

    name: str
    heading: str
    introduction: str
    mutants: Mapping[str, Mutant]


SECTIONS: Mapping[FamilyName, Section] = {
    "pair": Section("simulation", "## Simulation", OF_PAIR, MUTANTS),
    "tasks": Section("simulation of tasks", "## Simulation of tasks", OF_TASKS, TASK_MUTANTS),
    "groups": Section("simulation of groups", "## Simulation of groups", OF_GROUPS, GROUP_MUTANTS),
    "signals": Section(
        "simulation of signals",
        "## Simulation of signals",
        OF_SIGNALS,
        SIGNAL_MUTANTS | RULE_MUTANTS | JOB_MUTANTS | RUN_MUTANTS,
    ),
}


def look_for(name: FamilyName, bug: str) -> tuple[str, tuple[int, str] | None]:
    """Return the name of a mutant, and what `find` says of it."""
    return bug, find(SECTIONS[name].mutants[bug], name)


class Run(NamedTuple):
    """Some seeds, from ``first`` to ``last``, judged by one command."""

    first: int
    last: int
    failed: int
    seeds_per_s: int
    ended: str
    commit: str

    def __str__(self) -> str:
        judged = f"{self.first:,} to {self.last:,}"
        return f"| {judged} | {self.failed:,} | {self.seeds_per_s} | {self.ended} | `{self.commit}` |"


class Runs(NamedTuple):
    """The runs that a document tells of: those that count, and those that failed and whose seeds were judged again."""

    counted: list[Run]
    failed_before: list[Run]

    def with_run(self, new: Run) -> Runs:
        """Return the runs in the order of their seeds, ``new`` in place of those of which it judged seeds again."""
        again = [run for run in self.counted if run.first <= new.last and new.first <= run.last]
        failed = [run for run in again if run.failed]
        return Runs(
            sorted([new, *(run for run in self.counted if run not in again)]), sorted([*self.failed_before, *failed])
        )


def runs_in(text: str) -> Runs:
    """Return the runs that a section tells of."""
    counted, _, failed_before = text.partition(FAILED_BEFORE)
    return Runs(_rows(counted), _rows(failed_before))


def found_after(text: str) -> dict[str, int]:
    """Return, of each mutant that random seeds have found, after how many, as a section tells."""
    return {name: _number(seeds) for name, seeds in _FOUND.findall(text)}


def _rows(text: str) -> list[Run]:
    return [
        Run(_number(first), _number(last), _number(failed), int(per_s), ended, commit)
        for first, last, failed, per_s, ended, commit in _ROW.findall(text)
    ]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def section(runs: Runs, found: Mapping[str, tuple[int, str] | None], of: Section) -> list[str]:
    """Return the lines. ``found``: by the name of the mutant, after how many seeds and what it was, or None."""
    counted = runs.counted
    seeds = sum(run.last - run.first + 1 for run in counted)
    commits = {run.commit for run in counted}
    failed_before = (
        [FAILED_BEFORE, "", FAILED_BEFORE_INTRODUCTION, *_HEADER, *map(str, runs.failed_before), ""]
        if runs.failed_before
        else []
    )
    return [
        of.heading,
        "",
        of.introduction,
        f"- **{seeds:,} seeds, {sum(run.failed for run in counted):,} failed**, on {len(commits)} commit"
        + ("s" if len(commits) > 1 else ""),
        f"- **{sum(hit is not None for hit in found.values())} of {len(found)} deliberate bugs found**",
        "",
        *_HEADER,
        *map(str, counted),
        "",
        *failed_before,
        "### Deliberate bugs",
        "",
        MUTANTS_INTRODUCTION,
        "| bug | breaks | found after | among at most |",
        "|---|---|---|---|",
        *(_mutant_row(name, of.mutants[name], hit) for name, hit in found.items()),
    ]


def _mutant_row(name: str, mutant: Mutant, hit: tuple[int, str] | None) -> str:
    limit = f"scenario `{mutant.directed}`" if mutant.directed else f"{mutant.seeds:,} seeds"
    if hit is None:
        return f"| {name} | {mutant.promise} | **not found** | {limit} |"
    after = "its scenario" if mutant.directed else f"{hit[0]:,} seeds" if hit[0] > 1 else "1 seed"
    return f"| {name} | {mutant.promise} | {after} | {limit} |"


def write(
    run: Run | None, found: Mapping[str, tuple[int, str] | None], path: Path, of: Section = SECTIONS["pair"]
) -> None:
    """Add a run, if there was one, to its section of the document, with what is known of the mutants now."""
    runs = runs_in(proof.section_of(path, of.name))
    proof.write(of.name, section(runs if run is None else runs.with_run(run), found, of), path)
