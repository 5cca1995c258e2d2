"""Tasks that wait for a trigger: how they begin to, and each of the ways in which that ends (I8).

A deferral is one transaction: the trigger's row goes in, and the task's row refers to it. So is its end: whatever takes
the task out of ``deferred`` takes ``trigger_id`` from it and ends the trigger, in the transaction that says why. A task
is resumed by the first event of its trigger, in the very transaction that stores the event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal

import msgspec
from sqlalchemy import Connection, Integer, bindparam, exists, func, insert, select, update

from headgate.protocol import marks
from headgate.protocol.messages.dags import CLASSPATH_CHARS_MAX, ID_CHARS_MAX, TaskState, duration_problem
from headgate.protocol.messages.runner import ERROR_CHARS_MAX, KWARGS_BYTES_MAX, FinishedTrigger, FiredEvent
from headgate.protocol.values import encode_value
from headgate.scheduling import states
from headgate.store.db.prepared import Prepared
from headgate.store.db.secrets import Secrets
from headgate.store.db.times import UtcDateTime, bound
from headgate.store.errors import ValueRefused
from headgate.store.tables import asset_watcher, task_instance, trigger, trigger_event
from headgate.store.tasks import task_rows, task_values
from headgate.store.tasks.task_rows import LockedTask
from headgate.store.triggers.dead_letters import storable_text

_C = task_instance.c

FailReason = Literal["trigger_failure", "trigger_timeout", "execution_timeout"]
_TIMEOUT = {"trigger_timeout": "the trigger did not fire in time", "execution_timeout": "the task took too long in all"}


class Deferral(msgspec.Struct, frozen=True):
    """What a task waits for, and where it goes on. ``kwargs`` and ``next_kwargs`` are encoded dicts, in clear."""

    classpath: str
    kwargs: bytes
    next_method: str
    next_kwargs: bytes
    timeout_s: float | None = None


# --- into it -------------------------------------------------------------------------------------

_INSERT_TRIGGER = Prepared(
    insert(trigger)
    .values({name: bindparam(name) for name in ("classpath", "kwargs", "created_date", "queue", "priority")})
    .returning(trigger.c.id)
)


def defer(
    connection: Connection,
    now: datetime,
    secrets: Secrets,
    task_id: int,
    token: str,
    deferral: Deferral,
    xcoms: Mapping[str, bytes],
) -> str | None:
    """Have the running task wait; return the token of its deferral, None where ``token`` is not its own any more.

    Raises `ValueRefused` for what a worker may send and no trigger can have.
    """
    _check(deferral)
    task = task_rows.locked(connection, task_id, token=token, state=TaskState.RUNNING)
    if task is None:
        return None
    task_values.push_xcoms(connection, now, task_id, xcoms)
    return _wait(connection, now, secrets, task, deferral, "deferred", task.deadline)


def _check(deferral: Deferral) -> None:
    if (problem := duration_problem(deferral.timeout_s)) is not None:
        raise ValueRefused(f"the timeout of the deferral {problem}")
    if not 0 < len(deferral.classpath) <= CLASSPATH_CHARS_MAX or not deferral.classpath.isprintable():
        raise ValueRefused(f"the classpath of the trigger must have 1..{CLASSPATH_CHARS_MAX} printable characters")
    if not deferral.next_method.isidentifier() or len(deferral.next_method) > ID_CHARS_MAX:
        raise ValueRefused(f"{deferral.next_method[:60]!a} is not the name of a method")
    # What is longer would be stored, and no runner or worker could be told of it in a frame.
    for name, data in (("kwargs of the trigger", deferral.kwargs), ("next_kwargs", deferral.next_kwargs)):
        if len(data) > KWARGS_BYTES_MAX:
            raise ValueRefused(f"the {name} need {len(data):,} bytes; the limit is {KWARGS_BYTES_MAX:,}")


def start_in_trigger(
    connection: Connection, now: datetime, secrets: Secrets, task_id: int, deferral: Deferral
) -> str | None:
    """Have a task wait that never had a worker in this try; return its token, None where it is not to be started."""
    task = task_rows.locked(connection, task_id, state=TaskState.SCHEDULED)
    if task is None or _has_begun(connection, task_id):
        return None
    deadline = None
    if task.execution_timeout_s is not None:
        deadline = now + timedelta(seconds=task.execution_timeout_s)
    token = _wait(connection, now, secrets, task, deferral, "started_in_trigger", deadline, started_at=now)
    marks.reach("plan.in_trigger")
    return token


_BEGUN = Prepared(select(_C.id).where(_C.id == bindparam("of_id"), _C.started_at.is_not(None)))


def _has_begun(connection: Connection, task_id: int) -> bool:
    return _BEGUN.run(connection, of_id=task_id).fetchone() is not None


def _wait(
    connection: Connection,
    now: datetime,
    secrets: Secrets,
    task: LockedTask,
    deferral: Deferral,
    event: str,
    deadline: datetime | None,
    **times: datetime,
) -> str:
    row = _INSERT_TRIGGER.run(
        connection,
        classpath=deferral.classpath,
        kwargs=secrets.encrypt(deferral.kwargs),
        created_date=bound(connection, now),
        queue=task.queue,  # whoever ran it can run its trigger, and so can whoever is to run it afterwards
        priority=task.priority_weight,
    ).fetchone()
    limits = [] if deferral.timeout_s is None else [now + timedelta(seconds=deferral.timeout_s)]
    limits += [] if deadline is None else [deadline]
    token = task_rows.new_token()
    task_rows.apply(
        connection,
        now,
        task,
        event,
        token=token,
        trigger_id=int(row[0]),
        next_method=deferral.next_method,
        next_kwargs=secrets.encrypt(deferral.next_kwargs),
        event_id=None,
        trigger_timeout=bound(connection, min(limits)) if limits else None,
        deadline=None if deadline is None else bound(connection, deadline),
        **{name: bound(connection, value) for name, value in times.items()},
    )
    return token


# --- out of it, by the trigger -------------------------------------------------------------------

(_EVENT,) = states.of("event")
_RESUME = Prepared(
    update(task_instance)
    .where(_C.trigger_id == bindparam("of_trigger"), task_rows.is_in(TaskState.DEFERRED))
    .values(
        task_rows.effects(_EVENT)
        # The first one of its trigger: where it was stored before and comes again, it has another identity.
        | {
            "event_id": select(func.min(trigger_event.c.id))
            .where(trigger_event.c.trigger_id == bindparam("of_trigger"))
            .scalar_subquery()
        }
    )
)


def take_events(
    connection: Connection, now: datetime, events: Sequence[FiredEvent], waited_for: Collection[int]
) -> None:
    """Have the tasks go on, or end, that wait for these triggers; the events are in the log already.

    An event for which no task waits changes nothing: the task was cleared, or timed out, or has gone on.
    """
    first: dict[int, FiredEvent] = {}
    for event in events:
        if event.trigger_id in waited_for:
            first.setdefault(event.trigger_id, event)
    for trigger_id, event in sorted(first.items()):
        if event.kind != "event":
            _end_task(connection, now, event)
        elif _RESUME.run(connection, of_trigger=trigger_id, now=bound(connection, now)).rowcount:
            task_rows.finish_trigger(connection, now, trigger_id)
            marks.reach("resume.by_event")


def _end_task(connection: Connection, now: datetime, event: FiredEvent) -> None:
    task = task_rows.locked_by_trigger(connection, event.trigger_id)
    if task is None:
        return
    try:
        task_values.push_xcoms(connection, now, task.id, task_values.xcoms_of(event.payload))
    except ValueRefused as error:
        # The event is stored, but the task cannot end as it says: its readers would look for these XComs.
        task_rows.fail(connection, now, task, "ended_failed", "ended_to_retry", str(error))
    else:
        if event.kind == "failed":
            reason = "its trigger ended it with a TaskFailedEvent"
            task_rows.fail(connection, now, task, "ended_failed", "ended_to_retry", reason)
        else:
            task_rows.apply(connection, now, task, f"ended_{event.kind}")
    task_rows.finish_trigger(connection, now, event.trigger_id)
    marks.reach("resume.by_end")


_OWN = Prepared(
    select(trigger.c.id).where(trigger.c.id == bindparam("of_id"), trigger.c.triggerer_id == bindparam("epoch"))
)


def take_ends(
    connection: Connection,
    now: datetime,
    secrets: Secrets,
    epoch: int,
    finished: Sequence[FinishedTrigger],
    waited_for: Collection[int],
) -> frozenset[int]:
    """Have the tasks fail whose trigger failed, or ended without an event: nothing else would ever resume them.

    Return the ids of these triggers. The end of one that ``epoch`` does not own is no end: another supervisor runs it.
    """
    over = set()
    for run in sorted(finished, key=lambda run: run.trigger_id):
        if run.trigger_id not in waited_for or run.outcome == "cancelled":
            continue
        task = task_rows.locked_by_trigger(connection, run.trigger_id)
        if task is None or _OWN.run(connection, of_id=run.trigger_id, epoch=epoch).fetchone() is None:
            continue
        error = run.error if run.outcome == "failed" else "the trigger ended without an event"
        resume_to_fail(connection, now, secrets, task, "trigger_failed", "trigger_failure", error, run.traceback)
        over.add(run.trigger_id)
    return frozenset(over)


def resume_to_fail(
    connection: Connection,
    now: datetime,
    secrets: Secrets,
    task: LockedTask,
    event: str,
    reason: FailReason,
    error: str,
    traceback: str = "",
) -> None:
    """Have a locked task that is deferred go on in ``__fail__``; the worker raises what stands in its next_kwargs."""
    assert task.trigger_id is not None
    error = storable_text(error, ERROR_CHARS_MAX)
    told = {"error": error, "traceback": storable_text(traceback, ERROR_CHARS_MAX), "reason": reason}
    next_kwargs = secrets.encrypt(encode_value(told, where="next_kwargs"))
    task_rows.apply(connection, now, task, event, next_kwargs=next_kwargs, last_error=error)
    task_rows.finish_trigger(connection, now, task.trigger_id)
    marks.reach("resume.to_fail")


# --- out of it, by the clock ---------------------------------------------------------------------

_TIMED_OUT = Prepared(
    task_rows.passing_over(
        select(*task_rows.LOCKED)
        .where(task_rows.is_in(TaskState.DEFERRED), _C.trigger_timeout <= bindparam("now", type_=UtcDateTime()))
        .order_by(_C.trigger_timeout, _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
)


def time_out(connection: Connection, now: datetime, secrets: Secrets, *, limit: int) -> list[int]:
    """Resume up to ``limit`` tasks to fail that have waited for too long; return their ids.

    Those that another is resuming this moment are passed over: they are not late any more.
    """
    rows = _TIMED_OUT.run(connection, now=bound(connection, now), limit=limit).fetchall()
    tasks = [task_rows.locked_task(connection, row) for row in rows]
    for task in tasks:
        is_over = task.deadline is not None and task.deadline <= now
        reason: FailReason = "execution_timeout" if is_over else "trigger_timeout"
        resume_to_fail(connection, now, secrets, task, "timed_out", reason, _TIMEOUT[reason])
    return [task.id for task in tasks]


# --- triggers nothing waits for ------------------------------------------------------------------


def remove_orphans(connection: Connection, now: datetime) -> list[int]:
    """Remove the open triggers that neither a watcher nor a task has; return their ids.

    None comes to be by headgate's own doing: a trigger's row is written, and ended, together with its task's.
    """
    statement = (
        update(trigger)
        .where(
            trigger.c.finished_at.is_(None),
            trigger.c.removed_at.is_(None),
            ~exists().where(asset_watcher.c.trigger_id == trigger.c.id),
            ~exists().where(_C.trigger_id == trigger.c.id),
        )
        .values(removed_at=now)
        .returning(trigger.c.id)
    )
    return sorted(connection.execute(statement).scalars())
