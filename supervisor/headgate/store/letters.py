"""What a user does with a dead letter: redrive, edit or discard it. Each is one transaction, with a row of its audit.

A letter has one of these states (`headgate.store.ids.LetterState`)::

    (refused, kept whole) -> open ---redrive of an event-----> redriven, or stored_meanwhile: it was there already
                              | ^ `--redrive of a message---> redriving --its trigger has handled it--> redriven
                              |  `-- its trigger cannot take it --'
    (only a head is kept) -> at_broker
    any of these three ------------------discard------------> discarded

``redriven``, ``stored_meanwhile`` and ``discarded`` are ends. Each transition is guarded by the old state, in the
transaction that stores the event, so of several users one redrives a letter, and a letter whose redrive was cut short
is either done or open. The supervisor's part in ``redriving`` is in `headgate.store.triggers.redrives`.

**Stored once.** A redriven event has the names that the trigger run gave it: the run and index, and the message's key
with the position. These are unique in the event log (I2), so a redrive and the broker's own redelivery give one row,
whichever is first. If the trigger was removed, the event goes to the watcher that has the same name now.

Its place in the log is the end, as that of a redelivery.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import select, update

from headgate.protocol import marks
from headgate.protocol.messages.runner import EVENT_BYTES_MAX, LETTER_BYTES_MAX, FiredEvent, LetterContent
from headgate.store import fresh_events
from headgate.store.access.audit import Action
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, acting, reading
from headgate.store.errors import LetterRefused, LetterResolved, LetterWithoutTrigger, NoSuchRow
from headgate.store.ids import LetterAction, LetterState
from headgate.store.inspect.letters import UNRESOLVED, why_unfit
from headgate.store.tables import asset_watcher, dead_letter, trigger
from headgate.store.triggers.by_hand import writing_by_hand
from headgate.store.triggers.dead_letters import storable_text
from headgate.store.triggers.events import REDRIVEN_RUN
from headgate.store.triggers.redrives import DONE_BY_CHARS_MAX, NOTE_CHARS_MAX, record_action

LETTERS: Final = "dead letters"  # what the audit says of an act on many
# The states in which a message may be given to its trigger once more.
GIVEN_AGAIN: tuple[LetterState, ...] = ("open", "redriving")
AT_BROKER_WAY_OUT: Final = (
    "raise the limit that the letter names (that of a watcher by `headgate watchers set NAME --kwargs`), have the "
    "broker deliver the message again, and discard the letter (docs/dead-letters.md)"
)


class Redriven(msgspec.Struct, frozen=True):
    """What became of a letter that was redriven, and the event that stands for it.

    ``is_same``: whether that event has the kind and the payload that the letter was to store. A message is only
    ``redriving`` when this is returned, and has no event yet. ``unhandled`` is the reason why no task gets the event,
    if its trigger is a task's and none does.
    """

    letter_id: int
    state: LetterState
    event_id: int | None = None
    is_same: bool = True
    unhandled: str = ""


class _Target(NamedTuple):
    """The trigger that a letter is redriven to, and what the letter holds."""

    trigger_id: int
    content: LetterContent


class LetterVerbs(Verbs):
    """The verbs of dead letters. ``by`` is the user, for the audit; ``note`` is free text.

    Each raises `NoSuchRow` for an unknown letter, and `LetterRefused` if the letter is not in a state that allows it.
    """

    def redrive(self, letter_id: int, *, by: str, note: str = "", payload_bytes_max: int = EVENT_BYTES_MAX) -> Redriven:
        """Store the event of an open letter, as it is or as it was edited, and resolve the letter.

        If it holds a message, have the message given to its trigger once more; `headgate.store.triggers.redrives`
        resolves the letter later. One that is on its way already may be redriven again: then the trigger is the one
        that its watcher has now.

        Raises `LetterRefused` also for a payload of more than ``payload_bytes_max``, and for a letter without a
        trigger; `RowsRefused` if the database cannot store the event; and the errors of
        `headgate.store.triggers.by_hand.writing_by_hand`. In all these cases the letter is as before.
        """
        trigger_id, content = self._target(letter_id)
        if content != "event":
            return self._give_again(letter_id, trigger_id, by, note)
        marks.reach("redrive.trigger_found")
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
            if fresh_events.is_passed_over(tx, event):
                # Its task could not handle it, and its stream is past it: it gets it again, under another name.
                event = msgspec.structs.replace(
                    event, trigger_run_id=f"{REDRIVEN_RUN}{letter_id}", sequence_index=0, key=None
                )
            stored = fresh_events.store_by_hand(tx, event)
            marks.reach("redrive.event_stored")
            state: LetterState = "redriven" if stored.is_new else "stored_meanwhile"
            _resolve(tx, letter_id, ("open",), state, by, note, event_id=stored.event_id)
            told = "; ".join(filter(None, (note, stored.unhandled)))
            done: LetterAction = "redriven" if stored.is_new else "stored_meanwhile"
            record_action(tx, letter_id, done, by, told, act=_tell(tx, "dlq redrive", letter_id, done))
            marks.reach("redrive.written")
        marks.reach("redrive.committed")
        return Redriven(letter_id, state, stored.event_id, stored.is_same, stored.unhandled)

    @acting
    def _give_again(self, tx: Tx, letter_id: int, trigger_id: int, by: str, note: str) -> Redriven:
        row = _locked(tx, letter_id, "redriven", GIVEN_AGAIN)
        has_key, is_edited = row.key is not None, row.edited_payload is not None
        if reason := why_unfit(row.content, has_key=has_key, is_edited=is_edited):
            raise LetterRefused(letter_id, "redriven", reason)
        _update(
            tx,
            letter_id,
            GIVEN_AGAIN,
            state="redriving",
            target_id=trigger_id,
            resolved_by=storable_text(by, DONE_BY_CHARS_MAX),
            note=storable_text(note, NOTE_CHARS_MAX),
        )
        act = _tell(tx, "dlq redrive", letter_id, "redriving")
        if row.state == "open":
            record_action(tx, letter_id, "redriving", by, note, act=act)
        tx.notify()
        return Redriven(letter_id, "redriving")

    @acting
    def edit(self, tx: Tx, letter_id: int, payload: bytes, *, by: str, note: str = "") -> None:
        """Have a redrive store ``payload``, which is encoded by `headgate.protocol.values`; the original is kept.

        If the letter holds a message, its trigger gets the payload as the message. Raises `LetterRefused` for a letter
        that is not open, and for a payload that no letter could keep.
        """
        _locked(tx, letter_id, "edited", ("open",))
        if len(payload) > LETTER_BYTES_MAX:
            limit = f"the payload has {len(payload):,} bytes, and the limit is {LETTER_BYTES_MAX:,}"
            raise LetterRefused(letter_id, "edited", limit)
        _update(tx, letter_id, ("open",), edited_payload=payload)
        record_action(tx, letter_id, "edited", by, note, act=_tell(tx, "dlq edit", letter_id, "edited"))

    @acting
    def discard(self, tx: Tx, letter_id: int, *, by: str, note: str = "") -> None:
        """Resolve a letter without its event. Raises `LetterRefused` if it is resolved already."""
        _locked(tx, letter_id, "discarded", UNRESOLVED)
        _resolve(tx, letter_id, UNRESOLVED, "discarded", by, note)
        record_action(tx, letter_id, "discarded", by, note, act=_tell(tx, "dlq discard", letter_id, "discarded"))

    @reading
    def _target(self, tx: Tx, letter_id: int) -> _Target:
        """Return the trigger whose event a letter would be: its own, or that of the watcher of the same name now."""
        columns = (dead_letter.c.trigger_id, dead_letter.c.content, trigger.c.id, trigger.c.removed_at)
        over = trigger.c.finished_at
        letters = dead_letter.outerjoin(trigger, trigger.c.id == dead_letter.c.trigger_id)
        found = select(*columns, over).select_from(letters).where(dead_letter.c.id == letter_id)
        row = tx.connection.execute(found).first()
        if row is None:
            raise NoSuchRow("dead letter", str(letter_id))
        if row.id is None:
            raise LetterWithoutTrigger(letter_id, "redriven", f"there is no trigger {row.trigger_id}")
        if row.removed_at is None:
            if row.content != "event" and row.finished_at is not None:
                reason = f"its trigger {row.id} has returned, and gets no messages: restart its watcher first"
                raise LetterWithoutTrigger(letter_id, "redriven", reason)
            return _Target(int(row.id), row.content)
        name = select(asset_watcher.c.name).where(asset_watcher.c.trigger_id == row.id).scalar_subquery()
        present = select(asset_watcher.c.trigger_id).where(
            asset_watcher.c.name == name, asset_watcher.c.removed_at.is_(None)
        )
        successor = tx.connection.execute(present).scalar_one_or_none()
        if successor is None:
            reason = f"its trigger {row.trigger_id} was removed, and there is no watcher of the same name now"
            raise LetterWithoutTrigger(letter_id, "redriven", reason)
        return _Target(int(successor), row.content)


def _tell(tx: Tx, action: Action, letter_id: int, done: LetterAction) -> int | None:
    """Tell what a user does; all letters of one command have one row, to which their own records refer."""
    return tx.act(action, f"dead letter {letter_id}", of_many=LETTERS, counts={done: 1})


def _locked(tx: Tx, letter_id: int, verb: str, states: tuple[LetterState, ...]) -> Any:
    """Lock a letter and return its row. Raises `NoSuchRow`, and `LetterRefused` if it is in none of the states."""
    found = tx.connection.execute(select(dead_letter).where(dead_letter.c.id == letter_id).with_for_update()).first()
    if found is None:
        raise NoSuchRow("dead letter", str(letter_id))
    if found.state == "at_broker" and "at_broker" not in states:
        held = f"only the first {len(found.payload_head):,} of {found.payload_bytes:,} bytes of it are kept"
        raise LetterRefused(letter_id, verb, f"{held}: its broker has the message; {AT_BROKER_WAY_OUT}")
    if found.state == "redriving" and "redriving" not in states:
        raise LetterRefused(letter_id, verb, "its message is on its way to its trigger")
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
    _update(
        tx,
        letter_id,
        states,
        state=state,
        event_id=event_id,
        resolved_at=tx.now,
        resolved_by=storable_text(by, DONE_BY_CHARS_MAX),
        note=storable_text(note, NOTE_CHARS_MAX),
    )


def _update(tx: Tx, letter_id: int, states: tuple[LetterState, ...], **values: Any) -> None:
    """Change a letter that is locked, and in one of the states."""
    changed = update(dead_letter).where(dead_letter.c.id == letter_id, dead_letter.c.state.in_(states))
    assert tx.connection.execute(changed.values(values)).rowcount == 1, "the row is locked"
