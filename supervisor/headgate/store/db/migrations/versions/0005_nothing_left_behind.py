"""Streams that have one owner, triggers that are held, messages that were failed on, whole dead letters, known keys.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")

INDEXES = {"ix_trigger_held": ("triggerer_id", "hold"), "ix_trigger_stream": ("stream_id", "stream_id")}


def _trigger_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("stream_id", BIG_ID, nullable=True),
        sa.Column("max_deliveries", sa.BigInteger(), server_default=sa.text("5"), nullable=False),
        sa.Column("hold", sa.Text(), nullable=True),
        sa.Column("hold_reason", sa.Text(), nullable=True),
        sa.Column("held_at", UTC, nullable=True),
        sa.Column("brake_from", UTC, nullable=True),
    ]


def _letter_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("content", sa.Text(), server_default=sa.text("'event'"), nullable=False),
        sa.Column("kind", sa.Text(), server_default=sa.text("'event'"), nullable=False),
        sa.Column("is_last", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("traceback", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("deliveries", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
    ]


def upgrade() -> None:
    """Add the tables and the columns. The stream of each trigger is found out when it is started next."""
    op.create_table(
        "stream",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("triggerer_id", BIG_ID, nullable=True),
        sa.Column("created_date", UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stream"),
        sa.UniqueConstraint("digest", name="uq_stream_digest"),
        sa.ForeignKeyConstraint(["triggerer_id"], ["triggerer.id"], name="fk_stream_triggerer_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "strike",
        sa.Column("trigger_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("strikes", sa.BigInteger(), nullable=False),
        sa.Column("kills", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("last_run_id", sa.Text(), nullable=False),
        sa.Column("last_at", UTC, nullable=False),
        sa.PrimaryKeyConstraint("trigger_id", "key", name="pk_strike"),
        sa.ForeignKeyConstraint(["trigger_id"], ["trigger.id"], name="fk_strike_trigger_id"),
        sa.CheckConstraint("length(key) <= 512", name="ck_strike_key_chars"),
    )
    op.create_table(
        "encryption_key",
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("created_date", UTC, nullable=False),
        sa.Column("superseded_at", UTC, nullable=True),
        sa.Column("retired_at", UTC, nullable=True),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_encryption_key"),
    )
    for column in _trigger_columns():
        op.add_column("trigger", column)
    for name, (indexed, present) in INDEXES.items():
        where = sa.text(f"{present} IS NOT NULL")
        op.create_index(name, "trigger", [indexed], postgresql_where=where, sqlite_where=where)
    for column in _letter_columns():
        op.add_column("dead_letter", column)


def downgrade() -> None:
    """Drop them."""
    for name in INDEXES:
        op.drop_index(name, "trigger")
    for table, columns in (("dead_letter", _letter_columns()), ("trigger", _trigger_columns())):
        for column in columns:
            op.drop_column(table, column.name)
    for table in ("encryption_key", "strike", "stream"):
        op.drop_table(table)
