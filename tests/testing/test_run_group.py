"""`run_task` of a task of a mapped group, of a loop and of a worklist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.tasks import DAG, TaskGroup, task, task_group, worklist
from headgate.testing import run_task
from headgate.testing.tasks import TaskResult


@task
def days() -> list[str]:
    return []


@task
def fetch(day: str, region: str, ti: Any) -> str:
    return f"{region}-{day}-{ti.map_index}"


@task
def store(rows: Any, all_days: Any) -> Any:
    return rows, all_days


@task
def total(counts: Any) -> list[Any]:
    return list(counts)


@task_group
def load(day: Any, region: Any, all_days: Any) -> Any:
    return store(fetch(day, region), all_days)


@task_group
def refine() -> None:
    @task
    def improve(*, loop: Any) -> Any:
        return loop.index, loop.previous

    @task
    def evaluate(estimate: Any) -> Any:
        return estimate

    evaluate(improve())


def enough(*, loop: Any) -> bool:
    return bool(loop.result > 1)


@task
def crawl(path: str, ti: Any) -> str:
    for link in (f"{path}/a", f"{path}/b", f"{path}/a", "/"):
        ti.append(link, key=link)
    ti.append([path])
    return path


with DAG("d") as dag:
    found = days()
    stored = load.partial(region="north", all_days=found).expand(day=found, map_index_name=lambda day: f"of {day}")
    total(stored)
    refined = refine.loop(max_iterations=3, until=enough)
    crawl.expand(path=worklist(["/"], max_length=10))
    with TaskGroup("plain") as plain:
        days.override(task_id="a")()


def run(task_id: str, **given: Any) -> TaskResult:
    return run_task(dag.tasks[task_id], **given)


# --- a task of a mapped group --------------------------------------------------------------------


def test_a_task_of_a_group_gets_the_argument_of_its_index() -> None:
    result = run("load.fetch", map_index=1, xcoms={"days": ["mon", "tue"]})
    assert (result.value, result.map_name) == ("north-tue-1", "of tue")


def test_the_xcom_of_a_task_of_the_same_group_is_the_value_at_the_index() -> None:
    given = {"days": ["mon", "tue"], "load.fetch": ["a", "list"]}
    assert run("load.store", map_index=1, xcoms=given).value == (["a", "list"], ["mon", "tue"])
    assert run("load.store", map_index=1, xcoms={"days": ["mon", "tue"]}).value == (None, ["mon", "tue"])


def test_outside_of_the_group_it_is_the_list_of_the_values_at_all_indexes() -> None:
    assert run("total", xcoms={"load.store": [3, 4]}).value == [3, 4]


def test_a_task_over_whose_output_a_group_is_expanded_has_to_leave_a_list() -> None:
    with DAG("d") as other:
        given = task(task_id="text")(lambda: "text")()
        load.partial(region="north", all_days=[]).expand(day=given)
    result = run_task(given)
    assert (result.state, result.may_retry) == ("failed", True)
    assert "the task 'load.fetch' is expanded over what this one leaves under 'return_value'" in result.error
    assert "load.store" in other.tasks


# --- loops ---------------------------------------------------------------------------------------


def test_a_task_of_a_loop_is_run_in_the_first_iteration_unless_another_is_said() -> None:
    assert run("refine.improve").value == (0, None)
    assert run("refine.improve", loop={"previous": 7}).value == (1, 7)
    assert run("refine.improve", loop={"index": 2, "previous": None}).value == (2, None)
    assert run("refine.improve", map_index=2, loop={"previous": 5}).value == (2, 5)
    assert run("refine.evaluate", loop={"index": 2}, xcoms={"refine.improve": 8}).value == 8


def test_a_gate_appends_the_next_iteration_or_does_not_or_fails_in_the_last_one() -> None:
    assert run("refine.enough", loop={"result": 1}).appended == [(None, "1")]
    assert run("refine.enough", loop={"result": 2}).appended == []
    assert run("refine.enough", xcoms={"refine.evaluate": 2}).appended == []
    last = run("refine.enough", loop={"index": 2, "result": 1})
    assert (last.state, last.may_retry, last.appended) == ("failed", False, [])
    assert "is not True after 3 iterations" in last.error


@pytest.mark.parametrize(
    ("until", "error"),
    [
        (lambda *, loop: loop.result["error"], "KeyError: 'error'"),
        (lambda *, loop: None, "TypeError: until must return True or False, not None"),
    ],
)
def test_a_condition_that_raises_or_does_not_decide_fails_the_gate(until: Any, error: str) -> None:
    with DAG("d") as other:
        refine.loop(max_iterations=3, until=until)
    result = run_task(other.tasks["refine.__loop_gate"], loop={"result": {}})
    assert (result.state, result.appended) == ("failed", [])
    assert error in result.error


def test_without_a_condition_the_gate_of_the_last_iteration_succeeds() -> None:
    with DAG("d") as other:
        refine.loop(max_iterations=3)
    gate = other.tasks["refine.__loop_gate"]
    for index, appended in ((0, [(None, "1")]), (1, [(None, "2")]), (2, [])):
        result = run_task(gate, loop={"index": index, "result": 0})
        assert (result.state, result.appended) == ("success", appended)


def test_a_group_with_arguments_is_repeated_with_them() -> None:
    @task_group
    def counts(start: int) -> None:
        @task
        def count(first: int, *, loop: Any) -> int:
            return int(first if loop.previous is None else loop.previous + 1)

        count(start)

    with DAG("d") as other:
        counts.override(group_id="c").partial(start=5).loop(max_iterations=2)
    assert run_task(other.tasks["c.count"], loop={"previous": None}).value == 5
    assert run_task(other.tasks["c.count"], loop={"previous": 0}).value == 1, "0 is a result"


def test_loop_tells_the_index_and_the_limit() -> None:
    @task_group
    def tells() -> None:
        @task
        def tell(*, loop: Any, ti: Any) -> Any:
            return loop.index, loop.max_iterations, ti.map_index, ti.try_number

        tell()

    with DAG("d") as other:
        tells.loop(max_iterations=5)
    assert run_task(other.tasks["tells.tell"], loop={"index": 3}, try_number=2).value == (3, 5, 3, 2)


def test_a_result_that_is_read_and_not_given_fails_with_how_to_give_it() -> None:
    result = run("refine.improve", loop={"index": 1})
    assert result.state == "failed"
    assert "the result of iteration 0 is not given: run_task(..., loop={'previous': ...})" in result.error


# --- worklists -----------------------------------------------------------------------------------


def test_what_an_instance_appends_is_told_with_its_keys_once_and_not_what_was_there() -> None:
    result = run("crawl", map_index=0)
    assert result.value == "/"
    assert result.appended == [("//a", "//a"), ("//b", "//b"), (["/"], None)]


def test_an_instance_of_an_appended_value_is_run_if_that_is_given() -> None:
    assert run("crawl", map_index=2, appended=["/a", "/b"]).value == "/b"


def test_a_step_that_fails_or_defers_appends_nothing() -> None:
    @task
    def fails(x: Any, ti: Any) -> None:
        ti.append(1)
        raise ValueError(x)

    with DAG("d"):
        output = fails.expand(x=worklist([1]))
    assert run_task(output, map_index=0).appended == []


# --- bad input -----------------------------------------------------------------------------------

DAYS = {"xcoms": {"days": ["mon"]}}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: run("load.fetch", **DAYS), "'load.fetch' is mapped: say which instance is run, with map_index="),
        (lambda: run("load.fetch", map_index=1, **DAYS), "has 1 instances, from 0 on, with these xcoms; there is none"),
        (lambda: run("load.store", map_index=0), r"over an XCom that is not given: xcoms={'days': \[\.\.\.\]}"),
        (lambda: run("load.fetch", map_index=0, loop={}, **DAYS), "'load.fetch' is in no loop: leave out loop="),
        (lambda: run("days", loop={"index": 1}), "the task 'days' is in no loop"),
        (lambda: run("refine.improve", loop={"index": 3}), "has 3 iterations, from 0 on; there is none 3"),
        (lambda: run("refine.improve", loop={"index": -1}), "there is none -1"),
        (
            lambda: run("refine.improve", loop={"before": 1}),
            "loop has no 'before'; it may have index, previous, result",
        ),
        (lambda: run("refine.improve", loop={"index": "1"}), "loop\\['index'\\] is '1', and map_index= is None"),
        (lambda: run("refine.improve", map_index=2, loop={"index": 1}), "is 1, and map_index= is 2: give one of them"),
        (lambda: run("refine.improve", loop={"index": 0, "previous": 1}), "the iteration 0 has none before it"),
        (lambda: run("refine.improve", appended=[1]), "is expanded over no worklist: leave out appended="),
        (lambda: run("days", appended=[1]), "the task 'days' is expanded over no worklist"),
        (
            lambda: run("crawl", map_index=2, appended=["/a"]),
            "has 2 instances, from 0 on, with appended=; there is none",
        ),
        (lambda: run_task(stored, map_index=0), "the task group 'load' has the tasks 'load.fetch', 'load.store': give"),
        (lambda: run_task(refined), "the task group 'refine' has the tasks 'refine.improve', 'refine.evaluate', 'ref"),
        (lambda: run_task(plain), "the task group 'plain' has the tasks 'plain.a': give one of them"),
    ],
)
def test_a_test_that_cannot_be_is_told_why(call: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()


@pytest.mark.parametrize(("appended", "state"), [([], "success"), ([7], "failed")])
def test_a_step_may_not_append_more_than_the_worklist_takes(appended: list[int], state: str) -> None:
    with DAG("d"):

        @task
        def crawl(x: int, ti: Any) -> None:
            ti.append(x + 1, key="next")
            ti.append(x + 1, key="next")
            ti.append(x + 2)

        output = crawl.expand(x=worklist([1], max_length=3))
    result = run_task(output, map_index=0, appended=appended)
    assert result.state == state
    if state == "failed":
        assert result.error == "it appends 2 values to the 1 that are appended to 'crawl'; the limit is 2"
