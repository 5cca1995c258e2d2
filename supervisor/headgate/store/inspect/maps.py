"""Mapped tasks in lists and counts: which of their rows count, and how many instances are in which state.

The row of a mapped task itself is no more work than its instances, and says how they stand only if it has ended by
itself: it could not be expanded, did not run, or has no values. In ``none`` and ``success`` it stands for its instances
(`headgate.store.scheduling.expansion`), so it counts in these states only if it has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import ColumnElement, and_, exists, func, literal_column, not_, or_, select

from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState
from headgate.protocol.messages.maps import INSTANCES_MAX, Elements, Output, Worklist, of_tasks
from headgate.scheduling import planning
from headgate.scheduling.planning import Graph
from headgate.scheduling.states import UNFINISHED
from headgate.scheduling.why import GroupFacts, MapFacts, WorklistFacts
from headgate.scheduling.words import NAMES_SHOWN_MAX
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import chunks
from headgate.store.db.transaction import Tx
from headgate.store.ids import Instances
from headgate.store.tables import task_instance
from headgate.store.tasks import elements, run_states, task_rows
from headgate.store.tasks.run_states import HELD, RunStates

_C = task_instance.c
_EACH = task_instance.alias("each_instance")
_STANDS_FOR_THEM = (TaskState.NONE, TaskState.SUCCESS)
# With literals: a partial index serves only a statement with the same text.
IS_TASK = _C.map_index == literal_column("-1")
IS_INSTANCE = _C.map_index >= literal_column("0")

Counts = dict[str, int]  # instances by state


def _has_instance(*where: ColumnElement[bool]) -> ColumnElement[bool]:
    e = _EACH.c
    of_it = and_(e.dag_run_id == _C.dag_run_id, e.task_id == _C.task_id, e.map_index >= literal_column("0"))
    return exists(ONE).where(of_it, *where)


def counts_itself() -> ColumnElement[bool]:
    """Return the condition that the row of a task itself counts beside those of its instances."""
    return or_(not_(task_rows.is_in(*_STANDS_FOR_THEM)), not_(_has_instance()))


def is_counted() -> ColumnElement[bool]:
    """Return the condition that a row is an instance, or that of a task that counts beside its instances."""
    return or_(IS_INSTANCE, counts_itself())


def has_row_in(some: Collection[TaskState]) -> ColumnElement[bool]:
    """Return the condition on a task itself that its row, if that counts, or an instance is in one of these states."""
    instances = _has_instance(_EACH.c.state.in_([state.value for state in some]))
    return or_(and_(task_rows.is_in(*some), counts_itself()), instances)


def counts_of(tx: Tx, runs: Iterable[int], task_id: str | None = None) -> dict[tuple[int, str], Counts]:
    """Return how many instances are in which state, by run and mapped task; ``task_id``: of these alone."""
    found: dict[tuple[int, str], Counts] = {}
    where = [] if task_id is None else [_C.task_id == task_id]
    of_task = _C.dag_run_id, _C.task_id, _C.state
    for part in chunks(sorted(set(runs))):
        counted = select(*of_task, func.count()).where(_C.dag_run_id.in_(part), IS_INSTANCE, *where).group_by(*of_task)
        for run, name, state, count in tx.connection.execute(counted):
            found.setdefault((run, name), {})[state] = count
    return found


def counts_by_run(tx: Tx, runs: Iterable[int]) -> dict[int, Counts]:
    """Return the number of tasks and instances of each run by state, in the order of the states."""
    found: dict[int, Counts] = {}
    of_run = _C.dag_run_id, _C.state
    for part in chunks(sorted(set(runs))):
        is_of_runs = _C.dag_run_id.in_(part)
        # One after the other: each is served by an index of its own.
        for which in (and_(IS_TASK, counts_itself()), IS_INSTANCE):
            counted = select(*of_run, func.count()).where(is_of_runs, which).group_by(*of_run)
            for run, state, count in tx.connection.execute(counted):
                counts = found.setdefault(run, {})
                counts[state] = counts.get(state, 0) + count
    order = [state.value for state in TaskState]
    return {run: {state: counts[state] for state in order if state in counts} for run, counts in found.items()}


def map_facts(tx: Tx, task: TaskSpec, index: int, whole: DagSpec, seen: RunStates) -> MapFacts | None:
    """Return the facts about a mapped task of a run, or an instance of it; None if it is not mapped."""
    spec, task_id = task.map, task.task_id
    if spec is None:
        return None
    counts = counts_of(tx, [seen.run], task_id).get((seen.run, task_id), {})
    of_task = (task_rows.unmapped_of(seen.run), _C.task_id == task_id)
    columns = (_C.map_length, _C.map_made, _C.last_error)
    length, made, error = tx.connection.execute(select(*columns).where(*of_task)).one()
    begun = UNFINISHED - {TaskState.NONE}
    first = run_states.instances_between(tx, seen.run, Instances(task_id, 0, INSTANCES_MAX), begun, limit=1)
    stopped_by = "fail_fast" if spec.fail_fast else f"failures_max={spec.failures_max}"
    emitters = dict.fromkeys(one.task_id for one in of_tasks(spec.source) if isinstance(one, Elements))
    return MapFacts(
        window=spec.window,
        made=made,
        length=None if length == HELD else length,
        counts=counts,
        sources=tuple(dict.fromkeys(one.task_id for one in of_tasks(spec.source) if isinstance(one, Output))),
        emitters=tuple(emitters),
        emitted=sum(elements.count(tx, seen.run, name) for name in emitters),
        stopped_by=stopped_by if error is not None and seen.own[task_id] is TaskState.SUCCESS else None,
        is_held=length == HELD,
        first_open=first[0].map_index if first else None,
        group=_group_facts(tx, task.group, index, whole, seen) if task.group else None,
        worklist=_worklist_facts(tx, spec.source, seen) if isinstance(spec.source, Worklist) else None,
    )


def _worklist_facts(tx: Tx, source: Worklist, seen: RunStates) -> WorklistFacts:
    gate = source.task_id if source.is_loop else None
    return WorklistFacts(source.given, elements.count(tx, seen.run, source.task_id), source.length_max, gate)


def _group_facts(tx: Tx, name: str, index: int, whole: DagSpec, seen: RunStates) -> GroupFacts:
    graph = Graph(whole)
    tasks = graph.groups[name]
    names = [task.task_id for task in tasks]
    spec = graph.maps[names[0]]
    now = seen.for_rules()
    nothing_yet = {task_id: TaskState.NONE for task_id in names if seen.own.get(task_id) is TaskState.NONE}
    outside = dict.fromkeys(above for task in tasks for above in task.upstream if above not in names)
    # A new index waits for all that have not ended, one that was cleared only for those that have begun again.
    blocking = UNFINISHED if index < 0 else UNFINISHED - {TaskState.NONE}
    open_ = sorted(seen.indexes(tx, names, blocking, limit=spec.window))
    shown = index if index >= 0 else open_[0] if open_ else None
    at = {} if shown is None else seen.states_at(tx, names, shown)
    states = seen.of_tasks()
    return GroupFacts(
        name=name,
        upstream=tuple((above, states[above]) for above in outside if states.get(above) in UNFINISHED),
        may_begin="run" in planning.decide_index(graph, name, now, nothing_yet).values(),
        open=tuple(open_[:NAMES_SHOWN_MAX]),
        open_count=len(open_),
        at=tuple((task_id, at[task_id]) for task_id in names if task_id in at),
    )
