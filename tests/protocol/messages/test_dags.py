"""DAGs on the wire: each comes back as it was, and what breaks a limit is refused with its name."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.strategies import strategy_of

from headgate.protocol.errors import DagMalformed, DagTooLong, ProtocolError, RemoteProtocolError
from headgate.protocol.messages import dags
from headgate.protocol.messages.dags import (
    AssetSchedule,
    CronSchedule,
    DagSpec,
    StartTrigger,
    TaskSpec,
    TaskState,
    check_dag,
    decode_dag,
    encode_dag,
    find_cycle,
)
from headgate.protocol.messages.maps import Elements, MapSpec, Output, Values
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.messages.signals import SignalWait
from headgate.protocol.messages.start_triggers import Listed, OwnArguments
from headgate.protocol.values import encode_value

START = StartTrigger("shop.OrderTrigger", encode_value({"id": 1}, where="kwargs"), "resumed", b"{}", 60.0)
EXAMPLE = DagSpec(
    dag_id="orders.daily",
    schedule=CronSchedule("0 6 * * *", "Europe/Berlin"),
    start_date_s=1_700_000_000.5,
    catchup=True,
    max_active_runs=3,
    tasks=(
        TaskSpec("wait", "OrderSensor", start_trigger=START),
        TaskSpec(
            "load",
            "PythonOperator",
            upstream=("wait",),
            trigger_rule="none_failed",
            retries=2,
            retry_delay_s=1.5,
            retry_exponential_backoff=True,
            max_retry_delay_s=60.0,
            execution_timeout_s=600.0,
            priority_weight=-7,
            queue="heavy",
            pool="database",
            pool_slots=2,
        ),
    ),
    is_paused_upon_creation=True,
    description="what was ordered\nyesterday",
    tags=("shop",),
)


def with_task(**changes: Any) -> DagSpec:
    return DagSpec("orders", tasks=(msgspec.structs.replace(TaskSpec("one", "EmptyOperator"), **changes),))


def test_a_dag_comes_back_as_it_was() -> None:
    assert decode_dag(encode_dag(EXAMPLE)) == EXAMPLE
    by_assets = DagSpec("by-assets", schedule=AssetSchedule(("file:///a", "s3://b/c")))
    assert decode_dag(encode_dag(by_assets)) == by_assets


def test_equal_dags_have_equal_bytes_and_a_changed_one_has_others() -> None:
    again = decode_dag(encode_dag(EXAMPLE))
    assert encode_dag(again) == encode_dag(EXAMPLE)
    assert encode_dag(msgspec.structs.replace(EXAMPLE, catchup=False)) != encode_dag(EXAMPLE)


@given(spec=strategy_of(DagSpec))
def test_any_spec_either_comes_back_or_is_refused_with_its_name(spec: DagSpec) -> None:
    refused: str | None = None
    try:
        back = decode_dag(encode_dag(spec))
    except DagMalformed as error:
        refused = error.dag_id
    else:
        check_dag(spec)
        assert back == spec
    assert refused in (None, spec.dag_id)


@given(data=st.binary(max_size=60))
def test_bytes_of_any_kind_are_a_dag_or_a_protocol_error(data: bytes) -> None:
    try:
        spec = decode_dag(data)
    except ProtocolError:
        return
    assert isinstance(spec, DagSpec)


def test_bytes_that_are_no_dag_are_the_peers_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="3 bytes are not a DAG"):
        decode_dag(b"\x93ab")


def test_text_that_has_no_form_on_the_wire_is_refused_when_it_is_encoded() -> None:
    with pytest.raises(DagMalformed, match="cannot be encoded"):
        encode_dag(DagSpec("orders", description="\ud800"))


def test_a_dag_longer_than_the_limit_is_refused_on_both_sides() -> None:
    start = msgspec.structs.replace(START, kwargs=bytes(KWARGS_BYTES_MAX))
    tasks = tuple(TaskSpec(f"task-{index}", "EmptyOperator", start_trigger=start) for index in range(5))
    spec = DagSpec("huge", tasks=tasks)
    with pytest.raises(DagTooLong, match="DAG 'huge' needs 5,"):
        encode_dag(spec)
    with pytest.raises(DagTooLong):
        decode_dag(bytes(dags.DAG_SPEC_BYTES_MAX + 1))


def test_a_dag_as_large_as_the_limits_allow_is_taken() -> None:
    names = [f"task-{index}" for index in range(dags.TASKS_PER_DAG_MAX)]
    chain = tuple(TaskSpec(name, "E", upstream=tuple(names[i - 1 : i])) for i, name in enumerate(names))
    spec = DagSpec("d" * dags.ID_CHARS_MAX, tasks=chain)
    assert decode_dag(encode_dag(spec)) == spec


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dag_id": ""}, "the dag_id is empty"),
        ({"dag_id": "a b"}, "the dag_id 'a b' may have letters"),
        ({"dag_id": "x" * 251}, "has 251 characters; the limit is 250"),
        ({"max_active_runs": 0}, r"max_active_runs must be in 1\.\.100000, not 0"),
        ({"description": "\0"}, "holds a NUL"),
        ({"description": "x" * (dags.TEXT_CHARS_MAX + 1)}, "description is longer than 65536"),
        ({"tags": ("a",) * 101}, "has 101 tags; the limit is 100"),
        ({"tags": ("a\n",)}, r"a tag 'a\\n' must be printable"),
        ({"start_date_s": float("inf")}, "start_date must be a moment in the years 2 to 9998, not inf"),
        ({"schedule": CronSchedule("")}, "the cron expression '' must have 1..250 characters"),
        ({"schedule": CronSchedule("* * * * *", "Mars\0")}, "the time zone .* must be printable"),
        ({"schedule": AssetSchedule(())}, "scheduled by 0 assets"),
        ({"schedule": AssetSchedule(("a b",))}, "the asset 'a b' must be printable ASCII"),
        ({"schedule": AssetSchedule(("a", "a"))}, "names an asset twice"),
        ({"tasks": (TaskSpec("a", "E"), TaskSpec("a", "E"))}, "task 'a': is in the DAG twice"),
        ({"tasks": (TaskSpec("a", "E", upstream=("b",)),)}, "task 'a': its upstream 'b' is not a task"),
        ({"tasks": (TaskSpec("a", "E", upstream=("a",)),)}, "task 'a': is upstream of itself: a >> a"),
        ({"tasks": (TaskSpec("a", "E"),) * 10_001}, "has 10001 tasks; the limit is 10000"),
    ],
)
def test_a_dag_that_breaks_a_rule_is_refused_with_the_value(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(DagMalformed, match=problem):
        check_dag(msgspec.structs.replace(DagSpec("orders"), **changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"task_id": "a/b"}, "the task_id 'a/b' may have letters"),
        ({"operator": ""}, "the operator's name '' must have 1..250 characters"),
        ({"retries": -1}, r"retries must be in 0\.\.10000, not -1"),
        ({"priority_weight": 2**40}, "priority_weight must be in"),
        ({"pool_slots": 0}, "pool_slots must be in 1"),
        ({"pool": "x" * 251}, "the pool .* must have 1..250 characters, not 251"),
        ({"queue": "\n"}, "the queue .* must be printable"),
        ({"retry_delay_s": -0.5}, r"retry_delay must be in .*, not -0.5"),
        ({"retry_delay_s": float("nan")}, "retry_delay must be in .*, not nan"),
        ({"max_retry_delay_s": 0.0}, "max_retry_delay must be more than 0"),
        ({"execution_timeout_s": 1e12}, "execution_timeout must be more than 0 and at most"),
        ({"upstream": ("b", "b")}, "names an upstream task twice"),
        ({"upstream": tuple(str(n) for n in range(1001))}, "has 1001 upstream tasks; the limit is 1000"),
        ({"start_trigger": msgspec.structs.replace(START, classpath="")}, "classpath must have"),
        ({"start_trigger": msgspec.structs.replace(START, next_method="a.b")}, "'a.b' is not the name of a method"),
        ({"start_trigger": msgspec.structs.replace(START, timeout_s=-1.0)}, "the start trigger's timeout must be"),
        ({"start_trigger": msgspec.structs.replace(START, kwargs=bytes(2**20 + 1))}, "kwargs need 1,048,577 bytes"),
        ({"start_trigger": msgspec.structs.replace(START, next_kwargs=bytes(2**20 + 1))}, "next_kwargs need 1,048,577"),
    ],
)
def test_a_task_that_breaks_a_rule_is_refused_with_its_name_and_the_value(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DagMalformed, match=problem) as raised:
        check_dag(with_task(**changes))
    assert raised.value.dag_id == "orders"
    assert raised.value.task_id == changes.get("task_id", "one")


LISTED = OwnArguments(("id",), Listed((b"1", b"2")))
MAPPED: dict[str, Any] = {"map": MapSpec(Values(2)), "start_trigger": msgspec.structs.replace(START, own=LISTED)}


def own(**changes: Any) -> dict[str, Any]:
    """Return a mapped task whose instances have arguments of their own for their triggers, with these changes."""
    start = {name: changes.pop(name) for name in ("kwargs", "signal") if name in changes}
    arguments = msgspec.structs.replace(LISTED, **{name: changes.pop(name) for name in ("names",) if name in changes})
    if "source" in changes:
        arguments = msgspec.structs.replace(arguments, source=changes.pop("source"))
    return MAPPED | {"start_trigger": msgspec.structs.replace(START, own=arguments, **start)} | changes


def test_instances_may_begin_in_triggers_with_their_values() -> None:
    check_dag(with_task(**MAPPED))
    check_dag(with_task(map=MapSpec(Values(2)), start_trigger=START))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (own(map=None), "it is not mapped, and its trigger has arguments of instances"),
        (own(group="g"), "it is in the mapped group 'g'"),
        (own(signal=SignalWait("k")), "it is mapped, and its instances cannot wait for a signal without a worker"),
        (own(names=()), "its instances have 0 arguments for their triggers, which must have different names"),
        (own(names=("a", "a")), "its instances have 2 arguments"),
        (own(names=("a b",)), "its instances have 1 arguments"),
        (own(kwargs=b"[]"), "the arguments of its trigger are no dict with names"),
        (own(kwargs=b"{"), "the arguments of its trigger are no dict with names"),
        (own(kwargs=encode_value({1: 2}, where="kwargs")), "the arguments of its trigger are no dict with names"),
        (own(kwargs=encode_value({"x": "x" * KWARGS_BYTES_MAX}, where="kwargs")[:KWARGS_BYTES_MAX]), "no dict"),
        (
            own(kwargs=encode_value({"x": "x" * (2**20 - 2**15)}, where="kwargs")),
            "need 1,015,816 bytes",
        ),
        (own(map=MapSpec(Values(3))), "it is expanded over other values than those of its triggers"),
        (own(source=Elements("two")), "it is expanded over other values than those of its triggers"),
        (own(map=MapSpec(Output("two", "k")), upstream=("two",)), "it is expanded over other values"),
        (own(source=Listed((b"1", b"2" * (48 * 1024 + 1)))), "a value needs 49,153 bytes; the limit is 49,152"),
    ],
)
def test_an_instance_that_cannot_begin_in_its_trigger_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(DagMalformed, match=f"task 'one': cannot begin in its trigger: .*{problem}"):
        check_dag(with_task(**changes))


def test_the_values_of_a_mapped_task_are_no_arguments_of_triggers() -> None:
    over = Output("one", "k")
    start = msgspec.structs.replace(START, own=OwnArguments(("id",), over))
    spec = with_task(map=MapSpec(Values(2)))
    two = TaskSpec("two", "Op", upstream=("one",), map=MapSpec(over), start_trigger=start)
    with pytest.raises(DagMalformed, match="task 'two': cannot begin in its trigger: it is expanded over 'one', which"):
        check_dag(msgspec.structs.replace(spec, tasks=(*spec.tasks, two)))


def test_a_rule_nobody_knows_does_not_pass_the_wire() -> None:
    data = encode_dag(with_task(trigger_rule="sometimes"))
    with pytest.raises(RemoteProtocolError, match="Invalid enum value 'sometimes'"):
        decode_dag(data)


def test_a_cycle_is_told_in_the_order_of_the_arrows() -> None:
    # a >> b >> c >> a, and d below it: the cycle is named without d
    cycle = find_cycle({"d": ("c",), "a": ("c",), "b": ("a",), "c": ("b",)})
    assert cycle is not None
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"a", "b", "c"}
    assert "".join(cycle) in {"abca", "bcab", "cabc"}


def test_a_diamond_is_no_cycle() -> None:
    assert find_cycle({"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}) is None


@given(
    edges=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=14),
)
def test_a_cycle_is_found_exactly_where_no_order_exists(edges: list[tuple[int, int]]) -> None:
    upstream = {str(node): tuple(sorted({str(a) for a, b in edges if b == node})) for node in range(8)}
    left = dict(upstream)
    while ready := [node for node, above in left.items() if not any(other in left for other in above)]:
        for node in ready:
            del left[node]
    cycle = find_cycle(upstream)
    assert (cycle is not None) == bool(left)
    if cycle is not None:
        assert all(above in upstream[below] for above, below in itertools.pairwise(cycle))


def test_the_states_are_those_of_the_state_machine() -> None:
    assert [state.value for state in TaskState] == (
        "none scheduled running deferred up_for_retry restarting success failed skipped upstream_failed removed"
    ).split()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(TaskState.DEFERRED), type=TaskState) is TaskState.DEFERRED
