"""Triggers as people look at them: who runs them, for whom, since when, and which of them something is wrong with."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from headgate.store.errors import NoSuchRow
from headgate.store.tables import (
    asset,
    asset_watcher,
    dag,
    dag_run,
    redelivery,
    task_instance,
    trigger,
    trigger_event,
)

_PREFIX = "trigger-"  # how a trigger without a watcher is called in lists and logs


class TriggerLine(msgspec.Struct, frozen=True):
    """One trigger. ``name`` is its watcher's, or ``trigger-<id>``.

    ``dag``, ``run_id``, ``task_id`` and ``trigger_timeout`` are those of the task that waits for it.
    """

    id: int
    name: str
    classpath: str
    created_date: datetime
    queue: str
    triggerer_id: int | None
    failure_count: int
    last_error: str | None
    last_failed_at: datetime | None
    finished_at: datetime | None
    dag: str | None
    run_id: str | None
    task_id: str | None
    trigger_timeout: datetime | None
    removed_at: datetime | None


class TriggerDetail(msgspec.Struct, frozen=True):
    """All that is known of a trigger but its kwargs. ``redelivered``: how often stored events came again."""

    line: TriggerLine
    asset: str | None
    last_failed_run_id: str | None
    events: int
    redelivered: int
    newest_event_id: int | None
    newest_event_at: datetime | None


_COLUMNS = (
    *(trigger.c.id, asset_watcher.c.name, trigger.c.classpath, trigger.c.created_date, trigger.c.queue),
    *(trigger.c.triggerer_id, trigger.c.failure_count, trigger.c.last_error, trigger.c.last_failed_at),
    *(trigger.c.finished_at, dag.c.name, dag_run.c.run_id, task_instance.c.task_id),
    *(task_instance.c.trigger_timeout, trigger.c.removed_at),
)
_FROM = (
    trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id)
    .outerjoin(task_instance, task_instance.c.trigger_id == trigger.c.id)
    .outerjoin(dag_run, dag_run.c.id == task_instance.c.dag_run_id)
    .outerjoin(dag, dag.c.id == dag_run.c.dag_id)
)
_OPEN = and_(trigger.c.finished_at.is_(None), trigger.c.removed_at.is_(None))


def _line(row: Any) -> TriggerLine:
    id_, name, *others = row
    return TriggerLine(id_, name or f"{_PREFIX}{id_}", *others)


def _lines(connection: Connection, where: ColumnElement[bool], beyond_id: int, limit: int) -> list[TriggerLine]:
    statement = (
        select(*_COLUMNS).select_from(_FROM).where(where, trigger.c.id > beyond_id).order_by(trigger.c.id).limit(limit)
    )
    return [_line(row) for row in connection.execute(statement)]


def triggers(
    connection: Connection, *, with_ended: bool, queue: str | None, beyond_id: int, limit: int
) -> list[TriggerLine]:
    """Return up to ``limit`` triggers by id: those that are open, and those of watchers that have finished.

    ``with_ended``: all others as well, the removed ones included.
    """
    present = and_(asset_watcher.c.id.is_not(None), asset_watcher.c.removed_at.is_(None))
    where = and_(True) if with_ended else or_(_OPEN, present)
    if queue is not None:
        where = and_(where, trigger.c.queue == queue)
    return _lines(connection, where, beyond_id, limit)


def orphans(connection: Connection, *, limit: int) -> list[TriggerLine]:
    """Return open triggers that neither a watcher nor a task has: what `deferral.remove_orphans` removes."""
    nobody = and_(asset_watcher.c.id.is_(None), task_instance.c.id.is_(None))
    return _lines(connection, and_(_OPEN, nobody), 0, limit)


def slow(connection: Connection, now: datetime, *, longer_than_s: float, limit: int) -> list[TriggerLine]:
    """Return open triggers that tasks have waited for longer than this, the oldest first (seed 004)."""
    where = and_(
        _OPEN, task_instance.c.id.is_not(None), trigger.c.created_date < now - timedelta(seconds=longer_than_s)
    )
    return _lines(connection, where, 0, limit)


def trigger_id_of(connection: Connection, name: str) -> int:
    """Return the id of a trigger by its number, by ``trigger-<id>``, or by the name of its watcher.

    Of a name that several watchers had the newest is meant. Raises `NoSuchRow`.
    """
    digits = name.removeprefix(_PREFIX)
    if digits.isascii() and digits.isdecimal() and len(digits) <= 18:
        found = connection.execute(select(trigger.c.id).where(trigger.c.id == int(digits))).scalar_one_or_none()
        if found is not None:
            return int(found)
    named = select(asset_watcher.c.trigger_id).where(asset_watcher.c.name == name)
    found = connection.execute(named.order_by(asset_watcher.c.id.desc()).limit(1)).scalar_one_or_none()
    if found is None:
        raise NoSuchRow("trigger or watcher", name)
    return int(found)


def one_trigger(connection: Connection, trigger_id: int) -> TriggerDetail:
    """Return all that is known of a trigger. Raises `NoSuchRow`."""
    columns = (*_COLUMNS, asset.c.name.label("asset_name"), trigger.c.last_failed_run_id)
    from_ = _FROM.outerjoin(asset, asset.c.id == asset_watcher.c.asset_id)
    row = connection.execute(select(*columns).select_from(from_).where(trigger.c.id == trigger_id)).first()
    if row is None:
        raise NoSuchRow("trigger", str(trigger_id))
    *line, asset_name, failed_run = tuple[Any, ...](row)
    of_it = trigger_event.c.trigger_id == trigger_id
    events = connection.execute(select(func.count()).where(of_it)).scalar_one()
    came_again = select(func.coalesce(func.sum(redelivery.c.count), 0)).select_from(redelivery.join(trigger_event))
    redelivered = connection.execute(came_again.where(of_it)).scalar_one()
    newest = select(trigger_event.c.id, trigger_event.c.stored_at).where(of_it).order_by(trigger_event.c.id.desc())
    found = connection.execute(newest.limit(1)).first()
    newest_id, newest_at = (None, None) if found is None else found
    return TriggerDetail(_line(line), asset_name, failed_run, events, int(redelivered), newest_id, newest_at)


def encrypted_kwargs(connection: Connection, trigger_id: int) -> str:
    """Return the kwargs of a trigger as they are stored. Raises `NoSuchRow`."""
    found = connection.execute(select(trigger.c.kwargs).where(trigger.c.id == trigger_id)).scalar_one_or_none()
    if found is None:
        raise NoSuchRow("trigger", str(trigger_id))
    return str(found)
