"""Habits that authors bring from Airflow: each works, or is refused by a sentence that says what to use instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate import tasks
from headgate.protocol.errors import DagMalformed
from headgate.tasks import (
    DAG,
    Asset,
    BashOperator,
    Connection,
    EmptyOperator,
    FileSensor,
    HttpSensor,
    PythonOperator,
    TaskGroup,
    TriggerDagRunOperator,
    Variable,
    XComArg,
    dag,
    task,
    task_group,
)
from headgate.tasks.context import make_context
from headgate.tasks.options import NAMES
from headgate.tasks.parsing import parse_file
from headgate.testing import run_task
from headgate.triggers import airflow_names


def nothing(*_args: Any, **_context: Any) -> None:
    return None


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("schedule_interval", "use schedule="),
        ("max_active_tasks", "limit them with a pool"),
        ("params", "give defaults in the code"),
        ("end_date", "pause the DAG"),
        ("dagrun_timeout", "use execution_timeout="),
        ("doc_md", "use description="),
        ("on_failure_callback", "trigger_rule='one_failed'"),
    ],
)
def test_an_option_of_airflows_dag_is_refused_with_what_to_use_instead(option: str, instead: str) -> None:
    with pytest.raises(DagMalformed, match=f"DAG 'd': there is no option '{option}': .*{re.escape(instead)}"):
        DAG("d", **{option: None})  # type: ignore[arg-type]


def test_an_option_that_nobody_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(DagMalformed, match="DAG 'd': there is no option 'shedule'; there are catchup, default_args, "):
        DAG("d", shedule=None)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("owner", "use tags= of the DAG"),
        ("email", "sends no email"),
        ("depends_on_past", "max_active_runs=1"),
        ("on_failure_callback", "trigger_rule='one_failed'"),
        ("outlets", "only watchers have"),
        ("do_xcom_push", "return None"),
        ("multiple_outputs", "ti.xcom_push"),
        ("provide_context", "leave it out"),
        ("deferrable", "mode='poke'"),
    ],
)
def test_an_option_of_airflows_tasks_is_refused_with_what_to_use_instead(option: str, instead: str) -> None:
    with DAG("d"), pytest.raises(DagMalformed, match=f"DAG 'd', task 'a': .*'{option}': .*{re.escape(instead)}"):
        EmptyOperator(task_id="a", **{option: True})  # type: ignore[arg-type]
    with pytest.raises(DagMalformed, match=f"DAG 'd': default_args: .*'{option}': .*{re.escape(instead)}"):
        DAG("d", default_args={option: True})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("tooltip", "use description="),
        ("ui_color", "no page"),
        ("ui_fgcolor", "no page"),
        ("group_display_name", "no page"),
        ("add_suffix_on_collision", "has an id of its own, with the suffix __1"),
        ("parent_group", "in the with block of the other"),
    ],
)
def test_an_option_of_airflows_task_groups_is_refused_with_what_to_use_instead(option: str, instead: str) -> None:
    problem = f"DAG 'd': the task group 'g' cannot be made: there is no option '{option}': .*{re.escape(instead)}"
    group = task_group("g", **{option: "x"})(nothing)
    given: Any = {option: "x"}
    for make in (lambda: TaskGroup("g", **given), group, task_group("g")(nothing).override(**given)):
        with DAG("d"), pytest.raises(DagMalformed, match=problem):
            make()


def test_a_group_that_is_expanded_takes_no_template_for_the_names_of_its_indexes() -> None:
    @task_group
    def g(x: object) -> None:
        EmptyOperator(task_id="a")

    with DAG("d"):
        for expand in (
            lambda: g.expand(x=[1], map_index_template="{{ x }}"),
            lambda: g.partial(map_index_template="{{ x }}").expand(x=[1]),
            lambda: task(nothing).expand(x=[1], map_index_template="{{ x }}"),
        ):
            with pytest.raises(DagMalformed, match=r"map_index_template.*: use map_index_name= of expand\(\)"):
                expand()


def test_a_loop_is_one_of_a_group_and_not_of_a_task() -> None:
    for of in (task, task(nothing)):
        with pytest.raises(AttributeError, match="call the task in a @task_group function, and "):
            of.loop(max_iterations=3)


def test_what_headgate_has_is_not_called_missing() -> None:
    assert not airflow_names.OPTIONS.keys() & NAMES
    assert not airflow_names.IMPORTS.keys() & set(tasks.__all__)
    assert not airflow_names.CONTEXT.keys() & make_context(EmptyOperator(task_id="a"), run_id="r").keys()


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(airflow_names.IMPORTS))
def test_an_import_of_airflows_says_what_to_use_instead(tmp_path: Path, name: str) -> None:
    file = tmp_path / "dag.py"
    file.write_text(f"from headgate.tasks import DAG, {name}\n")
    error = f"ImportError: headgate.tasks has no {name}: {airflow_names.IMPORTS[name]}"
    assert parse_file(file).error == error


def test_what_decorators_have_in_airflow_says_what_to_use_instead() -> None:
    with pytest.raises(AttributeError, match="@task has no attribute 'bash': use BashOperator"):
        task.bash  # noqa: B018
    with pytest.raises(AttributeError, match="@task has no attribute 'sensor': derive from BaseSensorOperator"):
        task.sensor  # noqa: B018
    with pytest.raises(AttributeError, match=r"@task has no attribute 'bush'$"):
        task.bush  # noqa: B018


def test_parts_of_an_output_and_joined_assets_say_what_to_use_instead() -> None:
    with DAG("d"):
        output = task(nothing)()
        with pytest.raises(TypeError, match=r"what 'nothing' returns is not known .* push each part"):
            output["k"]
        with pytest.raises(TypeError, match="push each part"):
            _a, _b = output  # type: ignore[misc]
    with pytest.raises(TypeError, match=re.escape("Each([a, b])")):
        Asset("a") | Asset("b")
    with pytest.raises(TypeError, match=re.escape("[a, b] is a run when each")):
        Asset("a") & Asset("b")


def test_variables_are_read_with_default_and_set_by_the_command() -> None:
    with pytest.raises(TypeError, match="no argument 'default_var': use default="):
        Variable.get("a", default_var=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no argument 'deserialize_json': use Variable\.get_json"):
        Variable.get("a", deserialize_json=True)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no attribute 'set': use headgate variables set"):
        Variable.set("a", "b")
    assert Connection.from_uri("a", "http://b").host == "b"


# --- @dag ----------------------------------------------------------------------------------------


def test_a_dag_may_be_a_decorated_function(tmp_path: Path) -> None:
    @dag(schedule="@daily", tags=["shop"])
    def orders(count: int) -> None:
        """Take orders."""
        for number in range(count):
            EmptyOperator(task_id=f"t{number}")

    made = orders(2)
    assert (made.dag_id, made.tags, sorted(made.tasks)) == ("orders", ("shop",), ["t0", "t1"])
    assert orders.__doc__ == "Take orders."

    @dag("other")
    def named() -> None:
        """Make nothing."""

    @dag
    def bare() -> None:
        """Make nothing."""

    assert (named().dag_id, bare().dag_id) == ("other", "bare")
    file = tmp_path / "dag.py"
    file.write_text(
        "from headgate.tasks import dag, task\n"
        "@dag(catchup=False)\ndef orders():\n    @task\n    def load(): ...\n    load()\norders()\n"
    )
    (spec,) = parse_file(file).dags
    assert (spec.dag_id, [each.task_id for each in spec.tasks]) == ("orders", ["load"])


# --- templates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "template", "make"),
    [
        ("bash_command", "{{ ds }}", lambda: BashOperator(task_id="a", bash_command="echo {{ ds }} x")),
        ("bash_command", "{{params.x}}", lambda: BashOperator(task_id="a", bash_command="echo {{params.x}}")),
        ("bash_command", "{% if x %}", lambda: BashOperator(task_id="a", bash_command="{% if x %}a{% endif %}")),
        ("env", "{{ ts|upper }}", lambda: BashOperator(task_id="a", bash_command="env", env={"A": "b {{ ts|upper }}"})),
        (
            "op_args",
            "{{ dag_run.conf['k'] }}",
            lambda: PythonOperator(task_id="a", python_callable=nothing, op_args=[["{{ dag_run.conf['k'] }}"]]),
        ),
        (
            "op_kwargs",
            "{{ var.value.v }}",
            lambda: PythonOperator(task_id="a", python_callable=nothing, op_kwargs={"k": ("{{ var.value.v }}",)}),
        ),
        ("filepath", "{{ ds }}", lambda: FileSensor(task_id="a", filepath="in/{{ ds }}.csv")),
        ("url", "{{ ds }}", lambda: HttpSensor(task_id="a", url="http://host/{{ ds }}")),
        ("conf", "{{ ds }}", lambda: TriggerDagRunOperator(task_id="a", trigger_dag_id="b", conf={"d": "{{ ds }}"})),
    ],
)
def test_a_template_is_refused_when_the_file_is_parsed(parameter: str, template: str, make: Callable[[], Any]) -> None:
    problem = f"DAG 'd', task 'a': {parameter} has the template {template!r}, and there are no templates: a @task "
    with pytest.raises(DagMalformed, match=re.escape(problem)), DAG("d"):
        make()


def test_braces_that_are_no_template_of_airflows_pass() -> None:
    with DAG("d"):
        BashOperator(task_id="docker", bash_command="docker ps --format '{{.Names}} {{json .}}'; echo ${A%b} {{}}")
        BashOperator(task_id="python", bash_command="""python -c 'print(f"{{dsx}} {{ {1} }}")'""")


# --- functions and their context -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        (lambda ds: ds, {}, "the context has no 'ds': use logical_date, .*; it has asset_events, "),
        (lambda dag_run: 0, {}, "the context has no 'dag_run': use run_id, logical_date and params"),
        (lambda *, nonsense: 0, {}, "the context has no 'nonsense'; it has "),
        (lambda a, b: 0, {"op_args": [1]}, "missing a required argument: 'b'; the context has no 'b'"),
        (lambda a: 0, {"op_args": [1, 2]}, "too many positional arguments$"),
        (lambda a: 0, {"op_kwargs": {"a": 1, "b": 2}}, "unexpected keyword argument 'b'$"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_the_file_is_parsed(
    function: Any, arguments: dict[str, Any], problem: str
) -> None:
    with DAG("d"), pytest.raises(DagMalformed, match=f"DAG 'd', task 'a': .* cannot be called with .*{problem}"):
        PythonOperator(task_id="a", python_callable=function, **arguments)


def test_a_function_gets_the_context_that_it_has_parameters_for() -> None:
    with DAG("d"):
        seen = task(lambda a, ti, run_id, event, ds=None, **rest: [a, ti.task_id, run_id, event, ds, "params" in rest])
        output = seen.override(task_id="see")(1)
    assert run_task(output).value == [1, "see", "test", None, None, True]


def test_a_key_that_the_context_lacks_is_named_with_what_to_use_instead() -> None:
    context = make_context(EmptyOperator(task_id="a"), run_id="r")
    with pytest.raises(KeyError, match="the context has no 'ds': use logical_date"):
        context["ds"]  # type: ignore[typeddict-item]
    with pytest.raises(KeyError, match="the context has no 'x'; it has asset_events, "):
        context["x"]  # type: ignore[typeddict-item]


# --- None ----------------------------------------------------------------------------------------


def test_the_output_of_a_task_that_returned_none_is_none() -> None:
    with DAG("d"):
        first = task(nothing)()
        second = task(lambda value: [value])
        output = second.override(task_id="second")(first)
        under_a_key = second.override(task_id="third")(XComArg(first.operator, "total"))
    assert run_task(output).value == [None]
    assert run_task(under_a_key).error == "XComMissing: the task 'nothing' has pushed no XCom 'total'"


def test_the_outputs_of_several_tasks_are_asked_for_one_by_one() -> None:
    context = make_context(EmptyOperator(task_id="all"), run_id="r")
    with pytest.raises(TypeError, match=r"takes one task_id, not \['a', 'b'\]: call it once for each"):
        context["ti"].xcom_pull(["a", "b"])  # type: ignore[arg-type]
