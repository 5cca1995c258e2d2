"""A rule remembers when users' code has decided a stop, behind which it has decided a start that has not acted yet.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Add them."""
    op.add_column("signal_wait", sa.Column("stop_at", MOMENT, nullable=True))
    op.add_column("signal_wait", sa.Column("stop_id", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Drop them. A start behind a stop that has not acted yet is a restart."""
    op.execute("UPDATE signal_wait SET decided = 'RESTART' WHERE stop_at IS NOT NULL AND decided = 'START'")
    op.drop_column("signal_wait", "stop_id")
    op.drop_column("signal_wait", "stop_at")
