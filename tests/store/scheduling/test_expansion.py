"""Mapped tasks in the store: which instances are made, when they begin, and when the task has ended."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Query
from tests.supervisor.tasks_harness import Tasks, clear, task_states

from headgate.protocol.messages.dags import TaskSpec, TaskState, TriggerRule
from headgate.protocol.messages.maps import Batch, Concat, MapSpec, Output, Product, Source, Values, Zip
from headgate.protocol.messages.queries import XComPage
from headgate.protocol.values import encode_value
from headgate.store.ids import TaskInstanceId
from headgate.store.scheduling.planning import TASKS_PER_RUN_MAX
from headgate.store.store import Store

OF_SOURCE = Output("source", "return_value")


class Maps(Tasks):
    """A run of a DAG in which ``each`` is expanded over ``over``, ``total`` is below it, and ``source`` above."""

    def __init__(self, store: Store, query: Query, over: Source = OF_SOURCE, *, spec: Any = None, **each: Any) -> None:
        mapped = MapSpec(over, **(spec or {}))
        tasks = (
            TaskSpec("source", "Op"),
            TaskSpec("each", "Op", upstream=("source",), map=mapped, **each),
            TaskSpec("total", "Op", upstream=("each",)),
        )
        super().__init__(store, query, tasks=tasks)

    def source_leaves(self, value: Any) -> None:
        """Run the first task, which leaves a value; the run is evaluated then."""
        self.plan()
        (task,) = self.dispatch(limit=1)
        left = {} if value is None else {"return_value": encode_value(value, where="value")}
        assert ends.succeed(self.store.tasks, self.epoch, task.id, task.token, xcoms=left)
        self.plan()

    def instances(self, task_id: str = "each") -> list[str]:
        """Return the states of the instances, by index, which has no gap."""
        rows = self.query(
            "SELECT map_index, state FROM task_instance WHERE task_id = :name AND map_index >= 0 ORDER BY map_index",
            name=task_id,
        )
        assert [row["map_index"] for row in rows] == list(range(len(rows)))
        return [row["state"] for row in rows]

    def own(self, task_id: str = "each") -> dict[str, Any]:
        """Return the task's own row."""
        (row,) = self.query("SELECT * FROM task_instance WHERE task_id = :name AND map_index = -1", name=task_id)
        return row

    def run_some(self, count: int = 1, *, fails: tuple[int, ...] = (), value: Any = None) -> list[int]:
        """Run instances that are scheduled, the most urgent first; return their indexes. The run is evaluated then."""
        given = self.dispatch(limit=count)
        for task in given:
            if task.map_index in fails:
                ends.fail(self.store.tasks, self.epoch, task.id, task.token, "boom")
            else:
                left = {} if value is None else {"return_value": encode_value(value(task.map_index), where="value")}
                ends.succeed(self.store.tasks, self.epoch, task.id, task.token, xcoms=left)
        self.plan()
        return [task.map_index for task in given]

    def run_all(self, **how: Any) -> None:
        while self.run_some(100, **how):
            pass

    def ended(self) -> str:
        (row,) = self.query("SELECT state FROM dag_run")
        return str(row["state"])


# --- how many, and when --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "value", "count"),
    [
        (Values(3), None, 3),
        (OF_SOURCE, ["a", "b"], 2),
        (OF_SOURCE, ("a", "b", "c"), 3),
        (OF_SOURCE, {"a": 1}, 1),
        (OF_SOURCE, {1: 2, 3: 4}, 2),
        (Product((Values(3), OF_SOURCE)), [1, 2], 6),
        (Zip((Values(3), OF_SOURCE)), [1, 2], 2),
        (Zip((Values(3), OF_SOURCE), is_longest=True), [1, 2], 3),
        (Concat((Values(3), OF_SOURCE, Values(1))), [1, 2], 6),
        (Batch(OF_SOURCE, 2), [1, 2, 3], 2),
        (Batch(OF_SOURCE, 3), [1, 2, 3], 1),
        (Product((Batch(Concat((Values(3), OF_SOURCE)), 2), Values(2))), [1, 2], 6),
    ],
)
def test_a_task_has_an_instance_for_each_value(
    store: Store, query: Query, over: Source, value: Any, count: int
) -> None:
    maps = Maps(store, query, over)
    assert maps.own()["state"] == "none"
    maps.source_leaves(value)
    assert maps.instances() == ["scheduled"] * count
    assert (maps.own()["state"], maps.own()["map_length"]) == ("success", count)
    assert task_states(store, maps.run)["total"] is TaskState.NONE, "its instances have not ended"
    assert sorted(maps.run_some(100)) == list(range(count))
    assert task_states(store, maps.run)["total"] is TaskState.SCHEDULED
    maps.run_all()
    assert maps.ended() == "success"


def test_a_task_without_values_is_skipped_and_so_is_what_is_below_it(store: Store, query: Query) -> None:
    maps = Maps(store, query)
    maps.source_leaves([])
    assert maps.instances() == []
    assert (maps.own()["state"], task_states(store, maps.run)["total"]) == ("skipped", TaskState.SKIPPED)
    assert maps.ended() == "success"


