"""Watchers whose events are sent as signals.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

COLUMNS = ("signal_namespace", "signal_key")


def upgrade() -> None:
    """Add the columns."""
    for name in COLUMNS:
        op.add_column("asset_watcher", sa.Column(name, sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop the columns. The events of watchers are not sent as signals any more."""
    for name in COLUMNS:
        op.drop_column("asset_watcher", name)
