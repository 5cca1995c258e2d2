"""Read-only queries for pictures of many tasks at once: those of the newest runs of a DAG, and those of an event."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import select

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import map_states
from headgate.store.db.bulk import chunks
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.ids import instance_name
from headgate.store.inspect import maps
from headgate.store.tables import dag, dag_run, dag_run_event, task_instance

MADE_SHOWN_MAX = 100  # runs, and tasks, of one event

_C = task_instance.c


class MadeOf(msgspec.Struct, frozen=True):
    """What became of an event: the tasks that it resumes or has resumed last, and the runs that were created for it.

    ``tasks`` are (DAG, run, task), ``runs`` (DAG, run, whether a newer event has superseded it).
    """

    tasks: tuple[tuple[str, str, str], ...]
    runs: tuple[tuple[str, str, bool], ...]


class GridInspection(Verbs):
    """The queries for pictures."""

    @reading
    def states_by_run(self, tx: Tx, runs: Sequence[int], tasks: Sequence[str]) -> dict[int, dict[str, str]]:
        """Return the states of these tasks in these runs; a mapped task has that of all its instances."""
        found: dict[int, dict[str, str]] = {}
        counts = maps.counts_of(tx, runs)
        columns = (_C.dag_run_id, _C.task_id, _C.state, _C.map_length)
        for part in chunks(list(tasks)):
            of_tasks = select(*columns).where(_C.dag_run_id.in_(runs), maps.IS_TASK, _C.task_id.in_(part))
            for run, task_id, state, length in tx.connection.execute(of_tasks):
                instances = counts.get((run, task_id))
                if instances is not None or length is not None:
                    state = map_states.state_with(TaskState(state), map(TaskState, instances or {})).value
                found.setdefault(run, {})[task_id] = state
        return found

    @reading
    def made_of(self, tx: Tx, event_id: int) -> MadeOf:
        """Return what became of an event."""
        named = select(dag.c.name, dag_run.c.run_id, _C.task_id, _C.map_index)
        resumed = named.select_from(task_instance.join(dag_run).join(dag)).where(_C.event_id == event_id)
        made = (
            select(dag.c.name, dag_run.c.run_id, dag_run_event.c.is_superseded)
            .select_from(dag_run_event.join(dag_run).join(dag))
            .where(dag_run_event.c.trigger_event_id == event_id, dag_run.c.removed_at.is_(None))
        )
        return MadeOf(
            tuple(
                (name, run, instance_name(task, index))
                for name, run, task, index in tx.connection.execute(resumed.limit(MADE_SHOWN_MAX))
            ),
            tuple((*row[:2], bool(row[2])) for row in tx.connection.execute(made.limit(MADE_SHOWN_MAX))),
        )
