"""Who may run which trigger: epochs, fencing, and claims (I10).

A supervisor that registers gets an epoch. Every transaction that writes on its behalf begins with `hold`,
which finds the epoch alive *and keeps it so until the transaction ends*: fencing needs the very row that
`hold` has locked. So a fenced epoch never commits anything any more, and a fencing never happens in the middle
of a transaction.

No supervisor waits for another here. `fence` passes over a triggerer whose row is locked (it is writing this very
moment: ask again later), so a supervisor that was stopped in the middle of a transaction holds up no other,
and two that suspect each other cannot deadlock. `claim` passes over triggers that another is claiming. On
SQLite there is one writer at a time, and none of this can happen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Update,
    and_,
    bindparam,
    exists,
    false,
    func,
    insert,
    null,
    or_,
    select,
    union_all,
    update,
)

from headgate.scheduling.names import TryName
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.secrets import Secrets
from headgate.store.db.times import DatabaseNow, UtcDateTime, bound, read
from headgate.store.errors import BadKey, LeaseLost
from headgate.store.tables import asset_watcher, dag, dag_run, task_instance, trigger, triggerer

SILENCE_MAX_S = 30.0  # a triggerer whose heartbeat is older is taken for gone
Clock = Callable[[], datetime]
ToRun = tuple[int, str | None, str, str, str, int, int | None]  # id, watcher, classpath, kwargs, queue, failures, asset


class TriggererRow(msgspec.Struct, frozen=True):
    """One supervisor's lease. ``id`` is its epoch; ``heartbeat_age_s`` is by the database's clock."""

    id: int
    hostname: str
    pid: int
    machine: str
    process_started: float
    capacity: int
    queues: tuple[str, ...]
    started_at: datetime
    latest_heartbeat: datetime
    heartbeat_age_s: float
    stopped_at: datetime | None = None
    fenced_at: datetime | None = None
    workers: int = 0


class ClaimedTrigger(msgspec.Struct, frozen=True, gc=False):
    """One trigger a supervisor has to run.

    ``name`` is its watcher's or that of the ``task`` that waits for it, else ``trigger-<id>``. ``kwargs`` are in clear,
    as encoded by `headgate.protocol.values`; None where they cannot be decrypted, and then ``error`` says why.
    """

    id: int
    name: str
    classpath: str
    kwargs: bytes | None
    queue: str
    failure_count: int
    error: str = ""
    task: TryName | None = None


class Poll(msgspec.Struct, frozen=True):
    """What changed for a supervisor: its triggers that a user removed, and whether any trigger can be claimed.

    ``ended`` are its triggers for which nothing waits any more, though nobody has removed them: their task has gone on,
    or has timed out. Those that have just fired, and whose own end is on its way here, are among them.
    """

    removed: list[int]
    claimable: bool
    ended: list[int] = []


_NOW = Prepared(select(DatabaseNow()))


def read_clock(connection: Connection, clock: Clock | None) -> datetime:
    """Return the time of the database's clock, or of the one the store was given for a simulation."""
    if clock is not None:
        return clock().astimezone(UTC)
    return read(connection, _NOW.run(connection).fetchone()[0])


# --- epochs --------------------------------------------------------------------------------------


def _alive() -> ColumnElement[bool]:
    return and_(triggerer.c.fenced_at.is_(None), triggerer.c.stopped_at.is_(None))


_HOLD = Prepared(select(DatabaseNow()).where(triggerer.c.id == bindparam("epoch"), _alive()).with_for_update(read=True))


def hold(connection: Connection, epoch: int, clock: Clock | None) -> datetime:
    """Keep ``epoch`` from being fenced until the transaction ends; return the time. Raises `LeaseLost`.

    The lock is FOR SHARE, which the UPDATE of a fencing has to respect; FOR KEY SHARE it would not.
    """
    row = _HOLD.run(connection, epoch=epoch).fetchone()
    if row is None:
        raise LeaseLost(epoch)
    return read(connection, row[0]) if clock is None else clock().astimezone(UTC)


# FOR NO KEY UPDATE: it has to wait for the FOR SHARE of `hold`, and foreign keys need not wait for it.
_OUTWAIT = Prepared(
    select(triggerer.c.id).where(triggerer.c.id == bindparam("epoch"), _alive()).with_for_update(key_share=True)
)


