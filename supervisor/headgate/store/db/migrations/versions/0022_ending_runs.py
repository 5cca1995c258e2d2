"""Runs that begin nothing more because a user has ended them.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("dag_run", sa.Column("is_ending", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    """Drop it. A run that was to end goes on, and its tasks are started by signals again."""
    op.drop_column("dag_run", "is_ending")
