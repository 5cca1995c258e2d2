"""The workload of tasks: runs of one DAG whose tasks defer, and their truth."""

from __future__ import annotations

import itertools
import json
import random
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from tests.proof.crash.truth import Checker, RecordT, ReportT, Truth
from tests.proof.crash.workload import Fault, Workload
from tests.proof.history import task_history
from tests.proof.history.findings import TERMINAL
from tests.proof.history.task_records import Fault as FaultRecord
from tests.proof.history.task_records import LeftBehind, Looked, Made, Row, decode_lines, name_of
from tests.waiting import wait_until

from headgate.protocol.marks import BELL_MARKS, MARKS, TASK_MARKS, Mark
from headgate.testing.crash.journal import JournalReader

# The way of an event that resumes a task, and of a trigger to the runner, leads by these as well.
OF_THE_PAIR = (
    *("leases.claim_written", "host.event_bound", "host.event_queued", "runner.frame_half_sent", "runner.frame_sent"),
    *("intake.round_read", "store.begun", "store.rows_inserted", "store.before_commit", "store.committed"),
    *("supervisor.frame_half_sent", "session.answer_read"),
)
PAUSE_S = 0.4  # before a random kill, on average
RUNS_AT_ONCE_MAX = 4  # of random kills: more would only wait for one another

# What is done where no runner takes part: who dies most often has the most to lose.
FAULTS_OF_WORKERS: tuple[Fault, ...] = ("kill workers", "kill supervisor", "kill all", "stop", "drop connection")
KILLS_OF_WORKERS: Mapping[Fault, int] = {"kill workers": 50, "kill supervisor": 30, "kill all": 20}

DAG_NAME = "crash"
TASKS = (
    *("plain", "once", "after", "thrice", "again", "gives_up", "times_out", "races"),
    *("breaks", "ended", "skipped", "failed", "begun_in_trigger"),
)
DAG_FILE = """\
from crash_tasks import crash_dag

dag = crash_dag({name!r}, {journal!r})
"""

# One statement sees one state of the database: the rows that it finds together were true at once.
_ROWS = """
SELECT t.id, d.name, r.run_id, t.task_id, t.map_index, t.state, t.try_number,
       t.state = 'deferred' AND t.trigger_timeout IS NULL AND (g.finished_at IS NOT NULL OR g.removed_at IS NOT NULL)
FROM task_instance t JOIN dag_run r ON r.id = t.dag_run_id JOIN dag d ON d.id = r.dag_id
LEFT JOIN "trigger" g ON g.id = t.trigger_id ORDER BY t.id
"""
_ENDED = ", ".join(f"'{state}'" for state in sorted(TERMINAL))
_UNFINISHED = f"SELECT count(*) FROM task_instance WHERE state NOT IN ({_ENDED})"
_RUNS_GOING_ON = "SELECT count(*) FROM dag_run WHERE ended_at IS NULL"
_XCOMS = "SELECT task_instance_id, key, value FROM xcom"
# A task that handles the events of its stream keeps the trigger, and does not wait for it at that moment.
_ORPHANS = f"""
SELECT g.id FROM "trigger" g WHERE g.finished_at IS NULL AND g.removed_at IS NULL
AND NOT EXISTS (SELECT 1 FROM task_instance t WHERE t.trigger_id = g.id)
AND NOT EXISTS (SELECT 1 FROM task_stream s JOIN task_instance t ON t.id = s.task_instance_id
                WHERE s.trigger_id = g.id AND t.state NOT IN ({_ENDED}))
AND NOT EXISTS (SELECT 1 FROM asset_watcher w WHERE w.trigger_id = g.id)
"""
# A trigger that a dead supervisor owned when its task was resumed keeps that owner: nobody runs it.
_OWNED = """
SELECT g.id FROM "trigger" g JOIN triggerer o ON o.id = g.triggerer_id
WHERE o.fenced_at IS NULL AND o.stopped_at IS NULL
"""
_DAGS = "SELECT count(*) FROM dag"


class DagTruth(Truth[RecordT, ReportT]):
    """The history of the tasks of one DAG, in one database and in their journal."""

    @abstractmethod
    def made(self, tasks: Iterable[str], at: str) -> None:
        """Record that a run was made with these tasks."""

    def is_complete(self) -> bool:
        """Whether every task and every run has ended, and no trigger is left open."""
        return not (self._number(_UNFINISHED) or self._number(_RUNS_GOING_ON) or self._ids(_ORPHANS))

    def is_released(self) -> bool:
        """Whether nobody owns a trigger any more."""
        return not self._ids(_OWNED)

    def unfinished(self) -> int:
        """Return the number of tasks that have not ended."""
        return self._number(_UNFINISHED)

    def has_dag(self) -> bool:
        """Whether a DAG is known."""
        return bool(self._number(_DAGS))

    def _left_behind(self, *, is_over: bool) -> set[int]:
        """Return the triggers that nothing waits for; at the end nobody should own even one that is over."""
        return self._ids(_ORPHANS) | (self._ids(_OWNED) if is_over else set())

    def _read_xcoms(self) -> dict[int, dict[str, Any]]:
        found: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        for task_instance_id, key, value in self._reader.ask(_XCOMS):
            found[task_instance_id][key] = json.loads(bytes(value))
        return found

    def _ids(self, statement: str) -> set[int]:
        return {id_ for (id_,) in self._reader.ask(statement)}


