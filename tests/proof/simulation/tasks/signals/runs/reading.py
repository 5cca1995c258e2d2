"""What the database says of runs for signals: what waits for them, which have it, and which are to end."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from tests.proof.simulation.tasks.signals import records
from tests.proof.simulation.tasks.signals.runs.plans import RunsOn

_KEPT = """
SELECT s.id, dag.name, s.key, s.version, s.value, coalesce(dag.name || '/' || r.run_id, ''), s.is_superseded, s.wait_id
FROM dag_signal AS s JOIN dag ON dag.id = s.dag_id LEFT JOIN dag_run AS r ON r.id = s.dag_run_id ORDER BY s.id
"""
_OF_DAGS = "SELECT id, rule FROM signal_wait WHERE dag_id IS NOT NULL"
_ENDING = "SELECT dag.name || '/' || r.run_id, is_ending FROM dag_run AS r JOIN dag ON dag.id = r.dag_id ORDER BY r.id"
_ENDS = """
SELECT w.id, dag.name || '/' || r.run_id, w.key, coalesce(w.met_version, 0) FROM signal_wait AS w
JOIN dag_run AS r ON r.id = w.dag_run_id JOIN dag ON dag.id = r.dag_id
WHERE w.task_instance_id IS NULL AND w.rule IS NOT NULL ORDER BY w.id
"""
_MADE = "SELECT id, task_instance_id, rule FROM signal_wait WHERE task_instance_id IS NOT NULL AND id > ? ORDER BY id"
_NOT_LOOKED_AT = """
SELECT count(*) FROM signal_wait AS w LEFT JOIN signal_key AS k ON k.namespace = w.namespace AND k.key = w.key
WHERE w.dag_id IS NOT NULL AND (w.is_fresh OR w.seen_version < coalesce(k.last_version, 0))
"""
_WAITING = """
SELECT count(*), count(DISTINCT wait_id) FROM dag_signal AS s JOIN dag ON dag.id = s.dag_id
WHERE s.dag_run_id IS NULL AND dag.name = ?
"""
_OPEN = "SELECT dag.name || '/' || run_id FROM dag_run JOIN dag ON dag.id = dag_id WHERE ended_at IS NULL AND name = ?"


class RunReader:
    """Tells what has changed since the last look."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, ...]] = {}
        self._ending: dict[str, bool] = {}
        self._ends: dict[int, tuple[Any, ...]] = {}
        self._rules: dict[int, str] = {}
        self._last_made = 0

    def changes(self, connection: sqlite3.Connection, names: Mapping[int, str], now: float, by: str) -> list[Any]:
        """Return the records; ``names`` are those of tasks."""
        self._rules |= dict(connection.execute(_OF_DAGS).fetchall())
        found = [*self._signals(connection, now, by), *self._ends_of_runs(connection, now, by)]
        for id_, task, rule in connection.execute(_MADE, (self._last_made,)).fetchall():
            self._last_made = id_
            found.append(records.RuleMade(now, by, names[task], rule))
        return found

    def _signals(self, connection: sqlite3.Connection, now: float, by: str) -> list[Any]:
        found: list[Any] = []
        rows = {row[0]: row[1:] for row in connection.execute(_KEPT)}
        for id_ in sorted(rows.keys() | self._kept.keys()):
            row, before = rows.get(id_), self._kept.get(id_)
            if row == before:
                continue
            dag, key, version, value, run, is_superseded, wait = row or before or ()
            rule, text = self._rules.get(wait, ""), bytes(value).decode()
            is_gone = row is None
            found.append(
                records.RunSignal(now, by, id_, dag, rule, key, version, text, run, bool(is_superseded), is_gone)
            )
        self._kept = rows
        return found

    def _ends_of_runs(self, connection: sqlite3.Connection, now: float, by: str) -> list[Any]:
        found: list[Any] = []
        for run, is_ending in connection.execute(_ENDING).fetchall():
            if self._ending.get(run, False) != bool(is_ending):
                found.append(records.RunToEnd(now, by, run, bool(is_ending)))
            self._ending[run] = bool(is_ending)
        ends = {row[0]: row[1:] for row in connection.execute(_ENDS)}
        for id_, (run, key, version) in ends.items():
            if self._ends.get(id_, (run, key, 0)) != (run, key, version):
                found.insert(0, records.EndMet(now, by, run, key, version))
        self._ends = ends
        return found


def has_runs_to_come(connection: sqlite3.Connection, dags: Mapping[str, RunsOn]) -> bool:
    """Whether signals that were sent are to make runs; those that a contract has wait for others do not count."""
    if connection.execute(_NOT_LOOKED_AT).fetchone()[0]:
        return True
    for dag, plan in dags.items():
        waiting, rules = connection.execute(_WAITING, (dag,)).fetchone()
        is_short = plan.contract == "batch" and plan.seconds is None and waiting < plan.count
        if waiting and not is_short and (plan.contract != "all" or rules == len(plan.rules)):
            return True
    return False


def open_runs(connection: sqlite3.Connection, dag: str) -> list[str]:
    """Return the runs of a DAG that have not ended."""
    return [name for (name,) in connection.execute(_OPEN, (dag,))]
