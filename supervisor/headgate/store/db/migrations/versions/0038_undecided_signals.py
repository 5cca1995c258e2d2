"""A rule remembers how many signals users' code could not decide about, and when the last of them was given up.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
INDEX = "ix_signal_wait_undecided"
WHERE = sa.text("undecided_at IS NOT NULL")


def upgrade() -> None:
    """Add both. Of those that were given up before nobody knows when that was."""
    op.add_column("signal_wait", sa.Column("undecided", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.add_column("signal_wait", sa.Column("undecided_at", MOMENT, nullable=True))
    op.create_index(INDEX, "signal_wait", ["undecided_at"], postgresql_where=WHERE, sqlite_where=WHERE)


def downgrade() -> None:
    """Drop them."""
    op.drop_index(INDEX, table_name="signal_wait")
    op.drop_column("signal_wait", "undecided_at")
    op.drop_column("signal_wait", "undecided")
