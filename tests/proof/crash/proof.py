"""The sections of ``docs/proof.md`` about the crash tests, written from results by the command and by nobody else.

Ten thousand kills take more than half an hour, so they may be counted in several runs. The document itself is where
the earlier runs are kept: each has a row with its commit, and the tables are sums over all of them.
"""

from __future__ import annotations

import platform
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.proof import document as proof
from tests.proof.crash.campaign import Result, is_possible
from tests.proof.crash.workload import Fault, Workload
from tests.proof.crash.workloads import programs
from tests.proof.crash.workloads.maps import MapWorkload
from tests.proof.crash.workloads.pair import HarmWorkload, PairWorkload
from tests.proof.crash.workloads.signals import SignalWorkload
from tests.proof.crash.workloads.task_streams import StreamWorkload
from tests.proof.crash.workloads.tasks import TaskWorkload
from tests.proof.history import map_history, signal_history, stream_history, task_history

from headgate.testing.crash import history

DIALECTS = ("sqlite", "postgresql")
TITLES = {  # of columns, by the name of the count, where that is no title
    "dropped_busy": "in a transaction",
    "logs": "logs replayed",
    "executions": "steps executed",
    "repeated": "handled by steps that were not committed",
    "tries_lost": "tries lost",
    "passed_over": "put aside",
    "handed_over": "handed over",
}

_TRIES_BY_CELL = """\
A process is held at the mark, the fault is done there, and everything settles. A cell says: runs / tries that the fault
has cost / findings, over all runs on both databases. A dash: SQLite has no connection to drop.
"""

_KILLED = "**{kills} processes killed with SIGKILL**, in {cells} cells of the matrix and at random; "


@dataclass(frozen=True)
class Layout:
    """The layout of one section.

    ``columns`` of the table of runs, ``cells`` of the matrix and ``stretches`` of random kills are names of counts
    (see `_number`). ``subject`` says what there was beside kills, and ``summary`` has the lines after the findings,
    both with the names of counts in braces, and of the ``versions`` of the last run.
    """

    name: str
    workload: type[Workload]
    kinds: tuple[str, ...]
    among: str  # at the end of some headings: each must be the only one of its name in the document
    matrix: str
    marks: str
    introduction: str
    matrix_introduction: str
    how: str
    columns: tuple[str, ...]
    cells: tuple[str, ...]
    stretches: tuple[str, ...]
    subject: str
    summary: tuple[str, ...]

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns of the table of runs that hold numbers: all but the first and the last."""
        return ("minutes", "seed", *self.columns, "failed", *self.kinds)


PAIR = Layout(
    name="crash",
    workload=PairWorkload,
    # A message that is never handed out again is pending, and fails its cell by that: it needs no column of its own.
    kinds=tuple(kind for kind in history.KINDS if kind != "never handed out again"),
    among="",
    matrix="Mark by fault",
    marks="What the marks mean, and how it is counted",
    introduction="""\
Real processes, killed, stopped and cut off from their database, at every mark and at random. Written by `make crash`.
""",
    matrix_introduction="""\
A process is held at the mark, the fault is done there, and everything settles. A cell says: runs / redelivered / lost
/ stored twice, over all runs, with 1 and with 3 subscribers, on each database. A dash: there is no such cell (SQLite
has no connection to drop and no server; where there is no runner none is killed). What is dropped is the connection
that the supervisor has at that moment: it is gone before the held process goes on, and another one serves afterwards.
The server that is restarted (`restart` ends its connections first, `crash` does not) is one of the test's own.
""",
    how="""\
The truth is read from outside: the log files, the file of committed offsets, a journal that the producer keeps of what
it hands out and advances, and the tables, in this order; once while the process stands at the mark or after a random
kill, once when everything has come to rest. `headgate.testing.crash.history` judges it; it imports nothing of
headgate. A mark that is not reached, a pair that does not settle, a dead letter, an orphan, a wrong exit code: each
fails its cell. Every frame is captured meanwhile, and at the end of a campaign its captures are replayed on a fresh
database: one answer that differs fails it.
""",
    columns=("kills", "cells", "events", "redelivered", "dropped", "dropped_busy", "logs", "frames"),
    cells=("runs", "redelivered", "lost", "stored twice", "failed"),
    stretches=("kills", "events", "redelivered", "lost", "stored twice"),
    subject="{events} events written",
    summary=(
        "{redelivered} events redelivered, and recognised",
        "{failed} results failed",
        "{dropped} connections dropped, {dropped_busy} of them in a transaction; "
        "{logs} captures with {frames} frames replayed, every answer compared",
        "the last run on {versions}",
    ),
)
HARM = Layout(
    name="harm crash",
    workload=HarmWorkload,
    kinds=PAIR.kinds,
    among=" among harm",
    matrix="Mark of harm by fault",
    marks="What the marks of harm mean, and how it is counted",
    introduction="""\
