"""Rules of tasks about the time: they are met every so often, or at the times of a cron expression (I29).

All of it goes by the clock of the database. Times that were missed, because no supervisor ran, are one.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Integer, bindparam, select, update

from headgate.protocol import marks
from headgate.protocol.messages.dags import CronSchedule
from headgate.protocol.messages.rules import ClockRule, CronRule
from headgate.protocol.values import encode_value
from headgate.scheduling import timetable
from headgate.scheduling.timetable import NoMoment
from headgate.store.db.faults import blaming
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound
from headgate.store.db.times import read as read_moment
from headgate.store.db.transaction import Tx
from headgate.store.tables import signal_wait

_W = signal_wait.c


class Clock(NamedTuple):
    """The columns of a rule about the time; all are None for other rules."""

    every_s: float | None = None
    due_at: Any = None  # as the driver takes it, and ``met_at``
    met_version: int | None = None
    met_value: bytes | None = None
    met_at: Any = None
    cron: str | None = None
    timezone: str | None = None


NEVER: Final = Clock()


def first(tx: Tx, rule: ClockRule | CronRule) -> Clock:
    """Return what a new rule about the time has. One with an interval is met with the run, a cron expression is not."""
    if isinstance(rule, CronRule):
        next_at = _after(rule.cron, rule.timezone, tx.now)
        return Clock(due_at=_bound(tx, next_at), cron=rule.cron, timezone=rule.timezone)
    next_at = tx.now + timedelta(seconds=rule.every_s)
    return Clock(rule.every_s, _bound(tx, next_at), 1, _value(tx.now), _bound(tx, tx.now))


def go_on(tx: Tx, *which: ColumnElement[bool]) -> None:
    """Have these rules of a run be met again, which had ended and goes on."""
    of_clock = select(_W.id, _W.every_s, _W.cron, _W.timezone).where(*which)
    for row in tx.connection.execute(of_clock).all():
        if row.every_s is not None or row.cron is not None:
            next_at = tx.now if row.cron is None else _after(row.cron, row.timezone, tx.now)
            tx.connection.execute(update(signal_wait).where(_W.id == row.id).values(due_at=next_at))


_DUE = Prepared(
    select(*(_W[name] for name in ("id", "dag_run_id", "seen_version", "every_s", "cron", "timezone", "due_at")))
    .where(_W.due_at.is_not(None), _W.due_at <= bindparam("now", type_=UtcDateTime()))
    .order_by(_W.due_at, _W.id)
    .limit(bindparam("limit", type_=Integer()))
    .with_for_update(skip_locked=True)
)
_TICK = Prepared(
    update(signal_wait)
    .where(_W.id == bindparam("of_id"))
    .values({name: bindparam(name) for name in ("seen_version", "due_at", "met_version", "met_value", "met_at")})
)


def tick(tx: Tx, limit: int) -> int:
    """Record that the time has met up to ``limit`` rules that are due; return how many. Several missed ones are one.

    Raises `ItemFailed` for a rule that cannot be met.
    """
    now = bound(tx.connection, tx.now)
    rows = tx.passed_over.read("rule", limit, partial(_DUE.run, tx.connection, now=now))
    for id_, run, *clock in rows:
        with blaming("rule", id_):
            _meet(tx, id_, *clock, now=now)
        tx.mark_run_dirty(run)
    if rows:
        marks.reach("signals.ticked")
    return len(rows)


def _meet(tx: Tx, id_: int, seen: int, every_s: float | None, cron: str, timezone: str, due: Any, *, now: Any) -> None:
    """Have the time meet a rule, and compute when it does so next."""
    due_at = read_moment(tx.connection, due)
    if every_s is None:
        next_at = _after(cron, timezone, tx.now)
    else:
        missed = (tx.now - due_at).total_seconds() // every_s
        next_at = due_at + timedelta(seconds=every_s * (missed + 1))
    met = {"seen_version": seen + 1, "met_version": seen + 1, "met_value": _value(due_at)}
    _TICK.run(tx.connection, of_id=id_, due_at=_bound(tx, next_at), met_at=now, **met)


def _after(cron: str, timezone: str, moment: datetime) -> datetime | None:
    """Return the next time of a cron expression; None if it has none, or this machine does not know its zone."""
    try:
        return timetable.moment_after(CronSchedule(cron, timezone), moment)
    except NoMoment:
        return None


def _bound(tx: Tx, moment: datetime | None) -> Any:
    return None if moment is None else bound(tx.connection, moment)


def _value(moment: datetime) -> bytes:
    return encode_value(moment, where="the time of a start")
