"""What decides when tasks run, through real processes: retries, ends from triggers, rules, pools, runs and assets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.integration.station import Run, Station
from tests.waiting import wait_until

from headgate.protocol.values import decode_value

DAGS = """
from datetime import UTC, datetime, timedelta
from headgate.tasks import (
    DAG, Asset, Batch, Connection, Each, EmptyOperator, ExternalTaskSensor, Latest, StartTriggerArgs,
    TriggerDagRunOperator, Variable, task,
)
from users_tasks import Holds, Teller, Waits

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
QUICK = timedelta(seconds=0.05)

with DAG("tries"):
    @task(retries=2, retry_delay=timedelta(seconds=0.1), retry_exponential_backoff=True)
    def a(ti):
        if ti.try_number < 3:
            raise RuntimeError(f"not this time ({ti.try_number})")
        return ti.try_number
    a()

with DAG("ended_by_trigger"):
    @task(trigger_rule="all_done")
    def b(ti):
        return ti.xcom_pull("a", "from_trigger", default="nothing")
    Waits(task_id="a", retries=1, retry_delay=timedelta(0)) >> b()

class InTrigger(Teller):
    def execute(self, context):
        self.tell(context, "execute")

    def resumed(self, context, event, seen):
        self.tell(context, "resumed", event)
        return [*seen, event]

with DAG("in_trigger"):
    InTrigger(task_id="a", start_from_trigger=True, start_trigger_args=StartTriggerArgs(
        trigger_cls="users_tasks.Gate", trigger_kwargs={"folder": FOLDER, "task": "a", "file": "fire"},
        next_method="resumed", next_kwargs={"seen": ["nothing before"]}))

with DAG("of_a_set"):
    @task
    def pay(shop):
        return shop
    pay.expand(shop=list({f"shop {number}" for number in range(20)}))

with DAG("rules"):
    @task.branch
    def choose():
        return "left"
    @task
    def broken():
        raise RuntimeError("broken")
    left, right = EmptyOperator(task_id="left"), EmptyOperator(task_id="right")
    breaks = broken()
    choose() >> [left, right]
    for above, rules in (([left, right], ("all_success", "none_failed", "one_success")),
                         ([left, breaks], ("none_skipped", "one_failed", "all_done", "all_failed"))):
        for rule in rules:
            above >> EmptyOperator(task_id=rule, trigger_rule=rule)
    [left, breaks] >> EmptyOperator(task_id="below_a_failure")
    @task.short_circuit
    def cut():
        return False
    cut() >> EmptyOperator(task_id="cut_off") >> EmptyOperator(task_id="cut_off_too", trigger_rule="all_done")

with DAG("urgent"):
    for weight in (1, 5, 3, 9, 7):
        Holds(task_id=f"t{weight}", pool="single", priority_weight=weight)

with DAG("one_at_a_time", max_active_runs=1):
    Holds(task_id="a")

with DAG("caught_up", schedule="@daily", start_date=TODAY - timedelta(days=5), catchup=True, max_active_runs=2):
    @task
    def day(logical_date, data_interval_start, data_interval_end):
        return [logical_date, data_interval_start, data_interval_end]
    day()

with DAG("above"):
    TriggerDagRunOperator(task_id="start", trigger_dag_id="below", wait_for_completion=True, poke_interval=QUICK,
                          conf={"folder": FOLDER})

with DAG("below"):
    Holds(task_id="a")

with DAG("beside"):
    ExternalTaskSensor(task_id="sees", external_dag_id="below", run_id="awaited", external_task_id="a",
                       poke_interval=QUICK)

with DAG("reads"):
    @task
    def read():
        warehouse = Connection.get("warehouse")
        print(f"the password is {warehouse.password}, they say")
        return [Variable.get("limit"), Variable.get("nothing", default="else"), warehouse.host]
    read()

