"""The workload of tasks with streams: runs of one DAG whose tasks handle numbers in order, and their truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from tests.proof.crash.workloads.tasks import DagTruth, TaskWorkload
from tests.proof.history.stream_history import (
    PART,
    TOTAL,
    Checker,
    LeftBehind,
    Looked,
    Made,
    Part,
    Record,
    Report,
    Row,
    decode_lines,
)

from headgate.protocol.marks import TASK_STREAM_MARKS, Mark
from headgate.tasks.context import RETURN_VALUE
from headgate.testing.crash.journal import JournalReader

TASKS = ("available", "keyed", "batches", "breaks", "fails", "stops", "begun_in_trigger")
DAG_FILE = """\
from crash_streams import stream_dag

dag = stream_dag({name!r}, {journal!r})
"""

# One statement sees one state of the database: the place of a stream, and what waits behind it.
_ROWS = """
SELECT t.id, d.name, r.run_id, t.task_id, t.state, t.try_number, coalesce(s.handled, 0), coalesce(s.ahead, 0),
       (SELECT count(*) FROM trigger_event e
        WHERE e.trigger_id = s.trigger_id AND e.kind = 'event' AND e.id > s.handled_to)
FROM task_instance t JOIN dag_run r ON r.id = t.dag_run_id JOIN dag d ON d.id = r.dag_id
LEFT JOIN task_stream s ON s.task_instance_id = t.id ORDER BY t.id
"""


class StreamTruth(DagTruth[Record, Report]):
    """The history of one database and the journal of the steps that handle events."""

    def __init__(self, url: str, journals: Path) -> None:
        super().__init__(url, Checker())
        self._journals = JournalReader(journals, decode_lines)
        self._rows: dict[str, Row] = {}

    def made(self, tasks: Iterable[str], at: str) -> None:
        """See `DagTruth`."""
        self._record(Made(task, TOTAL, at=at) for task in tasks)

    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """See `Truth`: a step of a later try than the tables tell of comes behind them in the journal."""
        left_behind = self._left_behind(is_over=is_over)
        self._record(self._journals.read())
        self._see_rows(at, with_xcoms=at_rest)
        self._record(LeftBehind(str(trigger), at) for trigger in sorted(left_behind))
        self._record([Looked(at, at_rest)])

    def is_complete(self) -> bool:
        """See `DagTruth`. It is asked all the time: no place may go back, and no stream grow too long, in between."""
        self._see_rows("on the way")
        return super().is_complete()

    def _see_rows(self, at: str, *, with_xcoms: bool = False) -> None:
        found = self._reader.ask(_ROWS)
        xcoms = self._read_xcoms() if with_xcoms else {}  # after the rows: an ended task has all its values by then
        for id_, dag, run, task, state, try_number, handled, ahead, waiting in found:
            row = Row(f"{dag}/{run}/{task}", state, try_number, handled, waiting, ahead, *_left(xcoms.get(id_, {})), at)
            known = self._rows.get(row.task)
            if known is None or msgspec.structs.replace(known, at=at) != row:
                self._rows[row.task] = row
                self._record([row])


def _left(xcoms: Mapping[str, Any]) -> tuple[dict[str, Part], Any]:
    """Return what the committed steps of a task have handled, by their names, and its result."""
    parts = {key.removeprefix(PART): value for key, value in xcoms.items() if key.startswith(PART)}
    return msgspec.convert(parts, dict[str, Part]), xcoms.get(RETURN_VALUE)


class StreamWorkload(TaskWorkload):
    """``headgate up`` with the DAG of ``users/crash_streams.py``."""

    name = "task streams"
    marks: ClassVar[Mapping[str, Mark]] = TASK_STREAM_MARKS
    tasks: ClassVar[tuple[str, ...]] = TASKS
    dag_file: ClassVar[str] = DAG_FILE

    def counts(self) -> Counter[str]:
        report: Report = self.truth.report()
        return Counter(streams=report.streams, events=report.events, steps=report.steps, repeated=report.repeated)

    def _open_truth(self, url: str, journals: Path) -> DagTruth[Any, Any]:
        return StreamTruth(url, journals)
