"""The look at a run: which of its tasks begin, which never will, and whether it ends, in one transaction.

A run that something happened to is marked (`headgate.store.tasks.task_rows.note_run`), and the mark is taken off in the
transaction that looks at it: a crash anywhere leaves the mark. Nothing that happens meanwhile is overlooked, on
PostgreSQL either: who ends a task marks its run last of all, and waits for the row of the run, which the one who looks
has locked; so either the end is committed before the look begins, and seen, or it sets the mark anew afterwards.

Who looks waits for nobody. Runs that another looks at are passed over, and so are tasks and DAGs whose rows another has
locked: then the run keeps its mark, and is looked at again. That matters where who holds such a row waits for the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import Connection, Integer, bindparam, func, select, text, true, update

from headgate.protocol.messages.dags import StartTrigger, TaskState
from headgate.scheduling import planning, states
from headgate.scheduling.planning import Graph, RunEnd
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.secrets import Secrets
from headgate.store.errors import SpecUnreadable
from headgate.store.tables import dag, dag_run, task_instance
from headgate.store.tasks import dags, deferral, task_rows
from headgate.store.tasks.deferral import Deferral
from headgate.store.tasks.graphs import Graphs
from headgate.store.tasks.tasks import Retried
from headgate.store.triggers import assets

_C = task_instance.c
TASKS_PER_LOOK_MAX = 500  # of one run: some tens of milliseconds; the run keeps its mark, and the rest has its turn


class Planned(msgspec.Struct, frozen=True):
    """What came of looking at marked runs: how many were, how many tasks may be dispatched now, and what ended.

    ``in_triggers`` tasks began in their trigger, ``removed`` are no longer in their DAG. ``left``: runs that still need
    a look, for there was too much to do at once, or a row was locked by another. ``has_more``: others may be marked.
    ``unreadable``: why a DAG that is stored cannot be read, by its name.
    """

    looked_at: int = 0
    scheduled: int = 0
    in_triggers: int = 0
    removed: int = 0
    ended: dict[int, RunEnd] = {}
    left: int = 0
    has_more: bool = False
    unreadable: dict[str, str] = {}


class _Run(msgspec.Struct, frozen=True):
    id: int
    dag_id: int
    is_started: bool
    is_ended: bool
    may_begin: bool
    spec_hash: str
    max_active_runs: int


class _Look:
    """One transaction that looks at runs."""

    def __init__(self, connection: Connection, now: datetime, secrets: Secrets, graphs: Graphs) -> None:
        self._connection = connection
        self._now = now
        self._secrets = secrets
        self._graphs = graphs
        self._locked_dags: dict[int, bool] = {}
        self._begun: set[int] = set()  # runs that waited; some of them are among those looked at
        self.scheduled = self.in_triggers = self.removed = 0
        self.ended: dict[int, RunEnd] = {}

    @property
    def has_begun_runs(self) -> bool:
        """Whether runs that waited were begun."""
        return bool(self._begun)

    def at(self, run: _Run) -> bool:
        """Do what is to be done; return whether that was all, so that the mark comes off."""
        if run.is_ended:
            return True
        graph = self._graphs.get(self._connection, run.dag_id, run.spec_hash)
        if not run.is_started and run.id not in self._begun:
            if not run.may_begin:
                return True  # it is marked again when the DAG goes on
            if not self._lock_dag(run.dag_id):
                return False
            self._begin(run)
            if run.id not in self._begun:
                return True  # it is marked again when another run ends
        rows, is_all = self._follow(run, graph)
        decisions = planning.decide(graph, {name: state for name, (_, state) in rows.items()}, may_start=run.may_begin)
        for event, names in (
            ("upstream_failed", decisions.upstream_failed),
            ("upstream_skipped", decisions.upstream_skipped),
            ("scheduled", decisions.scheduled),
        ):
            is_all = self._move(event, {name: rows[name][0] for name in names}, graph) and is_all
        if decisions.end is None or not is_all:
            return is_all
        return self._end(run, decisions.end)

    def _follow(self, run: _Run, graph: Graph) -> tuple[dict[str, tuple[int, TaskState]], bool]:
        """Bring the run in line with its DAG; return the ids and states of its tasks, and whether that was all."""
        rows = _tasks(self._connection, run.id)
        missing = [task for task in graph.spec.tasks if task.task_id not in rows]
        gone = [row for name, row in rows.items() if name not in graph.tasks and row[1] in states.UNFINISHED]
        if not missing and not gone:
            return rows, True
        dags.insert_tasks(self._connection, self._now, run.id, missing)
        removable = [id_ for id_, state in gone if state not in states.OCCUPYING]  # a worker's end marks the run again
        removed = [dags.remove_task(self._connection, self._now, id_) for id_ in removable]
        self.removed += sum(removed)
        return _tasks(self._connection, run.id), all(removed)

    def _move(self, event: str, tasks: Mapping[str, int], graph: Graph) -> bool:
        """Do with tasks in ``none`` what was decided; return whether that was done with all of them."""
        some = dict(sorted(tasks.items(), key=lambda item: item[1])[:TASKS_PER_LOOK_MAX])
        locked = _lock_fresh(self._connection, some.values())
        (row,) = states.of(event)
        task_rows.change_all(self._connection, self._now, row, sorted(locked))
        if event == "scheduled":
            self.scheduled += len(locked)
            for name, task_id in some.items():
                trigger = graph.start_triggers.get(name) if task_id in locked else None
                if trigger is None:
                    continue
                started = start_in_trigger(self._connection, self._now, self._secrets, task_id, trigger)
                self.scheduled -= started
                self.in_triggers += started
        return len(locked) == len(tasks)

    def _end(self, run: _Run, end: RunEnd) -> bool:
        # Another that begins runs of this DAG counts this one, until it sees it ended or begins them itself after us.
        if not self._lock_dag(run.dag_id):
            return False
        if dags.end_run(self._connection, self._now, run.id, end):
            self.ended[run.id] = end
            if run.may_begin:
                self._begin(run)
        return True

    def _begin(self, run: _Run) -> None:
        self._begun |= begin_waiting(self._connection, self._now, run.dag_id, run.max_active_runs)

    def _lock_dag(self, dag_id: int) -> bool:
        if dag_id not in self._locked_dags:
            self._locked_dags[dag_id] = assets.lock_dag(self._connection, dag_id)
        return self._locked_dags[dag_id]


_SELECT_MARKED = (
    select(
        *(dag_run.c.id, dag_run.c.dag_id, dag_run.c.started_at, dag_run.c.ended_at),
        *(dag.c.is_paused, dag.c.removed_at, dag.c.spec_hash, dag.c.max_active_runs),
    )
    .join(dag)
    .where(text("dag_run.needs_look"))
    .order_by(dag_run.c.id)
    .limit(bindparam("limit", type_=Integer()))
    .with_for_update(skip_locked=True, key_share=True, of=dag_run)
)
_MARKED = Prepared(_SELECT_MARKED)
_UNMARK = Prepared(update(dag_run).where(dag_run.c.id == bindparam("of_id")).values(needs_look=text("false")))


def plan(connection: Connection, now: datetime, secrets: Secrets, graphs: Graphs, *, limit: int) -> Planned:
    """Look at up to ``limit`` runs that are marked, the oldest first."""
    among = graphs.readable(connection)
    marked = _MARKED if among is None else Prepared(_SELECT_MARKED.where(among))
    rows = marked.run(connection, limit=limit).fetchall()
    look = _Look(connection, now, secrets, graphs)
    left = 0
    unreadable: dict[str, str] = {}
    for id_, dag_id, started_at, ended_at, is_paused, removed_at, spec_hash, runs_max in rows:
        may_begin = not is_paused and removed_at is None
        run = _Run(id_, dag_id, started_at is not None, ended_at is not None, may_begin, spec_hash, runs_max)
        try:
            is_all = look.at(run)
        except SpecUnreadable as error:
            unreadable[error.dag] = error.reason
            continue  # with its mark, for whoever can read it
        if is_all:
            _UNMARK.run(connection, of_id=id_)
        else:
            left += 1
        task_rows.forget_run(connection, id_)
    # Runs that were begun are marked, unless they came later in this look; unreadable ones are left out the next time.
    has_more = len(rows) == limit or look.has_begun_runs or bool(unreadable)
    return Planned(len(rows), look.scheduled, look.in_triggers, look.removed, look.ended, left, has_more, unreadable)


# --- parts ---------------------------------------------------------------------------------------

_TASKS = Prepared(select(_C.task_id, _C.id, _C.state).where(_C.dag_run_id == bindparam("of_run")))
_STATES = {state.value: state for state in TaskState}


def _tasks(connection: Connection, dag_run_id: int) -> dict[str, tuple[int, TaskState]]:
    rows = _TASKS.run(connection, of_run=dag_run_id).fetchall()
    return {name: (id_, _STATES[state]) for name, id_, state in rows}


def _lock_fresh(connection: Connection, ids: Iterable[int]) -> set[int]:
    """Lock those of these tasks that are in ``none``, and that nobody else has locked; return their ids."""
    locked: set[int] = set()
    for some in chunks(sorted(ids)):
        statement = select(_C.id).where(_C.id.in_(some), task_rows.is_in(TaskState.NONE)).order_by(_C.id)
        locked.update(connection.execute(task_rows.passing_over(statement)).scalars())
    return locked


def begin_waiting(connection: Connection, now: datetime, dag_id: int, runs_max: int) -> set[int]:
    """Begin runs of a DAG that wait, as many as it may have; return the ids. The oldest logical date goes first.

    The DAG is locked: of two that count its runs the second one sees what the first one has begun. Runs that another
    looks at this moment are passed over: they keep their marks.
    """
    active = dag_run.c.dag_id == dag_id, dag_run.c.ended_at.is_(None)
    begun = select(func.count()).select_from(dag_run).where(*active, dag_run.c.started_at.is_not(None))
    room = runs_max - connection.execute(begun).scalar_one()
    if room <= 0:
        return set()
    waiting = (
        select(dag_run.c.id)
        .where(*active, dag_run.c.started_at.is_(None))
        .order_by(func.coalesce(dag_run.c.logical_date, dag_run.c.created_date), dag_run.c.id)
        .limit(room)
        .with_for_update(skip_locked=True, key_share=True)
    )
    ids = set(connection.execute(waiting).scalars())
    for some in chunks(sorted(ids)):
        begin = update(dag_run).where(dag_run.c.id.in_(some)).values(started_at=now, needs_look=true())
        connection.execute(begin)
    return ids


def start_in_trigger(
    connection: Connection, now: datetime, secrets: Secrets, task_id: int, start: StartTrigger
) -> bool:
    """Begin a try of a scheduled task in its trigger; return whether that was done."""
    wait = Deferral(start.classpath, start.kwargs, start.next_method, start.next_kwargs, start.timeout_s)
    return deferral.start_in_trigger(connection, now, secrets, task_id, wait) is not None


def retry_in_triggers(
    connection: Connection, now: datetime, secrets: Secrets, graphs: Graphs, retried: Sequence[Retried]
) -> bool:
    """Begin the next try of these in their trigger, as far as they have one; return whether any has."""
    started = False
    for task in retried:
        start = graphs.get(connection, task.dag_id, task.spec_hash).start_triggers.get(task.task_id)
        if start is not None:
            started = start_in_trigger(connection, now, secrets, task.id, start) or started
    return started
