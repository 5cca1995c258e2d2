"""When the steps of tasks were ready, and when they ran: one row for each that has ended, written with its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, Literal

import msgspec
from sqlalchemy import bindparam, delete, select

from headgate.protocol.messages.dags import TaskState
from headgate.store.db.bulk import Kind, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import Tx
from headgate.store.ids import TaskInstanceId
from headgate.store.tables import task_span

StepEndName = Literal["succeeded", "skipped", "failed", "deferred", "handled", "lost", "stopped"]
# As a row has it, of a task that had no tries left: only the others wait for a retry.
LastEndName = Literal["failed for good", "lost for good"]
_FOR_GOOD: dict[str, LastEndName] = {"failed": "failed for good", "lost": "lost for good"}

SPANS_KEPT = 200  # of one task: one that defers for ever does not fill the database
# Those of a task are counted after about one of so many of its steps, so up to so many more are kept.
PRUNED_EVERY = 64

_ROW: Final = Kind(task_span, ("task_instance_id", "ended_at", "try_number", "ready_at", "began_at", "outcome"))
_newest = (
    select(task_span.c.ended_at)
    .where(task_span.c.task_instance_id == bindparam("of_task"))
    .order_by(task_span.c.ended_at.desc())
    .offset(SPANS_KEPT)
    .limit(1)
    .scalar_subquery()
)
_PRUNE: Final = Prepared(
    delete(task_span).where(task_span.c.task_instance_id == bindparam("of_task"), task_span.c.ended_at <= _newest)
)


class StepSpan(msgspec.Struct, frozen=True):
    """A step of a try: since when it was ready, and how many seconds it ran; None if that is not known."""

    try_number: int
    ready_at: datetime | None = None
    took_s: float | None = None


def stored_name(outcome: StepEndName, state: TaskState | None) -> StepEndName | LastEndName:
    """Return the outcome of a step as its row has it, of a task that is in this state by it."""
    if outcome == "lost" and state is TaskState.NONE:
        return "stopped"  # a user, or a signal, has its task begin anew
    return _FOR_GOOD[outcome] if state is TaskState.FAILED and outcome in _FOR_GOOD else outcome


def write(tx: Tx, ended: Sequence[tuple[TaskInstanceId, StepSpan, StepEndName | LastEndName]]) -> None:
    """Write down steps that end in this transaction, with their outcomes. Repeating it changes nothing."""
    if not ended:
        return
    connection, now = tx.connection, tx.now
    ended_at = bound(connection, now)
    rows = [
        (
            *(instance, ended_at, span.try_number),
            None if span.ready_at is None else bound(connection, span.ready_at),
            None if span.took_s is None else bound(connection, now - timedelta(seconds=span.took_s)),
            outcome,
        )
        for instance, span, outcome in ended
    ]
    insert_new(connection, _ROW, rows, returning=("task_instance_id",))
    # A task may have so many that defers, whose stream goes on, that is moved, or that signals or retries begin again:
    # not one that ends in its first try. Which of its steps prunes is left to the time.
    if now.microsecond // 1000 % PRUNED_EVERY == 0:
        for instance, span, outcome in ended:
            if span.try_number > 1 or outcome in ("deferred", "handled", "lost"):
                _PRUNE.run(connection, of_task=instance)
