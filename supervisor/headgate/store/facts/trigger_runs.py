"""The newest runs of watchers' triggers, written down when they end."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import delete, insert, select

from headgate.protocol.messages.runner import FinishedTrigger, Outcome
from headgate.store.db.transaction import Tx
from headgate.store.tables import trigger_run

RUNS_KEPT: Final = 50  # of one trigger
ERROR_CHARS: Final = 300  # of the first line of the error; the whole of the newest one is the trigger's


class TriggerRunRow(msgspec.Struct, frozen=True):
    """A run of a trigger that has ended. ``events`` is how many it has fired, ``error`` the first line of its error."""

    trigger_run_id: str
    ended_at: datetime
    outcome: Outcome
    events: int
    error: str | None


def write(tx: Tx, runs: Iterable[FinishedTrigger]) -> None:
    """Write down runs that end in this transaction. A run whose end is reported again has one row all the same."""
    for run in runs:
        of_it = trigger_run.c.trigger_id == run.trigger_id
        known = select(trigger_run.c.id).where(of_it, trigger_run.c.trigger_run_id == run.trigger_run_id).limit(1)
        if tx.connection.execute(known).first() is not None:
            continue
        lines = run.error.splitlines()
        new = insert(trigger_run).values(
            trigger_id=run.trigger_id,
            trigger_run_id=run.trigger_run_id,
            ended_at=tx.now,
            outcome=run.outcome,
            events=run.events,
            error=lines[0][:ERROR_CHARS] if lines else None,
        )
        tx.connection.execute(new)
        older = select(trigger_run.c.id).where(of_it).order_by(trigger_run.c.id.desc()).offset(RUNS_KEPT).limit(1)
        tx.connection.execute(delete(trigger_run).where(of_it, trigger_run.c.id <= older.scalar_subquery()))


def newest(tx: Tx, trigger_id: int, limit: int = RUNS_KEPT) -> list[TriggerRunRow]:
    """Return the newest runs of a trigger that have ended, the newest first."""
    columns = [trigger_run.c[name] for name in TriggerRunRow.__struct_fields__]
    rows = select(*columns).where(trigger_run.c.trigger_id == trigger_id).order_by(trigger_run.c.id.desc())
    return [TriggerRunRow(**row._mapping) for row in tx.connection.execute(rows.limit(limit))]
