"""Mapped groups: tasks that are expanded together, and go on index by index.

Each task of a mapped group is a mapped task, over the same values, with a row of its own and its instances. At an index
of the group each of them has an instance. An instance waits for those at its own index, and for the tasks outside of
the group that are upstream of it: so an index goes through the whole group, whatever others do, and the window counts
indexes and not instances.

The instances at an index are made together, in ``none``. Which of them begin, and which never will, is decided by the
trigger rules of the tasks (`headgate.scheduling.planning.decide_index`), from the states at that index alone. So a
look reads no more indexes than the window has, whatever the length of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Text,
    and_,
    bindparam,
    exists,
    func,
    literal_column,
    or_,
    select,
    union,
)

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.maps import INSTANCES_MAX, MapSpec
from headgate.scheduling import planning, states
from headgate.scheduling.planning import Graph
from headgate.scheduling.states import TERMINAL, UNFINISHED
from headgate.scheduling.trigger_rules import Readiness
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import Kind, chunks, find
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import Instances, TaskInstanceId
from headgate.store.scheduling import expansion
from headgate.store.scheduling.expansion import BEGUN, Unexpandable
from headgate.store.tables import task_instance
from headgate.store.tasks import dags, run_states, task_rows
from headgate.store.tasks.run_states import OwnMap, RunStates
from headgate.store.tasks.task_rows import LockedTask

_C = task_instance.c
_EVENTS: Mapping[Readiness, str] = {
    "run": "scheduled",
    "upstream_failed": "upstream_failed",
    "skipped": "upstream_skipped",
}
_UNBEGUN = frozenset({TaskState.NONE})
INDEXES_MAX: Final = 100  # read at once: with all tasks of a large group 10,000 rows


class Advanced(NamedTuple):
    """What one look has done for a mapped group.

    ``made`` instances are new, and ``scheduled`` instances begin. ``has_ended``: rows of it have ended, so that others
    have to be looked at again. ``is_done``: there is no more to do now.
    """

    made: int = 0
    scheduled: int = 0
    has_ended: bool = False
    is_done: bool = True


def advance(tx: Tx, seen: RunStates, graph: Graph, group: str, *, may_start: bool, limit: int) -> Advanced:
    """Make, begin and end instances of a mapped group, up to about ``limit``, as far as they can go now.

    ``seen`` are the states of its run; new instances are added to them. If ``may_start`` is False, none begins.
    """
    look = _Look(tx, seen, graph, group, limit)
    return look.expand(may_start=may_start) or look.go_on(may_start=may_start)


class _Look:
    """One look at a mapped group, in one transaction."""

    def __init__(self, tx: Tx, seen: RunStates, graph: Graph, group: str, limit: int) -> None:
        self._tx = tx
        self._seen = seen
        self._graph = graph
        self._group = group
        self._limit = limit
        self._tasks: Sequence[TaskSpec] = graph.groups[group]
        spec = self._tasks[0].map
        assert spec is not None
        self._spec: MapSpec = spec
        self._now = seen.for_rules()
        self._length: int | None = None  # indexes from there on have no value, or none yet
        self._stopped: str | None = None
        self._to_stop: Sequence[LockedTask] = ()
        self._made = 0
        self._has_ended = False
        self._is_done = True

    def expand(self, *, may_start: bool) -> Advanced | None:
        """Make the instances at the next indexes. Return what was done if that is all for now, else None."""
        open_tasks = [task for task in self._tasks if self._seen.own.get(task.task_id) is TaskState.NONE]
        if not open_tasks:
            return None
        rows = self._locked_own(open_tasks)
        if rows is None:
            return Advanced(is_done=False)
        owns = [run_states.own_map(self._tx, row.id) for row in rows]
        if any(own.is_held for own in owns) or self._has(TaskState.RESTARTING):
            return Advanced()  # what a user does with it, and what its old workers do, has to end first
        readiness = planning.expandable(self._graph, self._spec, self._now)
        if readiness == "wait":
            return Advanced()
        if readiness != "run":
            return self._end(rows, _EVENTS[readiness])
        if not any(self._seen.mapped.get(task.task_id) for task in self._tasks):
            nothing_yet = {task.task_id: TaskState.NONE for task in open_tasks}
            fresh = planning.decide_index(self._graph, self._group, self._now, nothing_yet)
            if "run" not in fresh.values():
                return self._end_as(rows, fresh.values()) if len(fresh) == len(rows) else Advanced()
        try:
            there = expansion.available(self._tx, self._seen, owns, open_tasks, self._graph.maps)
        except Unexpandable as error:
            return self._end(rows, "unexpandable", str(error))
        self._length = there.length
        made = max(own.made for own in owns)
        self._stopped = expansion.stopped(self._tx, self._seen, self._tasks, made)
        if self._stopped is not None:
            self._to_stop = rows
            return None
        # Some tasks may have fewer than others, if a user had ended these tasks early and has cleared them.
        least = min(own.made for own in owns)
        if may_start and least < there.length:
            target = min(made + self._spec.window - self._count_indexes(UNFINISHED), there.length)
            most = max(self._limit // len(open_tasks), 1)
            least = min(
                self._make(own, task, range(own.made, min(own.made + most, target)))
                for task, own in zip(open_tasks, owns, strict=True)
            )
            self._is_done = least >= target
        if there.is_complete and self._remove_surplus(there.length) and least >= there.length:
            event = "expanded" if there.length else "expanded_to_nothing"
            for task, row in zip(open_tasks, rows, strict=True):
                if TaskState.NONE not in self._seen.mapped.get(task.task_id, ()):
                    task_rows.apply(self._tx, row, event)
                    self._has_ended = True
        return None

    def go_on(self, *, may_start: bool) -> Advanced:
        """Decide about the instances in ``none`` at each index, the first ones first."""
        moved: dict[str, list[TaskInstanceId]] = {event: [] for event in (*_EVENTS.values(), "map_stopped")}
        known: dict[tuple[tuple[str, TaskState], ...], dict[str, Readiness]] = {}
        room: int | None = None
        for index, at, ids in self._at(self._waiting()):
            if self._length is not None and index >= self._length:
                break
            if self._stopped is not None and frozenset(at.values()) == _UNBEGUN:
                moved["map_stopped"] += ids.values()
                continue
            key = tuple(at.items())
            if key not in known:
                known[key] = planning.decide_index(self._graph, self._group, self._now, at)
            for task_id, readiness in known[key].items():
                if readiness == "run" and not may_start:
                    continue
                if readiness == "run" and BEGUN.isdisjoint(at.values()):
                    room = self._spec.window - self._count_indexes(BEGUN) if room is None else room
                    if room <= 0:
                        continue
                    room -= 1
                    at[task_id] = TaskState.SCHEDULED
                moved[_EVENTS[readiness]].append(ids[task_id])
            if sum(map(len, moved.values())) >= self._limit:
                self._is_done = False
                break
        if self._is_done and not moved["map_stopped"]:
            for row in self._to_stop:
                task_rows.apply(self._tx, row, "expanded", last_error=self._stopped)
                self._has_ended = True
        return self._move(moved)

    # --- parts -----------------------------------------------------------------------------------

    def _locked_own(self, tasks: Sequence[TaskSpec]) -> list[LockedTask] | None:
        """Lock the own rows of these tasks; return None if one of them is busy, or not in ``none`` any more."""
        rows = [task_rows.locked_unless_busy(self._tx, self._seen.ids[task.task_id]) for task in tasks]
        found = [row for row in rows if row is not None and row.state is TaskState.NONE]
        return found if len(found) == len(rows) else None

    def _has(self, state: TaskState) -> bool:
        return any(state in self._seen.mapped.get(task.task_id, ()) for task in self._tasks)

    def _end(self, rows: Sequence[LockedTask], event: str, reason: str | None = None) -> Advanced:
        """End the tasks themselves, after their instances that have not begun."""
        ended = "upstream_failed" if event == "unexpandable" else event
        for task in self._tasks:
            left = self._seen.of_map(self._tx, task.task_id, TaskState.NONE, limit=self._limit)
            if left:
                expansion.end_all(self._tx, ended, left)
                return Advanced(has_ended=True, is_done=False)
        for row in rows:
            task_rows.apply(self._tx, row, event, last_error=reason)
        return Advanced(has_ended=True)

    def _end_as(self, rows: Sequence[LockedTask], decided: Iterable[Readiness]) -> Advanced:
        """End the tasks themselves, without an instance, as those at each of their indexes would end at once."""
        for row, readiness in zip(rows, decided, strict=True):
            task_rows.apply(self._tx, row, _EVENTS[readiness])
        return Advanced(has_ended=True)

    def _make(self, own: OwnMap, task: TaskSpec, indexes: range) -> int:
        """Make instances at these indexes; return how many the task has then."""
        if not indexes:
            return own.made
        self._made += len(expansion.make(self._tx, self._seen, own, task, indexes))
        self._seen.mapped[task.task_id] = self._seen.mapped.get(task.task_id, frozenset()) | _UNBEGUN
        return indexes.stop

    def _remove_surplus(self, length: int) -> bool:
        """Remove instances that were cleared, and have no value any more; return whether none is left."""
        for task in self._tasks:
            behind = Instances(task.task_id, length, INSTANCES_MAX)
            left = run_states.instances_between(self._tx, self._seen.run, behind, _UNBEGUN, limit=self._limit)
            removed = [dags.remove_task(self._tx, one.id) for one in left]
            self._has_ended = self._has_ended or any(removed)
            if not all(removed) or len(left) == self._limit:
                self._is_done = False
                return False
        return True

    def _waiting(self) -> list[int]:
        """Return the first indexes, in their order, at which something may be decided.

        An instance that is decided by tasks outside of the group alone is decided at once. Any other waits until one
        that is upstream of it at its index has ended, or has no instance there, because a user has ended its task
        early: so most of those that wait are not looked at.
        """
        fresh = planning.decide_index(
            self._graph, self._group, self._now, {task.task_id: TaskState.NONE for task in self._tasks}
        )
        limit = self._spec.window + self._limit  # more than what has begun can block
        found: set[int] = set()
        for task in self._tasks:
            if TaskState.NONE not in self._seen.mapped.get(task.task_id, ()):
                continue
            above = [name for name in task.upstream if self._graph.tasks[name].group == self._group]
            if not above or task.task_id in fresh:
                found.update(
                    one.map_index for one in self._seen.of_map(self._tx, task.task_id, TaskState.NONE, limit=limit)
                )
            else:
                of_above = {f"of_above_{number}": name for number, name in enumerate(above)}
                rows = _waiting_below(len(above)).run(
                    self._tx.connection, of_run=self._seen.run, of_task=task.task_id, limit=limit, **of_above
                )
                found.update(index for (index,) in rows.fetchall())
        return sorted(found)

    def _at(self, indexes: Sequence[int]) -> Iterator[tuple[int, dict[str, TaskState], dict[str, TaskInstanceId]]]:
        """Yield the states of the group's instances at these indexes, and the ids of those in ``none``."""
        for some in chunks(indexes, INDEXES_MAX):
            found: dict[int, tuple[dict[str, TaskState], dict[str, TaskInstanceId]]]
            found = {index: ({}, {}) for index in some}
            rows = [(self._seen.run, task.task_id, index) for index in some for task in self._tasks]
            for id_, index, task_id, state in find(self._tx.connection, _INSTANCE, rows, returning=_FOUND):
                at, ids = found[index]
                at[task_id] = TaskState(state)
                if at[task_id] is TaskState.NONE:
                    ids[task_id] = id_
            for index, (at, ids) in found.items():
                yield index, at, ids

    def _count_indexes(self, some: frozenset[TaskState]) -> int:
        """Return how many indexes have an instance in one of these states; the window if there are that many."""
        of_tasks = {f"of_task_{number}": task.task_id for number, task in enumerate(self._tasks)}
        counted = _count_indexes(len(self._tasks), some)
        row = counted.run(self._tx.connection, of_run=self._seen.run, limit=self._spec.window, **of_tasks).fetchone()
        return int(min(row[0], self._spec.window))

    def _move(self, moved: Mapping[str, Sequence[TaskInstanceId]]) -> Advanced:
        scheduled = 0
        for event, ids in moved.items():
            (row,) = states.of(event)
            locked = task_rows.lock_fresh(self._tx, ids)
            task_rows.change_all(self._tx, row, sorted(locked))
            self._is_done = self._is_done and len(locked) == len(ids)
            if event == "scheduled":
                scheduled = len(locked)
            else:
                self._has_ended = self._has_ended or bool(locked)
        if scheduled or self._made:
            marks.reach("groups.advanced")
        return Advanced(self._made, scheduled, self._has_ended, self._is_done)


