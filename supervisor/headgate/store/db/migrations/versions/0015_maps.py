"""How many instances a mapped task is to have, and how many of them may run at once.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

TABLE = "task_instance"
COLUMNS = ("map_length", "active_max")


def upgrade() -> None:
    """Add the columns."""
    for name in COLUMNS:
        op.add_column(TABLE, sa.Column(name, sa.BigInteger()))


def downgrade() -> None:
    """Drop the columns."""
    for name in COLUMNS:
        op.drop_column(TABLE, name)
