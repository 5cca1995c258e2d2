"""The tables of signals; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)

from headgate.protocol.messages.signals import SIGNAL_BYTES_MAX
from headgate.store.consumer_tables import BigId, metadata
from headgate.store.db.times import UtcDateTime

# A key that signals were sent under. It is never cleaned away, because its versions must not begin again.
signal_key = Table(
    "signal_key",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("namespace", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("last_version", BigInteger, nullable=False, server_default=text("0")),
    Column("created_date", UtcDateTime, nullable=False),
    # Set by each who sends: tasks may wait for what was sent (`headgate.store.signals.waits`).
    Column("is_unseen", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("namespace", "key"),
    sqlite_autoincrement=True,
)
_unseen = text("is_unseen")
Index("ix_signal_key_unseen", signal_key.c.id, postgresql_where=_unseen, sqlite_where=_unseen)

# The versions of a key; those that are kept.
signal = Table(
    "signal",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("key_id", BigId, ForeignKey("signal_key.id"), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("value", LargeBinary, nullable=False),  # encoded by `headgate.protocol.values`
    Column("dedup", Text, nullable=False),
    # The run that it is for, if it is for one alone; no foreign key, because it outlives the run.
    Column("dag_run_id", BigInteger),
    Column("sender", Text, nullable=False),  # for people
    Column("sent_at", UtcDateTime, nullable=False),
    UniqueConstraint("key_id", "version"),
    UniqueConstraint("key_id", "dedup"),
    CheckConstraint(f"length(value) <= {SIGNAL_BYTES_MAX}", name="value_bytes"),
    sqlite_autoincrement=True,
)

# The newest version of a key when a run was created, for each key that a task of the run waits for. Not a foreign key:
# nothing need have been sent under the key.
signal_start = Table(
    "signal_start",
    metadata,
    Column("dag_run_id", BigId, ForeignKey("dag_run.id"), primary_key=True, autoincrement=False),
    Column("namespace", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
)

# A task that waits for a signal: by its trigger, which no supervisor claims. A row may outlive its wait.
signal_wait = Table(
    "signal_wait",
    metadata,
    Column("trigger_id", BigId, ForeignKey("trigger.id"), primary_key=True, autoincrement=False),
    Column("dag_run_id", BigInteger, nullable=False),  # a signal may be for one run alone
    Column("namespace", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("value", LargeBinary),  # encoded; null: any
    Column("seen_version", BigInteger, nullable=False),  # versions up to it are not the one
    # It was not looked at since it began, so a version may have been sent meanwhile.
    Column("is_fresh", Boolean, nullable=False, server_default=true()),
    Index("ix_signal_wait_key", "namespace", "key"),
)
_fresh = text("is_fresh")
Index("ix_signal_wait_fresh", signal_wait.c.trigger_id, postgresql_where=_fresh, sqlite_where=_fresh)
