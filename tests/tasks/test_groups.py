"""Task groups as authors write them: ids, arrows, defaults, and groups that are expanded or repeated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.maps import MapSpec, Output, Product, Source, Values, Worklist
from headgate.tasks import (
    DAG,
    EmptyOperator,
    TaskGroup,
    TriggerDagRunOperator,
    XComArg,
    chain,
    task,
    task_group,
    worklist,
)
from headgate.tasks.groups.groups import GROUP_DEPTH_MAX
from headgate.tasks.groups.loops import GATE, ITERATIONS_MAX


def source_of(spec: TaskSpec) -> Source:
    assert spec.map is not None
    return spec.map.source


@task
def f(x: Any = 0, y: Any = 0) -> Any:
    return x, y


@task
def source() -> list[Any]:
    return []


def made(build: Callable[[], object]) -> dict[str, Any]:
    """Make a DAG; return the specs of its tasks."""
    with DAG("d") as dag:
        build()
    return {one.task_id: one for one in dag.to_spec().tasks}


def upstream(specs: dict[str, Any]) -> dict[str, set[str]]:
    return {name: set(spec.upstream) for name, spec in specs.items()}


def problem(build: Callable[[], object]) -> str:
    with pytest.raises(DagMalformed) as error:
        made(build)
    return str(error.value)


# --- plain groups --------------------------------------------------------------------------------


def test_tasks_of_a_group_have_its_prefix_and_arrows_join_its_first_and_last_ones() -> None:
    def build() -> None:
        with TaskGroup("g") as group:
            a, b, c = (EmptyOperator(task_id=name) for name in "abc")
            a >> [b, c]
        EmptyOperator(task_id="start") >> group >> EmptyOperator(task_id="end")

    assert upstream(made(build)) == {
        "g.a": {"start"},
        "g.b": {"g.a"},
        "g.c": {"g.a"},
        "start": set(),
        "end": {"g.b", "g.c"},
    }


def test_groups_stand_in_groups_and_are_joined_to_each_other() -> None:
    def build() -> None:
        with TaskGroup("outer"):
            with TaskGroup("one") as one:
                EmptyOperator(task_id="a")
            with TaskGroup("two", prefix_group_id=False) as two:
                EmptyOperator(task_id="b")
            one >> two
        chain(EmptyOperator(task_id="z"), [one])

    assert upstream(made(build)) == {"outer.one.a": {"z"}, "outer.b": {"outer.one.a"}, "z": set()}


def test_a_function_of_a_group_may_be_called_again() -> None:
    @task_group
    def g(x: Any) -> XComArg:
        return f(x)

    def build() -> None:
        first = g(1)
        g(first)

    assert upstream(made(build)) == {"g.f": set(), "g__1.f": {"g.f"}}


def test_what_a_group_returns_is_the_value_of_a_task_and_is_joined_as_the_group_is() -> None:
    @task_group(group_id="load")
    def g() -> XComArg:
        first = f.override(task_id="first")()
        f.override(task_id="beside")()
        return f.override(task_id="last")(first)

    def build() -> None:
        EmptyOperator(task_id="start") >> (result := g())
        f.override(task_id="user")(result)
        result >> EmptyOperator(task_id="end")

    found = upstream(made(build))
    assert (found["load.first"], found["load.beside"]) == ({"start"}, {"start"})
    assert (found["user"], found["end"]) == ({"load.last"}, {"load.last", "load.beside"})


def test_a_group_that_returns_nothing_is_joined_itself() -> None:
    @task_group
    def g() -> None:
        f()

    assert upstream(made(lambda: g() >> EmptyOperator(task_id="end")))["end"] == {"g.f"}


def test_default_args_of_the_inner_group_count_before_those_of_the_outer_one_and_the_dag() -> None:
    with DAG("d", default_args={"retries": 1, "queue": "dag", "pool": "dag"}) as dag:
        with TaskGroup("g", default_args={"retries": 2, "queue": "g"}):
            with TaskGroup("h", default_args={"retries": 3}):
                EmptyOperator(task_id="a")
                EmptyOperator(task_id="b", retries=4)
    a, b = dag.to_spec().tasks
    assert (a.retries, a.queue, a.pool, b.retries) == (3, "g", "dag", 4)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: TaskGroup("a b"), "the group_id 'a b' may have letters"),
        (lambda: TaskGroup(""), "the group_id is empty"),
        (lambda: TaskGroup(1), "the group_id must be a str, not 1"),  # type: ignore[arg-type]
        (lambda: TaskGroup("g", default_args={"retrys": 1}), "default_args"),  # type: ignore[arg-type]
        (lambda: (TaskGroup("g"), TaskGroup("g")), "the group_id 'g' is in the DAG twice"),
        (lambda: (EmptyOperator(task_id="g"), TaskGroup("g")), "the group_id 'g' is in the DAG twice"),
        (lambda: (TaskGroup("g"), EmptyOperator(task_id="g")), "has the id of a task group"),
        (lambda: TaskGroup("g") >> EmptyOperator(task_id="a"), "'g' has no tasks: join it to others behind its block"),
    ],
)
def test_a_group_that_cannot_be(build: Callable[[], object], text: str) -> None:
    assert text in problem(build)


def test_groups_do_not_stand_in_groups_without_end() -> None:
    def build() -> None:
        for number in range(GROUP_DEPTH_MAX + 1):
            TaskGroup(f"g{number}").__enter__()

    assert f"stands in more than {GROUP_DEPTH_MAX} groups" in problem(build)


def test_a_group_belongs_to_a_dag() -> None:
    with pytest.raises(RuntimeError, match="belongs to no DAG"):
        TaskGroup("g")


# --- groups that are expanded --------------------------------------------------------------------


@task_group
def etl(x: Any, y: Any = 0) -> XComArg:
    return f.override(task_id="b")(f.override(task_id="a")(x), y)


def test_the_tasks_of_an_expanded_group_are_mapped_alike_and_its_first_ones_wait_for_the_values() -> None:
    specs = made(lambda: etl.partial(y=3).expand(x=source(), window=7) >> EmptyOperator(task_id="end"))
    spec = MapSpec(Output("source", "return_value"), window=7)
    assert (specs["etl.a"].map, specs["etl.a"].group) == (spec, "etl")
    assert (specs["etl.b"].map, specs["etl.b"].group) == (spec, "etl")
    assert upstream(specs) == {"source": set(), "etl.a": {"source"}, "etl.b": {"etl.a"}, "end": {"etl.b"}}
    assert specs["end"].group == ""


def test_several_arguments_give_each_combination() -> None:
    specs = made(lambda: etl.expand(x=[1, 2], y=[3, 4, 5]))
    assert source_of(specs["etl.a"]) == Product((Values(2), Values(3)))


def test_a_group_is_expanded_over_dicts_of_arguments() -> None:
    assert source_of(made(lambda: etl.expand_kwargs([{"x": 1}, {"x": 2, "y": 3}]))["etl.b"]) == Values(2)


def test_a_plain_group_in_an_expanded_one_is_expanded_with_it() -> None:
    @task_group
    def outer(x: Any) -> None:
        with TaskGroup("inner"):
            f(x)

    assert made(lambda: outer.expand(x=[1]))["outer.inner.f"].group == "outer"


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: etl.expand(z=[1]), "etl cannot be called with these arguments"),
        (lambda: etl.partial(x=1).expand(x=[1]), "'x' stands in partial() and in what it is expanded over"),
        (lambda: etl.expand(x=1), "the task group 'etl': expand(x=...): a list, a dict or the output of a task"),
        (lambda: etl.expand(x=[1], window=0), "window must be in 1..10000, not 0"),
        (lambda: etl.expand(x=[1], window="9"), "window must be int, not '9'"),
        (lambda: etl.expand_kwargs([1]), "dicts of arguments are needed, not 1"),
        (lambda: task_group("g")(lambda x: f.expand(x=[1])).expand(x=[1]), "cannot be expanded in the mapped"),
        (lambda: task_group("g")(lambda x: etl.expand(x=[1])).expand(x=[1]), "which is expanded or repeated itself"),
        (lambda: task_group("g")(lambda x: [one for one in x]).expand(x=[1]), "not known while the file is parsed"),
        (lambda: task_group("g")(lambda x: None).expand(x=[1]), "has no tasks"),
    ],
)
def test_a_group_that_cannot_be_expanded(build: Callable[[], object], text: str) -> None:
    with pytest.raises((DagMalformed, TypeError)) as error:
        made(build)
    assert text in str(error.value)


def a_group() -> TaskGroup:
    with TaskGroup("g") as group:
        EmptyOperator(task_id="a")
    return group


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda: f(a_group()), "the group 'g' itself is no value: give what its function returns"),
        (lambda: f(EmptyOperator(task_id="t")), "the task 't' itself is no value: give its output"),
        (lambda: f({"deep": [(EmptyOperator(task_id="t"),)]}), "the task 't' itself is no value"),
        (lambda: f.expand(x=[EmptyOperator(task_id="t")]), "the task 't' itself is no value"),
        (lambda: f.expand(x=[{"deep": a_group()}]), "the group 'g' itself is no value"),
        (lambda: f.partial(x=a_group()).expand(y=[1]), "the group 'g' itself is no value"),
        (lambda: TriggerDagRunOperator(task_id="r", trigger_dag_id="d", conf={"x": a_group()}), "the group 'g' itself"),
    ],
)
def test_a_task_or_a_group_itself_is_no_argument(give: Callable[[], object], text: str) -> None:
    assert text in problem(give)


# --- loops ---------------------------------------------------------------------------------------


@task_group
def refine() -> None:
    f.override(task_id="b")(f.override(task_id="a")())


def good_enough(*, loop: Any) -> bool:
    return bool(loop.result)


def test_a_loop_has_a_gate_behind_its_last_task_that_has_the_name_of_its_condition() -> None:
    specs = made(lambda: refine.loop(max_iterations=5, until=good_enough) >> EmptyOperator(task_id="end"))
    spec = MapSpec(Worklist("refine.good_enough", 1, 5, is_loop=True), window=1)
    assert {name: (one.map, one.group) for name, one in specs.items() if name != "end"} == dict.fromkeys(
        ("refine.a", "refine.b", "refine.good_enough"), (spec, "refine")
    )
    assert upstream(specs)["refine.good_enough"] == {"refine.b"}
    assert upstream(specs)["end"] == {"refine.good_enough"}


def test_a_gate_with_the_name_of_a_task_of_the_loop_gets_a_suffix() -> None:
    def b(*, loop: Any) -> bool:
        return bool(loop.result)

    assert "refine.b__1" in made(lambda: refine.loop(max_iterations=5, until=b))


def test_a_task_with_the_result_of_a_loop_in_its_arguments_waits_for_the_gate_as_well() -> None:
    def build() -> None:
        result = refine.loop(max_iterations=5, until=good_enough)
        f.override(task_id="user")([result])
        f.override(task_id="mapped").partial(y=result).expand(x=[1])
        etl.expand(x=result)

    found = upstream(made(build))
    both = {"refine.b", "refine.good_enough"}
    assert (found["user"], found["mapped"], found["etl.a"]) == (both, both, both)


class Enough:
    """A condition that is an object."""

    def __call__(self, *, loop: Any) -> bool:
        return bool(loop.result)


@pytest.mark.parametrize("until", [None, lambda *, loop: True, functools.partial(good_enough), Enough()])
def test_a_gate_of_a_condition_without_a_name_has_a_name_of_its_own(until: Any) -> None:
    assert f"refine.{GATE}" in made(lambda: refine.loop(max_iterations=2, until=until))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: refine.loop(max_iterations=0), f"max_iterations must be in 1..{ITERATIONS_MAX:,}, not 0"),
        (lambda: refine.loop(max_iterations="3"), "max_iterations must be an int, not '3'"),  # type: ignore[arg-type]
        (lambda: refine.loop(max_iterations=2, until=3), "python_callable must be a function, not 3"),  # type: ignore[arg-type]
        (lambda: refine.loop(max_iterations=2, until=lambda result: True), "cannot be called with its arguments"),
        (lambda: task_group("g")(lambda: (f(), f())).loop(max_iterations=2), "a loop needs one last task"),
        (lambda: task_group("g")(lambda: None).loop(max_iterations=2), "has no tasks"),
        (lambda: task_group("g")(lambda: refine.loop(max_iterations=2)).loop(max_iterations=2), "repeated itself"),
        (lambda: task_group("g")(lambda x: refine.loop(max_iterations=2)).expand(x=[1]), "repeated itself"),
        (
            lambda: task_group("g")(lambda: f.expand(x=[1])).loop(max_iterations=2),
            "cannot be expanded in the mapped group",
        ),
    ],
)
def test_a_loop_that_cannot_be(build: Callable[[], object], text: str) -> None:
    assert text in problem(build)


# --- worklists -----------------------------------------------------------------------------------


def test_a_task_is_expanded_over_a_worklist_of_its_own() -> None:
    specs = made(lambda: f.expand(x=worklist(["a", "b"], max_length=10).map(str)))
    assert source_of(specs["f"]) == Worklist("f", 2, 10)


def test_a_group_appends_to_its_first_task() -> None:
    assert source_of(made(lambda: etl.expand(x=worklist(["a"])))["etl.b"]) == Worklist("etl.a", 1, 100_000)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: f.expand(x=worklist(["a"]), y=[1]), "a worklist cannot be combined with other values"),
        (lambda: f.expand(x=worklist(["a"]).batch(2)), "a worklist cannot be combined with other values"),
        (lambda: [f.expand(x=one) for one in [worklist([1])] * 2], "the worklist is that of 'f'"),
    ],
)
def test_a_worklist_that_cannot_be(build: Callable[[], object], text: str) -> None:
    assert text in problem(build)


@pytest.mark.parametrize(
    ("values", "options", "error"),
    [
        ("abc", {}, TypeError),
        ([1, 2], {"max_length": 1}, ValueError),
        ([1], {"max_length": 1.5}, TypeError),
        ([], {"max_length": 0}, ValueError),
    ],
)
def test_the_bounds_of_a_worklist(values: Any, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        worklist(values, **options)
