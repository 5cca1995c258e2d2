"""The checker of mapped tasks can fail: bad histories for each finding of its own, written by hand, and good ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from tests.proof.history.map_history import (
    RESULT,
    Checker,
    Given,
    Mapped,
    OwnKind,
    Record,
    Reduces,
    RunRow,
    check,
    decode_lines,
    encode,
)
from tests.proof.history.task_records import Began, Ended, Fault, Looked, Made, Row, name_of, xcom_key

RUN = "dag/run"
A, B, SUM = f"{RUN}/a", f"{RUN}/b", f"{RUN}/sum"
F, T = f"{RUN}/group.follow", f"{RUN}/group.taken"
AT_REST = Looked(at_rest=True)
START: list[Record] = [
    *(Made(task) for task in (A, B, SUM)),
    *(Mapped(A, 2, ("v", "w")), Mapped(B, 2, of=A), Reduces(SUM, (B, A))),
]
OWN: list[Record] = [Row(A, "success", 0), Row(B, "success", 0)]
ENDS: list[Record] = [RunRow(RUN, "success", "12:00"), AT_REST]


def step(task: str, execution: str, *values: str, try_: int = 1) -> list[Record]:
    return [Began(task, try_, execution, pid=1), Given(execution, values), Ended(execution, "success")]


def row(task: str, execution: str, *, state: str = "success", try_: int = 1, result: str | None = None) -> Row:
    return Row(task, state, try_, {xcom_key(0): execution, RESULT: execution if result is None else result})


def run_of(task: str, execution: str, *values: str) -> list[Record]:
    return [*step(task, execution, *values), row(task, execution)]


def whole(**instead: Sequence[Record]) -> list[Record]:
    """Return a history in which all goes well, but for the parts that are given."""
    parts: dict[str, Sequence[Record]] = {
        "start": START,
        "a0": run_of(f"{A}[0]", "a0", "v"),
        "a1": run_of(f"{A}[1]", "a1", "w"),
        "b0": run_of(f"{B}[0]", "b0", "a0"),
        "b1": run_of(f"{B}[1]", "b1", "a1"),
        "own": OWN,
        "sum": run_of(SUM, "sum", "b0", "b1", "a0", "a1"),
        "ends": ENDS,
    }
    return [record for part in (parts | instead).values() for record in part]


def grown(**instead: Sequence[Record]) -> list[Record]:
    """Return a history of a group over a worklist, to which ``x`` and ``y`` are appended, but for some parts."""
    parts: dict[str, Sequence[Record]] = {
        "start": [*(Made(task) for task in (F, T)), Mapped(F, 3, ("v", "x", "y"), appended=2), Mapped(T, 3, of=F)],
        "f0": run_of(f"{F}[0]", "f0", "v"),
        "t0": run_of(f"{T}[0]", "t0", "f0"),
        "f1": run_of(f"{F}[1]", "f1", "y"),
        "f2": run_of(f"{F}[2]", "f2", "x"),
        "t1": run_of(f"{T}[1]", "t1", "f1"),
        "t2": run_of(f"{T}[2]", "t2", "f2"),
        "own": [Row(F, "success", 0), Row(T, "success", 0)],
        "ends": ENDS,
    }
    return [record for part in (parts | instead).values() for record in part]


DIED = [*step(f"{F}[1]", "x1", "y"), Fault("killed", pid=1)]
GOOD: dict[str, list[Record]] = {
    "two maps and a sum": whole(),
    "a worker that died: the value is given again": whole(
        a1=[
            *step(f"{A}[1]", "x", "w"),
            Fault("killed", pid=1),
            *step(f"{A}[1]", "a1", "w", try_=2),
            row(f"{A}[1]", "a1", try_=2),
        ]
    ),
    "a group over a worklist": grown(),
    "a worker that died while it appended": grown(
        f1=[*DIED, *step(f"{F}[1]", "f1", "y", try_=2), row(f"{F}[1]", "f1", try_=2)]
    ),
    "on the way": [*START, Row(f"{A}[0]", "scheduled", 0), RunRow(RUN, "running"), Looked()],
}
BAD: dict[str, tuple[OwnKind, list[Record]]] = {
    "an instance that was never made": (
        "value left out",
        whole(b1=[], sum=run_of(SUM, "sum", "b0", "a0", "a1")),
    ),
    "an instance that was skipped": (
        "value left out",
        whole(b1=[Row(f"{B}[1]", "skipped", 0)], sum=run_of(SUM, "sum", "b0", "", "a0", "a1")),
    ),
    "a row beyond the values": ("instance of no value", whole(own=[*OWN, Row(f"{A}[2]", "none", 0)])),
    "a step beyond the values": ("instance of no value", whole(own=[*OWN, *step(f"{A}[2]", "x", "v")])),
    "the value of another": ("wrong values", whole(b1=run_of(f"{B}[1]", "b1", "a0"))),
    "a value of a step that was not committed": ("wrong values", whole(b0=run_of(f"{B}[0]", "b0", "x"))),
    "no value": ("wrong values", whole(a0=run_of(f"{A}[0]", "a0"))),
    "a sum over the first ones": ("wrong values", whole(sum=run_of(SUM, "sum", "b0", "a0", "a1"))),
    "a sum in another order": ("wrong values", whole(sum=run_of(SUM, "sum", "b1", "b0", "a0", "a1"))),
    "a value that is appended twice": ("appended wrongly", grown(f2=run_of(f"{F}[2]", "f2", "y"))),
    "a value that no step has appended": ("appended wrongly", grown(f2=run_of(f"{F}[2]", "f2", "z"))),
    "a value that is appended once more": (
        "appended wrongly",
        grown(own=[Row(F, "success", 0), Row(T, "success", 0), *step(f"{F}[3]", "f3", "x"), row(f"{F}[3]", "f3")]),
    ),
    "another value in the next try": (
        "appended wrongly",
        grown(f1=[*DIED, *step(f"{F}[1]", "f1", "x", try_=2), row(f"{F}[1]", "f1", try_=2)]),
    ),
    "a value from the beginning that is another": ("wrong values", grown(f0=run_of(f"{F}[0]", "f0", "x"))),
    "a task of a group before the one above it": (
        "begun out of order",
        grown(f1=[*step(f"{T}[1]", "t1", "f1"), *run_of(f"{F}[1]", "f1", "y")], t1=[row(f"{T}[1]", "t1")]),
    ),
    "a task of a group after a try that failed": (
        "begun out of order",
        grown(
            f1=[*step(f"{F}[1]", "x1", "y")[:-1], Ended("x1", "failed"), *step(f"{T}[1]", "t1", "f1")],
            f2=run_of(f"{F}[2]", "f2", "x"),
            t1=[*step(f"{F}[1]", "f1", "y", try_=2), row(f"{F}[1]", "f1", try_=2), row(f"{T}[1]", "t1")],
        ),
    ),
    "a result of nobody": (
        "lost result",
        whole(sum=[*step(SUM, "sum", "b0", "b1", "a0", "a1"), row(SUM, "sum", result="x")]),
    ),
    "an end before that of a task": (
        "run ended early",
        whole(ends=[RunRow(RUN, "success", "12:00", unfinished=1), *ENDS]),
    ),
    "an end after the end": ("run ended twice", whole(ends=[*ENDS, RunRow(RUN, "failed", "12:01"), AT_REST])),
    "a run that goes on after its end": ("run ended twice", whole(ends=[*ENDS, RunRow(RUN, "running"), AT_REST])),
}


@pytest.mark.parametrize("records", GOOD.values(), ids=GOOD)
def test_nothing_is_found_in_a_good_history(records: list[Record]) -> None:
    assert check(records).findings == ()


@pytest.mark.parametrize(("kind", "records"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_found_and_nothing_else(kind: str, records: list[Record]) -> None:
    assert {finding.kind for finding in check(records).findings} == {kind}


def test_every_kind_has_a_bad_history() -> None:
    assert {kind for kind, _ in BAD.values()} == set(get_args(OwnKind))


def test_the_tries_of_an_instance_are_judged_as_those_of_other_tasks() -> None:
    twice = whole(a1=[*step(f"{A}[1]", "x", "w"), *run_of(f"{A}[1]", "a1", "w")])
    assert [finding.kind for finding in check(twice).findings] == ["begun twice"]
    again = whole(a1=[*step(f"{A}[1]", "x", "w"), *step(f"{A}[1]", "a1", "w", try_=2), row(f"{A}[1]", "a1", try_=2)])
    assert [finding.kind for finding in check(again).findings] == ["lost outcome"]


def test_what_there_was_is_counted_and_a_report_may_be_asked_for_on_the_way() -> None:
    checker = Checker(GOOD["on the way"])
    assert checker.report().findings == ()
    report = check(GOOD["a worker that died: the value is given again"])
    assert (report.instances, report.executions, report.tries_lost) == (4, 6, 1)
    assert name_of(A, -1) == A


@pytest.mark.parametrize(("name", "code"), [("two maps and a sum", 0), ("no value", 1)])
def test_the_command_judges_a_file(tmp_path: Path, name: str, code: int) -> None:
    records = GOOD[name] if name in GOOD else BAD[name][1]
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"".join(map(encode, records)))
    assert list(decode_lines(path.read_bytes())) == records
    command = [sys.executable, "-m", "tests.proof.history.map_history", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("nothing is wrong" in done.stdout) == (code == 0)
