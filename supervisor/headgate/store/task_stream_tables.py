"""The table of task streams; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Table,
    Text,
    UniqueConstraint,
    column,
    false,
    text,
)

from headgate.store.consumer_tables import BigId, metadata
from headgate.store.db.times import UtcDateTime

STREAM_ENDS = ("returned", "failed", "event")

# The stream of a task: the events of one trigger, which the task keeps over all its steps and tries, and how far it has
# come in them. The task's own row refers to the trigger only while it is deferred.
task_stream = Table(
    "task_stream",
    metadata,
    Column("task_instance_id", BigId, ForeignKey("task_instance.id"), primary_key=True, autoincrement=False),
    Column("trigger_id", BigId, ForeignKey("trigger.id"), nullable=False),
    # The id of the last event that is handled; no foreign key, because the event may be cleaned.
    Column("handled_to", BigInteger, nullable=False, server_default=text("0")),
    Column("handled", BigInteger, nullable=False, server_default=text("0")),  # events up to there
    Column("state", Text),  # encrypted; null until an event is handled
    # The options of the last deferral: see `headgate.protocol.messages.task_streams.StreamOptions`.
    Column("contract", Text, nullable=False),
    Column("batch_count", BigInteger, nullable=False),
    Column("batch_s", Double),
    Column("ahead", BigInteger, nullable=False),
    Column("poison", Text, nullable=False),
    Column("timeout_s", Double),
    Column("due_at", UtcDateTime),  # when the task goes on with a batch that is not full; null unless it waits for that
    # A step with several events up to here has failed: until then events are handed over one by one.
    Column("one_by_one_to", BigInteger, nullable=False, server_default=text("0")),
    # The dead letter of a message's event that could not be stored: the stream does not go on before it is resolved.
    Column("refused_letter", BigInteger),
    # Why no event will come: the trigger has returned, or failed, or fired an event that ends the task.
    Column("ended_as", Text),
    Column("ended_error", Text),
    Column("ended_traceback", Text),
    Column("ended_run", Text),  # the trigger run that has said so last: if it says so again, it means no later run
    # The task waits for the trigger again, whose row is over until the owner of its last run has let it go.
    Column("reopens", Boolean, nullable=False, server_default=false()),
    Column("elements", Text),  # what of its events are elements, without a step; null: a step handles them
    UniqueConstraint("trigger_id"),
    CheckConstraint(column("ended_as").in_(STREAM_ENDS), name="ended_as"),
    CheckConstraint("(handled = 0) = (state IS NULL)", name="state"),
)
_due = task_stream.c.due_at.is_not(None)
Index("ix_task_stream_due", task_stream.c.due_at, postgresql_where=_due, sqlite_where=_due)
_reopens = text("reopens")
Index("ix_task_stream_reopens", task_stream.c.trigger_id, postgresql_where=_reopens, sqlite_where=_reopens)
