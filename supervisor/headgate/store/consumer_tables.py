"""The tables of consumers, and what all tables have in common; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

from headgate.store.db.times import UtcDateTime

# On SQLite only a column declared INTEGER counts up by itself; it has 64 bits there.
BigId = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

# How far a consumer has got in the events of a watcher. The place is moved in the transaction that hands them over.
consumer = Table(
    "consumer",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("watcher", Text, nullable=False),
    Column("trigger_id", BigInteger, nullable=False, server_default=text("0")),  # no foreign key: it may be cleaned
    Column("event_id", BigInteger, nullable=False, server_default=text("0")),
    Column("handed_over", BigInteger, nullable=False, server_default=text("0")),  # events, in all batches
    Column("created_date", UtcDateTime, nullable=False),
    Column("moved_at", UtcDateTime),  # the last batch that had events
    Column("max_deliveries", BigInteger, nullable=False, server_default=text("5")),  # of one event; 0: without limit
    # How often the next event was handed over alone, and not taken. The places are texts, `Cursor.parse`.
    Column("failures", BigInteger, nullable=False, server_default=text("0")),
    Column("careful_to", Text),  # a batch up to there has failed: until then events are handed over one by one
    Column("taken_to", Text),  # the end of a batch that is handed over; if nobody does that now, its process has died
    Column("taken_at", UtcDateTime),
    Column("last_error", Text),
    Column("failed_at", UtcDateTime),
    Column("aside_in_a_row", BigInteger, nullable=False, server_default=text("0")),  # since an event was taken
    Column("has_redeliveries", Boolean, nullable=False, server_default=false()),  # a user has asked for some
    UniqueConstraint("name"),
    sqlite_autoincrement=True,
)
Index("ix_consumer_watcher", consumer.c.watcher)

# An event that a consumer could not take, and that it has gone past. It keeps its event from being cleaned away.
consumer_letter = Table(
    "consumer_letter",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("consumer_id", BigId, ForeignKey("consumer.id"), nullable=False),
    Column("trigger_id", BigInteger, nullable=False),
    Column("event_id", BigInteger, nullable=False),  # no foreign key: it may be cleaned once this is resolved
    Column("deliveries", BigInteger, nullable=False),  # of the event alone
    Column("error", Text, nullable=False),
    Column("traceback", Text, nullable=False, server_default=text("''")),
    Column("set_aside_at", UtcDateTime, nullable=False),
    Column("state", Text, nullable=False, server_default=text("'open'")),  # a `ConsumerLetterState`
    Column("resolved_at", UtcDateTime),  # null as long as something is to be done about it
    UniqueConstraint("consumer_id", "event_id"),
    sqlite_autoincrement=True,
)
_unresolved = consumer_letter.c.resolved_at.is_(None)
Index("ix_consumer_letter_open", consumer_letter.c.event_id, postgresql_where=_unresolved, sqlite_where=_unresolved)