The same pair with users' code that does harm: one subscriber cannot take some of the lines, and triggers end the
runner whenever they run. Processes are killed while a message is put aside for that subscriber, or a trigger is
quarantined. Written by `make crash`.
""",
    matrix_introduction="""\
As above: runs / redelivered / lost / stored twice. A line that one subscriber cannot take is lost unless it is stored,
or a whole dead letter, for that subscriber, and stored for the others.
""",
    how="""\
The truth is read and judged as for the pair. At rest every line is stored or put aside for each subscriber, everything
is acknowledged, and every trigger that ended the runner is quarantined.
""",
    columns=("kills", "cells", "events", "redelivered", "passed_over", "quarantined", "dropped"),
    cells=PAIR.cells,
    stretches=("kills", "events", "redelivered", "lost", "stored twice"),
    subject="{events} events written",
    summary=(
        "{passed_over} messages put aside as whole dead letters, {quarantined} triggers quarantined",
        "{failed} results failed; {dropped} connections dropped; the last run on {versions}",
    ),
)
PROGRAMS = Layout(
    name="program crash",
    workload=programs.ProgramWorkload,
    kinds=(*PAIR.kinds, *programs.KINDS),
    among=" among programs",
    matrix="Mark of a program by fault",
    marks="What the marks of programs mean, and how it is counted",
    introduction="""\
The same pair with programs of users beside it: some events are too long and become dead letters, which `headgate dlq
redrive` stores, and a program consumes all events into a table of its own; its code raises now and then. The command,
the program and the pair are killed at every mark of a redrive and of a batch, and at random. Written by `make crash`.
""",
    matrix_introduction="""\
A cell says: runs / letters redriven / events handed over / findings. `kill program` kills the process at the mark.
""",
    how="""\
The truth of the pair is read and judged as above. Each letter that is resolved must have its event, with the same
names, kind and payload, and one record. The table of the user must have the events of each watcher in the order in
which they became visible, each once, at any moment; at rest, all of them, and no letter is open.
""",
    columns=("kills", "cells", "events", "redelivered", "redriven", "handed_over", "dropped"),
    cells=("runs", "redriven", "handed_over", "findings", "failed"),
    stretches=("kills", "events", "redriven", "handed_over", "findings"),
    subject="{events} events written",
    summary=(
        "{redriven} dead letters redriven, {handed_over} events handed over to consumers",
        "{failed} results failed; {dropped} connections dropped; the last run on {versions}",
    ),
)
TASKS = Layout(
    name="task crash",
    workload=TaskWorkload,
    kinds=task_history.KINDS,
    among=" among tasks",
    matrix="Mark of a task by fault",
    marks="What the marks of tasks mean, and how it is counted",
    introduction="""\
A real `headgate up` with tasks that defer, and are resumed, time out, fail, end in their trigger or begin in it; its
workers, its runner and itself killed, stopped and cut off from the database at every mark of the way, and at random.
Written by `make crash`.
""",
    matrix_introduction=_TRIES_BY_CELL,
    how="""\
Tasks and triggers keep one journal of what they are about to do. It is read from outside together with the tables, and
`tests.proof.history.task_history` judges both; its docstring says what is promised. A worker or a supervisor that dies
costs what ran there its try, and the next try does again what was done; the death of a runner, a worker that stands
still and a dropped connection cost none. A mark that is not reached, tasks that do not end, a wrong exit code, workers
that outlive their supervisor: each fails its cell.
""",
    columns=("kills", "cells", "tasks", "executions", "deferrals", "tries_lost", "dropped"),
    cells=("runs", "tries_lost", "findings", "failed"),
    stretches=("kills", "tasks", "deferrals", "tries_lost", "findings"),
    subject="{tasks} tasks, {deferrals} deferrals",
    summary=(
        "{tries_lost} tries lost to faults, and begun anew; {failed} results failed",
        "{dropped} connections dropped; the last run on {versions}",
    ),
)
STREAMS = Layout(
    name="stream crash",
    workload=StreamWorkload,
    kinds=stream_history.KINDS,
    among=" among task streams",
    matrix="Mark of a stream by fault",
    marks="What the marks of task streams mean, and how it is counted",
    introduction="""\
