"""When something is due by the database's clock, so that nobody has to look again and again whether it is."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    TextClause,
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
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import DatabaseNow, read
from headgate.store.tables import asset_subscription, dag, dag_run, task_instance, triggerer, waiting_event
from headgate.store.tasks.task_rows import is_in
from headgate.store.triggers.assets import SUBSCRIBED
from headgate.store.triggers.leases import Clock

_C = task_instance.c

Column: TypeAlias = ColumnElement[Any]


class Due(msgspec.Struct, frozen=True):
    """What there is to do, and when, in seconds from now; not more than 0 where it is due already, None for nothing.

    ``in_s`` is for the scheduler: the next retry, timeout of a deferral, run by the clock, or batch of events.
    ``deadline_in_s`` is for whoever ends workers: the first end of an execution_timeout among the epoch's own tasks.
    ``has_marked``: there are runs to look at. ``has_waiting``: there are events that wait for runs.
    ``has_orphans``: there are tasks whose supervisor is gone.
    """

    in_s: float | None
    deadline_in_s: float | None
    has_marked: bool
    has_waiting: bool
    has_orphans: bool


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
# What a DAG may have no run for is not due: it is when one of its runs has ended. It would hide what comes after it.
_HAS_ROOM = (
    select(func.count())
    .where(dag_run.c.dag_id == dag.c.id, dag_run.c.ended_at.is_(None))
    .correlate(dag)
    .scalar_subquery()
) < dag.c.max_active_runs


def _due_among(among: TextClause | None) -> Prepared:
    """Return the statement; ``among``: only the dates of such DAGs count, and of their runs."""
    of_dags: tuple[Column, ...] = () if among is None else (among,)  # type: ignore[assignment]
    of_tasks: tuple[Column, ...] = ()
    if among is not None:
        of_tasks = (_C.dag_run_id.in_(select(dag_run.c.id).join(dag).where(among)),)
    next_run_at = (
        select(dag.c.next_run_at)
        .where(dag.c.next_run_at.is_not(None), _OPEN_DAG, _HAS_ROOM, *of_dags)
        .order_by(dag.c.next_run_at)
        .limit(1)
        .scalar_subquery()
    )
    return Prepared(
        union_all(
            _row("now", DatabaseNow()),
            _row("retry", func.min(_C.retry_at)).where(_C.retry_at.is_not(None), *of_tasks),
            _row("timeout", func.min(_C.trigger_timeout)).where(is_in(TaskState.DEFERRED)),
            _row("run", next_run_at),
            _row("batch", func.min(waiting_event.c.stored_at), asset_subscription.c.batch_seconds)
            .select_from(_WAITING)
            .where(asset_subscription.c.batch_seconds.is_not(None), _OPEN_DAG, *of_dags)
            .group_by(dag.c.id, dag.c.max_active_runs, asset_subscription.c.batch_seconds)
            .having(_HAS_ROOM),
            _row("deadline", func.min(_C.deadline)).where(_C.triggerer_id == bindparam("epoch")),
            _row("marked").where(exists(select(dag_run.c.id).where(text("dag_run.needs_look")))),
            _row("waiting").where(exists(select(waiting_event.c.dag_id).select_from(_WAITING).where(_OPEN_DAG))),
            _row("orphans").where(
                exists(select(_C.id).join(triggerer, triggerer.c.id == _C.triggerer_id).where(_GONE))
            ),
        )
    )


_DUE = _due_among(None)


def next_due(connection: Connection, epoch: int, clock: Clock | None, among: TextClause | None = None) -> Due:
    """Say what there is to do, and when. One statement. ``among``: what has a date in other DAGs is not due here."""
    now: datetime | None = None if clock is None else clock().astimezone(UTC)
    times: dict[str, list[float]] = {"timed": [], "deadline": []}
    flags = set()
    due = _DUE if among is None else _due_among(among)
    for kind, moment, plus_s in due.run(connection, epoch=epoch).fetchall():
        if kind == "now":
            now = now or read(connection, moment)
        elif kind in ("marked", "waiting", "orphans"):
            flags.add(kind)
        elif moment is not None:
            assert now is not None, "its row is the first"
            in_s = (read(connection, moment) - now).total_seconds() + float(plus_s)
            times["deadline" if kind == "deadline" else "timed"].append(in_s)
    return Due(
        in_s=min(times["timed"], default=None),
        deadline_in_s=min(times["deadline"], default=None),
        has_marked="marked" in flags,
        has_waiting="waiting" in flags,
        has_orphans="orphans" in flags,
    )
