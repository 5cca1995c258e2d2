"""Mapped groups in the store: an index goes through the whole group, whatever the others do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import Query
from tests.store.scheduling.test_expansion import Maps
from tests.supervisor.tasks_harness import Tasks, clear, task_states

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState, check_dag
from headgate.protocol.messages.maps import GROUP_TASKS_MAX, MapSpec, Output, Source, Values
from headgate.store.scheduling import planning
from headgate.store.store import Store
from headgate.store.tasks.user_actions import every_instance

S = TaskState
OF_SOURCE = Output("source", "return_value")


def group(name: str, over: Source, *tasks: TaskSpec, **limits: Any) -> tuple[TaskSpec, ...]:
    """The tasks of a mapped group."""
    spec = MapSpec(over, **limits)
    return tuple(task.__class__(**{**_fields(task), "map": spec, "group": name}) for task in tasks)


def _fields(task: TaskSpec) -> dict[str, Any]:
    return {name: getattr(task, name) for name in task.__struct_fields__}


class Grouped(Maps):
    """A run in which the group of ``a`` and, below it, ``b`` is expanded over what ``source`` leaves."""

    def __init__(self, store: Store, query: Query, over: Source = OF_SOURCE, *more: TaskSpec, **limits: Any) -> None:
        above = limits.pop("above_b", ())
        rules = limits.pop("rules", {})
        tasks = (
            TaskSpec("source", "Op"),
            *[TaskSpec(name, "Op") for name in above],
            *group(
                "g",
                over,
                TaskSpec("a", "Op", upstream=("source",), **rules.get("a", {})),
                TaskSpec("b", "Op", upstream=("a", *above), **rules.get("b", {})),
                *more,
                **limits,
            ),
            TaskSpec("total", "Op", upstream=("b",), **rules.get("total", {})),
        )
        Tasks.__init__(self, store, query, tasks=tasks)

    def go(self, task_id: str, index: int, how: str = "succeed", **left: Any) -> None:
        """Have a worker run one instance; it has to be scheduled. The run is evaluated then."""
        given = {(task.task_id, task.map_index): task for task in self.dispatch(limit=100)}
        self.given = {**getattr(self, "given", {}), **given}
        task = self.given.pop((task_id, index))
        if how == "fail":
            ends.fail(self.store.tasks, self.epoch, task.id, task.token, "boom")
        else:
            ends.succeed(self.store.tasks, self.epoch, task.id, task.token, **left)
        self.plan()

    def states(self) -> dict[str, str]:
        """The states of the instances of each task, by index, a letter each."""
        return {name: "".join(state[0] for state in self.instances(name)) for name in ("a", "b")}


def test_an_index_goes_through_the_whole_group_whatever_the_others_do(store: Store, query: Query) -> None:
    maps = Grouped(store, query)
    maps.source_leaves([1, 2, 3])
    assert (maps.instances("a"), maps.instances("b")) == (["scheduled"] * 3, ["none"] * 3)
    maps.go("a", 1)
    assert maps.instances("b") == ["none", "scheduled", "none"]
    maps.go("b", 1)
    assert task_states(store, maps.run)["total"] is S.NONE
    for index in (0, 2):
        maps.go("a", index)
        maps.go("b", index)
    assert task_states(store, maps.run) == {"source": S.SUCCESS, "a": S.SUCCESS, "b": S.SUCCESS, "total": S.SCHEDULED}


def test_the_window_counts_indexes(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(5), window=2)
    maps.source_leaves(None)
    assert (maps.instances("a"), maps.instances("b")) == (["scheduled"] * 2, ["none"] * 2)
    maps.go("a", 0)
    assert len(maps.instances("a")) == 2, "the index 0 is still open"
    maps.go("b", 0)
    assert (maps.instances("a"), maps.instances("b")) == (
        ["success", "running", "scheduled"],
        ["success", "none", "none"],
    )
    maps.go("a", 1)
    for index in (1, 2, 3, 4):
        maps.go("a", index) if index > 1 else None
        maps.go("b", index)
    assert (maps.own("a")["state"], maps.own("b")["state"]) == ("success", "success")
    assert (maps.own("a")["map_length"], maps.own("b")["map_length"]) == (5, 5)
    assert maps.instances("b") == ["success"] * 5


def test_a_failure_costs_its_own_index_only(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(2), rules={"total": {"trigger_rule": "all_done"}})
    maps.source_leaves(None)
    maps.go("a", 0, "fail")
    assert maps.instances("b") == ["upstream_failed", "none"]
    maps.go("a", 1)
    maps.go("b", 1)
    assert maps.instances("b") == ["upstream_failed", "success"]
    assert task_states(store, maps.run)["total"] is S.SCHEDULED


def test_a_rule_looks_at_its_own_index_and_at_whole_tasks_outside(store: Store, query: Query) -> None:
    cleanup = TaskSpec("c", "Op", upstream=("b",), trigger_rule="all_done")
    maps = Grouped(store, query, Values(2), cleanup, above_b=("other",))
    maps.plan()
    maps.go("source", -1)
    maps.go("a", 0, "fail")
    assert (maps.instances("b"), maps.instances("c")) == (["upstream_failed", "none"], ["scheduled", "none"])
    maps.go("a", 1)
    assert maps.instances("b") == ["upstream_failed", "none"], "it waits for the other task"
    maps.go("other", -1)
    assert maps.instances("b") == ["upstream_failed", "scheduled"]


def test_what_the_group_waits_for_in_vain_makes_no_instances(store: Store, query: Query) -> None:
    maps = Grouped(store, query, above_b=("other",))
    maps.plan()
    maps.go("source", -1, "fail")
    assert (maps.own("a")["state"], maps.own("b")["state"]) == ("upstream_failed", "upstream_failed")
    assert maps.instances("a") == maps.instances("b") == []
    maps.go("other", -1)
    assert maps.ended() == "failed"


def test_a_branch_that_passes_over_the_group_skips_it(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(3))
    maps.plan()
    maps.go("source", -1, skips=("a",))
    assert [maps.own(name)["state"] for name in ("a", "b")] == ["skipped", "skipped"]
    assert (maps.instances("a"), maps.ended()) == ([], "success")


def test_no_values_skip_the_group(store: Store, query: Query) -> None:
    maps = Grouped(store, query)
    maps.source_leaves([])
    assert [maps.own(name)["state"] for name in ("a", "b")] == ["skipped", "skipped"]
    assert maps.ended() == "success"


def test_values_that_cannot_be_counted_fail_the_group(store: Store, query: Query) -> None:
    maps = Grouped(store, query)
    maps.source_leaves("text")
    assert [maps.own(name)["state"] for name in ("a", "b")] == ["failed", "failed"]
    assert "the group 'g' is expanded over what 'source' has left" in maps.own("a")["last_error"]


def test_a_branch_in_the_group_skips_at_its_index_alone(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(2))
    maps.source_leaves(None)
    maps.go("a", 0, skips=("b",))
    maps.go("a", 1)
    assert maps.instances("b") == ["skipped", "scheduled"]


def test_with_fail_fast_no_other_index_begins_and_those_that_have_go_on(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(5), window=2, fail_fast=True)
    maps.source_leaves(None)
    maps.go("a", 0, "fail")
    assert maps.states() == {"a": "fr", "b": "un"}
    maps.go("a", 1)
    assert maps.instances("b") == ["upstream_failed", "scheduled"]
    maps.go("b", 1)
    assert "no instance is made after the first 2" in maps.own("a")["last_error"]
    assert maps.ended() == "failed"


def test_no_index_begins_while_the_dag_is_paused(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(2))
    maps.plan()
    (source,) = maps.dispatch(limit=1)
    query("UPDATE dag SET is_paused = true")
    ends.succeed(store.tasks, maps.epoch, source.id, source.token)
    maps.plan()
    assert maps.instances("a") == []
    query("UPDATE dag SET is_paused = false")
    query("UPDATE dag_run SET needs_look = true")
    maps.plan()
    assert maps.instances("a") == ["scheduled", "scheduled"]


def test_a_whole_task_of_the_group_that_is_cleared_begins_again_a_window_at_a_time(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(4), window=2)
    maps.source_leaves(None)
    maps.run_all()
    assert maps.states() == {"a": "ssss", "b": "ssss"}
    clear(store, maps.run, "b")
    maps.plan()
    assert Counter(maps.instances("b")) == {"scheduled": 2, "none": 2}
    maps.run_all()
    assert maps.instances("b") == ["success"] * 4


def test_a_task_that_a_user_ended_early_gets_the_rest_of_its_instances_when_the_group_is_cleared(
    store: Store, query: Query
) -> None:
    maps = Grouped(store, query, Values(3), window=1)
    maps.source_leaves(None)
    store.tasks.mark_map(maps.run, every_instance("b"), "failed")
    maps.run_all()
    assert maps.states() == {"a": "sss", "b": "f"}
    clear(store, maps.run, "a", "b")
    maps.plan()
    maps.run_all()
    assert maps.states() == {"a": "sss", "b": "sss"}
    assert (maps.own("a")["state"], maps.own("b")["state"]) == ("success", "success")


def test_an_index_far_behind_others_that_wait_is_decided_as_well(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = Grouped(store, query, Values(8), window=1)
    maps.source_leaves(None)
    maps.run_all()
    clear(store, maps.run, "source", "b", "a[7]")
    monkeypatch.setattr(planning, "TASKS_PER_RUN_MAX", 2)
    maps.plan()
    maps.go("source", -1, "fail")
    assert maps.instances("a") == ["success"] * 7 + ["upstream_failed"]
    for index in range(7):
        maps.go("b", index)
    assert maps.instances("b") == ["success"] * 7 + ["upstream_failed"]


def test_a_source_that_leaves_fewer_values_the_next_time_removes_the_others(store: Store, query: Query) -> None:
    maps = Grouped(store, query)
    maps.source_leaves([1, 2, 3])
    maps.run_all()
    clear(store, maps.run)
    maps.source_leaves([1, 2])
    maps.run_all()
    assert maps.instances("a") == maps.instances("b") == ["success", "success", "removed"]
    assert maps.ended() == "success"


def test_a_task_that_is_new_in_the_group_gets_its_instances(store: Store, query: Query) -> None:
    maps = Grouped(store, query, Values(3), window=2)
    maps.source_leaves(None)
    maps.run_some(2)
    tasks = (
        TaskSpec("source", "Op"),
        *group(
            "g",
            Values(3),
            TaskSpec("a", "Op", upstream=("source",)),
            TaskSpec("b", "Op", upstream=("a",)),
            TaskSpec("c", "Op", upstream=("a",)),
            window=2,
        ),
        TaskSpec("total", "Op", upstream=("b", "c")),
    )
    store.tasks.save_file(maps.epoch, "etl.py", [DagSpec("etl", tasks=tasks)])
    maps.plan()
    maps.run_all()
    assert maps.instances("c") == ["success"] * 3
    assert maps.ended() == "success"


def test_what_is_downstream_of_an_instance_is_that_at_its_index_and_whole_tasks_outside(
    store: Store, query: Query
) -> None:
    maps = Grouped(store, query, Values(3))
    maps.source_leaves(None)
    maps.run_all()
    answer = store.tasks.clear_many(maps.run, ["a[1]"], downstream=True)
    assert (answer.cleared, answer.instances) == ({"total": S.NONE}, {"a": 1, "b": 1})
    maps.plan()
    assert (maps.instances("a"), maps.instances("b")) == (
        ["success", "scheduled", "success"],
        ["success", "none", "success"],
    )
    answer = store.tasks.clear_many(maps.run, ["b[0]"], upstream=True)
    assert (answer.cleared, answer.instances) == ({"source": S.NONE}, {"a": 1, "b": 1})


# --- bad input -----------------------------------------------------------------------------------


def _malformed(*tasks: TaskSpec) -> str:
    with pytest.raises(DagMalformed) as error:
        check_dag(DagSpec("d", tasks=tasks))
    return str(error.value)


def test_tasks_of_a_group_are_mapped_alike() -> None:
    one = group("g", Values(2), TaskSpec("a", "Op"))
    other = group("g", Values(3), TaskSpec("b", "Op", upstream=("a",)))
    assert "'g' has tasks that are not mapped as the others are" in _malformed(*one, *other)
    assert "not mapped as the others" in _malformed(*one, TaskSpec("b", "Op", group="g"))


def test_a_group_is_not_left_and_entered_again() -> None:
    inside = group("g", Values(2), TaskSpec("a", "Op"), TaskSpec("b", "Op", upstream=("x",)))
    assert "g >> x >> g" in _malformed(*inside, TaskSpec("x", "Op", upstream=("a",)))


def test_a_group_is_not_expanded_over_itself() -> None:
    tasks = group("g", Output("a", "k"), TaskSpec("a", "Op"), TaskSpec("b", "Op", upstream=("a",)))
    assert "is expanded over the output of 'a', which is one of its tasks" in _malformed(*tasks)


def test_a_group_is_downstream_of_what_it_is_expanded_over() -> None:
    tasks = group("g", Output("x", "k"), TaskSpec("a", "Op"))
    assert "the output of 'x', which is not upstream of it" in _malformed(TaskSpec("x", "Op"), *tasks)


def test_a_group_has_not_too_many_tasks() -> None:
    tasks = [TaskSpec(f"t{number}", "Op") for number in range(GROUP_TASKS_MAX + 1)]
    assert f"'g' has {GROUP_TASKS_MAX + 1} tasks" in _malformed(*group("g", Values(2), *tasks))


def test_where_a_user_has_ended_a_task_of_the_group_what_is_below_waits_for_the_whole_task(
    store: Store, query: Query
) -> None:
    maps = Grouped(store, query, Values(3), TaskSpec("c", "Op", upstream=("b",)), window=2)
    maps.source_leaves(None)
    maps.go("a", 0)
    maps.go("a", 1)
    store.tasks.mark_map(maps.run, every_instance("b"), "success")
    marked = maps.given.pop(("b", 0))
    ends.lose_worker(store.tasks, maps.epoch, marked.id, marked.token, "a user has marked the task")
    clear(store, maps.run, "b[0]")
    maps.plan()
    maps.go("c", 1)
    assert (maps.instances("a")[2:], maps.instances("b")) == (["scheduled"], ["running", "success"])
    assert maps.instances("c") == ["none", "success", "none"]
    maps.go("b", 0)
    maps.go("c", 0)
    maps.go("c", 2)
    maps.go("a", 2)
    assert maps.instances("c") == ["success"] * 3
