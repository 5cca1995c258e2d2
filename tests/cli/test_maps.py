"""The commands for mapped tasks and their instances, called as a user calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.scheduling.test_expansion import Maps

from headgate.protocol.messages.maps import Values
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
