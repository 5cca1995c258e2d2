"""A mapped task keeps which values stood in the DAG file, and a stream the letter before which it does not go on.

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
    """Add both. Of tasks that were expanded before nobody knows; a stream goes on behind what was refused before."""
    op.add_column("task_instance", sa.Column("given_digest", sa.Text(), nullable=True))
    op.add_column("task_stream", sa.Column("refused_letter", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("task_stream", "refused_letter")
    op.drop_column("task_instance", "given_digest")
