"""What the database says of rules about the time, and of those about which operators decide."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tests.proof.simulation.database import EPOCH_OF_TIME
from tests.proof.simulation.tasks.signals import records

_UNDECIDED = """
SELECT task_instance_id, rule, seen_version, coalesce(met_version, 0), coalesce(decided, ''),
  coalesce(decision_error, '') FROM signal_wait WHERE asks AND rule IS NOT NULL ORDER BY id
"""
_TICKED = """
SELECT task_instance_id, rule, seen_version, due_at FROM signal_wait
WHERE every_s IS NOT NULL OR cron IS NOT NULL ORDER BY id
"""
_OVER = "SELECT id FROM triggerer WHERE fenced_at IS NOT NULL OR stopped_at IS NOT NULL ORDER BY id"
_GIVEN_UP = re.compile(r"version (\d+), try 3 of 3: ")


class JobReader:
    """Tells what has changed since the last look."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], tuple[Any, ...]] = {}
        self._over: set[int] = set()

    def changes(self, connection: sqlite3.Connection, names: Mapping[int, str], now: float, by: str) -> list[Any]:
        """Return the records; ``names`` are those of tasks."""
        over = {epoch for (epoch,) in connection.execute(_OVER)}
        found: list[Any] = [records.LeaseOver(now, epoch) for epoch in sorted(over - self._over)]
        self._over = over
        for id_, rule, *rest, error in connection.execute(_UNDECIDED):
            given_up = _GIVEN_UP.match(error)
            row = (*rest, int(given_up[1]) if given_up else 0)
            if self._is_new(id_, rule, row):
                found.append(records.Undecided(now, by, names[id_], rule, *row))
        for id_, rule, version, due_at in connection.execute(_TICKED):
            if self._is_new(id_, rule, (version, due_at)):
                found.append(records.Ticked(now, by, names[id_], rule, version, _seconds(due_at)))
        return found

    def _is_new(self, id_: int, rule: str, row: tuple[Any, ...]) -> bool:
        before, self._rows[id_, rule] = self._rows.get((id_, rule)), row
        return before != row


def _seconds(due_at: str | None) -> float | None:
    if due_at is None:
        return None
    return (datetime.fromisoformat(f"{due_at}+00:00") - EPOCH_OF_TIME).total_seconds()
