"""The ends of a try: its worker reports an outcome, the worker is lost, or its supervisor is.

Only the worker that runs a task can end it: ``token`` is in the WHERE, and any other transition has given the task
another token or none. A late outcome therefore matches no row, and its XComs are not stored.

Outcomes are stored in groups: one transaction for all that have come in meanwhile, so that a commit is paid once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Integer, bindparam, or_, select, update

from headgate.protocol import marks
from headgate.protocol.messages.dags import NAME_CHARS_MAX, TaskState
from headgate.protocol.messages.queries import StartSignals
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.protocol.messages.signals import SentSignal
from headgate.protocol.messages.steps import (
    Appended,
    Emitted,
    StepDeferred,
    StepFailed,
    StepHandled,
    StepOutcome,
    StepSkipped,
    StepSucceeded,
)
from headgate.scheduling import states
from headgate.scheduling.planning import retry_wait_s
from headgate.store.db.bulk import chunks
from headgate.store.db.faults import blaming
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, leased, reading
from headgate.store.facts import spans
from headgate.store.facts.spans import LastEndName, StepEndName, StepSpan
from headgate.store.ids import Epoch, TaskInstanceId, TryName
from headgate.store.signals import reading as signal_log
from headgate.store.signals import sending, subscriptions
from headgate.store.signals.sending import NewSignal
from headgate.store.tables import dag, dag_run, task_instance, triggerer
from headgate.store.tasks import deferral, elements, poison, stream_steps, task_rows, task_streams, values
from headgate.store.tasks.deferral import Deferral
from headgate.store.tasks.task_rows import LockedTask
from headgate.store.triggers.dead_letters import storable_text

_C = task_instance.c
ADOPTED_MAX = 500  # tasks of one transaction: some tens of milliseconds
HEALTHY_S = 60.0  # an endless task that has run for so long gets its tries back, and is moved without a longer wait
MOVE_WAIT_S = 1.0  # before an endless task begins again elsewhere; doubled with each worker that it loses in a row
MOVE_WAIT_MAX_S = 60.0
LOADED_AGAIN_S = 10.0  # before a DAG file is tried again that was not there, or could not be loaded for a decision


class Adopted(msgspec.Struct, frozen=True):
    """A task taken from a lost supervisor: the try it was in, its new state, and the error if that try has failed."""

    id: TaskInstanceId
    name: TryName
    state: TaskState
    error: str = ""


class OwnedTask(msgspec.Struct, frozen=True):
    """One task that a worker of a supervisor has, as the database sees it.

    If the task of a worker is not among these, has another token, or is ``restarting``, then a user has cleared or
    marked it, and the worker must be ended.
    """

    id: TaskInstanceId
    token: str
    state: TaskState


class WorkerLost(msgspec.Struct, frozen=True):
    """The end of a step that has no outcome: its worker is gone, for this reason.

    ``is_blameless``: because its supervisor leaves; an endless task then begins elsewhere at once.
    """

    reason: str
    is_blameless: bool = False


class NotBegun(msgspec.Struct, frozen=True):
    """The end of a step that no worker has begun, and none will under its token: its try goes on.

    With a ``reason``, for which none can begin it now, it is given to a worker again after `LOADED_AGAIN_S`.
    """

    reason: str = ""


class StepEnd(msgspec.Struct, frozen=True):
    """The end of one step, as it is to be stored. ``token`` is that of the step, ``events`` the ids of those it got.

    ``map_name`` is the name of the instance that it has learned, if any. ``signals`` are sent with the outcome. With a
    ``span`` it is written down when the step was ready and ran.
    """

    id: TaskInstanceId
    token: str
    outcome: StepOutcome | WorkerLost | NotBegun
    events: tuple[int, ...] = ()
    map_name: str | None = None
    signals: tuple[NewSignal, ...] = ()
    span: StepSpan | None = None


class OutcomeVerbs(Verbs):
    """The verbs that end a try, and those by which a step sends signals, and hears of them, before its end."""

    def send_signals(
        self, epoch: Epoch, instance: TaskInstanceId, token: str, signals: Sequence[NewSignal]
    ) -> list[SentSignal] | None:
        """Send signals for a running step; return what each has become, None if the token is not the task's.

        May be repeated, and those that were sent are not sent again. Raises `ValueRefused`.
        """
        sent = self._send_signals(epoch, instance, token, signals)
        sending.note_committed()
        return sent

    @leased
    def _send_signals(
        self, tx: LeasedTx, instance: TaskInstanceId, token: str, signals: Sequence[NewSignal]
    ) -> list[SentSignal] | None:
        if task_rows.locked(tx, instance, token=token, state=TaskState.RUNNING) is None:
            return None
        return sending.send(tx, signals)

    @reading
    def start_signals(self, tx: Tx, instance: TaskInstanceId) -> StartSignals:
        """Return the signals with which a task was started, and those of its start before."""
        return subscriptions.started(tx, instance)

    @reading
    def signal_versions(self, tx: Tx, addresses: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """Return the newest version of each of these keys that there is, by namespace and key."""
        return signal_log.newest_versions(tx, addresses)

    def store_ends(
        self, epoch: Epoch, ends: Sequence[StepEnd], *, healthy_s: float = HEALTHY_S
    ) -> list[TaskState | None]:
        """Store the ends of some steps in one transaction; return the new state of each task, in the same order.

        It is None if the token was not the task's any more: then nothing of the outcome is stored, and a task that was
        cleared meanwhile begins again, because its old worker is done with it. The others are stored all the same.
        An endless task that has lost its worker is moved: it waits for another one, in the same try. After
        ``healthy_s`` seconds with a worker it has all its tries again.

        Raises `ValueRefused` for a value that no task may leave, and `RowsRefused` for one that the database does not
        take. Then nothing is stored: the caller finds that step by halving, and fails its task with the error.
        """
        states = self._store_ends(epoch, ends, healthy_s)
        if TaskState.DEFERRED in states:
            marks.reach("defer.committed")
        if any(isinstance(end.outcome, StepHandled) for end in ends):
            marks.reach("stream.handled_committed")
        return states

    @leased
    def _store_ends(
        self, tx: LeasedTx, ends: Sequence[StepEnd], healthy_s: float = HEALTHY_S
    ) -> list[TaskState | None]:
        left: list[values.XComRow] = []
        # In the order of their ids, as all that lock several tasks do, so that no two of them wait for each other.
        every = sorted(ends, key=lambda end: end.id)
        in_order = [end for end in every if not isinstance(end.outcome, NotBegun)]
        if any(_emitted_by(end) for end in in_order):
            # Those that have emitted are written to first, those with streams next, and these a slice of another
            # supervisor locks.
            for end in in_order:
                task_rows.locked(tx, end.id)
        _store_elements(tx, in_order)
        # Those with streams first, because a slice of another supervisor may wait for these tasks while they run.
        new_states: dict[str, TaskState | None] = {**_go_on_with_streams(tx, in_order)}
        new_states |= _end_well(tx, in_order)
        not_begun = [(end, end.outcome) for end in every if isinstance(end.outcome, NotBegun)]
        new_states |= _return(tx, [(end, {}) for end, how in not_begun if not how.reason])
        new_states |= _return(tx, [(end, _values_of(tx, how.reason)) for end, how in not_begun if how.reason])
        for end in in_order:
            outcome = end.outcome
            assert not isinstance(outcome, NotBegun), "these are returned"
            if isinstance(outcome, WorkerLost):
                new_states[end.token] = _lose_worker(tx, end, outcome, healthy_s)
                continue
            if end.token not in new_states:
                new_states[end.token] = _store_outcome(tx, end, outcome, healthy_s)
            if new_states[end.token] is None:
                _lose_worker(tx, end, WorkerLost("its outcome came too late"))
            else:
                left += values.xcom_rows(tx, end.id, outcome.xcoms)
        values.store_xcoms(tx, left)
        stored = [end for end in in_order if new_states[end.token] is not None]
        _append(tx, stored)
        _name_instances(tx, stored)
        ended: list[tuple[TaskInstanceId, StepSpan, StepEndName | LastEndName]] = [
            (end.id, end.span, spans.stored_name(_name_of(end.outcome), new_states[end.token]))
            for end in stored
            if end.span is not None
        ]
        spans.write(tx, ended)
        # Last, because keys are locked after tasks.
        if signals := [signal for end in stored for signal in end.signals]:
            sending.send(tx, signals)
        marks.reach("outcomes.grouped")
        return [new_states[end.token] for end in ends]

    @leased
    def adopt(self, tx: LeasedTx, *, limit: int = ADOPTED_MAX, healthy_s: float = HEALTHY_S) -> list[Adopted]:
        """Take up to ``limit`` tasks from supervisors that are fenced or have ended; return them.

        Such a supervisor writes nothing more, and its workers die with it; if it is cut off or stopped, only when it is
        back. A task that ran there has failed this try,
        unless it is endless: that is moved. One that was being restarted begins again. Deferred tasks are not adopted:
        their triggers are claimed. Raises `ItemFailed` for one that cannot be taken.
        """
        adopted = []
        lost: list[tuple[TaskInstanceId, StepSpan, StepEndName | LastEndName]] = []
        orphans = tx.passed_over.read("task", limit, partial(_ORPHANS.run, tx.connection))
        for id_, owner, dag_id, run_id, task_id, map_index, *row in orphans:
            error = ""
            with blaming("task", id_):
                task = task_rows.locked_task(tx, tuple(row))
                if task.state is TaskState.RUNNING:
                    error = f"its supervisor (epoch {owner}) is gone, or cut off"
                    task_streams.close(tx, task.id)
                    state = _lose(tx, task, "adopted", WorkerLost(error), healthy_s)
                else:
                    state = task_rows.apply(tx, task, "adopted")
            name = TryName(dag_id, run_id, task_id, task.try_number, map_index)
            adopted.append(Adopted(task.id, name, state, error))
            lost.append((task.id, StepSpan(task.try_number, task.started_at), spans.stored_name("lost", state)))
        spans.write(tx, lost)
        return adopted

    @reading
    def owned(self, tx: Tx, epoch: Epoch) -> list[OwnedTask]:
        """Return the tasks that the workers of an epoch have."""
        rows = _OWNED.run(tx.connection, epoch=epoch).fetchall()
        return [OwnedTask(instance, token, TaskState(state)) for instance, token, state in rows]

    @reading
    def left(self, tx: Tx, epoch: Epoch) -> list[tuple[TaskInstanceId, str]]:
        """Return the tasks that users, or signals, have ended while workers of an epoch had them, with their tokens.

        No worker gets such a task until that one is gone, and its end is stored.
        """
        return [(instance, token) for instance, token in _LEFT.run(tx.connection, epoch=epoch).fetchall()]


def _store_elements(tx: LeasedTx, ends: Sequence[StepEnd]) -> None:
    """Store what steps have emitted whose tasks are still theirs; their rows are locked from here on."""
    for end in ends:
        if (emitted := _emitted_by(end)) is None:
            continue
        task = task_rows.locked(tx, end.id, token=end.token, state=TaskState.RUNNING)
        if task is not None:
            elements.store(tx, task, emitted, is_end=isinstance(end.outcome, StepSucceeded | StepSkipped))


def _emitted_by(end: StepEnd) -> Emitted | None:
    return None if isinstance(end.outcome, WorkerLost | NotBegun) else end.outcome.emitted


def _append(tx: LeasedTx, ends: Sequence[StepEnd]) -> None:
    """Store what steps that went well append to what their tasks are expanded over."""
    found: list[tuple[TaskInstanceId, Appended]] = []
    for end in ends:
        if isinstance(end.outcome, StepSucceeded | StepSkipped | StepHandled) and (some := end.outcome.appended):
            if (own := elements.own_beside(tx, end.id, some.task_id)) is not None:
                found.append((own, some))
    # By id, so that two transactions that append to the same tasks do not deadlock; to each in the order of the ends.
    for own, some in sorted(found, key=lambda one: one[0]):
        elements.append(tx, own, some)


def _go_on_with_streams(tx: LeasedTx, ends: Sequence[StepEnd]) -> dict[str, TaskState]:
    """Store how far steps have come in the streams of their tasks; return the new states of those that go on, by token.

    The streams of all others have ended with their tries.
    """
    streamed = task_streams.among(tx, [end.id for end in ends])
    states_of: dict[str, TaskState] = {}
    for end in ends:
        handled = None if isinstance(end.outcome, WorkerLost | NotBegun) else end.outcome.handled
        if end.id not in streamed and handled is None:
            continue
        task = task_rows.locked(tx, end.id, token=end.token, state=TaskState.RUNNING)
        if task is None:
            continue
        if isinstance(end.outcome, StepHandled):
            states_of[end.token] = stream_steps.handle(tx, task, end.outcome.handled)
        else:
            stream_steps.end(tx, task, handled)
            if (failure := _failure_of(end.outcome)) is not None:
                left = end.events if handled is None else end.events[handled.count :]
                poison.take(tx, task.id, left, len(end.events), failure)
    return states_of


def _failure_of(outcome: StepOutcome | WorkerLost | NotBegun) -> poison.Failure | None:
    """Return why a step has failed; None if it has not, or if its author wants no other try."""
    match outcome:
        case StepFailed(error, traceback, may_retry=True):
            return poison.Failure(error, traceback)
        case WorkerLost(reason):
            return poison.Failure(reason)
        case _:
            return None


def _return(tx: LeasedTx, ends: Sequence[tuple[StepEnd, dict[str, Any]]]) -> dict[str, TaskState | None]:
    """Have the tasks of steps that no worker has begun wait for a worker again; return their new states, by token.

    With each of them stand further columns to set, the same for all.
    """
    (row,) = states.of("returned")
    by = [{"id": end.id, "token": end.token} for end, _ in ends]
    won = task_rows.changed_each(tx, row, by, [columns for _, columns in ends])
    return {
        end.token: row.to if is_won else _lose_worker(tx, end, WorkerLost("it was cleared before it began"))
        for (end, _), is_won in zip(ends, won, strict=True)
    }


def _values_of(tx: LeasedTx, reason: str) -> dict[str, Any]:
    """Return the columns of a task that none can begin now, for this reason."""
    begins_at = bound(tx.connection, tx.now + timedelta(seconds=LOADED_AGAIN_S))
    return {"begins_at": begins_at, "moves": 0, "last_error": storable_text(reason, ERROR_CHARS_MAX)}


def _end_well(tx: LeasedTx, ends: Sequence[StepEnd]) -> dict[str, TaskState | None]:
    """Store the outcomes of those that succeeded or were skipped; return the new states of their tasks, by token."""
    states_of: dict[str, TaskState | None] = {}
    kinds: tuple[tuple[str, type[StepSucceeded | StepSkipped]], ...] = (
        ("succeeded", StepSucceeded),
        ("skipped", StepSkipped),
    )
    for event, kind in kinds:
        (row,) = states.of(event)
        some = [end for end in ends if isinstance(end.outcome, kind)]
        by = [{"id": end.id, "token": end.token} for end in some]
        won = task_rows.changed_each(tx, row, by, [{"last_error": None}] * len(some))
        states_of |= {end.token: row.to if is_won else None for end, is_won in zip(some, won, strict=True)}
    _skip(
        tx,
        [
            (end.id, end.outcome.skips)
            for end in ends
            if isinstance(end.outcome, StepSucceeded) and end.outcome.skips and states_of[end.token] is not None
        ],
    )
    return states_of


def _store_outcome(tx: LeasedTx, end: StepEnd, outcome: StepOutcome, healthy_s: float) -> TaskState | None:
    match outcome:
        case StepFailed():
            return _fail(tx, end, outcome, healthy_s)
        case StepDeferred():
            running = task_rows.locked(tx, end.id, token=end.token, state=TaskState.RUNNING)
            return None if running is None else deferral.defer(tx, running, Deferral.of(outcome))
        case _:
            return None  # it has handled events of a task that is not its any more


def _fail(tx: LeasedTx, end: StepEnd, failure: StepFailed, healthy_s: float) -> TaskState | None:
    task = task_rows.locked(tx, end.id, token=end.token, state=TaskState.RUNNING)
    if task is None:
        return None
    more: dict[str, int] = {}
    if not failure.may_retry:
        task = msgspec.structs.replace(task, tries_max=task.try_number)
    elif task.is_endless and is_healthy(tx, task.started_at, healthy_s):
        more["tries_max"] = max(task.tries_max, task.try_number + task.retries)
        task = msgspec.structs.replace(task, tries_max=more["tries_max"])
    return task_rows.fail(tx, task, "failed", "failed_to_retry", failure.error, **more)


def is_healthy(tx: Tx, started_at: datetime | None, healthy_s: float = HEALTHY_S) -> bool:
    """Return whether an endless task has run for so long that the workers it has lost before do not count."""
    return started_at is not None and (tx.now - started_at).total_seconds() >= healthy_s


def _lose(tx: LeasedTx, task: LockedTask, event: str, lost: WorkerLost, healthy_s: float) -> TaskState:
    """A locked task that ran has lost its worker: its try fails, unless it is endless, and then it is moved."""
    if not task.is_endless:
        return task_rows.fail(tx, task, event, f"{event}_to_retry", lost.reason)
    moves, begins_at = task.moves, None
    if not lost.is_blameless:
        moves = 1 if is_healthy(tx, task.started_at, healthy_s) else moves + 1
        wait_s = retry_wait_s(moves, delay_s=MOVE_WAIT_S, is_exponential=True, delay_max_s=MOVE_WAIT_MAX_S)
        begins_at = bound(tx.connection, tx.now + timedelta(seconds=wait_s))
    error = storable_text(lost.reason, ERROR_CHARS_MAX)
    state = task_rows.apply(tx, task, "moved", moves=moves, begins_at=begins_at, last_error=error)
    _begin_anew(tx, task.id)
    tx.notify()  # other supervisors may take it
    marks.reach("endless.moved")
    return state


def begin_next_try(tx: Tx, instance: TaskInstanceId) -> None:
    """Begin the next try of a task in ``up_for_retry``, whose row is locked; forget what the last one has left."""
    (row,) = states.of("retry_due")
    task_rows.changed(tx, row, {"id": instance})
    _begin_anew(tx, instance)


def _begin_anew(tx: Tx, instance: TaskInstanceId) -> None:
    values.delete_xcoms(tx, instance)
    elements.emit_again(tx, instance)


def _lose_worker(tx: LeasedTx, end: StepEnd, lost: WorkerLost, healthy_s: float = HEALTHY_S) -> TaskState | None:
    task = task_rows.locked(tx, end.id, token=end.token)
    if task is None:
        task_rows.let_go(tx, end.id, end.token)
        return None
    match task.state:
        case TaskState.RUNNING:
            if end.events and poison.is_sought(tx, task.id):
                # One of its events may have ended the worker, and would end each that the task is moved to.
                task = msgspec.structs.replace(task, is_endless=False)
            return _lose(tx, task, "worker_lost", lost, healthy_s)
        case TaskState.RESTARTING:
            return task_rows.apply(tx, task, "restarted")
        case _:
            return None  # deferred: the token is the trigger's


def _name_of(outcome: StepOutcome | WorkerLost | NotBegun) -> StepEndName:
    match outcome:
        case StepSucceeded():
            return "succeeded"
        case StepSkipped():
            return "skipped"
        case StepDeferred():
            return "deferred"
        case StepHandled():
            return "handled"
        case StepFailed():
            return "failed"
        case _:
            return "lost"


def _name_instances(tx: LeasedTx, ends: Sequence[StepEnd]) -> None:
    names = [{"of_id": end.id, "name": storable_text(end.map_name, NAME_CHARS_MAX)} for end in ends if end.map_name]
    if names:
        _NAME.run_many(tx.connection, names)


def _skip(tx: Tx, skips: Sequence[tuple[TaskInstanceId, Collection[str]]]) -> None:
    """Skip the tasks that these name, of their runs; those of a mapped group at the same index alone."""
    (row,) = states.of("upstream_skipped")
    found: set[int] = set()
    for instance, names in skips:
        (skipping,) = tx.connection.execute(select(_C.dag_run_id, _C.map_index).where(_C.id == instance))
        for some in chunks(sorted(set(names))):
            fresh = select(_C.id).where(
                *(_C.dag_run_id == skipping.dag_run_id, _C.map_index == skipping.map_index, _C.task_id.in_(some)),
                *(task_rows.is_in(*sorted(row.from_)), _C.id != instance),
            )
            found.update(tx.connection.execute(fresh).scalars())
    # One after the other, by id, so that two transactions that skip the same tasks do not deadlock.
    for skipped in sorted(found):
        task_rows.changed(tx, row, {"id": skipped})


_ORPHANS = Prepared(
    task_rows.skip_locked(
        select(_C.id, _C.triggerer_id, dag.c.name, dag_run.c.run_id, _C.task_id, _C.map_index, *task_rows.LOCKED)
        .select_from(task_instance.join(dag_run).join(dag).join(triggerer, triggerer.c.id == _C.triggerer_id))
        # IS NOT NULL is implied by the join, but the partial index and the order need it in the text.
        .where(
            _C.triggerer_id.is_not(None), or_(triggerer.c.fenced_at.is_not(None), triggerer.c.stopped_at.is_not(None))
        )
        .order_by(_C.triggerer_id, _C.id)
        .limit(bindparam("limit", type_=Integer()))
    )
)
_NAME = Prepared(update(task_instance).where(_C.id == bindparam("of_id")).values(map_name=bindparam("name")))
_OWNED = Prepared(select(_C.id, _C.token, _C.state).where(_C.triggerer_id == bindparam("epoch")).order_by(_C.id))
_LEFT = Prepared(select(_C.id, _C.old_token).where(_C.old_owner_id == bindparam("epoch")).order_by(_C.id))
