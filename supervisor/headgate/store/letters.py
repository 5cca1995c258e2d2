"""What a user does with a dead letter: redrive, edit or discard it. Each is one transaction, with a row of its audit.

A letter has one of these states (`headgate.store.ids.LetterState`)::

    (refused, kept whole) -> open ------redrive------> redriven            its event is stored now
                              |  \\-----redrive------> stored_meanwhile    an event of its names was there already
                              |
    (only a head is kept) -> at_broker --discard----> discarded            as from open

The last three are ends. Each transition is guarded by the old state, in the transaction that stores the event, so of
several users one redrives a letter, and a letter whose redrive was cut short is either done or open.

**Stored once.** A redriven event has the names that the trigger run gave it: the run and index, and the message's key
with the position. These are unique in the event log (I2), so a redrive and the broker's own redelivery give one row,
whichever is first. If the trigger was removed, the event goes to the watcher that has the same name now.

Its place in the log is the end, as that of a redelivery. Messages (``content`` is "message") cannot be redriven: their
events are not known until a filter has derived them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import insert, select, update

from headgate.protocol.messages.runner import ERROR_CHARS_MAX, EVENT_BYTES_MAX, FiredEvent
from headgate.store import fresh_events
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading, writing
from headgate.store.errors import LetterRefused, LetterResolved, NoSuchRow
from headgate.store.ids import LetterAction, LetterState
from headgate.store.inspect.letters import UNRESOLVED
from headgate.store.tables import asset_watcher, dead_letter, letter_action, trigger
from headgate.store.triggers.by_hand import writing_by_hand
from headgate.store.triggers.dead_letters import storable_text

DONE_BY_CHARS_MAX = 200
NOTE_CHARS_MAX = ERROR_CHARS_MAX

MESSAGES_STAY = (
    "it holds a message that its trigger could not take, not an event, and messages cannot be redriven: "
    "discard it, or have its broker deliver the message again"
)


class Redriven(msgspec.Struct, frozen=True):
    """What became of a letter that was redriven, and the event that stands for it.

    ``is_same``: whether that event has the kind and the payload that the letter was to store.
    """

    letter_id: int
    state: LetterState
    event_id: int
    is_same: bool


class LetterVerbs(Verbs):
    """The verbs of dead letters. ``by`` is the user, for the audit; ``note`` is free text.

    Each raises `NoSuchRow` for an unknown letter, and `LetterRefused` if the letter is not in a state that allows it.
    """

    def redrive(self, letter_id: int, *, by: str, note: str = "", payload_bytes_max: int = EVENT_BYTES_MAX) -> Redriven:
        """Store the event of an open letter, as it is or as it was edited, and resolve the letter.

        Raises `LetterRefused` also for a payload of more than ``payload_bytes_max``, and for a letter without a
        trigger; `RowsRefused` if the database cannot store the event; and the errors of
        `headgate.store.triggers.by_hand.writing_by_hand`. In all these cases the letter is as before.
        """
        trigger_id = self._target(letter_id)
        with writing_by_hand(self.database, trigger_id) as tx:
            row = _locked(tx, letter_id, "redriven", ("open",))
            payload = row.payload if row.edited_payload is None else row.edited_payload
            if len(payload) > payload_bytes_max:
                limit = f"its payload has {len(payload):,} bytes, and event_bytes_max is {payload_bytes_max:,}"
                raise LetterRefused(letter_id, "redriven", f"{limit}: raise the setting, or edit the letter")
            event = FiredEvent(
                trigger_id=trigger_id,
                trigger_run_id=row.trigger_run_id,
                sequence_index=row.sequence_index,
                seq=0,
                payload=payload,
                key=row.key,
                position=row.position,
                kind=row.kind,
                is_last=row.is_last,
            )
            stored = fresh_events.store_by_hand(tx, event)
            state: LetterState = "redriven" if stored.is_new else "stored_meanwhile"
            _resolve(tx, letter_id, ("open",), state, by, note, event_id=stored.event_id)
            _record(tx, letter_id, "redriven" if stored.is_new else "stored_meanwhile", by, note)
        return Redriven(letter_id, state, stored.event_id, stored.is_same)

    @writing
    def edit(self, tx: Tx, letter_id: int, payload: bytes, *, by: str, note: str = "") -> None:
        """Have a redrive store ``payload``, which is encoded by `headgate.protocol.values`; the original is kept.

        Raises `LetterRefused` for a letter that is not open, or that holds a message.
        """
        row = _locked(tx, letter_id, "edited", ("open",))
        if row.content == "message":
            raise LetterRefused(letter_id, "edited", MESSAGES_STAY)
        edited = update(dead_letter).where(dead_letter.c.id == letter_id, dead_letter.c.state == "open")
        assert tx.connection.execute(edited.values(edited_payload=payload)).rowcount == 1, "the row is locked"
        _record(tx, letter_id, "edited", by, note)

    @writing
    def discard(self, tx: Tx, letter_id: int, *, by: str, note: str = "") -> None:
        """Resolve a letter without its event. Raises `LetterRefused` if it is resolved already."""
        _locked(tx, letter_id, "discarded", UNRESOLVED)
        _resolve(tx, letter_id, UNRESOLVED, "discarded", by, note)
        _record(tx, letter_id, "discarded", by, note)

    @reading
    def _target(self, tx: Tx, letter_id: int) -> int:
        """Return the trigger whose event a letter would be: its own, or that of the watcher of the same name now."""
        columns = (dead_letter.c.trigger_id, dead_letter.c.content, trigger.c.id, trigger.c.removed_at)
        letters = dead_letter.outerjoin(trigger, trigger.c.id == dead_letter.c.trigger_id)
        found = select(*columns).select_from(letters).where(dead_letter.c.id == letter_id)
        row = tx.connection.execute(found).first()
        if row is None:
            raise NoSuchRow("dead letter", str(letter_id))
        if row.content == "message":
            raise LetterRefused(letter_id, "redriven", MESSAGES_STAY)
        if row.id is None:
            raise LetterRefused(letter_id, "redriven", f"there is no trigger {row.trigger_id}")
        if row.removed_at is None:
            return int(row.id)
        name = select(asset_watcher.c.name).where(asset_watcher.c.trigger_id == row.id).scalar_subquery()
        present = select(asset_watcher.c.trigger_id).where(
            asset_watcher.c.name == name, asset_watcher.c.removed_at.is_(None)
        )
        successor = tx.connection.execute(present).scalar_one_or_none()
        if successor is None:
            reason = f"its trigger {row.trigger_id} was removed, and there is no watcher of the same name now"
            raise LetterRefused(letter_id, "redriven", reason)
        return int(successor)


def _locked(tx: Tx, letter_id: int, verb: str, states: tuple[LetterState, ...]) -> Any:
    """Lock a letter and return its row. Raises `NoSuchRow`, and `LetterRefused` if it is in none of the states."""
    found = tx.connection.execute(select(dead_letter).where(dead_letter.c.id == letter_id).with_for_update()).first()
    if found is None:
        raise NoSuchRow("dead letter", str(letter_id))
    if found.state == "at_broker" and "at_broker" not in states:
        held = f"only the first {len(found.payload_head):,} of {found.payload_bytes:,} bytes of it are kept"
        raise LetterRefused(letter_id, verb, f"{held}: its broker has the message")
    if found.state not in states:
        what = found.state.replace("_", " ")
        by = f" by {found.resolved_by} at {found.resolved_at:%Y-%m-%d %H:%M:%S} UTC"
        raise LetterResolved(letter_id, verb, f"it is {what} already,{by}")
    return found


def _resolve(
    tx: Tx,
    letter_id: int,
    states: tuple[LetterState, ...],
    state: LetterState,
    by: str,
    note: str,
    *,
    event_id: int | None = None,
) -> None:
    resolved = (
        update(dead_letter)
        .where(dead_letter.c.id == letter_id, dead_letter.c.state.in_(states))
        .values(
            state=state,
            event_id=event_id,
            resolved_at=tx.now,
            resolved_by=storable_text(by, DONE_BY_CHARS_MAX),
            note=storable_text(note, NOTE_CHARS_MAX),
        )
    )
    assert tx.connection.execute(resolved).rowcount == 1, "the row is locked"


def _record(tx: Tx, letter_id: int, action: LetterAction, by: str, note: str) -> None:
    row = insert(letter_action).values(
        letter_id=letter_id,
        action=action,
        done_by=storable_text(by, DONE_BY_CHARS_MAX),
        done_at=tx.now,
        note=storable_text(note, NOTE_CHARS_MAX),
    )
    tx.connection.execute(row)
