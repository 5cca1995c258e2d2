"""What people and programs look at. Nothing here writes, and no list takes the memory of the whole table."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, func, select

from headgate.store.db.transaction import Clock, read_clock
from headgate.store.tables import (
    asset,
    asset_watcher,
    dead_letter,
    redelivery,
    task_instance,
    trigger,
    trigger_event,
    triggerer,
)
from headgate.store.triggers.leases import TriggererRow, triggerer_row

EVENTS_PER_BATCH_MAX = 100  # each may hold a payload of 1 MiB, so this is about what a reader may need of memory
LIST_ROWS_MAX = 100_000  # watchers and triggers in one list: a hundred supervisors at full capacity


class TriggererLine(TriggererRow, frozen=True):
    """One lease, with how many open triggers and how many tasks it has now."""

    triggers: int = 0
    tasks: int = 0


class WatcherRow(msgspec.Struct, frozen=True):
    """One watcher that was not removed, with the state of its trigger."""

    id: int
    name: str
    asset: str | None
    trigger_id: int
    classpath: str
    queue: str
    created_date: datetime
    triggerer_id: int | None
    failure_count: int
    last_error: str | None
    last_failed_at: datetime | None
    finished_at: datetime | None


class TriggerRow(msgspec.Struct, frozen=True):
    """One trigger that was not removed; ``name`` is its watcher's, or ``trigger-<id>``."""

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


class EventRow(msgspec.Struct, frozen=True):
    """One stored event, its payload encoded by `headgate.protocol.values`; ``redelivered``: how often it came again."""

    id: int
    watcher: str | None
    trigger_id: int
    trigger_run_id: str
    sequence_index: int
    key: str | None
    payload: bytes
    is_last: bool
    stored_at: datetime
    kind: str
    position: int
    redelivered: int


class DeadLetterRow(msgspec.Struct, frozen=True):
    """One event that could not be stored, and why. ``payload_head`` is the beginning of its payload."""

    id: int
    watcher: str | None
    trigger_id: int
    trigger_run_id: str
    sequence_index: int
    key: str | None
    position: int
    payload_head: bytes
    payload_bytes: int
    payload_kept: bool
    reason: str
    stored_at: datetime


def watchers(connection: Connection) -> list[WatcherRow]:
    """Return the watchers, by name."""
    statement = (
        select(
            asset_watcher.c.id,
            asset_watcher.c.name,
            asset.c.name.label("asset"),
            asset_watcher.c.trigger_id,
            trigger.c.classpath,
            trigger.c.queue,
            asset_watcher.c.created_date,
            trigger.c.triggerer_id,
            trigger.c.failure_count,
            trigger.c.last_error,
            trigger.c.last_failed_at,
            trigger.c.finished_at,
        )
        .select_from(asset_watcher.join(trigger).outerjoin(asset))
        .where(asset_watcher.c.removed_at.is_(None))
        .order_by(asset_watcher.c.name)
        .limit(LIST_ROWS_MAX)
    )
    return [WatcherRow(**row._mapping) for row in connection.execute(statement)]


def triggers(connection: Connection) -> list[TriggerRow]:
    """Return the triggers that were not removed, finished ones included, by id."""
    statement = (
        select(
            trigger.c.id,
            asset_watcher.c.name,
            trigger.c.classpath,
            trigger.c.created_date,
            trigger.c.queue,
            trigger.c.triggerer_id,
            trigger.c.failure_count,
            trigger.c.last_error,
            trigger.c.last_failed_at,
            trigger.c.finished_at,
        )
        .select_from(trigger.outerjoin(asset_watcher))
        .where(trigger.c.removed_at.is_(None))
        .order_by(trigger.c.id)
        .limit(LIST_ROWS_MAX)
    )
    rows: list[dict[str, Any]] = [dict(row._mapping) for row in connection.execute(statement)]
    for row in rows:
        row["name"] = row["name"] or f"trigger-{row['id']}"
    return [TriggerRow(**row) for row in rows]


def triggerers(connection: Connection, clock: Clock | None, limit: int) -> list[TriggererLine]:
    """Return the newest ``limit`` leases, living or not, newest first."""
    now = read_clock(connection, clock)
    has_trigger = (
        trigger.c.triggerer_id == triggerer.c.id,
        trigger.c.finished_at.is_(None),
        trigger.c.removed_at.is_(None),
    )
    statement = select(
        triggerer,
        select(func.count()).where(*has_trigger).correlate(triggerer).scalar_subquery().label("triggers"),
        select(func.count())
        .where(task_instance.c.triggerer_id == triggerer.c.id)
        .correlate(triggerer)
        .scalar_subquery()
        .label("tasks"),
    )
    lines = []
    for row in connection.execute(statement.order_by(triggerer.c.id.desc()).limit(limit)):
        fields = dict(row._mapping)
        counts = {name: fields.pop(name) for name in ("triggers", "tasks")}
        lines.append(TriggererLine(**msgspec.structs.asdict(triggerer_row(fields, now)), **counts))
    return lines


def is_or_was_watcher(connection: Connection, name: str) -> bool:
    """Whether any watcher has this name, or had it before it was removed."""
    return (
        connection.execute(select(asset_watcher.c.id).where(asset_watcher.c.name == name).limit(1)).first() is not None
    )


def events(connection: Connection, *, watcher: str | None, after_id: int, limit: int) -> list[EventRow]:
    """Return up to ``limit`` events with greater ids than ``after_id``, by id; of one watcher where it is named."""
    which = trigger_event.c.id > after_id
    if watcher is not None:
        which = and_(which, asset_watcher.c.name == watcher)
    statement = (
        select(
            trigger_event.c.id,
            asset_watcher.c.name.label("watcher"),
            trigger_event.c.trigger_id,
            trigger_event.c.trigger_run_id,
            trigger_event.c.sequence_index,
            trigger_event.c.key,
            trigger_event.c.payload,
            trigger_event.c.is_last,
            trigger_event.c.stored_at,
            trigger_event.c.kind,
            trigger_event.c.position,
            func.coalesce(redelivery.c.count, 0).label("redelivered"),
        )
        .select_from(
            trigger_event.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger_event.c.trigger_id).outerjoin(
                redelivery
            )
        )
        .where(which)
        .order_by(trigger_event.c.id)
        .limit(limit)
    )
    return [EventRow(**row._mapping) for row in connection.execute(statement)]


def dead_letters(connection: Connection, limit: int) -> list[DeadLetterRow]:
    """Return the newest ``limit`` dead letters, newest first."""
    statement = (
        select(
            dead_letter.c.id,
            asset_watcher.c.name.label("watcher"),
            dead_letter.c.trigger_id,
            dead_letter.c.trigger_run_id,
            dead_letter.c.sequence_index,
            dead_letter.c.key,
            dead_letter.c.position,
            dead_letter.c.payload_head,
            dead_letter.c.payload_bytes,
            dead_letter.c.payload_kept,
            dead_letter.c.reason,
            dead_letter.c.stored_at,
        )
        .select_from(dead_letter.outerjoin(asset_watcher, asset_watcher.c.trigger_id == dead_letter.c.trigger_id))
        .order_by(dead_letter.c.id.desc())
        .limit(limit)
    )
    return [DeadLetterRow(**row._mapping) for row in connection.execute(statement)]
