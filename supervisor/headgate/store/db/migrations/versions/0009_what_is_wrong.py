"""Indexes of the few rows that `status` and the polls of supervisors look for among many.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

INDEXES = {
    "ix_trigger_failing": ("trigger", "id", "failure_count > 0"),
    "ix_trigger_left": ("trigger", "triggerer_id", "removed_at IS NOT NULL OR finished_at IS NOT NULL"),
    "ix_dag_run_failed": ("dag_run", "ended_at", "state = 'failed'"),
}


def upgrade() -> None:
    """Add the indexes."""
    for name, (table, column, condition) in INDEXES.items():
        where = sa.text(condition)
        op.create_index(name, table, [column], postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    """Drop them."""
    for name, (table, _, _) in INDEXES.items():
        op.drop_index(name, table)
