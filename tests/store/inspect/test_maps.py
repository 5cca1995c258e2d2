"""Mapped tasks as users and other processes see them: one state, one line, and their instances by name."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import Query
from tests.store.scheduling.test_expansion import Maps
from tests.supervisor.tasks_harness import WAIT

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import Values
from headgate.store.errors import NoSuchInstance, NoSuchRow
from headgate.store.store import Store

S = TaskState


@pytest.fixture
def maps(store: Store, query: Query) -> Maps:
    """A run in which ``each`` is expanded over ten values, four at a time, and four of them are scheduled."""
    maps = Maps(store, query, Values(10), spec={"window": 4})
    maps.source_leaves(None)
    return maps


def seen(maps: Maps) -> TaskState:
    """Return the state of the mapped task that a sensor of another DAG sees."""
    standing = maps.store.tasks.run_standing("etl")
    assert standing is not None
    return standing.tasks["each"]


def lines(maps: Maps, **which: Any) -> list[tuple[str, str, Any]]:
    found = maps.store.inspect.tasks(dag="etl", run_id="r1", **which)
    return [(line.name, line.state.value, line.instances) for line in found]


def test_others_see_that_a_map_has_not_ended_until_its_last_instance_has(maps: Maps) -> None:
    assert seen(maps) is S.SCHEDULED
    maps.run_some(4, fails=(2,))
    assert maps.own()["state"] == "none"
    assert seen(maps) is S.SCHEDULED
    maps.run_some(3)
    assert maps.own()["state"] == "success", "all are made"
    assert seen(maps) is S.SCHEDULED
    maps.run_some(2)
    assert seen(maps) is S.SCHEDULED
    maps.run_all()
    assert seen(maps) is S.FAILED


def test_a_map_is_one_line_with_its_instances_counted(maps: Maps) -> None:
    maps.run_some(4, fails=(2,))
    counts = {"failed": 1, "scheduled": 4, "success": 3}
    assert lines(maps) == [
        *(("source", "success", None), ("each[]", "scheduled", counts), ("total", "upstream_failed", None))
    ]
    (each,) = (line for line in maps.store.inspect.tasks() if line.is_map)
    assert (each.task_id, each.map_index, each.map_length, each.ended_at) == ("each", -1, 10, None)
    shown = maps.store.inspect.task(maps.store.inspect.find_task("etl", "r1", "each"))
    assert (shown.line.instances, shown.line.state) == (counts, S.SCHEDULED)
    total = maps.store.inspect.task(maps.store.inspect.find_task("etl", "r1", "total"))
    assert total.upstream == {"each": "scheduled"}


def test_each_instance_is_a_line_and_the_task_only_if_it_says_something(maps: Maps) -> None:
    maps.run_some(4, fails=(2,))
    names = [name for name, _, _ in lines(maps, each=True)]
    assert names == ["source", "total", *(f"each[{index}]" for index in range(8))]
    assert ("each[2]", "failed", None) in lines(maps, each=True)
    assert [name for name, *_ in lines(maps, each=True, states=[S.FAILED])] == ["each[2]"]
    # A run that is cancelled makes the rest never: that is told by its own row.
    maps.store.tasks.cancel_run(maps.run)
    assert "each" in [name for name, *_ in lines(maps, each=True)]


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (S.FAILED, ["each[]"]),
        (S.SCHEDULED, ["each[]"]),
        (S.SUCCESS, ["source", "each[]"]),
        (S.NONE, []),
        (S.UPSTREAM_FAILED, ["total"]),
    ],
)
def test_a_map_is_found_by_the_states_of_its_instances(maps: Maps, state: TaskState, names: list[str]) -> None:
    maps.run_some(4, fails=(2,))
    assert [name for name, *_ in lines(maps, states=[state])] == names


def test_a_run_counts_instances_and_not_the_task_besides(maps: Maps) -> None:
    (run,) = maps.store.inspect.runs()
    assert run.tasks == {"none": 1, "scheduled": 4, "success": 1}
    maps.run_some(4)
    maps.run_all()
    (run,) = maps.store.inspect.runs()
    assert run.tasks == {"success": 12}
    assert maps.store.inspect.run("etl", "r1").line.tasks == {"success": 12}


def test_a_map_that_could_not_be_expanded_counts_itself(store: Store, query: Query) -> None:
    maps = Maps(store, query)
    maps.source_leaves(5)
    (run,) = store.inspect.runs()
    assert run.tasks == {"success": 1, "failed": 1, "upstream_failed": 1}
    assert [name for name, *_ in lines(maps, states=[S.FAILED])] == ["each"]


def test_instances_are_found_by_their_names(maps: Maps) -> None:
    find = maps.store.inspect.find_tasks
    assert [(ref.name, ref.map_index) for ref in find("etl", "latest", "each[3]")] == [("each[3]", 3)]
    assert [ref.map_index for ref in find("etl", "r1", "each[1-3]")] == [1, 2, 3]
    assert [ref.name for ref in find("etl", "r1", "each")] == ["each"]
    assert [ref.name for ref in find("etl", "r1", "each[]")] == ["each"]
    instance = maps.store.inspect.task(find("etl", "r1", "each[3]")[0])
    assert (instance.line.map_index, instance.line.state, instance.line.instances) == (3, S.SCHEDULED, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("each[17]", "each has instances 0 to 3; there is no 17"),
        ("each[2-9]", "each has instances 0 to 3; there is no 4"),
        ("each[3-2]", r"each \[3-2\] ends before it begins"),
        ("total[0]", "total is not mapped"),
        ("eech[1]", r"no task named 'eech\[1\]' in the run r1 of etl; did you mean each"),
        ("each[x]", r"no task named 'each\[x\]'"),
    ],
)
def test_an_instance_that_is_not_there_is_told_apart_from_a_task_that_is_not(
    maps: Maps, name: str, message: str
) -> None:
    with pytest.raises((NoSuchInstance, NoSuchRow), match=message):
        maps.store.inspect.find_tasks("etl", "r1", name)


def test_a_map_without_instances_has_none_yet(store: Store, query: Query) -> None:
    maps = Maps(store, query)
    with pytest.raises(NoSuchInstance, match="each has no instances yet"):
        maps.store.inspect.find_task("etl", "r1", "each[0]")


def test_a_command_for_one_task_does_not_take_several(maps: Maps) -> None:
    with pytest.raises(NoSuchInstance, match=r"are 3 instances: name one of them, such as each\[0\]"):
        maps.store.inspect.find_task("etl", "r1", "each[0-2]")


def test_an_instance_that_holds_a_pool_or_waits_for_a_trigger_is_named_as_one(maps: Maps) -> None:
    (first, second) = maps.dispatch(limit=2)
    assert ends.defer(maps.store.tasks, maps.epoch, first.id, first.token, WAIT)
    (line,) = maps.store.inspect.triggers()
    assert (line.task_id, line.map_index, line.task) == ("each", 0, "each[0]")
    assert ("task", "etl r1 each[0]") in maps.store.inspect.why_trigger(line.id).facts
    waiting = maps.store.inspect.why_task(maps.store.inspect.find_task("etl", "r1", "each[3]"))
    assert ("holders", f"etl r1 each[{second.map_index}] (1)") in waiting.facts