@pytest.mark.parametrize("value", [None, "abc", 5, {1, 2}])
def test_values_that_cannot_be_counted_fail_the_task_with_the_reason(store: Store, query: Query, value: Any) -> None:
    maps = Maps(store, query)
    maps.source_leaves(value)
    own = maps.own()
    assert (own["state"], maps.instances()) == ("failed", [])
    assert "'each' is expanded over what 'source' has left under 'return_value'" in own["last_error"]
    assert maps.ended() == "failed"
    # The author mends the source, and clears both.
    clear(store, maps.run, "source", "each", "total")
    maps.source_leaves([1])
    maps.run_all()
    assert (maps.instances(), maps.own()["last_error"], maps.ended()) == (["success"], None, "success")


def test_more_values_than_there_may_be_fail_the_task(store: Store, query: Query) -> None:
    maps = Maps(store, query, Product((Values(1_000_000), OF_SOURCE)))
    maps.source_leaves([1, 2])
    assert maps.own()["state"] == "failed"
    assert "2,000,000 values; the limit is 1,000,000" in maps.own()["last_error"]


@pytest.mark.parametrize(("end", "becomes"), [("failed", "upstream_failed"), ("skipped", "skipped")])
def test_a_source_that_did_not_succeed_has_no_values_whatever_the_rule_is(
    store: Store, query: Query, end: str, becomes: str
) -> None:
    maps = Maps(store, query, trigger_rule="all_done")
    maps.plan()
    (task,) = maps.dispatch(limit=1)
    if end == "failed":
        ends.fail(store.tasks, maps.epoch, task.id, task.token, "boom")
    else:
        ends.succeed(store.tasks, maps.epoch, task.id, task.token, end="skipped")
    maps.plan()
    assert (maps.own()["state"], maps.instances()) == (becomes, [])


def test_a_rule_that_waits_for_nothing_waits_for_the_values(store: Store, query: Query) -> None:
    maps = Maps(store, query, trigger_rule="always")
    maps.plan()
    assert (maps.own()["state"], maps.instances()) == ("none", [])
    maps.source_leaves([1, 2])
    assert (maps.own()["state"], maps.instances()) == ("success", ["scheduled"] * 2)


def test_no_more_than_the_window_are_unfinished(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(10), spec={"window": 3})
    maps.source_leaves(None)
    assert maps.instances() == ["scheduled"] * 3
    assert maps.own()["state"] == "none"
    assert maps.run_some() == [0]
    assert maps.instances() == ["success"] + ["scheduled"] * 3
    assert maps.run_some(3) == [1, 2, 3]
    assert Counter(maps.instances()) == {"success": 4, "scheduled": 3}
    assert task_states(store, maps.run)["total"] is TaskState.NONE
    assert maps.run_some(3) == [4, 5, 6]
    assert maps.own()["state"] == "success", "the last is made"
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 10, "success")


def test_what_is_too_much_for_one_look_is_done_in_pieces(store: Store, query: Query) -> None:
    count = TASKS_PER_RUN_MAX * 2 + 1
    maps = Maps(store, query, Values(count), spec={"window": 10_000})
    maps.plan()
    (task,) = maps.dispatch(limit=1)
    assert ends.succeed(store.tasks, maps.epoch, task.id, task.token)
    made = []
    while store.scheduling.plan(maps.epoch).evaluated:
        made.append(len(maps.instances()))
    assert made == [TASKS_PER_RUN_MAX, TASKS_PER_RUN_MAX * 2, count]
    assert set(maps.instances()) == {"scheduled"}


# --- failures ------------------------------------------------------------------------------------


def test_with_fail_fast_none_begins_after_one_has_failed(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(10), spec={"window": 4, "fail_fast": True})
    maps.source_leaves(None)
    assert maps.run_some(2, fails=(1,)) == [0, 1]
    assert maps.instances() == ["success", "failed", *["upstream_failed"] * 2]
    assert maps.own()["state"] == "success"
    assert "no instance is made after the first 4, because of fail_fast" in maps.own()["last_error"]
    assert (task_states(store, maps.run)["total"], maps.ended()) == (TaskState.UPSTREAM_FAILED, "failed")


def test_with_fail_fast_those_that_are_scheduled_do_not_begin_when_all_are_made(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(3), spec={"fail_fast": True})
    maps.source_leaves(None)
    maps.run_some(1, fails=(0,))
    assert maps.instances() == ["failed", *["upstream_failed"] * 2]


def test_after_as_many_failures_as_may_be_no_more_are_made(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(10), spec={"window": 4, "failures_max": 2})
    maps.source_leaves(None)
    maps.run_some(2, fails=(0,))
    assert Counter(maps.instances()) == {"failed": 1, "success": 1, "scheduled": 4}
    maps.run_some(1, fails=(2,))
    assert Counter(maps.instances()) == {"failed": 2, "success": 1, "scheduled": 3}, "none is made, all that are run"
    maps.run_all()
    assert (len(maps.instances()), maps.ended()) == (6, "failed")


