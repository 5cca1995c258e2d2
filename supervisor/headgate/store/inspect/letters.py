"""Read-only queries about dead letters: lists by filters, one whole letter, and the numbers before a bulk action."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from sqlalchemy import ColumnElement, and_, func, or_, select

from headgate.protocol.messages.runner import LetterContent
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import NoSuchRow
from headgate.store.ids import LetterAction, LetterState
from headgate.store.inspect.dags import NEWEST_SHOWN
from headgate.store.tables import asset_watcher, dead_letter, letter_action
from headgate.store.triggers.watchers import check_known

UNRESOLVED: tuple[LetterState, ...] = ("open", "at_broker", "redriving")  # the states in which something is to be done


class LetterFilter(msgspec.Struct, frozen=True):
    """Which dead letters are meant; what is None does not matter.

    ``watcher`` is every watcher that has or had this name. ``reason`` is a part of it, in any case of its letters. With
    ``is_fit`` only those that a redrive may take as they are, see `why_unfit`.
    """

    watcher: str | None = None
    content: LetterContent | None = None
    reason: str | None = None
    states: tuple[LetterState, ...] | None = None
    is_fit: bool = False

    def condition(self) -> ColumnElement[bool]:
        """Return the condition on a dead letter."""
        conditions = [dead_letter.c.id > 0]
        if self.watcher is not None:
            named = select(asset_watcher.c.trigger_id).where(asset_watcher.c.name == self.watcher)
            conditions.append(dead_letter.c.trigger_id.in_(named))
        if self.content is not None:
            conditions.append(dead_letter.c.content == self.content)
        if self.reason is not None:
            conditions.append(dead_letter.c.reason.icontains(self.reason, autoescape=True))
        if self.is_fit:
            can_be_read = or_(dead_letter.c.content != "undecoded", dead_letter.c.edited_payload.is_not(None))
            conditions.append(or_(dead_letter.c.content == "event", and_(can_be_read, dead_letter.c.key.is_not(None))))
        if self.states is not None:
            conditions.append(dead_letter.c.state.in_(self.states))
            if set(self.states) <= set(UNRESOLVED):
                conditions.append(dead_letter.c.resolved_at.is_(None))  # the index of these
        return and_(*conditions)


EVERY_LETTER = LetterFilter()


def why_unfit(content: LetterContent, *, has_key: bool, is_edited: bool) -> str:
    """Return why no redrive may take a letter as it is, "" if one may; `LetterFilter.is_fit` is the same in SQL."""
    if content == "undecoded" and not is_edited:
        hint = "edit it, so that it is a message as its filter expects it, or discard it"
        return f"its producer could not decode the message: {hint}"
    if content != "event" and not has_key:
        return "its producer gives its messages no keys, so events that are stored already would not be known"
    return ""


class DeadLetterRow(msgspec.Struct, frozen=True):
    """One event that could not be stored, or message that its trigger could not take, and why.

    ``payload_head`` is the beginning of the payload, which is kept whole if ``payload_kept``: that of the event, or if
    ``content`` is "message" or "undecoded", the message of the shared stream. ``deliveries``: how often it was
    seen. ``event_id``: the event that stands for it, which may have been deleted since.
    """

    id: int
    watcher: str | None
    trigger_id: int
    trigger_run_id: str
    sequence_index: int
    key: str | None
    position: int
    payload_head: bytes
    payload_bytes: int
    payload_kept: bool
    reason: str
    stored_at: datetime
    content: LetterContent
    kind: str
    is_last: bool
    deliveries: int
    state: LetterState
    event_id: int | None
    resolved_at: datetime | None
    resolved_by: str | None
    note: str | None


class Action(msgspec.Struct, frozen=True):
    """Something that a user did to a dead letter."""

    action: LetterAction
    done_by: str
    done_at: datetime
    note: str


class DeadLetter(msgspec.Struct, frozen=True):
    """All of a dead letter. ``payload`` is None if only its head was kept; ``traceback`` is "" if there is none.

    ``edited_payload``: what a user wants stored in place of ``payload``; None if nobody has edited it. ``actions`` have
    the oldest first.
    """

    row: DeadLetterRow
    payload: bytes | None
    traceback: str
    edited_payload: bytes | None
    actions: tuple[Action, ...]


class LetterCount(msgspec.Struct, frozen=True):
    """The number of dead letters of one watcher and content; ``newest_id`` is the greatest id among them."""

    watcher: str | None
    content: LetterContent
    state: LetterState
    letters: int
    payload_bytes: int
    newest_id: int


_LETTERS = dead_letter.outerjoin(asset_watcher, asset_watcher.c.trigger_id == dead_letter.c.trigger_id)
_LETTER_COLUMNS = [
    asset_watcher.c.name.label("watcher") if name == "watcher" else dead_letter.c[name]
    for name in DeadLetterRow.__struct_fields__
]


class LetterInspection(Verbs):
    """The queries about dead letters. Each raises `NoSuchWatcher` for a filter with a name that no watcher ever had."""

    @reading
    def dead_letters(
        self,
        tx: Tx,
        limit: int = NEWEST_SHOWN,
        *,
        which: LetterFilter = EVERY_LETTER,
        beyond_id: int | None = None,
    ) -> list[DeadLetterRow]:
        """Return the newest dead letters, newest first, from ``beyond_id`` downwards."""
        check_known(tx, which.watcher)
        statement = select(*_LETTER_COLUMNS).select_from(_LETTERS).where(which.condition())
        if beyond_id is not None:
            statement = statement.where(dead_letter.c.id < beyond_id)
        newest = statement.order_by(dead_letter.c.id.desc()).limit(limit)
        return [DeadLetterRow(**row._mapping) for row in tx.connection.execute(newest)]

    @reading
    def letters_by_id(self, tx: Tx, ids: Sequence[int]) -> list[DeadLetterRow]:
        """Return the dead letters with these ids that are there, the oldest first."""
        statement = select(*_LETTER_COLUMNS).select_from(_LETTERS).where(dead_letter.c.id.in_(ids))
        return [DeadLetterRow(**row._mapping) for row in tx.connection.execute(statement.order_by(dead_letter.c.id))]

    @reading
    def dead_letter(self, tx: Tx, letter_id: int) -> DeadLetter:
        """Return all of a dead letter. Raises `NoSuchRow`."""
        others = (dead_letter.c.payload, dead_letter.c.traceback, dead_letter.c.edited_payload)
        statement = select(*_LETTER_COLUMNS, *others).select_from(_LETTERS).where(dead_letter.c.id == letter_id)
        found = tx.connection.execute(statement).mappings().first()
        if found is None:
            raise NoSuchRow("dead letter", str(letter_id))
        row = DeadLetterRow(**{name: found[name] for name in DeadLetterRow.__struct_fields__})
        columns = [letter_action.c[name] for name in Action.__struct_fields__]
        actions = select(*columns).where(letter_action.c.letter_id == letter_id).order_by(letter_action.c.id)
        done = tuple(Action(**action._mapping) for action in tx.connection.execute(actions))
        return DeadLetter(row, found["payload"], found["traceback"], found["edited_payload"], done)

    @reading
    def count_letters(self, tx: Tx, which: LetterFilter) -> list[LetterCount]:
        """Count the dead letters by watcher, content and state."""
        check_known(tx, which.watcher)
        by = (asset_watcher.c.name.label("watcher"), dead_letter.c.content, dead_letter.c.state)
        numbers = (
            func.count().label("letters"),
            func.sum(dead_letter.c.payload_bytes).label("payload_bytes"),
            func.max(dead_letter.c.id).label("newest_id"),
        )
        counted = select(*by, *numbers).select_from(_LETTERS).where(which.condition()).group_by(*by)
        rows = tx.connection.execute(counted.order_by(func.min(dead_letter.c.id)))
        # PostgreSQL sums up to a decimal.
        return [LetterCount(name, what, state, n, int(size), newest) for name, what, state, n, size, newest in rows]

    @reading
    def letter_ids(self, tx: Tx, which: LetterFilter, *, after_id: int, up_to_id: int, limit: int) -> list[int]:
        """Return the ids of up to ``limit`` dead letters, the oldest first, from ``after_id`` on to ``up_to_id``."""
        between = (dead_letter.c.id > after_id, dead_letter.c.id <= up_to_id)
        statement = select(dead_letter.c.id).where(which.condition(), *between).order_by(dead_letter.c.id).limit(limit)
        return list(tx.connection.execute(statement).scalars())