def outwait(connection: Connection, epoch: int) -> None:
    """Wait until no other transaction of ``epoch`` is under way: what comes next sees all that they have committed.

    A COMMIT may be with the server for long after its connection was cut, waiting for a disk or a standby, and until it
    is done nobody sees what it did. It keeps the row that `hold` has locked, though. One that takes longer than
    the limit on waiting for locks raises, as `DatabaseAway`; raises `LeaseLost`.
    """
    if _OUTWAIT.run(connection, epoch=epoch).fetchone() is None:
        raise LeaseLost(epoch)


_REGISTER = Prepared(
    insert(triggerer)
    .values(
        {
            name: bindparam(name)
            for name in (
                *("hostname", "pid", "machine", "process_started"),
                *("capacity", "queues", "workers", "started_at", "latest_heartbeat"),
            )
        }
    )
    .returning(triggerer.c.id)
)


def register(
    connection: Connection,
    clock: Clock | None,
    *,
    hostname: str,
    pid: int,
    machine: str,
    process_started: float,
    capacity: int,
    queues: Sequence[str],
    workers: int,
) -> int:
    """Begin a lease; return its epoch, which no other supervisor ever had or will have."""
    now = bound(connection, read_clock(connection, clock))
    row = _REGISTER.run(
        connection,
        hostname=hostname,
        pid=pid,
        machine=machine,
        process_started=process_started,
        capacity=capacity,
        queues=",".join(queues),
        workers=workers,
        started_at=now,
        latest_heartbeat=now,
    ).fetchone()
    return int(row[0])


_BEAT = Prepared(
    update(triggerer)
    .where(triggerer.c.id == bindparam("epoch"), _alive())
    .values(latest_heartbeat=func.coalesce(bindparam("now", type_=UtcDateTime()), DatabaseNow()))
)


def beat(connection: Connection, epoch: int, clock: Clock | None) -> None:
    """Renew a lease. Raises `LeaseLost`. One statement: it is its own check."""
    now = None if clock is None else bound(connection, clock())
    if _BEAT.run(connection, epoch=epoch, now=now).rowcount != 1:
        raise LeaseLost(epoch)


def end(connection: Connection, epoch: int, clock: Clock | None) -> None:
    """End a lease and give up its triggers. Ending it again does nothing; raises `LeaseLost` when fenced."""
    now = read_clock(connection, clock)
    statement = update(triggerer).where(triggerer.c.id == epoch, _alive()).values(stopped_at=now)
    if connection.execute(statement).rowcount == 1:
        connection.execute(update(trigger).where(trigger.c.triggerer_id == epoch).values(triggerer_id=None))
        return
    stopped = select(triggerer.c.id).where(triggerer.c.id == epoch, triggerer.c.stopped_at.is_not(None))
    if connection.execute(stopped).first() is None:
        raise LeaseLost(epoch)


_LIVE = Prepared(select(DatabaseNow(), *triggerer.c).where(_alive()).order_by(triggerer.c.id))


def live(connection: Connection, clock: Clock | None) -> list[TriggererRow]:
    """Return the leases that are neither ended nor fenced, by epoch. One statement."""
    found = []
    for now, *row in _LIVE.run(connection).fetchall():
        fields = dict(zip(triggerer.c.keys(), row, strict=True))
        for name in ("started_at", "latest_heartbeat"):  # of those that are alive the other times are null
            fields[name] = read(connection, fields[name])
        found.append(triggerer_row(fields, read(connection, now) if clock is None else clock().astimezone(UTC)))
    return found


def triggerer_row(fields: Mapping[str, Any], now: datetime) -> TriggererRow:
    """Return a row of the table ``triggerer`` as seen at the time ``now`` of the same clock."""
    told: dict[str, Any] = dict(fields)
    told["queues"] = tuple(queue for queue in told["queues"].split(",") if queue)
    told["heartbeat_age_s"] = (now - told["latest_heartbeat"]).total_seconds()
    return TriggererRow(**told)


