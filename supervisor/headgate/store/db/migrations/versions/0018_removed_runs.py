"""Runs that are deleted in pieces, and are not found any more meanwhile.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Add the column."""
    op.add_column("dag_run", sa.Column("removed_at", UTC))


def downgrade() -> None:
    """Drop it. A run of which a part is deleted is an ended run with the tasks that are left, until the next clean."""
    op.drop_column("dag_run", "removed_at")
