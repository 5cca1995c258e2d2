"""A handful of the cells of the matrix of tasks, for every change; ``python -m tests.proof.crash --tasks`` runs all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.proof.crash.task_campaign import FAULTS, SIDES, TASKS, Fault, TaskCampaign, is_possible
from tests.proof.crash.task_matrix import plans
from tests.proof.history import task_history
from tests.proof.history.task_records import decode_lines

from headgate.protocol.marks import TASK_MARKS
from headgate.store.db.engine import open_engine

StartCampaign = Callable[..., TaskCampaign]

# Where it is decided whether a task waits, goes on, or has ended, each with the fault that would break it there.
SQLITE: list[tuple[str, Fault]] = [("defer.committed", "kill supervisor")]
POSTGRESQL: list[tuple[str, Fault]] = [("resume.by_event", "drop connection"), ("resume.committed", "kill all")]


@pytest.fixture
def start_campaign(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartCampaign]:
    """Starts a campaign on a database of this test."""
    with ExitStack() as stack:

        def start(dialect: str, **arguments: Any) -> TaskCampaign:
            url = str(request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[dialect]))
            folder = tmp_path / "campaign"
            folder.mkdir()
            return stack.enter_context(TaskCampaign(folder, url, **arguments))

        yield start


@pytest.mark.parametrize(("dialect", "cells"), [("sqlite", SQLITE), ("postgresql", POSTGRESQL)])
def test_every_task_is_resumed_once_and_ends_once_whatever_dies_at_a_mark(
    start_campaign: StartCampaign, dialect: str, cells: list[tuple[str, Fault]]
) -> None:
    campaign = start_campaign(dialect, seed=1)
    for mark, fault in cells:
        result = campaign.run_cell(mark, fault)
        assert result.is_good, str(result)
        assert result.deferrals
        assert result.tasks >= 2 * len(TASKS)
    if dialect == "sqlite":  # a supervisor takes its time to cancel what is over
        assert campaign.finish() is None


def test_a_cell_whose_mark_is_not_reached_fails_and_what_is_wrong_in_the_tables_is_found(
    start_campaign: StartCampaign, sqlite_url: str, tmp_path: Path
) -> None:
    campaign = start_campaign("sqlite", seed=2, complete_s_max=15.0)
    result = campaign.run_random(1)
    assert result.is_good, str(result)
    assert result.kills
    engine = open_engine(sqlite_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM xcom WHERE key = 'step_2'")
        connection.exec_driver_sql("UPDATE trigger SET finished_at = NULL WHERE id = 1")
    engine.dispose()
    campaign.complete_s_max = 0.5
    result = campaign.run_cell("no.such_mark", "kill runner")
    assert "no.such_mark" in result.error
    assert {finding.kind for finding in result.findings} >= {"lost outcome", "trigger left behind"}
    kept = tmp_path / "campaign" / "history.jsonl"
    again = task_history.check(decode_lines(kept.read_bytes()))
    assert {finding.kind for finding in again.findings} >= {"lost outcome", "trigger left behind"}


def test_the_matrix_holds_every_mark_with_every_fault() -> None:
    dialects = ["sqlite", "postgresql"]
    todo = plans(dialects, None, kills=95, seed=0, repeat=2)
    cells = Counter((plan.mark, plan.dialect, fault) for plan in todo for fault in plan.faults)
    assert cells == Counter(
        {
            (mark, dialect, fault): 2
            for mark in SIDES
            for dialect in dialects
            for fault in FAULTS
            if is_possible(fault, dialect)
        }
    )
    assert sum(plan.kills for plan in todo) == 95
    assert TASK_MARKS.keys() <= SIDES.keys()
