"""Triggers that a user has changed, until their owner has read them.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
INDEX = "ix_trigger_changed"


def upgrade() -> None:
    """Add the time of the change, and an index for polls."""
    op.add_column("trigger", sa.Column("changed_at", UTC, nullable=True))
    where = sa.text("changed_at IS NOT NULL")
    op.create_index(INDEX, "trigger", ["triggerer_id"], postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    """Drop them."""
    op.drop_index(INDEX, "trigger")
    op.drop_column("trigger", "changed_at")
