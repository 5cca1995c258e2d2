"""Tasks that do not end by themselves, and the workers beside the pool that they get.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")
TABLE = "task_instance"
INDEX = "ix_task_instance_endless"
URGENCY = ("pool", "queue", sa.text("(next_method IS NOT NULL) DESC"), sa.text("priority_weight DESC"), "id")
WHERE = sa.text("state = 'scheduled' AND is_endless")


def upgrade() -> None:
    """Add the columns."""
    op.add_column(TABLE, sa.Column("is_endless", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column(TABLE, sa.Column("moves", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column(TABLE, sa.Column("begins_at", MOMENT))
    op.add_column(
        "triggerer", sa.Column("endless_workers", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )
    op.create_index(INDEX, TABLE, [*URGENCY], sqlite_where=WHERE, postgresql_where=WHERE)


def downgrade() -> None:
    """Drop them. An endless task that runs goes on as any other, and may lose its try."""
    op.drop_index(INDEX, TABLE)
    op.drop_column("triggerer", "endless_workers")
    for name in ("begins_at", "moves", "is_endless"):
        op.drop_column(TABLE, name)
