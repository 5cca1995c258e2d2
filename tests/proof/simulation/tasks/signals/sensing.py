"""The sensor of a task that waits for a signal: the real one, with what a step of the simulation is asked for."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tests.proof.simulation.tasks.signals.plans import Sensor

from headgate.tasks import DAG, SignalSensor

if TYPE_CHECKING:
    from tests.proof.simulation.tasks.scenario import Task


class SimulatedSensor(SignalSensor):
    """A task that is a sensor. ``name`` is that of the task in its run."""

    has_ended = takes_no_more = False
    reported = 0

    def __init__(self, plan: Task, sensor: Sensor, name: str = "", dag: DAG | None = None) -> None:
        options: dict[str, Any] = {"trigger_rule": plan.rule}
        if sensor.value is not None:
            options["value"] = json.loads(sensor.value)
        limit = plan.execution_timeout_s
        super().__init__(
            task_id=plan.name,
            dag=dag,
            key=sensor.key,
            since=sensor.since,
            timeout=timedelta(seconds=sensor.timeout_s),
            soft_fail=sensor.soft_fail,
            retries=plan.retries,
            retry_delay=timedelta(seconds=plan.retry_delay_s),
            execution_timeout=None if limit is None else timedelta(seconds=limit),
            pool=plan.pool,
            pool_slots=plan.pool_slots,
            priority_weight=plan.priority,
            **options,
        )
        self.plan = plan
        self.name = name
        self.leg = 0
        self.emitted = 0
