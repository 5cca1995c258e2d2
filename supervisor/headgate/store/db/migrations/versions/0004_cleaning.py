"""Which task an event resumed: the database looks before it deletes an event. And how many workers a supervisor has.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

NAME = "ix_task_instance_event"


def upgrade() -> None:
    """Add the index and the column. Supervisors that are there already count as running triggers alone."""
    op.add_column("triggerer", sa.Column("workers", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    where = sa.text("event_id IS NOT NULL")
    op.create_index(NAME, "task_instance", ["event_id"], postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    """Drop them."""
    op.drop_column("triggerer", "workers")
    op.drop_index(NAME, "task_instance")
