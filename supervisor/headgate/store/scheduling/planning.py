"""Planning: evaluate runs, one transaction for some of them: which tasks begin, which never will, and whether it ends.

A run to which something has happened is flagged as dirty (`Tx.mark_run_dirty`), and the flag is cleared in the
transaction that evaluates it, so that a crash at any point leaves the flag. No change is missed on PostgreSQL either:
a transaction that ends a task sets the flag of its run last of all, and for that waits for the row of the run, which
the evaluation has locked. So either the end is committed before the evaluation begins, and is visible to it, or it sets
the flag again afterwards.

What stands in other rows is read by statements after the one that locks the run: that one would have PostgreSQL look
again at the run alone, once it is locked, and show all else as it was before, with a flag that came with its change.

An evaluation waits for no lock. Runs that another supervisor evaluates are skipped, and so are locked rows of tasks and
DAGs; then the run keeps its flag, and is evaluated again. Waiting could deadlock, because the transaction that has
locked such a row may wait for the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from sqlalchemy import Integer, bindparam, func, select, text, true, update

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import planning, states
from headgate.scheduling.planning import Decisions, Graph, RunEnd
from headgate.store.db.bulk import chunks
from headgate.store.db.faults import blaming
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import leased
from headgate.store.errors import SpecUnreadable
from headgate.store.ids import DagRowId, DagRunId, TaskInstanceId
from headgate.store.scheduling import expansion, groups, rules
from headgate.store.scheduling.rules import Acted
from headgate.store.signals import subscriptions
from headgate.store.tables import dag, dag_run, task_instance
from headgate.store.tasks import dags, deferral, run_states, task_rows
from headgate.store.tasks.graphs import Graphs, GraphVerbs, ReadableOnly
from headgate.store.tasks.run_states import RunStates
from headgate.store.triggers import assets

_C = task_instance.c
RUNS_MAX = 20  # evaluated in one transaction: it holds their locks, and the states of the tasks of one in memory
TASKS_PER_RUN_MAX = 500  # begun, or removed, in one transaction: some tens of milliseconds; its flag stays for the rest
FROM_FIRST = DagRunId(0)  # the run behind which all are


class Planned(msgspec.Struct, frozen=True):
    """Result of `plan`: the number of runs evaluated, of tasks that may be dispatched now, and the runs that ended.

    ``in_triggers`` tasks began in their trigger, ``removed`` are no longer in their DAG. ``taken``: tasks that rules
    have ended, or begun anew, while a worker or a trigger may have had them. ``left`` runs must be evaluated again,
    because something has changed, there was too much to do at once, or a row was locked by another transaction; if
    nothing ``has_changed``, only that. ``has_more``: other runs may be dirty. ``unreadable``: the reason why a stored
    DAG cannot be read, by its name. ``instances`` of mapped tasks were made, or are to begin again. ``has_rules``:
    signals may have to be held against rules. ``next_after``: the run behind which the next call begins.
    """

    evaluated: int = 0
    scheduled: int = 0
    in_triggers: int = 0
    removed: int = 0
    taken: int = 0
    ended: dict[DagRunId, RunEnd] = {}
    left: int = 0
    has_changed: bool = False
    has_more: bool = False
    unreadable: dict[str, str] = {}
    instances: int = 0
    has_rules: bool = False
    next_after: DagRunId = FROM_FIRST


class PlanningVerbs(GraphVerbs):
    """The verb that evaluates runs."""

    @leased
    def plan(self, tx: LeasedTx, *, after: DagRunId = FROM_FIRST, limit: int = RUNS_MAX) -> Planned:
        """Evaluate up to ``limit`` dirty runs, the oldest first: begin tasks and runs, skip tasks, end runs.

        Only runs behind the run ``after``: those that had to be left do not hold up all that are younger. Raises
        `ItemFailed` for a run that cannot be evaluated.
        """
        rows = tx.passed_over.read("run", limit, partial(_DIRTY.run, tx, self.graphs.unreadable(tx), after=after))
        terms = _TERMS.run_each(tx.connection, [{"of_id": row[0]} for row in rows])
        evaluation = _Evaluation(tx, self.graphs)
        left = 0
        unreadable: dict[str, str] = {}
        for run in (_Run(*row, *of_dag[0]) for row, of_dag in zip(rows, terms, strict=True)):
            try:
                with blaming("run", run.id):
                    is_done = evaluation.evaluate(run)
            except SpecUnreadable as error:
                unreadable[error.dag] = error.reason
                continue  # it keeps its flag, for a supervisor that can read it
            if is_done:
                _CLEAR_FLAG.run(tx.connection, of_id=run.id)
            else:
                left += 1
            tx.unmark_run_dirty(run.id)
        if evaluation.scheduled or evaluation.in_triggers:
            tx.notify()
        # Runs that were begun are dirty, unless they were among these rows; unreadable ones are left out the next time.
        has_more = len(rows) == limit or evaluation.has_begun_runs or bool(unreadable) or after != FROM_FIRST
        return Planned(
            evaluated=len(rows),
            scheduled=evaluation.scheduled,
            in_triggers=evaluation.in_triggers,
            removed=evaluation.removed,
            taken=evaluation.taken,
            ended=evaluation.ended,
            left=left,
            has_changed=bool(evaluation.has_changed or evaluation.scheduled or evaluation.in_triggers),
            has_more=has_more,
            unreadable=unreadable,
            instances=evaluation.instances,
            has_rules=evaluation.has_rules,
            next_after=rows[-1][0] if left and len(rows) == limit else FROM_FIRST,
        )


class _Run(NamedTuple):
    """The columns of `_DIRTY` and `_TERMS`, as the driver returns them."""

    id: DagRunId
    dag_row: DagRowId
    started_at: object
    ended_at: object
    is_ending: bool
    is_paused: bool
    removed_at: object
    spec_hash: str
    max_active_runs: int
    has_asked: bool

    @property
    def may_begin(self) -> bool:
        """Whether tasks of it may begin, and runs of its DAG."""
        return not self.is_paused and self.removed_at is None


_DIRTY = ReadableOnly(
    lambda readable: (
        select(dag_run.c.id, dag_run.c.dag_id, dag_run.c.started_at, dag_run.c.ended_at, dag_run.c.is_ending)
        .join(dag)
        .where(text("dag_run.needs_look"), dag_run.c.id > bindparam("after"), readable)
        .order_by(dag_run.c.id)
        .limit(bindparam("limit", type_=Integer()))
        .with_for_update(skip_locked=True, key_share=True, of=dag_run)
    )
)
_TERMS = Prepared(
    select(
        *(dag.c.is_paused, dag.c.removed_at, dag.c.spec_hash, dag.c.max_active_runs),
        subscriptions.has_asked(dag_run.c.id),
    )
    .select_from(dag_run.join(dag))
    .where(dag_run.c.id == bindparam("of_id"))
)
_CLEAR_FLAG = Prepared(update(dag_run).where(dag_run.c.id == bindparam("of_id")).values(needs_look=text("false")))


class _Evaluation:
    """One transaction that evaluates runs."""

    def __init__(self, tx: Tx, graphs: Graphs) -> None:
        self._tx = tx
        self._graphs = graphs
        self._locked_dags: dict[DagRowId, bool] = {}
        self._begun: set[DagRunId] = set()  # runs that waited; some of them are among those evaluated
        self.scheduled = self.in_triggers = self.removed = self.taken = self.instances = 0
        self.has_rules = self.has_changed = False
        self.ended: dict[DagRunId, RunEnd] = {}

    @property
    def has_begun_runs(self) -> bool:
        """Whether runs that waited were begun."""
        return bool(self._begun)

    def evaluate(self, run: _Run) -> bool:
        """Do what is to be done; return whether that was all, so that the flag can be cleared."""
        if run.ended_at is not None:
            return True
        graph = self._graphs.get(self._tx, run.dag_row, run.spec_hash)
        if run.started_at is None and run.id not in self._begun:
            if not run.may_begin:
                return True  # it is flagged again when the DAG is unpaused, or activated
            if not self._lock_dag(run.dag_row):
                return False
            self._begin(run)
            if run.id not in self._begun:
                return True  # it is flagged again when another run ends
        seen, is_done = self._apply_changes_of_dag(run, graph)
        if self._stop_maps(seen, graph):
            self.has_changed = True
            return False
        for group in graph.groups:
            advanced = groups.advance(self._tx, seen, graph, group, may_start=run.may_begin, limit=TASKS_PER_RUN_MAX)
            self.instances += advanced.made
            self.scheduled += advanced.scheduled
            if advanced.has_ended:
                self.has_changed = True
                return False  # the states are other ones now
            is_done = is_done and advanced.is_done
        has_rules, may_end = bool(graph.ruled or run.has_asked or graph.spec.end_on), True
        if has_rules:
            acted = self._apply_rules(run, seen, graph)
            if acted.has_changed:
                return False  # the states are other ones now
            is_done = is_done and acted.is_done
            # It is flagged again when the DAG is unpaused, or activated.
            may_end = not acted.holds or bool(run.is_ending)
        decisions, is_last_look = self._decide(run, seen, graph, has_rules=has_rules, may_end=may_end)
        is_done = is_done and is_last_look
        for event, names in (
            ("upstream_failed", decisions.upstream_failed),
            ("upstream_skipped", decisions.upstream_skipped),
            ("scheduled", decisions.scheduled),
        ):
            is_done = self._move(event, seen, names, graph) and is_done
        if run.has_asked and decisions.scheduled:
            subscriptions.note_begun(self._tx, [seen.ids[name] for name in decisions.scheduled])
        if graph.groups and (decisions.upstream_failed or decisions.upstream_skipped):
            return False  # instances of a group may wait for them
        if decisions.end is None or not is_done:
            return is_done
        return self._end(run, decisions.end)

    def _decide(
        self, run: _Run, seen: RunStates, graph: Graph, *, has_rules: bool, may_end: bool
    ) -> tuple[Decisions, bool]:
        """Return what becomes of the tasks of a run; and whether that is all, so that it may end with it.

        It is not if tasks end whose ends may meet rules, or trigger rules of tasks that signals have asked to start; or
        if signals were sent that may start something.
        """
        now, is_ending = seen.for_rules(), bool(run.is_ending)
        decide = partial(planning.decide, graph, now, may_start=run.may_begin, is_ending=is_ending)
        decisions = decide(may_end=may_end)
        if not has_rules:
            return decisions, True
        going_on = decisions if decisions.end is None else decide(may_end=False)
        ends = (*going_on.upstream_failed, *going_on.upstream_skipped)
        if not graph.watched.isdisjoint(ends) or (ends and graph.ruled and decisions.end is not None):
            return going_on, False
        if decisions.end is not None and subscriptions.is_pending(self._tx, run.id):
            self.has_rules = True
            return going_on, False
        if decisions.end is not None and subscriptions.is_asked(self._tx, run.id):
            return going_on, True
        return decisions, True

    def _apply_rules(self, run: _Run, seen: RunStates, graph: Graph) -> Acted:
        """Have what has met rules about signals act."""
        rows = subscriptions.read(self._tx, run.id)
        followed = rules.follow(self._tx, seen, graph, rows)
        if followed.has_changed:
            self.has_rules = True
            rows = subscriptions.read(self._tx, run.id)
        if rules.ends_run(self._tx, run.id, rows, is_ending=bool(run.is_ending)):
            return Acted(has_changed=True)
        if rules.note_ends(self._tx, seen, graph, rows):
            rows = subscriptions.read(self._tx, run.id)
        may_start = run.may_begin and not run.is_ending
        acted = rules.act(self._tx, seen, graph, rows, may_start=may_start, limit=TASKS_PER_RUN_MAX)
        self.scheduled += acted.started
        self.in_triggers += acted.in_triggers
        self.taken += acted.taken
        self.has_changed = self.has_changed or acted.has_changed
        self.has_rules = self.has_rules or acted.has_freed
        return acted._replace(is_done=acted.is_done and followed.is_done)

    def _apply_changes_of_dag(self, run: _Run, graph: Graph) -> tuple[RunStates, bool]:
        """Add and remove tasks as the DAG has; return the states of the run's tasks, and whether that was all."""
        seen = run_states.read(self._tx, run.id)
        missing = [task for task in graph.spec.tasks if task.task_id not in seen.own]
        gone = [name for name in seen.unfinished() if name not in graph.tasks]
        if not missing and not gone:
            return seen, True
        dags.insert_tasks(self._tx, run.id, missing)
        # The ends of those that a worker has flag the run again.
        removable = seen.instances(self._tx, gone, states.UNFINISHED - states.OCCUPYING, limit=TASKS_PER_RUN_MAX + 1)
        removed = [dags.remove_task(self._tx, id_) for id_ in list(removable)[:TASKS_PER_RUN_MAX]]
        self.removed += sum(removed)
        return run_states.read(self._tx, run.id), sum(removed) == len(removable)

    def _move(self, event: str, seen: RunStates, names: Sequence[str], graph: Graph) -> bool:
        """Move the rows of tasks that are in ``none`` as was decided; return whether all of them were moved."""
        is_done, found, made = True, dict[TaskInstanceId, str](), set[TaskInstanceId]()
        if event == "scheduled":
            is_done, found, made = self._expand(seen, names, graph)
            if found:
                self.instances += len(found)
                marks.reach("maps.expanded")
            names = [name for name in names if not _is_expanding(seen, name, graph)]
        found |= seen.instances(self._tx, names, {TaskState.NONE}, limit=TASKS_PER_RUN_MAX + 1)
        some = dict(list(found.items())[:TASKS_PER_RUN_MAX])
        locked = made.intersection(some) | task_rows.lock_fresh(self._tx, some.keys() - made)
        (row,) = states.of(event)
        task_rows.change_all(self._tx, row, sorted(locked))
        self.has_changed = self.has_changed or bool(locked)
        if event == "scheduled":
            self.scheduled += len(locked)
            for instance, name in some.items():
                start = graph.start_triggers.get(name) if instance in locked else None
                if start is None:
                    continue
                state = deferral.start_in_trigger(self._tx, instance, start)
                self.scheduled -= state is TaskState.DEFERRED
                self.in_triggers += state is not None
        return is_done and len(locked) == len(found)

    def _expand(
        self, seen: RunStates, names: Sequence[str], graph: Graph
    ) -> tuple[bool, dict[TaskInstanceId, str], set[TaskInstanceId]]:
        """Make instances of mapped tasks; return whether that was all, those that are to begin now, and the new."""
        is_done, begin, made = True, dict[TaskInstanceId, str](), set[TaskInstanceId]()
        for name in names:
            if not _is_expanding(seen, name, graph):
                continue
            if (limit := TASKS_PER_RUN_MAX - len(begin)) == 0:
                return False, begin, made
            expanded = expansion.expand(self._tx, seen, graph.tasks[name], graph.maps, limit=limit)
            begin |= dict.fromkeys(expanded.begin, name)
            made |= expanded.made
            is_done = is_done and expanded.is_done
        return is_done, begin, made

    def _stop_maps(self, seen: RunStates, graph: Graph) -> int:
        """End the instances that are not to begin, and return how many: another has failed, or their task is skipped.

        Those of a task that was cleared have not begun, and a branch may pass over it this time.
        """
        return sum(
            expansion.stop(self._tx, seen, name, limit=TASKS_PER_RUN_MAX)
            for name, spec in graph.maps.items()
            if seen.own.get(name) is TaskState.SKIPPED
            or (spec.fail_fast and not graph.tasks[name].group and TaskState.FAILED in seen.mapped.get(name, ()))
        )

    def _end(self, run: _Run, end: RunEnd) -> bool:
        # Another supervisor that begins runs of this DAG counts this one until it has ended. So the DAG is locked, and
        # that supervisor sees the end, or begins its runs after this transaction.
        if not self._lock_dag(run.dag_row):
            return False
        became = dags.end_run(self._tx, run.id, end)
        if became == "ended":
            self.ended[run.id] = end
            if run.may_begin:
                self._begin(run)
        return became != "busy"

    def _begin(self, run: _Run) -> None:
        self._begun |= _begin_waiting(self._tx, run.dag_row, run.max_active_runs)

    def _lock_dag(self, dag_row: DagRowId) -> bool:
        if dag_row not in self._locked_dags:
            self._locked_dags[dag_row] = assets.lock_dag(self._tx, dag_row) is not None
        return self._locked_dags[dag_row]