A real `headgate up` with tasks that handle many events of one trigger: as they come, in batches or one by one; from a
trigger that fires its events anew whenever it is started, or goes on after the last one; with a trigger or a handler
that fails in the middle; ended by the trigger, by its last event or by the task. Killed, stopped and cut off as above.
Written by `make crash`.
""",
    matrix_introduction="""\
A process is held at the mark, the fault is done there, and everything settles. A cell says: runs / events that were
handled by a step that was not committed, and handled again / findings, over all runs on both databases. A dash: SQLite
has no connection to drop.
""",
    how="""\
The events are numbers, and the state of each task is a chain of hashes over those that it has handled. Each step
journals what it is given before it handles it, and leaves a value that says how far it came, which is in the database
only if the step is committed. `tests.proof.history.stream_history` judges both, and the rows of streams, which are read
all the time; its docstring says what is promised. At rest, the values of the committed steps are all of the events, end
to end, each once. A mark that is not reached, tasks that do not end, a wrong exit code: each fails its cell.
""",
    columns=("kills", "cells", "streams", "events", "steps", "repeated", "dropped"),
    cells=("runs", "repeated", "findings", "failed"),
    stretches=("kills", "streams", "events", "repeated", "findings"),
    subject="{streams} streams, {events} events handled in {steps} steps",
    summary=(
        "{repeated} events handled by steps that were not committed, and handled again; {failed} results failed",
        "{dropped} connections dropped; the last run on {versions}",
    ),
)

MAPS = Layout(
    name="map crash",
    workload=MapWorkload,
    kinds=map_history.KINDS,
    among=" among mapped tasks",
    matrix="Mark of a mapped task by fault",
    marks="What the marks of mapped tasks mean, and how it is counted",
    introduction="""\
A real `headgate up` with mapped tasks: over values that stand in the file, over a list that a task leaves, over the
output of another map, with windows of two and three, a group of two tasks over a worklist to which several instances
append the same keys, and a task below that is given all results. Killed, stopped and cut off as above. Written by
`make crash`.
""",
    matrix_introduction=_TRIES_BY_CELL,
    how="""\
Each execution journals the values that it is given, and leaves its own name. `tests.proof.history.map_history` holds
both against the tables: each value has one instance, which is given that value and no other and succeeds once, what it
leaves is that of its committed step, and the task below is given all of them in order; a run ends once, and not before
its tasks, which is looked at all the time. Each key that is appended has one instance, whoever has appended it and how
often, and what only a failed try has appended has none; the second task of the group begins at an index after the first
one has ended well there. The tries are judged as those of other tasks. A mark that is not reached, tasks that do not
end, a wrong exit code: each fails its cell.
""",
    columns=("kills", "cells", "instances", "executions", "tries_lost", "dropped"),
    cells=("runs", "tries_lost", "findings", "failed"),
    stretches=("kills", "instances", "tries_lost", "findings"),
    subject="{instances} instances, {executions} steps executed",
    summary=(
        "{tries_lost} tries lost to faults, and begun anew; {failed} results failed",
        "{dropped} connections dropped; the last run on {versions}",
    ),
)

SIGNALS = Layout(
    name="signal crash",
    workload=SignalWorkload,
    kinds=signal_history.KINDS,
    among=" among signals",
    matrix="Mark of a signal by fault",
    marks="What the marks of signals mean, and how it is counted",
    introduction="""\
A real `headgate up` with tasks that send signals at once, for their own run alone, and with their outcomes, also in
tries that fail, and sensors that wait for these, some before they are sent and some afterwards. One task is started by
each of its signals, one by those of which its operator decides so, and one by the time, every second; an endless one
loses its worker in each run, and is moved. Killed, stopped and cut off as above. Written by `make crash`.
""",
    matrix_introduction=_TRIES_BY_CELL,
    how="""\
