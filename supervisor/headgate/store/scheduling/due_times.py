"""The next date by the database's clock at which there is something to do, so that a scheduler need not poll."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Select,
    and_,
    bindparam,
    exists,
    func,
    literal_column,
    null,
    or_,
    select,
    text,
    union_all,
)

from headgate.protocol.messages.dags import TaskState
from headgate.store.db.times import DatabaseNow, read
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import single_statement
from headgate.store.ids import Epoch
from headgate.store.scheduling import deciding
from headgate.store.signals import dag_signals, waits
from headgate.store.tables import (
    asset_subscription,
    dag,
    dag_run,
    dag_signal,
    signal_wait,
    task_instance,
    task_stream,
    triggerer,
    waiting_event,
)
from headgate.store.tasks.graphs import GraphVerbs, ReadableOnly
from headgate.store.tasks.task_rows import is_in
from headgate.store.triggers import reopening
from headgate.store.triggers.assets import SUBSCRIBED

_C = task_instance.c

Column: TypeAlias = ColumnElement[Any]


class Due(msgspec.Struct, frozen=True):
    """Seconds from now until there is something to do: 0 or less if it is due already, None if there is nothing.

    ``in_s`` is for the scheduler: the next retry, timeout of a deferral, start of a periodic task, scheduled run, or
    batch of events, of a run or of a stream.
    ``deadline_in_s`` is for the executor: the first end of an execution_timeout among the epoch's own tasks.
    ``has_dirty``: there are runs to evaluate. ``has_waiting``: there are events, or signals, that wait for runs.
    ``has_orphans``: there are tasks whose supervisor is gone. ``has_reopening``: there are triggers of streams to be
    opened again. ``has_signals``: there are signals that tasks, or DAGs, may wait for. ``ask_in_s``: until users' code
    is to be asked about signals, about which it is not asked now.
    """

    in_s: float | None
    deadline_in_s: float | None
    has_dirty: bool
    has_waiting: bool
    has_orphans: bool
    has_reopening: bool
    has_signals: bool
    ask_in_s: float | None = None


def _row(
    kind: str, moment: ColumnElement[Any] | None = None, plus_s: ColumnElement[Any] | None = None
) -> Select[*tuple[Any, ...]]:
    columns: list[Column] = [
        literal_column(f"'{kind}'"),
        null() if moment is None else moment,
        literal_column("0.0") if plus_s is None else plus_s,
    ]
    return select(*columns)


_OPEN_DAG = and_(dag.c.is_paused.is_(False), dag.c.removed_at.is_(None))
_GONE = and_(_C.triggerer_id.is_not(None), or_(triggerer.c.fenced_at.is_not(None), triggerer.c.stopped_at.is_not(None)))
_WAITING = waiting_event.join(asset_subscription, SUBSCRIBED).join(dag, dag.c.id == waiting_event.c.dag_id)
_SIGNALS = dag_signal.join(dag, dag.c.id == dag_signal.c.dag_id)
_HAS_SIGNALS = exists(select(dag_signal.c.id).select_from(_SIGNALS).where(dag_signals.IS_WAITING, _OPEN_DAG))
# If a DAG has as many active runs as it may have, its next one is not due, and must not hide later dates of others.
_HAS_ROOM = (
    select(func.count())
    .where(dag_run.c.dag_id == dag.c.id, dag_run.c.ended_at.is_(None))
    .correlate(dag)
    .scalar_subquery()
) < dag.c.max_active_runs


def _due(readable: ColumnElement[bool]) -> CompoundSelect[Any]:
    """Return the statement; only dates of ``readable`` DAGs, and of their runs, count."""
    retry_at = (
        select(_C.retry_at)
        .select_from(task_instance.join(dag_run).join(dag))
        .where(_C.retry_at.is_not(None), _OPEN_DAG, readable)
        .order_by(_C.retry_at)
        .limit(1)
        .scalar_subquery()
    )
    next_run_at = (
        select(dag.c.next_run_at)
        .where(dag.c.next_run_at.is_not(None), _OPEN_DAG, _HAS_ROOM, readable)
        .order_by(dag.c.next_run_at)
        .limit(1)
        .scalar_subquery()
    )
    return union_all(
        _row("now", DatabaseNow()),
        _row("retry", retry_at),
        _row("timeout", func.min(_C.trigger_timeout)).where(is_in(TaskState.DEFERRED)),
        _row("stream", func.min(task_stream.c.due_at)).where(task_stream.c.due_at.is_not(None)),
        _row("tick", func.min(signal_wait.c.due_at)).where(signal_wait.c.due_at.is_not(None)),
        _row("ask", deciding.NEXT_AT.scalar_subquery()),
        _row("run", next_run_at),
        _row("batch", func.min(waiting_event.c.stored_at), asset_subscription.c.batch_seconds)
        .select_from(_WAITING)
        .where(asset_subscription.c.batch_seconds.is_not(None), _OPEN_DAG, readable)
        .group_by(dag.c.id, dag.c.max_active_runs, asset_subscription.c.batch_seconds)
        .having(_HAS_ROOM),
        _row("batch", func.min(dag_signal.c.sent_at), signal_wait.c.batch_seconds)
        .select_from(_SIGNALS.join(signal_wait, signal_wait.c.id == dag_signal.c.wait_id))
        .where(dag_signals.IS_WAITING, signal_wait.c.batch_seconds.is_not(None), _OPEN_DAG, readable)
        .group_by(dag.c.id, dag.c.max_active_runs, signal_wait.c.batch_seconds)
        .having(_HAS_ROOM),
        _row("deadline", func.min(_C.deadline)).where(_C.triggerer_id == bindparam("epoch")),
        _row("dirty").where(exists(select(dag_run.c.id).where(text("dag_run.needs_look")))),
        _row("waiting").where(
            or_(exists(select(waiting_event.c.dag_id).select_from(_WAITING).where(_OPEN_DAG)), _HAS_SIGNALS)
        ),
        _row("reopening").where(exists(reopening.free())),
        _row("signals").where(or_(*waits.WORK)),
        _row("orphans").where(exists(select(_C.id).join(triggerer, triggerer.c.id == _C.triggerer_id).where(_GONE))),
    )


_DUE = ReadableOnly(_due)


class DueVerbs(GraphVerbs):
    """The verb that says when to do something."""

    @single_statement
    def next_due(self, tx: Tx, epoch: Epoch) -> Due:
        """Return how long there is nothing to do, by the database's clock. One statement, if all DAGs are readable."""
        now = None if tx.clock is None else tx.now
        times: dict[str, list[float]] = {"timed": [], "deadline": [], "ask": []}
        flags = set()
        for kind, moment, plus_s in _DUE.run(tx, self.graphs.unreadable(tx), epoch=epoch).fetchall():
            if kind == "now":
                now = now or read(tx.connection, moment)
            elif kind in ("dirty", "waiting", "orphans", "reopening", "signals"):
                flags.add(kind)
            elif moment is not None:
                assert now is not None, "its row is the first"
                in_s = (read(tx.connection, moment) - now).total_seconds() + float(plus_s)
                times[kind if kind in times else "timed"].append(in_s)
        return Due(
            in_s=min(times["timed"], default=None),
            deadline_in_s=min(times["deadline"], default=None),
            has_dirty="dirty" in flags,
            has_waiting="waiting" in flags,
            has_orphans="orphans" in flags,
            has_reopening="reopening" in flags,
            has_signals="signals" in flags,
            ask_in_s=min(times["ask"], default=None),
        )
