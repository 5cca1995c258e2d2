"""The checker for mapped tasks: every value has one instance, which succeeds once, and what is below sees all of them.

A task is expanded over values that the history names (`Mapped`), to which its instances may append, or over what other
tasks have left; a task of a group, over what the one above it has left at the same index. Each execution
journals the values that it was given (`Given`), and leaves its own name as its result. So the values of a task that is
expanded over another's output are names of executions, and it is known which of them are committed. Like
`tests.proof.history.task_history`, which judges the tries of all instances here, the checker knows nothing of the code
under test, and takes records in the order in which they were *seen*. The findings, beside those of tries:

- ``value left out``: at rest a value has no instance, or one that has not succeeded
- ``instance of no value``: an instance was made, or has begun, and there is no value for it
- ``wrong values``: an instance was given another value than that of its index; or the task below all of them was not
  given the results of all, in the order of their indexes
- ``appended wrongly``: at rest a value that is to be appended has no instance, or two; or what no step that went well
  has appended has one; or the executions of one instance were given different values
- ``begun out of order``: an instance has begun before the one had ended well whose result it is expanded over
- ``lost result``: what an instance has left is not what its committed step has returned
- ``run ended early``: the run has ended, and a task of it had not at that moment
- ``run ended twice``: the run has ended, and ended anew later, or has gone on

::

    python -m tests.proof.history.map_history FILE     the history as JSON lines; exit code 1 if there are findings
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final, Literal, get_args

import msgspec
from tests.proof.history import findings, task_history, task_records
from tests.proof.history.findings import Finding, judge_file
from tests.proof.history.task_records import Began, Ended, Looked, Made, Row, name_of, xcom_key

from headgate.testing.crash import history
from headgate.testing.crash.history import encode as encode

OwnKind = Literal[
    "value left out",
    "instance of no value",
    "wrong values",
    "appended wrongly",
    "begun out of order",
    "lost result",
    "run ended early",
    "run ended twice",
]
Kind = OwnKind | task_history.Kind
KINDS: tuple[Kind, ...] = (*get_args(OwnKind), *task_history.KINDS)
GIVEN: Final = tuple("abcde")  # the values in the DAG file of the crash tests, and what a task of it leaves
LEFT: Final = tuple("opqrstuv")
PAGED: Final = tuple("ABCDEFGHI")  # what a trigger fires, page by page
SEED: Final = ("k0", "k1")  # what a worklist begins with; the instance of each value appends those that it leads to
LINKS: Final = {
    "k0": ("k2", "k3"),
    "k1": ("k2", "k4", "k4"),
    "k2": ("k0", "k5"),
    "k3": ("k5", "k1"),
    "k4": ("k5",),
    "k5": ("k2",),
}
DOOMED: Final = "k3"  # its first try appends what no other does, and fails
NEVER: Final = "never"
RESULT: Final = "return_value"  # the key under which a task leaves the name of its execution


# --- records ---------------------------------------------------------------------------------------


class _Record(msgspec.Struct, frozen=True, tag_field="what", omit_defaults=True):
    """Base of all records. ``at`` is any text that helps a reader."""


class Mapped(_Record, frozen=True, tag="mapped"):
    """A run was made whose task is expanded over ``count`` values: these, or what the mapped task ``of`` leaves.

    So many of the values, the last ones, are ``appended`` by instances, in any order.
    """

    task: str
    count: int
    values: tuple[str, ...] = ()
    of: str = ""
    appended: int = 0
    at: str = ""


class Reduces(_Record, frozen=True, tag="reduces"):
    """A run was made whose task is given all that these mapped tasks have left, one task after the other."""

    task: str
    of: tuple[str, ...]
    at: str = ""


class Given(_Record, frozen=True, tag="given"):
    """The journal of a worker: an execution was given these values."""

    execution: str
    values: tuple[str, ...]
    at: str = ""


class RunRow(_Record, frozen=True, tag="run_row"):
    """A run as the database has it. ``ended_at`` is empty while it goes on; ``unfinished`` tasks have not ended."""

    run: str
    state: str
    ended_at: str = ""
    unfinished: int = 0
    at: str = ""


Record = task_records.Record | Mapped | Reduces | Given | RunRow

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


# Yields the records of whole lines; a last line that a kill tore off is left out. Raises `ValueError`.
decode_lines = partial(history.decode_records, _decoder)


# --- findings --------------------------------------------------------------------------------------


class Report(findings.Report[Kind], frozen=True):
    """What a history shows. ``tries_lost`` are those that a fault has cost."""

    instances: int
    executions: int
    tries_lost: int
    looks: int

    def __str__(self) -> str:
        counts = (
            f"{self.instances:,} instances, {self.executions:,} executions, "
            f"{self.tries_lost:,} tries lost to faults, {self.looks:,} looks"
        )
        return self.text(counts, KINDS)


# --- the checker -------------------------------------------------------------------------------------


class Checker(findings.Checker[Record]):
    """Takes a history record by record; `report` may be asked for at any time, and again later.

    Raises `ValueError` for a record that contradicts the others.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._tries = task_history.Checker()
        self._mapped: dict[str, Mapped] = {}
        self._reduces: dict[str, Reduces] = {}
        self._instances: dict[str, str] = {}  # with their tasks
        self._given: dict[str, tuple[str, ...]] = {}
        self._task_of: dict[str, str] = {}  # by execution
        self._rows: dict[str, Row] = {}
        self._ended_well: set[str] = set()  # instances of which an execution has
        self._runs: dict[str, RunRow] = {}
        self._found: dict[tuple[Kind, str, str], None] = {}
        self._at_rest = False
        self.extend(records)

    def add(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case Mapped():
                self._mapped[record.task] = record
                for index in range(record.count):
                    self._instances[name_of(record.task, index)] = record.task
                    self._tries.add(Made(name_of(record.task, index), at=record.at))
            case Reduces():
                self._reduces[record.task] = record
            case Given():
                self._given[record.execution] = record.values
            case RunRow():
                self._see_run(record)
            case Row() if self._is_known(record.task):
                self._rows[record.task] = record
                xcoms = {key: value for key, value in record.xcoms.items() if key != RESULT}
                self._tries.add(msgspec.structs.replace(record, xcoms=xcoms))
            case Began() if self._is_known(record.task):
                self._task_of[record.execution] = record.task
                self._tries.add(record)
                self._see_order(record)
            case Row() | Began():
                self._find(self._kind_beyond(record.task), record.task, "there is no value for it")
            case Ended() if record.execution not in self._task_of:
                pass  # of an instance of no value
            case Ended():
                self._tries.add(record)
                self._ended_well |= {self._task_of[record.execution]} if record.how == "success" else set()
            case _:
                self._tries.add(record)
        match record:
            case Looked(at_rest=at_rest):
                self._at_rest = at_rest
            case Mapped() | Made():
                self._at_rest = False
            case _:
                pass

    def report(self) -> Report:
        """Return the judgement on the history so far."""
        tries = self._tries.report()
        return Report(
            findings=(*self._of_tries(tries), *self._own()),
            instances=len(self._instances),
            executions=tries.executions,
            tries_lost=tries.tries_lost,
            looks=tries.looks,
        )

    # --- records ----------------------------------------------------------------------------------

    def _is_known(self, task: str) -> bool:
        return "[" not in task or task in self._instances

    def _find(self, kind: Kind, about: str, why: str) -> None:
        self._found[kind, about, why] = None

    def _kind_beyond(self, name: str) -> Kind:
        mapped = self._mapped.get(name.partition("[")[0])
        return "appended wrongly" if mapped is not None and mapped.appended else "instance of no value"

    def _see_order(self, record: Began) -> None:
        mapped = self._mapped.get(self._instances.get(record.task, ""))
        if mapped is None or not mapped.of:
            return
        above = name_of(mapped.of, _index_of(record.task))
        if above not in self._ended_well:
            why = f"{record.execution} has begun, and nothing of {above} had ended well"
            self._find("begun out of order", record.task, why)

    def _see_run(self, record: RunRow) -> None:
        before, self._runs[record.run] = self._runs.get(record.run), record
        if record.ended_at and record.unfinished:
            why = f"it is {record.state}, and {record.unfinished} of its tasks have not ended"
            self._find("run ended early", record.run, why)
        if before is None or not before.ended_at:
            return
        if (record.state, record.ended_at) != (before.state, before.ended_at):
            why = f"it was {before.state} at {before.ended_at}, and is {record.state} at {record.ended_at or 'no time'}"
            self._find("run ended twice", record.run, why)

    # --- findings ---------------------------------------------------------------------------------

    def _of_tries(self, tries: task_history.Report) -> Iterator[Finding[Kind]]:
        for found in tries.findings:
            kind: Kind = found.kind
            if found.about in self._instances and found.about not in self._rows:
                kind = "value left out"
            yield Finding(kind, found.about, found.why, found.story)

    def _own(self) -> Iterator[Finding[Kind]]:
        for kind, about, why in self._found:
            yield Finding(kind, about, why)
        if not self._at_rest:
            return
        for name in self._instances:
            row = self._rows.get(name)
            if row is not None and row.state != "success":
                yield Finding("value left out", name, f"it is {row.state}")
        for name, row in self._rows.items():
            committed = row.xcoms.get(xcom_key(0))
            if self._leaves_its_name(name) and row.state == "success" and row.xcoms.get(RESULT) != committed:
                yield Finding("lost result", name, f"it is {row.xcoms.get(RESULT)}, and should be {committed}")
        for execution, values in self._given.items():
            task = self._task_of.get(execution, "")
            if not self._leaves_its_name(task) or self._is_appended(task):
                continue
            if values != (wanted := self._values_for(task)):
                yield Finding("wrong values", task, f"{execution} was given {values}, and should be given {wanted}")
        for mapped in self._mapped.values():
            yield from self._of_appended(mapped)

    def _of_appended(self, mapped: Mapped) -> Iterator[Finding[Kind]]:
        """Judge the values that the instances of one task have appended, by what those at their indexes were given."""
        first = mapped.count - mapped.appended
        given: dict[str, set[tuple[str, ...]]] = {name_of(mapped.task, n): set() for n in range(first, mapped.count)}
        for execution, values in self._given.items():
            if (name := self._task_of.get(execution, "")) in given:
                given[name].add(values)
        for name, several in given.items():
            if len(several) > 1:
                yield Finding("appended wrongly", name, f"its executions were given {sorted(several)}")
        appended = {(value,) for value in mapped.values[first:]}
        for one in sorted(appended.union(*given.values())):
            wanted, found = int(one in appended), sum(one in several for several in given.values())
            if found != wanted:
                why = f"{one} has {found} instances, and should have {wanted}"
                yield Finding("appended wrongly", mapped.task, why)

    def _is_appended(self, name: str) -> bool:
        mapped = self._mapped.get(self._instances.get(name, ""))
        return mapped is not None and _index_of(name) >= mapped.count - mapped.appended

    def _leaves_its_name(self, name: str) -> bool:
        return name in self._instances or name in self._reduces

    def _values_for(self, name: str) -> tuple[str, ...]:
        """Return the values that every execution of a task should be given."""
        if (reduces := self._reduces.get(name)) is not None:
            return tuple(value for task in reduces.of for value in self._results(task))
        mapped = self._mapped[self._instances[name]]
        values = mapped.values or self._results(mapped.of)
        index = _index_of(name)
        return values[index : index + 1]

    def _results(self, task: str) -> tuple[str, ...]:
        names = [name_of(task, index) for index in range(self._mapped[task].count)]
        return tuple(self._rows[name].xcoms.get(RESULT, "") for name in names if name in self._rows)


def _index_of(name: str) -> int:
    return int(name.rpartition("[")[2][:-1])


def check(records: Iterable[Record]) -> Report:
    """Check a whole history. Raises `ValueError` for one that contradicts itself."""
    return Checker(records).report()


if __name__ == "__main__":
    sys.exit(judge_file(sys.argv[1:], "tests.proof.history.map_history", decode_lines, check))
