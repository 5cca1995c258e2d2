"""Where the time of a run has gone: the phases of each task, from the spans of its steps and from its own row.

A step that has ended has a row with the times at which it was ready, began and ended. Between two of its steps a task
was deferred, or waited for its next try; or it had ended, and was begun anew. What it does now is in its own row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, func, or_, select

from headgate.protocol.messages.dags import TaskState
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.facts.spans import StepEndName
from headgate.store.ids import DagRunId
from headgate.store.inspect.runs import TaskRef, run_id_of
from headgate.store.tables import dag, dag_run, task_instance, task_span

SPANS_READ_MAX = 10_000  # of one run, the first tasks' first

PhaseName = Literal["queued", "running", "deferred", "retry wait"]
_C, _S = task_instance.c, task_span.c
_WAITS_AFTER: dict[str, PhaseName] = {
    "deferred": "deferred",
    "handled": "deferred",
    "failed": "retry wait",
    "lost": "retry wait",
}
_SHOWN_AS: dict[str, StepEndName] = {"failed for good": "failed", "lost for good": "lost"}


class Phase(msgspec.Struct, frozen=True):
    """What a task did for a while. ``ended_at`` is None if it still does; ``outcome`` is of a step that has ended.

    ``queued``: ready, and waiting for a worker; ``deferred``: waiting for its trigger, or for events of its stream.
    """

    task_id: str
    map_index: int
    try_number: int
    phase: PhaseName
    began_at: datetime
    ended_at: datetime | None
    outcome: StepEndName | None = None


class EndedRun(msgspec.Struct, frozen=True):
    """A run that has ended."""

    id: DagRunId
    dag: str
    run_id: str
    run_type: str
    state: str
    created_date: datetime
    ended_at: datetime


class SpanInspection(Verbs):
    """The queries about phases."""

    @reading
    def ended_runs(self, tx: Tx, ended_at: datetime, after: DagRunId, *, limit: int) -> list[EndedRun]:
        """Return runs that ended later than a moment, or then and with an id beyond ``after``, in the order of ends."""
        ends, id_ = dag_run.c.ended_at, dag_run.c.id
        rows = (
            select(id_, dag.c.name, dag_run.c.run_id, dag_run.c.run_type, dag_run.c.state)
            .add_columns(dag_run.c.created_date, ends)
            .select_from(dag_run.join(dag))
            .where(ends >= ended_at, or_(ends > ended_at, id_ > after), dag_run.c.removed_at.is_(None))
            .order_by(ends, id_)
            .limit(limit)
        )
        return [EndedRun(*row) for row in tx.connection.execute(rows)]

    @reading
    def ended_spans(self, tx: Tx, run: EndedRun) -> list[Phase] | None:
        """Return the phases of all tasks of a run that has ended; None if it was deleted or begun again since."""
        is_it = (dag_run.c.id == run.id, dag_run.c.ended_at == run.ended_at, dag_run.c.removed_at.is_(None))
        if tx.connection.execute(select(dag_run.c.id).where(*is_it)).first() is None:
            return None
        return _read(tx, _C.dag_run_id == run.id)

    @reading
    def spans(self, tx: Tx, of_dag: str, run_id: str) -> list[Phase]:
        """Return the phases of all tasks of a run that has begun, by task, in their order. Raises `NoSuchRow`."""
        return _read(tx, _C.dag_run_id == run_id_of(tx, of_dag, run_id))

    @reading
    def task_spans(self, tx: Tx, task: TaskRef) -> list[Phase]:
        """Return the phases of one task, in their order; a mapped task itself has none."""
        return _read(tx, _C.id == task.id)


def _read(tx: Tx, which: ColumnElement[bool]) -> list[Phase]:
    ended = (_S.ended_at.label("step_ended_at"), _S.ready_at, _S.began_at, _S.outcome)
    rows = (
        select(
            *(_C.id, _C.task_id, _C.map_index, _C.state, _C.try_number, _C.scheduled_at, _C.started_at),
            *(_C.ended_at, func.coalesce(_S.try_number, _C.try_number).label("step_try"), *ended),
        )
        .select_from(task_instance.outerjoin(task_span, _S.task_instance_id == _C.id))
        .where(which, _C.map_length.is_(None))
        .order_by(_C.map_index, _C.id, _S.ended_at)
        .limit(SPANS_READ_MAX + 1)
    )
    read = tx.connection.execute(rows).all()
    found: list[Phase] = []
    for _, of_task in groupby(read[:SPANS_READ_MAX], key=lambda row: row.id):
        steps = list(of_task)
        is_cut = len(read) > SPANS_READ_MAX and steps[-1] is read[SPANS_READ_MAX - 1]
        found += _phases(steps, is_cut=is_cut)
    return found


def _phases(rows: Sequence[Any], *, is_cut: bool) -> Iterator[Phase]:
    """Return the phases of one task, from its row joined with those of its steps; these may be none.

    Of one that ``is_cut`` there may be more steps.
    """
    before: Any = None
    for row in rows:
        if row.outcome is None:
            break
        ready, ended = row.ready_at, row.step_ended_at
        if ready is not None and before is not None:
            ready = max(ready, before.step_ended_at)  # of an adopted task only the beginning of its try is known
        began = max(filter(None, (row.began_at, ready)), default=ended)
        if before is not None:
            yield from _wait(before, ready or began)
        if ready is not None and began > ready:
            yield _phase(row, "queued", ready, began)
        yield _phase(row, "running", began, ended, outcome=_SHOWN_AS.get(row.outcome, row.outcome))
        before = row
    if not is_cut:
        yield from _now(rows[0], before)


def _now(task: Any, before: Any) -> Iterator[Phase]:
    """Return the phases since the last step has ended: those that go on, and the wait that ended with the task."""
    state = TaskState(task.state)
    ready = task.scheduled_at
    if state in (TaskState.SCHEDULED, TaskState.RUNNING, TaskState.RESTARTING) and ready is not None:
        yield from _wait(before, ready)
        began = ready if task.started_at is None else max(ready, task.started_at)
        if state is TaskState.SCHEDULED:
            yield _phase(task, "queued", ready, None, is_now=True)
            return
        if began > ready:
            yield _phase(task, "queued", ready, began, is_now=True)
        yield _phase(task, "running", began, None, is_now=True)
    elif state in (TaskState.DEFERRED, TaskState.UP_FOR_RETRY):
        since = ready if before is None else before.step_ended_at
        if since is not None:
            name: PhaseName = "deferred" if state is TaskState.DEFERRED else "retry wait"
            yield _phase(task, name, since, None, is_now=True)
    elif task.ended_at is not None:
        yield from _wait(before, task.ended_at)


def _wait(before: Any, until: datetime) -> Iterator[Phase]:
    """Return what a task did after a step of it, until it was ready again, or had ended.

    Nothing, if it had ended with that step, and then a user, or a signal, had it begin anew.
    """
    if before is None:
        return
    name = _WAITS_AFTER.get(before.outcome)
    if name is not None and until > before.step_ended_at:
        yield _phase(before, name, before.step_ended_at, until)


def _phase(
    row: Any,
    phase: PhaseName,
    began_at: datetime,
    ended_at: datetime | None,
    *,
    outcome: StepEndName | None = None,
    is_now: bool = False,
) -> Phase:
    number = row.try_number if is_now else row.step_try
    return Phase(row.task_id, row.map_index, number, phase, began_at, ended_at, outcome)
