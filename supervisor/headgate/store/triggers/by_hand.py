"""Events that are written by hand, not fired by a trigger run: the ids of a trigger stay in commit order all the same.

Readers follow the events of a trigger by their ids (`headgate.client`), so no event may become visible after a reader
has seen one of the same trigger with a greater id. For the events of trigger runs that holds without a lock: only the
supervisor that owns a trigger stores its events, in one transaction after the other, and a take-over waits for the
transaction of the old owner (`headgate.store.triggers.leases`). A writer by hand is a second one, and must exclude the
owner until it has committed::

    owner:    SELECT ... FROM triggerer WHERE id = 7 AND alive FOR SHARE     (`lock_lease`)
              INSERT INTO trigger_event ...                                  gets its id
              COMMIT

    by hand:  SELECT ... FROM triggerer WHERE id = 7 FOR NO KEY UPDATE       waits for the owner, who waits from now on
              SELECT ... FROM task_instance WHERE trigger_id = 5 FOR NO KEY UPDATE
              SELECT ... FROM trigger WHERE id = 5 FOR NO KEY UPDATE         nobody claims or removes it from now on
              is 7 still the owner? if not: ROLLBACK, and again
              INSERT INTO trigger_event ...                                  gets its id
              COMMIT

**Order of locks**: lease, task and its stream, trigger, and rows of dead letters and runs after them, as in a slice.
That is why the transaction is opened here, and why it is for one trigger only: a writer that came with locks of its
own, or wanted a second lease, could deadlock with a slice. SQLite has one writer at a time, and needs none of them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import or_, select

from headgate.store.db.transaction import Database, Tx
from headgate.store.errors import NoSuchRow, OwnerUnsettled, TriggerRemoved
from headgate.store.ids import Epoch
from headgate.store.tables import task_instance, task_stream, trigger, triggerer

# An owner changes when a supervisor starts or ends: a second try is rare, and a third is hardly ever needed.
OWNER_TRIES_MAX = 10


class _Trigger(NamedTuple):
    owner: Epoch | None
    removed_at: datetime | None


@contextmanager
def writing_by_hand(database: Database, trigger_id: int) -> Generator[Tx]:
    """Run a transaction that may insert events of one trigger, which is locked until it ends.

    Nobody else stores an event of this trigger, claims it or removes it meanwhile; the supervisor that owns it stores
    nothing at all, so keep the transaction short. Waits for the transaction that this supervisor is in, if it is in
    one.

    Raises `NoSuchRow` if there is no such trigger, `TriggerRemoved` if it was removed, because readers leave the events
    of a removed trigger behind, and `OwnerUnsettled` if its owner changes `OWNER_TRIES_MAX` times meanwhile.
    """
    for _ in range(OWNER_TRIES_MAX):
        with database.acting() as tx:
            if _lock(tx, trigger_id):
                yield tx
                tx.notify_readers([trigger_id])
                return
            tx.act_nothing()
    raise OwnerUnsettled(trigger_id, OWNER_TRIES_MAX)


def _lock(tx: Tx, trigger_id: int) -> bool:
    """Lock the lease of a trigger's owner, the task that waits for it, and its row; False if the owner has changed."""
    owner = _look(tx, trigger_id, locks=False).owner
    if owner is not None:
        # FOR NO KEY UPDATE: it excludes the FOR SHARE of `lock_lease`, and foreign keys need not wait for it.
        lease = select(triggerer.c.id).where(triggerer.c.id == owner).with_for_update(key_share=True)
        tx.connection.execute(lease)
    streaming = select(task_stream.c.task_instance_id).where(task_stream.c.trigger_id == trigger_id)
    waits = or_(task_instance.c.trigger_id == trigger_id, task_instance.c.id.in_(streaming))
    task = select(task_instance.c.id).where(waits).order_by(task_instance.c.id)
    tx.connection.execute(task.with_for_update(key_share=True))
    tx.connection.execute(streaming.with_for_update(key_share=True))
    # If a claim or a removal is in flight, this waits for it, and sees the row that it has written.
    found = _look(tx, trigger_id, locks=True)
    if found.removed_at is not None:
        raise TriggerRemoved(trigger_id)
    return found.owner == owner


def _look(tx: Tx, trigger_id: int, *, locks: bool) -> _Trigger:
    statement = select(trigger.c.triggerer_id, trigger.c.removed_at).where(trigger.c.id == trigger_id)
    row = tx.connection.execute(statement.with_for_update(key_share=True) if locks else statement).first()
    if row is None:
        raise NoSuchRow("trigger", str(trigger_id))
    return _Trigger(*row)