def fence(
    connection: Connection, epoch: int, clock: Clock | None, *, silence_max_s: float, dead: Sequence[int]
) -> list[int]:
    """Fence those silent for longer than ``silence_max_s`` by the database's clock, and those named in ``dead``.

    Never ``epoch`` itself, and none that is in the middle of a transaction: that one is left for the next
    time. Returns the epochs that are fenced now; raises `LeaseLost` when the caller's own is.
    """
    now = hold(connection, epoch, clock)
    silent = triggerer.c.latest_heartbeat < now - timedelta(seconds=silence_max_s)
    candidates = (
        select(triggerer.c.id)
        .where(triggerer.c.id != epoch, _alive(), or_(silent, triggerer.c.id.in_(dead)))
        .order_by(triggerer.c.id)
        .with_for_update(skip_locked=True, key_share=True)
    )
    fenced = list(connection.execute(candidates).scalars())
    for ids in chunks(fenced):
        connection.execute(update(triggerer).where(triggerer.c.id.in_(ids)).values(fenced_at=now))
    return fenced


def fence_silent(connection: Connection, now: datetime, silence_max_s: float) -> list[int]:
    """Fence those silent for longer than ``silence_max_s``, for a user, who has no epoch; return which.

    One that is in the middle of a transaction is waited for: whether it has renewed its lease is known then.
    """
    silent = triggerer.c.latest_heartbeat < now - timedelta(seconds=silence_max_s)
    statement = update(triggerer).where(_alive(), silent).values(fenced_at=now).returning(triggerer.c.id)
    return sorted(connection.execute(statement).scalars())


# --- claims --------------------------------------------------------------------------------------


def _claimable(queues: Sequence[str]) -> ColumnElement[bool]:
    # "Its owner is known to be gone", never "its owner is not among the living": PostgreSQL looks at a row
    # again when another claim got ahead of this one, and an owner that registered meanwhile is unknown to the
    # snapshot. Unknown must mean alive.
    gone = select(triggerer.c.id).where(or_(triggerer.c.fenced_at.is_not(None), triggerer.c.stopped_at.is_not(None)))
    return and_(
        trigger.c.finished_at.is_(None),
        trigger.c.removed_at.is_(None),
        or_(false(), *[trigger.c.queue == queue for queue in queues]),
        or_(trigger.c.triggerer_id.is_(None), trigger.c.triggerer_id.in_(gone)),
    )


def _claim_statement(queues: Sequence[str]) -> Update:
    # In a WITH of its own PostgreSQL looks for the candidates once, whatever its plan is; within the UPDATE it might
    # look again and again, and lock more than ``limit`` of them.
    candidates = (
        select(trigger.c.id)
        .where(_claimable(queues))
        .order_by(trigger.c.priority.desc(), trigger.c.id)
        .limit(bindparam("limit", type_=Integer()))
        .with_for_update(skip_locked=True, key_share=True, of=trigger)
        .cte("candidates")
    )
    return update(trigger).where(trigger.c.id.in_(select(candidates.c.id))).values(triggerer_id=bindparam("epoch"))


@cache
def _claim(queues: tuple[str, ...]) -> Prepared:
    return Prepared(_claim_statement(queues).returning(trigger.c.id))


# The columns of `ToRun`. Not read by the RETURNING of the claim: there SQLite takes a subquery for a constant.
_OWNED = (
    select(
        trigger.c.id,
        asset_watcher.c.name,
        trigger.c.classpath,
        trigger.c.kwargs,
        trigger.c.queue,
        trigger.c.failure_count,
        asset_watcher.c.asset_id,
    )
    .select_from(trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id))
    .where(
        trigger.c.triggerer_id == bindparam("epoch"), trigger.c.finished_at.is_(None), trigger.c.removed_at.is_(None)
    )
    .order_by(trigger.c.id)
)
_CLAIMED = Prepared(_OWNED)
_CLAIMED_BETWEEN = Prepared(_OWNED.where(trigger.c.id.between(bindparam("first"), bindparam("last"))))


def claim(connection: Connection, epoch: int, clock: Clock | None, *, limit: int, queues: Sequence[str]) -> list[ToRun]:
    """Take up to ``limit`` claimable triggers of these queues, by priority and age; return their rows."""
    hold(connection, epoch, clock)
    ids = {id_ for (id_,) in _claim(tuple(queues)).run(connection, epoch=epoch, limit=limit).fetchall()}
    if not ids:
        return []
    owned = _CLAIMED_BETWEEN.run(connection, epoch=epoch, first=min(ids), last=max(ids)).fetchall()
    return [row for row in owned if row[0] in ids]


