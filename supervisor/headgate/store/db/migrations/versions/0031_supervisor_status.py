"""What supervisors say of themselves.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "supervisor_status",
        sa.Column("triggerer_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("figures", sa.Text(), nullable=False),
        sa.CheckConstraint("length(figures) <= 32768", name="ck_supervisor_status_figures_chars"),
        sa.ForeignKeyConstraint(["triggerer_id"], ["triggerer.id"], name="fk_supervisor_status_triggerer_id"),
        sa.PrimaryKeyConstraint("triggerer_id", name="pk_supervisor_status"),
    )


def downgrade() -> None:
    """Forget it."""
    op.drop_table("supervisor_status")
