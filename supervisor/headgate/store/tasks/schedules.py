"""The dates of scheduled runs: each DAG with a cron schedule has the date of its next run, by the database's clock.

Several supervisors may look for due DAGs at once on PostgreSQL. The one that has locked a DAG creates its run and sets
the next date in one transaction; the others skip that DAG.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

import msgspec
from sqlalchemy import Integer, bindparam, func, select, update

from headgate.protocol.messages.dags import CronSchedule, DagSpec
from headgate.scheduling import timetable
from headgate.scheduling.timetable import Interval, NoMoment
from headgate.store.db.times import UtcDateTime, bound, read
from headgate.store.db.transaction import Tx
from headgate.store.errors import SpecUnreadable
from headgate.store.ids import DagRowId
from headgate.store.tables import dag, dag_run
from headgate.store.tasks.graphs import ReadableOnly, read_spec


class DueDag(msgspec.Struct, frozen=True):
    """A DAG whose next run is due; its row is locked until the transaction ends."""

    id: DagRowId
    name: str
    spec_hash: str
    next_: Interval


def update_next_date(tx: Tx, dag_row: DagRowId, spec: DagSpec, before: bytes | None) -> None:
    """Set the date of a DAG's next run, unless its schedule is the one that its spec had ``before``.

    If only the expression or its time zone is another one, what is before the next interval has had its run, and gets
    none by the new expression. Another ``start_date`` or ``catchup`` asks for all that has no run since then.
    """
    old = _spec_of(spec.dag_id, before)
    if old is not None and _schedule_of(old) == _schedule_of(spec):
        return
    if not isinstance(spec.schedule, CronSchedule):
        set_next(tx, dag_row, None)
        return
    start_date = None if spec.start_date_s is None else datetime.fromtimestamp(spec.start_date_s, UTC)
    begin = partial(timetable.first_interval, spec.schedule, tx.now)
    try:
        if old is not None and isinstance(old.schedule, CronSchedule) and _beginning_of(old) == _beginning_of(spec):
            upto = _next_start(tx, dag_row)
            # If it is still the first one, it has had no run.
            if upto is not None and (
                start_date is None or upto > timetable.interval_from(old.schedule, start_date).start
            ):
                begin = partial(timetable.next_after_change, spec.schedule, tx.now, upto)
        next_ = begin(start_date=start_date, catchup=spec.catchup)
    except NoMoment:
        next_ = None  # its file was checked when it was parsed, on a machine that knows other time zones
    set_next(tx, dag_row, next_)


def _spec_of(dag_id: str, stored: bytes | None) -> DagSpec | None:
    try:
        return None if stored is None else read_spec(dag_id, stored)
    except SpecUnreadable:
        return None


def _schedule_of(spec: DagSpec) -> object:
    return spec.schedule, _beginning_of(spec)


def _beginning_of(spec: DagSpec) -> object:
    return spec.start_date_s, spec.catchup


def _next_start(tx: Tx, dag_row: DagRowId) -> datetime | None:
    of = select(dag.c.next_interval_start).where(dag.c.id == dag_row)
    start: datetime | None = tx.connection.execute(of).scalar_one()
    return start


def set_next(tx: Tx, dag_row: DagRowId, next_: Interval | None) -> None:
    """Set the data interval of the next run of a DAG; None if there is no next one."""
    values: dict[str, datetime | None] = {"next_interval_start": None, "next_run_at": None}
    if next_ is not None:
        values = {"next_interval_start": next_.start, "next_run_at": next_.end}
    tx.connection.execute(update(dag).where(dag.c.id == dag_row).values(values))


_ACTIVE = (
    select(func.count())
    .where(dag_run.c.dag_id == dag.c.id, dag_run.c.ended_at.is_(None))
    .correlate(dag)
    .scalar_subquery()
)
_DUE = ReadableOnly(
    lambda readable: (
        select(dag.c.id, dag.c.name, dag.c.spec_hash, dag.c.next_interval_start, dag.c.next_run_at)
        .where(dag.c.is_paused.is_(False), dag.c.removed_at.is_(None), _ACTIVE < dag.c.max_active_runs)
        .where(dag.c.next_run_at <= bindparam("now", type_=UtcDateTime()), readable)
        .order_by(dag.c.next_run_at, dag.c.id)
        .limit(bindparam("limit", type_=Integer()))
        .with_for_update(skip_locked=True, key_share=True)
    )
)


def lock_due(tx: Tx, unreadable: str | None, *, limit: int) -> list[DueDag]:
    """Lock up to ``limit`` DAGs whose next run is due, except ``unreadable`` ones; return them, the longest due first.

    A DAG that has as many active runs as it may have is not due: its next run is created when one of them has ended.
    """
    rows = tx.passed_over.read("DAG", limit, partial(_DUE.run, tx, unreadable, now=bound(tx.connection, tx.now)))
    return [
        DueDag(id_, name, spec_hash, Interval(read(tx.connection, start), read(tx.connection, end)))
        for id_, name, spec_hash, start, end in rows
    ]
