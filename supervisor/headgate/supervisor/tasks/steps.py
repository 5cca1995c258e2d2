"""The step of a task: as its worker gets it, and what the log of the task says of its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from headgate.protocol.messages.steps import (
    StepDeferred,
    StepFailed,
    StepHandled,
    StepOutcome,
    StepSkipped,
    StepSucceeded,
)
from headgate.protocol.messages.worker import AssetEvent, Step
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import NotBegun, WorkerLost


def step_of(task: TaskToRun, ends_at_s: float | None = None) -> Step:
    """Return the step of a task as it is sent to a worker; ``ends_at_s`` is the end of its time, if it has one."""
    interval = task.data_interval
    return Step(
        token=task.token,
        task_instance_id=task.id,
        file=task.file,
        dag_id=task.dag,
        run_id=task.run_id,
        task_id=task.task_id,
        try_number=task.try_number,
        next_method=task.next_method,
        next_kwargs=task.next_kwargs,
        event=task.event,
        params=task.conf,
        logical_date_s=None if task.logical_date is None else task.logical_date.timestamp(),
        data_interval_s=None if interval is None else (interval[0].timestamp(), interval[1].timestamp()),
        asset_events=tuple(
            AssetEvent(event.asset, event.payload, event.stored_at.timestamp()) for event in task.asset_events
        ),
        ends_at_s=ends_at_s,
        stream=task.stream,
        map_index=task.map_index,
        emitted=task.emitted,
        map_length=task.map_length,
    )


def words_of(outcome: StepOutcome | WorkerLost | NotBegun) -> tuple[str, Mapping[str, object]]:
    """Return what the log of a task says of the end of a step, and the fields beside it."""
    match outcome:
        case StepSucceeded():
            return "succeeded", {}
        case StepSkipped():
            return "skipped", {"reason": outcome.reason}
        case StepFailed():
            return "failed", {"error": outcome.error, "traceback": outcome.traceback}
        case StepDeferred():
            return "deferred", {"trigger": outcome.classpath, "goes_on_in": outcome.next_method}
        case StepHandled():
            return "handled", {"events": outcome.handled.count}
        case WorkerLost():
            return "the worker was lost", {"error": outcome.reason}
        case NotBegun():
            return "not begun", {}
        case _:
            assert_never(outcome)