def claimed(connection: Connection, epoch: int) -> list[ToRun]:
    """Return the rows of the triggers ``epoch`` owns and should be running."""
    return _CLAIMED.run(connection, epoch=epoch).fetchall()


# Asked apart, and only where a trigger is no watcher's: most claims are of watchers, and have no more columns for it.
_TASKS = Prepared(
    select(
        task_instance.c.trigger_id,
        dag.c.name,
        dag_run.c.run_id,
        task_instance.c.task_id,
        task_instance.c.try_number,
    )
    .select_from(
        task_instance.join(dag_run, dag_run.c.id == task_instance.c.dag_run_id).join(dag, dag.c.id == dag_run.c.dag_id)
    )
    .where(
        task_instance.c.trigger_id.is_not(None),
        task_instance.c.trigger_id.between(bindparam("first"), bindparam("last")),
    )
)


def tasks_of(connection: Connection, rows: Sequence[ToRun]) -> dict[int, TryName]:
    """Return the tries that wait for triggers of `claim` or `claimed`, by the trigger's id."""
    ids = {row[0] for row in rows if row[1] is None}
    if not ids:
        return {}
    found = _TASKS.run(connection, first=min(ids), last=max(ids)).fetchall()
    return {
        id_: TryName(sys.intern(dag_id), sys.intern(run_id), sys.intern(task_id), try_number)
        for id_, dag_id, run_id, task_id, try_number in found
        if id_ in ids
    }


def decrypted(row: ToRun, secrets: Secrets, tasks: Mapping[int, TryName]) -> ClaimedTrigger:
    """Return the trigger of a row of `claim` or `claimed`; one that no key decrypts says so and stands alone (I9)."""
    id_, name, classpath, encrypted, queue, failure_count, _ = row
    kwargs, reason = None, ""
    try:
        kwargs = secrets.decrypt(encrypted)
    except BadKey as error:
        reason = str(error)
    # Many triggers have few classes and queues, and a supervisor holds them for as long as it runs.
    classpath, queue = sys.intern(classpath), sys.intern(queue)
    task = None if name is not None else tasks.get(id_)
    name = name or (f"trigger-{id_}" if task is None else task.task)
    return ClaimedTrigger(id_, name, classpath, kwargs, queue, failure_count, reason, task)


@cache
def _look(queues: tuple[str, ...]) -> Prepared:
    mine = trigger.c.triggerer_id == bindparam("epoch")
    over = or_(trigger.c.removed_at.is_not(None), trigger.c.finished_at.is_not(None))
    owned = select(trigger.c.id, trigger.c.removed_at.is_not(None)).where(mine, over)
    claimable = exists(select(trigger.c.id).where(_claimable(queues)))
    return Prepared(union_all(owned, select(null(), null()).where(claimable)))


def look(connection: Connection, epoch: int, queues: Sequence[str]) -> Poll:
    """Return what changed for ``epoch``, in one statement: it is asked whenever somebody seems to have written."""
    rows = _look(tuple(queues)).run(connection, epoch=epoch).fetchall()
    owned = sorted((id_, bool(is_removed)) for id_, is_removed in rows if id_ is not None)
    return Poll(
        removed=[id_ for id_, is_removed in owned if is_removed],
        claimable=len(owned) < len(rows),
        ended=[id_ for id_, is_removed in owned if not is_removed],
    )


@cache
def _count(queues: tuple[str, ...]) -> Prepared:
    return Prepared(select(func.count()).select_from(trigger).where(_claimable(queues)))


def count_claimable(connection: Connection, queues: Sequence[str]) -> int:
    """Return how many triggers of these queues could be claimed."""
    return int(_count(tuple(queues)).run(connection).fetchone()[0])


def release(connection: Connection, epoch: int, clock: Clock | None, ids: Sequence[int]) -> None:
    """Give up these triggers; those that ``epoch`` does not own are left alone."""
    hold(connection, epoch, clock)
    for some in chunks(sorted(ids)):
        mine = and_(trigger.c.id.in_(some), trigger.c.triggerer_id == epoch)
        connection.execute(update(trigger).where(mine).values(triggerer_id=None))
