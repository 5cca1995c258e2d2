"""The states of the tasks of a run, read in a time that depends on its DAG, and not on how many instances they have.

A task has one row of its own, with ``map_index`` -1, and, if it is mapped, any number of rows with ``map_index`` 0 and
above, its instances. Rows of the first kind are read one by one, from a range of the unique index. Of the instances
only the *distinct* states are read, by a loose scan of an index: from each state of a task the database seeks the next
one, and never looks at the instances between. That is all that trigger rules ask for
(`headgate.scheduling.trigger_rules`), and a few seeks for each mapped task, while grouping its instances would read all
of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

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
    null,
    or_,
    select,
    union,
    union_all,
    update,
)

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import map_states, states
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRunId, Instances, TaskInstanceId
from headgate.store.tables import task_instance
from headgate.store.tasks import task_rows

_C = task_instance.c
HELD: Final = -1  # in place of the length of a mapped task of which nothing begins: `headgate.store.tasks.user_actions`
_ONE = {state.value: frozenset({state}) for state in TaskState}
_NO_STATES: frozenset[TaskState] = frozenset()


class Instance(NamedTuple):
    """One instance of a mapped task."""

    id: TaskInstanceId
    map_index: int


class RunStates(NamedTuple):
    """The states of the tasks of a run, each by task id.

    ``own`` has those of the rows with ``map_index`` -1, and ``ids`` the ids of these; ``mapped`` has the distinct
    states of the instances.
    """

    run: DagRunId
    own: dict[str, TaskState]
    ids: dict[str, TaskInstanceId]
    mapped: dict[str, frozenset[TaskState]]

    def for_rules(self) -> dict[str, frozenset[TaskState]]:
        """Return the states of each task as trigger rules see them (`headgate.scheduling.map_states`)."""
        found = {task_id: _ONE[state] for task_id, state in self.own.items()}
        for task_id, some in self.mapped.items():
            found[task_id] = map_states.together(found.get(task_id, _NO_STATES), some)
        return found

    def of_tasks(self) -> dict[str, TaskState]:
        """Return one state for each task: a mapped one has not ended before all of its instances have."""
        seen = self.for_rules()
        return {task_id: map_states.state_of(seen[task_id]) for task_id in self.own}

    def unfinished(self) -> set[str]:
        """Return the ids of the tasks of which a row has not ended."""
        return {name for name, state in self.own.items() if state in states.UNFINISHED} | {
            name for name, some in self.mapped.items() if not states.UNFINISHED.isdisjoint(some)
        }

    def instances(
        self, tx: Tx, task_ids: Iterable[str], wanted: Collection[TaskState], *, limit: int
    ) -> dict[TaskInstanceId, str]:
        """Return up to ``limit`` rows of these tasks, which are in a wanted state, with their task ids.

        Rows of tasks themselves come first, in the order of their ids, then instances in that of their indexes.
        """
        names = list(task_ids)
        own = sorted((self.ids[name], name) for name in names if self.own.get(name) in wanted)
        found = dict(own[:limit])
        for name in names:
            for state in sorted(self.mapped.get(name, _NO_STATES).intersection(wanted)):
                found |= {one.id: name for one in self.of_map(tx, name, state, limit=limit - len(found))}
        return found

    def of_map(self, tx: Tx, task_id: str, state: TaskState, *, limit: int) -> list[Instance]:
        """Return up to ``limit`` instances of a mapped task that are in this state, in the order of their indexes."""
        if state not in self.mapped.get(task_id, _NO_STATES):
            return []
        rows = _INSTANCES.run(tx.connection, of_run=self.run, of_task=task_id, of_state=state.value, limit=limit)
        return list(map(Instance._make, rows.fetchall()))

    def indexes(self, tx: Tx, task_ids: Iterable[str], some: Collection[TaskState], *, limit: int) -> set[int]:
        """Return the indexes at which an instance of one of these mapped tasks is in one of these states.

        If there are more than ``limit`` they are the first ones, or some more of them.
        """
        parts = [
            select(_C.map_index)
            .where(_is_mapped(_C), _C.task_id == name, task_rows.is_in(state))
            .order_by(_C.map_index)
            .limit(limit)
            .subquery()
            for name in task_ids
            for state in sorted(self.mapped.get(name, _NO_STATES).intersection(some))
        ]
        if not parts:
            return set()
        found = union(*(select(part) for part in parts))
        return set(tx.connection.execute(found, {"of_run": self.run}).scalars())

    def states_at(self, tx: Tx, task_ids: Iterable[str], index: int) -> dict[str, TaskState]:
        """Return the states of the instances of these mapped tasks at an index, by task id."""
        of_tasks = (_is_mapped(_C), _C.task_id.in_(list(task_ids)), _C.map_index == index)
        rows = tx.connection.execute(select(_C.task_id, _C.state).where(*of_tasks), {"of_run": self.run})
        return {task_id: TaskState(state) for task_id, state in rows}

    def unbegun(self, tx: Tx, task_id: str, *, limit: int, with_cleared: bool = True) -> list[Instance]:
        """Return up to ``limit`` instances of a mapped task that no worker has had since they were made, or cleared.

        Without ``with_cleared`` only those that were never cleared after they had been scheduled.
        """
        found: list[Instance] = []
        for state in sorted(self.mapped.get(task_id, _NO_STATES) & _UNBEGUN.keys()):
            of_task = {"of_run": self.run, "of_task": task_id, "limit": limit - len(found)}
            rows = _UNBEGUN[state][with_cleared].run(tx.connection, **of_task) if len(found) < limit else None
            found += [] if rows is None else map(Instance._make, rows.fetchall())
        return found

    def count_of_map(self, tx: Tx, task_id: str, some: Collection[TaskState], *, limit: int) -> int:
        """Return how many instances of a mapped task are in these states; ``limit`` if there are that many.

        All are counted at one moment: others begin and end meanwhile, and one that does is in none of its states twice,
        and not in none of them. Those that have ended since the states were read may be among them, or not.
        """
        if self.mapped.get(task_id, _NO_STATES).isdisjoint(some):
            return 0
        found = _count_in(frozenset(some)).run(tx.connection, of_run=self.run, of_task=task_id, limit=limit)
        return int(min(found.fetchone()[0], limit))


def read(tx: Tx, run: DagRunId) -> RunStates:
    """Return the states of the tasks of a run."""
    seen = RunStates(run, {}, {}, {})
    for task_id, id_, state in _STATES.run(tx.connection, of_run=run).fetchall():
        if id_ is None:
            seen.mapped[task_id] = seen.mapped.get(task_id, _NO_STATES) | _ONE[state]
        else:
            seen.own[task_id], seen.ids[task_id] = TaskState(state), id_
    return seen


def instances_between(
    tx: Tx, run: DagRunId, part: Instances, wanted: Collection[TaskState], *, limit: int
) -> list[Instance]:
    """Return up to ``limit`` of these instances of a mapped task that are in a wanted state, in their order."""
    of_task = select(_C.id, _C.map_index).where(_is_mapped(_C), _C.task_id == part.task_id)
    between = of_task.where(_C.map_index.between(part.first, part.last)).order_by(_C.map_index).limit(limit)
    # Of each state from a range of the index: instances in others, which may be very many, are not looked at.
    each = [between] if len(wanted) == len(TaskState) else [between.where(task_rows.is_in(one)) for one in wanted]
    rows = [Instance(*row) for statement in each for row in tx.connection.execute(statement, {"of_run": run})]
    return sorted(rows, key=lambda one: one.map_index)[:limit]


class OwnMap(NamedTuple):
    """What the own row of a mapped task says of its instances: how many are to be, once that is known, and are made.

    ``given_digest`` says which values stood in the file when it was expanded.
    """

    id: TaskInstanceId
    length: int | None
    made: int
    given_digest: str | None

    @property
    def is_held(self) -> bool:
        """Whether a user's action on the task has not ended."""
        return self.length == HELD


