"""The names of instances in the store: each comes with the end of a step, and not with one that is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import Query
from tests.store.scheduling.test_expansion import Maps

from headgate.protocol.messages.dags import NAME_CHARS_MAX, TaskState
from headgate.protocol.messages.maps import Values
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSkipped, StepSucceeded, XCom
from headgate.scheduling import states
from headgate.store.store import Store
from headgate.store.tasks import task_rows
from headgate.store.tasks.outcomes import StepEnd


@pytest.fixture
def maps(store: Store, query: Query) -> Maps:
    maps = Maps(store, query, Values(3), retries=1, retry_delay_s=0.0)
    maps.source_leaves(None)
    return maps


def names(maps: Maps) -> list[Any]:
    rows = maps.query("SELECT map_name FROM task_instance WHERE map_index >= 0 ORDER BY map_index")
    return [row["map_name"] for row in rows]


@pytest.mark.parametrize(
    "outcome",
    [
        StepSucceeded((XCom("return_value", b"1"),)),
        StepSkipped(),
        StepFailed("boom"),
        StepDeferred("a.B", b"{}", "resume", b"{}"),
    ],
)
def test_a_name_is_stored_with_the_outcome_whatever_it_is(maps: Maps, outcome: StepOutcome) -> None:
    given = maps.dispatch(limit=3)
    store_ends = maps.store.tasks.store_ends
    ended = [StepEnd(task.id, task.token, outcome, map_name=f"user {task.map_index}") for task in given[:2]]
    assert None not in store_ends(maps.epoch, [*ended, StepEnd(given[2].id, given[2].token, outcome)])
    assert names(maps) == ["user 0", "user 1", None]


def test_a_step_that_has_no_name_leaves_the_one_that_there_is(maps: Maps) -> None:
    (task,) = maps.dispatch(limit=1)
    maps.store.tasks.store_ends(maps.epoch, [StepEnd(task.id, task.token, StepFailed("boom"), map_name="a")])
    maps.store.tasks.retry_due(maps.epoch)
    (again,) = (one for one in maps.dispatch() if one.id == task.id)
    assert ends.succeed(maps.store.tasks, maps.epoch, again.id, again.token)
    assert names(maps)[0] == "a"


def test_an_outcome_that_comes_too_late_leaves_no_name(maps: Maps) -> None:
    (task,) = maps.dispatch(limit=1)
    late = StepEnd(task.id, "another", StepSucceeded(), map_name="a")
    assert maps.store.tasks.store_ends(maps.epoch, [late]) == [None]
    assert names(maps) == [None] * 3


def test_a_name_is_cut_and_holds_nothing_that_no_database_stores(maps: Maps) -> None:
    given = maps.dispatch(limit=3)
    told = ["é" * 1000, "a\0b", "\udc80"]
    ended = [
        StepEnd(task.id, task.token, StepSucceeded(), map_name=name) for task, name in zip(given, told, strict=True)
    ]
    maps.store.tasks.store_ends(maps.epoch, ended)
    assert names(maps) == ["é" * NAME_CHARS_MAX, "a\\x00b", "\\udc80"]


def test_lists_of_tasks_have_the_names(maps: Maps) -> None:
    (task,) = maps.dispatch(limit=1)
    maps.store.tasks.store_ends(maps.epoch, [StepEnd(task.id, task.token, StepSucceeded(), map_name="a")])
    found = maps.store.inspect.tasks(dag="etl", run_id="r1", each=True)
    assert {line.id: line.map_name for line in found if line.map_name} == {task.id: "a"}


def test_a_name_is_forgotten_by_what_clears_an_instance_and_by_nothing_else() -> None:
    """It may have other values when it runs again."""
    forgetting = {row.event for row in states.TRANSITIONS if "map_name" in task_rows.effects(row)}
    assert forgetting == {row.event for row in states.TRANSITIONS if row.to is TaskState.NONE} > {"cleared"}
