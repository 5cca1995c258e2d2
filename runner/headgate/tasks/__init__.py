"""The API of DAG authors: DAGs, operators, sensors, and deferral."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headgate.tasks.context import Context, TaskInstance
from headgate.tasks.decorators import task
from headgate.tasks.errors import (
    SensorTimeout,
    TaskDeferralError,
    TaskDeferred,
    TaskFailed,
    TaskSkipped,
    TriggerTimeout,
    XComMissing,
)
from headgate.tasks.graph import DAG, chain, dag
from headgate.tasks.groups.groups import TaskGroup, task_group
from headgate.tasks.groups.loops import Loop
from headgate.tasks.maps.worklists import worklist
from headgate.tasks.operator import BaseOperator, XComArg
from headgate.tasks.operators import (
    BranchPythonOperator,
    EmptyOperator,
    PythonOperator,
    ShortCircuitOperator,
    TriggerOperator,
)
from headgate.tasks.options import TaskOptions
from headgate.tasks.schedule import Asset, Batch, Each, Latest
from headgate.triggers.airflow_names import IMPORTS
from headgate.triggers.base import StartTriggerArgs
from headgate.triggers.named_values import Connection, ConnectionMissing, Variable, VariableMissing

if TYPE_CHECKING:
    from headgate.tasks.bash import BashOperator
    from headgate.tasks.external import ExternalFailed, ExternalTaskSensor, TriggerDagRunOperator
    from headgate.tasks.http import HttpSensor
    from headgate.tasks.sensors import (
        BaseSensorOperator,
        DateTimeSensor,
        FileSensor,
        PokeReturnValue,
        SignalSensor,
        TimeSensor,
        TriggerSensor,
    )

# Imported lazily: a file without sensors is parsed without importing an event loop and an HTTP client.
_HOMES = {
    "BaseSensorOperator": "sensors",
    "BashOperator": "bash",
    "DateTimeSensor": "sensors",
    "ExternalFailed": "external",
    "ExternalTaskSensor": "external",
    "FileSensor": "sensors",
    "HttpSensor": "http",
    "PokeReturnValue": "sensors",
    "SignalSensor": "sensors",
    "TimeSensor": "sensors",
    "TriggerDagRunOperator": "external",
    "TriggerSensor": "sensors",
}

__all__ = [
    "DAG",
    "Asset",
    "BaseOperator",
    "BaseSensorOperator",
    "BashOperator",
    "Batch",
    "BranchPythonOperator",
    "Connection",
    "ConnectionMissing",
    "Context",
    "DateTimeSensor",
    "Each",
    "EmptyOperator",
    "ExternalFailed",
    "ExternalTaskSensor",
    "FileSensor",
    "HttpSensor",
    "Latest",
    "Loop",
    "PokeReturnValue",
    "PythonOperator",
    "SensorTimeout",
    "ShortCircuitOperator",
    "SignalSensor",
    "StartTriggerArgs",
    "TaskDeferralError",
    "TaskDeferred",
    "TaskFailed",
    "TaskGroup",
    "TaskInstance",
    "TaskOptions",
    "TaskSkipped",
    "TimeSensor",
    "TriggerDagRunOperator",
    "TriggerOperator",
    "TriggerSensor",
    "TriggerTimeout",
    "Variable",
    "VariableMissing",
    "XComArg",
    "XComMissing",
    "chain",
    "dag",
    "task",
    "task_group",
    "worklist",
]


def __getattr__(name: str) -> Any:
    """Import a lazy name. Raises AttributeError, and for a name of Airflow's ImportError, whose text Python shows."""
    if name in IMPORTS:
        raise ImportError(f"{__name__} has no {name}: {IMPORTS[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
