"""The step of a task: as its worker gets it, and what the log of the task says of its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, assert_never

import msgspec

from headgate.protocol import tracing
from headgate.protocol.messages.steps import (
    StepDeferred,
    StepFailed,
    StepHandled,
    StepNotBegun,
    StepOutcome,
    StepSkipped,
    StepSucceeded,
)
from headgate.protocol.messages.worker import AssetEvent, Step, StepEnded
from headgate.scheduling.states import FAIL_METHOD
from headgate.store.facts.spans import StepSpan
from headgate.store.signals import sending
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import NotBegun, StepEnd, WorkerLost
from headgate.supervisor.executors.base import StepLost, StepReturned

TAKEN_AWAY = "the task was ended by a user or a signal"
FAIL_STEP_S = 30.0  # at least, for a step that is resumed to fail: it has to load its file


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
        given_digest=task.given_digest,
        is_of_signals=task.is_of_signals,
        own=task.own,
        traceparent=_traceparent(task),
    )


def _traceparent(task: TaskToRun) -> str:
    trace = tracing.trace_of_run(task.dag, task.run_id, task.run_created_at)
    return tracing.traceparent(trace, tracing.span_of_try(trace, task.task_id, task.map_index, task.try_number))


def time_of(task: TaskToRun) -> float:
    """Return how many seconds a step may take."""
    if task.remaining_s is None:
        return math.inf
    # A step may be resumed to fail because its time is over. It logs why, so it needs time to run.
    return max(task.remaining_s, FAIL_STEP_S if task.next_method == FAIL_METHOD else 0.0)


def kind_of(outcome: StepOutcome | WorkerLost | NotBegun) -> str:
    """Return the label of an outcome in `headgate.supervisor.metrics.catalogue.STEPS_ENDED`."""
    match outcome:
        case WorkerLost():
            return "stopped" if is_taken_away(outcome) else "lost"
        case NotBegun():
            return "returned"
        case _:
            return str(outcome.__struct_config__.tag)


def is_taken_away(outcome: StepOutcome | WorkerLost | NotBegun) -> bool:
    """Whether a step has ended because its worker was, for a user or a signal: no worker was lost."""
    return isinstance(outcome, WorkerLost) and outcome.reason == TAKEN_AWAY


def words_of(
    outcome: StepOutcome | WorkerLost | NotBegun, *, is_moved: bool = False
) -> tuple[str, Mapping[str, object]]:
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
        case WorkerLost() if is_moved:
            return "it begins again on another worker, in the same try", {"reason": outcome.reason}
        case WorkerLost():
            return "the worker was lost", {"error": outcome.reason}
        case NotBegun():
            return "it could not begin, and is tried again, in the same try", {"reason": outcome.reason}
        case _:
            assert_never(outcome)


class End(NamedTuple):
    """The end of a step, to be stored."""

    task: TaskToRun
    outcome: StepOutcome | WorkerLost | NotBegun
    map_name: str | None = None
    took_s: float | None = None


def end_of(task: TaskToRun, event: StepEnded | StepLost | StepReturned) -> End:
    """Return the end of a step as an executor reports it."""
    match event:
        case StepEnded():
            if isinstance(event.outcome, StepNotBegun):
                return End(task, NotBegun(event.outcome.reason))
            return End(task, event.outcome, event.map_name, event.took_s)
        case StepReturned():
            return End(task, NotBegun())
        case _:
            return End(task, WorkerLost(event.reason, event.is_blameless))


def step_end_of(end: End) -> StepEnd:
    """Return the end of a step as it is stored. Raises `ValueRefused` for signals that a step may not send."""
    said = () if isinstance(end.outcome, WorkerLost | NotBegun | StepFailed) else end.outcome.signals
    signals = tuple(sending.news_of(said, sender_of(end.task), end.task.dag_run_id)) if said else ()
    span = StepSpan(end.task.try_number, end.task.ready_at, end.took_s)
    return StepEnd(end.task.id, end.task.token, end.outcome, _events_of(end.task), end.map_name, signals, span)


def sender_of(task: TaskToRun) -> str:
    return f"task {task.name.task}, try {task.try_number}"


def handled_by(outcome: StepOutcome | WorkerLost | NotBegun) -> int:
    """Return how many events of a stream a step has handled."""
    return 0 if isinstance(outcome, WorkerLost | NotBegun) or outcome.handled is None else outcome.handled.count


def without_events(task: TaskToRun) -> TaskToRun:
    """Return the task of a step that a shutdown has ended: none of the events that it had is poison for that."""
    stream = None if task.stream is None else msgspec.structs.replace(task.stream, events=())
    return msgspec.structs.replace(task, stream=stream)


def _events_of(task: TaskToRun) -> tuple[int, ...]:
    return () if task.stream is None else tuple(event.id for event in task.stream.events)
