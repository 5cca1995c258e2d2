"""The campaign of streams in its bounded form, and what its observer takes for a split stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proof.streams import STREAMS, WATCHERS, Campaign, Observer

SECONDS = 24.0
EVERY_S = 4.0


@pytest.mark.campaign
def test_no_stream_is_split_and_no_line_is_lost_whatever_supervisor_dies(tmp_path: Path, postgres_url: str) -> None:
    with Campaign(tmp_path, postgres_url, seconds=SECONDS, every_s=EVERY_S) as campaign:
        outcome = campaign.run()
    assert outcome.faults() == []
    assert outcome.kills >= SECONDS / EVERY_S - 1
    assert outcome.takeovers >= STREAMS
    assert outcome.looks > SECONDS
    assert sum(report.stored for report in outcome.reports) > WATCHERS


def test_two_owners_of_a_stream_or_another_than_its_own_are_a_split(sqlite_url: str) -> None:
    observer = Observer(sqlite_url)
    observer.see([(1, 7, 7, 4), (2, 8, 8, 4)])
    observer.see([(1, 9, 9, 4)])
    assert (observer.split, observer.takeovers, observer.looks) == ([], 1, 2)
    observer.see([(1, 9, 8, 1), (1, 9, 9, 3)])
    assert len(observer.split) == 2
