"""The checker for tasks: what their code and their triggers journalled, held against what the database says of them.

Like `headgate.testing.crash.history` it knows nothing of the code under test, and takes records in the order in which
they
were *seen* (`tests.proof.history.task_records`). What is promised, and so what is found:

- A step of a try (``execute``, and what goes on after each deferral) begins at most once: ``begun twice`` where it is
  the first of a try, ``resumed twice`` where it goes on after a deferral, or where one event resumes two steps.
- It goes on with the event of its own deferral: ``resumed with another deferral's event``.
- What defers goes on: by its event, its failure or its timeout, or its trigger ends it. ``never resumed``: a task at
  rest that has not ended, or is deferred on a trigger that is over, or a try that ended though it waited.
- A task that has ended stays as it is, and an end is one step's: ``ended twice`` where it ends anew, and where an
  earlier try, or another step of the same number, has left a value in it.
- What a step came to is what the database says in the end, values and state: ``lost outcome`` where it is not, and
  where a try is followed by another though it has not failed.
- A trigger goes with what waited for it: ``trigger left behind``.

What is *not* promised is that the body of a task is executed once. A worker or a supervisor that dies costs what ran
there its try, even if the body had come to its end and only the outcome was not stored: the next try begins from
``execute``, and does again whatever was done. Each `Fault` says which tries it may have cost; it costs a task at most
one, and the death of a runner or of a connection costs none.

::

    python -m tests.proof.history.task_history FILE     the history as JSON lines; exit code 1 where something is found
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Final, Literal, assert_never, get_args

from tests.proof.history import findings
from tests.proof.history.findings import TERMINAL, Finding, judge_file
from tests.proof.history.task_records import (
    XCOM_OF_TRIGGER,
    Began,
    Deferred,
    Ended,
    Fault,
    Fired,
    Fires,
    LeftBehind,
    Looked,
    Made,
    Record,
    Row,
    StepEnd,
    Waited,
    decode_lines,
    xcom_key,
)

Kind = Literal[
    "begun twice",
    "resumed twice",
    "resumed with another deferral's event",
    "never resumed",
    "ended twice",
    "lost outcome",
    "trigger left behind",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_STATE_OF: Final[dict[str, str]] = {
    "success": "success",
    "skipped": "skipped",
    "failed": "failed",
    "failed for good": "failed",
}


# --- what is found -----------------------------------------------------------------------------------


class Report(findings.Report[Kind], frozen=True):
    """What a history shows. ``tries_lost`` are those that a fault has cost, ``executions`` calls of authors' code."""

    tasks: int
    executions: int
    deferrals: int
    tries_lost: int
    looks: int

    def __str__(self) -> str:
        counts = (
            f"{self.tasks:,} tasks, {self.executions:,} executions, {self.deferrals:,} deferrals, "
            f"{self.tries_lost:,} tries lost to faults, {self.looks:,} looks"
        )
        return self.text(counts, KINDS)


# --- the checker -------------------------------------------------------------------------------------


class _Try:
    """One try of a task: its executions in the order in which they began."""

    __slots__ = ("deferrals", "executions")

    def __init__(self) -> None:
        self.executions: list[Began] = []
        self.deferrals: list[str] = []


class _Deferral:
    """One deferral: who made it, and what came of it. ``execution`` is empty where a trigger began the task."""

    __slots__ = ("execution", "fires", "has_waited", "resumed_by")

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.has_waited = False
        self.fires: set[Fires] = set()
        self.resumed_by = ""


class _Task:
    """What is known of one task."""

    __slots__ = ("faults_before", "row", "story", "tries")

    def __init__(self, faults_before: int) -> None:
        self.faults_before = faults_before
        self.tries: dict[int, _Try] = {}
        self.row: Row | None = None
        self.story: list[str] = []


