"""Users of the pages, their sessions, and failures to log in.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "web_user",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("password", sa.Text(), nullable=False),
        sa.Column("created_date", MOMENT, nullable=False),
        sa.CheckConstraint("role IN ('viewer', 'operator', 'admin')", name="ck_web_user_role"),
        sa.PrimaryKeyConstraint("id", name="pk_web_user"),
        sa.UniqueConstraint("name", name="uq_web_user_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "web_session",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("user_id", BIG_ID, nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("began_at", MOMENT, nullable=False),
        sa.Column("used_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["web_user.id"], name="fk_web_session_user_id"),
        sa.PrimaryKeyConstraint("id", name="pk_web_session"),
        sa.UniqueConstraint("digest", name="uq_web_session_digest"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_web_session_user", "web_session", ["user_id"])
    op.create_table(
        "web_guess",
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("last_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("user", "address", name="pk_web_guess"),
    )


def downgrade() -> None:
    """Undo `upgrade`; the users have to be added again."""
    for table in ("web_guess", "web_session", "web_user"):
        op.drop_table(table)
