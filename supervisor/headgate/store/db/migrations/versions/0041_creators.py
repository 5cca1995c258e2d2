"""A run knows the task that asked for it, so that another task which names the same run is told that it is not its own.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it. Of runs that were created before nothing is known."""
    op.add_column("dag_run", sa.Column("creator", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("dag_run", "creator")
