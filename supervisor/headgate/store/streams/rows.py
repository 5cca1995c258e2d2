"""The rows of ``task_stream``, and the events behind the place that a task has come to in its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import Integer, Row, bindparam, func, literal_column, select, update

from headgate.protocol import marks
from headgate.protocol.messages.task_streams import (
    EVENT_BYTES_PER_STEP_MAX,
    ElementsOf,
    PoisonRule,
    StreamContract,
)
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import TaskInstanceId, TriggerId
from headgate.store.tables import task_instance, task_stream, trigger_event
from headgate.store.tasks.task_rows import LockedTask

_S = task_stream.c
_E = trigger_event.c
# The events of a stream; those behind the place ``after``, which are not handled. `Stream.behind` has the parameters.
EVENTS = (_E.trigger_id == bindparam("of_trigger"), _E.kind == literal_column("'event'"))
EVENTS_BEHIND = (*EVENTS, _E.id > bindparam("after"))


class Stream(msgspec.Struct, frozen=True):
    """A row of ``task_stream``, locked until the transaction ends; ``state`` is encrypted."""

    task_instance_id: TaskInstanceId
    trigger_id: TriggerId
    handled_to: int
    handled: int
    state: str | None
    contract: StreamContract
    batch_count: int
    batch_s: float | None
    ahead: int
    poison: PoisonRule
    timeout_s: float | None
    one_by_one_to: int
    ended_as: Literal["returned", "failed", "event"] | None
    ended_error: str | None
    ended_traceback: str | None
    ended_run: str | None
    reopens: bool
    elements: ElementsOf | None
    refused_letter: int | None

    @property
    def is_one_by_one(self) -> bool:
        """Whether a step gets one event only, because a step with several has failed here."""
        return self.handled_to < self.one_by_one_to

    @property
    def behind(self) -> dict[str, int]:
        """The parameters of `EVENTS_BEHIND`."""
        return {"of_trigger": self.trigger_id, "after": self.handled_to}

    @property
    def wanted(self) -> int:
        """How many events a step gets at most."""
        return 1 if self.is_one_by_one else self.batch_count


_COLUMNS = tuple(_S[name] for name in Stream.__struct_fields__)
_LOCK = Prepared(select(*_COLUMNS).where(_S.task_instance_id == bindparam("of_task")).with_for_update(key_share=True))


def _stream(row: Sequence[Any] | Row[Any]) -> Stream:
    fields = dict(zip(Stream.__struct_fields__, row, strict=True))
    fields["reopens"] = bool(fields["reopens"])
    return Stream(**fields)


def locked(tx: Tx, instance: TaskInstanceId) -> Stream | None:
    """Lock the stream of a locked task and return it; None if the task has none."""
    row = _LOCK.run(tx.connection, of_task=instance).fetchone()
    return None if row is None else _stream(row)


_READ = Prepared(select(*_COLUMNS).where(_S.task_instance_id == bindparam("of_task")))


def read_of(tx: Tx, instance: TaskInstanceId) -> Stream | None:
    """Return the stream of a task as it is at this moment; None if the task has none."""
    row = _READ.run(tx.connection, of_task=instance).fetchone()
    return None if row is None else _stream(row)


_READ_BY_TRIGGER = Prepared(select(*_COLUMNS).where(_S.trigger_id == bindparam("of_trigger")))


def read_by_trigger(tx: Tx, trigger_id: int) -> Stream | None:
    """Return the stream that a trigger feeds as it is at this moment; None if it feeds none."""
    row = _READ_BY_TRIGGER.run(tx.connection, of_trigger=trigger_id).fetchone()
    return None if row is None else _stream(row)


_SIZES = Prepared(
    select(_E.id, func.length(_E.payload))
    .where(*EVENTS_BEHIND)
    .order_by(_E.id)
    .limit(bindparam("wanted", type_=Integer()))
)


def next_ids(tx: Tx, stream: Stream, wanted: int) -> list[int]:
    """Return the ids of the next events that are not handled: as many as fit into a frame, and the first one always."""
    room = EVENT_BYTES_PER_STEP_MAX
    ids: list[int] = []
    for event_id, size in _SIZES.run(tx.connection, **stream.behind, wanted=wanted).fetchall():
        room -= size
        if ids and room < 0:
            break
        ids.append(event_id)
    return ids


# --- the place -----------------------------------------------------------------------------------

_MOVE = Prepared(
    update(task_stream)
    .where(_S.task_instance_id == bindparam("of_task"), _S.handled_to == bindparam("from_"))
    .values(handled_to=bindparam("to"), handled=_S.handled + bindparam("count"), state=bindparam("state_"))
)
GIVE_TRIES_BACK = Prepared(
    update(task_instance).where(task_instance.c.id == bindparam("of_task")).values(tries_max=bindparam("tries"))
)


def move(tx: Tx, task: LockedTask, stream: Stream, to: int, count: int, state: str) -> tuple[LockedTask, Stream]:
    """Move the place in the stream of a locked task behind the event ``to``, with its state; return both as they are.

    ``count`` events lie between. The task has all its tries again, because its retries are counted for each place.
    """
    places = {"from_": stream.handled_to, "to": to}
    won = _MOVE.run(tx.connection, of_task=task.id, **places, count=count, state_=state).rowcount
    assert won, "the row is locked"
    marks.reach("stream.handled_written")
    tries = task.try_number + task.retries
    if task.tries_max != tries:
        GIVE_TRIES_BACK.run(tx.connection, of_task=task.id, tries=tries)
    stream = msgspec.structs.replace(stream, handled_to=to, handled=stream.handled + count, state=state)
    return msgspec.structs.replace(task, tries_max=tries), stream
