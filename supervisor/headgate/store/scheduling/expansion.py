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

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import bindparam, select, update

from headgate.protocol.encoded_values import count_items
from headgate.protocol.messages import maps
from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.maps import INSTANCES_MAX, Available, Counted, Elements, Worklist
from headgate.scheduling import states
from headgate.scheduling.states import TERMINAL, UNFINISHED
from headgate.store.db.bulk import chunks
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.ids import TaskInstanceId
from headgate.store.tables import task_instance
from headgate.store.tasks import dags, elements, run_states, task_rows, values
from headgate.store.tasks.run_states import Instance, OwnMap, RunStates, is_unbegun
from headgate.store.tasks.task_rows import LockedTask

_C = task_instance.c
BEGUN = UNFINISHED - {TaskState.NONE}


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
    row = task_rows.locked_unless_busy(tx, seen.ids[task.task_id])
    if row is None or row.state is not TaskState.NONE:
        return Expanded([], is_done=False)
    own = run_states.own_map(tx, row.id)
    if own.is_held:
        return Expanded([], is_done=True)  # until the user's action on it has ended, which has the run looked at
    if TaskState.RESTARTING in seen.mapped.get(task.task_id, ()):
        return Expanded([], is_done=True)  # until its old worker is gone: there may be no value for it any more
    try:
        there = available(tx, seen, [own], [task], mapped)
    except Unexpandable as error:
        _end_early(tx, seen, row, task.task_id, "unexpandable", str(error), limit=limit)
        return Expanded([], is_done=False)
    if (reason := stopped(tx, seen, [task], own.made)) is not None:
        _end_early(tx, seen, row, task.task_id, "expanded", reason, limit=limit)
        return Expanded([], is_done=False)
    room = task.map.window - seen.count_of_map(tx, task.task_id, BEGUN, limit=task.map.window)
    left = seen.of_map(tx, task.task_id, TaskState.NONE, limit=limit)
    again = [one.id for one in left if one.map_index < there.length]
    surplus = [one.id for one in left if one.map_index >= there.length] if there.is_complete else []
    begin, new = again[:room], list[TaskInstanceId]()
    is_all = len(left) < limit
    # They come in the order of their indexes: behind one that has no value yet, none has.
    all_begin = len(begin) == len(again) and (is_all or len(again) < len(left))
    if all_begin:
        made = own.made
        to_make = range(made, min(made + min(room, limit) - len(begin), there.length))
        if to_make:
            new = make(tx, seen, own, task, to_make)
            begin += new
            made = to_make.stop
        all_begin = made >= there.length
    removed = [dags.remove_task(tx, id_) for id_ in surplus]
    if not (all_begin and there.is_complete and is_all and all(removed)):
        return Expanded(begin, len(begin) >= room or (all_begin and not there.is_complete), frozenset(new))
    task_rows.apply(tx, row, "expanded" if there.length else "expanded_to_nothing")
    # If none begins now, all may have ended before: then nobody else has the run looked at again.
    return Expanded(begin, bool(begin), frozenset(new))


def stop(tx: Tx, seen: RunStates, task_id: str, *, limit: int) -> int:
    """End up to ``limit`` instances of a mapped task that have not begun, and are not to.

    If the task was skipped, so are they. If another instance has failed they are ``upstream_failed``: a user who clears
    what has failed clears them as well. One that a user has cleared when all were made is to begin nevertheless. Return
    how many there are, though others may have some of them locked.
    """
    if run_states.own_map(tx, seen.ids[task_id]).is_held:
        return 0  # the failed one is being cleared, too, and comes later
    is_skipped, is_made = seen.own[task_id] is TaskState.SKIPPED, seen.own[task_id] is not TaskState.NONE
    left = seen.unbegun(tx, task_id, limit=limit, with_cleared=is_skipped or not is_made)
    end_all(tx, "map_skipped" if is_skipped else "map_stopped", left)
    return len(left)


# --- parts ---------------------------------------------------------------------------------------


def make(tx: Tx, seen: RunStates, own: OwnMap, task: TaskSpec, indexes: range) -> list[TaskInstanceId]:
    """Make the next instances of a mapped task, in ``none``; return their ids."""
    new = dags.insert_instances(tx, seen.run, task, indexes)
    _SET_MADE.run(tx.connection, of_id=own.id, made=indexes.stop)
    return new