class Checker(findings.Checker[Record]):
    """Takes a history record by record; `report` may be asked for at any time, and again later.

    Raises `ValueError` for a record that speaks of a task that was never made, or of an execution that never began.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._tasks: dict[str, _Task] = {}
        self._executions: dict[str, Began] = {}
        self._ends: dict[str, StepEnd] = {}
        self._deferred_by: dict[str, str] = {}  # the deferral of an execution
        self._deferrals: dict[str, _Deferral] = {}
        self._faults: list[Fault] = []
        self._found: list[tuple[Kind, str, str]] = []
        self._left_behind: dict[str, str] = {}
        self._looks = 0
        self._at_rest = False
        self.extend(records)

    def add(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case Made():
                if record.task in self._tasks:
                    raise ValueError(f"the task {record.task!r} is made twice")
                self._tasks[record.task] = task = _Task(len(self._faults))
                task.story.append(f"made{_when(record.at)}")
                self._at_rest = False
            case Began():
                self._begin(record)
            case Deferred():
                self._defer(record)
            case Ended():
                self._ends[self._execution(record.execution).execution] = record.how
                self._tell(record.execution, f"is about to end: {record.how}{_when(record.at)}")
            case Waited():
                deferral = self._deferral(record.deferral)
                deferral.has_waited = True
                self._tell(deferral.execution, f"its trigger runs for {record.deferral}{_when(record.at)}")
            case Fired():
                deferral = self._deferral(record.deferral)
                deferral.fires.add(record.fires)
                self._tell(deferral.execution, f"its trigger fires {record.fires} for {record.deferral}")
            case Fault():
                self._faults.append(record)
            case Row():
                self._see(record)
            case LeftBehind():
                self._left_behind.setdefault(record.trigger, record.at)
            case Looked():
                self._looks += 1
                self._at_rest = record.at_rest
            case _:
                assert_never(record)

    def report(self) -> Report:
        """Say what the history shows so far."""
        lost = [self._unexplained(task) for task in self._tasks.values()]
        return Report(
            findings=tuple(self._findings()),
            tasks=len(self._tasks),
            executions=len(self._executions),
            deferrals=sum(deferral.has_waited for deferral in self._deferrals.values()),
            tries_lost=sum(map(len, lost)),
            looks=self._looks,
        )

    # --- records ----------------------------------------------------------------------------------

    def _task(self, name: str) -> _Task:
        task = self._tasks.get(name)
        if task is None:
            raise ValueError(f"the history speaks of the task {name!r}, which was never made")
        return task

    def _execution(self, name: str) -> Began:
        execution = self._executions.get(name)
        if execution is None:
            raise ValueError(f"the history speaks of the execution {name!r}, which never began")
        return execution

    def _deferral(self, name: str) -> _Deferral:
        """Return a deferral; one that no step has made is of a task that began in its trigger."""
        return self._deferrals.setdefault(name, _Deferral(""))

    def _tell(self, execution: str, words: str) -> None:
        began = self._executions.get(execution)
        if began is not None:
            self._tasks[began.task].story.append(f"try {began.try_number}: {execution} {words}")

    def _find(self, kind: Kind, task: str, why: str) -> None:
        self._found.append((kind, task, why))

    def _begin(self, record: Began) -> None:
        task = self._task(record.task)
        if record.execution in self._executions:
            raise ValueError(f"the execution {record.execution!r} begins twice: names must tell executions apart")
        self._executions[record.execution] = record
        self._tell(record.execution, f"begins step {record.number}{self._by(record)}{_when(record.at)}")
        try_ = task.tries.setdefault(record.try_number, _Try())
        try_.executions.append(record)
        if not record.is_resumed:
            if len(try_.executions) > 1:
                self._find("begun twice", record.task, f"try {record.try_number} by {record.execution}, too")
            return
        if record.after and record.event and record.after != record.event:
            why = f"{record.execution} goes on after {record.after} with the event of {record.event}"
            self._find("resumed with another deferral's event", record.task, why)
        named = {name for name in (record.after, record.event) if name}
        for name in sorted(named or {self._last_deferral(record, try_)}):
            self._resume(record, name)

    def _by(self, record: Began) -> str:
        if not record.is_resumed:
            return ""
        by = f"the event of {record.event}" if record.event else "its failure"
        return f" after {record.after or 'a deferral'}, by {by}"

    def _last_deferral(self, record: Began, try_: _Try) -> str:
        """What is resumed to fail does not know its deferral: it is the last one of its try."""
        if try_.deferrals:
            return try_.deferrals[-1]
        return f"the trigger in which try {record.try_number} of {record.task} began"

    def _resume(self, record: Began, name: str) -> None:
        deferral = self._deferral(name)
        if deferral.resumed_by:
            why = f"after {name}, by {deferral.resumed_by} and by {record.execution}"
            self._find("resumed twice", record.task, why)
        elif deferral.execution and self._execution(deferral.execution).try_number != record.try_number:
            why = f"{record.execution} of try {record.try_number} goes on after {name}, which is of another try"
            self._find("resumed with another deferral's event", record.task, why)
        deferral.resumed_by = record.execution

    def _defer(self, record: Deferred) -> None:
        began = self._execution(record.execution)
        if record.deferral in self._deferrals:
            raise ValueError(f"the deferral {record.deferral!r} is made twice: names must tell deferrals apart")
        self._deferrals[record.deferral] = _Deferral(record.execution)
        self._deferred_by[record.execution] = record.deferral
        self._tasks[began.task].tries[began.try_number].deferrals.append(record.deferral)
        self._tell(record.execution, f"is about to defer: {record.deferral}{_when(record.at)}")

    def _see(self, record: Row) -> None:
        task = self._task(record.task)
        before, task.row = task.row, record
        task.story.append(f"the database says: {record.state}, try {record.try_number}{_when(record.at)}")
        if record.is_stranded:
            self._find("never resumed", record.task, f"deferred on a trigger that is over{_when(record.at)}")
        if before is None:
            return
        if before.state in TERMINAL and (before.state, before.try_number) != (record.state, record.try_number):
            why = f"it had ended in {before.state}, and was {record.state} in try {record.try_number} later"
            self._find("ended twice", record.task, why)
        elif record.try_number < before.try_number:
            why = f"its try {before.try_number} had begun, and was try {record.try_number} later"
            self._find("lost outcome", record.task, why)

    # --- findings ---------------------------------------------------------------------------------

    def _findings(self) -> Iterator[Finding[Kind]]:
        for kind, about, why in self._found:
            yield self._finding(kind, about, why)
        for trigger, at in self._left_behind.items():
            yield Finding("trigger left behind", trigger, f"nothing waits for it{_when(at)}", (f"seen{_when(at)}",))
        for name, task in self._tasks.items():
            for kind, why in self._judge_tries(task):
                yield self._finding(kind, name, why)
            if self._at_rest:
                for kind, why in self._judge_end(task):
                    yield self._finding(kind, name, why)

    def _finding(self, kind: Kind, task: str, why: str) -> Finding[Kind]:
        return Finding(kind, task, why, tuple(self._tasks[task].story))

    def _unexplained(self, task: _Task) -> list[int]:
        """Return the tries that another one followed, though nothing in the journal says that they had failed."""
        last = max([*task.tries, 0 if task.row is None else task.row.try_number], default=0)
        return [number for number in range(1, last) if not self._has_failed(task.tries.get(number))]

    def _has_failed(self, try_: _Try | None) -> bool:
        if try_ is None or not try_.executions:
            return False  # begun in its trigger, maybe, which has a name of its own
        last = try_.executions[-1].execution
        if self._ends.get(last) == "failed":
            return True
        made = self._deferred_by.get(last)
        return made is not None and "failed" in self._deferrals[made].fires

    def _judge_tries(self, task: _Task) -> Iterator[tuple[Kind, str]]:
        """Every try that ended without a failure has to have its fault, and each fault costs one of them."""
        faults = self._faults[task.faults_before :]
        unexplained = self._unexplained(task)
        for index, number in enumerate(unexplained):
            try_ = task.tries.get(number)
            last = try_.executions[-1] if try_ and try_.executions else None
            made = None if last is None else self._deferrals.get(self._deferred_by.get(last.execution, ""))
            waits = made is not None and made.has_waited
            # What goes on after its deferral may do so in another process, which may die before a word is journalled.
            pid = None if last is None or waits else last.pid
            if index < len(faults) and any(pid is None or fault.pid in (0, pid) for fault in faults):
                continue
            if waits:
                yield "never resumed", f"try {number} waited for its trigger, and another try followed"
            else:
                yield "lost outcome", f"try {number} had not failed, and another try followed"

    def _judge_end(self, task: _Task) -> Iterator[tuple[Kind, str]]:
        row = task.row
        if row is None:
            yield "never resumed", "no look has found it in the database"
        elif row.state not in TERMINAL:
            yield "never resumed", f"it is {row.state} for ever"
        elif row.try_number:  # without a try it was decided by its trigger rule
            yield from self._judge_last_try(task, row)

    def _judge_last_try(self, task: _Task, row: Row) -> Iterator[tuple[Kind, str]]:
        last_try = task.tries.get(row.try_number)
        if last_try is None:
            yield "lost outcome", f"it is {row.state} in try {row.try_number}, which never began"
            return
        expected = {xcom_key(began.number): began.execution for began in last_try.executions}
        last = last_try.executions[-1].execution
        made = self._deferrals.get(self._deferred_by.get(last, ""))
        if made is not None:
            states = {_STATE_OF[fires] for fires in made.fires if fires in _STATE_OF}
            if "success" in made.fires:
                expected[XCOM_OF_TRIGGER] = self._deferred_by[last]
        else:
            states = {_STATE_OF[self._ends[last]]} if last in self._ends else set()
        if row.state not in states:
            came_to = " or ".join(sorted(states)) or "nothing"
            yield "lost outcome", f"it is {row.state}, and its last step, {last}, came to {came_to}"
        for key in sorted(expected.keys() | row.xcoms.keys()):
            found, wanted = row.xcoms.get(key), expected.get(key)
            if found is None:
                yield "lost outcome", f"the value {key} of {wanted} is not there"
            elif found != wanted:
                yield "ended twice", f"the value {key} is of {found}, and should be of {wanted or 'nobody'}"


def check(records: Iterable[Record]) -> Report:
    """Check a whole history. Raises `ValueError` for one that contradicts itself."""
    return Checker(records).report()


def _when(at: str) -> str:
    return f" ({at})" if at else ""


if __name__ == "__main__":
    sys.exit(judge_file(sys.argv[1:], "tests.proof.history.task_history", decode_lines, check))
