"""The commands for DAGs, runs, tasks, triggers and values, called as a user calls them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.supervisor.tasks_harness import WAIT, Tasks, task_states

from headgate.cli.commands.values import masked
from headgate.protocol.messages.dags import CronSchedule, DagSpec, TaskSpec
from headgate.protocol.values import decode_value, encode_value
from headgate.scheduling.names import TryName
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.supervisor.logs.task_log_files import file_of

Query = Callable[..., list[dict[str, Any]]]
CHAIN = (TaskSpec("a", "Op"), TaskSpec("b", "Op", upstream=("a",)), TaskSpec("c", "Op", upstream=("b",)))


@pytest.fixture
def users_store(database_url: str, home: Path) -> Iterator[Store]:
    """A store beside the commands, with the keys they have."""
    home.mkdir(exist_ok=True)
    with Store(open_engine(database_url), secrets=Secrets.open(home, None)) as store:
        yield store


@pytest.fixture
def etl(users_store: Store, query: Query) -> Tasks:
    """A DAG ``etl`` with the tasks ``a``, ``b``, ``c`` in a row, and a run ``r1`` of it that has begun."""
    tasks = Tasks(users_store, query, tasks=CHAIN)
    users_store.scheduling.plan(tasks.epoch)
    return tasks


def states(tasks: Tasks) -> str:
    found = task_states(tasks.store, tasks.run)
    return " ".join(found[name].value for name in sorted(found))


# --- dags ----------------------------------------------------------------------------------------


def test_dags_are_listed_with_the_files_that_cannot_be_parsed(call_database: Any, etl: Tasks) -> None:
    error = "Traceback (most recent call last):\n  File here\nNameError: \x1b[31mx"
    etl.store.tasks.save_import_error(etl.epoch, "broken.py", error)

    table = call_database("dags", "list")
    good, bad = call_database("dags", "list", "--json").rows()

    assert (table.code, table.err) == (0, "")
    assert "etl" in table.out
    assert "cannot be parsed: broken.py" in table.out
    assert "  NameError: \\x1b[31mx\n" in table.out, "on a line of its own, and harmless to the terminal"
    assert (good["name"], good["active_runs"], good["last_run"]) == ("etl", 1, "r1")
    assert (bad["name"], bad["file"], bad["import_error"]) == (None, "broken.py", error)


def test_a_dag_is_shown_with_its_tasks(call_database: Any, etl: Tasks) -> None:
    shown = call_database("dags", "show", "etl")
    (row,) = call_database("dags", "show", "etl", "--json").rows()

    assert "all_success" in shown.out
    assert [task["task_id"] for task in row["task_list"]] == ["a", "b", "c"]
    assert row["task_list"][1]["upstream"] == ["a"]


def test_a_run_is_triggered_with_its_conf_and_date(call_database: Any, etl: Tasks, query: Query) -> None:
    conf = '{"n": 1, "every": {"$": "timedelta", "v": [0, 5, 0]}}'

    called = call_database(
        "dags", "trigger", "etl", "--conf", conf, "--run-id", "mine", "--logical-date", "2026-02-01T00:00:00+01:00"
    )

    assert (called.code, called.out) == (0, "created run mine of etl\n")
    (row,) = query("SELECT * FROM dag_run WHERE run_id = 'mine'")
    assert decode_value(bytes(row["conf"]))["n"] == 1
    (shown,) = call_database("runs", "show", "etl", "mine", "--json").rows()
    assert (shown["state"], shown["logical_date"]) == ("queued", "2026-01-31T23:00:00+00:00")
    assert shown["conf"] == {"n": 1, "every": "0:00:05"}
    again = call_database("dags", "trigger", "etl", "--run-id", "mine")
    assert (again.code, again.out) == (1, "")
    assert "has a run named 'mine' already" in again.err


def test_a_run_without_a_name_is_named_by_the_time(call_database: Any, etl: Tasks) -> None:
    assert call_database("dags", "trigger", "etl").out.startswith("created run manual__2")
    (row,) = call_database("runs", "list", "--limit", "1", "--json").rows()
    assert (row["run_type"], row["run_id"][:8]) == ("manual", "manual__")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--conf", "[1]"], "--conf: expected a JSON object"),
        (["--conf", "{"], "--conf: Expecting"),
        (["--conf", '{"a": {"$": "nope", "v": 1}}'], "--conf: "),
        (["--logical-date", "tomorrow"], "--logical-date: 'tomorrow' is not a moment"),
        (["--run-id", "a\nb"], "--run-id: expected letters, digits and _ . ~ : + @ = -, got 'a\\nb'"),
        (["--run-id", "a b/../x"], "--run-id: expected letters, digits"),
        (["--run-id", ""], "it is empty"),
        (["--run-id", "latest"], "`latest` means the newest run"),
        (["--conf", '{"p": "\\ud800"}'], "half of a surrogate pair, which is not text"),
    ],
)
def test_what_cannot_be_a_run_is_refused(call_database: Any, etl: Tasks, options: list[str], problem: str) -> None:
    called = call_database("dags", "trigger", "etl", *options)

    assert called.code in (1, 2)
    assert called.err.startswith("headgate: ")
    assert problem in called.err
    assert len(call_database("runs", "list", "--json").rows()) == 1


def test_a_dag_is_paused_and_goes_on(call_database: Any, etl: Tasks) -> None:
    assert call_database("dags", "pause", "etl").out == "paused etl\n"
    assert call_database("dags", "pause", "etl").out == "etl was paused already\n"
    assert [row["name"] for row in call_database("dags", "list", "--paused", "--json").rows()] == ["etl"]
    assert "waits for `headgate dags unpause etl`" in call_database("dags", "trigger", "etl").out
    assert call_database("dags", "unpause", "etl").out == "unpaused etl\n"
    assert call_database("dags", "list", "--paused", "--json").rows() == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["dags", "show", "elt"], "no DAG named 'elt'; did you mean etl?"),
        (["dags", "pause", "elt"], "did you mean etl?"),
        (["dags", "trigger", "elt"], "did you mean etl?"),
        (["runs", "list", "elt"], "did you mean etl?"),
        (["runs", "show", "etl", "rr1"], "no run named 'rr1' in the DAG etl; did you mean r1?"),
        (["tasks", "show", "etl", "r1", "aa"], "no task named 'aa' in the run r1 of etl; did you mean a?"),
        (["tasks", "clear", "etl", "r1", "aa"], "did you mean a?"),
        (["tasks", "mark-failed", "etl", "latest", "aa"], "did you mean a?"),
        (["why", "etl", "r1", "aa"], "did you mean a?"),
        (["why", "9999"], "no trigger or watcher named '9999'"),
        (["triggers", "show", "nobody"], "no trigger or watcher named 'nobody'"),
    ],
)
def test_a_name_that_is_not_there_is_told_with_those_that_may_be_meant(
    call_database: Any, etl: Tasks, command: list[str], problem: str
) -> None:
    called = call_database(*command)

    assert (called.code, called.out) == (1, "")
    assert problem in called.err
    assert called.err.count("\n") == 1


# --- runs ----------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_by_state_and_page(call_database: Any, etl: Tasks) -> None:
    for number in range(2, 6):
        etl.store.tasks.create_run("etl", f"r{number}")

    def names(*options: str) -> list[str]:
        return [row["run_id"] for row in call_database("runs", "list", "--json", *options).rows()]

    assert names() == names("etl") == names("--all") == ["r5", "r4", "r3", "r2", "r1"]
    assert names("--limit", "2") == ["r5", "r4"]
    assert names("--state", "running") == ["r1"]
    assert len(names("--state", "running", "--state", "queued")) == 5
    assert len(names("--since", "1h")) == 5
    assert names("--since", "2100-01-01") == []
    assert "There are more than these 2" in call_database("runs", "list", "--limit", "2").out
    assert "There are more" not in call_database("runs", "list", "--limit", "5").out
    assert call_database("runs", "list", "--since", "yesterday").code == 2
    assert call_database("runs", "list", "--state", "done").code == 2


def test_a_long_list_is_read_page_by_page(call_database: Any, etl: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.cli.lists.ROWS_PER_PAGE_MAX", 2)
    for number in range(2, 6):
        etl.store.tasks.create_run("etl", f"r{number}")

    rows = call_database("runs", "list", "--all", "--json").rows()
    assert [row["run_id"] for row in rows] == ["r5", "r4", "r3", "r2", "r1"]
    tasks = call_database("tasks", "list", "etl", "r1", "--all", "--json").rows()
    assert [row["task_id"] for row in tasks] == ["a", "b", "c"]


def test_a_run_is_cancelled_once(call_database: Any, etl: Tasks) -> None:
    called = call_database("runs", "cancel", "etl", "latest")

    assert called.out == "cancelled run r1 of etl: 3 unfinished tasks have ended as failed\n"
    assert states(etl) == "failed failed failed"
    again = call_database("runs", "cancel", "etl", "r1")
    assert again.code == 1
    assert "has ended already: failed" in again.err


# --- tasks ---------------------------------------------------------------------------------------


def test_tasks_are_listed_and_shown(call_database: Any, etl: Tasks) -> None:
    token = etl.run_it()
    etl.store.tasks.fail(etl.epoch, etl.a, token, "Traceback\nValueError: no", xcoms={"k": encode_value(7, where="x")})

    rows = call_database("tasks", "list", "etl", "latest", "--json").rows()
    assert [(row["task_id"], row["state"]) for row in rows] == [("a", "failed"), ("b", "none"), ("c", "none")]
    assert [row["task_id"] for row in call_database("tasks", "list", "--state", "failed", "--json").rows()] == ["a"]
    shown = call_database("tasks", "show", "etl", "r1", "a").out
    assert "last error:\n  Traceback\n  ValueError: no\n" in shown
    (row,) = call_database("tasks", "show", "etl", "r1", "a", "--json").rows()
    assert (row["xcoms"], row["last_error"], row["try_number"]) == ({"k": 7}, "Traceback\nValueError: no", 1)


def test_tasks_are_cleared_with_what_comes_after_them(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.cancel_run(etl.run)

    called = call_database("tasks", "clear", "etl", "r1", "b", "--downstream")

    assert called.out == "cleared 2 tasks of run r1 of etl: b, c\n"
    assert states(etl) == "failed none none"
    assert call_database("tasks", "clear", "etl", "r1", "--only-failed").out == "cleared 1 task of run r1 of etl: a\n"
    assert call_database("tasks", "clear", "etl", "r1", "--only-failed").out == "nothing to clear in run r1 of etl\n"
    assert "cleared 3 tasks" in call_database("tasks", "clear", "etl", "r1", "--all").out


@pytest.mark.parametrize("options", [[], ["--downstream"], ["a", "--all"]])
def test_a_clear_must_say_what_it_clears(call_database: Any, etl: Tasks, options: list[str]) -> None:
    etl.store.tasks.cancel_run(etl.run)

    called = call_database("tasks", "clear", "etl", "r1", *options)

    assert called.code == 2
    assert "name the tasks" in called.err
    assert states(etl) == "failed failed failed"


def test_a_task_is_marked_once(call_database: Any, etl: Tasks) -> None:
    assert call_database("tasks", "mark-success", "etl", "r1", "a").out == "marked a of run r1 of etl as success\n"
    assert call_database("tasks", "mark-failed", "etl", "latest", "b").out == "marked b of run r1 of etl as failed\n"
    assert states(etl) == "success failed none"
    again = call_database("tasks", "mark-failed", "etl", "r1", "a")
    assert again.code == 1
    assert "has ended already: success" in again.err


# --- why and triggers ----------------------------------------------------------------------------


def test_why_says_one_headline_the_facts_and_what_comes_next(call_database: Any, etl: Tasks) -> None:
    called = call_database("why", "etl", "latest", "b")

    first, *facts, last = called.out.splitlines()
    assert first == "it waits for 1 of 1 upstream tasks: a (scheduled)"
    assert any(line.split() == ["upstream", "a", "(scheduled),", "rule", "all_success"] for line in facts)
    assert last.startswith("next: it goes on by its rule all_success")
    (row,) = call_database("why", "etl", "r1", "b", "--json").rows()
    assert (row["reason"], row["headline"]) == ("upstream", first)
    assert ["state", "none"] in row["facts"]


def test_why_of_a_run_says_it_of_every_task_that_waits(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.mark(etl.a, "success")

    rows = call_database("why", "etl", "r1", "--json").rows()

    assert [(row["task_id"], row["reason"]) for row in rows] == [("b", "about_to"), ("c", "upstream")]
    assert "about to be scheduled" in call_database("why", "etl", "r1").out
    etl.store.tasks.cancel_run(etl.run)
    assert call_database("why", "etl", "r1").out == "run r1 of etl is failed; none of its tasks is waiting\n"


def test_why_of_a_deferred_task_and_of_its_trigger_agree(call_database: Any, etl: Tasks) -> None:
    (given,) = etl.dispatch()
    etl.store.tasks.defer(etl.epoch, given.id, given.token, WAIT)
    trigger = etl.row()["trigger_id"]

    (of_task,) = call_database("why", "etl", "r1", "a", "--json").rows()
    (of_trigger,) = call_database("why", str(trigger), "--json").rows()

    assert of_task["reason"] == of_trigger["reason"] == "unclaimed"
    # But for how long ago that was.
    assert of_task["headline"].split(",")[0] == of_trigger["headline"].split(",")[0]
    assert ["task", "etl r1 a"] in of_trigger["facts"]
    assert call_database("why", "a", "b", "c", "d").code == 2


def test_triggers_are_listed_shown_and_orphans_removed(call_database: Any, etl: Tasks, query: Query) -> None:
    (given,) = etl.dispatch()
    etl.store.tasks.defer(etl.epoch, given.id, given.token, WAIT)
    trigger = etl.row()["trigger_id"]
    etl.store.add_watcher("w", "a.B", {"password": "secret"})

    rows = call_database("triggers", "list", "--json").rows()
    assert [(row["name"], row["task_id"]) for row in rows] == [(f"trigger-{trigger}", "a"), ("w", None)]
    assert call_database("triggers", "slow", "--longer-than", "0s", "--json").rows()[0]["id"] == trigger
    assert call_database("triggers", "slow", "--longer-than", "1h", "--json").rows() == []
    assert call_database("triggers", "slow", "--longer-than", "long").code == 2
    assert "secret" not in call_database("triggers", "show", "w").out
    assert "secret" in call_database("triggers", "show", "w", "--kwargs").out
    assert call_database("triggers", "orphans").out == "none\n"
    query("DELETE FROM asset_watcher")
    (orphan,) = call_database("triggers", "orphans", "--json").rows()
    assert orphan["classpath"] == "a.B"
    assert call_database("triggers", "orphans", "--remove").out == f"removed 1 trigger: {orphan['id']}\n"
    assert call_database("triggers", "orphans", "--remove").out == "removed 0 triggers\n"
    assert [row["id"] for row in call_database("triggers", "list", "--json").rows()] == [trigger]
    assert len(call_database("triggers", "list", "--ended", "--json").rows()) == 2


# --- values --------------------------------------------------------------------------------------


def test_variables_are_set_read_listed_and_deleted(
    call_database: Any, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call_database("variables", "set", "city", "Köln", "--description", "where").out == "set variable city\n"
    assert call_database("variables", "get", "city").out == "Köln\n"
    (row,) = call_database("variables", "list", "--json").rows()
    assert (row["name"], row["description"]) == ("city", "where")
    assert "Köln" not in call_database("variables", "list").out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    assert call_database("variables", "set", "city", "-").code == 0
    assert json.loads(call_database("variables", "get", "city", "--json").out)["value"] == "two\nlines"
    unknown = call_database("variables", "get", "citi")
    assert (unknown.code, "did you mean city?" in unknown.err) == (1, True)
    assert call_database("variables", "delete", "city").out == "deleted variable city\n"
    assert call_database("variables", "delete", "city").code == 1


def test_a_value_that_is_too_long_or_no_text_is_refused(call_database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for data, problem in ((b"x" * 100_000, "the limit is 65,536"), (b"\xff", "not text in UTF-8")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        called = call_database("variables", "set", "v", "-")
        assert called.code != 0
        assert problem in called.err
    assert call_database("variables", "list", "--json").rows() == []


def test_a_connection_shows_its_password_only_when_asked_to(call_database: Any) -> None:
    uri = "postgresql://me:s3cret@db:5432/shop?token=hidden"

    assert call_database("connections", "set", "shop", uri).code == 0

    assert call_database("connections", "get", "shop").out == "postgresql://me:***@db:5432/shop?token=***\n"
    assert call_database("connections", "get", "shop", "--reveal").out == f"{uri}\n"
    assert "s3cret" not in call_database("connections", "list").out
    bad = call_database("connections", "set", "shop", "me:s3cret@db:x")
    assert call_database("connections", "set", "bad", "//me:s3cret@db").code == 2
    assert "s3cret" not in bad.err
    assert call_database("connections", "delete", "shop").code == 0


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://host/path", "http://host/path"),
        ("http://me@host", "http://me@host"),
        ("http://:p@host", "http://:***@host"),
        ("http://me:p%40ss@[::1]:80/x?a=1&b=", "http://me:***@[::1]:80/x?a=***&b=***"),
        ("s3cret", "***"),
        ("http://[", "***"),
    ],
)
def test_a_uri_is_masked(uri: str, shown: str) -> None:
    assert masked(uri) == shown


def test_pools_are_made_changed_and_listed(call_database: Any, etl: Tasks) -> None:
    assert call_database("pools", "set", "gpu", "2").out == "the pool gpu has 2 slots\n"
    assert call_database("pools", "set", "gpu", "3").code == 0
    rows = call_database("pools", "list", "--json").rows()
    assert [(row["name"], row["slots"]) for row in rows] == [("default_pool", 128), ("gpu", 3)]
    assert call_database("pools", "set", "gpu", "-1").code != 0


# --- db clean ------------------------------------------------------------------------------------


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
    assert "dead_letter" in call_database("db", "clean", "--older-than", "1d", "--dead-letters").out


def test_a_cron_dag_says_when_it_runs_next(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.save_file(etl.epoch, "daily.py", [DagSpec("daily", CronSchedule("0 3 * * *"), start_date_s=0.0)])

    rows = {row["name"]: row for row in call_database("dags", "list", "--json").rows()}
    assert rows["daily"]["next_run_at"] is not None
    assert rows["etl"]["next_run_at"] is None
