"""A mapped task keeps which values stood in the DAG file when it was expanded.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it. Of tasks that were expanded before nobody knows."""
    op.add_column("task_instance", sa.Column("given_digest", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("task_instance", "given_digest")
