"""Indexes: of runs by the moment they ended, and of streams whose brokers were not where headgate has left them.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make them."""
    op.create_index("ix_dag_run_ended", "dag_run", ["ended_at", "id"])
    found = sa.text("found <> '[]'")
    op.create_index("ix_stream_drift_found", "stream_drift", ["stream_id"], postgresql_where=found, sqlite_where=found)


def downgrade() -> None:
    """Do without."""
    op.drop_index("ix_stream_drift_found", "stream_drift")
    op.drop_index("ix_dag_run_ended", "dag_run")
