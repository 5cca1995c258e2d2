"""Messages that users have redriven: from the dead letter to the trigger, and what comes of it.

A letter of content "message" holds no event: its events are known only when a filter has derived them. So a redrive
writes down what the user wants, and the supervisor that owns the trigger gives it the message once more, beside those
of its broker (`headgate.streams.redelivery`)::

    open --a user redrives it--> redriving --its trigger went past it--> redriven
     ^                               |
     `-- its trigger failed on it, rejected it, or cannot get it

In ``redriving``, ``target_id`` is the trigger. The state is left in the transaction that stores the cause: the end of
the message, or the failure of the trigger. So wherever a process dies, the letter is still ``redriving`` and its
message is given again, or its fate is stored. **Each event once**: a message that is given again derives events of the
same names (I2). **All of them**: if an event of the message is refused, the message is not handled, though a dead
letter holds that event.

A message that its trigger still cannot take costs one failure, not ``max_deliveries`` of them: its letter is open again
after the first, and a user decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from sqlalchemy import bindparam, delete, exists, func, insert, literal_column, null, or_, select, update

from headgate.protocol import marks
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    LETTER_BYTES_MAX,
    PASSED_OVER_POSITION,
    FinishedTrigger,
    RedeliveryEnd,
)
from headgate.store.access.tables import ONE
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Database, LeasedTx, Tx
from headgate.store.db.verbs import Verbs, leased, reading
from headgate.store.ids import LetterAction
from headgate.store.tables import dead_letter, letter_action, strike, trigger, trigger_event
from headgate.store.triggers.dead_letters import storable_text

REDELIVERIES_MAX = 16  # messages of one trigger that are read in one go
REDELIVERIES_BYTES_MAX = LETTER_BYTES_MAX  # of these, unless the first alone is longer
DONE_BY_CHARS_MAX = 200
NOTE_CHARS_MAX = ERROR_CHARS_MAX

_c = dead_letter.c
_REDRIVING = _c.state == literal_column("'redriving'")


class RedrivingLetter(msgspec.Struct, frozen=True):
    """A letter whose message is to be given to a trigger; ``message`` is what a user has made of it, if edited."""

    id: int
    key: str
    message: bytes


class RedriveVerbs(Verbs):
    """The verbs of the supervisor that gives redriven messages to its triggers."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        # Triggers that were given messages. No more than this supervisor may own: the ends of all others cost nothing.
        self.redriven_to: set[int] = set()

    @reading
    def redriving_letters(self, tx: Tx, trigger_id: int, *, given: Collection[int]) -> list[RedrivingLetter]:
        """Return the oldest letters that are to be given to a trigger, without those ``given`` to it already.

        They are at most `REDELIVERIES_MAX`, and `REDELIVERIES_BYTES_MAX` bytes; none means that there is none left.
        """
        message = func.coalesce(_c.edited_payload, _c.payload)
        mine = (_REDRIVING, _c.target_id == trigger_id, _c.id.not_in(given))
        sized = select(_c.id, func.length(message)).where(*mine).order_by(_c.id).limit(REDELIVERIES_MAX)
        ids: list[int] = []
        room = REDELIVERIES_BYTES_MAX
        for letter_id, size in tx.connection.execute(sized):
            room -= size
            if ids and room < 0:
                break
            ids.append(letter_id)
        whole = select(_c.id, _c.key, message).where(_c.id.in_(ids)).order_by(_c.id)
        if not ids:
            return []
        self.redriven_to.add(trigger_id)
        return [RedrivingLetter(*row) for row in tx.connection.execute(whole)]

    @leased
    def end_redeliveries(self, tx: LeasedTx, ends: Sequence[RedeliveryEnd]) -> None:
        """Record what became of messages; see `end`."""
        end(tx, ends)


def end(tx: LeasedTx, ends: Sequence[RedeliveryEnd]) -> None:
    """Record what became of messages of triggers that the epoch owns. Repeating it changes nothing.

    The message of a letter that is redriven now was handled, so its trigger is not passed over it any more.
    """
    for one in ends:
        if one.outcome == "handled":
            _redriven(tx, one.trigger_id, _c.id == one.letter_id)
        else:
            reason = one.error or "its filter rejected the message, or an event of it was refused"
            _reopen(tx, one, "rejected" if one.outcome == "rejected" else "failed", reason)
    if ends:
        marks.reach("redelivery.stored")


_other = dead_letter.alias()


