"""The commands for DAGs and runs, called as a user calls them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cli.conftest import states
from tests.store.harness import Query
from tests.store.signals.rules_harness import Jobs, ruled
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.messages.dags import CronSchedule, DagSpec
from headgate.protocol.values import decode_value
from headgate.store.ids import DagRunId
from headgate.store.store import Store
from headgate.store.tasks.user_actions import Ended, UserActionVerbs

# --- dags ------------------------------------------------------------------------------------------


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


def test_runs_of_a_dag_are_listed_by_its_name_or_the_option(call_database: Any, etl: Tasks) -> None:
    for given in (["etl"], ["--dag", "etl"]):
        assert [row["run_id"] for row in call_database("runs", "list", *given, "--json").rows()] == ["r1"]
    twice = call_database("runs", "list", "etl", "--dag", "etl")
    assert (twice.code, "name the DAG once" in twice.err) == (2, True)


def test_a_run_without_a_name_is_named_by_the_time(call_database: Any, etl: Tasks) -> None:
    assert call_database("dags", "trigger", "etl").out.startswith("created run manual__2")
    (row,) = call_database("runs", "list", "--limit", "1", "--json").rows()
    assert (row["run_type"], row["run_id"][:8]) == ("manual", "manual__")


def test_a_dag_without_tasks_is_told_of_where_it_is_started_and_shown(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.save_file(etl.epoch, "empty.py", [DagSpec("empty")])
    way_out = "a @task function makes one when it is called in the DAG's with block\n"
    called = call_database("dags", "trigger", "empty", "--run-id", "mine")
    assert called.out == f"created run mine of empty\nthe DAG has no tasks, so the run does nothing: {way_out}"
    assert call_database("dags", "show", "empty").out.endswith(f"the DAG has no tasks: {way_out}")


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
        (["--run-id", ".."], "--run-id: '..' has another meaning"),
        (["--conf", "[" * 3000 + "]" * 3000], "--conf: is nested too deeply"),
        (["--conf", '{"p": "\\ud800"}'], "half of a surrogate pair, which is not text"),
        (["--conf", '{"a": [{"n": 1, "p": 2, "n": 3}]}'], "--conf: the name 'n' is there twice in one object"),
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
        (["runs", "list", "--dag", "elt"], "did you mean etl?"),
        (["runs", "show", "etl", "rr1"], "no run named 'rr1' in the DAG etl; did you mean r1?"),
        (["tasks", "show", "etl", "r1", "aa"], "no task named 'aa' in the run r1 of etl; did you mean a?"),
        (["tasks", "clear", "etl", "r1", "aa"], "did you mean a?"),
        (["tasks", "mark-failed", "etl", "latest", "aa"], "in the run r1 of etl; did you mean a?"),
        (["why", "etl", "r1", "aa"], "did you mean a?"),
        (["why", "9999"], "no DAG, trigger or watcher named '9999'"),
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


def test_a_cron_dag_says_when_it_runs_next(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.save_file(etl.epoch, "daily.py", [DagSpec("daily", CronSchedule("0 3 * * *"), start_date_s=0.0)])

    rows = {row["name"]: row for row in call_database("dags", "list", "--json").rows()}
    assert rows["daily"]["next_run_at"] is not None
    assert rows["etl"]["next_run_at"] is None


# --- runs ------------------------------------------------------------------------------------------


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
    assert "There are more than 2" in call_database("runs", "list", "--limit", "2").out
    as_json = call_database("runs", "list", "--limit", "2", "--json")
    assert (len(as_json.rows()), as_json.err) == (2, "There are more than 2: --limit and --all show them.\n")
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


def test_a_cancel_of_a_run_that_signals_alone_keep_open_tells_of_the_other_end(
    call_database: Any, users_store: Store, query: Query
) -> None:
    jobs = Jobs(users_store, query, ruled())
    jobs.send("go")
    jobs.end(jobs.dispatch())
    cancelled, other = call_database("runs", "cancel", "etl", "r1").out.splitlines()
    assert cancelled == "cancelled run r1 of etl: 0 unfinished tasks have ended as failed"
    assert other == "only signals kept it open: `headgate runs end` ends such a run in the state that its tasks give it"


def test_a_run_that_ended_by_itself_at_the_last_moment_is_not_said_to_be_cancelled(
    call_database: Any, etl: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = UserActionVerbs.cancel_run

    def cancel_too_late(self: UserActionVerbs, run: DagRunId) -> Ended:
        for name in ("a", "b", "c"):
            self.mark(etl.store.inspect.find_task("etl", "r1", name).id, "success")
        etl.store.scheduling.plan(etl.epoch)
        return cancel(self, run)

    monkeypatch.setattr(UserActionVerbs, "cancel_run", cancel_too_late)
    called = call_database("runs", "cancel", "etl", "r1")
    assert (called.code, called.out) == (1, "")
    assert called.err == "headgate: the run r1 of etl has ended by itself: success\n"


# --- DAG files with mistakes, and dates ----------------------------------------------------------


def test_a_dag_that_is_missing_may_be_in_a_file_that_cannot_be_parsed(call_database: Any, etl: Tasks) -> None:
    assert call_database("dags", "show", "d7").err == "headgate: there is no DAG named 'd7'\n"
    etl.store.tasks.save_import_error(etl.epoch, "dags/d7.py", "NameError: x")

    called = call_database("dags", "trigger", "d7")

    broken = "named 'd7'; 1 file cannot be parsed: d7.py (headgate dags list)\n"
    assert call_database("why", "d7").err == f"headgate: there is no DAG, trigger or watcher {broken}"
    problem = "there is no DAG named 'd7'; 1 file cannot be parsed: d7.py (headgate dags list)"
    assert (called.code, called.err) == (1, f"headgate: {problem}\n")


def test_a_dag_that_was_removed_is_known(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.save_file(etl.epoch, "etl.py", [])
    told = "headgate: no DAG file has the DAG etl any more, which was in etl.py: its runs and events are kept\n"
    for command in (("why", "etl"), ("dags", "show", "etl"), ("dags", "trigger", "etl")):
        called = call_database(*command)
        assert (called.code, called.err) == (1, told), command
    assert call_database("runs", "list", "etl").code == 0


def test_many_files_with_mistakes_take_a_line_each_and_leave_the_dags_in_sight(call_database: Any, etl: Tasks) -> None:
    for number in range(50):
        etl.store.tasks.save_import_error(etl.epoch, f"bad{number:02}.py", "Traceback:\n  File here\nNameError: x")

    lines = call_database("dags", "list").out.splitlines()

    assert len(lines) < 20
    assert lines[1].startswith("etl ")
    assert "50 files cannot be parsed; their tracebacks: headgate dags list --errors" in lines
    assert lines[-1] == "  and 40 more"
    assert call_database("dags", "list", "--errors").out.count("NameError: x") == 50


def test_several_dags_are_paused_at_once_or_none(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.save_file(etl.epoch, "two.py", [DagSpec("two", None)])

    assert call_database("dags", "pause", "etl", "nope").code == 1
    assert call_database("dags", "list", "--paused", "--json").rows() == []
    assert call_database("dags", "pause", "etl", "two").out == "paused etl\npaused two\n"


def test_a_run_with_a_logical_date_is_about_the_data_interval_of_that_date(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.save_file(etl.epoch, "daily.py", [DagSpec("daily", CronSchedule("0 3 * * *"), start_date_s=0.0)])

    called = call_database("dags", "trigger", "daily", "--logical-date", "2026-11-01T12:00Z", "--run-id", "mine")

    interval = ("2026-11-01T03:00:00+00:00", "2026-11-02T03:00:00+00:00")
    assert called.out.splitlines()[1] == f"its data interval: {interval[0]} to {interval[1]}"
    (run,) = call_database("runs", "show", "daily", "mine", "--json").rows()
    assert (run["data_interval_start"], run["data_interval_end"]) == interval
    again = call_database("dags", "trigger", "daily", "--logical-date", "2026-11-01T12:00Z")
    assert again.code == 0, "the date need not be unique"


def test_a_run_is_told_to_end(call_database: Any, etl: Tasks, query: Query) -> None:
    assert call_database("runs", "end", "etl", "latest").out == (
        "run r1 of etl is to end: signals start nothing of it any more\n"
    )
    called = call_database("tasks", "start", "etl", "r1", "a")
    assert (called.code, "the run is to end: nothing of it starts any more" in called.err) == (1, True)
    etl.store.tasks.cancel_run(etl.run)
    called = call_database("runs", "end", "etl", "r1")
    assert (called.code, "the run r1 of etl has ended already: failed" in called.err) == (1, True)
