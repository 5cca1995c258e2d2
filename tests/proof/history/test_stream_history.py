"""The checker of task streams can fail: bad histories for each finding, written by hand, and good ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.proof.history.stream_history import (
    KINDS,
    Checker,
    Handling,
    LeftBehind,
    Looked,
    Made,
    Part,
    Record,
    Row,
    chain_of,
    check,
    decode_lines,
    encode,
)

T = "dag/run/t"
TOTAL = 4
MADE = Made(T, TOTAL)
AT_REST = Looked(at_rest=True)


def gets(execution: str, place: int, *numbers: int, try_: int = 1, count: int | None = None) -> Handling:
    """A step that gets these numbers at a place, with the state of that place if no other is named."""
    count = place if count is None else count
    return Handling(T, try_, execution, place, count, chain_of(count), numbers)


def row(state: str, handled: int, *, try_: int = 1, waiting: int = 0, **fields: Any) -> Row:
    return Row(T, state, try_, handled, waiting, 3, **fields)


def ended(*parts: tuple[int, int], handled: int = TOTAL, result: Any = None) -> Row:
    """A task that succeeded, with the parts of its committed steps."""
    left = {f"x{index}": Part(first, end, chain_of(end)) for index, (first, end) in enumerate(parts)}
    return row("success", handled, parts=left, result=result or [TOTAL, chain_of(TOTAL)])


GOOD: dict[str, list[Record]] = {
    "two steps": [MADE, gets("x0", 0, 0, 1), row("running", 2), gets("x1", 2, 2, 3), ended((0, 2), (2, 4)), AT_REST],
    "a step that was not committed": [
        *(MADE, gets("x0", 0, 0, 1), row("running", 0), gets("x1", 0, 0, 1, 2, try_=2), gets("x2", 3, 3, try_=2)),
        *(ended((0, 3), (3, 4)), AT_REST),
    ],
    "a step that begins late, because its worker stood still": [
        *(MADE, row("running", 2, try_=2), gets("x9", 0, 0, 1), ended((0, 4)), AT_REST),
    ],
    "as many events as may wait": [MADE, row("running", 0, waiting=3)],
    "a task that goes on": [MADE, row("deferred", 2), Looked()],
}
BAD: dict[str, tuple[str, list[Record]]] = {
    "two committed steps of one event": ("handled twice", [MADE, ended((0, 2), (1, 4)), AT_REST]),
    "the place goes back": ("handled twice", [MADE, row("running", 2), row("running", 1)]),
    "a later try begins in front of the place": (
        "handled twice",
        [MADE, row("up_for_retry", 2), gets("x1", 0, 0, 1, try_=2)],
    ),
    "an event that is stored twice": ("handled twice", [MADE, gets("x0", 0, 0, 1, 1)]),
    "an event that was handled": ("handled twice", [MADE, gets("x0", 2, 1, 2)]),
    "more events than there are": ("handled twice", [MADE, ended((0, 5), handled=5), AT_REST]),
    "a step gets the event behind the next": ("event left out", [MADE, gets("x0", 0, 1, 2)]),
    "a gap in what a step gets": ("event left out", [MADE, gets("x0", 0, 0, 2)]),
    "a gap between committed steps": ("event left out", [MADE, ended((0, 1), (2, 4)), AT_REST]),
    "the last event": ("event left out", [MADE, ended((0, 3), handled=3), AT_REST]),
    "a task that waits for ever": ("event left out", [MADE, row("deferred", 4), AT_REST]),
    "a task that nobody has seen": ("event left out", [MADE, AT_REST]),
    "two events change places": ("out of order", [MADE, gets("x0", 0, 1, 0)]),
    "a state of another place": ("state of another history", [MADE, gets("x0", 2, 2, count=1)]),
    "a state of other events": (
        "state of another history",
        [MADE, Handling(T, 1, "x0", 1, 1, chain_of(2), (1,))],
    ),
    "a committed step with a state of other events": (
        "state of another history",
        [MADE, row("success", 4, parts={"x0": Part(0, 4, "")}, result=[4, chain_of(4)]), AT_REST],
    ),
    "a place that no step has come to": ("state of another history", [MADE, ended((0, 4), handled=3), AT_REST]),
    "a result of another history": ("state of another history", [MADE, ended((0, 4), result=[3, ""]), AT_REST]),
    "more events than may wait": ("beyond its credit", [MADE, row("running", 0, waiting=4)]),
    "a trigger of nobody": ("trigger left behind", [MADE, LeftBehind("7")]),
}


@pytest.mark.parametrize("records", GOOD.values(), ids=GOOD)
def test_nothing_is_found_in_a_good_history(records: list[Record]) -> None:
    assert check(records).findings == ()


@pytest.mark.parametrize(("kind", "records"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_found_and_nothing_else(kind: str, records: list[Record]) -> None:
    assert {finding.kind for finding in check(records).findings} == {kind}


def test_every_kind_has_a_bad_history() -> None:
    assert {kind for kind, _ in BAD.values()} == set(KINDS)


def test_what_was_handled_again_is_counted() -> None:
    report = check(GOOD["a step that was not committed"])
    assert (report.streams, report.events, report.steps, report.repeated) == (1, 4, 3, 2)


def test_a_report_may_be_asked_for_on_the_way() -> None:
    checker = Checker([MADE, row("deferred", 2), AT_REST])
    assert checker.report().count("event left out") == 1
    checker.extend([Looked()])
    assert checker.report().findings == ()


def test_a_task_that_was_never_made_is_refused() -> None:
    with pytest.raises(ValueError, match="never made"):
        check([row("success", 1)])


@pytest.mark.parametrize(("name", "code"), [("two steps", 0), ("the last event", 1)])
def test_the_command_judges_a_file(tmp_path: Path, name: str, code: int) -> None:
    records = GOOD[name] if name in GOOD else BAD[name][1]
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"".join(map(encode, records)))
    assert list(decode_lines(path.read_bytes())) == records
    command = [sys.executable, "-m", "tests.proof.history.stream_history", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("nothing is wrong" in done.stdout) == (code == 0)
