"""The values that tasks and triggers read: XComs, and, encrypted, variables and connections."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec
from sqlalchemy import Connection, Table, bindparam, delete, select

from headgate.protocol.messages.dags import XCOM_BYTES_MAX, XCOM_KEY_CHARS_MAX, XCOMS_PER_STEP_MAX
from headgate.store.db.bulk import insert_into
from headgate.store.db.prepared import Prepared
from headgate.store.db.secrets import Secrets
from headgate.store.errors import BadName, NoSuchRow, ValueRefused
from headgate.store.tables import task_instance, xcom
from headgate.store.triggers.watchers import check_name

VALUE_BYTES_MAX = 64 * 1024  # of a variable or a connection: a certificate with its chain, not a file
DESCRIPTION_CHARS_MAX = 1000

# --- XComs ---------------------------------------------------------------------------------------


class _EndPayload(msgspec.Struct):
    """The payload of a `TaskSuccessEvent` and its like; the values stay as they were encoded."""

    xcoms: dict[str, msgspec.Raw] | None = None


_END_PAYLOAD: msgspec.json.Decoder[_EndPayload | None] = msgspec.json.Decoder(_EndPayload | None)


def xcoms_of(payload: bytes) -> dict[str, bytes]:
    """Return the XComs in the payload of an event that ends its task, still encoded. Raises `ValueRefused`."""
    try:
        end = _END_PAYLOAD.decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueRefused(f"the XComs of the event cannot be read: {error}") from error
    return {} if end is None or end.xcoms is None else {key: bytes(value) for key, value in end.xcoms.items()}


def push_xcoms(connection: Connection, now: datetime, task_id: int, values: Mapping[str, bytes]) -> None:
    """Store XComs of a task, over those it has under the same keys. Raises `ValueRefused`, naming key and limit.

    The caller has locked the task's row, or changed it in the same transaction: XComs of a worker that lost its task do
    not reach the table.
    """
    if len(values) > XCOMS_PER_STEP_MAX:
        raise ValueRefused(f"{len(values)} XComs at once; the limit is {XCOMS_PER_STEP_MAX}")
    for key, value in values.items():
        try:
            check_name(key, "the key of an XCom", chars_max=XCOM_KEY_CHARS_MAX)
        except BadName as error:
            raise ValueRefused(str(error)) from error
        if len(value) > XCOM_BYTES_MAX:
            raise ValueRefused(f"the XCom {key!r} needs {len(value):,} bytes; the limit is {XCOM_BYTES_MAX:,}")
    for key, value in sorted(values.items()):
        statement = insert_into(connection, xcom).values(task_instance_id=task_id, key=key, value=value, stored_at=now)
        keys = [xcom.c.task_instance_id, xcom.c.key]
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=keys, set_={"value": statement.excluded.value, "stored_at": statement.excluded.stored_at}
            )
        )


_FORGET = Prepared(delete(xcom).where(xcom.c.task_instance_id == bindparam("of_id")))


def forget_xcoms(connection: Connection, task_id: int) -> None:
    """Delete the XComs of a task: a new try begins, which pushes its own."""
    _FORGET.run(connection, of_id=task_id)


def pull_xcom(connection: Connection, dag_run_id: int, task_id: str, key: str) -> bytes | None:
    """Return what the task of this name in this run has under ``key``, encoded; None where it has nothing."""
    statement = (
        select(xcom.c.value)
        .join(task_instance, task_instance.c.id == xcom.c.task_instance_id)
        .where(task_instance.c.dag_run_id == dag_run_id, task_instance.c.task_id == task_id, xcom.c.key == key)
    )
    value: bytes | None = connection.execute(statement).scalar_one_or_none()
    return value


# --- variables and connections -------------------------------------------------------------------


class NamedValue(msgspec.Struct, frozen=True):
    """A variable or a connection as a list shows it: without its value."""

    name: str
    description: str
    updated_at: datetime


def put(
    connection: Connection, now: datetime, secrets: Secrets, table: Table, name: str, value: bytes, description: str
) -> None:
    """Store a value under a name, in place of what was there. Raises `BadName` and `ValueRefused`."""
    check_name(name, f"the name of a {table.name}")
    if len(value) > VALUE_BYTES_MAX:
        raise ValueRefused(f"the {table.name} {name!r} needs {len(value):,} bytes; the limit is {VALUE_BYTES_MAX:,}")
    if len(description) > DESCRIPTION_CHARS_MAX or "\0" in description:
        raise ValueRefused(f"the description must have at most {DESCRIPTION_CHARS_MAX} characters, and no NUL")
    told = {"value": secrets.encrypt(value), "description": description, "updated_at": now}
    statement = insert_into(connection, table).values(name=name, **told)
    connection.execute(statement.on_conflict_do_update(index_elements=[table.c.name], set_=told))


def get(connection: Connection, secrets: Secrets, table: Table, name: str) -> bytes | None:
    """Return the value in clear, None where there is none. Raises `BadKey`."""
    encrypted = connection.execute(select(table.c.value).where(table.c.name == name)).scalar_one_or_none()
    return None if encrypted is None else secrets.decrypt(encrypted)


def drop(connection: Connection, table: Table, name: str) -> None:
    """Delete it. Raises `NoSuchRow`."""
    if connection.execute(delete(table).where(table.c.name == name)).rowcount != 1:
        raise NoSuchRow(table.name, name)


def listed(connection: Connection, table: Table) -> list[NamedValue]:
    """Return all of them by name, without values."""
    rows = connection.execute(select(table.c.name, table.c.description, table.c.updated_at).order_by(table.c.name))
    return [NamedValue(*row) for row in rows]
