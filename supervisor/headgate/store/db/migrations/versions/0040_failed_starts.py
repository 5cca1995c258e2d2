"""A rule remembers how many starts of its task had failed when it started it once more, with the error of the last.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
INDEX = "ix_signal_wait_failed"
WHERE = sa.text("failed_at IS NOT NULL")


def upgrade() -> None:
    """Add them. Of starts that had failed before nothing is known."""
    op.add_column("signal_wait", sa.Column("failed_starts", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.add_column("signal_wait", sa.Column("failed_at", MOMENT, nullable=True))
    op.add_column("signal_wait", sa.Column("failed_error", sa.Text(), nullable=True))
    op.create_index(INDEX, "signal_wait", ["failed_at"], postgresql_where=WHERE, sqlite_where=WHERE)


def downgrade() -> None:
    """Drop them."""
    op.drop_index(INDEX, table_name="signal_wait")
    op.drop_column("signal_wait", "failed_error")
    op.drop_column("signal_wait", "failed_at")
    op.drop_column("signal_wait", "failed_starts")