class TaskTruth(DagTruth[Any, ReportT]):
    """The history of one database and the journal of the tries of its tasks; ``checker`` takes the records of both.

    Tasks that are ``unstepped`` have no code of an author's, which could journal their tries.
    """

    unstepped: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, url: str, checker: Checker[Any, ReportT], journals: JournalReader[Any]) -> None:
        super().__init__(url, checker)
        self._journals = journals
        self._rows: dict[str, Row] = {}

    def made(self, tasks: Iterable[str], at: str) -> None:
        """See `DagTruth`."""
        self._record(Made(task, at=at) for task in tasks)

    def note_fault(self, at: str, pid: int = 0) -> None:
        """See `Truth`: the tries of one worker, or of all."""
        self._record([FaultRecord(at, pid)])

    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """See `Truth`: the tables rest on the journal."""
        orphans = self._left_behind(is_over=is_over)
        found = self._reader.ask(_ROWS)
        xcoms = self._read_xcoms() if at_rest else {}  # after the rows: an ended task has all its values by then
        rows = [
            Row(f"{dag}/{run}/{name_of(task, index)}", state, try_number, xcoms.get(id_, {}), bool(is_stranded), at)
            for id_, dag, run, task, index, state, try_number, is_stranded in found
            if task not in self.unstepped
        ]
        self._record(self._journals.read())
        for row in rows:
            known = self._rows.get(row.task)
            if known is None or msgspec.structs.replace(known, at=at) != row:
                self._rows[row.task] = row
                self._record([row])
        self._record(LeftBehind(str(trigger), at) for trigger in sorted(orphans))
        self._record([Looked(at, at_rest)])


class TaskWorkload(Workload):
    """``headgate up`` with the DAG of ``users/crash_tasks.py``."""

    name = "tasks"
    command = "up"
    # All are reached while tasks run: a supervisor that has just started need not find a trigger to claim.
    marks: ClassVar[Mapping[str, Mark]] = {
        **TASK_MARKS,
        **BELL_MARKS,
        **{name: MARKS[name]._replace(when="flow") for name in OF_THE_PAIR},
    }
    faults: ClassVar[tuple[Fault, ...]] = (
        "kill workers",
        "kill runner",
        "kill supervisor",
        "kill all",
        "stop",
        "drop connection",
    )
    kill_weights: ClassVar[Mapping[Fault, int]] = {
        "kill workers": 40,
        "kill runner": 30,
        "kill supervisor": 15,
        "kill all": 15,
    }
    skips_max = 8
    is_stuck_after_error = True
    at_rest = "everything has ended"
    tasks: ClassVar[tuple[str, ...]] = TASKS
    dag_file: ClassVar[str] = DAG_FILE
    held_back_max: ClassVar[int] = 2  # tasks that cannot end while one worker stands still
    truth: DagTruth[Any, Any]

    def __init__(self, folder: Path, url: str, subscribers: int = 0) -> None:
        super().__init__(folder, url, subscribers)
        journals, dags = folder / "journals", folder / "dags"
        journals.mkdir()
        dags.mkdir()
        (dags / "crash.py").write_text(self.dag_file.format(name=DAG_NAME, journal=str(journals / "tasks.jsonl")))
        self.truth = self._open_truth(url, journals)
        self.settings = {"workers": "3", "dags_look_s": "0.2", "worker_grace_s": "2"}
        self._numbers = itertools.count(1)

    def _open_truth(self, url: str, journals: Path) -> DagTruth[Any, Any]:
        return TaskTruth(url, task_history.Checker(), JournalReader(journals, decode_lines))

    def warm_up(self, *, is_new: bool) -> None:
        """Have one run end first, so that nothing is under way when the next one is made."""
        if is_new:
            wait_until(self.truth.has_dag, "the DAG")
            self.feed()
            wait_until(self.truth.is_complete, self.at_rest)

    def feed(self) -> None:
        """Make a run."""
        run_id = f"r{next(self._numbers)}"
        with self._store() as store:
            store.tasks.create_run(DAG_NAME, run_id)
        self.truth.made([f"{DAG_NAME}/{run_id}/{task}" for task in self.tasks], run_id)

    def is_hungry(self) -> bool:
        """Whether the run before has ended: a process held in a transaction of SQLite would not let one be made."""
        return self.truth.is_complete()

    def work_until_kill(self, randomness: random.Random) -> None:
        """Make a run, unless several are under way, and sleep."""
        if self.truth.unfinished() < len(self.tasks) * RUNS_AT_ONCE_MAX:
            self.feed()
        time.sleep(randomness.expovariate(1 / PAUSE_S))

    def wait_progress(self) -> None:
        """Wait until all have ended but the task of the stopped worker and those below it."""
        self.feed()
        wait_until(lambda: self.truth.unfinished() <= self.held_back_max, "the others go on")

    def is_drainable(self) -> bool:
        """Whether nobody owns a trigger: an owner cancels one that has fired only after a while."""
        return self.truth.is_released()

    def counts(self) -> Counter[str]:
        report = self.truth.report()
        return Counter(
            tasks=report.tasks,
            executions=report.executions,
            deferrals=report.deferrals,
            tries_lost=report.tries_lost,
        )
