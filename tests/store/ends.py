"""The ends of steps, one at a time, where a supervisor stores all that have come in meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSkipped, StepSucceeded, XCom
from headgate.store.ids import Epoch, TaskInstanceId
from headgate.store.task_verbs import TaskVerbs
from headgate.store.tasks.deferral import Deferral
from headgate.store.tasks.outcomes import NotBegun, StepEnd, WorkerLost


def succeed(
    verbs: TaskVerbs,
    epoch: Epoch,
    instance: TaskInstanceId,
    token: str,
    *,
    end: Literal["succeeded", "skipped"] = "succeeded",
    xcoms: Mapping[str, bytes] | None = None,
    skips: Collection[str] = (),
) -> bool:
    """End one running task well; return whether the token was the task's."""
    left = _xcoms(xcoms)
    outcome = StepSucceeded(left, tuple(skips)) if end == "succeeded" else StepSkipped(xcoms=left)
    return _store(verbs, epoch, instance, token, outcome) is not None


def fail(
    verbs: TaskVerbs,
    epoch: Epoch,
    instance: TaskInstanceId,
    token: str,
    error: str,
    *,
    may_retry: bool = True,
    xcoms: Mapping[str, bytes] | None = None,
) -> TaskState | None:
    """Fail the try of one running task; return its new state, None if the token was not the task's."""
    return _store(verbs, epoch, instance, token, StepFailed(error, may_retry=may_retry, xcoms=_xcoms(xcoms)))


def defer(
    verbs: TaskVerbs,
    epoch: Epoch,
    instance: TaskInstanceId,
    token: str,
    wait: Deferral,
    *,
    xcoms: Mapping[str, bytes] | None = None,
) -> bool:
    """Defer one running task; return whether the token was the task's."""
    fields = msgspec.structs.asdict(wait)
    assert fields.pop("signal") is None, "a step does not defer to a signal"
    return _store(verbs, epoch, instance, token, StepDeferred(**fields, xcoms=_xcoms(xcoms))) is not None


def lose_worker(verbs: TaskVerbs, epoch: Epoch, instance: TaskInstanceId, token: str, reason: str) -> TaskState | None:
    """Say that the worker of a task is gone; return the task's new state, None if it is not this worker's."""
    return _store(verbs, epoch, instance, token, WorkerLost(reason))


def give_back(
    verbs: TaskVerbs, epoch: Epoch, instance: TaskInstanceId, token: str, reason: str = ""
) -> TaskState | None:
    """Say that no worker has begun a step; return the task's new state, None if it is not this step's."""
    return _store(verbs, epoch, instance, token, NotBegun(reason))


def _store(
    verbs: TaskVerbs, epoch: Epoch, instance: TaskInstanceId, token: str, outcome: StepOutcome | WorkerLost | NotBegun
) -> TaskState | None:
    (state,) = verbs.store_ends(epoch, [StepEnd(instance, token, outcome)])
    return state


def _xcoms(left: Mapping[str, bytes] | None) -> tuple[XCom, ...]:
    return tuple(XCom(key, value) for key, value in (left or {}).items())
