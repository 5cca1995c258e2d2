"""The tables of encrypted values and of the keys; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from sqlalchemy import Column, Table, Text, UniqueConstraint, text

from headgate.store.consumer_tables import BigId, metadata
from headgate.store.db.times import UtcDateTime


def _encrypted_values(name: str) -> Table:
    return Table(
        name,
        metadata,
        Column("id", BigId, primary_key=True),
        Column("name", Text, nullable=False),
        Column("value", Text, nullable=False),  # encrypted
        Column("description", Text, nullable=False, server_default=text("''")),
        Column("updated_at", UtcDateTime, nullable=False),
        UniqueConstraint("name"),
        sqlite_autoincrement=True,
    )


# The keys that the database is written with, by their fingerprints (`headgate.store.keys`). The one that is not
# superseded encrypts.
encryption_key = Table(
    "encryption_key",
    metadata,
    Column("fingerprint", Text, primary_key=True),
    Column("created_date", UtcDateTime, nullable=False),
    Column("superseded_at", UtcDateTime),  # since then another key encrypts
    Column("retired_at", UtcDateTime),  # nothing is encrypted with it any more
)

variable = _encrypted_values("variable")
connection = _encrypted_values("connection")
