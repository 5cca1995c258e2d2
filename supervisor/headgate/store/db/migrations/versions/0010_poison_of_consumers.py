"""Events that a consumer cannot take: counted, and set aside.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def _columns() -> list[sa.Column[object]]:
    return [
        sa.Column("max_deliveries", sa.BigInteger(), server_default=sa.text("5"), nullable=False),
        sa.Column("failures", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("careful_to", sa.Text(), nullable=True),
        sa.Column("taken_to", sa.Text(), nullable=True),
        sa.Column("taken_at", UTC, nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("failed_at", UTC, nullable=True),
        sa.Column("aside_in_a_row", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("has_redeliveries", sa.Boolean(), server_default=sa.false(), nullable=False),
    ]


def upgrade() -> None:
    """Add the columns and the table."""
    for column in _columns():
        op.add_column("consumer", column)
    op.create_table(
        "consumer_letter",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("consumer_id", BIG_ID, nullable=False),
        sa.Column("trigger_id", sa.BigInteger(), nullable=False),
        sa.Column("event_id", sa.BigInteger(), nullable=False),
        sa.Column("deliveries", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("traceback", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("set_aside_at", UTC, nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'open'"), nullable=False),
        sa.Column("resolved_at", UTC, nullable=True),
        sa.ForeignKeyConstraint(["consumer_id"], ["consumer.id"], name="fk_consumer_letter_consumer_id"),
        sa.PrimaryKeyConstraint("id", name="pk_consumer_letter"),
        sa.UniqueConstraint("consumer_id", "event_id", name="uq_consumer_letter_consumer_id_event_id"),
        sqlite_autoincrement=True,
    )
    unresolved = sa.text("resolved_at IS NULL")
    op.create_index(
        "ix_consumer_letter_open",
        "consumer_letter",
        ["event_id"],
        postgresql_where=unresolved,
        sqlite_where=unresolved,
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("consumer_letter")
    for column in reversed(_columns()):
        op.drop_column("consumer", column.name)
