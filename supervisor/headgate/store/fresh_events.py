"""One event that a user has stored: it does what an event of a trigger run does, for tasks, DAGs and signals.

`Store.store_slice` does the same for the events of a round, which are many. The caller has the transaction from
`headgate.store.triggers.by_hand`, which keeps the ids of a trigger in commit order.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import and_, or_, select

from headgate.protocol.messages.runner import FiredEvent
from headgate.scheduling.states import TERMINAL
from headgate.scheduling.words import command
from headgate.store.db.bulk import insert_new
from headgate.store.db.engine import database_name
from headgate.store.db.times import bound
from headgate.store.db.transaction import Tx
from headgate.store.errors import DatabaseFault
from headgate.store.ids import instance_name
from headgate.store.signals.feeds import feed
from headgate.store.tables import dag, dag_run, task_instance, task_stream, trigger_event
from headgate.store.tasks import deferral, task_streams
from headgate.store.triggers import watchers
from headgate.store.triggers.events import EVENT, rows_of


class StoredByHand(NamedTuple):
    """The event of these names in the log: whether it is there only now, and has the same kind and payload.

    ``unhandled`` is the reason why no task gets it, if it is an event of a task's trigger and none does.
    """

    event_id: int
    is_new: bool
    is_same: bool
    unhandled: str = ""


def store_by_hand(tx: Tx, event: FiredEvent) -> StoredByHand:
    """Store an event unless there is one of the same names, which is left as it is.

    A new one resumes the task that waits for its trigger, and waits for the runs of DAGs on its asset. Supervisors hear
    of it. Raises `RowsRefused` if the database cannot store it.
    """
    rows = rows_of([event], bound(tx.connection, tx.now))
    inserted = insert_new(tx.connection, EVENT, rows, returning=("id",))
    if not inserted:
        return _find(tx, event)._replace(unhandled=_over(tx, event.trigger_id))
    event_id = int(inserted[0][0])
    feed_of_trigger = watchers.feed_of(tx, event.trigger_id)
    unhandled = ""
    if task_streams.take_by_hand(tx, event):
        unhandled = _over(tx, event.trigger_id)
    elif not deferral.take_events(tx, [event], {event.trigger_id}) and feed_of_trigger is None:
        unhandled = "the task that its trigger was for does not wait for it any more"
    if event.kind == "event" and feed_of_trigger is not None:
        feed(tx, {event_id: event}, {event.trigger_id: feed_of_trigger})
    tx.notify()
    return StoredByHand(event_id, is_new=True, is_same=True, unhandled=unhandled)


def _over(tx: Tx, trigger_id: int) -> str:
    """Return why the task whose stream a trigger feeds handles no event now, and what makes it; empty if it does."""
    names = select(dag.c.name, dag_run.c.run_id, task_instance.c.task_id, task_instance.c.map_index)
    rows = task_stream.join(task_instance).join(dag_run).join(dag)
    row = tx.connection.execute(
        names.add_columns(task_instance.c.state).select_from(rows).where(task_stream.c.trigger_id == trigger_id)
    ).first()
    if row is None or row.state not in TERMINAL:
        return ""
    name = instance_name(row.task_id, row.map_index)
    clear = command("tasks", "clear", row.name, row.run_id, name, "--go-on")
    of_task = f"the task {name} of run {row.run_id} of {row.name}"
    return f"{of_task} has ended ({row.state}): `{clear}` has it handle the event"


def is_passed_over(tx: Tx, event: FiredEvent) -> bool:
    """Whether an event is in the log, and behind the place of the task's stream that it belongs to."""
    c = trigger_event.c
    place = task_stream.join(trigger_event, task_stream.c.trigger_id == c.trigger_id)
    named = (c.trigger_run_id == event.trigger_run_id, c.sequence_index == event.sequence_index)
    found = select(c.id).select_from(place).where(*named, c.id <= task_stream.c.handled_to)
    return tx.connection.execute(found).first() is not None


def _find(tx: Tx, event: FiredEvent) -> StoredByHand:
    """Return the event that has the identity of this one, or derives from the same message."""
    c = trigger_event.c
    same = and_(c.trigger_run_id == event.trigger_run_id, c.sequence_index == event.sequence_index)
    if event.key is not None:
        same = or_(same, and_(c.trigger_id == event.trigger_id, c.key == event.key, c.position == event.position))
    row = tx.connection.execute(select(c.id, c.kind, c.payload).where(same).order_by(c.id).limit(1)).first()
    if row is None:
        # A row conflicted, but none is found: the event must not count as stored (I1).
        raise DatabaseFault(database_name(tx.connection.engine), "an event is neither new nor stored")
    return StoredByHand(row.id, is_new=False, is_same=(row.kind, row.payload) == (event.kind, event.payload))
