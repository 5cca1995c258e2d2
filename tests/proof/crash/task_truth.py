"""The truth of a crash test of tasks: their journal and their rows, read by our own means into a history.

Nothing here uses the code under test, but for the names of its tables.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec
from tests.proof.crash.connections import Connections
from tests.proof.history.task_history import TERMINAL, Checker, Report
from tests.proof.history.task_records import Fault, LeftBehind, Looked, Made, Record, Row, decode_lines, encode

# One statement sees one state of the database: what it finds together was true at once.
_ROWS = """
SELECT t.id, d.name, r.run_id, t.task_id, t.state, t.try_number,
       t.state = 'deferred' AND t.trigger_timeout IS NULL AND (g.finished_at IS NOT NULL OR g.removed_at IS NOT NULL)
FROM task_instance t JOIN dag_run r ON r.id = t.dag_run_id JOIN dag d ON d.id = r.dag_id
LEFT JOIN "trigger" g ON g.id = t.trigger_id ORDER BY t.id
"""
_UNFINISHED = f"""
SELECT count(*) FROM task_instance WHERE state NOT IN ({", ".join(f"'{state}'" for state in sorted(TERMINAL))})
"""
_RUNS_GOING_ON = "SELECT count(*) FROM dag_run WHERE ended_at IS NULL"
_XCOMS = "SELECT task_instance_id, key, value FROM xcom"
_ORPHANS = """
SELECT g.id FROM "trigger" g WHERE g.finished_at IS NULL AND g.removed_at IS NULL
AND NOT EXISTS (SELECT 1 FROM task_instance t WHERE t.trigger_id = g.id)
AND NOT EXISTS (SELECT 1 FROM asset_watcher w WHERE w.trigger_id = g.id)
"""
# What a dead supervisor had when its task went on keeps that owner: nobody runs it.
_OWNED = """
SELECT g.id FROM "trigger" g JOIN triggerer o ON o.id = g.triggerer_id
WHERE o.fenced_at IS NULL AND o.stopped_at IS NULL
"""
_DAGS = "SELECT count(*) FROM dag"
_DEAD_LETTERS = "SELECT count(*) FROM dead_letter"


class TaskTruth(Connections):
    """What is known of one database and one journal; grows by `made`, `fault` and `look`."""

    def __init__(self, url: str, journal: Path) -> None:
        super().__init__(url)
        self._journal = journal
        self._read_to = 0
        self._rows: dict[str, Row] = {}
        self._checker = Checker()
        self._history: list[Record] = []

    def made(self, tasks: Iterable[str], at: str) -> None:
        """A run was made with these tasks."""
        self._record([Made(task, at=at) for task in tasks])

    def fault(self, at: str, pid: int = 0) -> None:
        """Something is done that may cost tries: of what this worker runs, or, by default, of all."""
        self._record([Fault(at, pid)])

    def report(self) -> Report:
        """Say what all looks together show."""
        return self._checker.report()

    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """Read the tables, and after them the journal, where the causes of what they say stand by then.

        ``is_over``: nobody should have a trigger any more, not even one that is over.
        """
        orphans = self._ids(_ORPHANS) | (self._ids(_OWNED) if is_over else set())
        found = self._reader.ask(_ROWS)
        xcoms = self._read_xcoms() if at_rest else {}  # after the rows: of what has ended, all is there by then
        rows = [
            Row(f"{dag}/{run}/{task}", state, try_number, xcoms.get(id_, {}), bool(is_stranded), at)
            for id_, dag, run, task, state, try_number, is_stranded in found
        ]
        self._record(self._read_journal())
        for row in rows:
            known = self._rows.get(row.task)
            if known is None or msgspec.structs.replace(known, at=at) != row:
                self._rows[row.task] = row
                self._record([row])
        self._record([LeftBehind(str(trigger), at) for trigger in sorted(orphans)])
        self._record([Looked(at, at_rest)])

    def is_complete(self) -> bool:
        """Whether every task and every run has ended, and nothing waits for what is not there."""
        return not (self._number(_UNFINISHED) or self._number(_RUNS_GOING_ON) or self._ids(_ORPHANS))

    def is_released(self) -> bool:
        """Whether nobody has a trigger any more."""
        return not self._ids(_OWNED)

    def unfinished(self) -> int:
        """How many tasks have not ended."""
        return self._number(_UNFINISHED)

    def has_dag(self) -> bool:
        """Whether a DAG is known."""
        return bool(self._number(_DAGS))

    def dead_letters(self) -> int:
        """How many events were put aside; here none should be."""
        return self._number(_DEAD_LETTERS)

    def write_history(self, path: Path) -> None:
        """Keep the history, for ``python -m tests.proof.history.task_history``."""
        path.write_bytes(b"".join(map(encode, self._history)))

    def _record(self, records: Iterable[Record]) -> None:
        for record in records:
            self._history.append(record)
            self._checker.add(record)

    def _read_journal(self) -> list[Record]:
        if not self._journal.exists():
            return []
        with self._journal.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read_to += whole
        return list(decode_lines(data[:whole], where=str(self._journal)))

    def _read_xcoms(self) -> dict[int, dict[str, str]]:
        found: defaultdict[int, dict[str, str]] = defaultdict(dict)
        for task_instance_id, key, value in self._reader.ask(_XCOMS):
            found[task_instance_id][key] = json.loads(bytes(value))
        return found

    def _ids(self, statement: str) -> set[int]:
        return {id_ for (id_,) in self._reader.ask(statement)}
