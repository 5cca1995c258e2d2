"""What the end of a trigger does to the task that waits for it: it is resumed to fail, or ended as its trigger says."""

from __future__ import annotations

from typing import Final, Literal

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import ERROR_CHARS_MAX, EventKind
from headgate.protocol.values import encode_value
from headgate.store.db.transaction import Tx
from headgate.store.errors import ValueRefused
from headgate.store.tasks import task_rows, values
from headgate.store.tasks.task_rows import LockedTask
from headgate.store.triggers.dead_letters import storable_text

FailReason = Literal["trigger_failure", "trigger_timeout", "execution_timeout"]

# The events of `headgate.scheduling.states` by which the event of a trigger ends a task that waits, or that has just
# handled all events before it: by the kind of the event, and for a failure that is followed by another try.
_ENDS: Final[dict[TaskState, dict[str, str]]] = {
    TaskState.DEFERRED: {
        "success": "ended_success",
        "skipped": "ended_skipped",
        "failed": "ended_failed",
        "to_retry": "ended_to_retry",
    },
    TaskState.RUNNING: {
        "success": "succeeded",
        "skipped": "skipped",
        "failed": "failed",
        "to_retry": "failed_to_retry",
    },
}


def end_task(tx: Tx, task: LockedTask, kind: EventKind, payload: bytes) -> TaskState:
    """End a locked task as an event of its trigger says, with the XComs in its payload; return its new state."""
    ends = _ENDS[task.state]
    try:
        values.store_xcoms(tx, values.xcom_rows(tx, task.id, values.xcoms_of(payload)))
    except ValueRefused as error:
        # The event is stored, but the task cannot end as it says, because other tasks would miss these XComs.
        state = task_rows.fail(tx, task, ends["failed"], ends["to_retry"], str(error))
    else:
        if kind == "failed":
            reason = "its trigger ended it with a TaskFailedEvent"
            state = task_rows.fail(tx, task, ends["failed"], ends["to_retry"], reason)
        else:
            state = task_rows.apply(tx, task, ends[kind], last_error=None)
    if task.trigger_id is not None:
        task_rows.finish_trigger(tx, task.trigger_id)
    marks.reach("resume.by_end")
    return state


def resume_to_fail(
    tx: Tx,
    task: LockedTask,
    event: str,
    reason: FailReason,
    error: str,
    traceback: str = "",
    *,
    waited_s: float | None = None,
) -> TaskState:
    """Resume a locked task in ``__fail__``: the worker raises the error in its next_kwargs. Return its new state."""
    error = storable_text(error, ERROR_CHARS_MAX)
    failure: dict[str, str | float] = {"error": error, "reason": reason}
    failure["traceback"] = storable_text(traceback, ERROR_CHARS_MAX)
    if waited_s is not None:
        failure["waited_s"] = round(waited_s, 3)
    next_kwargs = tx.encrypt(encode_value(failure, where="next_kwargs"))
    state = task_rows.apply(tx, task, event, next_kwargs=next_kwargs, last_error=error)
    if task.trigger_id is not None:
        task_rows.finish_trigger(tx, task.trigger_id)
    marks.reach("resume.to_fail")
    return state
