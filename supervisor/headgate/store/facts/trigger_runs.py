"""The newest runs of watchers' triggers, written down when they end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import Integer, bindparam, delete, select

from headgate.protocol.messages.runner import FinishedTrigger, Outcome
from headgate.store.db.bulk import Kind, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import Tx
from headgate.store.tables import trigger_run

RUNS_KEPT: Final = 50  # of one trigger
ERROR_CHARS: Final = 300  # of the first line of the error; the whole of the newest one is the trigger's

_ROW: Final = Kind(trigger_run, ("trigger_id", "trigger_run_id", "ended_at", "outcome", "events", "error"))
_OF_IT = trigger_run.c.trigger_id == bindparam("of")
_KNOWN: Final = Prepared(
    select(trigger_run.c.id).where(_OF_IT, trigger_run.c.trigger_run_id == bindparam("run_id")).limit(1)
)
_older = select(trigger_run.c.id).where(_OF_IT).order_by(trigger_run.c.id.desc())
_older = _older.offset(bindparam("kept", type_=Integer())).limit(1)
_PRUNE: Final = Prepared(delete(trigger_run).where(_OF_IT, trigger_run.c.id <= _older.scalar_subquery()))


class TriggerRunRow(msgspec.Struct, frozen=True):
    """A run of a trigger that has ended. ``events`` is how many it has fired, ``error`` the first line of its error."""

    trigger_run_id: str
    ended_at: datetime
    outcome: Outcome
    events: int
    error: str | None


def write(tx: Tx, runs: Sequence[FinishedTrigger]) -> None:
    """Write down runs that end in this transaction. A run whose end is reported again has one row all the same."""
    if not runs:
        return
    connection, now = tx.connection, bound(tx.connection, tx.now)
    known = _KNOWN.run_each(connection, [{"of": run.trigger_id, "run_id": run.trigger_run_id} for run in runs])
    rows = [
        (run.trigger_id, run.trigger_run_id, now, run.outcome, run.events, _first_line(run.error))
        for run, found in zip(runs, known, strict=True)
        if not found
    ]
    if rows:
        insert_new(connection, _ROW, rows, returning=("id",))
        _PRUNE.run_many(connection, [{"of": number, "kept": RUNS_KEPT} for number in {row[0]: None for row in rows}])


def _first_line(error: str) -> str | None:
    lines = error.splitlines()
    return lines[0][:ERROR_CHARS] if lines else None


def newest(tx: Tx, trigger_id: int, limit: int = RUNS_KEPT) -> list[TriggerRunRow]:
    """Return the newest runs of a trigger that have ended, the newest first."""
    columns = [trigger_run.c[name] for name in TriggerRunRow.__struct_fields__]
    rows = select(*columns).where(trigger_run.c.trigger_id == trigger_id).order_by(trigger_run.c.id.desc())
    return [TriggerRunRow(**row._mapping) for row in tx.connection.execute(rows.limit(limit))]
