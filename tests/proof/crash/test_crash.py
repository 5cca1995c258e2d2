"""A handful of the cells of the matrix, for every change; all of them are run by ``python -m tests.proof.crash``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.proof.crash.campaign import FAULTS, SERVER_FAULTS, Campaign, Fault, is_possible
from tests.proof.crash.databases import Databases
from tests.proof.crash.matrix import SUBSCRIBERS, plans
from tests.proof.crash.server import why_none

from headgate.protocol.marks import MARKS, Mark
from headgate.testing.crash import history

StartCampaign = Callable[..., Campaign]

# The points at which the promise is decided, each with the fault that would break it there.
SQLITE: list[tuple[str, Fault]] = [
    ("store.committed", "kill supervisor"),
    ("runner.frame_half_sent", "kill runner"),
    ("filelog.draft_written", "kill both"),
    ("supervisor.frame_half_sent", "kill supervisor"),
    ("session.started", "kill runner"),
]
POSTGRESQL: list[tuple[str, Fault]] = [
    ("store.before_commit", "drop connection"),
    ("store.begun", "database away"),
    ("store.before_commit", "kill supervisor"),
    ("group.before_advance", "kill both"),
    ("leases.claim_written", "kill runner"),
    ("store.committed", "stop"),
]


@pytest.mark.parametrize(("dialect", "cells"), [("sqlite", SQLITE), ("postgresql", POSTGRESQL)])
def test_nothing_is_lost_or_stored_twice_whatever_dies_at_a_mark(
    start_campaign: StartCampaign, dialect: str, cells: list[tuple[str, Fault]]
) -> None:
    campaign = start_campaign(dialect, subscribers=3, seed=1)
    for mark, fault in cells:
        result = campaign.run_cell(mark, fault)
        assert result.is_good, str(result)
        assert result.events
    assert campaign.finish() is None
    replayed = campaign.replay()
    assert replayed.is_good, str(replayed)
    assert replayed.frames


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_nothing_is_lost_or_stored_twice_when_the_server_crashes_at_a_mark(tmp_path: Path) -> None:
    databases = Databases(tmp_path)
    folder = tmp_path / "campaign"
    folder.mkdir()
    try:
        with databases.one("postgresql", folder, needs_server=True) as (url, server):
            with Campaign(folder, url, subscribers=1, seed=5, server=server) as campaign:
                result = campaign.run_cell("store.before_commit", "crash server")
                assert result.is_good, str(result)
                assert result.dropped_busy == 1, "its connection was in a transaction"
                assert campaign.finish() is None
    finally:
        databases.close()


def test_nothing_is_lost_or_stored_twice_whatever_dies_at_random(start_campaign: StartCampaign) -> None:
    campaign = start_campaign("sqlite", subscribers=1, seed=2)
    result = campaign.run_random(8)
    assert result.is_good, str(result)
    assert result.kills >= 8
    assert campaign.finish() is None


def test_a_cell_whose_mark_is_not_reached_fails(start_campaign: StartCampaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MARKS, "nowhere.at_all", Mark("runner", "flow", "no code reaches it"))
    campaign = start_campaign("sqlite", subscribers=1, seed=3, complete_s_max=2.0)
    result = campaign.run_cell("nowhere.at_all", "kill runner")
    assert not result.is_good
    assert "nowhere.at_all" in result.error


def test_a_producer_that_commits_too_early_is_found_out_and_its_history_kept(
    start_campaign: StartCampaign, tmp_path: Path
) -> None:
    campaign = start_campaign("sqlite", subscribers=1, seed=4, trigger="HastyTrigger", complete_s_max=5.0)
    result = campaign.run_cell("host.event_bound", "kill runner")
    assert result.count("lost")
    assert result.count("commit past a failed offset")
    kept = tmp_path / "campaign" / "history.jsonl"
    again = history.check(history.decode_lines(kept.read_bytes()))
    assert again.count("lost") == result.count("lost")


def test_the_matrix_holds_every_mark_with_every_fault_and_both_numbers_of_subscribers() -> None:
    dialects = ["sqlite", "postgresql"]
    todo = plans(dialects, None, kills=95, seed=0, repeat=2)
    cells = Counter((plan.mark, plan.dialect, plan.subscribers, fault) for plan in todo for fault in plan.faults)
    assert cells == Counter(
        {
            (mark, dialect, count, fault): 2
            for mark in MARKS
            for dialect in dialects
            for count in SUBSCRIBERS
            for fault in FAULTS
            if is_possible(mark, fault, dialect)
        }
    )
    assert sum(plan.kills for plan in todo) == 95
    for mark in MARKS:
        for fault in FAULTS:
            exists = is_possible(mark, fault, "postgresql")
            assert exists or mark in ("arbiter.reaped", "arbiter.before_spawn", "leases.registered")


def test_a_server_is_restarted_only_where_it_is_our_own() -> None:
    for plan in plans(["sqlite", "postgresql"], None, kills=95, seed=0):
        assert plan.needs_server == bool(SERVER_FAULTS.keys() & plan.faults)
        assert plan.needs_server == (SERVER_FAULTS.keys() >= set(plan.faults) and bool(plan.faults))
    without = plans(["sqlite", "postgresql"], None, kills=95, seed=0, restarts=False)
    assert not any(plan.needs_server for plan in without)
