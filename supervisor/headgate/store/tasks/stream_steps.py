"""The steps of a task with a stream: the events that a step gets, and how far its outcome has come in them (I20).

A step gets the events behind the place of its stream. Its outcome moves that place, together with the state and the
XComs it leaves, in the transaction that ends the step; only the step that has the task may, by its token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Integer, bindparam, func, literal_column, select

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.messages.task_streams import (
    AHEAD_MAX,
    EVENTS_PER_STEP_MAX,
    Handled,
    StreamEvent,
    StreamPart,
)
from headgate.scheduling.states import FAIL_METHOD
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import read
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.errors import ValueRefused
from headgate.store.ids import TaskInstanceId
from headgate.store.streams import rows
from headgate.store.streams.rows import EVENTS, EVENTS_BEHIND, Stream
from headgate.store.tables import task_stream, trigger, trigger_event
from headgate.store.tasks import task_streams
from headgate.store.tasks.task_rows import LockedTask

_S = task_stream.c
_E = trigger_event.c
WAITING_COUNTED_MAX = AHEAD_MAX + EVENTS_PER_STEP_MAX  # events that wait are counted up to here

# --- the events of a step ------------------------------------------------------------------------


def part_of(tx: Tx, instance: TaskInstanceId, next_method: str | None, event_id: int | None) -> StreamPart | None:
    """Return the part of its stream that the next step of a task gets; None if that step does not concern the stream.

    A step that begins with ``execute``, or fails, gets no events. One that is resumed with an event has waited for
    another trigger than that of its stream. Raises `BadKey` if no key decrypts the state.
    """
    stream = task_streams.read_of(tx, instance)
    if stream is None or event_id is not None:
        return None
    state = None if stream.state is None else tx.decrypt(stream.state)
    waiting = count_waiting(tx, stream)
    if next_method in (None, FAIL_METHOD):
        return StreamPart(stream.handled, waiting, state)
    events = _read(tx, stream)
    passed_over = waiting - 1 if stream.contract == "latest" and events else 0
    is_over = stream.ended_as == "returned" and len(events) + passed_over == waiting
    return StreamPart(stream.handled + passed_over, waiting, state, events, is_over)


class _Row(NamedTuple):
    """The columns of `_EVENTS`, as the driver returns them."""

    id: int
    trigger_run_id: str
    sequence_index: int
    payload: bytes
    key: str | None
    is_last: bool
    stored_at: Any


_COUNT = Prepared(
    select(func.count()).select_from(
        select(_E.id).where(*EVENTS_BEHIND).limit(bindparam("wanted", type_=Integer())).subquery()
    )
)
_NEWEST = Prepared(select(_E.id).where(*EVENTS_BEHIND).order_by(_E.id.desc()).limit(literal_column("1")))
_EVENTS = Prepared(
    select(*(_E[name] for name in _Row._fields))
    .where(*EVENTS, _E.id.between(bindparam("first"), bindparam("last")))
    .order_by(_E.id)
)


def count_waiting(tx: Tx, stream: Stream, at_most: int = WAITING_COUNTED_MAX) -> int:
    """Return how many events of a stream are not handled; ``at_most`` if they are more."""
    return int(_COUNT.run(tx.connection, **stream.behind, wanted=at_most).fetchone()[0])


def _read(tx: Tx, stream: Stream) -> tuple[StreamEvent, ...]:
    """Return the events of the next step: as many as its contract says, and as fit into a frame."""
    if stream.contract == "latest":
        ids = [row[0] for row in _NEWEST.run(tx.connection, **stream.behind).fetchall()]
    else:
        ids = rows.next_ids(tx, stream, stream.wanted)
    if not ids:
        return ()
    found = _EVENTS.run(tx.connection, of_trigger=stream.trigger_id, first=ids[0], last=ids[-1]).fetchall()
    return tuple(_event(tx, _Row._make(row)) for row in found)


def _event(tx: Tx, row: _Row) -> StreamEvent:
    return StreamEvent(
        id=row.id,
        trigger_run_id=row.trigger_run_id,
        sequence_index=row.sequence_index,
        payload=bytes(row.payload),
        key=row.key,
        is_last=bool(row.is_last),
        stored_at_s=read(tx.connection, row.stored_at).timestamp(),
    )


# --- how far a step has come ---------------------------------------------------------------------

_COUNT_TO = Prepared(select(func.count(), func.max(_E.id)).where(*EVENTS_BEHIND, _E.id <= bindparam("upto")))


def _counted_to(tx: Tx, stream: Stream, event_id: int) -> tuple[int, int | None]:
    count, last = _COUNT_TO.run(tx.connection, **stream.behind, upto=event_id).fetchone()
    return int(count), last


def count_to(tx: Tx, stream: Stream, event_id: int) -> int:
    """Return how many events of a stream are not handled, up to this one."""
    return _counted_to(tx, stream, event_id)[0]


def move(tx: LeasedTx, task: LockedTask, handled: Handled) -> tuple[LockedTask, Stream]:
    """Move the place in the stream of a locked task that runs; return both as they are now.

    It has all its tries again, because its retries are counted for each place. Raises `ValueRefused` if the events are
    not the next ones of its stream, or the state is too long.
    """
    stream = task_streams.locked(tx, task.id)
    if stream is None:
        raise ValueRefused("its worker has handled events of a stream that the task does not have")
    if len(handled.state) > KWARGS_BYTES_MAX:
        raise ValueRefused(
            f"the state of the stream needs {len(handled.state):,} bytes; the limit is {KWARGS_BYTES_MAX:,}"
        )
    count, last = _counted_to(tx, stream, handled.event_id)
    if last != handled.event_id or (count != handled.count and stream.contract != "latest"):
        raise ValueRefused(
            f"its worker has handled {handled.count:,} events of its stream, up to event {handled.event_id}; "
            f"there are {count:,} behind event {stream.handled_to}, up to event {last}"
        )
    before = stream.handled
    task, stream = rows.move(tx, task, stream, handled.event_id, count, tx.encrypt(handled.state))
    _tell_owner(tx, stream, before)
    return task, stream


_OWNER = Prepared(select(trigger.c.triggerer_id).where(trigger.c.id == bindparam("of_id")))


def _tell_owner(tx: LeasedTx, stream: Stream, before: int) -> None:
    """Tell another supervisor that runs the trigger whenever a quarter of what may wait was handled (I22)."""
    quarter = max(1, stream.ahead // 4)
    if before // quarter != stream.handled // quarter:
        (owner,) = _OWNER.run(tx.connection, of_id=stream.trigger_id).fetchone()
        if owner != tx.epoch:
            tx.notify()


class Room(NamedTuple):
    """How many events of a stream may wait, how many do, and how many have to, or their task begins no step.

    ``is_latest``: a step handles all that wait when it begins, by the newest of them. ``elements`` were emitted, and
    wait for the instances that are to be made of them.
    """

    ahead: int
    waiting: int
    batch: int = 1
    is_latest: bool = False
    elements: int = 0


def room(tx: Tx, stream: Stream) -> Room:
    """Return the room in a stream, without elements."""
    batch = stream.batch_count if stream.contract == "batch" else 1
    return Room(stream.ahead, count_waiting(tx, stream, stream.ahead), batch, stream.contract == "latest")


def handle(tx: LeasedTx, task: LockedTask, handled: Handled) -> TaskState:
    """Store that a step has handled all its events; return the new state of its task, which runs and is locked."""
    task, stream = move(tx, task, handled)
    return task_streams.settle(tx, task, stream)


def end(tx: LeasedTx, task: LockedTask, handled: Handled | None) -> None:
    """Store how far the last step of a try has come, if it handled events, and end the trigger of the stream.

    The task runs and is locked. What became of the try besides changes nothing about the events that it has handled.
    """
    if handled is not None:
        move(tx, task, handled)
    task_streams.close(tx, task.id)