# --- the statements ------------------------------------------------------------------------------

_INSTANCE = Kind(task_instance, ("dag_run_id", "task_id", "map_index"))
_FOUND: Final = ("id", "map_index", "task_id", "state")
_OF_RUN = bindparam("of_run", type_=BigInteger())
_LIMIT = bindparam("limit", type_=Integer())
_above = task_instance.alias("above")


def _in_state(task: ColumnElement[str], *some: TaskState) -> ColumnElement[bool]:
    # With literals: a partial index serves only a statement with the same text.
    return and_(
        _C.dag_run_id == _OF_RUN, _C.task_id == task, _C.map_index >= literal_column("0"), task_rows.is_in(*some)
    )


@cache
def _waiting_below(above: int) -> Prepared:
    """Return the statement for the indexes at which a task is in ``none``, and does not wait for all those above it.

    One of so many above it has ended there, or has no instance.
    """
    names = [bindparam(f"of_above_{number}", type_=Text()) for number in range(above)]
    at_index = (_above.c.dag_run_id == _C.dag_run_id, _above.c.map_index == _C.map_index)
    has_ended = exists(ONE).where(
        *at_index,
        or_(*(_above.c.task_id == name for name in names)),
        or_(*(_above.c.state == literal_column(f"'{state.value}'") for state in sorted(TERMINAL))),
    )
    is_missing = or_(*(~exists(ONE).where(*at_index, _above.c.task_id == name) for name in names))
    waiting = and_(_in_state(bindparam("of_task", type_=Text()), TaskState.NONE), or_(has_ended, is_missing))
    return Prepared(select(_C.map_index).where(waiting).order_by(_C.map_index).limit(_LIMIT))


@cache
def _count_indexes(tasks: int, some: frozenset[TaskState]) -> Prepared:
    """Return the statement for the number of indexes at which one of so many tasks is in one of these states."""
    names = [bindparam(f"of_task_{number}", type_=Text()) for number in range(tasks)]
    parts = [select(_C.map_index).where(_in_state(name, *sorted(some))).limit(_LIMIT).subquery() for name in names]
    return Prepared(select(func.count()).select_from(union(*(select(part) for part in parts)).subquery()))
