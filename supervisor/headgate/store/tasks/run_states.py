"""The states of the tasks of a run, read in a time that depends on its DAG, and not on how many instances they have.

A task has one row with ``map_index`` -1, or, if it is mapped, any number of rows with ``map_index`` 0 and above, its
instances. Rows of the first kind are read one by one, from a range of the unique index. Of the instances only the
*distinct* states are read, by a loose scan of an index: from each state of a task the database seeks the next one, and
never looks at the instances between. That is all that trigger rules ask for (`headgate.scheduling.trigger_rules`), and
a few seeks for each mapped task, while grouping its instances would read all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

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
    union_all,
)

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import states
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.tables import task_instance
from headgate.store.tasks import task_rows

_C = task_instance.c
_ONE = {state.value: frozenset({state}) for state in TaskState}


class RunStates(NamedTuple):
    """The distinct states of each task of a run, by task id, and the ids of the rows of those that are not mapped."""

    run: DagRunId
    states: dict[str, frozenset[TaskState]]
    ids: dict[str, TaskInstanceId]

    def instances(
        self, tx: Tx, task_ids: Iterable[str], wanted: Collection[TaskState], *, limit: int
    ) -> dict[TaskInstanceId, str]:
        """Return up to ``limit`` rows of these tasks, which are in a wanted state, with their task ids.

        Tasks that are not mapped come first, in the order of their ids, and have the states that were read.
        """
        present = [(task_id, self.states[task_id].intersection(wanted)) for task_id in task_ids]
        whole = sorted((self.ids[task_id], task_id) for task_id, some in present if some and task_id in self.ids)
        found = dict(whole[:limit])
        for task_id, some in present:
            for state in sorted(some) if task_id not in self.ids else ():
                parameters = {"of_run": self.run, "of_task": task_id, "of_state": state.value}
                rows = _INSTANCES.run(tx.connection, limit=limit - len(found), **parameters).fetchall()
                found |= {id_: task_id for (id_,) in rows}
        return found


def read(tx: Tx, run: DagRunId) -> RunStates:
    """Return the states of the tasks of a run."""
    seen = RunStates(run, {}, {})
    for task_id, id_, state in _STATES.run(tx.connection, of_run=run).fetchall():
        before = seen.states.get(task_id)
        seen.states[task_id] = _ONE[state] if before is None else before | _ONE[state]
        if id_ is not None:
            seen.ids[task_id] = id_
    return seen


def has_unfinished() -> ColumnElement[bool]:
    """Return the condition that the run ``:of_run`` has a task that has not ended."""
    whole = exists().where(task_rows.unmapped_of(_OF_RUN), task_rows.is_in(*sorted(states.UNFINISHED)))
    mapped = exists().where(_SEEN.c.state.in_(sorted(state.value for state in states.UNFINISHED)))
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
_INSTANCES = Prepared(
    select(_C.id)
    .where(_is_mapped(_C), _C.task_id == bindparam("of_task", type_=Text()))
    .where(_C.state == bindparam("of_state", type_=Text()))
    .order_by(_C.map_index)
    .limit(bindparam("limit", type_=Integer()))
)
