"""The tables of facts; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from headgate.store.consumer_tables import BigId, metadata
from headgate.store.db.times import UtcDateTime

STATUS_CHARS_MAX = 32 * 1024  # of one supervisor

# What a supervisor says of itself, written with a heartbeat if it has changed since the one before.
supervisor_status = Table(
    "supervisor_status",
    metadata,
    Column("triggerer_id", BigId, ForeignKey("triggerer.id"), primary_key=True, autoincrement=False),
    Column("at", UtcDateTime, nullable=False),
    Column("figures", Text, nullable=False),  # `headgate.store.facts.supervisor_status`, as JSON
    CheckConstraint(f"length(figures) <= {STATUS_CHARS_MAX}", name="figures_chars"),
)

# How far headgate has come at the broker of a stream: written by the supervisor that runs it, every few seconds at most
# while it goes on. The texts are JSON of `headgate.scheduling.drift`.
stream_drift = Table(
    "stream_drift",
    metadata,
    Column("stream_id", BigId, ForeignKey("stream.id"), primary_key=True, autoincrement=False),
    Column("progress", Text, nullable=False, server_default=text("'[]'")),
    Column("progress_at", UtcDateTime),
    Column("found", Text, nullable=False, server_default=text("'[]'")),  # what is wrong, until a user accepts it
    Column("asked_at", UtcDateTime),  # a user wants the broker asked, and it has not answered yet
    Column("answered_at", UtcDateTime),
    Column("report", Text),  # the last answer
)
_asked = stream_drift.c.asked_at.is_not(None)
Index("ix_stream_drift_asked", stream_drift.c.stream_id, postgresql_where=_asked, sqlite_where=_asked)
_found = text("found <> '[]'")
Index("ix_stream_drift_found", stream_drift.c.stream_id, postgresql_where=_found, sqlite_where=_found)

# A step of a task that has ended: when it was ready, and when it ran. With the task's own row this is its history.
task_span = Table(
    "task_span",
    metadata,
    Column("task_instance_id", BigId, ForeignKey("task_instance.id"), primary_key=True, autoincrement=False),
    Column("ended_at", UtcDateTime, primary_key=True),
    Column("try_number", BigInteger, nullable=False),
    Column("ready_at", UtcDateTime),
    Column("began_at", UtcDateTime),  # null: not known
    Column("outcome", Text, nullable=False),  # a `StepEndName` or `LastEndName` of `headgate.store.facts.spans`
)

# A run of a watcher's trigger that has ended: the newest `headgate.store.facts.trigger_runs.RUNS_KEPT` of each. No
# foreign key: what is written for people alone may not be a reason to refuse the end of a run.
trigger_run = Table(
    "trigger_run",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("trigger_id", BigInteger, nullable=False),
    Column("trigger_run_id", Text, nullable=False),
    Column("ended_at", UtcDateTime, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("events", BigInteger, nullable=False),
    Column("error", Text),
    Index("ix_trigger_run_trigger", "trigger_id", "id"),
    sqlite_autoincrement=True,
)
