"""The commands for mapped tasks and their instances, called as a user calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.scheduling.test_expansion import Maps
from tests.store.scheduling.test_groups import Grouped
from tests.store.scheduling.test_worklists import Crawl

from headgate.protocol.messages.maps import Values
from headgate.protocol.messages.steps import StepSucceeded
from headgate.store.ids import TryName
from headgate.store.store import Store
from headgate.supervisor.logs.task_logs import TaskLogs


@pytest.fixture
def maps(users_store: Store, query: Query) -> Maps:
    """A run in which ``each`` is expanded over six values, four at a time; of the first four one has failed."""
    maps = Maps(users_store, query, Values(6), spec={"window": 4})
    maps.source_leaves(None)
    maps.run_some(4, fails=(2,), value=lambda index: index * 10)
    return maps


def test_a_mapped_task_is_one_line_of_a_list(call_database: Any, maps: Maps) -> None:
    for command in (("tasks", "list"), ("runs", "show")):
        (line,) = (line for line in call_database(*command, "etl", "r1").out.splitlines() if "each" in line)
        assert line.split("  ")[0] == "each[]"
        assert line.split("  ", 1)[1].split() == "scheduled 3 success, 1 failed, 2 open of 6".split()
    rows = call_database("tasks", "list", "etl", "r1", "--json").rows()
    assert [(row["task_id"], row["map_index"], row["map_length"]) for row in rows] == [
        *(("source", -1, None), ("each", -1, 6), ("total", -1, None))
    ]
    assert rows[1]["instances"] == {"failed": 1, "scheduled": 2, "success": 3}


def test_its_instances_are_listed_if_they_are_asked_for(call_database: Any, maps: Maps) -> None:
    rows = call_database("tasks", "list", "etl", "r1", "--each", "--json").rows()
    assert [row["map_index"] for row in rows if row["task_id"] == "each"] == [0, 1, 2, 3, 4, 5]
    failed = call_database("tasks", "list", "--each", "--state", "failed").out
    assert "each[2]" in failed
    assert "each[1]" not in failed
    assert "1 failed, 1 upstream_failed" in call_database("runs", "list").out


def test_a_map_and_an_instance_are_shown_with_the_xcoms_of_the_instance(call_database: Any, maps: Maps) -> None:
    shown = call_database("tasks", "show", "etl", "r1", "each").out
    assert "  3 success, 1 failed, 2 open of 6\n" in shown
    assert "map index" not in shown
    shown = call_database("tasks", "show", "etl", "r1", "each[3]").out
    told = [line.split() for line in shown.splitlines()]
    assert ["map", "index", "3"] in told
    assert ["XCom", "return", "value", "30"] in told
    rows = call_database("tasks", "show", "etl", "r1", "each[1-3]", "--json").rows()
    assert [(row["map_index"], row["xcoms"].get("return_value")) for row in rows] == [(1, 10), (2, None), (3, 30)]
    assert call_database("tasks", "show", "etl", "r1", "each[6]").err == (
        "headgate: each has instances 0 to 5; there is no 6\n"
    )


def test_the_log_of_an_instance_is_its_own(call_database: Any, maps: Maps, home: Path) -> None:
    logs = TaskLogs(home / "logs")
    for index in (1, 3):
        logs.write(TryName("etl", "r1", "each", 1, index), {"event": f"I am {index}", "level": "info"})
    logs.close()
    one = call_database("tasks", "logs", "etl", "r1", "each[3]").out
    assert "I am 3" in one
    assert "I am 1" not in one
    first, second, missing, third, fourth = call_database("tasks", "logs", "etl", "r1", "each[1-3]").out.splitlines()
    assert (first, third) == ("--- each[1], try 1 ---", "--- each[3], try 1 ---")
    assert missing.startswith("--- there is no log of each[2] in ")
    assert (second.endswith("I am 1"), fourth.endswith("I am 3")) == (True, True)
    rows = call_database("tasks", "logs", "etl", "r1", "each[1-3]", "--json").rows()
    assert [(row["map_index"], row["event"]) for row in rows] == [(1, "I am 1"), (3, "I am 3")]
    assert "name one of them, such as each[0]" in call_database("tasks", "logs", "etl", "r1", "each").err
    assert call_database("tasks", "logs", "etl", "r1", "each[1-3]", "--follow").code == 2
    followed = call_database("tasks", "logs", "etl", "r1", "each[3]", "--follow").out
    assert "I am 3" in followed, "it has ended: all that there is"


def test_a_map_and_its_instances_are_cleared_and_marked(call_database: Any, maps: Maps) -> None:
    cleared = call_database("tasks", "clear", "etl", "r1", "each", "--only-failed")
    assert cleared.out == "cleared 1 task of run r1 of etl: each (1 instance)\n"
    cleared = call_database("tasks", "clear", "etl", "r1", "each[0-3]", "--downstream")
    assert cleared.out == "cleared 2 tasks of run r1 of etl: each (4 instances), total\n"
    assert maps.instances()[:4] == ["none"] * 4
    marked = call_database("tasks", "mark-success", "etl", "r1", "each[0-1]")
    assert marked.out == "marked each[0-1] (2 of them) of run r1 of etl as success\n"
    assert call_database("tasks", "mark-failed", "etl", "r1", "each[2]").out.startswith("marked each[2] of run")
    assert (
        call_database("tasks", "mark-success", "etl", "r1", "each").out == "marked each of run r1 of etl as success\n"
    )
    assert maps.instances() == ["success", "success", "failed", "success", "success", "success"]
    again = call_database("tasks", "mark-success", "etl", "r1", "each")
    assert (again.code, "has ended already: failed" in again.err) == (1, True)
    assert "cleared 2 tasks of run r1 of etl: each (6 instances), total" in (
        call_database("tasks", "clear", "etl", "r1", "each[]", "--downstream").out
    )
    for command in (("tasks", "clear"), ("tasks", "mark-failed")):
        assert "there is no 9" in call_database(*command, "etl", "r1", "each[9]").err


def test_a_run_of_maps_is_cancelled(call_database: Any, maps: Maps) -> None:
    cancelled = call_database("runs", "cancel", "etl", "r1").out
    assert cancelled == "cancelled run r1 of etl: 2 unfinished tasks have ended as failed\n"


def test_a_worklist_counts_its_instances_so_far(call_database: Any, users_store: Store, query: Query) -> None:
    crawl = Crawl(users_store, query)
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append("b", "c")))
    (line,) = (line for line in call_database("tasks", "list", "etl", "r1").out.splitlines() if "each" in line)
    assert "1 success, 2 open so far" in line
    for _ in range(2):
        crawl.end(crawl.take(), StepSucceeded())
    (line,) = (line for line in call_database("tasks", "list", "etl", "r1").out.splitlines() if "each" in line)
    assert "3 success of 3" in line


def test_a_dag_shows_the_group_of_a_task_and_over_what_it_is_expanded(
    call_database: Any, users_store: Store, query: Query
) -> None:
    Grouped(users_store, query)
    rows = call_database("dags", "show", "etl", "--json").rows()[0]["task_list"]
    assert [(row["task_id"], row["group"], row["expanded_over"]) for row in rows] == [
        *(("source", None, None), ("a", "g", "source"), ("b", "g", "source"), ("total", None, None))
    ]
    shown = call_database("dags", "show", "etl").out
    assert "expanded over" in shown


# --- why -----------------------------------------------------------------------------------------


def headline(call_database: Any, *names: str) -> str:
    return str(call_database("why", "etl", "r1", *names).out.splitlines()[0])


def test_why_says_how_far_a_map_is_expanded_and_what_its_window_has(
    call_database: Any, users_store: Store, query: Query
) -> None:
    maps = Maps(users_store, query, Values(10), spec={"window": 4})
    maps.plan()
    assert headline(call_database, "each") == "it waits for 1 of 1 upstream tasks: source (scheduled)"
    maps.source_leaves(None)
    maps.dispatch(limit=1)
    assert headline(call_database, "each") == "expanded 4 of 10; window 4 full: 3 scheduled, 1 running"
    whole = call_database("why", "etl", "r1", "each").out
    assert "`headgate why etl r1 'each[0]'` says what the first of them waits for" in whole
    assert {("state", "running"), ("instances", "4 open of 10"), ("window", "4")} <= {
        tuple(line.split(maxsplit=1)) for line in whole.splitlines()
    }
    assert headline(call_database, "each[0]").startswith("it runs on a worker of supervisor")
    assert headline(call_database, "each[1]").startswith("it waits")
    assert "expanded 4 of 10" in call_database("why", "etl", "r1").out
    (row,) = (row for row in call_database("why", "etl", "r1", "--json").rows() if row["task_id"] == "each")
    assert (row["state"], row["reason"]) == ("running", "window_full")


def test_why_says_how_a_map_stands_of_which_all_instances_are_made(call_database: Any, maps: Maps) -> None:
    assert headline(call_database, "each") == "6 instances are made: 2 scheduled; 3 success, 1 failed"
    maps.run_all()
    assert headline(call_database, "each") == "it waits for nothing: 6 instances are made, 5 success, 1 failed"
    assert "tasks clear etl r1 each --only-failed" in call_database("why", "etl", "r1", "each").out
    maps.store.tasks.clear_many(maps.run, ["each"])
    assert headline(call_database, "each") == "expanded 6: 4 may begin now"
    assert headline(call_database, "each[2]") == "expanded 6: 4 may begin now"


def test_why_says_that_a_map_was_stopped_or_cannot_be_expanded(
    call_database: Any, users_store: Store, query: Query
) -> None:
    maps = Maps(users_store, query, spec={"window": 2, "fail_fast": True})
    maps.source_leaves(["a", "b", "c"])
    maps.run_some(1, fails=(0,))
    assert headline(call_database, "each").startswith(
        "it waits for nothing: stopped by fail_fast after 2 of 3, 1 failed"
    )
    maps.store.tasks.clear_many(maps.run)
    maps.source_leaves(5)
    assert headline(call_database, "each").startswith("it cannot be expanded")
    assert "tasks clear etl r1 source --downstream" in call_database("why", "etl", "r1", "each").out


def test_why_says_what_a_map_is_to_be_expanded_over(call_database: Any, users_store: Store, query: Query) -> None:
    Maps(users_store, query).plan()
    assert headline(call_database, "each") == "it waits for source, over whose output it is expanded"


def test_why_says_that_a_clear_has_not_ended(call_database: Any, maps: Maps) -> None:
    maps.query("UPDATE task_instance SET state = 'none', map_length = -1 WHERE task_id = 'each' AND map_index = -1")
    assert headline(call_database, "each") == (
        "an action of a user on its instances has not ended: until then none of them begins"
    )
    assert "each[]" in call_database("tasks", "list", "etl", "r1").out
    assert "-1" not in call_database("tasks", "list", "etl", "r1").out
    call_database("tasks", "clear", "etl", "r1", "each")
    assert maps.own()["map_length"] is None
