"""Runs by the clock: each DAG with a cron schedule has the date of its next run, by the database's clock.

Several supervisors look at once on PostgreSQL: whoever has locked a DAG makes its run and moves the date on, in one
transaction; the others pass over it.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from sqlalchemy import Connection, TextClause, func, select, true, update

from headgate.protocol.messages.dags import CronSchedule, DagSpec
from headgate.scheduling import timetable
from headgate.scheduling.timetable import Interval, NoMoment
from headgate.store.errors import SpecUnreadable
from headgate.store.tables import dag, dag_run
from headgate.store.tasks.graphs import read_spec


class DueDag(msgspec.Struct, frozen=True):
    """A DAG whose next run is due; its row is locked until the transaction ends."""

    id: int
    name: str
    spec_hash: str
    next_: Interval


def follow_schedule(connection: Connection, now: datetime, dag_id: int, spec: DagSpec, before: bytes | None) -> None:
    """Set the date of a DAG's next run, where its schedule is not the one that its spec had ``before``."""
    if before is not None and _has_schedule_of(before, spec):
        return
    if not isinstance(spec.schedule, CronSchedule):
        set_next(connection, dag_id, None)
        return
    start_date = None if spec.start_date_s is None else datetime.fromtimestamp(spec.start_date_s, UTC)
    try:
        next_ = timetable.first_interval(spec.schedule, now, start_date=start_date, catchup=spec.catchup)
    except NoMoment:
        next_ = None  # its file was checked when it was parsed: this machine knows other time zones
    set_next(connection, dag_id, next_)


def _has_schedule_of(before: bytes, spec: DagSpec) -> bool:
    try:
        return _schedule_of(read_spec(spec.dag_id, before)) == _schedule_of(spec)
    except SpecUnreadable:
        return False


def _schedule_of(spec: DagSpec) -> object:
    return spec.schedule, spec.start_date_s, spec.catchup


def set_next(connection: Connection, dag_id: int, next_: Interval | None) -> None:
    """Set the interval that the next run of a DAG is for; None: there is no next one."""
    values: dict[str, datetime | None] = {"next_interval_start": None, "next_run_at": None}
    if next_ is not None:
        values = {"next_interval_start": next_.start, "next_run_at": next_.end}
    connection.execute(update(dag).where(dag.c.id == dag_id).values(values))


_ACTIVE = (
    select(func.count())
    .where(dag_run.c.dag_id == dag.c.id, dag_run.c.ended_at.is_(None))
    .correlate(dag)
    .scalar_subquery()
)
_DUE = (
    select(dag.c.id, dag.c.name, dag.c.spec_hash, dag.c.next_interval_start, dag.c.next_run_at)
    .where(dag.c.is_paused.is_(False), dag.c.removed_at.is_(None), _ACTIVE < dag.c.max_active_runs)
    .order_by(dag.c.next_run_at, dag.c.id)
    .with_for_update(skip_locked=True, key_share=True)
)


def lock_due(connection: Connection, now: datetime, among: TextClause | None, *, limit: int) -> list[DueDag]:
    """Lock up to ``limit`` DAGs, or of those ``among``, whose next run is due and return them, the longest due first.

    A DAG that has as many runs as it may have at once is not due: its next run is made when one of them has ended.
    """
    due = _DUE.where(dag.c.next_run_at <= now, true() if among is None else among)
    rows = connection.execute(due.limit(limit)).all()
    return [DueDag(row.id, row.name, row.spec_hash, Interval(row.next_interval_start, row.next_run_at)) for row in rows]
