"""Streams of tasks: how a task begins to take many events of one trigger, goes on with them, and ends (I20, I21).

The stream of a task is the events of one trigger, in the order of their ids, which is that of their commits: the
trigger runs in one supervisor at a time (`headgate.store.triggers.by_hand` says why that is enough). A row of
``task_stream`` has the place that the task has come to (``handled_to``), the state it left there, and the trigger. The
task's own row refers to the trigger only while it is deferred; between two waits it handles events, and the trigger
runs on::

    deferred --events wait--> scheduled -> running --handled, no more wait--> deferred
                                 ^            |
                                 `------------'  handled, more wait

**A stream goes on.** If a try fails its trigger is ended, and the row of the stream stays. The next deferral with a
stream gives the same trigger its new class and kwargs and opens it again, so that the keys of events stay unique over
all tries, and `last_event()` returns the newest of them all. That waits until the owner of the trigger has let it go
(``reopens``): so a stream never has two runs at once, and whatever a run reports late meets a trigger that is over.

**Order of locks**: task, stream, trigger, as in all transactions; several tasks in the order of their ids. What is in
the database decides, and not what a caller has just stored: a slice that is stored twice changes nothing the second
time. A slice locks the task even if it runs: either the end of its step sees the events, or the slice sees the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import Integer, bindparam, delete, func, insert, literal_column, null, select, update

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    FinishedTrigger,
    FiredEvent,
)
from headgate.protocol.messages.task_streams import StreamOptions
from headgate.scheduling.task_streams import decide
from headgate.store.db.bulk import Kind, find
from headgate.store.db.faults import blaming
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import UtcDateTime, bound, read
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.ids import TaskInstanceId, TriggerId
from headgate.store.streams import absorbing
from headgate.store.streams.rows import EVENTS as EVENTS
from headgate.store.streams.rows import EVENTS_BEHIND as EVENTS_BEHIND
from headgate.store.streams.rows import Stream as Stream
from headgate.store.streams.rows import locked as locked
from headgate.store.streams.rows import read_by_trigger as read_by_trigger
from headgate.store.streams.rows import read_of as read_of
from headgate.store.tables import OPEN_TRIGGER, dead_letter, task_instance, task_stream, trigger, trigger_event
from headgate.store.tasks import resuming, task_rows
from headgate.store.tasks.task_rows import LockedTask
from headgate.store.triggers import reopening
from headgate.store.triggers.dead_letters import storable_text

_S = task_stream.c
_E = trigger_event.c
NO_END = "the event by which its trigger ended the task is a dead letter, because another event has its key"

_OF_TASK = Kind(task_stream, ("task_instance_id",))


def among(tx: Tx, instances: Iterable[TaskInstanceId]) -> frozenset[TaskInstanceId]:
    """Return those of these tasks that have a stream."""
    rows = [(instance,) for instance in instances]
    return frozenset(row[0] for row in find(tx.connection, _OF_TASK, rows, returning=("task_instance_id",)))


# --- its begin -----------------------------------------------------------------------------------


def begin(
    tx: Tx, task: LockedTask, classpath: str, kwargs: bytes, options: StreamOptions, timeout_s: float | None
) -> TriggerId:
    """Have a locked task begin its stream, or go on with it in a new try; return its trigger.

    The trigger of one that goes on is changed, and opened again as soon as no supervisor has it any more. One of whose
    messages an event was refused in an earlier try does not go on before the letter is resolved: the broker does not
    deliver the message again, and the task would end without it.
    """
    chosen = {
        "contract": options.contract,
        "batch_count": options.count,
        "batch_s": options.seconds,
        "ahead": options.ahead,
        "poison": options.poison,
        "elements": options.elements,
        "timeout_s": timeout_s,
    }
    stream = locked(tx, task.id)
    if stream is None:
        trigger_id = task_rows.insert_trigger(tx, task, classpath, kwargs)
        row = {"task_instance_id": task.id, "trigger_id": trigger_id, **chosen}
        tx.connection.execute(insert(task_stream).values(row))
        return trigger_id
    task_rows.finish_trigger(tx, stream.trigger_id)  # it is over already, with the try before
    again = {"classpath": classpath, "kwargs": tx.encrypt(kwargs)}
    where = {"queue": task.queue, "priority": task.priority_weight}
    tx.connection.execute(update(trigger).where(trigger.c.id == stream.trigger_id).values(**again, **where))
    fresh: dict[str, Any] = dict.fromkeys(("ended_as", "ended_error", "ended_traceback", "due_at"))
    letter = stream.refused_letter
    if letter is not None and _OPEN_LETTER.run(tx.connection, of_letter=letter).fetchone() is None:
        letter = None
    if letter is not None:
        fresh |= {"ended_as": "failed", "ended_error": UNRESOLVED.format(letter=letter)}
    of_task = update(task_stream).where(_S.task_instance_id == task.id)
    tx.connection.execute(of_task.values(**chosen, **fresh, refused_letter=letter, reopens=letter is None))
    reopening.reopen(tx, [stream.trigger_id])
    return stream.trigger_id


UNRESOLVED = (
    "an event of its stream could not be stored, and is dead letter {letter}: before the task goes on, redrive it, "
    "which puts it at the end of the stream, or discard it"
)
_OPEN_LETTER = Prepared(
    select(dead_letter.c.id).where(
        dead_letter.c.id == bindparam("of_letter"), dead_letter.c.state == literal_column("'open'")
    )
)


# --- what it does next ---------------------------------------------------------------------------


class _Waiting(NamedTuple):
    """The events that are not handled, no more than were asked for: their number, and the first and the last time."""

    number: int
    first_at: datetime | None
    last_at: datetime | None


_some = (
    select(_E.id, _E.stored_at)
    .where(*EVENTS_BEHIND)
    .order_by(_E.id)
    .limit(bindparam("wanted", type_=Integer()))
    .subquery()
)
_WAITING = Prepared(select(func.count(), func.min(_some.c.stored_at), func.max(_some.c.stored_at)))


def _waiting(tx: Tx, stream: Stream, wanted: int) -> _Waiting:
    row = _WAITING.run(tx.connection, **stream.behind, wanted=wanted).fetchone()
    times = (None if moment is None else read(tx.connection, moment) for moment in row[1:])
    return _Waiting(int(row[0]), *times)


def settle(tx: Tx, task: LockedTask, stream: Stream) -> TaskState:
    """Have a locked task that waits, or whose step has handled its events, go on as its stream says.

    Return its new state. A task in another state, which looks at its stream later, is left as it is.
    """
    if task.state not in (TaskState.DEFERRED, TaskState.RUNNING):
        return task.state
    if stream.elements is not None and task.state is TaskState.DEFERRED:
        return _settle_elements(tx, task, stream)
    is_running = task.state is TaskState.RUNNING
    waiting = _waiting(tx, stream, stream.wanted)
    due_at = None
    if waiting.first_at is not None and stream.batch_s is not None:
        due_at = waiting.first_at + timedelta(seconds=stream.batch_s)
    next_ = decide(
        stream.contract,
        waiting=waiting.number,
        wanted=stream.wanted,
        is_ended=stream.ended_as is not None,
        is_due=due_at is not None and due_at <= tx.now,
    )
    if next_ == "wait":
        return _wait(tx, task, stream, waiting.last_at, due_at)
    _set_due(tx, stream, None)
    if not is_running:
        tx.notify()  # this supervisor may run no tasks, or have no worker that is free
    if next_ == "step" or stream.ended_as == "returned":
        state = task_rows.apply(tx, task, "stream_goes_on" if is_running else "stream_event")
        marks.reach("stream.resumed")
        return state
    return _end_task(tx, task, stream)


def _settle_elements(tx: Tx, task: LockedTask, stream: Stream) -> TaskState:
    """Have a locked task that waits take what has come as elements, and go on to wait, or end."""
    absorbed = absorbing.absorb(tx, task, stream)
    task, stream, problem = absorbed.task, absorbed.stream, absorbed.problem
    if problem is None and absorbed.has_more:
        return _wait(tx, task, stream, tx.now, tx.now)  # the next of them by the look for batches that are due
    if problem is None and stream.ended_as is None:
        return _wait(tx, task, stream, tx.now if absorbed.has_come else None, None)
    if problem is None and stream.ended_as in ("returned", "event"):
        problem = absorbing.end(tx, task)
    if problem is not None:
        close(tx, task.id)
        tx.notify()
        # It would be the same in every other try: the events are stored.
        task = msgspec.structs.replace(task, tries_max=task.try_number)
        return task_rows.fail(tx, task, "ended_failed", "ended_to_retry", problem)
    _set_due(tx, stream, None)
    tx.notify()
    if stream.ended_as == "returned":
        return task_rows.apply(tx, task, "stream_ended", last_error=None)
    return _end_task(tx, task, stream)


def _end_task(tx: Tx, task: LockedTask, stream: Stream) -> TaskState:
    """End a task, or resume it to fail, as the trigger of its stream has ended; all events before are handled."""
    is_running = task.state is TaskState.RUNNING
    error, traceback = stream.ended_error or "", stream.ended_traceback or ""
    if stream.ended_as == "event":
        end = _LAST_END.run(tx.connection, of_trigger=stream.trigger_id).fetchone()
        if end is not None:
            return resuming.end_task(tx, task, end[0], bytes(end[1]))
        error = NO_END
    event = "stream_failed" if is_running else "trigger_failed"
    return resuming.resume_to_fail(tx, task, event, "trigger_failure", error, traceback)


def go_on(tx: Tx, instance: TaskInstanceId) -> TaskState:
    """Have a task go on that has just been deferred with a stream: events of an earlier try may wait already."""
    task, stream = task_rows.locked(tx, instance), locked(tx, instance)
    assert task is not None
    assert stream is not None, "both were just written"
    return settle(tx, task, stream)


# The newest: an earlier run of the trigger may have ended an earlier try.
_LAST_END = Prepared(
    select(_E.kind, _E.payload)
    .where(_E.trigger_id == bindparam("of_trigger"), _E.kind != literal_column("'event'"))
    .order_by(_E.id.desc())
    .limit(1)
)
_SET_DUE = Prepared(
    update(task_stream)
    .where(
        _S.task_instance_id == bindparam("of_task"),
        _S.due_at.is_distinct_from(bindparam("due_at", type_=UtcDateTime())),
    )
    .values(due_at=bindparam("due_at"))
)
_SET_TIMEOUT = Prepared(
    update(task_instance)
    .where(
        task_instance.c.id == bindparam("of_task"),
        # What waits since an earlier try is older than this wait.
        task_instance.c.trigger_timeout < bindparam("timeout", type_=UtcDateTime()),
    )
    .values(trigger_timeout=bindparam("timeout"))
)


def _set_due(tx: Tx, stream: Stream, due_at: datetime | None) -> None:
    if stream.batch_s is not None or stream.elements is not None:
        at = None if due_at is None else bound(tx.connection, due_at)
        if _SET_DUE.run(tx.connection, of_task=stream.task_instance_id, due_at=at).rowcount and at is not None:
            tx.notify()


def _wait(tx: Tx, task: LockedTask, stream: Stream, newest_at: datetime | None, due_at: datetime | None) -> TaskState:
    """Have a task wait for its next event, for ``timeout_s`` from now or, if it waits already, from the last event."""
    is_running = task.state is TaskState.RUNNING
    since = tx.now if newest_at is None or is_running else newest_at
    timeout = task_rows.trigger_timeout(tx, since, stream.timeout_s, task.deadline)
    _set_due(tx, stream, due_at)
    if is_running:
        columns = {"token": task_rows.new_token(), "trigger_id": stream.trigger_id, "trigger_timeout": timeout}
        return task_rows.apply(tx, task, "stream_waits", **columns)
    if newest_at is not None and stream.timeout_s is not None:
        _SET_TIMEOUT.run(tx.connection, of_task=task.id, timeout=timeout)
    return task.state


# --- what its trigger reports --------------------------------------------------------------------

_OF_TRIGGER = Kind(task_stream, ("trigger_id",))


def locked_of_triggers(tx: Tx, trigger_ids: Iterable[int]) -> list[tuple[LockedTask, Stream]]:
    """Lock the tasks that have these triggers as their streams, in the order of their ids, and the streams."""
    rows = [(trigger_id,) for trigger_id in trigger_ids]
    if not rows:
        return []
    found = []
    for instance in sorted(row[0] for row in find(tx.connection, _OF_TRIGGER, rows, returning=("task_instance_id",))):
        task, stream = task_rows.locked(tx, instance), locked(tx, instance)
        if task is not None and stream is not None:  # it was not cleared from its start meanwhile
            found.append((task, stream))
    return found


class _End(NamedTuple):
    """Why no event will come: the columns of the stream that say so."""

    ended_run: str | None
    ended_as: Literal["returned", "failed", "event"]
    ended_error: str | None = None
    ended_traceback: str | None = None


def take(
    tx: LeasedTx,
    streams: Collection[int],
    *,
    events: Sequence[FiredEvent] = (),
    refused: Mapping[int, str] | None = None,
    letters: Mapping[int, int] | None = None,
    finished: Sequence[FinishedTrigger] = (),
) -> frozenset[TriggerId]:
    """Have the tasks go on whose streams have got events, which are in the log already, or have ended.

    ``streams`` are triggers of streams, ``refused`` has the reasons why an event of a trigger is not in the log: then
    its stream fails, because what comes after it would be handled without it. ``letters`` are the dead letters of such
    events that the broker does not deliver again, by their triggers. Return the triggers that are over, and
    whose runs end, or have ended, by themselves: one that goes on after a refused event has yet to be cancelled. The
    end of a trigger that this epoch does not own is ignored: another supervisor runs it. Raises `ItemFailed` for one
    whose task cannot take them.
    """
    ends: dict[int, _End] = {}
    for run in finished:
        if run.trigger_id in streams and run.outcome != "cancelled" and is_own(tx, run.trigger_id):
            ends[run.trigger_id] = _end_of_run(run)
    ends.update({event.trigger_id: end for event in events if (end := _end_by(event)) is not None})
    over = frozenset(TriggerId(trigger_id) for trigger_id in ends if trigger_id in streams)
    ends.update({trigger_id: _End(None, "failed", reason) for trigger_id, reason in (refused or {}).items()})
    touched = {event.trigger_id for event in events}.union(ends).intersection(streams)
    for task, stream in locked_of_triggers(tx, touched):
        with blaming("trigger", stream.trigger_id):
            if letters and (letter := letters.get(stream.trigger_id)) is not None:
                of_task = update(task_stream).where(_S.task_instance_id == task.id)
                tx.connection.execute(of_task.values(refused_letter=letter))
            _take_one(tx, task, stream, ends.get(stream.trigger_id))
    return over


def take_by_hand(tx: Tx, event: FiredEvent) -> bool:
    """Have the task go on whose stream has got an event that a user has stored; return whether there is one."""
    found = locked_of_triggers(tx, [event.trigger_id])
    for task, stream in found:
        _take_one(tx, task, stream, _end_by(event))
    return bool(found)


def fail(tx: Tx, trigger_id: int, reason: str) -> None:
    """End the stream of a trigger that may not run any more."""
    for task, stream in locked_of_triggers(tx, [trigger_id]):
        _take_one(tx, task, stream, _End(None, "failed", reason))


def _take_one(tx: Tx, task: LockedTask, stream: Stream, end: _End | None) -> None:
    if end is not None:
        stream = _end(tx, stream, end)
    # Any other looks at its stream when its step has ended, or has ended it, and waits for another trigger now.
    if task.state is TaskState.DEFERRED and task.trigger_id == stream.trigger_id:
        settle(tx, task, stream)


def _end(tx: Tx, stream: Stream, end: _End) -> Stream:
    """Take the end of a run, unless the run is one before the one that the task waits for; return the stream."""
    values: dict[str, Any] = {"ended_run": end.ended_run}
    if end.ended_run is not None and end.ended_run == stream.ended_run:
        # Said again: by the end of a run that has fired its last event, or because it was unknown whether the first
        # report was committed. If the trigger was opened again meanwhile, what is stored with this report may end it:
        # then it is opened once more. One that is over stays so: its try has ended.
        values = {"reopens": stream.reopens or _is_open(tx, stream.trigger_id)}
    elif not stream.reopens and task_rows.finish_trigger(tx, stream.trigger_id):
        values = end._asdict()
    tx.connection.execute(update(task_stream).where(_S.task_instance_id == stream.task_instance_id).values(values))
    marks.reach("stream.end_written")
    return msgspec.structs.replace(stream, **values)


def _end_by(event: FiredEvent) -> _End | None:
    if event.kind != "event":
        return _End(event.trigger_run_id, "event")
    return _End(event.trigger_run_id, "returned") if event.is_last else None


def _end_of_run(run: FinishedTrigger) -> _End:
    # One that could not be started has no run, and each time it is reported is another one.
    name = storable_text(run.trigger_run_id, KEY_CHARS_MAX) or None
    if run.outcome == "returned":
        return _End(name, "returned")
    error, traceback = (storable_text(text, ERROR_CHARS_MAX) for text in (run.error, run.traceback))
    return _End(name, "failed", error, traceback)


_OWN = Prepared(
    select(trigger.c.id).where(trigger.c.id == bindparam("of_id"), trigger.c.triggerer_id == bindparam("epoch"))
)


def is_own(tx: LeasedTx, trigger_id: int) -> bool:
    """Whether the epoch owns a trigger."""
    return _OWN.run(tx.connection, of_id=trigger_id, epoch=tx.epoch).fetchone() is not None


_OPEN = Prepared(select(trigger.c.id).where(trigger.c.id == bindparam("of_id"), OPEN_TRIGGER))


def _is_open(tx: Tx, trigger_id: int) -> bool:
    """Whether a trigger may run."""
    return _OPEN.run(tx.connection, of_id=trigger_id).fetchone() is not None


# --- its end, and batches that are due -----------------------------------------------------------

_CLOSE = Prepared(
    update(task_stream)
    .where(_S.task_instance_id == bindparam("of_task"))
    .values(due_at=null(), reopens=literal_column("false"))
    .returning(_S.trigger_id)
)


def close(tx: Tx, instance: TaskInstanceId, *, by_user: bool = False) -> None:
    """End the trigger of a locked task's stream, if it has one, because its try has ended; the row of it stays.

    ``by_user``: its runner calls ``on_kill()`` (I14).
    """
    row = _CLOSE.run(tx.connection, of_task=instance).fetchone()
    if row is None:
        return
    end = task_rows.remove_trigger if by_user else task_rows.finish_trigger
    if end(tx, row[0]):
        tx.notify()  # the supervisor that runs it is another one, perhaps


def forget(tx: Tx, instance: TaskInstanceId) -> None:
    """Delete the stream of a task that begins anew; its trigger has been ended."""
    tx.connection.execute(delete(task_stream).where(_S.task_instance_id == instance))


_DUE = Prepared(
    task_rows.skip_locked(
        select(*task_rows.LOCKED)
        .select_from(task_instance.join(task_stream, _S.task_instance_id == task_instance.c.id))
        .where(_S.due_at <= bindparam("now", type_=UtcDateTime()), task_rows.is_in(TaskState.DEFERRED))
        .order_by(task_instance.c.id)
        .limit(bindparam("limit", type_=Integer()))
    )
)


def begin_due_batches(tx: Tx, limit: int) -> list[TaskInstanceId]:
    """Have up to ``limit`` tasks go on whose events have waited for long enough, though they are no whole batch.

    Return those for which there is something to do now: they are to begin, or have elements of more events.
    """
    due = partial(_DUE.run, tx.connection, now=bound(tx.connection, tx.now))
    begun = []
    for row in tx.passed_over.read("task", limit, due):
        with blaming("task", row[0]):
            task = task_rows.locked_task(tx, row)
            stream = locked(tx, task.id)
            if stream is None:
                continue
            state = settle(tx, task, stream)
            if state is TaskState.SCHEDULED or stream.elements is not None:
                begun.append(task.id)
    return begun
