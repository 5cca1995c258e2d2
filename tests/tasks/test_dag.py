"""DAGs and tasks as their authors write them: what reaches the scheduler, and what is refused with its name."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from tests.waiting import WITHIN_S

from headgate import tasks
from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, SignalSchedule, decode_dag, encode_dag
from headgate.protocol.messages.rules import SignalRule
from headgate.protocol.messages.task_streams import HANDLER_METHOD, StreamOptions
from headgate.protocol.values import decode_value
from headgate.signals import RESTART, STOP, Every, On, OnSignal, equal
from headgate.tasks import (
    DAG,
    Asset,
    BaseOperator,
    Batch,
    Each,
    EmptyOperator,
    Latest,
    PythonOperator,
    StartTriggerArgs,
    chain,
    task,
)

START = datetime(2026, 1, 1, tzinfo=UTC)


class Waiter(BaseOperator):
    """Starts with its trigger."""

    start_from_trigger = True
    start_trigger_args = StartTriggerArgs(
        trigger_cls="headgate.triggers.temporal.DateTimeTrigger",
        trigger_kwargs={"moment": START},
        next_method="done",
        next_kwargs={"order": 7},
        timeout=timedelta(hours=1),
    )

    def done(self, context: Any, event: Any = None, order: int = 0) -> None:
        """End."""


def empty(*task_ids: str) -> list[EmptyOperator]:
    return [EmptyOperator(task_id=task_id) for task_id in task_ids]


def arrows(dag: DAG) -> set[str]:
    return {f"{above}>{task.task_id}" for task in dag.to_spec().tasks for above in task.upstream}


# --- joining -------------------------------------------------------------------------------------


def test_tasks_are_joined_by_arrows_and_lists_in_both_directions() -> None:
    with DAG("orders") as dag:
        a, b, c, d, e, f = empty("a", "b", "c", "d", "e", "f")
        a >> [b, c] >> d
        f << e << d
    assert arrows(dag) == {"a>b", "a>c", "b>d", "c>d", "d>e", "e>f"}


def test_a_list_may_stand_on_the_left_of_either_arrow() -> None:
    with DAG("orders") as dag:
        a, b, c, d = empty("a", "b", "c", "d")
        [a, b] >> c
        [a, b] << d
    assert arrows(dag) == {"a>c", "b>c", "d>a", "d>b"}


def test_a_chain_joins_each_link_to_the_next() -> None:
    with DAG("orders") as dag:
        a, b, c, d, e = empty("a", "b", "c", "d", "e")
        chain(a, [b, c], [d, e])
    assert arrows(dag) == {"a>b", "a>c", "b>d", "b>e", "c>d", "c>e"}


def test_an_arrow_drawn_twice_is_one_arrow() -> None:
    with DAG("orders") as dag:
        a, b = empty("a", "b")
        a >> b
        b << a
    assert dag.to_spec().tasks[1].upstream == ("a",)


def test_what_is_no_task_cannot_be_joined() -> None:
    def later() -> None: ...

    with DAG("orders"):
        (a,) = empty("a")
        with pytest.raises(TypeError, match="not to 'b'"):
            operator.rshift(a, "b")
        with pytest.raises(TypeError, match="not to <task function 'later'>: call it, and join what it returns"):
            operator.rshift(a, task(later))


def test_a_task_of_another_dag_or_of_none_cannot_be_joined() -> None:
    with DAG("orders"):
        (a,) = empty("a")
    with DAG("others"):
        (b,) = empty("b")
    with pytest.raises(DagMalformed, match=r"DAG 'orders', task 'a': cannot be joined to 'b'"):
        a >> b
    with pytest.raises(DagMalformed, match="cannot be joined"):
        EmptyOperator(task_id="c") >> EmptyOperator(task_id="d")


def test_a_cycle_is_told_where_the_block_ends() -> None:
    dag = DAG("orders")

    def write() -> None:
        with dag:
            a, b = empty("a", "b")
            a >> b >> a

    with pytest.raises(
        DagMalformed, match=r"DAG 'orders', task '[ab]': is upstream of itself: (a >> b >> a|b >> a >> b)"
    ):
        write()


def test_an_error_in_the_block_is_not_hidden_by_what_it_left_unfinished() -> None:
    def write() -> None:
        with DAG("orders"):
            a, b = empty("a", "b")
            a >> b >> a
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert EmptyOperator(task_id="after").dag is None


def test_blocks_may_stand_in_one_another() -> None:
    with DAG("outer") as outer:
        (a,) = empty("a")
        with DAG("inner") as inner:
            (b,) = empty("b")
        (c,) = empty("c")
    assert (a.dag, b.dag, c.dag) == (outer, inner, outer)


# --- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "schedule"),
    [
        ({}, None),
        ({"schedule": "0  6 * * mon-fri"}, CronSchedule("0 6 * * mon-fri", "UTC")),
        ({"schedule": "@daily"}, CronSchedule("0 0 * * *", "UTC")),
        ({"schedule": "0 0 29 2 *"}, CronSchedule("0 0 29 2 *", "UTC")),
        ({"schedule": "0 6 * * *", "timezone": "Asia/Tokyo"}, CronSchedule("0 6 * * *", "Asia/Tokyo")),
        (
            {"schedule": "0 6 * * *", "start_date": datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))},
            CronSchedule("0 6 * * *", "Europe/Berlin"),
        ),
        ({"schedule": Asset("s3://in/orders")}, AssetSchedule(("s3://in/orders",))),
        ({"schedule": [Asset("a"), Asset("b")]}, AssetSchedule(("a", "b"))),
        ({"schedule": Each(Asset("a"))}, AssetSchedule(("a",), "each")),
        ({"schedule": Latest([Asset("a"), Asset("b")])}, AssetSchedule(("a", "b"), "latest")),
        ({"schedule": Batch(Asset("a"), count=10)}, AssetSchedule(("a",), "batch", 10)),
        ({"schedule": Batch([Asset("a")], count=10, seconds=60)}, AssetSchedule(("a",), "batch", 10, 60.0)),
        ({"schedule": OnSignal("k")}, SignalSchedule((SignalRule("k"),))),
        ({"schedule": [OnSignal("k"), OnSignal("l")]}, SignalSchedule((SignalRule("k"), SignalRule("l")), "all")),
        (
            {"schedule": Latest(OnSignal("k", equal(1), namespace="n", since="latest"))},
            SignalSchedule((SignalRule("k", "n", equal(1), since="latest"),), "latest"),
        ),
        (
            {"schedule": Batch([OnSignal("k")], count=10, seconds=60)},
            SignalSchedule((SignalRule("k"),), "batch", 10, 60.0),
        ),
    ],
)
def test_a_schedule_reaches_the_scheduler(arguments: dict[str, Any], schedule: object) -> None:
    assert decode_dag(encode_dag(DAG("orders", **arguments).to_spec())).schedule == schedule


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"schedule": "0 25 * * *"}, r"'0 25 \* \* \*' is not a cron expression: Bad hour"),
        ({"schedule": "0 0 31 2 *"}, r"'0 0 31 2 \*' is not a cron expression: Bad day-of-month"),
        ({"schedule": "* * * * * *"}, "must have 5 fields, not 6"),
        ({"schedule": "@fortnightly"}, "must have 5 fields, not 1; the presets are @hourly"),
        ({"schedule": "* * * * 1#2/3"}, "is not a cron expression"),
        ({"schedule": "0 6 * * *", "timezone": "Mars/Base"}, "timezone: 'Mars/Base' is not a time zone"),
        ({"schedule": 3600}, "schedule must be None, a cron expression, assets or OnSignal, not 3600"),
        ({"schedule": ["a"]}, "schedule must be None, a cron expression, assets or OnSignal"),
        ({"schedule": Each("a")}, "Each must be assets, not 'a'"),  # type: ignore[arg-type]
        ({"schedule": Batch(Asset("a"), count="3")}, "the count of a Batch must be an int, not '3'"),  # type: ignore[arg-type]
        ({"schedule": Batch(Asset("a"), count=0)}, r"the count of a batch must be in 1..1000, not 0"),
        ({"schedule": Batch(Asset("a"), count=3, seconds="1")}, "the seconds of a Batch must be a number or None"),  # type: ignore[arg-type]
        ({"schedule": Batch(Asset("a"), count=3, seconds=0)}, "the seconds of a batch must be more than 0"),
        ({"schedule": [Asset("a"), Asset("a")]}, "names an asset twice"),
        ({"schedule": []}, "is scheduled by 0 assets"),
        ({"schedule": [Asset("a"), OnSignal("k")]}, r"schedule has assets and signals: have a watcher .*\(--signal\)"),
        ({"schedule": On("k")}, "a cron expression, assets or OnSignal, not On"),
        ({"schedule": OnSignal("")}, "the schedule: the key of a signal '' must have 1..512 characters"),
        ({"schedule": OnSignal(7)}, "the key of OnSignal must be a str, not 7"),  # type: ignore[arg-type]
        ({"schedule": OnSignal("k", 3)}, r"the predicate must be made by a function as equal\(\), not 3"),  # type: ignore[arg-type]
        ({"schedule": OnSignal("k", since="run")}, "the since of OnSignal must be 'parsed' or 'latest', not 'run'"),  # type: ignore[arg-type]
        ({"schedule": [OnSignal("k"), OnSignal("k")]}, "has the same rule about a signal twice in its schedule"),
        ({"schedule": [OnSignal(str(n)) for n in range(65)]}, "is scheduled by 65 rules about signals, not 1..64"),
        ({"end_on": "drain"}, r"end_on takes rules about signals, as On\('drain'\), not 'drain'"),
        ({"end_on": On(Every("@daily"))}, "end_on takes rules about signals"),
        ({"end_on": On("k", action=RESTART)}, "a rule of end_on ends the run by itself"),
        ({"end_on": [On("k"), On("k", action=STOP)]}, "end_on has the same rule about a signal twice"),
        ({"end_on": [On(str(n)) for n in range(65)]}, "end_on has 65 rules about signals; the limit is 64"),
        ({"start_date": datetime(2026, 1, 1)}, "2026-01-01T00:00:00 has none"),
        ({"start_date": "2026-01-01"}, "start_date must be a datetime, not '2026-01-01'"),
        ({"catchup": True}, "catchup needs a start_date"),
        ({"catchup": 1}, "catchup must be a bool, not 1"),
        ({"max_active_runs": 0}, "max_active_runs must be in 1"),
        ({"max_active_runs": "3"}, "max_active_runs must be an int, not '3'"),
        ({"tags": "shop"}, "tags must be a list of str, not 'shop'"),
        ({"default_args": {"owner": "me"}}, "default_args: there is no option 'owner': there are no owners"),
        ({"default_args": {"retries": "3"}}, "default_args: retries must be int, not '3'"),
    ],
)
def test_a_dag_that_cannot_be_is_refused_with_its_name_and_the_value(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(DagMalformed, match=f"DAG 'orders': .*{problem}"):
        DAG("orders", **arguments)


@pytest.mark.parametrize("dag_id", ["", "a b", "x" * 251])
def test_a_bad_dag_id_is_refused(dag_id: str) -> None:
    with pytest.raises(DagMalformed, match="the dag_id"):
        DAG(dag_id)


def test_a_bad_asset_is_refused() -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        Asset("s3://in/ä")
    with pytest.raises(TypeError, match="must be a str, not int"):
        Asset(7)  # type: ignore[arg-type]


# --- options -------------------------------------------------------------------------------------


def test_options_reach_the_scheduler() -> None:
    with DAG("orders", start_date=START, catchup=True, max_active_runs=2, description="what", tags=["shop"]) as dag:
        EmptyOperator(
            task_id="load",
            retries=2,
            retry_delay=timedelta(seconds=1.5),
            retry_exponential_backoff=True,
            max_retry_delay=timedelta(minutes=1),
            execution_timeout=timedelta(hours=1),
            priority_weight=-3,
            queue="heavy",
            pool="database",
            pool_slots=2,
            trigger_rule="none_failed",
        )
    spec = decode_dag(encode_dag(dag.to_spec()))
    assert (spec.start_date_s, spec.catchup, spec.max_active_runs) == (START.timestamp(), True, 2)
    assert (spec.description, spec.tags) == ("what", ("shop",))
    (task_spec,) = spec.tasks
    assert (task_spec.task_id, task_spec.operator, task_spec.trigger_rule) == ("load", "EmptyOperator", "none_failed")
    assert (task_spec.retries, task_spec.retry_delay_s, task_spec.retry_exponential_backoff) == (2, 1.5, True)
    assert (task_spec.max_retry_delay_s, task_spec.execution_timeout_s) == (60.0, 3600.0)
    assert (task_spec.priority_weight, task_spec.queue, task_spec.pool, task_spec.pool_slots) == (
        -3,
        "heavy",
        "database",
        2,
    )
    assert task_spec.start_trigger is None


def test_default_args_hold_for_tasks_that_do_not_say_otherwise() -> None:
    with DAG("orders", default_args={"retries": 3, "queue": "slow"}) as dag:
        EmptyOperator(task_id="a")
        EmptyOperator(task_id="b", retries=0)
    assert [(task.retries, task.queue) for task in dag.to_spec().tasks] == [(3, "slow"), (0, "slow")]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"retries": -1}, r"retries must be in 0\.\.10000, not -1"),
        ({"retries": True}, "retries must be int, not True"),
        ({"retry_delay": 5}, "retry_delay must be timedelta, not 5"),
        ({"retry_delay": timedelta(seconds=-1)}, "retry_delay must be in"),
        ({"execution_timeout": timedelta(0)}, "execution_timeout must be more than 0"),
        ({"trigger_rule": "all_succes"}, "trigger_rule must be one of all_success, .*, not 'all_succes'"),
        ({"pool_slots": 0}, "pool_slots must be in 1"),
        ({"queue": ""}, "the queue '' must have 1..250 characters"),
        ({"retires": 3}, "there is no option 'retires'; there are endless, every, execution_timeout, "),
        ({"start_from_trigger": "yes"}, "start_from_trigger must be bool, not 'yes'"),
    ],
)
def test_a_bad_option_is_refused_where_the_task_is_made(options: dict[str, Any], problem: str) -> None:
    with DAG("orders"), pytest.raises(DagMalformed, match=f"DAG 'orders', task 'load': {problem}"):
        EmptyOperator(task_id="load", **options)


def test_two_tasks_of_one_id_are_refused() -> None:
    with DAG("orders"), pytest.raises(DagMalformed, match="DAG 'orders', task 'a': is in the DAG twice"):
        empty("a", "a")


@pytest.mark.parametrize("task_id", ["", "a b", "x" * 251, 7])
def test_a_bad_task_id_is_refused(task_id: Any) -> None:
    with DAG("orders"), pytest.raises(DagMalformed, match=r"DAG 'orders', task .*: .*task_id"):
        EmptyOperator(task_id=task_id)


# --- starting from a trigger ---------------------------------------------------------------------


def test_the_trigger_a_task_starts_with_reaches_the_supervisor() -> None:
    with DAG("orders") as dag:
        Waiter(task_id="wait")
    start = dag.to_spec().tasks[0].start_trigger
    assert start is not None
    assert (start.classpath, start.next_method) == ("headgate.triggers.temporal.DateTimeTrigger", "done")
    assert decode_value(start.kwargs) == {"moment": START}
    assert decode_value(start.next_kwargs) == {"order": 7}
    assert start.timeout_s == 3600.0


def test_a_task_that_starts_from_its_trigger_may_take_a_stream_of_it() -> None:
    class Takes(BaseOperator):
        def handle_trigger_events(self, events: Any, context: Any, rows: int) -> None:
            """Take them."""

    start = StartTriggerArgs("a.Pages", next_kwargs={"rows": 0}, stream=Batch(count=5, seconds=1), poison="skip")
    with DAG("orders") as dag:
        Takes(task_id="take", start_from_trigger=True, start_trigger_args=start)
        Waiter(task_id="wait", start_trigger_args=StartTriggerArgs("a.Pages", "done", stream=Each()))
    taking, waiting = (spec.start_trigger for spec in dag.to_spec().tasks)
    assert taking is not None
    assert waiting is not None
    assert (taking.next_method, taking.stream) == (HANDLER_METHOD, StreamOptions("batch", 5, 1.0, poison="skip"))
    assert (waiting.next_method, waiting.stream) == ("done", StreamOptions("each", 1))


def test_a_task_may_have_start_arguments_and_not_start_from_them() -> None:
    with DAG("orders") as dag:
        Waiter(task_id="wait", start_from_trigger=False)
    assert dag.to_spec().tasks[0].start_trigger is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"trigger_kwargs": {"callback": {"then": print}}},
            r"start_trigger_args.trigger_kwargs\['callback'\]\['then'\] is a builtin_function",
        ),
        ({"next_kwargs": {"order": object()}}, r"start_trigger_args.next_kwargs\['order'\] is an object"),
        ({"next_method": "gone"}, "Waiter has no method 'gone'"),
        ({"next_kwargs": {"amount": 1}}, "Waiter.done cannot be called .* unexpected keyword argument 'amount'"),
        ({"trigger_cls": "Trigger"}, "'Trigger' is not of the form package.module.Class"),
        ({"trigger_cls": "__main__.Trigger"}, "is defined in a DAG file, which no runner imports"),
        ({"timeout": timedelta(0)}, "the start trigger's timeout must be more than 0"),
        ({"stream": "each"}, r"start_trigger_args: stream must be None, True, Each\(\), .*, not 'each'"),
        ({"ahead": 5}, "start_trigger_args: ahead and poison are options of a stream, and stream is None"),
        ({"next_method": HANDLER_METHOD}, "start_trigger_args needs next_method, or stream"),
        ({"next_method": HANDLER_METHOD, "stream": True}, "Waiter has no method 'handle_trigger_events'"),
        (
            {"stream": True, "trigger_kwargs": {"pages": [len]}},
            r"start_trigger_args.trigger_kwargs\['pages'\]\[0\] is a builtin_function",
        ),
    ],
)
def test_a_trigger_that_cannot_be_started_is_refused_with_the_path(arguments: dict[str, Any], problem: str) -> None:
    start = {"trigger_cls": "a.Trigger", "next_method": "done", **arguments}
    dag = DAG("orders")
    Waiter(task_id="wait", dag=dag, start_trigger_args=StartTriggerArgs(**start))
    with pytest.raises(DagMalformed, match=f"DAG 'orders', task 'wait': .*{problem}"):
        dag.to_spec()


def test_starting_from_a_trigger_needs_one() -> None:
    dag = DAG("orders")
    EmptyOperator(task_id="wait", dag=dag, start_from_trigger=True)
    with pytest.raises(DagMalformed, match="task 'wait': start_from_trigger needs start_trigger_args"):
        dag.to_spec()


# --- functions as tasks --------------------------------------------------------------------------


def test_decorated_functions_become_tasks_joined_by_what_they_pass() -> None:
    @task
    def extract() -> int:
        return 1

    @task(retries=2, task_id="loading")
    def load(value: Any, more: Any) -> None:
        """Load."""

    with DAG("orders") as dag:
        first = extract()
        load(first, more=[{"deep": extract()}]) >> EmptyOperator(task_id="end")
    assert arrows(dag) == {"extract>loading", "extract__1>loading", "loading>end"}
    assert dag.tasks["loading"].retries == 2
    assert extract.function() == 1


def test_a_decorated_function_can_be_given_other_options() -> None:
    @task(retries=2)
    def extract() -> None:
        """Extract."""

    with DAG("orders") as dag:
        extract.override(task_id="other", queue="heavy")()
    assert [(spec.task_id, spec.retries, spec.queue) for spec in dag.to_spec().tasks] == [("other", 2, "heavy")]


def test_a_decorated_function_is_called_in_a_dag() -> None:
    @task
    def extract() -> None:
        """Extract."""

    with pytest.raises(RuntimeError, match=r"extract is a task: call it .*, or call its \.function"):
        extract()


async def coroutine() -> None:
    """Not a task."""


@pytest.mark.parametrize(
    ("function", "problem"),
    [(None, "python_callable must be a function, not None"), (coroutine, "python_callable must not be async")],
)
def test_what_cannot_be_called_is_refused(function: Callable[..., Any], problem: str) -> None:
    with DAG("orders"), pytest.raises(DagMalformed, match=f"task 'call': {problem}"):
        PythonOperator(task_id="call", python_callable=function)


# --- the door ------------------------------------------------------------------------------------


def test_the_door_names_what_exists_and_nothing_else() -> None:
    assert [name for name in tasks.__all__ if not hasattr(tasks, name)] == []
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = tasks.Nothing


def test_a_file_without_sensors_is_parsed_without_event_loops_and_clients() -> None:
    code = (
        "import sys, headgate.tasks, headgate.tasks.parsing, headgate.tasks.execution\n"
        "print([name for name in ('trio', 'asyncio', 'httpx2', 'sqlalchemy') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WITHIN_S)
    assert told.stdout == "[]\n"
