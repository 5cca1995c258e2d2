"""The tables of elements; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, LargeBinary, Table, text

from headgate.protocol.messages.dags import XCOM_BYTES_MAX
from headgate.store.consumer_tables import BigId, metadata

# A task that emits elements: how many there are, and how far its present try has come in them. A try that begins anew
# emits those that are there again.
emitter = Table(
    "emitter",
    metadata,
    Column("task_instance_id", BigId, ForeignKey("task_instance.id"), primary_key=True, autoincrement=False),
    Column("length", BigInteger, nullable=False, server_default=text("0")),
    Column("place", BigInteger, nullable=False, server_default=text("0")),
    CheckConstraint("place <= length", name="place"),
)

# What a task has emitted, or its instances have appended to it; the positions have no gap.
element = Table(
    "element",
    metadata,
    Column("task_instance_id", BigId, ForeignKey("task_instance.id"), primary_key=True, autoincrement=False),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("value", LargeBinary, nullable=False),  # encoded by `headgate.protocol.values`
    Column("key_hash", LargeBinary),  # SHA-256 of the key with which it was appended: then it is there once
    CheckConstraint(f"length(value) <= {XCOM_BYTES_MAX}", name="value_bytes"),
)
_keyed_element = element.c.key_hash.is_not(None)
Index(
    "uq_element_key",
    element.c.task_instance_id,
    element.c.key_hash,
    unique=True,
    postgresql_where=_keyed_element,
    sqlite_where=_keyed_element,
)
