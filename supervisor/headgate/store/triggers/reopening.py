"""Triggers of task streams that are opened again: a later try of the task goes on with the same trigger.

A deferral asks for it (``task_stream.reopens``), and it is done as soon as no live supervisor has the trigger: by the
deferral itself, by the transaction in which the owner gives it up, or, if the owner has died, by any supervisor. Until
then the row of the trigger is over, so that its old run is cancelled, and nothing that it reports ends the new one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Select, literal_column, select, update

from headgate.protocol import marks
from headgate.store.db.transaction import Tx
from headgate.store.ids import TriggerId
from headgate.store.tables import task_stream, trigger
from headgate.store.triggers.streams import is_gone

_S = task_stream.c
# Opened again it is as a new trigger, except for its events and strikes. Its shared stream is found out anew.
_REOPENED: dict[str, Any] = dict.fromkeys(
    (
        *("finished_at", "removed_at", "triggerer_id", "stream_id", "changed_at"),
        *("hold", "hold_reason", "held_at", "last_error", "last_failed_at"),
    )
)
REOPENED_MAX = 500  # triggers of one transaction: some tens of milliseconds


def free() -> Select[Any]:
    """Return the statement for the triggers that may be opened again now."""
    of_stream = trigger.join(task_stream, _S.trigger_id == trigger.c.id)
    return select(trigger.c.id).select_from(of_stream).where(literal_column("reopens"), is_gone(trigger.c.triggerer_id))


def reopen(tx: Tx, trigger_ids: Collection[int] | None = None) -> list[TriggerId]:
    """Open the triggers again that tasks wait for and that no live supervisor has any more; return them.

    ``trigger_ids``: look at these only, which fit one statement; else at `REOPENED_MAX` at most. Streams that another
    transaction has locked are passed over.
    """
    wanted = free().limit(REOPENED_MAX) if trigger_ids is None else free().where(_S.trigger_id.in_(trigger_ids))
    locked = wanted.order_by(_S.task_instance_id).with_for_update(skip_locked=True, key_share=True, of=task_stream)
    found = list(tx.connection.execute(locked).scalars())
    if not found:
        return []
    opening = update(trigger).where(trigger.c.id.in_(found), is_gone(trigger.c.triggerer_id))
    opened = opening.values(**_REOPENED, failure_count=0).returning(trigger.c.id)
    ids = sorted(tx.connection.execute(opened).scalars())
    if ids:
        tx.connection.execute(update(task_stream).where(_S.trigger_id.in_(ids)).values(reopens=False))
        tx.notify()
        marks.reach("stream.reopened")
    return [TriggerId(trigger_id) for trigger_id in ids]
