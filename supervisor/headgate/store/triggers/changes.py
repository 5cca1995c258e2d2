"""Watchers that users change or restart: the trigger stays, and with it its events, their keys and its strikes.

A change is written into the trigger's row, with the time of it (``changed_at``). The owner of the trigger finds it by a
poll, reads the row again, and starts the trigger again with what it says now; its shared stream waits meanwhile, as for
one that failed. ``changed_at`` says only that the owner has not read the row yet: whoever claims the trigger reads all
of it, so a supervisor may die at any point, and the next one starts what the user has asked for. A run that returns
before its owner has read the row ends only itself.

::

    owned by 7 ──a user changes it──▶ owned by 7, changed ──7 reads it──▶ owned by 7
                                         │
                                         └─7 is fenced or ended──▶ free ──9 claims it, and reads it──▶ owned by 9

**Streams.** A changed trigger keeps its stream until its runner has found that the new values have another one, and it
is described again. All triggers of a stream have its queue (`headgate.store.triggers.streams`), so a trigger is moved
to another queue only if it is alone in its stream, and the stream moves with it, in the same transaction. An owner that
does not serve the new queue releases both, once the run of the trigger has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Select, select, update

from headgate.store.db.bulk import chunks
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import reading
from headgate.store.errors import ValueRefused, WatcherHeld
from headgate.store.ids import Epoch, Hold
from headgate.store.tables import asset_watcher, stream, trigger
from headgate.store.triggers import streams, strikes, waiting_tasks, watchers
from headgate.store.triggers.claimed import ClaimedTrigger, TriggerVerbs, decrypted
from headgate.store.triggers.leases import owned_of
from headgate.store.triggers.watchers import trigger_of_watcher

CHANGES_AT_ONCE_MAX = 1000  # triggers read by their owner in one transaction
STREAM_LOOKS_MAX = 5  # looks at the stream of a trigger that its owner is describing at the same moment
NEIGHBOURS_NAMED_MAX = 3  # of the watchers of one stream, in an error


class ChangedWatcher(msgspec.Struct, frozen=True):
    """A watcher after a change. One with a ``hold``, or that ``is_finished``, does not run with the new values yet."""

    hold: Hold | None
    is_finished: bool


class ChangeVerbs(TriggerVerbs):
    """The verbs by which users change watchers, and supervisors read the changes."""

    def change_watcher(
        self,
        name: str,
        *,
        classpath: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        queue: str | None = None,
        max_deliveries: int | None = None,
    ) -> ChangedWatcher:
        """Change a watcher, whose trigger is then started again; None leaves a value as it is.

        ``kwargs`` replace all earlier ones. A watcher that is held stays held, and one that has returned is not started
        (`restart_watcher`). Raises `NoSuchWatcher`, what `Store.add_watcher` raises for the values, and `ValueRefused`
        for another queue if the trigger is not alone in its stream.
        """
        values: dict[str, Any] = {}
        if classpath is not None:
            values["classpath"] = watchers.check_classpath(classpath)
        if queue is not None:
            values["queue"] = watchers.check_queue(queue)
        if max_deliveries is not None:
            values["max_deliveries"] = watchers.check_max_deliveries(max_deliveries)
        encoded = None if kwargs is None else watchers.encode_kwargs(kwargs)
        for _ in range(STREAM_LOOKS_MAX):
            with self.database.acting() as tx:
                secret = {} if encoded is None else {"kwargs": tx.encrypt(encoded)}
                changed = _change(tx, name, values | secret)
                if changed is None:
                    tx.act_nothing()
            if changed is not None:
                return changed
        raise ValueRefused(f"the stream of the watcher {name!r} is being found out at this moment: try again")

    def restart_watcher(self, name: str) -> bool:
        """Have the trigger of a watcher started again, even if it has returned; return whether it had.

        Raises `NoSuchWatcher`, and `WatcherHeld` for one that is not started until its hold is released.
        """
        with self.database.acting() as tx:
            tx.notify()
            trigger_id = trigger_of_watcher(tx, name)
            row = tx.connection.execute(_locked(trigger_id)).one()
            if row.hold is not None:
                raise WatcherHeld(name, row.hold)
            is_finished = row.finished_at is not None
            # The run of one that has returned is over, and nobody owns it.
            again = {"finished_at": None, "triggerer_id": None} if is_finished else {"changed_at": tx.now}
            tx.connection.execute(update(trigger).where(trigger.c.id == trigger_id).values(again))
            tx.act("watchers restart", f"watcher {name}", before={"has_returned": is_finished})
        return is_finished

    @reading
    def watcher_class(self, tx: Tx, name: str) -> tuple[int, str]:
        """Return the id of the trigger of a watcher, and its classpath. Raises `NoSuchWatcher`."""
        trigger_id = trigger_of_watcher(tx, name)
        classpath = tx.connection.execute(select(trigger.c.classpath).where(trigger.c.id == trigger_id)).scalar_one()
        return trigger_id, classpath

    def take_changes(self, epoch: Epoch, trigger_ids: Sequence[int]) -> list[ClaimedTrigger]:
        """Return triggers of this epoch as their rows are now; from here on their changes count as read.

        Those that it does not own, or that are over, are passed over. Raises `LeaseLost`.
        """
        with self.database.leased(epoch) as tx:
            tx.require_key()
            for ids in chunks(sorted(trigger_ids)):
                mine = (trigger.c.id.in_(ids), trigger.c.triggerer_id == epoch)
                # The rows are locked by it even if they count as read already: a change comes before this, or is not
                # read yet.
                tx.connection.execute(update(trigger).where(*mine).values(changed_at=None))
            rows = owned_of(tx, set(trigger_ids))
            tasks = waiting_tasks.of(tx, [row.id for row in rows if row.watcher is None])
            passed_over = strikes.passed_over_of(tx, {row.id for row in rows})
        return [decrypted(row, self.database.secrets, tasks, passed_over) for row in rows]


def _locked(trigger_id: int) -> Select[Any, Any, Any, Any, bool]:
    names = ("classpath", "queue", "max_deliveries", "stream_id", "hold", "finished_at")
    columns = [trigger.c[name] for name in names]
    is_free = streams.is_gone(trigger.c.triggerer_id).label("is_free")
    return select(*columns, is_free).where(trigger.c.id == trigger_id).with_for_update(key_share=True)


def _change(tx: Tx, name: str, values: Mapping[str, Any]) -> ChangedWatcher | None:
    """Change the row; return None if its stream has changed since it was looked at."""
    tx.notify()
    trigger_id = trigger_of_watcher(tx, name)
    stream_id = None
    if "queue" in values:  # the stream is locked before the trigger: see `headgate.store.triggers.streams`
        of_trigger = select(trigger.c.stream_id).where(trigger.c.id == trigger_id)
        stream_id = tx.connection.execute(of_trigger).scalar_one()
        locked = select(stream.c.id).where(stream.c.id == stream_id)
        tx.connection.execute(locked.with_for_update(key_share=True))
    row = tx.connection.execute(_locked(trigger_id)).one()
    if "queue" in values and values["queue"] != row.queue:
        if row.stream_id != stream_id:
            return None
        if stream_id is not None:
            _move_stream(tx, name, trigger_id, row, values["queue"])
    is_finished = row.finished_at is not None
    changed_at = None if is_finished else tx.now  # whoever starts it reads it
    tx.connection.execute(update(trigger).where(trigger.c.id == trigger_id).values(**values, changed_at=changed_at))
    told = [name for name in values if name != "kwargs"]
    after = {name: values[name] for name in told} | ({"kwargs": "replaced"} if "kwargs" in values else {})
    tx.act("watchers set", f"watcher {name}", before={one: row._mapping[one] for one in told}, after=after)
    return ChangedWatcher(row.hold, is_finished)


def _move_stream(tx: Tx, name: str, trigger_id: int, row: Any, queue: str) -> None:
    """Move the locked stream of a locked trigger to another queue. Raises `ValueRefused` if others use it."""
    if tx.connection.execute(streams.uses([row.stream_id], [trigger_id])).first() is not None:
        others = (
            select(asset_watcher.c.name)
            .join(trigger, trigger.c.id == asset_watcher.c.trigger_id)
            .where(trigger.c.stream_id == row.stream_id, trigger.c.id != trigger_id)
            .where(asset_watcher.c.removed_at.is_(None), trigger.c.finished_at.is_(None))
            .order_by(asset_watcher.c.name)
            .limit(NEIGHBOURS_NAMED_MAX)
        )
        names = [repr(other) for other in tx.connection.execute(others).scalars()] or ["one that is ending"]
        raise ValueRefused(
            f"the watcher {name!r} cannot be moved to the queue {queue!r}: it shares its stream with others "
            f"({', '.join(names)}), and all triggers of a stream run in one queue, {row.queue!r}"
        )
    # If nobody owns the trigger, the owner of the stream, which runs nothing of it, may not serve the new queue.
    free = {"triggerer_id": None} if row.is_free else {}
    tx.connection.execute(update(stream).where(stream.c.id == row.stream_id).values(queue=queue, **free))
