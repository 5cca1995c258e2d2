"""Tasks that wait for a trigger: how a deferral begins, and each of the ways in which it ends (I8).

A deferral is one transaction, which inserts the trigger's row and refers to it in the task's row. So is its end:
whatever takes a task out of ``deferred`` clears its ``trigger_id`` and ends the trigger in the same transaction. A task
is resumed by the first event of its trigger, in the transaction that stores the event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

import msgspec
from sqlalchemy import Integer, bindparam, exists, func, select, update

from headgate.protocol import marks
from headgate.protocol.encoded_values import set_items
from headgate.protocol.messages.dags import (
    CLASSPATH_CHARS_MAX,
    ID_CHARS_MAX,
    StartTrigger,
    TaskState,
    duration_problem,
)
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX, FinishedTrigger, FiredEvent
from headgate.protocol.messages.signals import SignalWait
from headgate.protocol.messages.steps import EXECUTION_TIMEOUT_OVER, StepDeferred
from headgate.protocol.messages.task_streams import StreamOptions, stream_problem
from headgate.scheduling import states
from headgate.store.access.tables import ONE
from headgate.store.db.faults import blaming
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound, read
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, acting, leased
from headgate.store.errors import ValueRefused
from headgate.store.ids import TaskInstanceId, TriggerId
from headgate.store.signals import waits
from headgate.store.tables import OPEN_TRIGGER, asset_watcher, task_instance, task_stream, trigger, trigger_event
from headgate.store.tasks import resuming, task_rows, task_streams, values
from headgate.store.tasks.resuming import FailReason
from headgate.store.tasks.task_rows import LockedTask
from headgate.store.triggers import reopening

_C = task_instance.c
TIMED_OUT_MAX = 500  # tasks of one transaction: some tens of milliseconds

_TIMEOUT = {
    "trigger_timeout": "what it waited for had not come when the timeout of the deferral was over",
    "execution_timeout": f"{EXECUTION_TIMEOUT_OVER}: what it waited for had not come",
}


class Deferral(msgspec.Struct, frozen=True):
    """The trigger that a task waits for, and the method in which it resumes.

    ``kwargs`` and ``next_kwargs`` are encoded dicts, in clear. With ``signal`` no supervisor gets the trigger.
    """

    classpath: str
    kwargs: bytes
    next_method: str
    next_kwargs: bytes
    timeout_s: float | None = None
    stream: StreamOptions | None = None
    signal: SignalWait | None = None

    @classmethod
    def of(cls, said: StartTrigger | StepDeferred) -> Deferral:
        """Return the deferral that a DAG, or a step, asks for."""
        shared = (said.classpath, said.kwargs, said.next_method, said.next_kwargs, said.timeout_s, said.stream)
        return cls(*shared, signal=said.signal if isinstance(said, StartTrigger) else None)


class DeferralVerbs(Verbs):
    """The verbs for deferrals that end, or go on, without an event: by the clock, or because a supervisor is gone.

    They begin with the outcome of a step, in `store_ends`. Events and failures of triggers end them in `store_slice`.
    """

    @leased
    def time_out(self, tx: LeasedTx, *, limit: int = TIMED_OUT_MAX) -> list[TaskInstanceId]:
        """Resume up to ``limit`` deferred tasks to fail that have waited for too long; return their ids.

        Late is what the database's clock says. Tasks that another transaction is resuming are skipped. Raises
        `ItemFailed` for one that cannot be resumed.
        """
        tx.notify()
        due = partial(_TIMED_OUT.run, tx.connection, now=bound(tx.connection, tx.now))
        rows = tx.passed_over.read("task", limit, due)
        for row in rows:
            with blaming("task", row[0]):
                _time_out(tx, task_rows.locked_task(tx, row))
        return [row[0] for row in rows]

    @leased
    def begin_due_batches(self, tx: LeasedTx, *, limit: int = TIMED_OUT_MAX) -> list[TaskInstanceId]:
        """Have up to ``limit`` tasks handle what waits in their streams, after the seconds of their batches.

        Return their ids. Late is what the database's clock says. Tasks that are locked are skipped. Raises `ItemFailed`
        for one that cannot go on.
        """
        return task_streams.begin_due_batches(tx, limit)

    @leased
    def reopen_streams(self, tx: LeasedTx) -> list[TriggerId]:
        """Open some triggers again that streams wait for, and whose owners are gone; return them: there may be more."""
        return reopening.reopen(tx)

    @acting
    def remove_orphans(self, tx: Tx) -> list[TriggerId]:
        """Remove the open triggers that belong to no watcher and no task; return their ids.

        headgate itself leaves none: a trigger's row is written, and ended, together with its task's.
        """
        tx.notify()
        statement = (
            update(trigger)
            .where(
                OPEN_TRIGGER,
                ~exists(ONE).where(asset_watcher.c.trigger_id == trigger.c.id),
                ~exists(ONE).where(_C.trigger_id == trigger.c.id),
                ~exists(ONE).where(task_stream.c.trigger_id == trigger.c.id),
            )
            .values(removed_at=tx.now)
            .returning(trigger.c.id)
        )
        removed = sorted(tx.connection.execute(statement).scalars())
        tx.act("triggers orphans", "triggers", after={"removed": len(removed)}, changed=bool(removed))
        return removed


# --- its begin -----------------------------------------------------------------------------------


def _check(deferral: Deferral) -> None:
    if deferral.stream is not None and (problem := stream_problem(deferral.stream)) is not None:
        raise ValueRefused(f"the stream of the deferral: {problem}")
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


def defer(tx: LeasedTx, task: LockedTask, deferral: Deferral) -> TaskState:
    """Defer a locked task that runs; return its new state: ``scheduled`` if events of its stream wait already.

    Raises `ValueRefused` for a deferral that no trigger can have.
    """
    _check(deferral)
    tx.notify()
    state = _wait(tx, task, deferral, "deferred", task.deadline)
    marks.reach("defer.written")
    return state


def start_in_trigger(tx: Tx, instance: TaskInstanceId, start: StartTrigger) -> TaskState | None:
    """Defer a scheduled task to its start trigger, without a worker; return its new state as `defer` does.

    Return None if its try has begun before: then the task was resumed, and goes to a worker. So does an instance of a
    mapped task that has no value any more: there its author sees what has become of the values.
    """
    task = task_rows.locked(tx, instance, state=TaskState.SCHEDULED)
    if task is None or _has_begun(tx, instance):
        return None
    said = Deferral.of(start)
    if start.own is not None:
        value = values.value_of_instance(tx, instance, start.own.source)
        if value is None:
            return None
        said = msgspec.structs.replace(said, kwargs=set_items(said.kwargs, dict.fromkeys(start.own.names, value)))
    deadline = None
    if task.execution_timeout_s is not None:
        deadline = tx.now + timedelta(seconds=task.execution_timeout_s)
    state = _wait(tx, task, said, "started_in_trigger", deadline, started_at=tx.now)
    marks.reach("plan.in_trigger")
    return state


_BEGUN = Prepared(select(_C.id).where(_C.id == bindparam("of_id"), _C.started_at.is_not(None)))


def _has_begun(tx: Tx, instance: TaskInstanceId) -> bool:
    return _BEGUN.run(tx.connection, of_id=instance).fetchone() is not None


def _wait(
    tx: Tx, task: LockedTask, deferral: Deferral, event: str, deadline: datetime | None, **times: datetime
) -> TaskState:
    if deferral.signal is not None:
        trigger_id = task_rows.insert_trigger(tx, task, deferral.classpath, deferral.kwargs, queue=waits.QUEUE)
        waits.begin(tx, task.dag_run_id, trigger_id, deferral.signal)
    elif deferral.stream is None:
        trigger_id = task_rows.insert_trigger(tx, task, deferral.classpath, deferral.kwargs)
    else:
        options, timeout_s = deferral.stream, deferral.timeout_s
        trigger_id = task_streams.begin(tx, task, deferral.classpath, deferral.kwargs, options, timeout_s)
    state = task_rows.apply(
        tx,
        task,
        event,
        token=task_rows.new_token(),
        trigger_id=trigger_id,
        next_method=deferral.next_method,
        next_kwargs=tx.encrypt(deferral.next_kwargs),
        event_id=None,
        trigger_timeout=task_rows.trigger_timeout(tx, tx.now, deferral.timeout_s, deadline),
        deadline=None if deadline is None else bound(tx.connection, deadline),
        **{name: bound(tx.connection, value) for name, value in times.items()},
    )
    if deferral.stream is None:
        return state
    return task_streams.go_on(tx, task.id)


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
    out, or was resumed before. Raises `ItemFailed` for a trigger whose task cannot take its event.
    """
    first: dict[int, FiredEvent] = {}
    over: set[TriggerId] = set()
    for event in events:
        if event.trigger_id in waited_for:
            first.setdefault(event.trigger_id, event)
    for trigger_id, event in sorted(first.items()):
        with blaming("trigger", trigger_id):
            if take_event(tx, event):
                over.add(TriggerId(trigger_id))
    return frozenset(over)


