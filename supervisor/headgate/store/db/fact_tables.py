"""The tables of facts; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, Table, Text

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
