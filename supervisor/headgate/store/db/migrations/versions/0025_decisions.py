"""What users' code decides about signals, and rules about the time that are cron expressions.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def _columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("asks", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("ask_at", MOMENT, nullable=True),
        sa.Column("asked_by", sa.BigInteger(), nullable=True),
        sa.Column("asked_tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("decided", sa.Text(), nullable=True),
        sa.Column("decision_error", sa.Text(), nullable=True),
        sa.Column("cron", sa.Text(), nullable=True),
        sa.Column("timezone", sa.Text(), nullable=True),
    )


def upgrade() -> None:
    """Add the columns."""
    for column in _columns():
        op.add_column("signal_wait", column)
    is_asked = sa.text("ask_at IS NOT NULL")
    op.create_index("ix_signal_wait_ask", "signal_wait", ["ask_at"], postgresql_where=is_asked, sqlite_where=is_asked)


def downgrade() -> None:
    """Drop them. A signal that was not decided yet acts as its rule says, once more is sent under its key."""
    op.drop_index("ix_signal_wait_ask", "signal_wait")
    for column in _columns():
        op.drop_column("signal_wait", column.name)
