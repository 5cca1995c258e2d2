"""The checker of signals: each that was sent has its one version, ends a wait that it fits, and starts what it should.

Senders say what was acknowledged to them (`Acknowledged`), and steps what they are about to send with their outcome
(`Sends`); the log of the keys is read (`Stored`), and the waits of sensors (`Waited`) are held against it. A history of
processes that are killed has the tries of tasks as well, which `tests.proof.history.task_history` judges; one without
any look is at rest. The checker knows nothing of the code under test. The findings, beside those of tries:

- ``version missing``: a version was seen, and one below it was not there; or a signal is not stored that was
  acknowledged, or that a committed step has sent with its outcome
- ``version twice``: a version was given to two signals, or a signal has two versions
- ``sent without its outcome``: a signal is stored, and the outcome that it should go with is not
- ``not considered``: a wait is open, or has ended with a later version, though one fits that was sent since its run
- ``considered before its time``: a wait has ended with a version from before its run, or with one that does not fit
- ``considered twice``: a wait has ended more than once
- ``start lost``: a task that each signal of its run should start was not started by one that was sent before its end,
  and is not one about which the task's operator could not decide, because its processes were killed
- ``acted twice``: one signal has started it twice, and both steps have ended
- ``started without cause``: it was started by a version that was not sent for its run
- of an endless task, by their names for tries: ``begun twice`` if two processes had it at once, ``lost outcome`` if it
  has lost a try, or has not ended well, ``never resumed`` if it has not ended

::

    python -m tests.proof.history.signal_history FILE     the history as JSON lines; exit code 1 if there are findings
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final, Literal, get_args

import msgspec
from tests.proof.history import findings, task_history, task_records
from tests.proof.history.findings import TERMINAL, Finding, judge_file
from tests.proof.history.task_records import Began, Looked, Made, Row, xcom_key

from headgate.testing.crash import history
from headgate.testing.crash.history import encode as encode

OwnKind = Literal[
    "version missing",
    "version twice",
    "sent without its outcome",
    "not considered",
    "considered before its time",
    "considered twice",
    "start lost",
    "acted twice",
    "started without cause",
]
Kind = OwnKind | task_history.Kind
KINDS: tuple[Kind, ...] = (*get_args(OwnKind), *task_history.KINDS)
VERSION: Final = "version"  # the XCom of a sensor
# What tasks of the crash tests send at once, for their own run alone, and with their outcomes.
NOW, OWN, OUTCOME = "now", "own", "outcome"
ORDERS, OBEYED = "orders", "obeyed"  # what starts a task, and what that tells with its outcome
TICKED = "ticked"  # the same of a task that the time starts
DECIDED = "decided"  # the same of a task whose operator decides about what starts it
STARTED = "started"  # what a run tells with an outcome that each signal under `NOW` has, unless it is `NOT_STARTING`
NOT_STARTING: Final = (1, 2, 3)
PASSED: Final = (1,)  # the values that it has start nothing
# The sensors there, each with its key and the value that it waits for; None is any.
WAITS: Final[dict[str, tuple[str, int | str | None]]] = {
    "hears": (NOW, 3),
    "hears_late": (NOW, 1),  # it begins when that is sent
    "hears_own": (OWN, "own"),
    "hears_any": (OUTCOME, None),
}

Value = int | str | None


# --- records ---------------------------------------------------------------------------------------


class _Record(msgspec.Struct, frozen=True, tag_field="what", omit_defaults=True):
    """Base of all records."""


class Acknowledged(_Record, frozen=True, tag="acknowledged"):
    """A sender was told that its signal, named by its ``dedup``, has this version of the key."""

    key: str
    dedup: str
    version: int


class Sends(_Record, frozen=True, tag="sends"):
    """The journal of a worker: a step is about to send a value, which no other step sends, with its outcome."""

    execution: str
    key: str
    value: str


class Stored(_Record, frozen=True, tag="stored"):
    """A version as it was seen, after those that were seen before; ``run`` is set if it is for one run alone."""

    key: str
    version: int
    dedup: str
    value: Value
    run: str = ""


class Waited(_Record, frozen=True, tag="signal_wait"):
    """A wait for ``value``, or for any (None), of versions above ``since``. ``ended_with`` are those that ended it.

    If ``until`` is set, it is not known from which version on, between ``since`` and that, those count for it. ``run``
    is its own run.
    """

    task: str
    key: str
    value: Value
    since: int
    ended_with: tuple[int, ...] = ()
    until: int = 0
    run: str = ""


class Obeys(_Record, frozen=True, tag="obeys"):
    """A task that each signal under ``key``, for its ``run`` alone, is to start.

    With the outcome of each start it sends a signal under ``told``: its run, a slash, and the version that started it.
    Its operator may decide that those with one of the values ``passed`` start nothing.
    """

    task: str
    key: str
    told: str
    run: str
    passed: tuple[Value, ...] = ()


class Endures(_Record, frozen=True, tag="endures"):
    """A task that is to end well whatever happens to its workers, with an ``is_endless`` one in its first try."""

    task: str
    is_endless: bool = True


class Ticks(_Record, frozen=True, tag="ticks"):
    """A task that the time starts every so often, for the first time with its ``run``.

    With the outcome of each start it sends a signal under ``told``: its run, a slash, and how often it was time.
    """

    task: str
    told: str
    run: str


class Lives(_Record, frozen=True, tag="lives"):
    """The journal of a worker: an endless task begins, and has found that its last process is still there, or not."""

    task: str
    pid: int
    is_alone: bool


class GaveUp(_Record, frozen=True, tag="gave_up"):
    """The operator of a task could not decide about this version: it starts nothing."""

    task: str
    version: int


Record = task_records.Record | Acknowledged | Sends | Stored | Waited | Obeys | GaveUp | Endures | Lives | Ticks

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


# Yields the records of whole lines; a last line that a kill tore off is left out. Raises `ValueError`.
decode_lines = partial(history.decode_records, _decoder)


# --- findings --------------------------------------------------------------------------------------


class Report(findings.Report[Kind], frozen=True):
    """What a history of signals shows. ``tries_lost`` are those that a fault has cost."""

    acknowledged: int = 0
    stored: int = 0
    waits: int = 0
    executions: int = 0
    tries_lost: int = 0

    def __str__(self) -> str:
        counts = (
            f"{self.acknowledged:,} acknowledged, {self.stored:,} stored, {self.waits:,} waits, "
            f"{self.tries_lost:,} tries lost to faults"
        )
        return self.text(counts, KINDS)


# --- the checker -----------------------------------------------------------------------------------


class Checker(findings.Checker[Record]):
    """Takes a history record by record; `report` may be asked for at any time, and again later.

    Raises `ValueError` as the checker of tasks does.
    """

    def __init__(self) -> None:
        self._tries = task_history.Checker()
        self._acknowledged: list[Acknowledged] = []
        self._sends: list[Sends] = []
        self._stored: dict[str, list[Stored]] = {}
        self._waits: dict[str, Waited] = {}
        self._obeying: dict[str, Obeys] = {}
        self._given_up: dict[str, set[int]] = {}  # versions, by task
        self._ended_with: dict[str, dict[int, None]] = {}  # by the task of a wait
        self._enduring: dict[str, tuple[Endures, Row | None]] = {}
        self._ticking: dict[str, Ticks] = {}
        self._task_of: dict[str, str] = {}  # by execution
        self._rows: dict[str, Row] = {}
        self._gaps: list[Finding[Kind]] = []
        self._at_once: list[Finding[Kind]] = []
        self._at_rest = True

    def add(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case Acknowledged():
                self._acknowledged.append(record)
            case Sends():
                self._sends.append(record)
            case Stored():
                self._see(record)
            case Waited():
                self._waits[record.task] = record
                self._ended_with[record.task] = dict.fromkeys(record.ended_with)
            case Obeys():
                self._obeying[record.task] = record
            case Endures():
                self._enduring[record.task] = (record, None)
            case Ticks():
                self._ticking[record.task] = record
            case Lives():
                if not record.is_alone:
                    why = f"the process {record.pid} has it, and the one before still had"
                    self._at_once.append(Finding("begun twice", record.task, why))
            case Row() if record.task in self._enduring:
                self._enduring[record.task] = (self._enduring[record.task][0], record)
            case GaveUp():
                self._given_up.setdefault(record.task, set()).add(record.version)
            case Row() if record.task in self._obeying or record.task in self._ticking:
                pass  # it begins anew with each start, which no other task does
            case Row() if record.task in self._waits:
                if (version := record.xcoms.get(VERSION)) is not None:
                    self._ended_with[record.task][version] = None
            case _:
                self._take_of_tries(record)

    def report(self) -> Report:
        """Return the judgement on the history so far."""
        tries = self._tries.report()
        stored = sum(map(len, self._stored.values()))
        found = (*tries.findings, *self._gaps, *self._at_once, *(self._own() if self._at_rest else ()))
        return Report(found, len(self._acknowledged), stored, len(self._waits), tries.executions, tries.tries_lost)

    # --- records ----------------------------------------------------------------------------------

    def _see(self, record: Stored) -> None:
        rows = self._stored.setdefault(record.key, [])
        newest = max((row.version for row in rows), default=0)
        if record.version > newest + 1:
            why = f"version {record.version:,} was there, and version {newest + 1:,} was not"
            self._gaps.append(Finding("version missing", record.key, why))
        rows.append(record)

    def _take_of_tries(self, record: task_records.Record) -> None:
        match record:
            case Began():
                self._task_of[record.execution] = record.task
            case Row():
                self._rows[record.task] = record
            case Looked():
                self._at_rest = record.at_rest
            case Made():
                self._at_rest = False
            case _:
                pass
        self._tries.add(record)

    # --- findings ---------------------------------------------------------------------------------

    def _own(self) -> Iterator[Finding[Kind]]:
        for key, rows in sorted(self._stored.items()):
            yield from _of_key(key, rows)
        yield from self._of_senders()
        yield from self._of_outcomes()
        for wait in self._waits.values():
            yield from of_wait(wait, tuple(self._ended_with[wait.task]), self._stored.get(wait.key, []))
        for obeys in self._obeying.values():
            rows = [row for row in self._stored.get(obeys.key, []) if row.run == obeys.run]
            sent = {row.version for row in rows if row.value not in obeys.passed}
            sent -= self._given_up.get(obeys.task, set())
            yield from _of_starts(obeys, sent, self._stored.get(obeys.told, []))
        for ticks in self._ticking.values():
            yield from _of_ticks(ticks, self._stored.get(ticks.told, []))
        for task, (endures, row) in self._enduring.items():
            if row is None or row.state not in TERMINAL:
                yield Finding("never resumed", task, f"it is {'nowhere' if row is None else row.state} for ever")
            elif row.state != "success" or (endures.is_endless and row.try_number > 1):
                yield Finding("lost outcome", task, f"it is {row.state} in try {row.try_number}")

    def _of_senders(self) -> Iterator[Finding[Kind]]:
        versions = {(row.key, row.dedup): row.version for rows in self._stored.values() for row in rows}
        for said in self._acknowledged:
            version = versions.get((said.key, said.dedup))
            if version is None:
                yield Finding("version missing", said.key, f"{said.dedup} was acknowledged, and is not stored")
            elif version != said.version:
                why = f"{said.dedup} was acknowledged as version {said.version}, and is version {version}"
                yield Finding("version twice", said.key, why)

    def _of_outcomes(self) -> Iterator[Finding[Kind]]:
        for said in self._sends:
            row = self._rows.get(self._task_of.get(said.execution, ""))
            is_committed = row is not None and row.xcoms.get(xcom_key(0)) == said.execution
            count = sum(stored.value == said.value for stored in self._stored.get(said.key, ()))
            if not is_committed and count:
                yield Finding("sent without its outcome", said.key, f"{said.value} is stored, and its outcome is not")
            elif is_committed and count == 0:
                yield Finding("version missing", said.key, f"{said.value} is not stored, and its outcome is")
            elif is_committed and count > 1:
                yield Finding("version twice", said.key, f"{said.value} has {count} versions")


def _of_key(key: str, rows: list[Stored]) -> Iterator[Finding[Kind]]:
    if len({row.version for row in rows}) < len(rows):
        yield Finding("version twice", key, "two signals have the same version")
    if len({row.dedup for row in rows}) < len(rows):
        yield Finding("version twice", key, "one signal has two versions")


def _told(run: str, rows: list[Stored]) -> Counter[int]:
    """Return how often each version has started a task of a run, by what that has told."""
    told = [str(row.value).rpartition("/") for row in rows]
    return Counter(int(version) for of_run, _, version in told if of_run == run)


def _of_ticks(ticks: Ticks, rows: list[Stored]) -> Iterator[Finding[Kind]]:
    starts = _told(ticks.run, rows)
    if not starts:
        yield Finding("start lost", ticks.task, "the time has not started it")
    for version, count in sorted(starts.items()):
        if count > 1:
            yield Finding("acted twice", ticks.task, f"time {version} has started it {count} times")


def _of_starts(obeys: Obeys, sent: set[int], rows: list[Stored]) -> Iterator[Finding[Kind]]:
    starts = _told(obeys.run, rows)
    for version in sorted(sent - starts.keys()):
        yield Finding("start lost", obeys.task, f"version {version} was sent, and has not started it")
    for version, count in sorted(starts.items()):
        if version not in sent:
            yield Finding("started without cause", obeys.task, f"version {version} was not sent for its run")
        elif count > 1:
            yield Finding("acted twice", obeys.task, f"version {version} has started it {count} times")


def fitting(wait: Waited, rows: Iterable[Stored]) -> list[int]:
    """Return the versions that may end a wait, the first one in front."""
    return sorted(
        row.version
        for row in rows
        if row.version > wait.since and wait.value in (None, row.value) and row.run in ("", wait.run)
    )


def of_wait(wait: Waited, ended_with: tuple[int, ...], rows: Iterable[Stored]) -> Iterator[Finding[Kind]]:
    """Yield what is wrong with a wait that these versions have ended: of all ``rows`` of its key that it could see."""
    fits = fitting(wait, rows)
    # The first that fits; of those that may have been sent before the run or after it, each may be the first.
    firsts = [version for n, version in enumerate(fits) if n == 0 or fits[n - 1] <= wait.until]
    if len(ended_with) > 1:
        yield Finding("considered twice", wait.task, f"it was ended by versions {ended_with}")
    elif not ended_with:
        if fits and fits[-1] > wait.until:
            yield Finding("not considered", wait.task, f"version {firsts[-1]} fits, and it waits still")
    elif ended_with[0] not in fits:
        why = f"version {ended_with[0]} has ended it, which does not count for it"
        yield Finding("considered before its time", wait.task, why)
    elif ended_with[0] not in firsts:
        yield Finding("not considered", wait.task, f"version {firsts[-1]} fits, and version {ended_with[0]} ended it")


def check(records: Iterable[Record]) -> Report:
    """Judge a whole history. Raises `ValueError` for one that contradicts itself."""
    checker = Checker()
    checker.extend(records)
    return checker.report()


if __name__ == "__main__":
    sys.exit(judge_file(sys.argv[1:], "tests.proof.history.signal_history", decode_lines, check))
