"""Streams of tasks whose events are elements, without a step.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("task_stream", sa.Column("elements", sa.Text()))


def downgrade() -> None:
    """Drop it. The events of such streams that come from now on are handled by steps."""
    op.drop_column("task_stream", "elements")
