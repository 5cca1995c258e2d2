"""The audit: what users have done.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Make the table, and let the records of dead letters refer to it."""
    op.create_table(
        "audit",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), server_default=sa.text("'done'"), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    for column in ("object", "actor", "action"):
        op.create_index(f"ix_audit_{column}", "audit", [column, "id"])
    op.add_column("letter_action", sa.Column("audit_id", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Undo `upgrade`; what users have done is forgotten."""
    op.drop_column("letter_action", "audit_id")
    op.drop_table("audit")
