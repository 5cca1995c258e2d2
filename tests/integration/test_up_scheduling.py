"""What decides when tasks run, through real processes: retries, ends from triggers, rules, pools, runs and assets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pair import wait_until
from station import Run, Station

from headgate.protocol.values import encode_value
from headgate.store.tables import DEFAULT_POOL

DAGS = """
from datetime import UTC, datetime, timedelta
from headgate.tasks import (
    DAG, Asset, EmptyOperator, ExternalTaskSensor, StartTriggerArgs, TriggerDagRunOperator, Variable, Connection, task
)
from users_tasks import Gate, Holds, Teller, Waits

with DAG("tries"):
    @task(retries=2, retry_delay=timedelta(seconds=0.1), retry_exponential_backoff=True)
    def a(ti, params):
        from users_tasks import note
        note(params["folder"], "a", ti.try_number)
        if ti.try_number < 3:
            raise RuntimeError(f"not this time ({ti.try_number})")
        return ti.try_number
    a()

with DAG("ended_by_trigger"):
    first = Waits(task_id="a", retries=1, retry_delay=timedelta(0))
    @task(trigger_rule="all_done")
    def b(ti):
        return ti.xcom_pull("a", "from_trigger", default="nothing")
    first >> b()

class InTrigger(Teller):
    def resumed(self, context, event, seen):
        self.tell(context, "resumed", event)
        return event
    def execute(self, context):
        self.tell(context, "execute")

with DAG("in_trigger"):
    InTrigger(task_id="a", start_from_trigger=True, start_trigger_args=StartTriggerArgs(
        trigger_cls="users_tasks.Gate",
        trigger_kwargs={"folder": FOLDER, "task": "a", "file": "a.1"},
        next_method="resumed", next_kwargs={"seen": []}))

with DAG("rules"):
    @task.branch
    def choose():
        return "left"
    left, right = EmptyOperator(task_id="left"), EmptyOperator(task_id="right")
    @task
    def breaks():
        raise RuntimeError("broken")
    broken = breaks()
    choose() >> [left, right]
    [left, right] >> EmptyOperator(task_id="all_success")
    [left, right] >> EmptyOperator(task_id="none_failed", trigger_rule="none_failed")
    [left, right] >> EmptyOperator(task_id="one_success", trigger_rule="one_success")
    [left, broken] >> EmptyOperator(task_id="upstream")
    [left, broken] >> EmptyOperator(task_id="one_failed", trigger_rule="one_failed")
    [left, broken] >> EmptyOperator(task_id="all_done", trigger_rule="all_done")
    [left, broken] >> EmptyOperator(task_id="all_failed", trigger_rule="all_failed")

with DAG("urgent"):
    for number, weight in enumerate((1, 5, 3, 9, 7)):
        Holds(task_id=f"t{weight}", pool="single", priority_weight=weight)

with DAG("one_at_a_time", max_active_runs=1):
    Holds(task_id="a")

now = datetime.now(UTC)
with DAG("caught_up", schedule="@daily", start_date=datetime(2020, 1, 1, tzinfo=UTC), catchup=True, max_active_runs=3,
         is_paused_upon_creation=True):
    @task
    def day(logical_date, data_interval_start, data_interval_end):
        return [logical_date, data_interval_start, data_interval_end]
    day()

with DAG("above"):
    TriggerDagRunOperator(task_id="start", trigger_dag_id="below", wait_for_completion=True,
                          conf={"folder": FOLDER}, poke_interval=timedelta(seconds=0.1))

with DAG("below"):
    Holds(task_id="a")

with DAG("beside"):
    @task
    def read(params):
        return [Variable.get("limit"), Connection.get("warehouse").host]
    read()
"""
