"""Holds: triggers that are owned, but not started until the hold is released (`headgate.store.ids.Hold`).

A user pauses a watcher, and resumes it. A supervisor holds a trigger that harms: the stream of such a one waits for it,
so nothing is lost, until a user has mended it and releases it, or pauses it and lets its stream go on without it.
"""

from __future__ import annotations

from sqlalchemy import and_, select, update

from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.store.access.audit import Action
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, acting
from headgate.store.errors import NoSuchRow, ValueRefused
from headgate.store.ids import Hold
from headgate.store.tables import OPEN_TRIGGER, trigger
from headgate.store.triggers.dead_letters import storable_text
from headgate.store.triggers.watchers import trigger_of_watcher

PAUSED_BY_USER = "a user has paused it"


class HoldVerbs(Verbs):
    """The verbs by which users hold triggers and release them. A supervisor has `Store.hold_trigger`."""

    @acting
    def pause_watcher(self, tx: Tx, name: str) -> None:
        """Hold the trigger of a watcher as paused, whatever it was held for before. Raises `NoSuchWatcher`."""
        tx.notify()
        of_watcher = trigger.c.id == trigger_of_watcher(tx, name)
        before = tx.connection.execute(select(trigger.c.hold).where(of_watcher).with_for_update()).scalar_one()
        tx.act(
            "watchers pause",
            f"watcher {name}",
            before={"hold": before},
            after={"hold": "paused"},
            changed=before != "paused",
        )
        paused = {"hold": "paused", "hold_reason": PAUSED_BY_USER, "held_at": tx.now}
        tx.connection.execute(
            update(trigger).where(of_watcher, trigger.c.hold.is_distinct_from("paused")).values(paused)
        )

    @acting
    def resume_watcher(self, tx: Tx, name: str) -> Hold | None:
        """Release the trigger of a watcher; return its hold, None if it had none. Raises `NoSuchWatcher`."""
        return _release(tx, trigger_of_watcher(tx, name), "watchers resume", f"watcher {name}")

    @acting
    def release_trigger(self, tx: Tx, trigger_id: int, *, ends_pause: bool = True) -> Hold | None:
        """Release a trigger; return its hold, None if it had none.

        Raises `NoSuchRow`, and without ``ends_pause`` `ValueRefused` if a user has paused its watcher.
        """
        return _release(tx, trigger_id, "triggers release", f"trigger {trigger_id}", ends_pause=ends_pause)


def _release(tx: Tx, trigger_id: int, action: Action, subject: str, *, ends_pause: bool = True) -> Hold | None:
    tx.notify()
    found = tx.connection.execute(select(trigger.c.hold).where(trigger.c.id == trigger_id).with_for_update()).first()
    if found is None:
        raise NoSuchRow("trigger", str(trigger_id))
    if found.hold == "paused" and not ends_pause:
        raise ValueRefused(f"{PAUSED_BY_USER}: only who may resume its watcher may release it")
    free = {"hold": None, "hold_reason": None, "held_at": None}
    tx.connection.execute(update(trigger).where(trigger.c.id == trigger_id, trigger.c.hold.is_not(None)).values(free))
    hold: Hold | None = found.hold
    tx.act(action, subject, before={"hold": hold}, after={"hold": None}, changed=hold is not None)
    return hold


def hold_own(tx: LeasedTx, trigger_id: int, hold: Hold, reason: str) -> bool:
    """Hold an open trigger that the epoch owns, unless it is held already; return whether it is held now.

    Repeating it changes nothing.
    """
    mine = and_(trigger.c.id == trigger_id, trigger.c.triggerer_id == tx.epoch, OPEN_TRIGGER)
    held = {"hold": hold, "hold_reason": storable_text(reason, ERROR_CHARS_MAX), "held_at": tx.now}
    tx.connection.execute(update(trigger).where(mine, trigger.c.hold.is_(None)).values(held))
    tx.notify()
    return tx.connection.execute(select(trigger.c.id).where(mine, trigger.c.hold.is_not(None))).first() is not None
