"""Strikes: how often a trigger has failed on a message of its shared stream, and which messages it is passed over.

A message is struck if its trigger fails while it works on it, or if the runner's process ends meanwhile. After
``max_deliveries`` strikes, or `KILLS_MAX` ends of the process, it is *passed over* for this trigger alone: the runner
does not give it to the trigger any more, but reports it whole, and it becomes a dead letter. Whether a message is
passed over is computed from its row, so a supervisor that takes the trigger over knows it.

**The brake.** If it is not the message that is bad, but the trigger or what it needs, one message after the other would
become a dead letter. So a trigger is held if more than `BRAKE_IN_A_ROW` messages were passed over since its newest
event was stored, or more than `BRAKE_PASSED_OVER` among its last `BRAKE_MESSAGES`. Its stream waits for it, until a
user releases it. Stored events stand for messages that were handled, because the supervisor does not hear of messages
for which a filter fires nothing. Both numbers are read from the rows when a message is passed over, which is rare: so
they cost nothing otherwise, and a restart does not forget them. After a release they begin anew (``brake_from``).

Rows are written only for failures. A strike stays if the message is handled later; `headgate.store.cleaning` deletes
old ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, and_, bindparam, func, literal_column, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from headgate.protocol import marks
from headgate.protocol.messages.runner import ERROR_CHARS_MAX, KEY_CHARS_MAX, PASSED_OVER_KEYS_MAX
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import Verbs, leased
from headgate.store.tables import strike, trigger, trigger_event
from headgate.store.triggers import holds, redrives
from headgate.store.triggers.dead_letters import storable_name, storable_text

# After so many ends of the process with one message, it is passed over even if more deliveries are allowed: each end
# interrupts all triggers of the supervisor.
KILLS_MAX = 3

BRAKE_IN_A_ROW = 20
BRAKE_MESSAGES = 1000
BRAKE_PASSED_OVER = 100


class Failure(NamedTuple):
    """One failure of a trigger run on a message; ``kills`` is 1 if the runner's process ended with it, else 0."""

    trigger_id: int
    key: str
    run_id: str
    error: str  # with its traceback
    kills: int = 0


class Strikes(msgspec.Struct, frozen=True):
    """The strikes of one message of one trigger, of which ``kills`` were ends of the process.

    ``brake``: why its trigger is held from now on because of this strike; "" if it is not.
    """

    strikes: int
    kills: int
    is_passed_over: bool
    brake: str = ""


NO_STRIKES = Strikes(0, 0, False)


class StrikeVerbs(Verbs):
    """The verbs about failures that are not part of a round; those that are, `Store.store_slice` counts."""

    @leased
    def reset_failures(self, tx: LeasedTx, trigger_ids: Sequence[int]) -> None:
        """Record that these triggers do not fail any more; those that the epoch does not own are passed over."""
        _reset_failures(tx, trigger_ids)

    @leased
    def strike_message(self, tx: LeasedTx, trigger_id: int, key: str, run_id: str, error: str) -> Strikes:
        """Count an end of the runner's process while a trigger run worked on a message; return its strikes.

        Repeating it for the same run changes nothing, nor does a trigger that the epoch does not own: `NO_STRIKES`.
        """
        failure = Failure(trigger_id, key, run_id, error, kills=1)
        return count(tx, [failure]).get((trigger_id, key), NO_STRIKES)


def is_passed_over() -> ColumnElement[bool]:
    """Return the condition on a strike, joined with its trigger, that its message is passed over."""
    is_often = or_(strike.c.strikes >= trigger.c.max_deliveries, strike.c.kills >= KILLS_MAX)
    return and_(trigger.c.max_deliveries > 0, is_often)


# --- counting ------------------------------------------------------------------------------------


def _upsert(insert: Any) -> Prepared:
    columns = ("trigger_id", "key", "strikes", "kills", "last_error", "last_run_id", "last_at")
    values = select(
        trigger.c.id,
        bindparam("key"),
        literal_column("1"),
        bindparam("kills"),
        bindparam("error"),
        bindparam("run_id"),
        bindparam("now"),
    ).where(trigger.c.id == bindparam("id_"), trigger.c.triggerer_id == bindparam("epoch"))
    statement = insert(strike).from_select(columns, values)
    new = statement.excluded
    return Prepared(
        statement.on_conflict_do_update(
            index_elements=[strike.c.trigger_id, strike.c.key],
            set_={
                "strikes": strike.c.strikes + literal_column("1"),
                "kills": strike.c.kills + new.kills,
                **{name: new[name] for name in ("last_error", "last_run_id", "last_at")},
            },
            # A run fails once: if it is reported again, because it was unknown whether the commit arrived, or if its
            # process ends before the report is confirmed, it is not counted again.
            where=strike.c.last_run_id != new.last_run_id,
        )
    )


_COUNT = {"sqlite": _upsert(sqlite.insert), "postgresql": _upsert(postgresql.insert)}
_STRUCK = Prepared(
    select(strike.c.strikes, strike.c.kills, is_passed_over())
    .join(trigger, trigger.c.id == strike.c.trigger_id)
    .where(
        strike.c.trigger_id == bindparam("id_"),
        strike.c.key == bindparam("key"),
        trigger.c.triggerer_id == bindparam("epoch"),
    )
)


