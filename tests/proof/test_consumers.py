"""The campaign of consumers in its bounded form, and the faults that it is for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.proof import consumers
from tests.proof.consumers import Bill, Campaign, Observer, Outcome

KILLS = 12
EVENTS = 1440
GOOD = Outcome(
    bills=[Bill("left", 1, "p0:0"), Bill("right", 2, "p0:0"), Bill("left", 3, "p0:1")],
    lines={"left": ["p0:0", "p0:1"], "right": ["p0:0"]},
    commits={"left": [1, 3], "right": [2]},
    kills=1,
    inside=1,
    supervisor_kills=0,
    late=0,
    exit_codes=Counter({0: 2}),
    took_s=1.0,
)


@pytest.mark.campaign
def test_each_event_is_in_the_users_table_once_and_in_order(tmp_path: Path, database_url: str) -> None:
    with Campaign(tmp_path, database_url, kills=KILLS, events=EVENTS, seed=14) as campaign:
        outcome = campaign.run()
    assert outcome.faults() == []
    assert (outcome.kills, outcome.supervisor_kills) == (KILLS, 1)
    assert len(outcome.bills) >= EVENTS


def test_nothing_is_wrong_if_each_event_has_one_row_in_its_place() -> None:
    assert GOOD.faults() == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"bills": [*GOOD.bills, Bill("left", 3, "p0:1")]}, "1 events are handed over twice"),
        ({"bills": GOOD.bills[:2]}, "1 lines are not handed over"),
        ({"bills": GOOD.bills[::-1]}, "1 events are handed over out of the order of commits"),
        ({"bills": [*GOOD.bills[:2], Bill("left", 4, "p0:1")]}, "1 events are handed over out of the order"),
        ({"late": 1}, "1 events were committed below an id"),
        ({"exit_codes": Counter({0: 1, 3: 1})}, "exit codes {0: 1, 3: 1}"),
        ({"kills": 4}, "1 of 4 kills met an open batch"),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], fault: str) -> None:
    assert any(fault in found for found in GOOD._replace(**changes).faults())


def test_an_event_below_one_of_its_trigger_that_was_visible_before_is_late(sqlite_url: str) -> None:
    observer = Observer(sqlite_url)
    for id_, trigger_id in ((1, 1), (3, 1), (2, 2)):
        observer.see(id_, trigger_id)
    assert observer.late == 0
    observer.see(2, 1)
    assert observer.late == 1


def test_rows_of_earlier_campaigns_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    for database in ("sqlite", "postgresql"):
        consumers.write(consumers.row(GOOD, database), path)
    text = path.read_text()
    assert text.count("| sqlite | 3 | 1 | 1 | 0 | 0 | 0 | 0 | 1 |") == 1
    assert text.count("| postgresql | 3 | 1 | 1 | 0 | 0 | 0 | 0 | 1 |") == 1
