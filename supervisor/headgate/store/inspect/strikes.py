"""Read-only queries about the messages that triggers have failed on."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import exists, func, select

from headgate.store.access.tables import ONE
from headgate.store.db.transaction import Tx
from headgate.store.tables import strike, trigger, trigger_event
from headgate.store.triggers.strikes import is_passed_over

STRIKES_SHOWN_MAX = 20  # of one trigger, the newest


class StrikeLine(msgspec.Struct, frozen=True):
    """One message that a trigger has failed on and has fired nothing for since."""

    key: str
    strikes: int
    kills: int
    is_passed_over: bool
    last_error: str
    last_run_id: str
    last_at: datetime


def strikes_of(tx: Tx, trigger_id: int, limit: int = STRIKES_SHOWN_MAX) -> list[StrikeLine]:
    """Return the messages that a trigger has failed on, those of the newest failures first."""
    names = [name for name in StrikeLine.__struct_fields__ if name != "is_passed_over"]
    is_handled = exists(ONE).where(
        trigger_event.c.trigger_id == strike.c.trigger_id,
        trigger_event.c.key == strike.c.key,
        trigger_event.c.stored_at > strike.c.last_at,
    )
    statement = (
        select(*(strike.c[name] for name in names), is_passed_over().label("is_passed_over"))
        .join(trigger, trigger.c.id == strike.c.trigger_id)
        .where(strike.c.trigger_id == trigger_id, ~is_handled)
        .order_by(strike.c.last_at.desc(), strike.c.key)
        .limit(limit)
    )
    # SQLAlchemy's names are a subclass of str, and SQLite has 0 and 1 for false and true.
    rows = ({str(name): value for name, value in row._mapping.items()} for row in tx.connection.execute(statement))
    return [msgspec.convert(row, StrikeLine, strict=False) for row in rows]


def count_passed_over(tx: Tx, trigger_id: int) -> int:
    """Return the number of messages that a trigger is not given any more."""
    which = (strike.c.trigger_id == trigger_id, is_passed_over())
    return int(tx.connection.execute(select(func.count()).select_from(strike).join(trigger).where(*which)).scalar_one())
