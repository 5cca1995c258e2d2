"""Tasks remember the worker that still has them after a user, or a signal, has ended them.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

TABLE = "task_instance"
INDEX = "ix_task_instance_old_owner"
WHERE = sa.text("old_owner_id IS NOT NULL")


def upgrade() -> None:
    """Add the columns."""
    op.add_column(TABLE, sa.Column("old_token", sa.Text()))
    op.add_column(TABLE, sa.Column("old_owner_id", sa.BigInteger()))
    op.create_index(INDEX, TABLE, ["old_owner_id"], sqlite_where=WHERE, postgresql_where=WHERE)


def downgrade() -> None:
    """Drop them. A task that was ended and cleared may have two workers for a moment."""
    op.drop_index(INDEX, TABLE)
    for name in ("old_owner_id", "old_token"):
        op.drop_column(TABLE, name)
