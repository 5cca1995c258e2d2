"""Elements: the values that a task leaves one by one, while it runs, for those that are expanded over it.

They are stored in the order in which they are emitted, at positions without a gap, by the step that has the task: with
its outcome, or before it if it asks for that. An element is never changed. A try that begins anew emits the same again:
those that are stored already are compared, and the first that differs fails the try, because something may have been
expanded over the old one. Elements with keys are not compared: of each key there is one, the first that came. A task
that goes on in its stream goes on behind its last element as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from sqlalchemy import Integer, and_, bindparam, delete, exists, or_, select, update

from headgate.protocol import marks
from headgate.protocol.messages import maps
from headgate.protocol.messages.dags import XCOM_BYTES_MAX, TaskSpec, TaskState
from headgate.protocol.messages.maps import INSTANCES_MAX
from headgate.protocol.messages.steps import Appended, Emitted
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import Kind, find, insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.errors import ValueRefused
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.tables import dag, dag_run, element, emitter, task_instance, task_stream
from headgate.store.tasks import task_rows
from headgate.store.tasks.graphs import read_spec
from headgate.store.tasks.run_states import is_unbegun
from headgate.store.tasks.task_rows import LockedTask

_C = task_instance.c
_BEGUN = sorted({TaskState.SUCCESS, TaskState.RUNNING, TaskState.DEFERRED, TaskState.UP_FOR_RETRY})


# --- what a step has emitted ---------------------------------------------------------------------

_NEW_ELEMENT = Kind(element, ("task_instance_id", "position", "value", "key_hash"))
_KEY = Kind(element, ("task_instance_id", "key_hash"))
KeyedValue: TypeAlias = tuple[bytes, bytes | None]
_OF_INSTANCE = emitter.c.task_instance_id == bindparam("of_instance")


def store(tx: Tx, task: LockedTask, emitted: Emitted, *, is_end: bool = False) -> int:
    """Store what a step of a locked task has emitted; return how many elements the task has now.

    ``is_end``: the task has succeeded, or was skipped, so all that earlier tries have emitted must have come again.
    Raises `ValueRefused` for an element that differs from the one stored at its position, is missing, or is too long.
    """
    length, place = _of(tx, task.id)
    if not (emitted.keys or 0 <= emitted.first <= place or _says_no_place(tx, task.id, length, emitted)):
        raise ValueRefused(f"its worker has emitted elements from {emitted.first:,} on, and the next one is {place:,}")
    if length and emitted.values and _has_keys(tx, task.id) != bool(emitted.keys):
        raise ValueRefused("it emits elements with keys and without: give a key to all of a task, or to none")
    new: list[KeyedValue]
    if emitted.keys:
        new = _new_by_key(tx, task.id, emitted.values, emitted.keys)
    else:
        known = emitted.values[: max(length - emitted.first, 0)]
        _compare(tx, task.id, emitted.first, known)
        new = [(value, None) for value in emitted.values[len(known) :]]
    if length + len(new) > INSTANCES_MAX:
        raise ValueRefused(f"it emits more than {INSTANCES_MAX:,} elements")
    for position, (value, _) in enumerate(new, start=length):
        if len(value) > XCOM_BYTES_MAX:
            raise ValueRefused(f"element {position} needs {len(value):,} bytes; the limit is {XCOM_BYTES_MAX:,}")
    if is_end and emitted.first + len(emitted.values) < length and not _has_keys(tx, task.id):
        raise ValueRefused(
            f"it has emitted {emitted.first + len(emitted.values):,} elements, and an earlier try {length:,}: "
            f"a task that is tried again must emit the same ones"
        )
    rows = [(task.id, position, *keyed) for position, keyed in enumerate(new, start=length)]
    if rows:
        insert_new(tx.connection, _NEW_ELEMENT, rows, returning=("position",))
        tx.mark_run_dirty(task.dag_run_id)
    length += len(new)
    # Keys say which elements are there, and not how many the try has emitted.
    place = length if emitted.keys else min(length, max(place, emitted.first + len(emitted.values)))
    now = {"length": length, "place": place}
    _SET.run(tx.connection, of_instance=task.id, **now)
    marks.reach("elements.written")
    return now["length"]


def store_next(tx: Tx, task: LockedTask, values: tuple[bytes, ...], *, is_end: bool = False) -> int:
    """Store elements behind those that the present try of a locked task has emitted; as `store` otherwise."""
    return store(tx, task, Emitted(_of(tx, task.id)[1], values), is_end=is_end)


def _of(tx: Tx, instance: TaskInstanceId) -> tuple[int, int]:
    row = _GET.run(tx.connection, of_instance=instance).fetchone()
    if row is None:
        insert_new(tx.connection, _NEW_EMITTER, [(instance,)], returning=("task_instance_id",))
        return 0, 0
    return int(row[0]), int(row[1])


def _compare(tx: Tx, instance: TaskInstanceId, first: int, known: tuple[bytes, ...]) -> None:
    rows = _PAGE.run(tx.connection, of_instance=instance, after=first - 1, limit=len(known)).fetchall()
    for (position, before), value in zip(rows, known, strict=True):
        if bytes(before) != value:
            raise ValueRefused(
                f"element {position} was {_shown(bytes(before))} in an earlier try and is {_shown(value)} now: "
                f"a task that is tried again must emit the same ones"
            )


def _says_no_place(tx: Tx, instance: TaskInstanceId, length: int, emitted: Emitted) -> bool:
    """Whether there is nothing more of a task with keys: its worker counts those as well that were there already."""
    return length > 0 and not emitted.values and _has_keys(tx, instance)


def _has_keys(tx: Tx, instance: TaskInstanceId) -> bool:
    return _FIRST_KEY.run(tx.connection, of_instance=instance).fetchone()[0] is not None


def _new_by_key(
    tx: Tx, instance: TaskInstanceId, some: Sequence[bytes], keys: Sequence[bytes | None]
) -> list[KeyedValue]:
    """Return those of some values whose keys are not there yet, each key once, and those without a key.

    Raises `ValueRefused` if there are not as many keys as values.
    """
    if len(some) != len(keys):
        raise ValueRefused(f"its worker has sent {len(some):,} values and {len(keys):,} keys")
    wanted = {(instance, key) for key in keys if key is not None}
    there: set[bytes | None] = {
        bytes(key) for (key,) in find(tx.connection, _KEY, sorted(wanted), returning=("key_hash",))
    }
    new: list[KeyedValue] = []
    for value, key in zip(some, keys, strict=True):
        if key is None or key not in there:
            new.append((value, key))
            there.add(key)
    return new


def _shown(value: bytes) -> str:
    return value[:60].decode(errors="replace")


# --- what instances append -----------------------------------------------------------------------


def own_beside(tx: Tx, instance: TaskInstanceId, task_id: str) -> TaskInstanceId | None:
    """Return the own row of a task in the run of an instance; None if the run has no such task any more."""
    row = _OWN_BESIDE.run(tx.connection, of_instance=instance, of_task=task_id).fetchone()
    return None if row is None else TaskInstanceId(row[0])


def append(tx: Tx, instance: TaskInstanceId, appended: Appended) -> None:
    """Store what a step appends to what a task is expanded over, of which this is the own row, and is locked.

    That gives the values one order. Those that are there already by key are not stored. Raises `ValueRefused` if there
    are too many.
    """
    own = task_rows.locked(tx, instance)
    if own is None or own.state is not TaskState.NONE:
        return  # a user has ended it
    length, _ = _of(tx, own.id)
    new = _new_by_key(tx, own.id, appended.values, appended.keys)
    longest = max((len(value) for value, _ in new), default=0)
    if longest > XCOM_BYTES_MAX:
        raise ValueRefused(f"it appends {longest:,} bytes; the limit is {XCOM_BYTES_MAX:,}")
    if length + len(new) > appended.length_max:
        raise ValueRefused(
            f"it appends {len(new):,} values to the {length:,} that are appended to {appended.task_id!r}; the limit is "
            f"{appended.length_max:,}"
        )
    if not new:
        return
    rows = [(own.id, position, *keyed) for position, keyed in enumerate(new, start=length)]
    insert_new(tx.connection, _NEW_ELEMENT, rows, returning=("position",))
    _SET.run(tx.connection, of_instance=own.id, length=length + len(new), place=length + len(new))
    tx.mark_run_dirty(own.dag_run_id)
    marks.reach("elements.appended")


def shorten(tx: Tx, own: TaskInstanceId, length: int) -> None:
    """Drop what was appended to a task behind the first ``length`` values."""
    _SHORTEN_ELEMENTS.run(tx.connection, of_instance=own, length=length)
    _SHORTEN.run(tx.connection, of_instance=own, length=length)


_beside = task_instance.alias("beside")
_OWN_BESIDE = Prepared(
    select(_C.id)
    .join(_beside, _beside.c.dag_run_id == _C.dag_run_id)
    .where(_beside.c.id == bindparam("of_instance"), _C.map_index == -1, _C.task_id == bindparam("of_task"))
)
_SHORTEN_ELEMENTS = Prepared(
    delete(element).where(
        element.c.task_instance_id == bindparam("of_instance"), element.c.position >= bindparam("length")
    )
)
_SHORTEN = Prepared(
    update(emitter)
    .where(_OF_INSTANCE, emitter.c.length > bindparam("length"))
    .values(length=bindparam("length"), place=bindparam("length"))
)


_NEW_EMITTER = Kind(emitter, ("task_instance_id",))
_GET = Prepared(select(emitter.c.length, emitter.c.place).where(_OF_INSTANCE))
_SET = Prepared(update(emitter).where(_OF_INSTANCE).values(length=bindparam("length"), place=bindparam("place")))
_PAGE = Prepared(
    select(element.c.position, element.c.value)
    .where(element.c.task_instance_id == bindparam("of_instance"), element.c.position > bindparam("after"))
    .order_by(element.c.position)
    .limit(bindparam("limit", type_=Integer()))
)
_FIRST_KEY = Prepared(
    select(element.c.key_hash).where(element.c.task_instance_id == bindparam("of_instance"), element.c.position == 0)
)
_EMITTER_OF = Prepared(
    select(_C.id, emitter.c.length)
    .select_from(task_instance.join(emitter))
    .where(task_rows.unmapped_of(bindparam("of_run")), _C.task_id == bindparam("of_task"))
)


def emitter_of(tx: Tx, run: DagRunId, task_id: str) -> tuple[TaskInstanceId, int] | None:
    """Return a task of a run, and how many elements it has emitted; None if it has not begun to."""
    row = _EMITTER_OF.run(tx.connection, of_run=run, of_task=task_id).fetchone()
    return None if row is None else (row[0], int(row[1]))


def count(tx: Tx, run: DagRunId, task_id: str) -> int:
    """Return how many elements a task of a run has emitted."""
    found = emitter_of(tx, run, task_id)
    return 0 if found is None else found[1]


def length_of(tx: Tx, instance: TaskInstanceId) -> int | None:
    """Return how many elements a task has emitted; None if it has not begun to."""
    row = _GET.run(tx.connection, of_instance=instance).fetchone()
    return None if row is None else int(row[0])


def read_page(tx: Tx, instance: TaskInstanceId, *, after: int, limit: int) -> list[tuple[int, bytes]]:
    """Return the elements of a task behind a position, with their positions."""
    found = _PAGE.run(tx.connection, of_instance=instance, after=after, limit=limit).fetchall()
    return [(position, bytes(value)) for position, value in found]


def among(tx: Tx, instances: Iterable[TaskInstanceId]) -> frozenset[TaskInstanceId]:
    """Return those of these tasks that have emitted elements."""
    rows = [(instance,) for instance in instances]
    return frozenset(row[0] for row in find(tx.connection, _NEW_EMITTER, rows, returning=("task_instance_id",)))


# --- a new try -----------------------------------------------------------------------------------

# A task that has handled events of its stream does not handle these again, nor emit what it has emitted for them.
_GOES_ON = exists(ONE).where(task_stream.c.task_instance_id == bindparam("of_instance"), task_stream.c.handled > 0)
_AGAIN = Prepared(update(emitter).where(_OF_INSTANCE, ~_GOES_ON).values(place=0))
_FORGET_ELEMENTS = Prepared(delete(element).where(element.c.task_instance_id == bindparam("of_instance"), ~_GOES_ON))
_FORGET = Prepared(delete(emitter).where(_OF_INSTANCE, ~_GOES_ON))


def emit_again(tx: Tx, instance: TaskInstanceId) -> None:
    """Have the next try of a task emit its elements from the first one on, unless it goes on in its stream."""
    _AGAIN.run(tx.connection, of_instance=instance)


def forget(tx: Tx, task: LockedTask) -> None:
    """Drop the elements of a task that a user has cleared, unless it goes on in its stream.

    If a result stands for one of them, they stay, and the task has to emit them again, as in a retry. So do values that
    were appended to a mapped task, as long as one of its instances is not cleared with it.
    """
    if not among(tx, [task.id]):
        return
    if _has_results_over(tx, task):
        emit_again(tx, task.id)
        return
    _FORGET_ELEMENTS.run(tx.connection, of_instance=task.id)
    _FORGET.run(tx.connection, of_instance=task.id)


def _has_results_over(tx: Tx, task: LockedTask) -> bool:
    """Whether an instance of a task that is expanded over the elements of this one has begun, and was not cleared.

    What instances append are elements of the mapped task to which they do; those that were skipped may have appended.
    """
    rows = task_instance.join(dag_run).join(dag)
    row = tx.connection.execute(
        select(dag.c.name, dag.c.spec, _C.task_id).select_from(rows).where(_C.id == task.id)
    ).one()
    tasks = read_spec(row.name, row.spec).tasks
    appending = [one.task_id for one in tasks if _is_appended_to(one, row.task_id)]
    over = appending or [one.task_id for one in tasks if _is_over(one, row.task_id)]
    resumed = and_(task_rows.is_in(TaskState.SCHEDULED), ~is_unbegun(TaskState.SCHEDULED))
    begun = or_(task_rows.is_in(*_BEGUN, *([TaskState.SKIPPED] if appending else [])), resumed)
    instances = (_C.dag_run_id == task.dag_run_id, _C.map_index >= 0, _C.task_id.in_(over))
    return tx.connection.execute(select(_C.id).where(*instances, begun).limit(1)).first() is not None


def _is_over(task: TaskSpec, task_id: str) -> bool:
    return task.map is not None and any(
        isinstance(one, maps.Elements) and one.task_id == task_id for one in maps.of_tasks(task.map.source)
    )


def _is_appended_to(task: TaskSpec, task_id: str) -> bool:
    source = None if task.map is None else task.map.source
    return isinstance(source, maps.Worklist) and source.task_id == task_id
