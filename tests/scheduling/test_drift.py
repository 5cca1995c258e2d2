"""The verdicts on drift: what is wrong with where a reader begins, and with what a broker answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headgate.protocol.messages.runner import DescribedLane, DescribedStream, LaneProgress
from headgate.scheduling.drift import (
    LEVELS,
    LOG_NEWER_S,
    Finding,
    KnownLane,
    Verdict,
    judge_beginning,
    judge_lane,
    judge_losses,
    report_of,
    worst,
)

KNOWN = KnownLane("0", (40,), "topic", begun_at=1.0)
KNOWN_AT = 1_000.0


@pytest.mark.parametrize(
    ("began", "changes", "verdict"),
    [
        ((40,), {}, None),
        # Our own commits that the database does not know yet, because the supervisor died.
        ((45,), {"is_ours": True, "committed_at": KNOWN_AT + 5}, None),
        ((45,), {"is_ours": True, "committed_at": KNOWN_AT + LOG_NEWER_S + 1}, "log newer than the database"),
        ((45,), {"is_ours": True, "committed_at": KNOWN_AT + LOG_NEWER_S}, None),
        # A broker that cannot tell who it was: the database may be some seconds old.
        ((45,), {"is_ours": None}, None),
        ((45,), {"is_ours": None, "committed_at": KNOWN_AT + LOG_NEWER_S}, None),
        ((45,), {"is_ours": None, "committed_at": KNOWN_AT + LOG_NEWER_S + 1}, "log newer than the database"),
        ((45,), {"is_ours": False}, "moved by others"),
        ((45,), {"is_ours": None, "cursor": "another topic"}, "moved by others"),
        ((39,), {"is_ours": True}, "went back"),
        ((), {"is_ours": True}, "went back"),
        # It is known already: what the database has is of this reader, which has gone on since it began.
        ((39,), {"begun_at": 1.0}, None),
        ((45,), {"begun_at": 1.0, "is_ours": False}, None),
    ],
)
def test_where_a_reader_begins_is_held_against_where_headgate_was(
    began: tuple[int, ...], changes: dict[str, Any], verdict: Verdict | None
) -> None:
    fields: dict[str, Any] = {"begun_at": 2.0, "cursor": "topic"} | changes
    lane = LaneProgress("0", began, **fields)
    assert judge_beginning(KNOWN, KNOWN_AT, lane) == verdict


@pytest.mark.parametrize(
    ("was", "now", "cursor", "verdict"),
    [
        (60, 60, "topic", None),
        (60, 75, "topic", None),
        (60, 59, "topic", "went back"),  # reset, or from old files
        (60, 0, "topic", "went back"),
        (60, 75, "another topic", "went back"),  # made anew, and read by others since
        (0, 75, "topic", "went back"),  # of a database that does not know the count
    ],
)
def test_a_broker_that_goes_on_counting_deliveries_was_not_set_back(
    was: int, now: int, cursor: str, verdict: Verdict | None
) -> None:
    known = msgspec.structs.replace(KNOWN, deliveries=was)
    lane = LaneProgress("0", (39,), 2.0, cursor=cursor, began_deliveries=now, deliveries=1_000)
    assert judge_beginning(known, KNOWN_AT, lane) == verdict
    if cursor == KNOWN.cursor:
        described = DescribedLane("0", committed=(39,), before=(40,), deliveries=now, before_deliveries=was)
        assert judge_lane(described) == (verdict or "ok")


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"dropped": (3,)}, None),
        ({"dropped": (4,)}, "dropped unread"),
        ({"dropped": (2,)}, None),  # somebody has set the group, and the broker counts anew
        ({}, None),
        ({"dropped": (4,), "cursor": "another topic"}, None),
    ],
)
def test_a_loss_at_the_broker_is_found_if_the_database_does_not_know_of_it(
    fields: dict[str, Any], verdict: Verdict | None
) -> None:
    lane = LaneProgress("0", (), **{"cursor": "topic"} | fields)
    assert judge_losses(msgspec.structs.replace(KNOWN, dropped=(3,)), lane) == verdict


def test_what_a_broker_tells_for_ever_of_losses_is_told_until_it_is_accepted() -> None:
    answer = DescribedStream("d", (DescribedLane("0", committed=(7,), before=(6,), after=(8,), missing=2),), 1)
    assert report_of(answer, [], 2.0)[0].verdict == "dropped unread", "its reader has not noticed it yet"
    found = Finding("0", "dropped unread", (), (), 1.0, 2)
    known = [KnownLane("0", (6,), dropped=(2,))]
    assert report_of(answer, [found], 2.0, known)[0].verdict == "dropped unread"
    report = report_of(answer, [], 2.0, known)[0]
    assert (report.verdict, report.lanes[0].missing) == ("ok", 2)


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"committed": (7,), "before": (6,), "after": (8,)}, "ok"),
        ({"committed": (7,), "before": (6,), "after": (8,), "lag": 3}, "behind"),
        ({"committed": (9,), "before": (6,), "after": (8,)}, "moved by others"),
        ({"committed": (9,), "before": (6,), "after": (8,), "is_shared": True}, "ok"),
        ({"committed": (5,), "before": (6,), "after": (8,), "lag": 3}, "went back"),
        ({"committed": (), "before": (6,), "after": (8,)}, "went back"),
        ({"committed": (1,), "before": (), "after": ()}, "moved by others"),
        ({"committed": (7,), "before": (6,), "after": (8,), "missing": 2}, "dropped unread"),
        # A lane that we do not read, and a broker that has no positions.
        ({"committed": (9,)}, "ok"),
        ({"lag": 3}, "behind"),
        ({}, "ok"),
        # Ids of two numbers.
        ({"committed": (5, 10), "before": (5, 9), "after": (5, 9)}, "moved by others"),
    ],
)
def test_the_answer_of_a_broker_is_held_against_what_its_reader_knows(fields: dict[str, Any], verdict: Verdict) -> None:
    assert judge_lane(DescribedLane("0", **fields)) == verdict


def test_what_was_found_stays_in_the_report_until_it_is_accepted() -> None:
    moved = Finding("0", "moved by others", (40,), (45,), 1.0)
    fine = DescribedStream("d", (DescribedLane("0", committed=(50,), before=(50,), after=(50,)),), 1)
    report, found = report_of(fine, [moved], 2.0)
    assert (report.verdict, report.lanes[0].verdict, report.lanes[0].finding) == (moved.verdict, moved.verdict, moved)
    assert found == (moved,)
    assert report_of(fine, [], 2.0)[0].verdict == "ok"


def test_what_an_answer_shows_is_found() -> None:
    lanes = (
        DescribedLane("0", committed=(9,), before=(6,), after=(8,)),
        DescribedLane("1", committed=(5,), before=(6,), after=(8,)),
        DescribedLane("2", committed=(7,), before=(6,), after=(8,), lag=1),
    )
    report, found = report_of(DescribedStream("d", lanes, 3), [], 2.0)
    assert found == (
        Finding("0", "moved by others", (8,), (9,), 2.0),
        Finding("1", "went back", (6,), (5,), 2.0),
    )
    assert [lane.verdict for lane in report.lanes] == ["moved by others", "went back", "behind"]
    assert report.verdict == "moved by others"


def test_a_broker_that_does_not_answer_is_no_drift_unless_it_does_not_have_the_source() -> None:
    assert report_of(DescribedStream("d", error="it hangs"), [], 2.0)[0].verdict == "cannot be told"
    gone = report_of(DescribedStream("d", error="no such topic", is_missing=True), [], 2.0)[0]
    assert (gone.verdict, gone.error) == ("unknown to the broker", "no such topic")


def test_a_loss_is_worse_than_what_comes_again() -> None:
    assert worst(["behind", "moved by others", "went back", "ok"]) == "moved by others"
    assert worst([]) == "ok"
    assert {verdict for verdict, level in LEVELS.items() if level == 2} == {"went back"}