# --- parts ---------------------------------------------------------------------------------------


def _is_expanding(seen: RunStates, name: str, graph: Graph) -> bool:
    """Whether instances of a mapped task are still to be made."""
    return name in graph.maps and seen.own.get(name) is TaskState.NONE


def _begin_waiting(tx: Tx, dag_row: DagRowId, runs_max: int) -> set[DagRunId]:
    """Begin runs of a DAG that wait, as many as it may have; return their ids. The oldest logical date goes first.

    The DAG is locked, so that of two supervisors which count its runs the second sees the runs that the first has
    begun. Runs that another evaluates at this moment are skipped: they keep their flags.
    """
    active = dag_run.c.dag_id == dag_row, dag_run.c.ended_at.is_(None)
    begun = select(func.count()).select_from(dag_run).where(*active, dag_run.c.started_at.is_not(None))
    room = runs_max - tx.connection.execute(begun).scalar_one()
    if room <= 0:
        return set()
    waiting = (
        select(dag_run.c.id)
        .where(*active, dag_run.c.started_at.is_(None))
        .order_by(func.coalesce(dag_run.c.logical_date, dag_run.c.created_date), dag_run.c.id)
        .limit(room)
        .with_for_update(skip_locked=True, key_share=True)
    )
    ids = set(tx.connection.execute(waiting).scalars())
    for some in chunks(sorted(ids)):
        begin = update(dag_run).where(dag_run.c.id.in_(some)).values(started_at=tx.now, needs_look=true())
        tx.connection.execute(begin)
    return ids