def own_map(tx: Tx, own: TaskInstanceId) -> OwnMap:
    """Return what the own row of a mapped task says of its instances."""
    return OwnMap._make(_OWN_MAP.run(tx.connection, of_id=own).fetchone())


def take_values_of_now(tx: Tx, instances: Sequence[TaskInstanceId]) -> None:
    """Have locked instances of mapped tasks take the values that stand in the file when they begin the next time."""
    for some in chunks(instances):
        of_now = update(task_instance).where(_C.id.in_(some), _C.map_index >= literal_column("0"))
        tx.connection.execute(of_now.values(given_digest=""))


def take_values_of_task(tx: Tx, run: DagRunId, task_id: str) -> None:
    """Have the instances of a mapped task that is expanded anew take the values that it is expanded over."""
    _FORGET_GIVEN.run(tx.connection, of_run=run, of_task=task_id)


def has_unfinished() -> ColumnElement[bool]:
    """Return the condition that the run ``:of_run`` has a task that has not ended."""
    whole = exists(ONE).where(task_rows.unmapped_of(_OF_RUN), task_rows.is_in(*sorted(states.UNFINISHED)))
    mapped = exists(ONE).where(_SEEN.c.state.in_(sorted(state.value for state in states.UNFINISHED)))
    return or_(whole, mapped)