def available(
    tx: Tx, seen: RunStates, owns: Sequence[OwnMap], tasks: Sequence[TaskSpec], mapped: Collection[str]
) -> Available:
    """Return over how many values a task, or all tasks of a mapped group, are expanded. Raises `Unexpandable`.

    ``owns`` are the own rows in ``none``. Once the values are complete, they are not counted again. Unless a task whose
    elements were counted was cleared: it has forgotten them, and emits them again.
    """
    spec, own = tasks[0].map, owns[0]
    assert spec is not None
    for one, task in zip(owns, tasks, strict=True):
        if one.given_digest is None and spec.given_digest:
            _SET_GIVEN.run(tx.connection, of_id=one.id, digest=spec.given_digest)
            run_states.take_values_of_task(tx, seen.run, task.task_id)
    name = f"the group {tasks[0].group!r}" if tasks[0].group else f"the task {tasks[0].task_id!r}"
    emitters = {one.task_id for one in maps.of_tasks(spec.source) if isinstance(one, Elements)}
    if (
        own.length is not None
        and not isinstance(spec.source, Worklist)
        and all(seen.own.get(name) in TERMINAL for name in emitters)
    ):
        return Available(own.length, is_complete=True)

    def count(output: Counted) -> Available:
        if isinstance(output, Worklist):
            return _of_worklist(tx, seen, output, [task.task_id for task in tasks], min(one.made for one in owns))
        if isinstance(output, Elements):
            has_ended = seen.own.get(output.task_id) in TERMINAL
            return Available(elements.count(tx, seen.run, output.task_id), has_ended)
        if output.task_id in mapped:  # it may have no instance
            some = seen.count_of_map(tx, output.task_id, [TaskState.SUCCESS], limit=INSTANCES_MAX + 1)
            if not some and (reason := values.why_without_instances(tx, seen.run, output.task_id)) is not None:
                raise Unexpandable(reason)
            return Available(some, is_complete=True)
        value = values.xcom_of(tx, seen.run, output.task_id, output.key)
        items = None if value is None else count_items(value)
        if items is None:
            found = "nothing" if value is None else f"{value[:60].decode(errors='replace')}, which is no list or dict,"
            raise Unexpandable(
                f"{name} is expanded over what {output.task_id!r} has left under {output.key!r}, and it has left "
                f"{found} there"
            )
        return Available(items, is_complete=True)

    there = maps.available(spec.source, count)
    if there.length > INSTANCES_MAX:
        over = f"{there.length:,} values; the limit is {INSTANCES_MAX:,}"
        raise Unexpandable(f"{name} is expanded over {over}")
    for one in owns:
        if there.is_complete or one.length is not None:
            _SET_LENGTH.run(tx.connection, of_id=one.id, length=there.length if there.is_complete else None)
    return there


def _of_worklist(tx: Tx, seen: RunStates, source: Worklist, tasks: Sequence[str], made: int) -> Available:
    """Return how many values a worklist has: there will be no more if nobody is left who could append one."""
    # In this order: what an instance appends is stored together with its end.
    has_ended = not any(seen.count_of_map(tx, name, BEGUN, limit=1) for name in tasks)
    length = source.given + elements.count(tx, seen.run, source.task_id)
    unbegun = min(
        (one.map_index for name in tasks for one in seen.of_map(tx, name, TaskState.NONE, limit=1)), default=length
    )
    return Available(length, has_ended and made >= length <= unbegun)


def _end_early(tx: Tx, seen: RunStates, row: LockedTask, task_id: str, event: str, reason: str, *, limit: int) -> None:
    """End a task that makes no more instances; those that were cleared, and have not begun again, fail before it does.

    They are not skipped: who clears what has failed means them as well.
    """
    left = seen.of_map(tx, task_id, TaskState.NONE, limit=limit)
    end_all(tx, "upstream_failed", left)
    if not left:
        task_rows.apply(tx, row, event, last_error=reason)


def end_all(tx: Tx, event: str, instances: Iterable[Instance]) -> None:
    """End instances that have not begun, but for those that another transaction has locked: it may wait for the run."""
    (row,) = states.of(event)
    for some in chunks(sorted(one.id for one in instances)):
        statement = select(_C.id).where(_C.id.in_(some), is_unbegun(*row.from_)).order_by(_C.id)
        locked = tx.connection.execute(task_rows.skip_locked(statement)).scalars().all()
        task_rows.change_all(tx, row, locked)


def stopped(tx: Tx, seen: RunStates, tasks: Sequence[TaskSpec], made: int) -> str | None:
    """Return why no more instances of a task, or of a mapped group, are made: too many have failed. Else None."""
    spec = tasks[0].map
    assert spec is not None
    failures_max = 1 if spec.fail_fast else spec.failures_max
    if failures_max is None:
        return None
    failed = sum(seen.count_of_map(tx, task.task_id, [TaskState.FAILED], limit=failures_max) for task in tasks)
    if failed < failures_max:
        return None
    name = "fail_fast" if spec.fail_fast else f"failures_max={failures_max}"
    return f"no instance is made after the first {made:,}, because of {name}"


# --- the statements ------------------------------------------------------------------------------

_OF_ID = _C.id == bindparam("of_id")
_SET_MADE = Prepared(update(task_instance).where(_OF_ID).values(map_made=bindparam("made")))
_SET_GIVEN = Prepared(update(task_instance).where(_OF_ID).values(given_digest=bindparam("digest")))
_SET_LENGTH = Prepared(update(task_instance).where(_OF_ID).values(map_length=bindparam("length")))