def take_event(tx: Tx, event: FiredEvent) -> bool:
    """Resume, or end, the task that waits for the event's trigger; return whether one does."""
    if event.kind != "event":
        return _end_task(tx, event)
    now = bound(tx.connection, tx.now)
    is_over: bool = _RESUME.run(tx.connection, of_trigger=event.trigger_id, now=now).rowcount > 0
    if is_over:
        task_rows.finish_trigger(tx, event.trigger_id)
        marks.reach("resume.by_event")
    return is_over


def take_refused(tx: Tx, refused: Mapping[int, str], waited_for: Collection[int]) -> frozenset[TriggerId]:
    """Resume to fail the tasks whose trigger fired an event that cannot be stored: there is no other event to come.

    ``refused`` has the reasons by trigger id. Return the ids of these triggers.
    """
    over: set[TriggerId] = set()
    for trigger_id, reason in sorted(refused.items()):
        task = task_rows.locked_by_trigger(tx, trigger_id) if trigger_id in waited_for else None
        if task is not None:
            resuming.resume_to_fail(tx, task, "trigger_failed", "trigger_failure", reason)
            over.add(TriggerId(trigger_id))
    return frozenset(over)


def _end_task(tx: Tx, event: FiredEvent) -> bool:
    task = task_rows.locked_by_trigger(tx, event.trigger_id)
    if task is None:
        return False
    resuming.end_task(tx, task, event.kind, event.payload)
    return True


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
        if task is None or not task_streams.is_own(tx, run.trigger_id):
            continue
        error = run.error if run.outcome == "failed" else "the trigger ended without an event"
        resuming.resume_to_fail(tx, task, "trigger_failed", "trigger_failure", error, run.traceback)
        over.add(TriggerId(run.trigger_id))
    return frozenset(over)


