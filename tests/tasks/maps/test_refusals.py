"""Mapped tasks that cannot be: each is refused at the author's line, with the DAG, the task and the value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.maps import INSTANCES_MAX, WINDOW_MAX
from headgate.tasks import (
    DAG,
    BaseOperator,
    BashOperator,
    BranchPythonOperator,
    FileSensor,
    HttpSensor,
    PythonOperator,
    ShortCircuitOperator,
    SignalSensor,
    StartTriggerArgs,
    TriggerOperator,
    XComArg,
    task,
    task_group,
    worklist,
)


@task
def f(x: Any = 0, y: Any = 0) -> Any:
    return x, y


@task
def needs(x: Any, y: Any) -> Any:
    return x, y


@task
def source() -> list[Any]:
    return []


async def late(x: Any) -> None:
    """Is what a task is not."""


async def late_items(x: Any) -> Any:
    yield x


class Closed(BaseOperator):
    """Its constructor takes no options."""

    def __init__(self, task_id: str, place: str) -> None:
        super().__init__(task_id=task_id)
        self.place = place


class Waits(FileSensor):
    """Its constructor passes on what it does not know."""

    def __init__(self, *, day: str, **options: Any) -> None:
        super().__init__(**options)
        self.day = day


class Fixed(FileSensor):
    """Its constructor passes on nothing."""

    def __init__(self, *, task_id: str, day: str) -> None:
        super().__init__(task_id=task_id, filepath=day)


class Begins(BaseOperator):
    """Its constructor makes its start trigger."""

    start_from_trigger = True

    def __init__(self, *, x: Any, y: Any = 0, **options: Any) -> None:
        super().__init__(**options)
        self.start_trigger_args = StartTriggerArgs(
            trigger_cls="a.B", next_method="go_on", trigger_kwargs={"x": x, "y": y}
        )

    def go_on(self, context: Any, event: Any) -> None:
        """Resume."""


class Changes(Begins):
    """Its constructor does more with an argument than to pass it on."""

    def __init__(self, *, x: Any, change: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(x=change(x), **options)


def begins(**shared: Any) -> Any:
    return Begins.partial(task_id="f", **shared)


def wait(**shared: Any) -> Any:
    return Waits.partial(task_id="f", **shared)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        # what is expanded over
        (lambda: f.expand(), "expand() needs the name of a parameter, with the values for it"),
        (lambda: f.expand(x="ab"), "expand(x=...): a list, a dict or the output of a task is needed, not the str 'ab'"),
        (lambda: f.expand(x=3), "expand(x=...): a list, a dict or the output of a task is needed, not the int 3"),
        (lambda: f.expand(x={3}), "expand(x=...): a list, a dict or the output of a task is needed, not the set {3}"),
        (lambda: f.expand(x=None), "not the NoneType None"),
        (lambda: f.expand(x=(each for each in [1])), "not the generator <generator object"),
        (
            lambda: f.expand(x=PythonOperator(task_id="a", python_callable=print)),
            "not the PythonOperator <PythonOperator 'a'>: take its .output",
        ),
        (lambda: f.expand(x=range(INSTANCES_MAX + 1)), "is expanded over 1,000,001 values, not 0..1,000,000"),
        (lambda: f.expand(x=range(1001), y=range(1000)), "is expanded over 1,001,000 values; the limit is 1,000,000"),
        (
            lambda: f.expand_kwargs("ab"),
            "expand_kwargs(): a list, a dict or the output of a task is needed, not the str",
        ),
        (lambda: f.expand_kwargs([1]), "expand_kwargs(): dicts of arguments are needed, not 1"),
        (lambda: f.expand_kwargs({"x": 1}), "expand_kwargs(): dicts of arguments are needed, not ('x', 1)"),
        (lambda: f.expand_kwargs([{"x": 1}, {1: 2}]), "expand_kwargs(): dicts of arguments are needed, not {1: 2}"),
        # names of a function's parameters
        (lambda: f.expand(z=[1]), "got an unexpected keyword argument 'z'"),
        (lambda: f.partial(z=1).expand(x=[1]), "got an unexpected keyword argument 'z'"),
        (lambda: f.expand_kwargs([{"x": 1}, {"z": 1}]), "got an unexpected keyword argument 'z'"),
        (lambda: needs.override(task_id="f").expand(x=[1]), "missing a required argument: 'y'; the context has no 'y'"),
        (
            lambda: needs.override(task_id="f").expand_kwargs([{"x": 1, "y": 2}, {"x": 1}]),
            "missing a required argument: 'y'",
        ),
        (lambda: f.partial(x=1).expand(x=[1]), "'x' stands in partial() and in what the task is expanded over"),
        (lambda: f.partial(x=1).expand_kwargs([{"y": 1}, {"x": 1}]), "'x' stands in partial() and in what the task"),
        (lambda: f.partial(retries=1).expand(x=[1]), "retries is an option: give it to @task or override()"),
        (lambda: f.partial(task_id="g").expand(x=[1]), "task_id is an option: give it to @task or override()"),
        (lambda: f.expand(retries=[1]), "retries is the same for all instances: give it to partial()"),
        (lambda: f.expand_kwargs([{"x": 1, "pool": "p"}]), "pool is the same for all instances: give it to partial()"),
        # names of an operator's parameters
        (lambda: wait(day="a").expand(place=["a"]), "Waits has no parameter 'place'; it has day, filepath, "),
        (lambda: wait(place="a").expand(filepath=["a"]), "Waits has no parameter 'place'; it has day, filepath, "),
        (lambda: wait(place="a").expand_kwargs(source()), "Waits has no parameter 'place'; it has day, filepath, "),
        (lambda: wait().expand(filepath=["a"]), "Waits cannot be made with these arguments: missing a required"),
        (lambda: wait().expand_kwargs([{"day": "a"}, {"filepath": "a"}]), "Waits cannot be made with these arguments"),
        (lambda: wait(filepath="a").expand(filepath=["a"]), "'filepath' stands in partial() and in what the task is"),
        (lambda: wait(day="a", retries=0).expand(queue=["a"]), "queue is the same for all instances"),
        (lambda: wait(day="a").expand(task_id=["a"]), "task_id is the same for all instances"),
        (lambda: Closed.partial(task_id="f").expand(day=["a"]), "Closed has no parameter 'day'; it has place"),
        (lambda: Fixed.partial(task_id="f").expand(filepath=["a"]), "Fixed has no parameter 'filepath'; it has day"),
        (
            lambda: Closed.partial(task_id="f", retries=1).expand(place=["a"]),
            "Closed cannot be made with these arguments: got an unexpected keyword argument 'retries'",
        ),
        # tasks that cannot be mapped
        (
            lambda: BranchPythonOperator.partial(task_id="f", python_callable=print).expand(op_args=[[1]]),
            "a BranchPythonOperator cannot be mapped: what it skips, it would skip for all",
        ),
        (
            lambda: ShortCircuitOperator.partial(task_id="f", python_callable=print).expand(op_args=[[1]]),
            "a ShortCircuitOperator cannot be mapped",
        ),
        (
            lambda: task.branch(f.function).override(task_id="f").expand(x=[1]),
            "a BranchPythonOperator cannot be mapped",
        ),
        (
            lambda: TriggerOperator.partial(task_id="f", trigger_cls="a.B").expand(trigger_kwargs=[{}]),
            "is mapped, and cannot emit elements",
        ),
        # instances that begin in their triggers, over values that only a worker has
        (lambda: begins().expand(x=source().map(str)), "because it is expanded over MappedValues: without a worker"),
        (lambda: begins().expand(x=source().filter(str)), "because it is expanded over MappedValues: without a worker"),
        (lambda: begins().expand(x=source().zip([1])), "because it is expanded over Zipped: without a worker"),
        (lambda: begins().expand(x=source().batch(2)), "because it is expanded over Batched: without a worker"),
        (lambda: begins().expand(x=worklist([1])), "cannot begin in its trigger, because it is expanded over Worklist"),
        (lambda: begins().expand(x=[1, source()]), "because it is expanded over a list with outputs of tasks"),
        (lambda: begins().expand(x=[1], y=[2]), "because it is expanded over 2 parameters"),
        (lambda: begins().expand_kwargs(source()), "because it is expanded by expand_kwargs(): without a worker, a va"),
        (
            lambda: begins().expand(x=needs.override(task_id="each").partial(y=1).expand(x=[1])),
            "cannot begin in its trigger, because it is expanded over the mapped task 'each'",
        ),
        (lambda: task(late).override(task_id="f").expand(x=[1]), "python_callable must not be async"),
        (lambda: task(late).override(task_id="f").expand_kwargs(source()), "python_callable must not be async"),
        (lambda: task(late_items).override(task_id="f").expand_kwargs(source()), "python_callable must not be async"),
        (
            lambda: PythonOperator.partial(task_id="f", python_callable=late).expand(op_args=[[1]]),
            "python_callable must not be async",
        ),
        # limits
        (lambda: f.expand(x=[1], window="2"), "window must be int, not '2'"),
        (lambda: f.expand(x=[1], window=True), "window must be int, not True"),
        (lambda: f.expand(x=[1], window=0), f"window must be in 1..{WINDOW_MAX}, not 0"),
        (lambda: f.expand(x=[1], window=WINDOW_MAX + 1), f"window must be in 1..{WINDOW_MAX}, not {WINDOW_MAX + 1}"),
        (lambda: f.expand(x=[1], fail_fast=1), "fail_fast must be bool, not 1"),
        (lambda: f.expand(x=[1], failures_max=1.5), "failures_max must be int or NoneType, not 1.5"),
        (lambda: f.expand(x=[1], failures_max=0), "failures_max must be in 1..1000000, not 0"),
        (lambda: f.expand_kwargs([{"x": 1}], window=0), f"window must be in 1..{WINDOW_MAX}, not 0"),
        # names of instances
        (lambda: f.expand(x=[1], map_index_name="x"), "map_index_name: a plain function is needed, not the str 'x'"),
        (lambda: f.expand(x=[1], map_index_name=late), "map_index_name: a plain function is needed, not the async"),
        (lambda: f.expand(x=[1], map_index_name=f), "map_index_name: a plain function is needed, not the task"),
        (lambda: f.expand(x=[1], map_index_name=int), "map_index_name: a plain function is needed, not <class 'int'>"),
        (
            lambda: f.partial(y=1).expand(x=[1], map_index_name=lambda x, y: y),
            "map_index_name gets the arguments of an instance (x): missing a required argument: 'y'",
        ),
        # what Airflow has
        (
            lambda: f.partial(map_index_template="a").expand(x=[1]),
            "'map_index_template': use map_index_name= of expand",
        ),
        (
            lambda: f.partial(map_index_template="a").expand_kwargs(source()),
            "there is no option 'map_index_template': use map_index_name= of expand()",
        ),
        (
            lambda: wait(day="a", max_active_tis_per_dag=2).expand(filepath=["a"]),
            "there is no option 'max_active_tis_per_dag': use max_active_tis_per_dagrun=",
        ),
    ],
)
def test_a_mapped_task_that_cannot_be_is_refused_at_the_authors_line(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(DagMalformed) as caught, DAG("d"):
        make()
    assert "<lambda>" in [entry.name for entry in caught.traceback], "where it is made, and not at the end of the DAG"
    assert re.match(r"DAG 'd', task 'f': ", str(caught.value))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: f"to {x}", "TypeError: <the value of 'x'> is not known before its step"),
        (lambda x: x or 1, "TypeError: <the value of 'x'> is not known before its step"),
        (lambda x: 1 if x == 2 else 3, "TypeError: <the value of 'x'> is not known before its step"),
        (lambda x: {1: 2}[x], "TypeError: <the value of 'x'> is not known before its step"),
        (lambda x: x["id"], "TypeError: 'LaterValue' object is not subscriptable"),
        (lambda x: [x], "start_trigger_args.trigger_kwargs['x'][0] is a "),
    ],
)
def test_a_trigger_that_only_a_worker_can_make_is_refused(change: Callable[[Any], Any], problem: str) -> None:
    with pytest.raises(DagMalformed) as caught, DAG("d"):
        Changes.partial(task_id="f", change=change).expand(x=[1])
    assert str(caught.value).startswith(f"DAG 'd', task 'f': cannot begin in its trigger: {problem}")
    assert "Changes is made with 'x' left open, and can only pass it on to its trigger as it is" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: begins(y=source()).expand(x=[1]), "trigger_kwargs['y'] is a "),
        (lambda: begins().expand(x=[1, print]), "ValueNotSerializable: value 1 is a builtin_function"),
        (lambda: begins().expand(x=["x" * 50_000]), "ValueTooLong: value 0 "),
        (lambda: wait(day="a", start_from_trigger=True).expand(filepath=["a"]), "filepath: expected str, bytes or os."),
        (lambda: wait(filepath="a", start_from_trigger=True).expand(day=["a"]), "start_from_trigger needs start_tri"),
        (lambda: SignalSensor.partial(task_id="f").expand(key=["a"]), "the key must be a str, not <the value of 'key'"),
        (
            lambda: SignalSensor.partial(task_id="f", key="a").expand(soft_fail=[True]),
            "it is mapped, and its instances cannot wait for a signal without a worker",
        ),
    ],
)
def test_an_instance_whose_trigger_cannot_be_made_is_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(DagMalformed) as caught, DAG("d"):
        make()
    assert str(caught.value).startswith("DAG 'd', task 'f': cannot begin in its trigger: ")
    assert problem in str(caught.value)


def test_a_task_of_a_mapped_group_does_not_begin_in_its_trigger() -> None:
    @task_group
    def group(x: Any) -> None:
        Begins(task_id="a", x=1)

    with pytest.raises(DagMalformed, match=r"task 'group\.a': cannot begin in its trigger: it is in the"), DAG("d"):
        group.expand(x=[1])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: source().map(3), "a plain function is needed, not the int 3"),  # type: ignore[arg-type]
        (lambda: source().map(late), "a plain function is needed, not the async <function late"),
        (lambda: source().map(f), "a plain function is needed, not the task .*: give its .function"),
        (lambda: source().filter(None), "a plain function is needed, not the NoneType None"),  # type: ignore[arg-type]
        (lambda: source().filter(source()), "a plain function is needed, not the XComArg"),  # type: ignore[arg-type]
        (lambda: source().zip("ab"), "a list, a dict or the output of a task is needed, not the str 'ab'"),
        (lambda: source().concat(3), "a list, a dict or the output of a task is needed, not the int 3"),
        (lambda: source().batch("3"), "the count of a batch must be an int, not '3'"),  # type: ignore[arg-type]
        (lambda: source().batch(True), "the count of a batch must be an int, not True"),
        (lambda: source().batch(0), "a batch has 1 value or more, not 0"),
    ],
)
def test_values_that_cannot_be_made_are_refused_at_the_authors_line(make: Callable[[], Any], problem: str) -> None:
    with DAG("d"), pytest.raises((TypeError, ValueError), match=problem):
        make()


def test_a_template_of_airflows_in_partial_is_refused_and_not_in_a_value_that_is_expanded() -> None:
    with pytest.raises(DagMalformed, match=r"DAG 'd', task 'a': env has the template '{{ ds }}'"), DAG("d"):
        BashOperator.partial(task_id="a", env={"DAY": "{{ ds }}"}).expand(bash_command=["env"])
    with pytest.raises(DagMalformed, match=r"DAG 'd', task 'f': y has the template '{{ ds }}'"), DAG("d"):
        f.partial(y=["{{ ds }}"]).expand(x=[1])
    with DAG("d"):  # Airflow does not render these either
        wait(day="{{ ds }}").expand(filepath=["a"])
        f.override(task_id="g").expand(x=["{{ ds }}"])
        HttpSensor.partial(task_id="b").expand(url=["https://a/{{ ds }}"])


def test_what_is_expanded_over_is_of_the_same_dag() -> None:
    with DAG("other"):
        elsewhere = source()
    for over in (elsewhere, [elsewhere], elsewhere.map(str), [elsewhere, 1]):
        with DAG("d"), pytest.raises(DagMalformed, match="task 'source': cannot be joined to 'f': both must be in the"):
            f.expand(x=over)


def test_a_second_expand_of_one_partial_is_a_second_task_of_the_same_name() -> None:
    with DAG("d"):
        begun = wait(day="a")
        begun.expand(filepath=["a"])
        with pytest.raises(DagMalformed, match="DAG 'd', task 'f': is in the DAG twice"):
            begun.expand(filepath=["b"])
        f.expand(x=[1])
        assert f.expand(x=[1]).operator.task_id == "f__2"


def test_a_function_is_mapped_in_a_dag_only() -> None:
    with pytest.raises(RuntimeError, match="f is a task: map it in the with block of a DAG"):
        f.expand(x=[1])


def test_the_output_of_a_mapped_task_cannot_be_taken_apart_in_the_file() -> None:
    with DAG("d"):
        output = f.expand(x=[1])
        assert isinstance(output, XComArg)
        for made in (str, "{}".format, "%s".__mod__, bool):
            with pytest.raises(TypeError, match=r"what 'f' returns is not known .* give it to a task as an argument"):
                made(output)
        with pytest.raises(TypeError, match="what 'f' returns is not known while the file is parsed"):
            list(output)  # type: ignore[call-overload]
