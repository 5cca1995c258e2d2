"""Tasks that wait for a trigger: how a deferral begins, and each of the ways in which it ends (I8).

A deferral is one transaction, which inserts the trigger's row and refers to it in the task's row. So is its end:
whatever takes a task out of ``deferred`` clears its ``trigger_id`` and ends the trigger in the same transaction. A task
is resumed by the first event of its trigger, in the transaction that stores the event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal

import msgspec
from sqlalchemy import Integer, bindparam, exists, func, insert, select, update

from headgate.protocol import marks
from headgate.protocol.messages.dags import (
    CLASSPATH_CHARS_MAX,
    ID_CHARS_MAX,
    StartTrigger,
    TaskState,
    duration_problem,
)
from headgate.protocol.messages.runner import ERROR_CHARS_MAX, KWARGS_BYTES_MAX, FinishedTrigger, FiredEvent
from headgate.protocol.messages.steps import EXECUTION_TIMEOUT_OVER
from headgate.protocol.values import encode_value
from headgate.scheduling import states
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound, read
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, leased, writing
from headgate.store.errors import ValueRefused
from headgate.store.ids import Epoch, TaskInstanceId, TriggerId
from headgate.store.tables import asset_watcher, task_instance, trigger, trigger_event
from headgate.store.tasks import task_rows, values
from headgate.store.tasks.task_rows import LockedTask
from headgate.store.triggers.dead_letters import storable_text

_C = task_instance.c
TIMED_OUT_MAX = 500  # tasks of one transaction: some tens of milliseconds

FailReason = Literal["trigger_failure", "trigger_timeout", "execution_timeout"]
_TIMEOUT = {
    "trigger_timeout": "the trigger had not fired when the timeout of the deferral was over",
    "execution_timeout": f"{EXECUTION_TIMEOUT_OVER}: the trigger that it waited for had not fired",
}


class Deferral(msgspec.Struct, frozen=True):
    """The trigger that a task waits for, and the method in which it resumes.

    ``kwargs`` and ``next_kwargs`` are encoded dicts, in clear.
    """

    classpath: str
    kwargs: bytes
    next_method: str
    next_kwargs: bytes
    timeout_s: float | None = None


class DeferralVerbs(Verbs):
    """The verbs by which deferrals begin and time out. Events and failures of triggers end them in `store_slice`."""

    def defer(
        self,
        epoch: Epoch,
        instance: TaskInstanceId,
        token: str,
        deferral: Deferral,
        *,
        xcoms: Mapping[str, bytes] | None = None,
    ) -> str | None:
        """Defer a running task; return the token of its deferral, None if ``token`` is no longer the task's.

        Raises `ValueRefused` for XComs over the limit, and for a deferral that no trigger can have.
        """
        deferred = self._defer(epoch, instance, token, deferral, xcoms or {})
        marks.reach("defer.committed")
        return deferred

    @leased
    def _defer(
        self, tx: LeasedTx, instance: TaskInstanceId, token: str, deferral: Deferral, xcoms: Mapping[str, bytes]
    ) -> str | None:
        tx.notify()
        _check(deferral)
        task = task_rows.locked(tx, instance, token=token, state=TaskState.RUNNING)
        if task is None:
            return None
        values.push_xcoms(tx, instance, xcoms)
        new_token = _wait(tx, task, deferral, "deferred", task.deadline)
        marks.reach("defer.written")
        return new_token

    @leased
    def time_out(self, tx: LeasedTx, *, limit: int = TIMED_OUT_MAX) -> list[TaskInstanceId]:
        """Resume up to ``limit`` deferred tasks to fail that have waited for too long; return their ids.

        Late is what the database's clock says. Tasks that another transaction is resuming are skipped.
        """
        tx.notify()
        rows = _TIMED_OUT.run(tx.connection, now=bound(tx.connection, tx.now), limit=limit).fetchall()
        tasks = [task_rows.locked_task(tx, row) for row in rows]
        for task in tasks:
            is_over = task.deadline is not None and task.deadline <= tx.now
            reason: FailReason = "execution_timeout" if is_over else "trigger_timeout"
            assert task.trigger_id is not None
            began = read(tx.connection, _CREATED.run(tx.connection, of_id=task.trigger_id).fetchone()[0])
            waited_s = (tx.now - began).total_seconds()
            resume_to_fail(tx, task, "timed_out", reason, _TIMEOUT[reason], waited_s=waited_s)
        return [task.id for task in tasks]

    @writing
    def remove_orphans(self, tx: Tx) -> list[TriggerId]:
        """Remove the open triggers that belong to no watcher and no task; return their ids.

        headgate itself leaves none: a trigger's row is written, and ended, together with its task's.
        """
        tx.notify()
        statement = (
            update(trigger)
            .where(
                trigger.c.finished_at.is_(None),
                trigger.c.removed_at.is_(None),
                ~exists().where(asset_watcher.c.trigger_id == trigger.c.id),
                ~exists().where(_C.trigger_id == trigger.c.id),
            )
            .values(removed_at=tx.now)
            .returning(trigger.c.id)
        )
        return sorted(tx.connection.execute(statement).scalars())


# --- its begin -----------------------------------------------------------------------------------

_INSERT_TRIGGER = Prepared(
    insert(trigger)
    .values({name: bindparam(name) for name in ("classpath", "kwargs", "created_date", "queue", "priority")})
    .returning(trigger.c.id)
)


def _check(deferral: Deferral) -> None:
    if (problem := duration_problem(deferral.timeout_s)) is not None:
        raise ValueRefused(f"the timeout of the deferral {problem}")
    if not 0 < len(deferral.classpath) <= CLASSPATH_CHARS_MAX or not deferral.classpath.isprintable():
        raise ValueRefused(f"the classpath of the trigger must have 1..{CLASSPATH_CHARS_MAX} printable characters")
    if not deferral.next_method.isidentifier() or len(deferral.next_method) > ID_CHARS_MAX:
        raise ValueRefused(f"{deferral.next_method[:60]!a} is not the name of a method")
    # Longer values could be stored, but would not fit into a frame to a runner or a worker.
    for name, data in (("kwargs of the trigger", deferral.kwargs), ("next_kwargs", deferral.next_kwargs)):
        if len(data) > KWARGS_BYTES_MAX:
            raise ValueRefused(f"the {name} need {len(data):,} bytes; the limit is {KWARGS_BYTES_MAX:,}")


def start_in_trigger(tx: Tx, instance: TaskInstanceId, start: StartTrigger) -> bool:
    """Defer a scheduled task to its start trigger, without a worker; return whether that was done.

    Not if its try has begun before: then the task was resumed, and goes to a worker.
    """
    task = task_rows.locked(tx, instance, state=TaskState.SCHEDULED)
    if task is None or _has_begun(tx, instance):
        return False
    deadline = None
    if task.execution_timeout_s is not None:
        deadline = tx.now + timedelta(seconds=task.execution_timeout_s)
    deferral = Deferral(start.classpath, start.kwargs, start.next_method, start.next_kwargs, start.timeout_s)
    _wait(tx, task, deferral, "started_in_trigger", deadline, started_at=tx.now)
    marks.reach("plan.in_trigger")
    return True


_BEGUN = Prepared(select(_C.id).where(_C.id == bindparam("of_id"), _C.started_at.is_not(None)))


def _has_begun(tx: Tx, instance: TaskInstanceId) -> bool:
    return _BEGUN.run(tx.connection, of_id=instance).fetchone() is not None


def _wait(
    tx: Tx, task: LockedTask, deferral: Deferral, event: str, deadline: datetime | None, **times: datetime
) -> str:
    row = _INSERT_TRIGGER.run(
        tx.connection,
        classpath=deferral.classpath,
        kwargs=tx.encrypt(deferral.kwargs),
        created_date=bound(tx.connection, tx.now),
        queue=task.queue,  # supervisors that serve the task's queue can run its trigger, and the task afterwards
        priority=task.priority_weight,
    ).fetchone()
    limits = [] if deferral.timeout_s is None else [tx.now + timedelta(seconds=deferral.timeout_s)]
    limits += [] if deadline is None else [deadline]
    token = task_rows.new_token()
    task_rows.apply(
        tx,
        task,
        event,
        token=token,
        trigger_id=int(row[0]),
        next_method=deferral.next_method,
        next_kwargs=tx.encrypt(deferral.next_kwargs),
        event_id=None,
        trigger_timeout=bound(tx.connection, min(limits)) if limits else None,
        deadline=None if deadline is None else bound(tx.connection, deadline),
        **{name: bound(tx.connection, value) for name, value in times.items()},
    )
    return token


# --- its end, by the trigger ---------------------------------------------------------------------

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


def take_events(tx: Tx, events: Sequence[FiredEvent], waited_for: Collection[int]) -> frozenset[TriggerId]:
    """Resume, or end, the tasks that wait for these triggers; the events are in the log already.

    Return the ids of these triggers. An event for which no task waits changes nothing: the task was cleared, has timed
    out, or was resumed before.
    """
    first: dict[int, FiredEvent] = {}
    over: set[TriggerId] = set()
    for event in events:
        if event.trigger_id in waited_for:
            first.setdefault(event.trigger_id, event)
    for trigger_id, event in sorted(first.items()):
        if event.kind != "event":
            is_over = _end_task(tx, event)
        else:
            is_over = _RESUME.run(tx.connection, of_trigger=trigger_id, now=bound(tx.connection, tx.now)).rowcount > 0
            if is_over:
                task_rows.finish_trigger(tx, trigger_id)
                marks.reach("resume.by_event")
        if is_over:
            over.add(TriggerId(trigger_id))
    return frozenset(over)


def take_refused(tx: Tx, refused: Mapping[int, str], waited_for: Collection[int]) -> frozenset[TriggerId]:
    """Resume to fail the tasks whose trigger fired an event that cannot be stored: there is no other event to come.

    ``refused`` has the reasons by trigger id. Return the ids of these triggers.
    """
    over: set[TriggerId] = set()
    for trigger_id, reason in sorted(refused.items()):
        task = task_rows.locked_by_trigger(tx, trigger_id) if trigger_id in waited_for else None
        if task is not None:
            resume_to_fail(tx, task, "trigger_failed", "trigger_failure", reason)
            over.add(TriggerId(trigger_id))
    return frozenset(over)


def _end_task(tx: Tx, event: FiredEvent) -> bool:
    task = task_rows.locked_by_trigger(tx, event.trigger_id)
    if task is None:
        return False
    try:
        values.push_xcoms(tx, task.id, values.xcoms_of(event.payload))
    except ValueRefused as error:
        # The event is stored, but the task cannot end as it says, because other tasks would miss these XComs.
        task_rows.fail(tx, task, "ended_failed", "ended_to_retry", str(error))
    else:
        if event.kind == "failed":
            reason = "its trigger ended it with a TaskFailedEvent"
            task_rows.fail(tx, task, "ended_failed", "ended_to_retry", reason)
        else:
            task_rows.apply(tx, task, f"ended_{event.kind}")
    task_rows.finish_trigger(tx, event.trigger_id)
    marks.reach("resume.by_end")
    return True


_OWN = Prepared(
    select(trigger.c.id).where(trigger.c.id == bindparam("of_id"), trigger.c.triggerer_id == bindparam("epoch"))
)


def take_ends(tx: LeasedTx, finished: Sequence[FinishedTrigger], waited_for: Collection[int]) -> frozenset[TriggerId]:
    """Resume to fail the tasks whose trigger failed, or ended without an event, because nothing else would.

    Return the ids of these triggers. The end of a trigger that this epoch does not own is ignored: another supervisor
    runs it.
    """
    over: set[TriggerId] = set()
    for run in sorted(finished, key=lambda run: run.trigger_id):
        if run.trigger_id not in waited_for or run.outcome == "cancelled":
            continue
        task = task_rows.locked_by_trigger(tx, run.trigger_id)
        if task is None or _OWN.run(tx.connection, of_id=run.trigger_id, epoch=tx.epoch).fetchone() is None:
            continue
        error = run.error if run.outcome == "failed" else "the trigger ended without an event"
        resume_to_fail(tx, task, "trigger_failed", "trigger_failure", error, run.traceback)
        over.add(TriggerId(run.trigger_id))
    return frozenset(over)


def resume_to_fail(
    tx: Tx,
    task: LockedTask,
    event: str,
    reason: FailReason,
    error: str,
    traceback: str = "",
    *,
    waited_s: float | None = None,
) -> None:
    """Resume a locked deferred task in ``__fail__``: the worker raises the error in its next_kwargs."""
    assert task.trigger_id is not None
    error = storable_text(error, ERROR_CHARS_MAX)
    failure: dict[str, str | float] = {"error": error, "reason": reason}
    failure["traceback"] = storable_text(traceback, ERROR_CHARS_MAX)
    if waited_s is not None:
        failure["waited_s"] = round(waited_s, 3)
    next_kwargs = tx.encrypt(encode_value(failure, where="next_kwargs"))
    task_rows.apply(tx, task, event, next_kwargs=next_kwargs, last_error=error)
    task_rows.finish_trigger(tx, task.trigger_id)
    marks.reach("resume.to_fail")


# --- its end, by the clock -----------------------------------------------------------------------

_CREATED = Prepared(select(trigger.c.created_date).where(trigger.c.id == bindparam("of_id")))

_TIMED_OUT = Prepared(
    task_rows.skip_locked(
        select(*task_rows.LOCKED)
        .where(task_rows.is_in(TaskState.DEFERRED), _C.trigger_timeout <= bindparam("now", type_=UtcDateTime()))
        .order_by(_C.trigger_timeout, _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
)