for name, schedule in {
    "on_each": Each(Asset("each://a")),
    "on_batch": Batch(Asset("batch://a"), count=2, seconds=1),
    "on_latest": Latest(Asset("latest://a")),
    "on_all": [Asset("all://a"), Asset("all://b")],
}.items():
    with DAG(name, schedule=schedule, max_active_runs=20):
        @task
        def seen(asset_events):
            return [[event.asset, event.payload] for event in asset_events]
        seen()
"""


@pytest.fixture
def scheduled(station: Station) -> Station:
    if not (station.dags / "scheduling.py").exists():
        station.store.tasks.set_pool("single", 1)
        shared = station.home / "shared"
        shared.mkdir()
        station.write("scheduling.py", DAGS.replace("FOLDER", repr(str(shared))))
    station.wait_dag("on_all")
    return station


def shared_of(station: Station, run: Run) -> Run:
    """The run, told and telling in the folder whose name stands in the DAG file."""
    return Run(station, run.id, run.dag, run.run_id, station.home / "shared")


def runs_of(station: Station, dag: str) -> list[dict[str, Any]]:
    of_dag = "SELECT r.* FROM dag_run r JOIN dag d ON d.id = r.dag_id WHERE d.name = :dag ORDER BY r.id"
    return station.query(of_dag, dag=dag)


def wait_ended_runs(station: Station, dag: str, count: int) -> list[dict[str, Any]]:
    """Wait until so many runs of a DAG have ended; return all of them."""
    wait_until(
        lambda: sum(row["ended_at"] is not None for row in runs_of(station, dag)) >= count,
        lambda: f"the end of {count} runs of {dag}: {runs_of(station, dag)}",
    )
    return runs_of(station, dag)


def seconds_between(earlier: dict[str, Any], later: dict[str, Any]) -> float:
    return (datetime.fromisoformat(later["timestamp"]) - datetime.fromisoformat(earlier["timestamp"])).total_seconds()


# --- tries ---------------------------------------------------------------------------------------


def test_values_of_a_set_have_another_order_in_each_process_and_pay_nobody_twice(scheduled: Station) -> None:
    run = scheduled.run("of_a_set")
    assert run.wait_end()["pay"] == "failed"
    of_run = "SELECT last_error FROM task_instance WHERE map_index >= 0 AND dag_run_id = :id"
    rows = scheduled.query(of_run, id=run.id)
    assert len(rows) == 20
    assert all("in the DAG file are not those that it was expanded over" in row["last_error"] for row in rows)


def test_a_task_that_fails_is_tried_again_after_a_delay_that_doubles(scheduled: Station) -> None:
    run = scheduled.run("tries")
    assert run.wait_end() == {"a": "success"}
    assert run.xcom("a") == 3
    for number, delay_s in ((1, 0.1), (2, 0.2)):
        failed = run.wait_logged("a", "failed", number)
        assert failed["state"] == "up_for_retry"
        assert f"not this time ({number})" in failed["error"]
        assert (
            seconds_between(failed, run.wait_logged("a", "", number + 1)) > delay_s - 0.05
        )  # it is logged after it is stored


@pytest.mark.parametrize("end", ["success", "skipped"])
def test_a_trigger_ends_its_task_with_xcoms_and_without_a_worker(scheduled: Station, end: str) -> None:
    run = scheduled.run("ended_by_trigger")
    run.wait_told("a waits")
    run.say("a.1", end)
    assert run.wait_end() == {"a": end, "b": "success"}
    assert run.xcom("a", "from_trigger") == run.xcom("b") == "a.1"
    assert run.journal()[:2] == ["a 1 execute", "a waits"]
    assert [record["method"] for record in run.logged("a", "begun")] == ["execute"]


def test_a_task_that_its_trigger_fails_is_tried_again(scheduled: Station) -> None:
    run = scheduled.run("ended_by_trigger")
    run.say("a.1", "failed")
    assert run.wait_end() == {"a": "failed", "b": "success"}
    assert [line for line in run.journal() if "execute" in line] == ["a 1 execute", "a 2 execute"]
    assert run.xcom("b") == "a.1", "those of the last try"


def test_a_task_that_starts_in_its_trigger_has_no_worker_before_it_fires(scheduled: Station) -> None:
    run = shared_of(scheduled, scheduled.run("in_trigger"))
    run.wait(a="deferred").wait_told("a waits")
    row = run.row("a")
    assert (row["try_number"], row["next_method"], row["triggerer_id"]) == (1, "resumed", None)
    assert row["started_at"] is not None
    assert run.logged("a", "begun") == []
    run.say("fire", "now")
    assert run.wait_end() == {"a": "success"}
    assert run.xcom("a") == ["nothing before", "now"]
    assert [record["method"] for record in run.logged("a", "begun")] == ["resumed"]
    assert not any("execute" in line for line in run.journal())


# --- rules, pools, runs --------------------------------------------------------------------------


def test_trigger_rules_branches_and_short_circuits(scheduled: Station) -> None:
    run = scheduled.run("rules")
    assert run.wait_end() == {
        "choose": "success",
        "left": "success",
        "right": "skipped",
        "all_success": "skipped",
        "none_failed": "success",
        "one_success": "success",
        "broken": "failed",
        "none_skipped": "success",
        "one_failed": "success",
        "all_done": "success",
        "all_failed": "skipped",
        "below_a_failure": "upstream_failed",
        "cut": "success",
        "cut_off": "skipped",
        "cut_off_too": "skipped",
    }
    assert wait_ended_runs(scheduled, "rules", 1)[0]["state"] == "failed"


def test_a_pool_gives_its_slots_by_priority(scheduled: Station) -> None:
    run = scheduled.run("urgent")
    for weight in (1, 3, 5, 7, 9):
        run.say(f"t{weight}.go")
    assert set(run.wait_end().values()) == {"success"}
    told = [f"t{weight} 1 {word}" for weight in (9, 7, 5, 3, 1) for word in ("execute", "ends")]
    assert run.journal() == told, "one at a time, the most urgent first"


def test_a_dag_has_no_more_runs_at_once_than_it_may(scheduled: Station) -> None:
    runs = [scheduled.run("one_at_a_time") for _ in range(3)]
    for number, run in enumerate(runs):
        run.wait(a="running")
        assert [later.state("a") for later in runs[number + 1 :]] == ["none"] * (2 - number)
        run.say("a.go")
    assert [run.wait_end() for run in runs] == [{"a": "success"}] * 3


def test_the_days_since_the_start_date_are_caught_up_with_each_once(scheduled: Station) -> None:
    rows = wait_ended_runs(scheduled, "caught_up", 5)
    days = [scheduled.store.tasks.pull_xcom(row["id"], "day", "return_value") for row in rows]
    intervals = [decode_value(day) for day in days if day is not None]
    first = intervals[0][0]
    expected = [first + timedelta(days=number) for number in range(len(intervals))]
    assert intervals == [[day, day, day + timedelta(days=1)] for day in expected]
    assert intervals[-1][2] <= datetime.now(UTC) < intervals[-1][2] + timedelta(days=1)
    assert {row["run_type"] for row in rows} == {"scheduled"}
    assert {row["state"] for row in rows} == {"success"}


# --- other DAGs ----------------------------------------------------------------------------------


def test_a_task_begins_a_run_of_another_dag_and_waits_for_it_without_a_worker(scheduled: Station) -> None:
    run = shared_of(scheduled, scheduled.run("above"))
    run.wait(start="deferred")
    begun = run.xcom("start", "trigger_run_id")
    (below,) = [row for row in runs_of(scheduled, "below") if row["run_id"] == begun]
    scheduled.wait_states(below["id"], a="running")
    run.say("a.go", "done")
    assert run.wait_end() == {"start": "success"}
    assert scheduled.wait_end(below["id"]) == {"a": "success"}
    assert run.xcom("start") == begun


def test_a_sensor_waits_for_a_task_of_another_dag_whose_run_is_yet_to_come(scheduled: Station) -> None:
    run = scheduled.run("beside").wait(sees="deferred")
    run.wait_logged("sees", "its trigger is started")
    awaited = scheduled.trigger("below", "awaited", {"folder": str(run.folder)})
    scheduled.wait_states(awaited, a="running")
    assert run.state("sees") == "deferred"
    run.say("a.go")
    assert run.wait_end() == {"sees": "success"}
    assert run.xcom("sees") == "awaited"


def test_tasks_read_variables_and_connections_whose_secrets_are_masked_in_logs(scheduled: Station) -> None:
    scheduled.store.tasks.variables.put("limit", b"12")
    scheduled.store.tasks.connections.put("warehouse", b"postgres://me:hunter2hunter2@db.example/x")
    run = scheduled.run("reads")
    assert run.wait_end() == {"read": "success"}
    assert run.xcom("read") == ["12", "else", "db.example"]
    assert "the password is ***, they say" in str(run.wait_logged("read", "the password is")["event"])
    assert b"hunter2" not in b"".join(path.read_bytes() for path in (scheduled.home / "logs").rglob("*.jsonl"))


# --- assets --------------------------------------------------------------------------------------


def watch(station: Station, asset: str, events: int) -> None:
    """Have a watcher fire so many events of an asset at once: 0, 1, ..."""
    station.store.add_watcher(f"of {asset}", "users_triggers.Counter", {"count": events}, asset=asset)


def seen(station: Station, rows: list[dict[str, Any]]) -> list[Any]:
    found = [station.store.tasks.pull_xcom(row["id"], "seen", "return_value") for row in rows]
    return [None if value is None else decode_value(value) for value in found]


def test_each_event_of_an_asset_has_a_run_of_its_own(scheduled: Station) -> None:
    watch(scheduled, "each://a", 5)
    rows = wait_ended_runs(scheduled, "on_each", 5)
    assert seen(scheduled, rows) == [[["each://a", number]] for number in range(5)]


def test_a_batch_of_events_is_full_or_has_waited_long_enough(scheduled: Station) -> None:
    watch(scheduled, "batch://a", 5)
    rows = wait_ended_runs(scheduled, "on_batch", 3)
    assert seen(scheduled, rows) == [[["batch://a", n] for n in batch] for batch in ([0, 1], [2, 3], [4])]


def test_the_latest_event_supersedes_those_that_wait(scheduled: Station) -> None:
    watch(scheduled, "latest://a", 50)

    def of_runs() -> list[dict[str, Any]]:
        return scheduled.query(
            "SELECT e.* FROM dag_run_event e JOIN dag_run r ON r.id = e.dag_run_id JOIN dag d ON d.id = r.dag_id "
            "WHERE d.name = 'on_latest' ORDER BY e.trigger_event_id"
        )

    wait_until(lambda: len(of_runs()) == 50, lambda: f"all events to have a run: {of_runs()}")
    runs = len({row["dag_run_id"] for row in of_runs()})
    rows = wait_ended_runs(scheduled, "on_latest", runs)
    assert sum(not row["is_superseded"] for row in of_runs()) == runs, "one event for each run"
    assert seen(scheduled, rows)[-1] == [["latest://a", 49]]
    assert runs < 50


def test_a_run_on_several_assets_waits_for_all_of_them(scheduled: Station) -> None:
    watch(scheduled, "all://a", 2)
    wait_until(lambda: len(list(scheduled.store.inspect.events(watcher="of all://a"))) == 2, "the events of the first")
    assert runs_of(scheduled, "on_all") == []
    watch(scheduled, "all://b", 1)
    (row,) = wait_ended_runs(scheduled, "on_all", 1)
    assert seen(scheduled, [row]) == [[["all://a", 0], ["all://a", 1], ["all://b", 0]]]
