"""The checker can fail: one bad history for each finding, written by hand, and good ones in which it finds nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headgate.testing.crash.history import (
    KINDS,
    Advanced,
    AdvancedItem,
    Checker,
    Committed,
    Forgotten,
    HandedOut,
    Looked,
    Published,
    PutAside,
    Record,
    Stored,
    Subscribed,
    check,
    decode_lines,
    encode,
)

AT_REST = Looked(at_rest=True)


def clean(*events: str, reader: str = "r1", lane: str = "p0") -> Advanced:
    return Advanced(lane, reader, tuple(AdvancedItem(event, 1, 0, 0) for event in events))


def failed(*events: str, reader: str = "r1", lane: str = "p0") -> Advanced:
    return Advanced(lane, reader, tuple(AdvancedItem(event, 0, 1, 0) for event in events))


def handed(*events: str, reader: str = "r1", lane: str = "p0") -> list[Record]:
    return [HandedOut(event, lane, reader) for event in events]


def stored(*events: str, subscriber: str = "s") -> list[Record]:
    return [Stored(event, subscriber, f"{event}/{subscriber}") for event in events]


START: list[Record] = [Subscribed("s"), *(Published(f"e{n}", "p0", n * 10) for n in range(3))]
ALL = ("e0", "e1", "e2")
PLAIN: list[Record] = [*START, *handed(*ALL), Committed("p0", 30), clean(*ALL), *stored(*ALL), AT_REST]

GOOD: dict[str, list[Record]] = {
    "everything once": PLAIN,
    "a redelivery that is stored once": [
        *START,
        *handed(*ALL),
        clean("e0"),
        *stored(*ALL),
        Looked(),
        *handed(*ALL, reader="r2"),
        clean(*ALL, reader="r2"),
        Looked(),
        Committed("p0", 30),
        AT_REST,
    ],
    "a failed event that comes again, with what follows it": [
        *START,
        *handed(*ALL),
        clean("e0"),
        failed("e1"),
        clean("e2"),
        *stored("e0", "e2"),
        Looked(),
        Committed("p0", 10),
        *handed("e1", "e2"),
        clean("e1", "e2"),
        *stored("e1"),
        Looked(),
        Committed("p0", 30),
        AT_REST,
    ],
    "one event for two positions, and one put aside": [
        *START,
        *handed(*ALL),
        clean(*ALL),
        *stored("e0", "e1"),
        Stored("e1", "s", "9", position=1),
        PutAside("e2", "s"),
        Committed("p0", 30),
        AT_REST,
    ],
    "a refused event that is stored nowhere": [
        *START,
        *handed(*ALL),
        Advanced("p0", "r1", (AdvancedItem("e0", 0, 0, 1), AdvancedItem("e1", 1, 0, 0), AdvancedItem("e2", 1, 0, 0))),
        Committed("p0", 30),
        *stored("e1", "e2"),
        AT_REST,
    ],
    "lanes that do not wait for one another": [
        Subscribed("s"),
        Published("a0", "a", 0),
        Published("b0", "b", 0),
        *handed("a0", lane="a"),
        *handed("b0", lane="b"),
        clean("b0", lane="b"),
        clean("a0", lane="a"),
        *stored("a0", "b0"),
        AT_REST,
    ],
    "an event that no subscriber should store": [*START, Published("e3", "p0", 30, ()), *PLAIN[4:-1], AT_REST],
    "a run that is not at rest": [*START, *handed("e0"), Looked()],
}

BAD: dict[str, tuple[str, str, Sequence[Record]]] = {
    "committed and in no table": (
        "lost",
        "e1",
        [*START, *handed(*ALL), clean(*ALL), Committed("p0", 30), *stored("e0", "e2"), AT_REST],
    ),
    "at rest and never handed out": (
        "lost",
        "e2",
        [*START, *handed("e0", "e1"), clean("e0", "e1"), *stored("e0", "e1"), AT_REST],
    ),
    "a broker that forgets message by message": (
        "lost",
        "e0",
        [*START[:2], *handed("e0"), clean("e0"), Forgotten("e0"), AT_REST],
    ),
    "lost for one of two": (
        "lost",
        "e0",
        [Subscribed("s"), Subscribed("t"), Published("e0", "p0", 0), *handed("e0"), *stored("e0"), AT_REST],
    ),
    "two rows": ("stored twice", "e1", [*PLAIN[:-1], *stored("e1"), AT_REST]),
    "advanced at a look without its row": (
        "advanced before stored",
        "e1",
        [*START, *handed(*ALL), clean(*ALL), *stored("e0", "e2"), Looked(), *stored("e1"), AT_REST],
    ),
    "forgotten at a look without its row": (
        "advanced before stored",
        "e0",
        [*START[:2], Forgotten("e0"), Looked(), *handed("e0"), *stored("e0"), AT_REST],
    ),
    "an advance that skips one": (
        "out of lane order",
        "e2",
        [*START, *handed(*ALL), clean("e0", "e2", "e1"), *stored(*ALL), AT_REST],
    ),
    "an advance of what was never handed out": (
        "out of lane order",
        "e1",
        [*START, *handed("e0"), clean("e0", "e1"), *stored(*ALL), AT_REST],
    ),
    "an advance by an order of another reader": (
        "out of lane order",
        "e1",
        [*START, *handed("e0", "e1"), *handed("e0", reader="r2"), clean("e1", reader="r2"), *stored(*ALL), AT_REST],
    ),
    "a cumulative commit over a failure": (
        "commit past a failed offset",
        "e1",
        [*START, *handed(*ALL), clean("e0"), failed("e1"), clean("e2"), Committed("p0", 30), *stored(*ALL), AT_REST],
    ),
    "a failure that its reader forgets": (
        "never handed out again",
        "e1",
        [*START, *handed(*ALL), clean("e0"), failed("e1"), clean("e2"), *stored(*ALL), AT_REST],
    ),
    "a commit over what nobody resolved": (
        "commit past a failed offset",
        "e2",
        [*START, *handed(*ALL), clean("e0", "e1"), Committed("p0", 30), *stored(*ALL), AT_REST],
    ),
}


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD.keys())
def test_nothing_is_found_in_a_good_history(history: list[Record]) -> None:
    assert str(check(history)).endswith("nothing is wrong")


@pytest.mark.parametrize(("kind", "event", "history"), BAD.values(), ids=BAD.keys())
def test_a_bad_history_gives_its_one_finding_with_the_event_and_its_story(
    kind: str, event: str, history: Sequence[Record]
) -> None:
    report = check(history)
    assert [(finding.kind, finding.event) for finding in report.findings] == [(kind, event)]
    (finding,) = report.findings
    assert finding.story
    assert str(finding).splitlines()[0].startswith(f"{kind}: {event}")


def test_there_is_a_bad_history_for_every_kind_of_finding() -> None:
    assert {kind for kind, _, _ in BAD.values()} == set(KINDS)


def test_the_story_tells_what_happened_in_the_order_in_which_it_was_seen() -> None:
    (finding,) = check(BAD["a cumulative commit over a failure"][2]).findings
    assert finding.story == (
        "published in lane p0 at 10",
        "handed out by reader r1",
        "advanced by reader r1: acked 0, failed 1, rejected 0",
        "the broker forgot all of lane p0 before 30",
        "stored for s as row e1/s",
        "it failed, and is forgotten",
    )


def test_a_report_may_be_asked_for_while_the_history_goes_on() -> None:
    checker = Checker(PLAIN[:-1])
    assert checker.report().findings == ()
    checker.extend([Published("e3", "p0", 30), Looked()])
    assert checker.report().findings == (), "it is not at rest any more"
    checker.add(AT_REST)
    assert [finding.event for finding in checker.report().findings] == ["e3"]


def test_redeliveries_are_counted_and_are_no_finding() -> None:
    report = check(GOOD["a redelivery that is stored once"])
    assert (report.published, report.stored, report.redelivered) == (3, 3, 3)


@pytest.mark.parametrize(
    "history",
    [
        [HandedOut("ghost", "p0", "r")],
        [Stored("ghost", "s", "1")],
        [Published("e", "p0", 0), Published("e", "p0", 1)],
        [Published("e", "p0", 1), Published("f", "p0", 1)],
    ],
)
def test_a_history_that_contradicts_itself_is_refused(history: list[Record]) -> None:
    with pytest.raises(ValueError, match=r"ghost|twice|in order"):
        check(history)


def test_records_survive_the_way_through_a_file_and_a_torn_line_is_none() -> None:
    histories = [record for history in GOOD.values() for record in history]
    data = b"".join(map(encode, histories))
    assert list(decode_lines(data + b'{"what":"sto')) == histories


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"".join(map(encode, PLAIN)), 0, "nothing is wrong"),
        (b"".join(map(encode, BAD["two rows"][2])), 1, "stored twice: e1 for s"),
        (b'{"what":"gossip"}\n', 2, "line 1"),
    ],
)
def test_the_command_judges_a_file(tmp_path: Path, content: bytes, code: int, words: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(content)
    command = [sys.executable, "-m", "headgate.testing.crash.history", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
