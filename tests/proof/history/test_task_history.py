"""The checker of tasks can fail: bad histories for each finding, written by hand, and good ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.proof.history.task_history import KINDS, Checker, check
from tests.proof.history.task_records import (
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
    encode,
    xcom_key,
)

T = "dag/run/t"
AT_REST = Looked(at_rest=True)


def began(execution: str, number: int = 0, *, after: str = "", event: str | None = None, try_: int = 1) -> Began:
    """A step: of a number above 0 it goes on after ``after``, by the event of that deferral if no other is named."""
    event = after if event is None else event
    return Began(
        T, try_, execution, pid=int(execution[1:]), number=number, after=after, event=event, is_resumed=number > 0
    )


def waits(execution: str, deferral: str, fires: Fires = "event") -> list[Record]:
    return [Deferred(execution, deferral), Waited(deferral), Fired(deferral, fires)]


def row(state: str, try_: int = 1, steps: Sequence[str] = (), **xcoms: str) -> Row:
    return Row(T, state, try_, {xcom_key(number): name for number, name in enumerate(steps)} | xcoms)


def ended(execution: str, how: StepEnd = "success") -> Ended:
    return Ended(execution, how)


START: list[Record] = [Made(T)]
TWICE: list[Record] = [*START, began("x1"), *waits("x1", "d1"), began("x2", 1, after="d1"), *waits("x2", "d2")]

GOOD: dict[str, list[Record]] = {
    "a task that does not defer": [*START, began("x1"), ended("x1"), row("success", steps=["x1"]), AT_REST],
    "two deferrals, with looks between": [
        *TWICE[:4],
        row("deferred", steps=["x1"]),
        Looked(),
        *TWICE[4:],
        began("x3", 2, after="d2"),
        ended("x3"),
        row("success", steps=["x1", "x2", "x3"]),
        AT_REST,
    ],
    "a runner that died: the trigger runs and fires again": [
        *TWICE[:4],
        Waited("d1"),
        Fired("d1"),
        *TWICE[5:6],
        ended("x2"),
        row("success", steps=["x1", "x2"]),
        AT_REST,
    ],
    "a worker that died costs the try": [
        *START,
        began("x1"),
        ended("x1"),
        Fault("killed", pid=1),
        began("x2", try_=2),
        ended("x2"),
        row("success", 2, ["x2"]),
        AT_REST,
    ],
    "a supervisor that died, before what it resumed said a word": [
        *TWICE[:4],
        Fault("killed"),
        began("x2", try_=2),
        ended("x2"),
        row("success", 2, ["x2"]),
        AT_REST,
    ],
    "a step that fails, and the next try": [
        *START,
        began("x1"),
        ended("x1", "failed"),
        row("up_for_retry", steps=["x1"]),
        Looked(),
        began("x2", try_=2),
        ended("x2", "failed for good"),
        row("failed", 2, ["x2"]),
        AT_REST,
    ],
    "ended by its trigger": [
        *START,
        began("x1"),
        *waits("x1", "d1", "success"),
        row("success", steps=["x1"], of_trigger="d1"),
        AT_REST,
    ],
    "failed by its trigger, which is tried again": [
        *START,
        began("x1"),
        *waits("x1", "d1", "failed"),
        began("x2", try_=2),
        *waits("x2", "d2", "skipped"),
        row("skipped", 2, ["x2"]),
        AT_REST,
    ],
    "resumed to fail, and it makes the best of it": [
        *START,
        began("x1"),
        *waits("x1", "d1", "error"),
        began("x2", 1),
        ended("x2"),
        row("success", steps=["x1", "x2"]),
        AT_REST,
    ],
    "begun in its trigger": [
        *START,
        Waited("s1"),
        Fired("s1"),
        began("x1", 1, event="s1"),
        ended("x1"),
        row("success", step_1="x1"),
        AT_REST,
    ],
    "never begun: its trigger rule has decided": [*START, row("upstream_failed", 0), AT_REST],
    "not at rest": [*TWICE, row("deferred", steps=["x1", "x2"]), Looked()],
}

BAD: dict[str, tuple[str, list[Record]]] = {
    "a try that two workers begin": (
        "begun twice",
        [*START, began("x1"), began("x2"), ended("x2"), row("success", steps=["x2"]), AT_REST],
    ),
    "one deferral, two resumptions": (
        "resumed twice",
        [
            *TWICE[:6],
            began("x3", 1, after="d1"),
            ended("x3"),
            row("success", steps=["x1", "x3"]),
            AT_REST,
        ],
    ),
    "resumed by its event, and by its timeout": (
        "resumed twice",
        [*TWICE[:6], began("x3", 1), ended("x3"), row("success", steps=["x1", "x3"]), AT_REST],
    ),
    "one event of a trigger in which tasks began, two steps": (
        "resumed twice",
        [
            *START,
            Fired("s1"),
            began("x1", 1, event="s1"),
            ended("x1", "failed"),
            began("x2", 1, event="s1", try_=2),
            ended("x2"),
            row("success", 2, **{xcom_key(1): "x2"}),
            AT_REST,
        ],
    ),
    "the event of the deferral before": (
        "resumed with another deferral's event",
        [
            *TWICE,
            began("x3", 2, after="d2", event="s9"),
            ended("x3"),
            row("success", steps=["x1", "x2", "x3"]),
            AT_REST,
        ],
    ),
    "a deferral of the try before": (
        "resumed with another deferral's event",
        [
            *START,
            began("x1"),
            Deferred("x1", "d1"),
            Fault("killed", pid=1),
            began("x2", 1, after="d1", try_=2),
            ended("x2"),
            row("success", 2, **{xcom_key(1): "x2"}),
            AT_REST,
        ],
    ),
    "deferred for ever": ("never resumed", [*TWICE[:3], row("deferred", steps=["x1"]), AT_REST]),
    "scheduled for ever": ("never resumed", [*TWICE[:4], row("scheduled", steps=["x1"]), AT_REST]),
    "in no table": ("never resumed", [*START, AT_REST]),
    "its trigger is over, and it waits": (
        "never resumed",
        [*TWICE[:4], Row(T, "deferred", 1, {}, is_stranded=True), Looked()],
    ),
    "a try that waited, and was begun anew": (
        "never resumed",
        [*TWICE[:4], began("x2", try_=2), ended("x2"), row("success", 2, ["x2"]), AT_REST],
    ),
    "an end after the end": (
        "ended twice",
        [
            *START,
            began("x1"),
            ended("x1"),
            row("failed", steps=["x1"]),
            Looked(),
            row("success", steps=["x1"]),
            AT_REST,
        ],
    ),
    "a late answer of the try before": (
        "ended twice",
        [
            *START,
            began("x1"),
            Fault("stopped", pid=1),
            began("x2", try_=2),
            ended("x2"),
            row("success", 2, ["x1"]),
            AT_REST,
        ],
    ),
    "a value of a step that the last try has not": (
        "ended twice",
        [*START, began("x1"), ended("x1"), row("success", steps=["x1", "x9"]), AT_REST],
    ),
    "it succeeded, and the database says that it failed": (
        "lost outcome",
        [*START, began("x1"), ended("x1"), row("failed", steps=["x1"]), AT_REST],
    ),
    "it has not ended, and the database says so": (
        "lost outcome",
        [*START, began("x1"), row("success", steps=["x1"]), AT_REST],
    ),
    "a value is missing": ("lost outcome", [*START, began("x1"), ended("x1"), row("success"), AT_REST]),
    "the value of its trigger is missing": (
        "lost outcome",
        [*START, began("x1"), *waits("x1", "d1", "success"), row("success", steps=["x1"]), AT_REST],
    ),
    "a try too many": (
        "lost outcome",
        [*START, began("x1"), ended("x1"), began("x2", try_=2), ended("x2"), row("success", 2, ["x2"]), AT_REST],
    ),
    "a try too many, while somebody else's worker died": (
        "lost outcome",
        [
            *START,
            began("x1"),
            Fault("killed", pid=7),
            began("x2", try_=2),
            ended("x2"),
            row("success", 2, ["x2"]),
            AT_REST,
        ],
    ),
    "two tries for one fault": (
        "lost outcome",
        [
            *START,
            began("x1"),
            Fault("killed"),
            began("x2", try_=2),
            began("x3", try_=3),
            ended("x3"),
            row("success", 3, ["x3"]),
            AT_REST,
        ],
    ),
    "a fault from before it was made": (
        "lost outcome",
        [Fault("killed"), *START, began("x1"), began("x2", try_=2), ended("x2"), row("success", 2, ["x2"]), AT_REST],
    ),
    "an end in a try that never began": (
        "lost outcome",
        [*START, began("x1"), ended("x1", "failed"), row("success", 2), AT_REST],
    ),
    "a try that the database has forgotten": (
        "lost outcome",
        [*START, began("x1"), ended("x1", "failed"), row("running", 2), Looked(), row("running", 1), Looked()],
    ),
    "a trigger that nothing waits for": ("trigger left behind", [LeftBehind("7", "at rest"), AT_REST]),
}


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD.keys())
def test_nothing_is_found_in_a_good_history(history: list[Record]) -> None:
    assert str(check(history)).endswith("nothing is wrong")


@pytest.mark.parametrize(("kind", "history"), BAD.values(), ids=BAD.keys())
def test_a_bad_history_gives_its_one_finding_with_its_story(kind: str, history: list[Record]) -> None:
    report = check(history)
    assert [finding.kind for finding in report.findings] == [kind], str(report)
    (finding,) = report.findings
    assert finding.story
    assert finding.about in (T, "7")
    assert str(finding).startswith(f"{kind}: {finding.about}: {finding.why}\n    ")


def test_there_is_a_bad_history_for_every_kind_of_finding() -> None:
    assert {kind for kind, _ in BAD.values()} == set(KINDS)


def test_the_story_tells_what_happened_in_the_order_in_which_it_was_seen() -> None:
    (finding,) = check(BAD["the value of its trigger is missing"][1]).findings
    assert finding.story == (
        "made",
        "try 1: x1 begins step 0",
        "try 1: x1 is about to defer: d1",
        "try 1: x1 its trigger runs for d1",
        "try 1: x1 its trigger fires success for d1",
        "the database says: success, try 1",
    )


def test_a_report_may_be_asked_for_while_the_history_goes_on() -> None:
    checker = Checker(GOOD["not at rest"])
    assert checker.report().findings == ()
    checker.add(AT_REST)
    assert [finding.kind for finding in checker.report().findings] == ["never resumed"]


def test_what_faults_have_cost_is_counted() -> None:
    report = check(GOOD["a worker that died costs the try"])
    assert (report.tasks, report.executions, report.deferrals, report.tries_lost) == (1, 2, 0, 1)


@pytest.mark.parametrize(
    "history",
    [
        [began("x1")],
        [*START, *START],
        [*START, began("x1"), began("x1")],
        [*START, Ended("x1", "success")],
        [*START, began("x1"), Deferred("x1", "d"), Deferred("x1", "d")],
        [row("success")],
    ],
)
def test_a_history_that_contradicts_itself_is_refused(history: list[Record]) -> None:
    with pytest.raises(ValueError, match=r"never|twice"):
        check(history)


def test_records_survive_the_way_through_a_file_and_a_torn_line_is_none() -> None:
    histories: Mapping[str, list[Record]] = GOOD
    records = [record for history in histories.values() for record in history]
    assert list(decode_lines(b"".join(map(encode, records)) + b'{"what":"beg')) == records


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"".join(map(encode, GOOD["a task that does not defer"])), 0, "nothing is wrong"),
        (b"".join(map(encode, BAD["deferred for ever"][1])), 1, f"never resumed: {T}"),
        (b'{"what":"gossip"}\n', 2, "line 1"),
    ],
)
def test_the_command_judges_a_file(tmp_path: Path, content: bytes, code: int, words: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(content)
    command = [sys.executable, "-m", "tests.proof.history.task_history", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