def returned(tx: LeasedTx, runs: Sequence[FinishedTrigger]) -> None:
    """Resolve the letters of messages that were handled by runs which have returned, of triggers that the epoch owns.

    A run that returns is done with the message that it works on (I13), and its stream, which may end with it, does not
    wait until the events of the message are confirmed. No later run would get the message either. It was handled if the
    run has made an event of it, and no event of it is in another dead letter.
    """
    for run in runs:
        made = (trigger_event.c.trigger_id == run.trigger_id, trigger_event.c.key == _c.key)
        of_run = exists(ONE).where(*made, trigger_event.c.trigger_run_id == run.trigger_run_id)
        stands_for = exists(ONE).where(*made, trigger_event.c.position == _c.position)
        is_stored = or_(_c.position == PASSED_OVER_POSITION, stands_for)
        mine = (_other.c.trigger_id == run.trigger_id, _other.c.key == _c.key, _other.c.id != _c.id)
        is_refused = exists(ONE).where(*mine, _other.c.resolved_at.is_(None), _other.c.position != PASSED_OVER_POSITION)
        _redriven(tx, run.trigger_id, of_run, is_stored, ~is_refused)


def _is_mine(tx: LeasedTx, trigger_id: int) -> tuple[Any, ...]:
    owned = exists(ONE).where(trigger.c.id == trigger_id, trigger.c.triggerer_id == tx.epoch)
    return (_REDRIVING, _c.target_id == trigger_id, owned)


def _redriven(tx: LeasedTx, trigger_id: int, *which: Any) -> None:
    first = (
        select(trigger_event.c.id)
        .where(trigger_event.c.trigger_id == trigger_id, trigger_event.c.key == _c.key)
        .order_by(trigger_event.c.position)
        .limit(1)
        .scalar_subquery()
    )
    redriven = update(dead_letter).where(*_is_mine(tx, trigger_id), *which)
    values = {"state": "redriven", "event_id": first, "resolved_at": tx.now}
    for row in tx.connection.execute(redriven.values(values).returning(_c.id, _c.key, _c.event_id)).all():
        tx.connection.execute(delete(strike).where(strike.c.trigger_id == trigger_id, strike.c.key == row.key))
        note = "" if row.event_id is not None else "its filter made no event of the message"
        record_action(tx, row.id, "redriven", _name_of(tx), note)


def _reopen(tx: LeasedTx, one: RedeliveryEnd, action: LetterAction, reason: str) -> None:
    reopened = update(dead_letter).where(_c.id == one.letter_id, *_is_mine(tx, one.trigger_id)).values(_OPEN_AGAIN)
    if tx.connection.execute(reopened).rowcount:
        record_action(tx, one.letter_id, action, _name_of(tx), reason)


def _name_of(tx: LeasedTx) -> str:
    return f"supervisor {tx.epoch}"


# --- ends that the message itself does not tell ---------------------------------------------------

_OPEN_AGAIN = {
    "state": literal_column("'open'"),
    "deliveries": _c.deliveries + literal_column("1"),
    "target_id": null(),
    "resolved_by": null(),
    "note": null(),
}
_FAILED = Prepared(
    update(dead_letter)
    .where(_REDRIVING, _c.target_id == bindparam("of_trigger"), _c.key == bindparam("of_key"))
    .values(**_OPEN_AGAIN, reason=bindparam("reason"), traceback=bindparam("traceback"))
    .returning(_c.id)
)


def failed(tx: LeasedTx, trigger_id: int, key: str, error: str) -> None:
    """Open the letter of a message again, because its trigger, which the epoch owns, failed while it worked on it."""
    reason, _, traceback = error.partition("\n\n")
    where = {"of_trigger": trigger_id, "of_key": key}
    for (letter_id,) in _FAILED.run(tx.connection, **where, reason=reason, traceback=traceback).fetchall():
        record_action(tx, letter_id, "failed", _name_of(tx), reason)


def record_action(tx: Tx, letter_id: int, action: LetterAction, by: str, note: str, *, act: int | None = None) -> None:
    """Record something that was done with a letter, for those who look at it later.

    ``act`` is the row of the audit, if a user has done it.
    """
    row = insert(letter_action).values(
        letter_id=letter_id,
        action=action,
        done_by=storable_text(by, DONE_BY_CHARS_MAX),
        done_at=tx.now,
        note=storable_text(note, NOTE_CHARS_MAX),
        audit_id=act,
    )
    tx.connection.execute(row)
