"""Browsers that users have logged in with before.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "web_browser",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("user_id", BIG_ID, nullable=False),
        sa.Column("used_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["web_user.id"], name="fk_web_browser_user_id"),
        sa.PrimaryKeyConstraint("digest", name="pk_web_browser"),
    )
    op.create_index("ix_web_browser_user", "web_browser", ["user_id"])


def downgrade() -> None:
    """Undo `upgrade`: to all of them the next login is the first."""
    op.drop_table("web_browser")
