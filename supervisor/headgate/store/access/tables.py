"""The tables of users and their acts, and of encrypted values; `headgate.store.tables` is the place to import from."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnClause,
    ForeignKey,
    Index,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
    text,
)

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

# A user of the pages. Whoever has the database and the keys needs none for commands.
web_user = Table(
    "web_user",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("password", Text, nullable=False),  # hashed: `headgate.store.access.users.hashed`
    Column("created_date", UtcDateTime, nullable=False),
    UniqueConstraint("name"),
    CheckConstraint("role IN ('viewer', 'operator', 'admin')", name="role"),
    sqlite_autoincrement=True,
)

# A browser that is logged in: as a user, or with a name and a role of its own by a link that a process has printed.
web_session = Table(
    "web_session",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("digest", Text, nullable=False),  # of its token
    Column("user_id", BigId, ForeignKey("web_user.id")),
    Column("name", Text),
    Column("role", Text),
    Column("address", Text, nullable=False),
    Column("began_at", UtcDateTime, nullable=False),
    Column("used_at", UtcDateTime, nullable=False),
    UniqueConstraint("digest"),
    Index("ix_web_session_user", "user_id"),
    sqlite_autoincrement=True,
)

# A browser that a user has logged in with before. Its guesses are counted apart from those of everybody else.
web_browser = Table(
    "web_browser",
    metadata,
    Column("digest", Text, primary_key=True),  # of its token
    Column("user_id", BigId, ForeignKey("web_user.id"), nullable=False),
    Column("used_at", UtcDateTime, nullable=False),
    Index("ix_web_browser_user", "user_id"),
)

# Failures to log in, of a user from an address; under the user "" those of all from that address. For a browser that
# is known the address is "browser " and its digest.
web_guess = Table(
    "web_guess",
    metadata,
    Column("user", Text, primary_key=True),
    Column("address", Text, primary_key=True),
    Column("failures", BigInteger, nullable=False),
    Column("last_at", UtcDateTime, nullable=False),
)

# What an EXISTS selects: of ``*`` PostgreSQL would check the right to select each column.
ONE: Final[ColumnClause[Any]] = literal_column("1")

# Columns that neither pages nor readers can select (`headgate.store.access.roles`).
SECRETS: Final[dict[str, frozenset[str]]] = {
    "trigger": frozenset({"kwargs"}),
    "task_instance": frozenset({"next_kwargs"}),
    "variable": frozenset({"value"}),
    "connection": frozenset({"value"}),
}


def readable(table: Table) -> list[Column[Any]]:
    """Return the columns of a table that pages may select."""
    hidden = SECRETS.get(table.name, frozenset())
    return [column for column in table.columns if column.name not in hidden]


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
