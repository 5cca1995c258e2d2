"""The workload of signals: runs of one DAG whose tasks send some, with sensors that wait for them, and their truth."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.proof.crash.workloads.tasks import FAULTS_OF_WORKERS, KILLS_OF_WORKERS, DagTruth, TaskTruth, TaskWorkload
from tests.proof.history.signal_history import (
    OBEYED,
    ORDERS,
    WAITS,
    Checker,
    Obeys,
    Report,
    Stored,
    Waited,
    decode_lines,
)

from headgate.protocol.marks import BELL_MARKS, SIGNAL_MARKS, TASK_MARKS, Mark
from headgate.testing.crash.journal import JournalReader

# The way of a signal with its outcome, the begin of a wait, and its end.
OF_TASKS = (
    *("worker.step_done", "worker.outcome_sent", "outcomes.grouped", "tasks.outcome_stored"),
    *("plan.in_trigger", "resume.by_end"),
)
SENDING = ("sends", "sends_more", "tells", "tells_again", "after", "orders")
OBEYS = "obeys"
DAG_FILE = """\
from crash_signals import signal_dag

dag = signal_dag({name!r}, {journal!r})
"""

_SIGNALS = """
SELECT k.key, s.version, s.dedup, s.value, d.name, r.run_id
FROM signal s JOIN signal_key k ON k.id = s.key_id
LEFT JOIN dag_run r ON r.id = s.dag_run_id LEFT JOIN dag d ON d.id = r.dag_id ORDER BY k.id, s.version
"""
_NEWEST = "SELECT key, last_version FROM signal_key"


class SignalTruth(TaskTruth[Report]):
    """The history of one database, with its log of signals, and the journal of those who send."""

    def __init__(self, url: str, journals: Path) -> None:
        super().__init__(url, Checker(), JournalReader(journals, decode_lines))
        self._stored: set[Stored] = set()
        self._before: dict[str, int] = {}

    def before_run(self) -> None:
        """Read what was sent before a run is created: that does not count for it."""
        self._before = dict(self._reader.ask(_NEWEST))

    def made(self, tasks: Iterable[str], at: str) -> None:
        """See `DagTruth`. What was sent by now may have been sent before the run, or after it."""
        names = {task.rpartition("/")[2]: task for task in tasks}
        super().made((names[task] for task in SENDING), at)
        self._record([Obeys(names[OBEYS], ORDERS, OBEYED, run=names[OBEYS].rpartition("/")[0])])
        newest = dict(self._reader.ask(_NEWEST))
        for task, (key, value) in WAITS.items():
            since, until = self._before.get(key, 0), newest.get(key, 0)
            self._record([Waited(names[task], key, value, since, until=until, run=names[task].rpartition("/")[0])])

    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """See `Truth`."""
        self._see_signals()
        super().look(at, at_rest=at_rest, is_over=is_over)

    def is_complete(self) -> bool:
        """See `DagTruth`. It is asked all the time: no version may be there before those below it, in between."""
        self._see_signals()
        return super().is_complete()

    def _see_signals(self) -> None:
        for key, version, dedup, value, dag, run_id in self._reader.ask(_SIGNALS):
            run = f"{dag}/{run_id}" if run_id else ""
            row = Stored(key, version, dedup, json.loads(bytes(value)), run)
            if row not in self._stored:
                self._stored.add(row)
                self._record([row])


class SignalWorkload(TaskWorkload):
    """``headgate up`` with the DAG of ``users/crash_signals.py``."""

    name = "signals"
    marks: ClassVar[Mapping[str, Mark]] = SIGNAL_MARKS | BELL_MARKS | {name: TASK_MARKS[name] for name in OF_TASKS}
    faults = FAULTS_OF_WORKERS
    kill_weights = KILLS_OF_WORKERS
    tasks: ClassVar[tuple[str, ...]] = (*SENDING, *WAITS, OBEYS)
    dag_file: ClassVar[str] = DAG_FILE
    held_back_max = 3
    truth: SignalTruth

    def feed(self) -> None:
        """Make a run."""
        self.truth.before_run()
        super().feed()

    def counts(self) -> Counter[str]:
        report = self.truth.report()
        return Counter(
            signals=report.stored,
            acknowledged=report.acknowledged,
            waits=report.waits,
            executions=report.executions,
            tries_lost=report.tries_lost,
        )

    def _open_truth(self, url: str, journals: Path) -> DagTruth[Any, Any]:
        return SignalTruth(url, journals)
