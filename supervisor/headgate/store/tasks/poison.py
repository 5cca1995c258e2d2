"""Events that a task cannot handle: with ``poison="skip"`` each becomes a dead letter, and its stream goes on.

Which event a step has failed on is known only if it had one. So a step with several that fails is followed by steps
with one each, until the stream is past them all. An event on which the last try at its place fails, alone, is poison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import bindparam, select, update

from headgate.protocol.messages.runner import ERROR_CHARS_MAX, FiredEvent
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import TaskInstanceId
from headgate.store.streams import rows
from headgate.store.tables import dag, dag_run, task_instance, task_stream, trigger_event
from headgate.store.tasks import stream_steps, task_rows, task_streams
from headgate.store.tasks.task_rows import LockedTask
from headgate.store.tasks.task_streams import Stream
from headgate.store.triggers import dead_letters
from headgate.store.triggers.dead_letters import storable_text

_C = task_instance.c
_S = task_stream.c
_E = trigger_event.c


class Failure(NamedTuple):
    """Why a step has failed."""

    error: str
    traceback: str = ""


def is_sought(tx: Tx, instance: TaskInstanceId) -> bool:
    """Whether events that a locked task cannot handle are passed over: then each step that fails with one is a try."""
    stream = task_streams.locked(tx, instance)
    return stream is not None and stream.poison == "skip"


def take(tx: Tx, instance: TaskInstanceId, left: Sequence[int], given: int, failure: Failure) -> None:
    """Take the failure of a step that had ``given`` events; ``left`` are the ids of the last ones, not handled.

    Its task runs and is locked, and how far the step has come is stored. The task has another try if it is to handle
    these events one by one, or to go on behind the one that is poison.
    """
    task, stream = task_rows.locked(tx, instance), task_streams.locked(tx, instance)
    if task is None or stream is None or stream.poison != "skip" or not left:
        return
    if given > 1:
        _ONE_BY_ONE.run(tx.connection, of_task=instance, upto=left[-1])
    elif task.has_tries_left:
        return
    else:
        _pass_over(tx, task, stream, left[-1], failure)
    rows.GIVE_TRIES_BACK.run(tx.connection, of_task=instance, tries=task.try_number + 1 + task.retries)


_ONE_BY_ONE = Prepared(
    update(task_stream).where(_S.task_instance_id == bindparam("of_task")).values(one_by_one_to=bindparam("upto"))
)
_EVENT = select(
    *(_E[name] for name in ("id", "trigger_run_id", "sequence_index", "payload", "key", "position", "is_last"))
)
_NAMES = select(dag.c.name, dag_run.c.run_id, _C.task_id, _C.next_kwargs).select_from(
    task_instance.join(dag_run, dag_run.c.id == _C.dag_run_id).join(dag, dag.c.id == dag_run.c.dag_id)
)


def _pass_over(tx: Tx, task: LockedTask, stream: Stream, event_id: int, failure: Failure) -> None:
    """Keep an event of a stream as a dead letter, and move the place of the stream behind it.

    It is the next one, or the newest that there was: those before it count as handled then, as at any other time.
    """
    event = tx.connection.execute(_EVENT.where(_E.id == event_id)).one()
    of = tx.connection.execute(_NAMES.where(_C.id == task.id)).one()
    fired = FiredEvent(
        trigger_id=stream.trigger_id,
        trigger_run_id=event.trigger_run_id,
        sequence_index=event.sequence_index,
        seq=0,
        payload=bytes(event.payload),
        key=event.key,
        position=event.position,
        is_last=event.is_last,
    )
    reason = f"the task {of.task_id} of run {of.run_id} of {of.name} could not handle it: {failure.error}"
    dead_letters.dead_letter(tx, fired, reason, storable_text(failure.traceback, ERROR_CHARS_MAX))
    # The handler gets the state that it had, or what it would have begun with.
    count = stream_steps.count_to(tx, stream, event.id)
    values = {"handled_to": event.id, "handled": stream.handled + count, "state": stream.state or of.next_kwargs}
    tx.connection.execute(update(task_stream).where(_S.task_instance_id == task.id).values(values))
