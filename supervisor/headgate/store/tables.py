"""The tables, after seed 004 and the invariants.

Rows of ``trigger``, ``asset_watcher`` and ``triggerer`` are never deleted: they get a tombstone
(``removed_at``, ``stopped_at``, ``fenced_at``), so that what refers to them stays readable. Ids are never
given twice, which SQLite promises only when asked to (``sqlite_autoincrement``).

The migrations say the same a second time, on purpose; a test holds the two together.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

from headgate.protocol.messages import KEY_CHARS_MAX
from headgate.store.times import UtcDateTime

# Only a column declared INTEGER counts up by itself on SQLite, where it has 64 bits anyway.
BigId = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

# One supervisor's lease. The id is the epoch: a supervisor that comes back registers anew and gets another.
triggerer = Table(
    "triggerer",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("hostname", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("machine", Text, nullable=False),  # boot id and pid namespace: where ``pid`` means this process
    Column("process_started", Double, nullable=False),  # clock ticks since boot: tells a pid from its next bearer
    Column("capacity", BigInteger, nullable=False),
    Column("queues", Text, nullable=False),  # comma separated
    Column("started_at", UtcDateTime, nullable=False),
    Column("latest_heartbeat", UtcDateTime, nullable=False),
    Column("stopped_at", UtcDateTime),  # it left by itself
    Column("fenced_at", UtcDateTime),  # others took over
    sqlite_autoincrement=True,
)

trigger = Table(
    "trigger",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("classpath", Text, nullable=False),
    Column("kwargs", Text, nullable=False),  # encrypted
    Column("created_date", UtcDateTime, nullable=False),
    Column("queue", Text, nullable=False, server_default=text("'default'")),
    Column("triggerer_id", BigId, ForeignKey("triggerer.id")),  # the owner; null or gone: claimable
    Column("failure_count", BigInteger, nullable=False, server_default=text("0")),
    Column("last_error", Text),
    Column("last_failed_at", UtcDateTime),
    # The run that ``failure_count`` counted last: a failure reported again, because nobody knew whether the
    # first report was committed, is not counted again.
    Column("last_failed_run_id", Text),
    Column("finished_at", UtcDateTime),
    Column("removed_at", UtcDateTime),
    sqlite_autoincrement=True,
)
_open_trigger = trigger.c.finished_at.is_(None) & trigger.c.removed_at.is_(None)
Index(
    "ix_trigger_claim",
    trigger.c.queue,
    trigger.c.triggerer_id,
    trigger.c.id,
    postgresql_where=_open_trigger,
    sqlite_where=_open_trigger,
)
_owned_trigger = trigger.c.triggerer_id.is_not(None)
Index("ix_trigger_owner", trigger.c.triggerer_id, postgresql_where=_owned_trigger, sqlite_where=_owned_trigger)

asset = Table(
    "asset",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_date", UtcDateTime, nullable=False),
    UniqueConstraint("name"),
    sqlite_autoincrement=True,
)

asset_watcher = Table(
    "asset_watcher",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("asset_id", BigId, ForeignKey("asset.id")),
    Column("trigger_id", BigId, ForeignKey("trigger.id"), nullable=False),
    Column("created_date", UtcDateTime, nullable=False),
    Column("removed_at", UtcDateTime),
    UniqueConstraint("trigger_id"),
    sqlite_autoincrement=True,
)
_present_watcher = asset_watcher.c.removed_at.is_(None)
Index(
    "uq_asset_watcher_name",
    asset_watcher.c.name,
    unique=True,
    postgresql_where=_present_watcher,
    sqlite_where=_present_watcher,
)

# The event log. Its two unique rules are I2: the same event, reported again, and the same message,
# delivered again, give no second row.
trigger_event = Table(
    "trigger_event",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("trigger_id", BigId, ForeignKey("trigger.id"), nullable=False),
    Column("trigger_run_id", Text, nullable=False),
    Column("sequence_index", BigInteger, nullable=False),
    Column("key", Text),
    Column("position", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("is_last", Boolean, nullable=False, server_default=false()),
    Column("stored_at", UtcDateTime, nullable=False),
    UniqueConstraint("trigger_run_id", "sequence_index"),
    CheckConstraint(f"length(key) <= {KEY_CHARS_MAX}", name="key_chars"),
    sqlite_autoincrement=True,
)
_keyed_event = trigger_event.c.key.is_not(None)
Index(
    "uq_trigger_event_key",
    trigger_event.c.trigger_id,
    trigger_event.c.key,
    trigger_event.c.position,
    unique=True,
    postgresql_where=_keyed_event,
    sqlite_where=_keyed_event,
)
Index("ix_trigger_event_newest", trigger_event.c.trigger_id, trigger_event.c.id)

# How often a stored event came again; no row for the many that never did.
redelivery = Table(
    "redelivery",
    metadata,
    Column("trigger_event_id", BigId, ForeignKey("trigger_event.id"), primary_key=True, autoincrement=False),
    Column("count", BigInteger, nullable=False),
    Column("last_at", UtcDateTime, nullable=False),
)

# What could not be stored. ``trigger_id`` is no foreign key: an event of a trigger that does not exist must
# be buried like any other, and burying may not fail.
dead_letter = Table(
    "dead_letter",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("trigger_id", BigInteger, nullable=False),
    Column("trigger_run_id", Text, nullable=False),
    Column("sequence_index", BigInteger, nullable=False),
    Column("key", Text),
    Column("position", BigInteger, nullable=False),
    Column("payload", LargeBinary),  # null where the runner refused the event and kept only its head
    Column("payload_head", LargeBinary, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("payload_kept", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
    Column("stored_at", UtcDateTime, nullable=False),
    UniqueConstraint("trigger_run_id", "sequence_index"),
    sqlite_autoincrement=True,
)
_keyed_letter = dead_letter.c.key.is_not(None)
Index(
    "uq_dead_letter_key",
    dead_letter.c.trigger_id,
    dead_letter.c.key,
    dead_letter.c.position,
    unique=True,
    postgresql_where=_keyed_letter,
    sqlite_where=_keyed_letter,
)
