"""Mapped tasks: the instances of one are made, and begin, a window of them at a time.

A mapped task has a row of its own, as every task has, and one for each of its instances, numbered from 0 without a gap.
No worker ever gets the task itself. Its row is in ``none`` as long as instances are still to be made, or to begin after
it was cleared: so it holds back what is downstream, and the end of the run. How many there are to be is counted once,
from the values that stand in the file and from what other tasks have left (`headgate.protocol.messages.maps`), and kept
in its row until it is cleared.

A task that is cleared keeps its instances. When it is expanded again they begin again, and those that it has no value
for any more are removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from sqlalchemy import bindparam, select, update

from headgate.protocol.messages import maps
from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.maps import INSTANCES_MAX, Available, Elements, MapSpec, OfTask
from headgate.protocol.values import count_items
from headgate.scheduling import states
from headgate.scheduling.states import TERMINAL, UNFINISHED
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import TaskInstanceId
from headgate.store.tables import task_instance
from headgate.store.tasks import dags, elements, run_states, task_rows, values
from headgate.store.tasks.run_states import Instance, RunStates, is_unbegun
from headgate.store.tasks.task_rows import LockedTask

_C = task_instance.c
_BEGUN = UNFINISHED - {TaskState.NONE}


class Unexpandable(Exception):
    """How many instances a task is to have cannot be known, for this reason, until a user does something."""


class Expanded(NamedTuple):
    """What one look has done for a mapped task: the instances that are to begin, and whether there is more to do now.

    If the window is full there is not: an instance that ends has the run looked at again. ``made`` are those of the
    instances that are new: nobody else sees them yet, so they need no lock.
    """

    begin: list[TaskInstanceId]
    is_done: bool
    made: frozenset[TaskInstanceId] = frozenset()


def expand(tx: Tx, seen: RunStates, task: TaskSpec, mapped: Collection[str], *, limit: int) -> Expanded:
    """Make instances of a mapped task whose trigger rule holds: as many as its window takes, and up to ``limit``.

    ``seen`` are the states of its run, and ``mapped`` all mapped tasks of its DAG. Its own row is in ``none``, and ends
    when the last instance is made.
    """
    assert task.map is not None
    own = task_rows.locked_unless_busy(tx, seen.ids[task.task_id])
    if own is None or own.state is not TaskState.NONE:
        return Expanded([], is_done=False)
    if run_states.is_held(tx, own.id):
        return Expanded([], is_done=True)  # until the user's action on it has ended, which has the run looked at
    if TaskState.RESTARTING in seen.mapped.get(task.task_id, ()):
        return Expanded([], is_done=True)  # until its old worker is gone: there may be no value for it any more
    try:
        there = _available(tx, seen, own, task, mapped)
    except Unexpandable as error:
        _end_early(tx, seen, own, task.task_id, "unexpandable", str(error), limit=limit)
        return Expanded([], is_done=False)
    if (stopped := _stopped(tx, seen, own, task.task_id, task.map)) is not None:
        _end_early(tx, seen, own, task.task_id, "expanded", stopped, limit=limit)
        return Expanded([], is_done=False)
    room = task.map.window - seen.count_of_map(tx, task.task_id, _BEGUN, limit=task.map.window)
    left = seen.of_map(tx, task.task_id, TaskState.NONE, limit=limit)
    again = [one.id for one in left if one.map_index < there.length]
    surplus = [one.id for one in left if one.map_index >= there.length] if there.is_complete else []
    begin, new = again[:room], list[TaskInstanceId]()
    all_begin = len(left) < limit and len(begin) == len(again)
    if all_begin:
        made = _made(tx, own)
        to_make = range(made, min(made + min(room, limit) - len(begin), there.length))
        if to_make:
            new = dags.insert_instances(tx, seen.run, task, to_make)
            begin += new
            made = to_make.stop
            _SET_MADE.run(tx.connection, of_id=own.id, made=made)
        all_begin = made >= there.length
    removed = [dags.remove_task(tx, id_) for id_ in surplus]
    if not (all_begin and there.is_complete and all(removed)):
        return Expanded(begin, len(begin) >= room or (all_begin and all(removed)), frozenset(new))
    task_rows.apply(tx, own, "expanded" if there.length else "expanded_to_nothing")
    return Expanded(begin, there.length > 0, frozenset(new))


def stop(tx: Tx, seen: RunStates, task_id: str, *, limit: int) -> int:
    """End up to ``limit`` instances of a mapped task that have not begun, and are not to.

    If the task was skipped, so are they. If another instance has failed they are ``upstream_failed``: a user who clears
    what has failed clears them as well. Return how many there are, though others may have some of them locked.
    """
    if run_states.is_held(tx, seen.ids[task_id]):
        return 0  # the failed one is being cleared, too, and comes later
    left = seen.unbegun(tx, task_id, limit=limit)
    _end_all(tx, "map_skipped" if seen.own[task_id] is TaskState.SKIPPED else "map_stopped", left)
    return len(left)


# --- parts ---------------------------------------------------------------------------------------


def _available(tx: Tx, seen: RunStates, own: LockedTask, task: TaskSpec, mapped: Collection[str]) -> Available:
    """Return how many values there are; once they are complete, they are not counted again. Raises `Unexpandable`.

    Unless a task whose elements were counted was cleared: it has forgotten them, and emits them again.
    """
    assert task.map is not None
    emitters = {one.task_id for one in maps.of_tasks(task.map.source) if isinstance(one, Elements)}
    (known,) = _LENGTH.run(tx.connection, of_id=own.id).fetchone()
    if known is not None and all(seen.own.get(name) in TERMINAL for name in emitters):
        return Available(known, is_complete=True)

    def count(output: OfTask) -> Available:
        if isinstance(output, Elements):
            has_ended = seen.own.get(output.task_id) in TERMINAL
            return Available(elements.count(tx, seen.run, output.task_id), has_ended)
        if output.task_id in mapped:  # it may have no instance
            some = seen.count_of_map(tx, output.task_id, [TaskState.SUCCESS], limit=INSTANCES_MAX + 1)
            return Available(some, is_complete=True)
        value = values.xcom_of(tx, seen.run, output.task_id, output.key)
        items = None if value is None else count_items(value)
        if items is None:
            found = "nothing" if value is None else f"{value[:60].decode(errors='replace')}, which is no list or dict,"
            raise Unexpandable(
                f"the task {task.task_id!r} is expanded over what {output.task_id!r} has left under {output.key!r}, "
                f"and it has left {found} there"
            )
        return Available(items, is_complete=True)

    there = maps.available(task.map.source, count)
    if there.length > INSTANCES_MAX:
        over = f"{there.length:,} values; the limit is {INSTANCES_MAX:,}"
        raise Unexpandable(f"the task {task.task_id!r} is expanded over {over}")
    if there.is_complete or known is not None:
        _SET_LENGTH.run(tx.connection, of_id=own.id, length=there.length if there.is_complete else None)
    return there


def _end_early(tx: Tx, seen: RunStates, own: LockedTask, task_id: str, event: str, reason: str, *, limit: int) -> None:
    """End a task that makes no more instances; those that were cleared, and have not begun again, fail before it does.

    They are not skipped: who clears what has failed means them as well.
    """
    left = seen.of_map(tx, task_id, TaskState.NONE, limit=limit)
    _end_all(tx, "upstream_failed", left)
    if not left:
        task_rows.apply(tx, own, event, last_error=reason)


def _end_all(tx: Tx, event: str, instances: Iterable[Instance]) -> None:
    """End instances that have not begun, but for those that another transaction has locked: it may wait for the run."""
    (row,) = states.of(event)
    for some in chunks(sorted(one.id for one in instances)):
        statement = select(_C.id).where(_C.id.in_(some), is_unbegun(*row.from_)).order_by(_C.id)
        locked = tx.connection.execute(task_rows.skip_locked(statement)).scalars().all()
        task_rows.change_all(tx, row, locked)


def _made(tx: Tx, own: LockedTask) -> int:
    return int(_MADE.run(tx.connection, of_id=own.id).fetchone()[0])


def _stopped(tx: Tx, seen: RunStates, own: LockedTask, task_id: str, spec: MapSpec) -> str | None:
    """Return why no more instances are made, because too many have failed; None if they are not."""
    failures_max = 1 if spec.fail_fast else spec.failures_max
    if failures_max is None or seen.count_of_map(tx, task_id, [TaskState.FAILED], limit=failures_max) < failures_max:
        return None
    name = "fail_fast" if spec.fail_fast else f"failures_max={failures_max}"
    return f"no instance is made after the first {_made(tx, own):,}, because of {name}"


# --- the statements ------------------------------------------------------------------------------

_OF_ID = _C.id == bindparam("of_id")
_LENGTH = Prepared(select(_C.map_length).where(_OF_ID))
_MADE = Prepared(select(_C.map_made).where(_OF_ID))
_SET_MADE = Prepared(update(task_instance).where(_OF_ID).values(map_made=bindparam("made")))
_SET_LENGTH = Prepared(update(task_instance).where(_OF_ID).values(map_length=bindparam("length")))
