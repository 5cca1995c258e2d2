"""The states of a task, and every transition between them, as one table.

The usual ones::

                  ┌─── resumed by its event, its trigger's failure, or a timeout ───┐
                  ▼                                                                 │
    none ──▶ scheduled ──▶ running ──defers──▶ deferred ──────────────────────────▶─┘
                  ▲           │
                  │           ├──▶ success | failed | skipped
                  └─ up_for_retry ◀┘

A user may clear a task in any state. A running task that is cleared is ``restarting`` until its old worker is gone, so
that two workers never run it at once. The five states in `TERMINAL` are left only by clearing; and a
user may have a task that failed count as succeeded.

The store takes the old states of its UPDATEs, and the new one, from this table. A transition that is not in the table
raises `IllegalTransition`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from headgate.protocol.messages.dags import TaskState

TriggerId = Literal["set", "clear", "-"]
NextMethod = Literal["set", "__fail__", "clear", "-"]
By = Literal["scheduler", "worker", "triggerer", "supervisor", "user"]

FAIL_METHOD: Final = "__fail__"  # the next_method of a task that is resumed to fail; never the name of a method

_S = TaskState
TERMINAL: Final = frozenset({_S.SUCCESS, _S.FAILED, _S.SKIPPED, _S.UPSTREAM_FAILED, _S.REMOVED})
FAILED: Final = frozenset({_S.FAILED, _S.UPSTREAM_FAILED})
UNFINISHED: Final = frozenset(_S) - TERMINAL
OCCUPYING: Final = frozenset({_S.RUNNING, _S.RESTARTING})  # holds slots of its pool, and has an owner
_NOT_WAITING = UNFINISHED - {_S.DEFERRED}
_NOT_BEGUN = frozenset({_S.NONE, _S.SCHEDULED})
_BEFORE_A_WORKER = frozenset({_S.NONE, _S.SCHEDULED, _S.UP_FOR_RETRY})


class IllegalTransition(Exception):
    """The table has no transition for this event in this state. Nothing was changed."""

    def __init__(self, event: str, state: TaskState) -> None:
        super().__init__(f"a task that is {state.value} cannot have {event!r} happen to it")
        self.event = event
        self.state = state


class Transition(msgspec.Struct, frozen=True):
    """One row of the table. ``trigger_id`` and ``next_method`` are the changes of these columns; ``-``: unchanged.

    ``by`` is the process that causes the transition, ``action`` its other effects, in the same transaction unless it
    says otherwise.
    """

    event: str
    from_: frozenset[TaskState]
    to: TaskState
    trigger_id: TriggerId
    next_method: NextMethod
    by: By
    action: str


def _row(
    event: str,
    from_: TaskState | frozenset[TaskState],
    to: TaskState,
    trigger_id: TriggerId,
    next_method: NextMethod,
    by: By,
    action: str,
) -> Transition:
    sources = from_ if isinstance(from_, frozenset) else frozenset({from_})
    return Transition(event, sources, to, trigger_id, next_method, by, action)


TRANSITIONS: Final[tuple[Transition, ...]] = (
    # --- before a worker -------------------------------------------------------------------------
    _row("scheduled", _S.NONE, _S.SCHEDULED, "-", "-", "scheduler", "Begin a try: its trigger rule holds"),
    _row("upstream_failed", _S.NONE, _S.UPSTREAM_FAILED, "-", "-", "scheduler", "Its trigger rule can no longer hold"),
    _row("upstream_skipped", _S.NONE, _S.SKIPPED, "-", "-", "scheduler", "Its trigger rule skips it"),
    _row("expanded", _S.NONE, _S.SUCCESS, "-", "-", "scheduler", "A mapped task: all instances are made"),
    _row("expanded_to_nothing", _S.NONE, _S.SKIPPED, "-", "-", "scheduler", "A mapped task: there are no values"),
    _row("unexpandable", _S.NONE, _S.FAILED, "-", "-", "scheduler", "A mapped task: its values cannot be counted"),
    _row("map_skipped", _NOT_BEGUN, _S.SKIPPED, "-", "-", "scheduler", "An instance: its task was skipped"),
    _row("map_stopped", _NOT_BEGUN, _S.UPSTREAM_FAILED, "-", "-", "scheduler", "An instance: others have failed"),
    _row("picked_up", _S.SCHEDULED, _S.RUNNING, "-", "-", "worker", "Execute, or the callback method; new token"),
    _row("started_in_trigger", _S.SCHEDULED, _S.DEFERRED, "set", "set", "scheduler", "Create trigger; no worker"),
    # --- on a worker -----------------------------------------------------------------------------
    _row("deferred", _S.RUNNING, _S.DEFERRED, "set", "set", "worker", "Create trigger, free the worker; new token"),
    _row("succeeded", _S.RUNNING, _S.SUCCESS, "-", "-", "worker", "Task done; store its XComs"),
    _row("skipped", _S.RUNNING, _S.SKIPPED, "-", "-", "worker", "Task done"),
    _row("failed", _S.RUNNING, _S.FAILED, "-", "-", "worker", "Task failed, and no try is left"),
    _row("failed_to_retry", _S.RUNNING, _S.UP_FOR_RETRY, "-", "clear", "worker", "Wait for the retry delay"),
    _row("stream_waits", _S.RUNNING, _S.DEFERRED, "set", "-", "worker", "Wait for the next events; new token"),
    _row("stream_goes_on", _S.RUNNING, _S.SCHEDULED, "-", "-", "worker", "More events wait, or the stream is over"),
    _row("stream_failed", _S.RUNNING, _S.SCHEDULED, "-", "__fail__", "worker", "All are handled; its trigger failed"),
    _row("returned", _S.RUNNING, _S.SCHEDULED, "-", "-", "supervisor", "Not begun by its worker: its try goes on"),
    _row("retry_due", _S.UP_FOR_RETRY, _S.SCHEDULED, "-", "-", "scheduler", "Begin the next try, from execute"),
    # --- while it waits for its trigger ----------------------------------------------------------
    _row("event", _S.DEFERRED, _S.SCHEDULED, "clear", "set", "triggerer", "Resume via callback, with the event"),
    _row("stream_event", _S.DEFERRED, _S.SCHEDULED, "clear", "-", "triggerer", "Handle events; the trigger runs on"),
    _row("trigger_failed", _S.DEFERRED, _S.SCHEDULED, "clear", "__fail__", "triggerer", "Resume to fail, with error"),
    _row("timed_out", _S.DEFERRED, _S.SCHEDULED, "clear", "__fail__", "supervisor", "Resume to fail; cancel trigger"),
    _row("ended_success", _S.DEFERRED, _S.SUCCESS, "clear", "-", "triggerer", "TaskSuccessEvent; store its XComs"),
    _row("stream_ended", _S.DEFERRED, _S.SUCCESS, "clear", "-", "triggerer", "All its events are elements now"),
    _row("ended_skipped", _S.DEFERRED, _S.SKIPPED, "clear", "-", "triggerer", "TaskSkippedEvent; store its XComs"),
    _row("ended_failed", _S.DEFERRED, _S.FAILED, "clear", "-", "triggerer", "TaskFailedEvent, and no try is left"),
    _row("ended_to_retry", _S.DEFERRED, _S.UP_FOR_RETRY, "clear", "clear", "triggerer", "TaskFailedEvent; retry delay"),
    # --- a worker or its supervisor has died -----------------------------------------------------
    _row("worker_lost", _S.RUNNING, _S.FAILED, "-", "-", "supervisor", "The try failed; no try is left"),
    _row("worker_lost_to_retry", _S.RUNNING, _S.UP_FOR_RETRY, "-", "clear", "supervisor", "The try failed"),
    _row("adopted", _S.RUNNING, _S.FAILED, "-", "-", "supervisor", "Its supervisor is gone, and no try is left"),
    _row("adopted_to_retry", _S.RUNNING, _S.UP_FOR_RETRY, "-", "clear", "supervisor", "The supervisor is gone"),
    _row("moved", _S.RUNNING, _S.SCHEDULED, "-", "clear", "supervisor", "An endless task: the same try begins anew"),
    _row("adopted", _S.RESTARTING, _S.NONE, "-", "-", "supervisor", "Its supervisor is gone, and so is the old worker"),
    # --- actions of users ------------------------------------------------------------------------
    _row("cleared", _S.DEFERRED, _S.NONE, "clear", "clear", "user", "Cleanup trigger, with on_kill()"),
    _row("cleared", _S.RUNNING, _S.RESTARTING, "-", "clear", "user", "The worker is ended, with on_kill()"),
    _row("cleared", _BEFORE_A_WORKER | TERMINAL, _S.NONE, "-", "clear", "user", "Forget its XComs and its end"),
    _row("restarted", _S.RESTARTING, _S.NONE, "-", "-", "supervisor", "The old worker is gone"),
    _row("marked_success", _S.DEFERRED, _S.SUCCESS, "clear", "clear", "user", "Cleanup trigger, with on_kill()"),
    _row("marked_success", _NOT_WAITING, _S.SUCCESS, "-", "clear", "user", "End a worker, with on_kill()"),
    _row("overruled", FAILED, _S.SUCCESS, "-", "clear", "user", "What did not begin because of it waits again"),
    _row("marked_failed", _S.DEFERRED, _S.FAILED, "clear", "clear", "user", "Cleanup trigger, with on_kill()"),
    _row("marked_failed", _NOT_WAITING, _S.FAILED, "-", "clear", "user", "End a worker; no retry"),
    _row("marked_skipped", _S.DEFERRED, _S.SKIPPED, "clear", "clear", "user", "By a signal, too; with on_kill()"),
    _row("marked_skipped", _NOT_WAITING, _S.SKIPPED, "-", "clear", "user", "By a signal, too; end a worker"),
    _row("removed", _S.DEFERRED, _S.REMOVED, "clear", "clear", "scheduler", "Cleanup trigger: no longer in its DAG"),
    _row("removed", _BEFORE_A_WORKER, _S.REMOVED, "-", "clear", "scheduler", "Its DAG no longer has it"),
)

_BY_EVENT: Final = {(row.event, state): row for row in TRANSITIONS for state in row.from_}


def move(event: str, state: TaskState) -> Transition:
    """Return the row for ``event`` in ``state``. Raises `IllegalTransition`, and `KeyError` for an unknown event."""
    row = _BY_EVENT.get((event, state))
    if row is None:
        of(event)
        raise IllegalTransition(event, state)
    return row


def of(event: str) -> tuple[Transition, ...]:
    """Return the rows of an event. Raises `KeyError` for an unknown one."""
    rows = tuple(row for row in TRANSITIONS if row.event == event)
    if not rows:
        raise KeyError(event)
    return rows
