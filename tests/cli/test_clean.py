"""``headgate db clean``, called as a user calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks

from headgate.store.ids import TryName
from headgate.supervisor.logs.task_log_files import file_of


@pytest.fixture
def aged(etl: Tasks, query: Query) -> Tasks:
    """The run of ``etl`` has ended long ago."""
    etl.store.tasks.cancel_run(etl.run)
    for column in ("created_date", "ended_at"):
        query(f"UPDATE dag_run SET {column} = :then", then="2026-01-01 00:00:00.000000")
    return etl


def test_a_clean_counts_first_and_deletes_then(call_database: Any, aged: Tasks) -> None:
    tried = call_database("db", "clean", "--older-than", "1d", "--dry-run", "--json").rows()
    assert tried == [{"table": "task_instance", "can_be_deleted": 3}, {"table": "dag_run", "can_be_deleted": 1}]
    assert len(call_database("runs", "list", "--json").rows()) == 1

    done = call_database("db", "clean", "--older-than", "1d", "--batch", "1")

    assert done.code == 0
    assert [line.split() for line in done.out.splitlines()[1:]] == [["task_instance", "3"], ["dag_run", "1"]]
    assert call_database("runs", "list", "--json").rows() == []
    assert call_database("db", "clean", "--older-than", "1d").out == "nothing is old enough to be deleted\n"
    assert call_database("dags", "list", "--json").rows()[0]["last_run"] is None


@pytest.mark.parametrize("batch", ["1", "1000"])
def test_logs_are_cleaned_only_when_asked_to_and_only_of_runs_that_are_deleted(
    call_database: Any, aged: Tasks, home: Path, query: Query, batch: str
) -> None:
    ended = aged.store.tasks.create_run("etl", "ended")
    young = aged.store.tasks.create_run("etl", "young")
    assert young is not None
    assert ended is not None
    aged.store.tasks.cancel_run(ended)
    then = "2026-01-01 00:00:00.000000"
    query("UPDATE dag_run SET created_date = :then, ended_at = :then WHERE id = :run", then=then, run=ended)
    paths = {
        run_id: file_of(home / "logs", TryName("etl", run_id, "a", 1), 1)
        for run_id in ("r1", "ended", "young", "of another database")
    }
    for path in paths.values():
        path.parent.mkdir(parents=True)
        path.write_text("{}\n")
    clean = ("db", "clean", "--older-than", "1d", "--logs", "--batch", batch, "--json")
    tried = {row["table"]: row["can_be_deleted"] for row in call_database(*clean, "--dry-run").rows()}
    assert tried["log files"] == 2
    assert all(path.exists() for path in paths.values())
    done = {row["table"]: row["deleted"] for row in call_database(*clean).rows()}
    assert (done["dag_run"], done["log files"]) == (2, 2)
    assert {run_id for run_id, path in paths.items() if path.exists()} == {"young", "of another database"}


def test_logs_that_cannot_be_deleted_are_told_and_the_others_are(
    call_database: Any, aged: Tasks, home: Path, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    aged.store.tasks.create_run("etl", "r2")
    query("UPDATE dag_run SET created_date = :then, ended_at = :then", then="2026-01-01 00:00:00.000000")
    paths = [file_of(home / "logs", TryName("etl", run_id, "a", 1), 1) for run_id in ("r1", "r2")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text("{}\n")
    unlink = Path.unlink

    def fail_once(path: Path, *, missing_ok: bool = False) -> None:
        if path == paths[0]:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", fail_once)
    called = call_database("db", "clean", "--older-than", "1d", "--logs")
    assert called.code == 1
    assert "the logs of etl r1 stay: [Errno 13] Permission denied" in called.err
    assert "1 runs were deleted, but their logs could not be" in called.err
    assert [path.exists() for path in paths] == [True, False]
    assert call_database("runs", "list", "--json").rows() == []


def test_logs_stay_where_nobody_asked(call_database: Any, aged: Tasks, home: Path) -> None:
    path = file_of(home / "logs", TryName("etl", "r1", "a", 1), 1)
    path.parent.mkdir(parents=True)
    path.write_text("{}\n")
    done = call_database("db", "clean", "--older-than", "1d", "--json").rows()
    assert {row["table"] for row in done} == {"task_instance", "dag_run"}
    assert path.exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--older-than", "5m"], "expected at least 1h"),
        (["--older-than", "old"], "'old' is not a span of time"),
        (["--older-than", "99999w"], "longer than a hundred years"),
    ],
)
def test_what_is_too_young_is_not_cleaned(call_database: Any, aged: Tasks, options: list[str], problem: str) -> None:
    called = call_database("db", "clean", *options)

    assert called.code == 2
    assert problem in called.err
    assert len(call_database("runs", "list", "--json").rows()) == 1


def test_a_clean_says_which_supervisors_have_lost_their_leases_by_it(
    call_database: Any, aged: Tasks, query: Query
) -> None:
    query("UPDATE triggerer SET latest_heartbeat = :then", then="2026-01-01 00:00:00.000000")
    clean = ("db", "clean", "--older-than", "1d", "--json")
    would, have, again = call_database(*clean, "--dry-run"), call_database(*clean), call_database(*clean)
    silent = "supervisors that were silent for about as long"
    assert would.err == f"{silent} would lose their leases: {aged.epoch}\n"
    assert have.err == f"{silent} have lost their leases: {aged.epoch}\n"
    assert [row["table"] for row in have.rows()] == ["task_instance", "dag_run"]
    assert (again.code, again.err) == (0, "")


def test_dead_letters_are_cleaned_only_when_asked_to(call_database: Any, etl: Tasks, query: Query) -> None:
    from headgate.protocol.messages.runner import RefusedEvent

    etl.store.store_slice(etl.epoch, refused=[RefusedEvent(1, "run", 0, 1, "too long", 5_000_000, b"head")])
    query("UPDATE dead_letter SET stored_at = :then", then="2026-01-01 00:00:00.000000")

    assert "dead_letter" not in call_database("db", "clean", "--older-than", "1d").out
    assert "dead_letter" not in call_database("db", "clean", "--older-than", "1d", "--dead-letters").out
    assert "dead_letter" in call_database("db", "clean", "--older-than", "1d", "--open-dead-letters").out