# --- its end, by the clock -----------------------------------------------------------------------


def _time_out(tx: Tx, task: LockedTask) -> None:
    is_over = task.deadline is not None and task.deadline <= tx.now
    reason: FailReason = "execution_timeout" if is_over else "trigger_timeout"
    waited_s = _waited_s(tx, task)
    task_streams.close(tx, task.id)
    resuming.resume_to_fail(tx, task, "timed_out", reason, _TIMEOUT[reason], waited_s=waited_s)


def _waited_s(tx: Tx, task: LockedTask) -> float | None:
    stream = task_streams.locked(tx, task.id)
    if stream is not None and stream.trigger_id == task.trigger_id:
        return stream.timeout_s  # its trigger is older than this wait
    began = read(tx.connection, _CREATED.run(tx.connection, of_id=task.trigger_id).fetchone()[0])
    return (tx.now - began).total_seconds()


_CREATED = Prepared(select(trigger.c.created_date).where(trigger.c.id == bindparam("of_id")))

_TIMED_OUT = Prepared(
    task_rows.skip_locked(
        select(*task_rows.LOCKED)
        .where(task_rows.is_in(TaskState.DEFERRED), _C.trigger_timeout <= bindparam("now", type_=UtcDateTime()))
        .order_by(_C.trigger_timeout, _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
)