The log of signals is read all the time, and the journal of those who send beside it; `tests.proof.history.
signal_history` judges both: the versions of a key are there without a gap at any moment, what was acknowledged is
stored once, under the version that was said, what goes with an outcome is stored once if that is and else not at all,
and each sensor has ended once, with the first version that fits, of those that were sent after the creation of its run.
Each signal that is to start a task has started it once, unless its operator could not decide, because its processes
were killed three times, and each time at most once. An endless task has one process at a time, and ends well in its
first try. The tries are judged as those of other tasks. A mark that is not reached, tasks that do not end, a wrong exit
code: each fails its cell.
""",
    columns=("kills", "cells", "signals", "acknowledged", "waits", "executions", "tries_lost", "dropped"),
    cells=("runs", "tries_lost", "findings", "failed"),
    stretches=("kills", "signals", "waits", "tries_lost", "findings"),
    subject="{signals} signals stored, {waits} sensors",
    summary=(
        "{acknowledged} signals acknowledged to steps, in {executions} steps",
        "{tries_lost} tries lost to faults, and begun anew; {failed} results failed",
        "{dropped} connections dropped; the last run on {versions}",
    ),
)

LAYOUTS = {layout.workload: layout for layout in (PAIR, HARM, PROGRAMS, TASKS, STREAMS, MAPS, SIGNALS)}

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """The counts of one command, by name: a row of the first table."""

    ended: str
    numbers: Mapping[str, int]
    commit: str

    def __str__(self) -> str:
        numbers = [f"{number:,}" for number in self.numbers.values()]
        return f"| {' | '.join([self.ended, *numbers])} | `{self.commit}` |"


@dataclass(frozen=True)
class Tally:
    """The content of a section: its runs, the counts of cells by mark and fault, those of random kills by database
    (and subscribers), the marks that were reached, and the texts of the results that failed.
    """

    runs: Sequence[Run] = ()
    cells: Mapping[tuple[str, ...], Counts] = field(default_factory=dict)
    random: Mapping[tuple[str, ...], Counts] = field(default_factory=dict)
    reached: frozenset[str] = frozenset()
    failures: Sequence[str] = ()

    def __add__(self, new: Tally) -> Tally:
        cells, random = dict(self.cells), dict(self.random)
        for name, counts in new.cells.items():
            _add(cells, name, counts)
        for name, counts in new.random.items():
            _add(random, name, counts)
        runs, failures = (*self.runs, *new.runs), (*self.failures, *new.failures)
        return Tally(runs, cells, random, self.reached | new.reached, failures)


def _add(to: dict[tuple[str, ...], Counts], name: tuple[str, ...], counts: Counts) -> None:
    to[name] = tuple(map(sum, zip(to.get(name, (0,) * len(counts)), counts, strict=True)))


# --- from results and documents --------------------------------------------------------------------


def tally_of(results: Sequence[Result], layout: Layout, *, seed: int, took_s: float, commit: str, ended: str) -> Tally:
    """Return the tally of one run."""
    marks = layout.workload.marks

    def number(result: Result, name: str) -> int:
        match name:
            case "runs":
                return 1
            case "cells":
                return int(result.mark in marks)
            case "failed":
                return int(not result.is_good)
            case "findings":
                return len(result.findings)
            case _:
                return result.count(name) if name in layout.kinds else result.counts[name]

    sums = {name: sum(number(result, name) for result in results) for name in layout.numbers}
    run = Run(ended, sums | {"minutes": round(took_s / 60), "seed": seed}, commit)
    cells: dict[tuple[str, ...], Counts] = {}
    random: dict[tuple[str, ...], Counts] = {}
    for result in results:
        if result.mark in marks:
            _add(cells, (result.mark, result.fault), tuple(number(result, name) for name in layout.cells))
        elif result.mark == "random":
            which = (result.dialect, *([str(result.subscribers)] if result.subscribers else []))
            _add(random, which, tuple(number(result, name) for name in layout.stretches))
    reached = frozenset(result.mark for result in results if result.is_reached)
    failures = tuple(f"commit {commit}\n{result}" for result in results if not result.is_good)
    return Tally((run,), cells, random, reached, failures)


def tally_in(text: str, layout: Layout) -> Tally:
    """Return the tally that a section was written from. Marks and faults that no longer exist are left out."""
    runs = []
    cells: dict[tuple[str, ...], Counts] = {}
    random: dict[tuple[str, ...], Counts] = {}
    faults: list[str] = []
    marks, width = layout.workload.marks, len(layout.stretches)
    for line in text.splitlines():
        row = [column.strip() for column in line.strip("|").split("|")] if line.startswith("|") else [""]
        mark = row[0].strip("`")
        if row[0] == "mark":
            faults = row[1:]
        elif mark in marks:
            for fault, column in zip(faults, row[1:], strict=True):
                if fault in layout.workload.faults and (counts := _counts_in(column)):
                    cells[mark, fault] = (*counts, 0)[: len(layout.cells)]
        elif row[0] in DIALECTS:
            random[tuple(row[:-width])] = _counts_in(" ".join(row[-width:]))
        elif len(row) == len(layout.numbers) + 2 and row[-1].startswith("`"):
            numbers = dict(zip(layout.numbers, _counts_in(" ".join(row[1:-1])), strict=True))
            runs.append(Run(row[0], numbers, row[-1].strip("`")))
    reached = re.search(r"marks reached: (.*)$", text, re.MULTILINE)
    names = frozenset(re.findall(r"`([^`]+)`", reached[1])) if reached else frozenset[str]()
    failures = tuple(re.findall(r"^```\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE))
    return Tally(tuple(runs), cells, random, names & marks.keys(), failures)


def _counts_in(text: str) -> Counts:
    return tuple(int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text))


# --- into a document -------------------------------------------------------------------------------


def earlier_in(path: Path, layout: Layout) -> Tally:
    """Return the tally of the earlier runs in the document at ``path``."""
    return tally_in(proof.section_of(path, layout.name), layout)


def write(path: Path, tally: Tally, layout: Layout, versions: str) -> None:
    """Write the section of the document at ``path``; leave the others."""
    proof.write(layout.name, section(tally, layout, versions), path)


def versions(postgres: str, without_server: str) -> str:
    """Return the software that the run used, and what is missing from it."""
    database = f"PostgreSQL {postgres}" if postgres else "without PostgreSQL"
    missing = f"; no server was restarted: {without_server}" if without_server else ""
    return f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {database}{missing}"


def section(tally: Tally, layout: Layout, versions: str) -> Iterator[str]:
    """Yield the lines."""
    workload = layout.workload

    def titles(*names: str) -> str:
        return f"| {' | '.join(TITLES.get(name, name) for name in names)} |"

    commits = len({run.commit for run in tally.runs})
    totals = {name: f"{sum(run.numbers[name] for run in tally.runs):,}" for name in layout.numbers}
    yield from ("## Crash tests" + layout.among.replace("among", "of"), "", layout.introduction)
    yield "- " + (_KILLED + layout.subject).format(**totals) + f"; on {commits} commit{'s' * (commits > 1)}"
    yield "- " + ", ".join(f"**{totals[kind]} {kind}**" for kind in layout.kinds)
    for line in layout.summary:
        yield f"- {line.format(versions=versions, **totals)}"
    reached = ", ".join(f"`{mark}`" for mark in sorted(tally.reached))
    yield f"- {len(tally.reached)} of {len(workload.marks)} marks reached: {reached}"
    yield from ("", titles("ended", *layout.numbers, "commit"), "|---" * (len(layout.numbers) + 2) + "|")
    yield from (*map(str, tally.runs), "")
    yield from (f"### {layout.matrix}", "", layout.matrix_introduction)
    yield titles("mark", *workload.faults)
    yield "|---|" + "---|" * len(workload.faults)
    for mark in workload.marks:
        yield f"| `{mark}` | " + " | ".join(_cell(tally, mark, fault) for fault in workload.faults) + " |"
    by = ("database", "subscribers") if len(workload.subscriber_counts) > 1 else ("database",)
    yield from ("", f"### Random kills{layout.among}", "", titles(*by, *layout.stretches))
    yield "|---" * len((*by, *layout.stretches)) + "|"
    for name, counts in sorted(tally.random.items()):
        yield f"| {' | '.join(name)} | " + " | ".join(f"{count:,}" for count in counts) + " |"
    yield from ("", f"### {layout.marks}", "")
    yield from (f"- `{name}` ({mark.side}): {mark.meaning}" for name, mark in workload.marks.items())
    yield from ("", layout.how)
    if tally.failures:
        yield from (f"### What failed{layout.among}", "")
        for failure in tally.failures:
            yield from ("```", failure, "```", "")


def _cell(tally: Tally, mark: str, fault: Fault) -> str:
    if not any(is_possible(mark, fault, dialect) for dialect in DIALECTS):
        return "-"
    counts = tally.cells.get((mark, fault))
    if counts is None:
        return "not run"
    *shown, failed = counts
    text = " / ".join(f"{count:,}" for count in shown)
    return f"{text} **{failed:,} failed**" if failed else text