# --- the statements ------------------------------------------------------------------------------

_OF_RUN = bindparam("of_run", type_=BigInteger())
_found = task_instance.alias("found")
_following = task_instance.alias("following")


def _is_mapped(columns: Any) -> ColumnElement[bool]:
    # With a literal: a partial index serves only a statement with the same text.
    return and_(columns.dag_run_id == _OF_RUN, columns.map_index >= literal_column("0"))


def _first(*where: ColumnElement[bool]) -> ColumnElement[int]:
    """Return the id of the first instance that meets the condition, in the order of the index."""
    c = _found.c
    statement = select(c.id).where(_is_mapped(c), *where).order_by(c.task_id, c.state, c.map_index)
    return statement.limit(literal_column("1")).scalar_subquery()


def _distinct_states() -> Any:
    """Return the table of the distinct states of mapped tasks, which finds each of its rows by the one before.

    Two subqueries, because SQLite compares pairs by the first column of an index only.
    """
    seen = select(_C.task_id, _C.state).where(_C.id == _first()).cte("seen", recursive=True)
    of_same_task = _first(_found.c.task_id == seen.c.task_id, _found.c.state > seen.c.state)
    of_next_task = _first(_found.c.task_id > seen.c.task_id)
    after = select(_following.c.task_id, _following.c.state).join(
        seen, _following.c.id == func.coalesce(of_same_task.correlate(seen), of_next_task.correlate(seen))
    )
    return seen.union_all(after)


_SEEN = _distinct_states()
_STATES = Prepared(
    union_all(
        select(_C.task_id, _C.id, _C.state).where(task_rows.unmapped_of(_OF_RUN)),
        select(_SEEN.c.task_id, null(), _SEEN.c.state),
    )
)
_OWN_MAP = Prepared(select(_C.id, _C.map_length, _C.map_made, _C.given_digest).where(_C.id == bindparam("of_id")))
_FORGET_GIVEN = Prepared(
    update(task_instance)
    .where(*(_is_mapped(_C), _C.task_id == bindparam("of_task"), _C.given_digest.is_not(None)))
    .values(given_digest=null())
)
_LIMIT = bindparam("limit", type_=Integer())


def _in_state(state: ColumnElement[str]) -> ColumnElement[bool]:
    return and_(_is_mapped(_C), _C.task_id == bindparam("of_task", type_=Text()), _C.state == state)


def is_unbegun(*some: TaskState) -> ColumnElement[bool]:
    """Return the condition that a task in one of these states has not begun: it was not resumed, nor tried before."""
    is_first_try = and_(_C.next_method.is_(None), _C.try_number == _C.tries_max - _C.retries)
    return and_(task_rows.is_in(*sorted(some)), or_(task_rows.is_in(TaskState.NONE), is_first_try))


_IN_STATE = _in_state(bindparam("of_state", type_=Text()))
# By state, and by whether those are among them that were cleared, which gives a task more tries than it had.
_UNBEGUN = {
    state: {
        with_cleared: Prepared(
            select(_C.id, _C.map_index)
            .where(
                *(_in_state(literal_column(f"'{state.value}'")), is_unbegun(state)),
                *([] if with_cleared else [_C.tries_max == _C.retries + literal_column("1")]),
            )
            .order_by(_C.map_index)
            .limit(_LIMIT)
        )
        for with_cleared in (True, False)
    }
    for state in (TaskState.NONE, TaskState.SCHEDULED)
}
_INSTANCES = Prepared(select(_C.id, _C.map_index).where(_IN_STATE).order_by(_C.map_index).limit(_LIMIT))


@cache
def _count_in(some: frozenset[TaskState]) -> Prepared:
    # One statement for all states, because each sees a moment of its own: an instance that goes from one state to the
    # next between two of them would be in neither. One part for each state, which is a range of the index.
    of_states = [
        select(_C.id).where(_in_state(literal_column(f"'{state.value}'"))).limit(_LIMIT) for state in sorted(some)
    ]
    return Prepared(
        select(func.count()).select_from(union_all(*(select(part.subquery()) for part in of_states)).subquery())
    )