def test_a_failed_instance_is_tried_again_by_itself(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(3), retries=1, retry_delay_s=0.0)
    maps.source_leaves(None)
    maps.run_some(3, fails=(1,))
    assert maps.instances() == ["success", "up_for_retry", "success"]
    assert len(store.tasks.retry_due(maps.epoch)) == 1
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 3, "success")


# --- cleared -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("again", "states"), [(5, ["success"] * 5), (3, ["success"] * 3), (1, ["success", *["removed"] * 2])]
)
def test_a_task_that_is_cleared_with_its_source_has_as_many_instances_as_there_are_values_now(
    store: Store, query: Query, again: int, states: list[str]
) -> None:
    maps = Maps(store, query)
    maps.source_leaves([1, 2, 3])
    maps.run_all()
    clear_map(maps)
    clear(store, maps.run, "source", "each", "total")
    maps.source_leaves(list(range(again)))
    assert Counter(maps.instances())["scheduled"] == again
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (states, "success")
    assert task_states(store, maps.run)["total"] is TaskState.SUCCESS, "removed instances count for nothing"


def clear_map(maps: Maps) -> None:
    """Clear all instances as well, as commands do."""
    for row in maps.query("SELECT id FROM task_instance WHERE map_index >= 0"):
        maps.query("UPDATE task_instance SET state = 'none', ended_at = NULL WHERE id = :id", id=row["id"])


# --- one after the other, and at once ------------------------------------------------------------


@pytest.mark.parametrize("rule", ["all_done", "none_failed", "all_success"])
def test_what_is_expanded_over_a_mapped_task_without_values_has_none_either(
    store: Store, query: Query, rule: TriggerRule
) -> None:
    over = MapSpec(Output("each", "return_value"))
    tasks = (
        TaskSpec("each", "Op", map=MapSpec(Values(0))),
        TaskSpec("again", "Op", upstream=("each",), trigger_rule=rule, map=over),
    )
    maps = Maps.__new__(Maps)
    Tasks.__init__(maps, store, query, tasks=tasks)
    maps.plan()
    assert (maps.own("each")["state"], maps.own("again")["state"], maps.ended()) == ("skipped", "skipped", "success")


def test_what_is_expanded_over_a_mapped_task_has_an_instance_for_each_that_succeeded(
    store: Store, query: Query
) -> None:
    tasks = (
        TaskSpec("each", "Op", map=MapSpec(Values(4))),
        TaskSpec(
            "again", "Op", upstream=("each",), trigger_rule="all_done", map=MapSpec(Output("each", "return_value"))
        ),
    )
    maps = Maps.__new__(Maps)
    Tasks.__init__(maps, store, query, tasks=tasks)
    maps.plan()
    maps.run_some(3, value=str)
    assert maps.instances("again") == [], "one has not ended"
    maps.run_some(1, fails=(3,))
    assert maps.instances("again") == ["scheduled"] * 3
    pulled = store.tasks.pull_xcoms(maps.run, "each", "return_value", after=-1, offset=0, limit=9, bytes_max=10_000)
    assert pulled == XComPage(tuple((index, b'"%d"' % index) for index in range(3)), 3, 1)
    where: Any = {"after": 0, "offset": 1, "limit": 9, "bytes_max": 1}
    pulled = store.tasks.pull_xcoms(maps.run, "each", "return_value", **where)
    assert pulled == XComPage(((2, b'"2"'),), 3, 1)
    pulled = store.tasks.pull_xcoms(maps.run, "each", "return_value", **where, is_counted=False)
    assert pulled == XComPage(((2, b'"2"'),), 0, 0)
    pulled = store.tasks.pull_xcoms(maps.run, "each", "other", after=-1, offset=0, limit=9, bytes_max=1)
    assert pulled.values == ((0, None), (1, None), (2, None))


def test_no_more_instances_run_at_once_than_may_and_others_pass_them(store: Store, query: Query) -> None:
    tasks = (
        TaskSpec("each", "Op", map=MapSpec(Values(6)), active_max=2, priority_weight=9),
        TaskSpec("other", "Op"),
    )
    maps = Maps.__new__(Maps)
    Tasks.__init__(maps, store, query, tasks=tasks)
    maps.plan()
    given = store.tasks.dispatch(maps.epoch, limit=4, queues=QUEUES)
    assert ([task.map_index for task in given.tasks], given.has_more) == ([0, 1], True)
    rest = store.tasks.dispatch(maps.epoch, limit=2, queues=QUEUES)
    assert ([task.task_id for task in rest.tasks], rest.has_more) == (["other"], False)
    first = given.tasks[0]
    assert ends.succeed(store.tasks, maps.epoch, TaskInstanceId(first.id), first.token)
    assert [task.map_index for task in maps.dispatch()] == [2]


def test_a_step_is_told_over_how_many_values_its_task_was_expanded(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(3), spec={"window": 1})
    maps.source_leaves(None)
    (first,) = maps.dispatch(limit=1)
    assert (first.map_index, first.map_length) == (0, 3)
    assert ends.succeed(store.tasks, maps.epoch, first.id, first.token)
    maps.plan()
    assert [(task.map_index, task.map_length) for task in maps.dispatch()] == [(1, 3)]