def count(tx: LeasedTx, failures: Sequence[Failure]) -> dict[tuple[int, str], Strikes]:
    """Count failures on messages; return the strikes by trigger and key, of the triggers that the epoch owns.

    A trigger one of whose messages is passed over because of this does not count as failing any more: it can go on.
    """
    now = bound(tx.connection, tx.now)
    rows = [
        {
            "id_": failure.trigger_id,
            "epoch": tx.epoch,
            "key": storable_name(failure.key),
            "kills": failure.kills,
            "error": storable_text(failure.error, ERROR_CHARS_MAX),
            "run_id": storable_text(failure.run_id, KEY_CHARS_MAX),
            "now": now,
        }
        for failure in failures
    ]
    _COUNT[tx.connection.dialect.name].run_many(tx.connection, rows)
    counted = {}
    newest: dict[int, Failure] = {}  # of each trigger, on a message that it is passed over: all are counted by then
    for failure in failures:
        key = storable_name(failure.key)
        row = _STRUCK.run(tx.connection, id_=failure.trigger_id, key=key, epoch=tx.epoch).fetchone()
        if row is not None:
            redrives.failed(tx, failure.trigger_id, key, storable_text(failure.error, ERROR_CHARS_MAX))
            counted[failure.trigger_id, failure.key] = strikes = Strikes(row[0], row[1], bool(row[2]))
            newest |= {failure.trigger_id: failure} if strikes.is_passed_over else {}
    for failure in newest.values():
        of = failure.trigger_id, failure.key
        counted[of] = msgspec.structs.replace(counted[of], brake=_brake(tx, failure))
    if newest:
        _reset_failures(tx, sorted(newest))
        marks.reach("strikes.passed_over")
    return counted


def _reset_failures(tx: LeasedTx, trigger_ids: Sequence[int]) -> None:
    for some in chunks(sorted(trigger_ids)):
        mine = and_(trigger.c.id.in_(some), trigger.c.triggerer_id == tx.epoch)
        tx.connection.execute(update(trigger).where(mine).values(failure_count=0))


# --- the brake -----------------------------------------------------------------------------------


def _nth_newest_event_at(number: int) -> ColumnElement[Any]:
    """Return when the event of the trigger was stored that has ``number`` - 1 newer ones; null if there is none."""
    newest = select(trigger_event.c.stored_at).where(trigger_event.c.trigger_id == bindparam("id_"))
    limited = newest.order_by(trigger_event.c.id.desc()).limit(literal_column("1"))
    return limited.offset(literal_column(str(number - 1))).scalar_subquery()


def _since(moment: ColumnElement[Any]) -> ColumnElement[bool]:
    return or_(moment.is_(None), strike.c.last_at > moment)


_PASSED_OVER_COUNTS = Prepared(
    select(
        func.count().filter(_since(_nth_newest_event_at(1))),
        func.count().filter(_since(_nth_newest_event_at(BRAKE_MESSAGES - BRAKE_PASSED_OVER))),
    )
    .select_from(strike)
    .join(trigger, trigger.c.id == strike.c.trigger_id)
    .where(strike.c.trigger_id == bindparam("id_"), is_passed_over(), _since(trigger.c.brake_from))
)


def _brake(tx: LeasedTx, failure: Failure) -> str:
    """Hold a trigger that is passed over one more message if these are too many; return why, "" if they are not."""
    in_a_row, among_last = _PASSED_OVER_COUNTS.run(tx.connection, id_=failure.trigger_id).fetchone()
    if in_a_row > BRAKE_IN_A_ROW:
        what = f"{in_a_row} messages in a row"
    elif among_last > BRAKE_PASSED_OVER:
        what = f"{among_last} of its last {BRAKE_MESSAGES:,} messages"
    else:
        return ""
    reason = f"it failed too often on {what}, the last one {failure.key!r}: {failure.error.partition(chr(10))[0]}"
    if not holds.hold_own(tx, failure.trigger_id, "brake", reason):
        return ""
    tx.connection.execute(update(trigger).where(trigger.c.id == failure.trigger_id).values(brake_from=tx.now))
    return reason


# --- the messages passed over, at a claim --------------------------------------------------------

_ranked = (
    select(
        strike.c.trigger_id,
        strike.c.key,
        func.row_number()
        .over(partition_by=strike.c.trigger_id, order_by=(strike.c.last_at.desc(), strike.c.key.desc()))
        .label("rank"),
    )
    .join(trigger, trigger.c.id == strike.c.trigger_id)
    .where(strike.c.trigger_id.between(bindparam("first"), bindparam("last")), is_passed_over())
    .subquery()
)
# The newest of each trigger, in the order in which they were struck.
_PASSED_OVER = Prepared(
    select(_ranked.c.trigger_id, _ranked.c.key)
    .where(_ranked.c.rank <= literal_column(str(PASSED_OVER_KEYS_MAX)))
    .order_by(_ranked.c.trigger_id, _ranked.c.rank.desc())
)


def passed_over_of(tx: Tx, trigger_ids: Collection[int]) -> Mapping[int, tuple[str, ...]]:
    """Return the keys of messages that these triggers are passed over, the oldest first; at most the newest
    `PASSED_OVER_KEYS_MAX` of each. A trigger without any is left out.
    """
    if not trigger_ids:
        return {}
    rows = _PASSED_OVER.run(tx.connection, first=min(trigger_ids), last=max(trigger_ids)).fetchall()
    found: dict[int, list[str]] = {}
    for trigger_id, key in rows:
        if trigger_id in trigger_ids:
            found.setdefault(trigger_id, []).append(key)
    return {trigger_id: tuple(keys) for trigger_id, keys in found.items()}
