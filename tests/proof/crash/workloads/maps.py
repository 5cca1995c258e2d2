"""The workload of mapped tasks: runs of one DAG with maps over all that one can be over, and their truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from tests.proof.crash.workload import Fault
from tests.proof.crash.workloads.tasks import FAULTS_OF_WORKERS, KILLS_OF_WORKERS, DagTruth, TaskTruth, TaskWorkload
from tests.proof.history.findings import TERMINAL
from tests.proof.history.map_history import (
    GIVEN,
    LEFT,
    LINKS,
    PAGED,
    SEED,
    Checker,
    Mapped,
    Reduces,
    Report,
    RunRow,
    decode_lines,
)

from headgate.protocol.marks import BUNDLE_MARKS, MAP_MARKS, TASK_MARKS, Mark
from headgate.testing.crash.journal import JournalReader

# The way of an instance to a worker, and of its outcome back; or into its trigger, and out of that.
OF_STEPS = (
    *("tasks.dispatched", "executor.step_submitted", "worker.step_received", "worker.step_done"),
    *("worker.outcome_half_sent", "worker.outcome_sent", "executor.outcome_read", "tasks.before_outcome"),
    *("outcomes.grouped", "tasks.outcome_stored", "plan.in_trigger", "resume.by_event"),
)
DAG_FILE = """\
from crash_maps import map_dag

dag = map_dag({name!r}, {journal!r})
"""

_ENDED = ", ".join(f"'{state}'" for state in sorted(TERMINAL))
_RUNS = f"""
SELECT d.name, r.run_id, r.state, r.ended_at,
       (SELECT count(*) FROM task_instance t WHERE t.dag_run_id = r.id AND t.state NOT IN ({_ENDED}))
FROM dag_run r JOIN dag d ON d.id = r.dag_id ORDER BY r.id
"""


class MapTruth(TaskTruth[Report]):
    """The history of one database and the journal of its instances."""

    unstepped = frozenset({"pages"})

    def __init__(self, url: str, journals: Path) -> None:
        super().__init__(url, Checker(), JournalReader(journals, decode_lines))
        self._runs: dict[str, RunRow] = {}

    def made(self, tasks: Iterable[str], at: str) -> None:
        """See `DagTruth`."""
        names = list(tasks)
        super().made(names, at)
        of_file, of_list, of_elements, of_pages, in_triggers, of_map, follow, taken, total = names[2:]
        self._record(
            [
                Mapped(of_file, len(GIVEN), GIVEN, at=at),
                Mapped(of_list, len(LEFT), LEFT, at=at),
                Mapped(of_elements, len(LEFT), LEFT, at=at),
                Mapped(of_pages, len(PAGED), PAGED, at=at),
                Mapped(in_triggers, len(LEFT), LEFT, at=at),
                Mapped(of_map, len(LEFT), of=of_list, at=at),
                Mapped(follow, len(LINKS), tuple(LINKS), appended=len(LINKS) - len(SEED), at=at),
                Mapped(taken, len(LINKS), of=follow, at=at),
                Reduces(total, (of_map, of_file, taken), at),
            ]
        )

    def look(self, at: str, *, at_rest: bool = False, is_over: bool = False) -> None:
        """See `Truth`."""
        self._see_runs(at)
        super().look(at, at_rest=at_rest, is_over=is_over)

    def is_complete(self) -> bool:
        """See `DagTruth`. It is asked all the time: no run may end before its tasks, nor go on, in between."""
        self._see_runs("on the way")
        return super().is_complete()

    def _see_runs(self, at: str) -> None:
        for dag, run, state, ended_at, unfinished in self._reader.ask(_RUNS):
            row = RunRow(f"{dag}/{run}", state, str(ended_at or ""), unfinished if ended_at else 0, at)
            known = self._runs.get(row.run)
            if known is None or msgspec.structs.replace(known, at=at) != row:
                self._runs[row.run] = row
                self._record([row])


class MapWorkload(TaskWorkload):
    """``headgate up`` with the DAG of ``users/crash_maps.py``."""

    name = "mapped tasks"
    marks: ClassVar[Mapping[str, Mark]] = MAP_MARKS | BUNDLE_MARKS | {name: TASK_MARKS[name] for name in OF_STEPS}
    faults = FAULTS_OF_WORKERS
    kill_weights: ClassVar[Mapping[Fault, int]] = {**KILLS_OF_WORKERS, "kill runner": 15}
    tasks: ClassVar[tuple[str, ...]] = (
        *("values", "emitted", "of_file", "of_list", "of_elements", "of_pages"),
        *("in_triggers", "of_map", "walk.follow", "walk.taken", "total"),
    )
    dag_file: ClassVar[str] = DAG_FILE
    held_back_max = 5

    def counts(self) -> Counter[str]:
        report: Report = self.truth.report()
        return Counter(instances=report.instances, executions=report.executions, tries_lost=report.tries_lost)

    def _open_truth(self, url: str, journals: Path) -> DagTruth[Any, Any]:
        return MapTruth(url, journals)
