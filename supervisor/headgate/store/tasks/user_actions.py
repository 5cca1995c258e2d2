"""Actions of users on tasks: clear them, mark them, cancel a run.

They end the worker or the trigger of a task, whose later answers change nothing.

Actions on many tasks at once skip the tasks whose rows another transaction has locked: waiting for a row while holding
others could deadlock. The caller repeats the action for the tasks that are reported as busy.

The instances of a mapped task may be too many for one transaction. Then they are taken `ROWS_MAX` at a time, the caller
repeats the action for the rest, and meanwhile the task is *held*: its own row is in ``none``, with the length `HELD`.
So no instance of it begins, nothing that is downstream goes on from a part of it, and the run does not end. Only the
last transaction takes the rows of tasks themselves, and lets the held ones go on. If the caller dies before, the tasks
stay held, `headgate why` says so, and the same action, repeated, ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Final, Literal, NamedTuple

import msgspec
from sqlalchemy import null, select, update

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import INSTANCES_MAX
from headgate.scheduling import states
from headgate.scheduling.planning import related
from headgate.scheduling.states import FAILED, TERMINAL, UNFINISHED, IllegalTransition
from headgate.store.access import acts
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, acting
from headgate.store.errors import NoSuchRow, ValueRefused
from headgate.store.ids import DagRunId, Instances, TaskInstanceId, instance_name, instances_named
from headgate.store.tables import dag_run, task_instance
from headgate.store.tasks import dags, elements, graphs, run_states, task_rows, task_streams, values
from headgate.store.tasks.run_states import HELD, Instance, RunStates
from headgate.store.tasks.task_rows import LockedTask

ROWS_MAX: Final = 500  # instances in one transaction: some tens of milliseconds, in which nobody else writes on SQLite
Mark = Literal["success", "failed"]
StreamClear = Literal["from_start", "go_on"]
_C = task_instance.c
_ENDED_WELL = frozenset({TaskState.SUCCESS, TaskState.SKIPPED})
_REMOVED = frozenset({TaskState.REMOVED})
_MARKED: Final[dict[Mark, str | None]] = {"success": None, "failed": "a user marked it as failed"}
_WITH_OTHERS = frozenset({TaskState.RUNNING, TaskState.RESTARTING, TaskState.DEFERRED})


class ToClear(msgspec.Struct, frozen=True):
    """What is left of a clear: rows of tasks themselves, by task id, and ``instances``. ``held`` are held for it.

    Those of ``worklists`` may append when they run again, so these tasks are expanded again, over what there is. Of
    ``loops``, by the task of their gate, no more than so many iterations are known to follow the first one.
    """

    run: DagRunId
    tasks: tuple[str, ...]
    instances: tuple[Instances, ...]
    only_failed: bool = False
    streams: StreamClear | None = None
    held: tuple[str, ...] = ()
    worklists: tuple[str, ...] = ()
    loops: tuple[tuple[str, int], ...] = ()


class Cleared(msgspec.Struct, frozen=True):
    """Result of one transaction of a clear: the new states of cleared tasks by task id, and how many ``instances``.

    ``as_before`` are tasks and instances that are being cleared already. If there is something ``left``, call
    `clear_on`; ``is_busy``: others have changed the rows that come next, so wait a moment before.
    """

    cleared: dict[str, TaskState]
    as_before: tuple[str, ...] = ()
    instances: dict[str, int] = {}
    left: ToClear | None = None
    is_busy: bool = False


class Ended(msgspec.Struct, frozen=True):
    """Result of one transaction that ends tasks: how many it ended, and whether that was all. If not, do it again.

    ``is_busy``: others have changed the rows that come next, so wait a moment before.
    """

    tasks: int
    is_ended: bool
    is_busy: bool = False


class UserActionVerbs(Verbs):
    """The verbs by which users act on tasks."""

    @acting
    def mark(self, tx: Tx, instance: TaskInstanceId, mark: Mark) -> bool:
        """End a task as a user says, without a retry; return whether that changed anything. Raises `NoSuchRow`.

        A task that has failed may count as succeeded after all, and then tasks below it that did not begin because of
        it wait again; but not a mapped one, an instance, or a task of a group: these are only cleared.

        Raises `ValueRefused` for a mapped task that has unfinished instances: `mark_map` ends these as well; and if
        others are changing tasks below one that has failed.
        """
        tx.notify()
        task = task_rows.locked(tx, instance)
        if task is None:
            raise NoSuchRow("task", str(instance))
        seen = run_states.read(tx, task.dag_run_id)
        for name, some in seen.mapped.items():
            if seen.ids.get(name) == instance and not UNFINISHED.isdisjoint(some):
                raise ValueRefused(f"the task {name} has instances that have not ended: mark it with all of them")
        is_marked = mark_one(tx, task, mark, _MARKED[mark]) or (mark == "success" and _overrule(tx, seen, task))
        acts.marked(tx, instance, mark, task.state, is_marked=is_marked)
        return is_marked

    @acting
    def mark_map(self, tx: Tx, run: DagRunId, instances: Instances, mark: Mark) -> Ended:
        """End unfinished instances of a mapped task as a user says, without a retry; if all are named, the task, too.

        A task that has not made all of its instances makes none after it.
        """
        tx.notify()
        seen = run_states.read(tx, run)
        if instances.task_id not in seen.ids:
            raise NoSuchRow("task", instances.task_id)
        is_whole = instances == every_instance(instances.task_id)
        ended = _end_instances(tx, seen, [instances], mark, _MARKED[mark], hold=is_whole)
        acts.marked_instances(tx, run, instances, mark, ended.tasks)
        if not is_whole or not ended.is_ended:
            return ended
        own = task_rows.locked_unless_busy(tx, seen.ids[instances.task_id])
        if own is None:
            return Ended(ended.tasks, is_ended=False, is_busy=True)
        is_marked = own.state in UNFINISHED and mark_one(tx, own, mark, _MARKED[mark])
        _release(tx, run, [instances.task_id])
        return Ended(ended.tasks + is_marked, is_ended=True)

    @acting
    def clear_many(
        self,
        tx: Tx,
        run: DagRunId,
        names: Sequence[str] = (),
        *,
        upstream: bool = False,
        downstream: bool = False,
        only_failed: bool = False,
        streams: StreamClear | None = None,
        is_tried_only: bool = False,
    ) -> Cleared:
        """Clear tasks of a run, and those up- or downstream of them in its DAG; without names all tasks.

        A mapped task is cleared with its instances; ``enrich[17]`` and ``enrich[10-19]`` name these alone. A cleared
        task begins again with all its tries; one that runs is ``restarting`` until its worker is gone. A run that has
        ended is running again. ``only_failed``: of all these only tasks in ``failed`` and ``upstream_failed``, and
        mapped ones that stopped early because instances failed. ``streams``: whether tasks begin their streams from the
        start, or go on behind the last event handled; if it is not given, those that have ended well begin from the
        start. ``is_tried_only``: raise `acts.Tried` with what it would return, and do nothing. Raises `NoSuchRow`.
        """
        seen = run_states.read(tx, run)
        chosen = _chosen(tx, seen, names, upstream=upstream, downstream=downstream)
        loops = () if only_failed else tuple(sorted(chosen.loops.items()))
        todo = ToClear(run, chosen.tasks, chosen.instances, only_failed, streams, (), chosen.worklists, loops)
        done = _clear_some(tx, seen, todo)
        return acts.cleared(tx, run, todo.tasks, done, is_tried_only=is_tried_only)

    @acting
    def clear_on(self, tx: Tx, left: ToClear) -> Cleared:
        """Go on with a clear that was too much for one transaction, or met rows that others were changing."""
        return acts.cleared(tx, left.run, left.tasks, _clear_some(tx, run_states.read(tx, left.run), left))

    @acting
    def cancel_run(self, tx: Tx, run: DagRunId) -> Ended:
        """End unfinished tasks of a run as failed, and with the last of them the run. Cancel again if it goes on.

        Triggers of deferred tasks are cancelled, with their on_kill(); workers are ended by their supervisors, which
        find that the tasks are no longer theirs.
        """
        tx.notify()
        reason = "a user cancelled its run"
        seen = run_states.read(tx, run)
        ended = _end_instances(tx, seen, list(map(every_instance, seen.mapped)), "failed", reason, hold=True)
        tasks = ended.tasks
        if ended.is_ended:
            for instance in sorted(seen.ids.values()):
                task = task_rows.locked_unless_busy(tx, instance)
                if task is not None and task.state in UNFINISHED:
                    tasks += mark_one(tx, task, "failed", reason)
            _release(tx, run, seen.mapped)
        acts.cancelled(tx, run, tasks)
        _mark_runs(tx, run)
        is_ended = ended.is_ended and (dags.has_ended(tx, run) or dags.end_run(tx, run, "failed") == "ended")
        return Ended(tasks, is_ended, is_busy=ended.is_busy or (ended.is_ended and not is_ended))


def every_instance(task_id: str) -> Instances:
    """Return all instances of a mapped task, also those that are still to be made."""
    return Instances(task_id, 0, INSTANCES_MAX)


# --- one task ------------------------------------------------------------------------------------


def clear_one(tx: Tx, task: LockedTask, streams: StreamClear | None) -> TaskState | None:
    """Clear a locked task; return its new state, None if it is being cleared already."""
    try:
        state = task_rows.apply(tx, task, "cleared")
    except IllegalTransition:
        return None
    _end_trigger(tx, task)
    if streams == "from_start" or (streams is None and task.state in _ENDED_WELL):
        task_streams.forget(tx, task.id)
    values.delete_xcoms(tx, task.id)
    elements.forget(tx, task)
    return state


def mark_one(tx: Tx, task: LockedTask, mark: Mark | Literal["skipped"], error: str | None) -> bool:
    """End a locked task that is unfinished in this state; return whether it was."""
    try:
        task_rows.apply(tx, task, f"marked_{mark}", last_error=error)
    except IllegalTransition:
        return False
    _end_trigger(tx, task)
    return True


def _overrule(tx: Tx, seen: RunStates, task: LockedTask) -> bool:
    """Have a failed task count as succeeded, and what could not begin because of it wait again; see `mark`."""
    specs = graphs.specs_of_run(tx, seen.run)
    (name,) = [name for name, instance in seen.ids.items() if instance == task.id] or [""]
    if task.state not in FAILED or name not in specs or specs[name].map is not None or specs[name].group:
        return False
    # In the place of the error, as of a task that was stopped: nothing else says why it has succeeded.
    task_rows.apply(tx, task, "overruled", last_error="a user marked it as succeeded after it had failed")
    below = related({each: spec.upstream for each, spec in specs.items()}, {name}, upstream=False, downstream=True)
    waiting = [each for each in below if seen.own.get(each) is TaskState.UPSTREAM_FAILED and each != name]
    waiting.sort(key=seen.ids.__getitem__)
    instances = tuple(every_instance(each) for each in waiting if each in seen.mapped)
    if _clear_some(tx, seen, ToClear(seen.run, tuple(waiting), instances, only_failed=True)).left is not None:
        raise ValueRefused(f"others are changing tasks below {name} at this moment: mark it again")
    dags.reopen(tx, seen.run)
    return True


def _end_trigger(tx: Tx, task: LockedTask) -> None:
    task_streams.close(tx, task.id, by_user=True)
    if task.trigger_id is not None:
        task_rows.remove_trigger(tx, task.trigger_id)


# --- many tasks of a run -------------------------------------------------------------------------


class _Chosen(NamedTuple):
    """What names stand for: tasks with all of their instances, and besides instances of others, which stay."""

    tasks: tuple[str, ...]
    instances: tuple[Instances, ...]
    worklists: tuple[str, ...]
    loops: dict[str, int]


def _chosen(tx: Tx, seen: RunStates, names: Sequence[str], *, upstream: bool, downstream: bool) -> _Chosen:
    specs = graphs.specs_of_run(tx, seen.run)
    whole, parts = set[str](), list[Instances]()
    for name in names:
        part = None if name in seen.own else instances_named(name)
        if part is not None:
            parts.append(part)
        else:
            whole.add(name if name in seen.own else name.removesuffix("[]"))
        if (whole if part is None else {part.task_id}) - seen.own.keys():
            raise NoSuchRow("task", name)
    edges = {task_id: task.upstream for task_id, task in specs.items()}
    roots = whole if names else seen.own.keys()
    chosen = related(edges, roots, upstream=upstream, downstream=downstream)
    some: list[Instances] = []
    loops: dict[str, int] = {}
    for part in parts:
        beside = graphs.beside(specs, part.task_id)
        inside = {name: [above for above in edges.get(name, ()) if above in beside] for name in beside}
        near = related(inside, {part.task_id}, upstream=upstream, downstream=downstream)
        some += [part._replace(task_id=name) for name in sorted(near)]
        chosen |= related(edges, {part.task_id}, upstream=upstream, downstream=downstream) - beside
        gate = graphs.gate(specs, part.task_id)
        if downstream and gate in near:  # what comes after an iteration has begun with its result
            some += [Instances(name, part.first + 1, INSTANCES_MAX) for name in sorted(beside)]
            loops[gate] = min(part.first, loops.get(gate, part.first))
    tasks = sorted(chosen & seen.own.keys(), key=seen.ids.__getitem__)
    every = [every_instance(name) for name in tasks if name in seen.mapped]
    instances = (*(part for part in some if part.task_id not in chosen), *every)
    return _Chosen(tuple(tasks), instances, graphs.worklists(specs, {part.task_id for part in instances}), loops)


def _clear_some(tx: Tx, seen: RunStates, todo: ToClear) -> Cleared:
    """Clear as much as may be in one transaction; see the docstring of this module."""
    tx.notify()
    wanted = FAILED if todo.only_failed else frozenset(TaskState)
    left, removed = list(todo.instances), [every_instance(name) for name in todo.worklists]
    if todo.held or _is_too_much(tx, seen, left, wanted) or _is_too_much(tx, seen, removed, _REMOVED):
        names = {*todo.held, *(part.task_id for part in left), *(set(todo.worklists) & seen.ids.keys())}
        if not all([_hold(tx, seen.ids[name]) for name in sorted(names, key=seen.ids.__getitem__)]):
            return Cleared({}, left=todo, is_busy=True)
        dags.reopen(tx, todo.run)
        todo = msgspec.structs.replace(todo, held=tuple(sorted(names)))
    cleared: dict[str, TaskState] = {}
    instances: dict[str, int] = {}
    as_before: list[str] = []
    room, is_busy = ROWS_MAX, False
    while left and room and not is_busy:
        part = left.pop(0)
        rows = _instances(tx, seen, part, wanted, limit=room)
        locked = _unless_busy(tx, rows)
        done = rows[: len(locked)]
        as_before += [instance_name(part.task_id, rows[at].map_index) for at in _clear_each(tx, locked, todo.streams)]
        instances[part.task_id] = instances.get(part.task_id, 0) + len(done)
        is_busy = len(done) < len(rows)
        if is_busy or len(rows) == room:
            left.insert(0, part._replace(first=done[-1].map_index + 1) if done else part)
        room -= len(done)
    tasks: tuple[str, ...] = todo.tasks
    if not left:
        tasks = _clear_tasks(tx, seen, todo, cleared, as_before)
        is_busy = bool(tasks)
    has_cleared = bool(todo.held) or any(instances.values()) or not todo.instances
    if not left and not tasks and has_cleared:
        is_busy = not _expand_again(tx, seen, todo)
    if cleared or any(instances.values()):
        dags.reopen(tx, todo.run)
    instances = {name: count for name, count in instances.items() if count}
    if left or tasks or is_busy:
        rest = msgspec.structs.replace(todo, tasks=tasks, instances=tuple(left))
        return Cleared(cleared, tuple(as_before), instances, rest, is_busy)
    if todo.held:
        _release(tx, todo.run, todo.held)
        dags.reopen(tx, todo.run)
    return Cleared(cleared, tuple(as_before), instances)


def _expand_again(tx: Tx, seen: RunStates, todo: ToClear) -> bool:
    """Have tasks be expanded again to which cleared instances may append; return False if that was not all."""
    names = sorted(set(todo.worklists) & seen.ids.keys(), key=seen.ids.__getitem__)
    for name in names:
        own = task_rows.locked_unless_busy(tx, seen.ids[name])
        if own is None:
            return False
        if own.state in TERMINAL:
            task_rows.apply(tx, own, "cleared")
    for name, length in todo.loops:
        if name in seen.ids:
            elements.shorten(tx, seen.ids[name], length)
    return all([_restore(tx, seen, name) for name in names])


def _restore(tx: Tx, seen: RunStates, name: str) -> bool:
    """Have removed instances wait again: values may be appended for them. Return False if that was not all."""
    rows = _instances(tx, seen, every_instance(name), _REMOVED, limit=ROWS_MAX)
    locked = _unless_busy(tx, rows)
    _clear_each(tx, locked, None)
    return len(locked) == len(rows) < ROWS_MAX


def _clear_tasks(
    tx: Tx, seen: RunStates, todo: ToClear, cleared: dict[str, TaskState], as_before: list[str]
) -> tuple[str, ...]:
    """Clear the rows of tasks themselves; return the ids of those that are busy."""
    busy: list[str] = []
    for name in todo.tasks:
        task = task_rows.locked_unless_busy(tx, seen.ids[name])
        if task is None:
            busy.append(name)
        elif not todo.only_failed or task.state in FAILED or _has_stopped(tx, seen, name, task):
            state = clear_one(tx, task, todo.streams)
            if state is None:
                as_before.append(name)
            else:
                cleared[name] = state
    return tuple(busy)


def _has_stopped(tx: Tx, seen: RunStates, name: str, own: LockedTask) -> bool:
    """Whether a mapped task has made no more instances because some had failed: then it has succeeded with a reason."""
    if own.state is not TaskState.SUCCESS or name not in seen.mapped:
        return False
    return tx.connection.execute(select(_C.last_error).where(_C.id == own.id)).scalar_one() is not None


def _clear_each(tx: Tx, tasks: Sequence[LockedTask], streams: StreamClear | None) -> list[int]:
    """Clear locked tasks, most of them by few statements; return the places of those that are being cleared already."""
    apart = _apart(tx, tasks, _WITH_OTHERS)
    simple = [task.id for task in tasks if task.id not in apart]
    (row,) = (row for row in states.of("cleared") if TaskState.NONE in row.from_)
    task_rows.change_all(tx, row, simple)
    values.delete_xcoms_of(tx, simple)
    others = [(at, task) for at, task in enumerate(tasks) if task.id in apart]
    run_states.take_values_of_now(tx, [task.id for task in tasks])
    return [at for at, task in others if clear_one(tx, task, streams) is None]


def _mark_each(tx: Tx, tasks: Sequence[LockedTask], mark: Mark, error: str | None) -> None:
    """Mark locked tasks that are unfinished, most of them by few statements."""
    apart = _apart(tx, tasks, frozenset({TaskState.DEFERRED}))
    (row,) = (row for row in states.of(f"marked_{mark}") if TaskState.NONE in row.from_)
    task_rows.change_all(tx, row, [task.id for task in tasks if task.id not in apart], last_error=error)
    for task in tasks:
        if task.id in apart:
            mark_one(tx, task, mark, error)


def _apart(tx: Tx, tasks: Sequence[LockedTask], some: Collection[TaskState]) -> Collection[TaskInstanceId]:
    """Return the tasks of which more than the row changes: those in some states, with a stream, or with elements."""
    ids = [task.id for task in tasks]
    return {task.id for task in tasks if task.state in some} | task_streams.among(tx, ids) | elements.among(tx, ids)


def _end_instances(
    tx: Tx, seen: RunStates, of: Iterable[Instances], mark: Mark, reason: str | None, *, hold: bool
) -> Ended:
    """End unfinished instances, as many as may be in one transaction; ``hold``: no more are made until then."""
    parts = sorted(of)
    if hold and _is_too_much(tx, seen, parts, UNFINISHED):
        growing = [part.task_id for part in parts if seen.own.get(part.task_id) is TaskState.NONE]
        if not all([_hold(tx, seen.ids[name]) for name in growing]):
            return Ended(0, is_ended=False, is_busy=True)
    ended, is_busy = 0, False
    for part in parts:
        rows = _instances(tx, seen, part, UNFINISHED, limit=ROWS_MAX - ended)
        unfinished = [task for task in _unless_busy(tx, rows) if task.state in UNFINISHED]
        _mark_each(tx, unfinished, mark, reason)
        ended += len(unfinished)
        is_busy = len(unfinished) < len(rows)
        if is_busy or ended >= ROWS_MAX:
            break
    if ended:
        tx.mark_run_dirty(seen.run)
    return Ended(ended, is_ended=not is_busy and ended < ROWS_MAX, is_busy=is_busy)


# --- instances -----------------------------------------------------------------------------------


def _instances(
    tx: Tx, seen: RunStates, part: Instances, wanted: Collection[TaskState], *, limit: int
) -> list[Instance]:
    """Return the first instances that are in a wanted state, in the order of their indexes."""
    if seen.mapped.get(part.task_id, frozenset()).isdisjoint(wanted):
        return []
    return run_states.instances_between(tx, seen.run, part, wanted, limit=limit)


def _is_too_much(tx: Tx, seen: RunStates, parts: Iterable[Instances], wanted: Collection[TaskState]) -> bool:
    room = ROWS_MAX + 1
    for part in parts:
        room -= len(_instances(tx, seen, part, wanted, limit=room)) if room else 0
    return not room


def _unless_busy(tx: Tx, rows: Sequence[Instance]) -> list[LockedTask]:
    """Lock instances, and return them up to the first one that another transaction has locked."""
    locked = task_rows.locked_of(tx, [row.id for row in rows])
    return [locked[row.id] for row in takewhile(lambda row: row.id in locked, rows)]


def _hold(tx: Tx, instance: TaskInstanceId) -> bool:
    """Hold a mapped task until `_release`; return False if its row is busy."""
    own = task_rows.locked_unless_busy(tx, instance)
    if own is not None and own.state is not TaskState.NONE:
        task_rows.apply(tx, own, "cleared")
    if own is not None:
        tx.connection.execute(update(task_instance).where(_C.id == own.id).values(map_length=HELD))
    return own is not None


def _release(tx: Tx, run: DagRunId, names: Iterable[str]) -> None:
    held = (task_rows.unmapped_of(run), _C.task_id.in_(list(names)), _C.map_length == HELD)
    tx.connection.execute(update(task_instance).where(*held).values(map_length=null()))


# --- runs ----------------------------------------------------------------------------------------


def _mark_runs(tx: Tx, run: DagRunId) -> None:
    """Have the scheduler evaluate a run and those that wait for its end; their rows are locked from here on.

    Every transaction touches runs last, and in the order of their ids (`Tx.flush`).
    """
    of_dag = select(dag_run.c.dag_id).where(dag_run.c.id == run).scalar_subquery()
    waits = dag_run.c.ended_at.is_(None), dag_run.c.started_at.is_(None)
    for waiting in tx.connection.execute(select(dag_run.c.id).where(dag_run.c.dag_id == of_dag, *waits)).scalars():
        tx.mark_run_dirty(waiting)
    tx.mark_run_dirty(run)
    tx.flush()
