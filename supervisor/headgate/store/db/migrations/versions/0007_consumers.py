"""Consumers, whose place in the events of a watcher is stored. And watchers by name, those removed too.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Add the table and the indexes."""
    op.create_table(
        "consumer",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("watcher", sa.Text(), nullable=False),
        sa.Column("trigger_id", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("event_id", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("handed_over", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_date", UTC, nullable=False),
        sa.Column("moved_at", UTC, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_consumer"),
        sa.UniqueConstraint("name", name="uq_consumer_name"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_consumer_watcher", "consumer", ["watcher"])
    op.create_index("ix_asset_watcher_name", "asset_watcher", ["name", "trigger_id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_asset_watcher_name", "asset_watcher")
    op.drop_table("consumer")
