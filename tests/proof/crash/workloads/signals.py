"""The workload of signals: runs of one DAG whose tasks send some, with sensors that wait for them, and their truth.

Another DAG has runs for some of the signals, which end by a signal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.proof.crash.workloads.tasks import FAULTS_OF_WORKERS, KILLS_OF_WORKERS, DagTruth, TaskTruth, TaskWorkload
from tests.proof.history.signal_history import (
    DECIDED,
    NOT_STARTING,
    NOW,
    OBEYED,
    ORDERS,
    PASSED,
    STARTED,
    TICKED,
    WAITS,
    Checker,
    Endures,
    GaveUp,
    Obeys,
    Report,
    Stored,
    Ticks,
    Waited,
    decode_lines,
)

from headgate.protocol.marks import BELL_MARKS, ENDLESS_MARKS, SIGNAL_MARKS, TASK_MARKS, Mark
from headgate.testing.crash.journal import JournalReader

# The way of a signal with its outcome, the begin of a wait, and its end.
OF_TASKS = (
    *("worker.step_done", "worker.outcome_sent", "outcomes.grouped", "tasks.outcome_stored"),
    *("plan.in_trigger", "resume.by_end"),
)
SENDING = ("sends", "sends_more", "tells", "tells_again", "after", "orders")
OBEYS, DECIDES = "obeys", "decides"
ENDURES, CLOSES = "endures", "closes"
TICKS = "ticks"
DAG_FILE = """\
from crash_signals import signal_dag, started_dag

dag, started = signal_dag({name!r}, {journal!r}), started_dag("started")
"""

_SIGNALS = """
SELECT k.key, s.version, s.dedup, s.value, d.name, r.run_id
FROM signal s JOIN signal_key k ON k.id = s.key_id
LEFT JOIN dag_run r ON r.id = s.dag_run_id LEFT JOIN dag d ON d.id = r.dag_id ORDER BY k.id, s.version
"""
# What its operator could not decide, because its processes were killed again and again.
_GIVEN_UP = """
SELECT d.name, r.run_id, t.task_id, w.decision_error
FROM signal_wait w JOIN task_instance t ON t.id = w.task_instance_id
JOIN dag_run r ON r.id = t.dag_run_id JOIN dag d ON d.id = r.dag_id WHERE w.decision_error LIKE '%, try 3 of 3: %'
"""
_NEWEST = "SELECT key, last_version FROM signal_key"


class SignalTruth(TaskTruth[Report]):
    """The history of one database, with its log of signals, and the journal of those who send.

    The runs that signals start are known by what they tell (`STARTED`).
    """

    unstepped = frozenset({"starts", "waits", "below"})

    def __init__(self, url: str, journals: Path) -> None:
        super().__init__(url, Checker(), JournalReader(journals, decode_lines))
        self._stored: set[Stored] = set()
        self._given_up: set[GaveUp] = set()
        self._before: dict[str, int] = {}
        self._record([Obeys("started", NOW, STARTED, "", passed=NOT_STARTING)])

    def before_run(self) -> None:
        """Read what was sent before a run is created: that does not count for it."""
        self._before = dict(self._reader.ask(_NEWEST))

    def made(self, tasks: Iterable[str], at: str) -> None:
        """See `DagTruth`. What was sent by now may have been sent before the run, or after it."""
        names = {task.rpartition("/")[2]: task for task in tasks}
        super().made((names[task] for task in SENDING), at)
        run = names[OBEYS].rpartition("/")[0]
        self._record([Obeys(names[OBEYS], ORDERS, OBEYED, run)])
        self._record([Obeys(names[DECIDES], ORDERS, DECIDED, run, passed=PASSED)])
        self._record([Endures(names[ENDURES]), Endures(names[CLOSES], is_endless=False)])
        self._record([Ticks(names[TICKS], TICKED, run)])
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
        for dag, run_id, task, error in self._reader.ask(_GIVEN_UP):
            given_up = GaveUp(f"{dag}/{run_id}/{task}", int(error.split()[1].rstrip(",")))
            if given_up not in self._given_up:
                self._given_up.add(given_up)
                self._record([given_up])


class SignalWorkload(TaskWorkload):
    """``headgate up`` with the DAG of ``users/crash_signals.py``."""

    name = "signals"
    marks: ClassVar[Mapping[str, Mark]] = {
        **(SIGNAL_MARKS | BELL_MARKS | ENDLESS_MARKS),
        **{name: TASK_MARKS[name] for name in OF_TASKS},
    }
    faults = FAULTS_OF_WORKERS
    kill_weights = KILLS_OF_WORKERS
    tasks: ClassVar[tuple[str, ...]] = (*SENDING, *WAITS, OBEYS, DECIDES, ENDURES, CLOSES, TICKS)
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
