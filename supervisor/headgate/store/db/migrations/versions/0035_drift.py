"""How far headgate has come at the brokers of shared streams.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Make the table. Nothing is known of what was before."""
    op.create_table(
        "stream_drift",
        sa.Column("stream_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("progress", sa.Text(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("progress_at", MOMENT, nullable=True),
        sa.Column("found", sa.Text(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("asked_at", MOMENT, nullable=True),
        sa.Column("answered_at", MOMENT, nullable=True),
        sa.Column("report", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["stream_id"], ["stream.id"], name="fk_stream_drift_stream_id"),
        sa.PrimaryKeyConstraint("stream_id", name="pk_stream_drift"),
    )
    asked = sa.text("asked_at IS NOT NULL")
    op.create_index("ix_stream_drift_asked", "stream_drift", ["stream_id"], postgresql_where=asked, sqlite_where=asked)


def downgrade() -> None:
    """Forget it."""
    op.drop_table("stream_drift")
