"""The values that tasks and triggers read: XComs, and, encrypted, variables and connections."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, assert_never

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Table,
    and_,
    bindparam,
    delete,
    exists,
    func,
    literal_column,
    select,
)

from headgate.protocol.encoded_values import values_in
from headgate.protocol.messages import MALFORMED
from headgate.protocol.messages.dags import XCOM_BYTES_MAX, XCOM_KEY_CHARS_MAX, XCOMS_PER_STEP_MAX, TaskSpec, TaskState
from headgate.protocol.messages.maps import Elements, Output, OwnValue, digest_of
from headgate.protocol.messages.queries import XComPage
from headgate.protocol.messages.start_triggers import Listed, OwnSource
from headgate.protocol.messages.steps import XCom
from headgate.store.access.tables import ONE
from headgate.store.db.bulk import Kind, chunks, insert_into, insert_or_replace
from headgate.store.db.prepared import Prepared
from headgate.store.db.times import bound
from headgate.store.db.transaction import Database, Tx
from headgate.store.db.verbs import Verbs, acting, reading
from headgate.store.errors import BadName, NoSuchRow, ValueRefused
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.tables import element, emitter, task_instance, task_stream, xcom
from headgate.store.tasks import task_rows
from headgate.store.triggers.watchers import check_name

VALUE_BYTES_MAX = 64 * 1024  # of a variable or a connection: a certificate with its chain, not a file
DESCRIPTION_CHARS_MAX = 1000

# --- XComs ---------------------------------------------------------------------------------------


class XComVerbs(Verbs):
    """The verb that reads XComs. They are written together with the outcome of a step."""

    @reading
    def pull_xcom(self, tx: Tx, dag_run: DagRunId, task_id: str, key: str, map_index: int = -1) -> bytes | None:
        """Return the XCom that a task of a run, or its instance, has under ``key``, encoded; None if it has none."""
        return xcom_of(tx, dag_run, task_id, key, map_index)

    @reading
    def pull_xcoms(
        self,
        tx: Tx,
        dag_run: DagRunId,
        task_id: str,
        key: str,
        *,
        after: int,
        offset: int,
        limit: int,
        bytes_max: int,
        is_counted: bool = True,
    ) -> XComPage:
        """Return a page of the XComs that the instances of a mapped task of a run have under ``key``.

        It ends with the value that exceeds ``bytes_max``, if one does. ``is_counted``: with the number of all of them,
        for which those are counted that have no value; otherwise it costs no more than the page. Raises `ValueRefused`
        if the task was run without instances, because it was not mapped then.
        """
        of_task = {"of_run": dag_run, "of_task": task_id}
        page: list[tuple[int, bytes | None]] = []
        room = bytes_max
        for map_index, value in _PAGE.run(
            tx.connection, of_key=key, after=after, offset=offset, limit=limit, **of_task
        ).fetchall():
            page.append((map_index, None if value is None else bytes(value)))
            room -= 0 if value is None else len(value)
            if room <= 0:
                break
        if not page and (reason := why_without_instances(tx, dag_run, task_id)) is not None:
            raise ValueRefused(reason)
        made, removed, missing = (is_counted and _COUNTS.run(tx.connection, **of_task).fetchone()) or (0, 0, 0)
        return XComPage(tuple(page), made - removed - missing, missing)


_C = task_instance.c
_MAPPED = and_(
    _C.dag_run_id == bindparam("of_run"), _C.task_id == bindparam("of_task"), _C.map_index >= literal_column("0")
)
_PAGE = Prepared(
    select(_C.map_index, xcom.c.value)
    .select_from(
        task_instance.outerjoin(xcom, and_(xcom.c.task_instance_id == _C.id, xcom.c.key == bindparam("of_key")))
    )
    .where(_MAPPED, task_rows.is_in(TaskState.SUCCESS), _C.map_index > bindparam("after"))
    .order_by(_C.map_index)
    .limit(bindparam("limit"))
    .offset(bindparam("offset"))
)
# Of the rest, because most have succeeded: of each state a range of the index is counted, and not all instances.
_REST = sorted(set(TaskState) - {TaskState.SUCCESS, TaskState.REMOVED})


def _count_of(*some: TaskState) -> ColumnElement[int]:
    total: ColumnElement[int] = literal_column("0", Integer())
    for one in some:
        total = total + select(func.count()).where(_MAPPED, task_rows.is_in(one)).scalar_subquery()
    return total


_COUNTS = Prepared(
    select(_C.map_made, _count_of(TaskState.REMOVED), _count_of(*_REST)).where(
        task_rows.unmapped_of(bindparam("of_run")), _C.task_id == bindparam("of_task")
    )
)
# A worker has had the row of the task itself, and it was not expanded after that.
_HAS_RUN_ITSELF = Prepared(
    select(_C.id).where(
        task_rows.unmapped_of(bindparam("of_run")),
        *(_C.task_id == bindparam("of_task"), task_rows.is_in(TaskState.SUCCESS)),
        *(_C.try_number > literal_column("0"), _C.map_length.is_(None), _C.map_made == literal_column("0")),
    )
)


def why_without_instances(tx: Tx, dag_run: DagRunId, task_id: str) -> str | None:
    """Return why a mapped task has no values, if it has succeeded in this run before it was mapped."""
    if _HAS_RUN_ITSELF.run(tx.connection, of_run=dag_run, of_task=task_id).fetchone() is None:
        return None
    return (
        f"the task {task_id!r} has succeeded in this run before it was mapped, and so has no instances: "
        "clear it, with what is below it"
    )


def xcom_of(tx: Tx, dag_run: DagRunId, task_id: str, key: str, map_index: int = -1) -> bytes | None:
    """Return the XCom that a task of a run, or an instance of it, has under ``key``, encoded; None if it has none."""
    statement = (
        select(xcom.c.value)
        .join(task_instance, task_instance.c.id == xcom.c.task_instance_id)
        .where(_C.dag_run_id == dag_run, _C.task_id == task_id, _C.map_index == map_index, xcom.c.key == key)
    )
    value: bytes | None = tx.connection.execute(statement).scalar_one_or_none()
    return value


class _EndPayload(msgspec.Struct):
    """The payload of a `TaskSuccessEvent` and its like; the values stay encoded."""

    xcoms: dict[str, msgspec.Raw] | None = None


_END_PAYLOAD: msgspec.json.Decoder[_EndPayload | None] = msgspec.json.Decoder(_EndPayload | None)


def xcoms_of(payload: bytes) -> tuple[XCom, ...]:
    """Return the XComs in the payload of an event that ends its task, still encoded. Raises `ValueRefused`."""
    try:
        end = _END_PAYLOAD.decode(payload)
    except MALFORMED as error:
        raise ValueRefused(f"the XComs of the event cannot be read: {error}") from error
    left = {} if end is None or end.xcoms is None else end.xcoms
    return tuple(XCom(key, bytes(value)) for key, value in left.items())


XComRow = tuple[TaskInstanceId, str, bytes, Any]
_XCOM = Kind(xcom, ("task_instance_id", "key", "value", "stored_at"))


def xcom_rows(tx: Tx, instance: TaskInstanceId, xcoms: Sequence[XCom]) -> list[XComRow]:
    """Return the rows of XComs of a task. Raises `ValueRefused` with the key and the limit."""
    if len(xcoms) > XCOMS_PER_STEP_MAX:
        raise ValueRefused(f"{len(xcoms)} XComs at once; the limit is {XCOMS_PER_STEP_MAX}")
    for left in xcoms:
        try:
            check_name(left.key, "the key of an XCom", chars_max=XCOM_KEY_CHARS_MAX)
        except BadName as error:
            raise ValueRefused(str(error)) from error
        if len(left.value) > XCOM_BYTES_MAX:
            raise ValueRefused(
                f"the XCom {left.key!r} needs {len(left.value):,} bytes; the limit is {XCOM_BYTES_MAX:,}"
            )
    now = bound(tx.connection, tx.now)
    newest = {left.key: left.value for left in xcoms}
    return [(instance, key, value, now) for key, value in sorted(newest.items())]


def store_xcoms(tx: Tx, rows: Sequence[XComRow]) -> None:
    """Store XComs, replacing those of the same tasks with the same keys.

    The caller has locked or updated the tasks' rows in this transaction, so that a worker which has lost its task
    stores none.
    """
    insert_or_replace(tx.connection, _XCOM, rows)


# A task that has handled events of its stream keeps its XComs: it does not handle these events again (I20).
_HAS_HANDLED = exists(ONE).where(task_stream.c.task_instance_id == xcom.c.task_instance_id, task_stream.c.handled > 0)
_DELETE_XCOMS = Prepared(delete(xcom).where(xcom.c.task_instance_id == bindparam("of_task"), ~_HAS_HANDLED))


def delete_xcoms(tx: Tx, instance: TaskInstanceId) -> None:
    """Delete the XComs of a task, because a new try of it begins."""
    _DELETE_XCOMS.run(tx.connection, of_task=instance)


def delete_xcoms_of(tx: Tx, instances: Sequence[TaskInstanceId]) -> None:
    """Do what `delete_xcoms` does for many tasks."""
    for some in chunks(instances):
        tx.connection.execute(delete(xcom).where(xcom.c.task_instance_id.in_(some), ~_HAS_HANDLED))


# --- the value of an instance --------------------------------------------------------------------

_of = task_instance.alias("of")  # the instance
_own = task_instance.alias("own")  # the row of its task


def value_of_instance(tx: Tx, instance: TaskInstanceId, source: OwnSource) -> bytes | None:
    """Return the value that an instance of a mapped task has, encoded, without a worker; None if there is none.

    Elements are at the position that is the index of the instance, and are never changed. A list that a task has left
    may be another one after that task has run again: if it is not as long, the place says nothing.
    """
    match source:
        case Listed(values):
            ((index, digest),) = _INDEX.run(tx.connection, of_instance=instance).fetchall()
            is_same = not digest or digest.partition(".")[0] == _digest_of(values)
            return values[index] if is_same and index < len(values) else None
        case Elements(task_id):
            row = _ELEMENT.run(tx.connection, of_instance=instance, of_task=task_id).fetchone()
            return None if row is None else bytes(row[0])
        case Output(task_id, key):
            of = {"of_instance": instance, "of_task": task_id, "of_key": key}
            index, length, left = _LEFT.run(tx.connection, **of).fetchone() or (0, None, b"")
            items = _items(bytes(left))
            return items[index] if index < len(items) == (length or len(items)) else None
        case _:
            assert_never(source)


class OwnValues:
    """The values that instances take with their steps, which one dispatch gives to workers; each list is read once.

    They are those of which it is certain that they are at the index of the instance: of tasks that are expanded over
    one task's output as it is. Others are found by the worker, which asks for what it needs.
    """

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self._lists: dict[tuple[DagRunId, str, str], list[bytes]] = {}

    def of(
        self, run: DagRunId, index: int, length: int | None, task: TaskSpec, mapped: Collection[str]
    ) -> OwnValue | None:
        """Return the value of an instance; ``length`` are the values that were counted for its task, if all were."""
        source = None if task.map is None else task.map.source
        if isinstance(source, Elements):
            row = _ELEMENT_AT.run(self._tx.connection, of_run=run, of_task=source.task_id, at=index).fetchone()
            return None if row is None else OwnValue(source.task_id, None, int(row[1]), bytes(row[0]))
        if not isinstance(source, Output) or length is None:
            return None
        value = self._left(run, source, index, length, is_mapped=source.task_id in mapped)
        return None if value is None else OwnValue(source.task_id, source.key, length, value)

    def _left(self, run: DagRunId, source: Output, index: int, length: int, *, is_mapped: bool) -> bytes | None:
        of = {"of_run": run, "of_task": source.task_id, "of_key": source.key}
        if is_mapped:
            # If as many have succeeded as there are, none is missing before it. One that has left nothing has None.
            row = _OF_INSTANCE.run(self._tx.connection, **of, at=index, length=length).fetchone()
            return None if row is None else b"null" if row[0] is None else bytes(row[0])
        place = (run, source.task_id, source.key)
        if place not in self._lists:
            left = xcom_of(self._tx, run, source.task_id, source.key)
            self._lists[place] = [] if left is None else _items(left)
        items = self._lists[place]
        return items[index] if index < len(items) == length else None


@lru_cache(maxsize=4)
def _digest_of(values: tuple[bytes, ...]) -> str:
    return digest_of([b"[" + b",".join(values) + b"]"])


@lru_cache(maxsize=4)  # many instances of one look take theirs from the same list
def _items(left: bytes) -> list[bytes]:
    return values_in(left) or []


_of_run, _at = _C.dag_run_id == bindparam("of_run"), bindparam("at", type_=BigInteger())
_ELEMENT_AT = Prepared(
    select(element.c.value, emitter.c.length)
    .select_from(task_instance.join(emitter))
    .join(element, and_(element.c.task_instance_id == _C.id, element.c.position == _at))
    .where(task_rows.unmapped_of(bindparam("of_run")), _C.task_id == bindparam("of_task"))
)
_OF_INSTANCE = Prepared(
    select(xcom.c.value)
    .select_from(task_instance.join(_own, and_(_own.c.task_id == _C.task_id, _own.c.map_index == literal_column("-1"))))
    .outerjoin(xcom, and_(xcom.c.task_instance_id == _C.id, xcom.c.key == bindparam("of_key")))
    .where(_of_run, _own.c.dag_run_id == bindparam("of_run"), _C.task_id == bindparam("of_task"), _C.map_index == _at)
    .where(task_rows.is_in(TaskState.SUCCESS), _own.c.map_length == bindparam("length"))
)
_OF_SOURCE = and_(_C.dag_run_id == _of.c.dag_run_id, _C.task_id == bindparam("of_task"), _C.map_index == -1)
_OWN_OF = and_(task_rows.own_of(_own, _of.c.dag_run_id), _own.c.task_id == _of.c.task_id)
_INDEX = Prepared(
    select(_of.c.map_index, func.coalesce(_of.c.given_digest, _own.c.given_digest))
    .select_from(_of.join(_own, _OWN_OF))
    .where(_of.c.id == bindparam("of_instance"))
)
_ELEMENT = Prepared(
    select(element.c.value)
    .select_from(_of.join(task_instance, _OF_SOURCE))
    .join(element, and_(element.c.task_instance_id == _C.id, element.c.position == _of.c.map_index))
    .where(_of.c.id == bindparam("of_instance"))
)
_LEFT = Prepared(
    select(_of.c.map_index, _own.c.map_length, xcom.c.value)
    .select_from(_of.join(task_instance, _OF_SOURCE))
    .join(xcom, and_(xcom.c.task_instance_id == _C.id, xcom.c.key == bindparam("of_key")))
    .join(_own, _OWN_OF)
    .where(_of.c.id == bindparam("of_instance"))
)


# --- variables and connections -------------------------------------------------------------------


class NamedValue(msgspec.Struct, frozen=True):
    """One row of the list of variables or connections: without its value."""

    name: str
    description: str
    updated_at: datetime


class ValueVerbs(Verbs):
    """The verbs for one table of encrypted values under names: variables, or connections."""

    def __init__(self, database: Database, table: Table) -> None:
        super().__init__(database)
        self._table = table

    @acting
    def put(self, tx: Tx, name: str, value: bytes, *, description: str = "") -> None:
        """Store a value, replacing the one under this name. Raises `BadName` and `ValueRefused`."""
        table = self._table
        check_name(name, f"the name of a {table.name}")
        if len(value) > VALUE_BYTES_MAX:
            size = f"needs {len(value):,} bytes; the limit is {VALUE_BYTES_MAX:,}"
            raise ValueRefused(f"the {table.name} {name!r} {size}")
        if len(description) > DESCRIPTION_CHARS_MAX or "\0" in description:
            raise ValueRefused(f"the description must have at most {DESCRIPTION_CHARS_MAX} characters, and no NUL")
        tx.act("variables set" if table.name == "variable" else "connections set", f"{table.name} {name}")
        columns = {"value": tx.encrypt(value), "description": description, "updated_at": tx.now}
        statement = insert_into(tx.connection, table).values(name=name, **columns)
        tx.connection.execute(statement.on_conflict_do_update(index_elements=[table.c.name], set_=columns))

    @reading
    def get(self, tx: Tx, name: str) -> bytes | None:
        """Return a value in clear, None if there is none. Raises as `Tx.decrypt` does."""
        of_name = select(self._table.c.value).where(self._table.c.name == name)
        encrypted = tx.connection.execute(of_name).scalar_one_or_none()
        return None if encrypted is None else tx.decrypt(encrypted)

    @acting
    def remove(self, tx: Tx, name: str) -> None:
        """Delete a value. Raises `NoSuchRow`."""
        if tx.connection.execute(delete(self._table).where(self._table.c.name == name)).rowcount != 1:
            raise NoSuchRow(self._table.name, name)
        kind = self._table.name
        tx.act("variables delete" if kind == "variable" else "connections delete", f"{kind} {name}")

    @reading
    def listed(self, tx: Tx, *, beyond: str | None = None, limit: int | None = None) -> list[NamedValue]:
        """Return them by name, those beyond a name, without their values; by default all."""
        table = self._table
        found = select(table.c.name, table.c.description, table.c.updated_at).order_by(table.c.name).limit(limit)
        if beyond is not None:
            found = found.where(table.c.name > beyond)
        return [NamedValue(*row) for row in tx.connection.execute(found)]
