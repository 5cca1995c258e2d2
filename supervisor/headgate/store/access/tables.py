"""The table of what users have done; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import Column, Index, Table, Text, text

from headgate.store.consumer_tables import BigId, metadata
from headgate.store.db.times import UtcDateTime

# Each act of a user, written in the transaction of the act (`headgate.store.access.audit`). Never a secret value.
audit = Table(
    "audit",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("at", UtcDateTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("via", Text, nullable=False),  # cli or web
    Column("address", Text),  # from which a browser came
    Column("action", Text, nullable=False),  # a `headgate.store.access.audit.Action`
    Column("object", Text, nullable=False),
    Column("before", Text),  # JSON
    Column("after", Text),  # JSON
    Column("request_id", Text, nullable=False),  # the same for all rows of one command or request
    Column("outcome", Text, nullable=False, server_default=text("'done'")),
    Index("ix_audit_object", "object", "id"),
    Index("ix_audit_actor", "actor", "id"),
    Index("ix_audit_action", "action", "id"),
    sqlite_autoincrement=True,
)
