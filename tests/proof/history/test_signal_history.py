"""The checker of signals: it finds nothing in good histories, and in bad ones just what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from tests.proof.history.signal_history import (
    VERSION,
    Acknowledged,
    GaveUp,
    Obeys,
    OwnKind,
    Record,
    Sends,
    Stored,
    Ticks,
    Waited,
    check,
    decode_lines,
    encode,
)
from tests.proof.history.task_records import Began, Ended, Fault, Looked, Made, Row, xcom_key

LOG: list[Record] = [Stored("k", 1, "a", 7), Stored("k", 2, "b", 8), Stored("k", 3, "c", 8)]
TOLD: list[Record] = [Acknowledged("k", "a", 1), Acknowledged("k", "c", 3)]
AT_REST = Looked(at_rest=True)
SENDER: list[Record] = [
    Made("t"),
    *(Began("t", 1, "x", pid=1), Sends("x", "k", "x/0"), Ended("x", "failed")),
    *(Began("t", 2, "y", pid=1), Sends("y", "k", "y/0"), Ended("y", "success")),
    Row("t", "success", 2, {xcom_key(0): "y"}),
]
OF_OUTCOME = Stored("k", 1, "a", "y/0")


def ended_by(*versions: int) -> list[Record]:
    return [Row("s", "success", 0, {VERSION: version}) for version in versions]


OBEYS = Obeys("t", "k", "done", run="d/r1")
PASSES = Obeys("t", "k", "done", run="d/r1", passed=(1,))
ORDERED: list[Record] = [
    *(Stored("k", 1, "a", 0, "d/r1"), Stored("k", 2, "b", 0, "d/r2"), Stored("k", 3, "c", 1, "d/r1")),
    *(OBEYS, Row("t", "skipped", 0), Row("t", "success", 3)),
]
FIRST, SECOND, OTHERS = (
    Stored("done", 1, "x", "d/r1/1"),
    Stored("done", 2, "y", "d/r1/3"),
    Stored("done", 3, "z", "d/r1/2"),
)
AGAIN = Stored("done", 3, "z", "d/r1/3")


GOOD: dict[str, list[Record]] = {
    "nothing": [],
    "a log, and what was acknowledged": [*LOG, *TOLD, *TOLD],
    "a wait that ended with the first that fits": [*LOG, Waited("t", "k", 8, 0, (2,))],
    "a wait of a later run": [*LOG, Waited("t", "k", 8, 2, (3,))],
    "a wait for any": [*LOG, Waited("t", "k", None, 1, (2,))],
    "a wait that may have begun before, or after": [*LOG, Waited("t", "k", 8, 0, (3,), until=2)],
    "a wait beside what is for another run": [
        *(Stored("k", 1, "a", 7, "r1"), Stored("k", 2, "b", 7, "r2")),
        *(Waited("t", "k", 7, 0, (2,), run="r2"), Waited("u", "k", 7, 0, run="r3")),
    ],
    "a sensor as its rows say": [*LOG, Waited("s", "k", 8, 0), Row("s", "deferred", 0), *ended_by(2, 2)],
    "what goes with the outcome of the try that ends well": [OF_OUTCOME, *SENDER, AT_REST],
    "on the way": [Made("t"), Waited("s", "k", 7, 0), LOG[0], *TOLD, Looked()],
    "a task that each signal of its run has started": [*ORDERED, FIRST, SECOND],
    "a task whose operator decides": [*ORDERED[:3], PASSES, GaveUp("t", 1)],
    "a task that signals are to start, on the way": [Made("u"), *ORDERED, FIRST, Looked()],
    "a wait for what was not sent": [*LOG, Waited("t", "k", 9, 0), Waited("u", "k", 7, 1), Waited("v", "j", 7, 0)],
}
BAD: dict[str, tuple[OwnKind, list[Record]]] = {
    "a signal that has not started its task": ("start lost", [*ORDERED, FIRST]),
    "a signal that has started its task against its operator": (
        "started without cause",
        [*ORDERED[:3], PASSES, FIRST, SECOND],
    ),
    "a signal that has started its task twice": ("acted twice", [*ORDERED, FIRST, SECOND, AGAIN]),
    "a signal of another run that has started it": ("started without cause", [*ORDERED, FIRST, SECOND, OTHERS]),
    "a gap": ("version missing", [LOG[0], LOG[2]]),
    "a gap that is closed later": ("version missing", [LOG[0], LOG[2], LOG[1]]),
    "an outcome without its signal": ("version missing", [*SENDER, AT_REST]),
    "two signals of an outcome": ("version twice", [OF_OUTCOME, Stored("k", 2, "b", "y/0"), *SENDER, AT_REST]),
    "a signal of a try that failed": (
        "sent without its outcome",
        [OF_OUTCOME, Stored("k", 2, "b", "x/0"), *SENDER, AT_REST],
    ),
    "a signal of a worker that died": (
        "sent without its outcome",
        [
            *(OF_OUTCOME, Stored("k", 2, "b", "x/0")),
            *(Fault("killed", pid=1) if isinstance(one, Ended) and one.how == "failed" else one for one in SENDER),
            AT_REST,
        ],
    ),
    "a sensor that passed one over": ("not considered", [*LOG, Waited("s", "k", 8, 0), *ended_by(3)]),
    "a sensor that has ended with two": ("considered twice", [*LOG, Waited("s", "k", 8, 0), *ended_by(2, 3)]),
    "a signal for another run": (
        "considered before its time",
        [
            *(Stored("k", 1, "a", 7, "r1"), Waited("t", "k", 7, 0, (1,), run="r2")),
        ],
    ),
    "a wait that passed over what was sent after its run": (
        "not considered",
        [*LOG, Stored("k", 4, "e", 8), Waited("t", "k", 8, 0, (4,), until=2)],
    ),
    "an acknowledged one is gone": ("version missing", [*LOG, Acknowledged("k", "d", 4)]),
    "one version for two": ("version twice", [*LOG, Stored("k", 3, "d", 8)]),
    "two versions for one": ("version twice", [*LOG, Stored("k", 4, "a", 7)]),
    "another version than was said": ("version twice", [*LOG, Acknowledged("k", "a", 2)]),
    "a wait that goes on": ("not considered", [*LOG, Waited("t", "k", 8, 0)]),
    "a wait that passed one over": ("not considered", [*LOG, Waited("t", "k", 8, 0, (3,))]),
    "a version from before the run": ("considered before its time", [*LOG, Waited("t", "k", 7, 1, (1,))]),
    "a version with another value": ("considered before its time", [*LOG, Waited("t", "k", 7, 0, (2,))]),
    "two starts at one time": (
        "acted twice",
        [Stored("k", 1, "a", "d/r1/1"), Stored("k", 2, "b", "d/r1/1"), Ticks("t", "k", "d/r1")],
    ),
    "the time starts nothing": ("start lost", [Stored("k", 1, "a", "d/r2/1"), Ticks("t", "k", "d/r1")]),
    "two ends": ("considered twice", [*LOG, Waited("t", "k", 8, 0, (2, 3))]),
}


@pytest.mark.parametrize("records", GOOD.values(), ids=GOOD)
def test_nothing_is_found_in_a_good_history(records: list[Record]) -> None:
    assert check(records).findings == ()


@pytest.mark.parametrize(("kind", "records"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_found_and_nothing_else(kind: OwnKind, records: list[Record]) -> None:
    report = check(records)
    assert {finding.kind for finding in report.findings} == {kind}
    assert kind in str(report)


def test_every_kind_has_a_bad_history() -> None:
    assert {kind for kind, _ in BAD.values()} == set(get_args(OwnKind))


def test_the_tries_of_those_who_send_are_judged_as_those_of_other_tasks() -> None:
    again = [OF_OUTCOME, *SENDER[:4], Began("t", 2, "z", pid=1), *SENDER[4:], AT_REST]
    assert {finding.kind for finding in check(again).findings} == {"begun twice"}


@pytest.mark.parametrize(("records", "code"), [([OF_OUTCOME, *SENDER, AT_REST], 0), ([*SENDER, AT_REST], 1)])
def test_the_command_judges_a_file(tmp_path: Path, records: list[Record], code: int) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"".join(map(encode, records)))
    assert list(decode_lines(path.read_bytes())) == records
    command = [sys.executable, "-m", "tests.proof.history.signal_history", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("nothing is wrong" in done.stdout) == (code == 0)
