"""An index of runs by the moment they ended.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make it."""
    op.create_index("ix_dag_run_ended", "dag_run", ["ended_at", "id"])


def downgrade() -> None:
    """Do without."""
    op.drop_index("ix_dag_run_ended", "dag_run")
