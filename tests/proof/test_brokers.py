"""The table of kills over all brokers: that runs add up, and that a failure is kept. `make proof` has its trials.

Each adapter's crash test is among its conformance tests.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.proof import brokers, document
from tests.proof.brokers import COUNTS, VICTIMS, Book, Result

from headgate.testing.crash.history import Checker, Finding, Report
from headgate.testing.crash.report import CrashReport

GOOD = Checker().report()


def report(checked: Report = GOOD, pending: int = 0) -> CrashReport:
    deaths = (("runner, group.after_advance", True), ("broker, at a random moment", True), ("supervisor, x", False))
    return CrashReport(
        subject="a trigger",
        checked=checked,
        deaths=deaths,
        subscribers=1,
        has_producer=True,
        pending=pending,
        strange_rows=0,
        exit_code=0,
        seed=1,
        seconds=1.0,
        history_path="",
    )


def test_a_trial_counts_its_kills_by_victim_and_its_findings_by_kind() -> None:
    counts = brokers.counts_of(report())
    assert [counts[f"kills of {victim}"] for victim in VICTIMS] == [1, 1, 1]
    assert counts.keys() <= set(COUNTS)
    assert counts["failed"] == 0
    found = Finding("lost", "message-000001", "subscriber-0", ("published",))
    bad = brokers.counts_of(report(msgspec.structs.replace(GOOD, findings=(found,)), pending=2))
    assert (bad["lost"], bad["left at the broker"], bad["failed"]) == (1, 2, 1)


def test_brokers_take_turns_until_there_are_enough_kills() -> None:
    trials = brokers.plan(["redis", "nats"], 100, seed=7)
    assert [trial.broker for trial in trials] == ["redis", "nats", "redis"]
    assert sum(trial.kills for trial in trials) == 100
    assert [trial.subscribers for trial in trials] == [1, 1, 2]
    assert len({trial.seed for trial in trials}) == 3


def test_rows_of_earlier_runs_are_kept_and_added_up_and_so_is_the_story_of_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    first = Book(1, path)
    first.add(Result("redis", dict.fromkeys(COUNTS, 2) | {"messages": 1_234}, ""))
    first.add(Result("redis", dict.fromkeys(COUNTS, 2), ""))
    second = Book(2, path)
    second.add(Result("nats", {"trials": 1, "failed": 1}, "it was ```lost```"))
    third = Book(3, path)
    third.add(Result("redis", dict.fromkeys(COUNTS, 1), ""))
    text = document.section_of(path, brokers.SECTION)
    rows = brokers.rows_in(text)
    assert [(row.broker, row.seed) for row in rows] == [("redis", "1"), ("nats", "2"), ("redis", "3")]
    assert rows[0].counts["messages"] == 1_236
    assert "**15 kills** (5 of the runner, 5 of the supervisor, 5 of the broker); 1,237 messages" in text
    assert "**5 lost**" in text
    assert "6 of 6 trials failed" in text
    (failure,) = brokers.failures_in(text)
    assert failure.endswith("\nit was '''lost'''")
    assert (second.failed, third.failed, third.kills) == (1, 0, 3)


def test_a_trial_that_cannot_begin_is_a_failure_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("headgate.testing.brokers.nats_station.find_server", lambda: None)
    result = brokers.run_trial(brokers.plan(["nats"], 1, seed=1)[0], tmp_path / "trial")
    assert result.counts["failed"] == 1
    assert "this machine has no program of a server of nats" in result.problem
