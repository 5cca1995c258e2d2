"""The commands for tasks and triggers, and `why`, called as a user calls them."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from tests.cli.conftest import states
from tests.store import ends
from tests.store.harness import Query, register
from tests.store.signals.rules_harness import Jobs, ruled
from tests.store.tasks.streams_harness import stream_wait
from tests.supervisor.tasks_harness import WAIT, Tasks

from headgate.protocol.messages.steps import StepFailed
from headgate.protocol.values import encode_value
from headgate.store.facts.spans import StepSpan
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd
from headgate.supervisor.serve import machine_identity

# --- tasks -----------------------------------------------------------------------------------------


def test_tasks_are_listed_and_shown(call_database: Any, etl: Tasks) -> None:
    token = etl.run_it()
    ends.fail(
        etl.store.tasks, etl.epoch, etl.a, token, "Traceback\nValueError: no", xcoms={"k": encode_value(7, where="x")}
    )

    rows = call_database("tasks", "list", "etl", "latest", "--json").rows()
    assert [(row["task_id"], row["state"]) for row in rows] == [("a", "failed"), ("b", "none"), ("c", "none")]
    assert [row["task_id"] for row in call_database("tasks", "list", "--state", "failed", "--json").rows()] == ["a"]
    shown = call_database("tasks", "show", "etl", "r1", "a").out
    assert "last error:\n  Traceback\n  ValueError: no\n" in shown
    (row,) = call_database("tasks", "show", "etl", "r1", "a", "--json").rows()
    assert (row["xcoms"], row["last_error"], row["try_number"]) == ({"k": 7}, "Traceback\nValueError: no", 1)


def test_a_task_shows_what_it_did_with_its_time(call_database: Any, etl: Tasks) -> None:
    etl.plan()
    (task,) = etl.dispatch(limit=1)
    end = StepEnd(task.id, task.token, StepFailed("no"), span=StepSpan(task.try_number, task.ready_at, 0.0))
    etl.store.tasks.store_ends(etl.epoch, [end])
    shown = call_database("tasks", "show", "etl", "r1", "a").out
    assert re.search(r"what it did with its time:\n.*\n( *1 +queued .*\n)? *1 +running .* failed\n", shown)
    (row,) = call_database("tasks", "show", "etl", "r1", "a", "--json").rows()
    assert [(each["phase"], each["outcome"]) for each in row["phases"]][-1] == ("running", "failed")


def test_tasks_are_cleared_with_what_comes_after_them(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.cancel_run(etl.run)

    called = call_database("tasks", "clear", "etl", "r1", "b", "--downstream")

    assert called.out == "cleared 2 tasks of run r1 of etl: b, c\n"
    assert states(etl) == "failed none none"
    assert call_database("tasks", "clear", "etl", "r1", "--only-failed").out == "cleared 1 task of run r1 of etl: a\n"
    assert call_database("tasks", "clear", "etl", "r1", "--only-failed").out == "nothing to clear in run r1 of etl\n"
    assert "cleared 3 tasks" in call_database("tasks", "clear", "etl", "r1", "--all").out


def test_a_task_that_signals_start_waits_for_one_when_it_was_cleared_and_says_so(
    call_database: Any, users_store: Store, query: Query
) -> None:
    jobs = Jobs(users_store, query)
    jobs.send("go")
    jobs.end(jobs.dispatch())
    said = call_database("tasks", "clear", "etl", "r1", "job", "plain").out.splitlines()
    start = "`headgate tasks start etl r1 job`"
    assert said[1:] == [f"job waits for a signal that starts it, as long as its run is open, or {start}"]
    users_store.tasks.set_paused("etl", is_paused=True)
    said = call_database("tasks", "start", "etl", "r1", "job").out.splitlines()
    assert said[1:] == ["the DAG is paused: it starts after `headgate dags unpause etl`"]
    assert len(call_database("tasks", "stop", "etl", "r1", "job").out.splitlines()) == 1


def test_a_clear_says_where_streams_of_tasks_begin(call_database: Any, etl: Tasks, query: Query) -> None:
    wait = stream_wait()
    etl.defer_it(wait)
    for option, streams in (("--go-on", 1), ("--from-start", 0)):
        assert "cleared 1 task" in call_database("tasks", "clear", "etl", "r1", "a", option).out
        assert query("SELECT count(*) AS n FROM task_stream") == [{"n": streams}]
    called = call_database("tasks", "clear", "etl", "r1", "a", "--go-on", "--from-start")
    assert (called.code, "not both" in called.err) == (2, True)


def test_tasks_are_started_restarted_and_stopped_by_hand(call_database: Any, etl: Tasks, query: Query) -> None:
    for command, after in (("start", "scheduled"), ("stop", "skipped"), ("restart", "scheduled")):
        before = states(etl).split()[0]
        called = call_database("tasks", command, "etl", "latest", "a")
        assert called.out == f"a of run r1 of etl, which is {before}, is to {command}\n"
        etl.plan()
        assert states(etl).split()[0] == after
        if command == "stop":
            called = call_database("tasks", "stop", "etl", "latest", "a")
            assert (called.code, called.out) == (0, "a of run r1 of etl has ended already: skipped\n")
    called = call_database("tasks", "start", "etl", "r1", "nothing")
    assert (called.code, "nothing" in called.err) == (1, True)
    assert query("SELECT * FROM signal_key") == [], "no signal stands for it"


@pytest.mark.parametrize("command", ["start", "restart"])
def test_a_start_says_which_tasks_below_do_not_begin_by_it(call_database: Any, etl: Tasks, command: str) -> None:
    ends.fail(etl.store.tasks, etl.epoch, etl.a, etl.run_it(), "no", may_retry=False)
    etl.plan()
    assert states(etl) == "failed upstream_failed upstream_failed"
    called = call_database("tasks", command, "etl", "latest", "a")
    assert called.out.splitlines() == [
        f"a of run r1 of etl, which is failed, is to {command}",
        "tasks below it stay upstream_failed: b, c; `headgate tasks clear etl r1 a --downstream` runs them, too",
    ]
    etl.plan()
    assert states(etl) == "scheduled upstream_failed upstream_failed"
    assert len(call_database("tasks", command, "etl", "latest", "c").out.splitlines()) == 1, "nothing is below it"


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
    assert call_database("tasks", "mark-success", "etl", "r1", "b").out == "marked b of run r1 of etl as success\n"
    assert states(etl) == "success success none"


# --- why and triggers ------------------------------------------------------------------------------


def test_why_says_one_headline_the_facts_and_what_comes_next(call_database: Any, etl: Tasks) -> None:
    called = call_database("why", "etl", "latest", "b")

    first, *facts, last = called.out.splitlines()
    assert first == "it waits for 1 of 1 upstream tasks: a (scheduled)"
    assert any(line.split() == ["upstream", "a", "(scheduled),", "rule", "all_success"] for line in facts)
    assert last.startswith("next: it goes on by its rule all_success")
    (row,) = call_database("why", "etl", "r1", "b", "--json").rows()
    assert (row["reason"], row["headline"]) == ("upstream", first)
    assert ["state", "none"] in row["facts"]


def test_why_knows_that_a_supervisor_of_this_machine_is_gone(call_database: Any, users_store: Store) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    epoch = register(users_store, pid=process.pid, machine=machine_identity(), process_started=1.0)
    users_store.add_watcher("w", "a.B", {})
    users_store.claim_triggers(epoch, limit=1, queues=["default"])

    assert f"supervisor {epoch} (pid {process.pid} on h), is gone" in call_database("why", "w").out


def test_a_traceback_is_printed_only_when_it_is_asked_for(call_database: Any, etl: Tasks) -> None:
    token = etl.run_it()
    error = "ValueError: no\n\nTraceback (most recent call last):\n  File x\nValueError: no"
    ends.fail(etl.store.tasks, etl.epoch, etl.a, token, error)

    first, *_ = call_database("why", "etl", "r1", "a").out.splitlines()
    assert first.endswith("in try 1: ValueError: no")
    assert "Traceback" not in call_database("why", "etl", "r1", "a").out
    whole = call_database("why", "etl", "r1", "a", "--traceback").out
    assert "\nlast error:\n  ValueError: no\n  \n  Traceback (most recent call last):\n    File x\n" in whole
    (row,) = call_database("why", "etl", "r1", "a", "--traceback", "--json").rows()
    assert row["errors"] == [["last error", error]]
    (row,) = call_database("why", "etl", "r1", "a", "--json").rows()
    assert "errors" not in row


def test_the_tracebacks_of_a_run_say_whose_they_are(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.save_import_error(etl.epoch, "etl.py", "SyntaxError: here\n  in line 7")

    whole = call_database("why", "etl", "r1", "--traceback").out

    assert "\nb: error of the DAG file:\n  SyntaxError: here\n    in line 7\n" in whole
    for row in call_database("why", "etl", "r1", "--traceback", "--json").rows():
        assert row["errors"] == [["error of the DAG file", "SyntaxError: here\n  in line 7"]]


def test_why_of_a_run_says_it_of_every_task_that_waits(call_database: Any, etl: Tasks) -> None:
    etl.store.tasks.mark(etl.a, "success")

    rows = call_database("why", "etl", "r1", "--json").rows()

    assert [(row["task_id"], row["reason"]) for row in rows] == [("b", "about_to"), ("c", "upstream")]
    assert "about to be scheduled" in call_database("why", "etl", "r1").out
    etl.store.tasks.cancel_run(etl.run)
    first, _, *failed = call_database("why", "etl", "r1").out.splitlines()
    assert first == "run r1 of etl is failed; these of its tasks failed"
    assert [line.split()[:2] for line in failed] == [["b", "failed"], ["c", "failed"]]
    next_ = call_database("why", "etl", "r1", "b", "--json").rows()[0]["next"]
    again = "`headgate tasks clear etl r1 b --downstream` runs it again, with what is below it"
    without = "after `headgate tasks mark-success etl r1 b` the run goes on without it"
    assert next_ == f"nothing by itself; {again}; {without}"


def test_why_of_a_run_that_signals_keep_open_says_how_it_ends(
    call_database: Any, users_store: Store, query: Query
) -> None:
    jobs = Jobs(users_store, query, ruled())
    jobs.send("go")
    jobs.end(jobs.dispatch())
    open_ = "run r1 of etl is running; none of its tasks is waiting, but signals may start each of them, until "
    assert call_database("why", "etl", "r1").out == f"{open_}`headgate runs end etl r1`\n"
    users_store.signals.end_run(jobs.tasks.run)
    assert call_database("why", "etl", "r1").out == "run r1 of etl is running; none of its tasks is waiting\n"
    jobs.settle()
    assert call_database("why", "etl", "r1").out == "run r1 of etl is success; none of its tasks is waiting\n"


def test_why_of_a_deferred_task_and_of_its_trigger_agree(call_database: Any, etl: Tasks) -> None:
    (given,) = etl.dispatch()
    ends.defer(etl.store.tasks, etl.epoch, given.id, given.token, WAIT)
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
    ends.defer(etl.store.tasks, etl.epoch, given.id, given.token, WAIT)
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
