"""What an instance of a mapped task gets: which values, in which order, in each of its steps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headgate.protocol.messages import maps
from headgate.protocol.messages.dags import NAME_CHARS_MAX
from headgate.protocol.messages.maps import Available, Counted, Elements, OwnValue, Worklist
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSucceeded
from headgate.protocol.values import decode_value
from headgate.tasks import DAG, BaseOperator, BashOperator, PythonOperator, TaskSkipped, XComArg, task
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step
from headgate.testing import TaskResult, run_task
from headgate.triggers.temporal import DateTimeTrigger

MOMENT = datetime(2026, 3, 1, 12, tzinfo=UTC)
XCOMS: dict[Any, Any] = {"source": [1, 2, 3], "pairs": {"a": 1, "b": 2}, "each": [10, 20, 30, 40], ("source", "k"): [7]}
XCOMS["source__1"] = XCOMS["source"]  # the second task of the function
KILLED: list[str] = []


@task
def source() -> list[int]:
    return []


@task
def pairs() -> dict[str, int]:
    return {}


@task
def f(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in ("a", "b", "c")}


class Takes(BaseOperator):
    """Returns what it was made with."""

    def __init__(self, *, place: str, size: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.made_with = (place, size, self.retries)

    def execute(self, context: Any) -> Any:
        self.defer(trigger=DateTimeTrigger(MOMENT), method_name="resume")

    def resume(self, context: Any, event: Any) -> Any:
        assert context["task"] is self
        return [*self.made_with, self.retries, context["ti"].map_index, sorted(self.downstream_task_ids)]

    def on_kill(self) -> None:
        KILLED.append(self.made_with[0])


def instances(output: XComArg, xcoms: dict[Any, Any] | None = None) -> list[TaskResult]:
    """Run all instances, as many as the supervisor would make."""
    spec = output.operator.to_spec()
    assert spec.map is not None
    given = XCOMS if xcoms is None else xcoms

    def count(of: Counted) -> Available:
        assert not isinstance(of, Worklist)
        key = of.task_id if isinstance(of, Elements) or of.key == "return_value" else (of.task_id, of.key)
        return Available(len(given[key]), is_complete=True)

    length = maps.available(spec.map.source, count).length
    return [run_task(output, map_index=index, xcoms=given) for index in range(length)]


def values(output: XComArg, xcoms: dict[Any, Any] | None = None) -> list[Any]:
    """What all instances get; an instance that is skipped gets its reason."""
    ended = instances(output, xcoms)
    return [result.error if result.state == "skipped" else result.value for result in ended]


# --- values and their order ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "seen"),
    [
        ([5, "b", {"c": 1}, [1], None], [5, "b", {"c": 1}, [1], None]),
        ((5, 6), [5, 6]),
        (range(2), [0, 1]),
        ({"k": 1, "l": 2}, [("k", 1), ("l", 2)]),
        (lambda: source(), [1, 2, 3]),
        (lambda: XComArg(source().operator, "k"), [7]),
        (lambda: pairs(), [("a", 1), ("b", 2)]),
        (lambda: [source(), 5, [source()]], [[1, 2, 3], 5, [[1, 2, 3]]]),
        (lambda: source().map(str), ["1", "2", "3"]),
        (lambda: source().map(str).map(len), [1, 1, 1]),
        (lambda: source().filter(lambda x: x != 2), [1, "the value 1 was filtered out", 3]),
        (lambda: source().map(lambda x: x - 2).filter(bool), [-1, "the value 1 was filtered out", 1]),
        (lambda: source().zip([5, 6]), [(1, 5), (2, 6)]),
        (lambda: source().zip([5, 6], fillvalue=None), [(1, 5), (2, 6), (3, None)]),
        (lambda: source().zip({"k": 1}, [source()], fillvalue=0), [(1, ("k", 1), [1, 2, 3]), (2, 0, 0), (3, 0, 0)]),
        (lambda: source().concat([5], pairs()), [1, 2, 3, 5, ("a", 1), ("b", 2)]),
        (lambda: source().concat([5]).concat([6]), [1, 2, 3, 5, 6]),
        (lambda: source().concat([source()]).map(lambda x: [x]), [[1], [2], [3], [[1, 2, 3]]]),
        (lambda: source().zip([5, 6]).concat([(0, 0)]).map(sum).filter(bool), [6, 8, "the value 2 was filtered out"]),
        (lambda: source().batch(2), [[1, 2], [3]]),
        (lambda: source().batch(3), [[1, 2, 3]]),
        (lambda: source().concat(range(4)).batch(100), [[1, 2, 3, 0, 1, 2, 3]]),
        (lambda: source().batch(2).map(sum), [3, 3]),
        (lambda: source().batch(2).batch(2), [[[1, 2], [3]]]),
        (lambda: source().filter(lambda x: x > 2).batch(2), ["all values of the batch 0 were left out", [3]]),
        (lambda: source().filter(lambda x: x != 1).batch(2), [[2], [3]]),
        (lambda: source().map(lambda x: x * 2).zip(source().batch(1)), [(2, [1]), (4, [2]), (6, [3])]),
    ],
)
def test_each_instance_gets_its_value(over: Any, seen: list[Any]) -> None:
    with DAG("d"):
        output = f.expand(a=over() if callable(over) else over)
    assert [value["a"] if isinstance(value, dict) else value for value in values(output)] == seen


def test_several_parameters_give_each_combination_and_the_last_one_changes_fastest() -> None:
    with DAG("d"):
        output = f.expand(a=[2, 4], b=source(), c=["x", "y"])
    seen = [(value["a"], value["b"], value["c"]) for value in values(output)]
    assert seen == [(a, b, c) for a in (2, 4) for b in (1, 2, 3) for c in "xy"]


def test_what_all_instances_have_comes_from_partial_also_outputs_however_deep() -> None:
    with DAG("d") as dag:
        output = f.partial(b=source(), c={"k": [pairs()]}).expand(a=[1, 2])
    assert values(output) == [{"a": a, "b": [1, 2, 3], "c": {"k": [{"a": 1, "b": 2}]}} for a in (1, 2)]
    assert dag.tasks["f"].upstream_task_ids == {"source", "pairs"}


def test_outputs_within_what_is_expanded_over_are_upstream_wherever_they_stand() -> None:
    with DAG("d") as dag:
        f.expand(a=source().zip([pairs()]).concat([XComArg(source().operator)]).map(str).batch(2))
    assert dag.tasks["f"].upstream_task_ids == {"source", "source__1", "pairs"}
    assert [one.operator.task_id for one in dag.tasks["f"].mapped_over()] == ["source"], "those that are counted"


def test_the_context_of_an_instance_is_its_own() -> None:
    with DAG("d"):
        output = task(lambda a, ti: [a, ti.map_index, ti.task_id]).override(task_id="g").expand(a=["x", "y"])
    assert values(output) == [["x", 0, "g"], ["y", 1, "g"]]
    assert make_context(BashOperator(task_id="a", bash_command=":"), run_id="r")["ti"].map_index == -1


# --- expand_kwargs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "seen"),
    [
        ([{"a": 1, "b": 2}, {"a": 3}], [{"a": 1, "b": 2}, {"a": 3}]),
        (lambda: source().map(lambda x: {"a": x}), [{"a": 1}, {"a": 2}, {"a": 3}]),
        (lambda: source().map(lambda x: {"a": x}).concat([{"b": 5}]), [{"a": 1}, {"a": 2}, {"a": 3}, {"b": 5}]),
        (lambda: [pairs(), {"c": source()}], [{"a": 1, "b": 2}, {"c": [1, 2, 3]}]),
    ],
)
def test_each_dict_of_expand_kwargs_is_the_arguments_of_an_instance(over: Any, seen: list[Any]) -> None:
    with DAG("d"):
        output = f.expand_kwargs(over() if callable(over) else over)
    assert values(output) == seen


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (5, "expand_kwargs needs dicts of arguments; the value 0 is 5"),
        ({1: 2}, "expand_kwargs needs dicts of arguments; the value 0 is {1: 2}"),
        ({"a": 1, "b": 2}, "the value 0 has b, which all instances have from partial()"),
        ({"a": 1, "retries": 2}, "the value 0 has retries, the same for all instances: give it to partial()"),
        ({"task_id": "x"}, "the value 0 has task_id, the same for all instances: give it to partial()"),
        ({"z": 1}, "the operator of instance 0 cannot be made: "),
    ],
)
def test_arguments_that_an_instance_cannot_have_fail_it_with_the_value(value: Any, error: str) -> None:
    with DAG("d"):
        output = task(lambda a, b: 0).override(task_id="g").partial(b=1).expand_kwargs(source())
    (result,) = instances(output, {"source": [value]})
    assert result.state == "failed"
    assert f"TypeError: {error}" in result.error


# --- operators -----------------------------------------------------------------------------------


def test_an_operator_is_made_for_each_instance_with_the_options_of_the_task_and_of_the_dag() -> None:
    with DAG("d", default_args={"retries": 4}) as dag:
        output = Takes.partial(task_id="g", size=5, queue="q").expand(place=["a", "b"])
        f(b=output)
    spec = dag.tasks["g"].to_spec()
    assert (spec.operator, spec.retries, spec.queue) == ("Takes", 4, "q")
    assert values(output) == [["a", 5, 0, 4, 0, ["f"]], ["b", 5, 0, 4, 1, ["f"]]], "in both of its steps"


def test_a_python_operator_is_mapped_over_its_arguments() -> None:
    with DAG("d"):
        made = PythonOperator.partial(task_id="g", python_callable=lambda a, b=0, run_id="": [a, b, run_id])
        output = made.expand_kwargs([{"op_args": [1]}, {"op_kwargs": {"a": 3, "b": source()}}])
    assert values(output) == [[1, 0, "test"], [3, [1, 2, 3], "test"]]


def test_a_second_step_has_the_values_of_the_first() -> None:
    with DAG("d"):
        output = Takes.partial(task_id="g").expand(place=source().map(str))
    for index in range(3):
        result = run_task(output, map_index=index, xcoms=XCOMS)
        assert (len(result.deferrals), result.value[0]) == (1, str(index + 1))


def test_on_kill_is_called_of_the_operator_of_the_instance() -> None:
    with DAG("d"):
        mapped = Takes.partial(task_id="g").expand(place=["a", "b"]).operator
    mapped.on_kill()  # before it is made
    assert isinstance(run_step(mapped, make_context(mapped, run_id="r", map_index=1)), StepDeferred)
    mapped.on_kill()
    assert KILLED == ["b"]


def test_a_mapped_task_itself_is_never_run_and_an_instance_that_is_no_more_says_so() -> None:
    with DAG("d"):
        mapped = f.expand(a=[1, 2]).operator
    assert error_of(run_step(mapped, make_context(mapped, run_id="r"))) == (
        "RuntimeError: the task 'f' is mapped now; it was not when this run began"
    )
    assert error_of(run_step(mapped, make_context(mapped, run_id="r", map_index=2))) == (
        "RuntimeError: there are 2 values for the task 'f' now, and this is instance 2: clear the whole task"
    )


@pytest.mark.parametrize("counted", [1, 3])
def test_an_instance_runs_only_over_as_many_values_as_were_counted(counted: int) -> None:
    with DAG("d"):
        mapped = f.expand(a=[1, 2]).operator

    def step(map_length: int | None) -> StepOutcome:
        return run_step(mapped, make_context(mapped, run_id="r", map_index=0, map_length=map_length))

    assert "and this is instance 0; it was expanded over" in error_of(step(counted))
    assert isinstance(step(2), StepSucceeded)
    assert isinstance(step(None), StepSucceeded)


def test_the_value_that_comes_with_a_step_is_not_asked_for() -> None:
    asked: list[str] = []

    def read_xcom(task_id: str, key: str, map_index: int = -1) -> bytes:
        asked.append(task_id)
        return b"[1,2]"

    def value_of(own: OwnValue | None) -> Any:
        context = make_context(mapped, run_id="r", map_index=1, map_length=2, own=own, read_xcom=read_xcom)
        outcome = run_step(mapped, context)
        assert isinstance(outcome, StepSucceeded), outcome
        return decode_value(outcome.xcoms[0].value)

    with DAG("d"):
        mapped = f.expand(a=source().map(lambda value: 10 * value)).operator
    assert (value_of(OwnValue("source", "return_value", 2, b"7")), asked) == ({"a": 70}, [])
    # What is expanded over something else by now, for its file has changed, asks.
    assert value_of(OwnValue("source", "other", 2, b"7")) == value_of(None) == {"a": 20}
    assert set(asked) == {"source"}


def test_a_mapped_task_is_not_executed() -> None:
    with DAG("d"):
        mapped = f.expand(a=[1, 2]).operator
    with pytest.raises(RuntimeError, match="the task 'f' is mapped: only its instances run"):
        mapped.execute(make_context(mapped, run_id="r"))


def test_an_instance_of_a_task_that_is_not_mapped_any_more_does_not_run_the_task() -> None:
    with DAG("d"):
        plain = source().operator
    assert error_of(run_step(plain, make_context(plain, run_id="r", map_index=2))) == (
        "RuntimeError: the task 'source' is not mapped any more; it was when this run began"
    )


def test_a_function_of_map_skips_its_instance_and_fails_it() -> None:
    def chosen(value: int) -> int:
        if value == 1:
            raise TaskSkipped("not this one")
        return 1 // (value - 2)

    with DAG("d"):
        output = f.expand(a=source().map(chosen))
    one, two, three = instances(output)
    assert (one.state, one.error) == ("skipped", "not this one")
    assert (two.state, two.error) == ("failed", "ZeroDivisionError: integer division or modulo by zero")
    assert three.value == {"a": 1}


def error_of(outcome: StepOutcome) -> str:
    assert isinstance(outcome, StepFailed)
    return outcome.error


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namer", "name"),
    [
        (lambda a: a["id"], "7"),
        (lambda b: b, "two words"),
        (lambda a, b: f"{a['id']} {b}", "7 two words"),
        (lambda **own: ",".join(own), "a,b"),
        (lambda a, other="x": other, "x"),
        (lambda: "x" * 1000, "x" * NAME_CHARS_MAX),
        (lambda: None, None),
        (lambda: "", None),
        (lambda: "a\0", "a\\x00"),
        (lambda a: a["nothing"], None),
    ],
)
def test_an_instance_is_named_by_its_own_arguments_and_an_error_of_that_is_no_failure(namer: Any, name: str) -> None:
    with DAG("d"):
        output = f.partial(c=1).expand(a=[{"id": 7}], b=[" two \n words"], map_index_name=namer)
    result = run_task(output, map_index=0)
    assert (result.state, result.map_name) == ("success", name)


def test_an_instance_has_its_name_whatever_becomes_of_it() -> None:
    with DAG("d"):
        failing = task(lambda a: 1 // 0).override(task_id="g").expand_kwargs(source(), map_index_name=lambda a: a)
        made = Takes.partial(task_id="h").expand(place=[""], map_index_name=lambda place: f"at {place}")
        typo = Takes.partial(task_id="i").expand_kwargs(source(), map_index_name=lambda place: place)
    result = run_task(failing, map_index=0, xcoms={"source": [{"a": "it"}]})
    assert (result.state, result.map_name) == ("failed", "it")
    assert run_task(made, map_index=0).map_name == "at"
    unmade = run_task(typo, map_index=0, xcoms={"source__1": [{"place": "here", "syze": 1}]})
    assert (unmade.state, unmade.map_name) == ("failed", "here")
    with DAG("d"):
        assert run_task(f(a=1)).map_name is None


def test_a_name_that_takes_no_end_is_stopped_with_the_step() -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    with DAG("d"):
        mapped = f.expand(a=[1], map_index_name=interrupted).operator
    with pytest.raises(KeyboardInterrupt):
        run_step(mapped, make_context(mapped, run_id="r", map_index=0))


# --- what an upstream task has to leave -----------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "found"),
    [
        ("text", '"text"'),
        (None, "nothing"),
        ({1, 2}, '{"$":"set","v":[1,2]}'),
        (5, "5"),
    ],
)
def test_a_task_that_leaves_no_list_fails_itself_and_may_try_again(left: Any, found: str) -> None:
    with DAG("d"):
        output = task(lambda: left).override(task_id="g")()
        f.expand(a=output.map(str).batch(2))
    result = run_task(output)
    assert (result.state, result.may_retry) == ("failed", True)
    assert result.error == (
        "TypeError: the task 'f' is expanded over what this one leaves under 'return_value', and it has left "
        f"{found} there: a list or a dict is needed"
    )


@pytest.mark.parametrize("left", [[], [1], (1, 2), {}, {"$": 1}, {1: 2}])
def test_a_list_a_tuple_or_a_dict_is_what_it_has_to_leave(left: Any) -> None:
    with DAG("d"):
        output = task(lambda: left).override(task_id="g")()
        f.expand(a=output)
    assert run_task(output).value == left


def test_what_it_leaves_under_another_key_is_looked_at_too_and_an_argument_is_not() -> None:
    def leave(ti: Any, value: Any) -> None:
        ti.xcom_push("k", value)

    with DAG("d"):
        bad, good = (task(leave).override(task_id=name)(value=value) for name, value in (("x", 5), ("y", [5])))
        f.partial(b=bad).expand(a=XComArg(good.operator, "k"))
        f.expand(a=XComArg(bad.operator, "k"))
    assert run_task(good).state == "success"
    assert "the task 'f__1' is expanded over what this one leaves under 'k', and it has left 5" in run_task(bad).error


def test_an_instance_leaves_one_of_the_values_whatever_it_is() -> None:
    with DAG("d"):
        first = task(lambda a: a).override(task_id="g").expand(a=[1])
        f.expand(a=first)
    operator = first.operator
    outcome = run_step(operator, make_context(operator, run_id="r", map_index=0))
    assert isinstance(outcome, StepSucceeded)
    assert outcome.xcoms[0].value == b"1"


def test_an_instance_of_a_task_over_a_mapped_one_gets_one_value_of_it() -> None:
    with DAG("d"):
        each = task(lambda a: a).override(task_id="each").expand(a=[1, 2, 3, 4])
        again = f.expand(a=each, b=each.batch(3))
    seen = [(value["a"], value["b"]) for value in values(again)]
    assert seen == [(a, b) for a in (10, 20, 30, 40) for b in ([10, 20, 30], [40])]
