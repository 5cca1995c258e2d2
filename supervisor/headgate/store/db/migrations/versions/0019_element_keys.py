"""Keys of elements, by which the same value is appended once.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

INDEX = "uq_element_key"
KEYED = sa.text("key_hash IS NOT NULL")


def upgrade() -> None:
    """Add the column, and its index."""
    op.add_column("element", sa.Column("key_hash", sa.LargeBinary()))
    columns = ["task_instance_id", "key_hash"]
    op.create_index(INDEX, "element", columns, unique=True, postgresql_where=KEYED, sqlite_where=KEYED)


def downgrade() -> None:
    """Drop the column. What is appended again is no longer known to be there."""
    op.drop_index(INDEX, "element")
    op.drop_column("element", "key_hash")
