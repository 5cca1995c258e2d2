"""The log of signals.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "signal_key",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("last_version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_date", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_signal_key"),
        sa.UniqueConstraint("namespace", "key", name="uq_signal_key_namespace_key"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "signal",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("key_id", BIG_ID, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("dedup", sa.Text(), nullable=False),
        sa.Column("dag_run_id", sa.BigInteger(), nullable=True),
        sa.Column("sender", sa.Text(), nullable=False),
        sa.Column("sent_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["signal_key.id"], name="fk_signal_key_id"),
        sa.PrimaryKeyConstraint("id", name="pk_signal"),
        sa.UniqueConstraint("key_id", "version", name="uq_signal_key_id_version"),
        sa.UniqueConstraint("key_id", "dedup", name="uq_signal_key_id_dedup"),
        sa.CheckConstraint("length(value) <= 49152", name="ck_signal_value_bytes"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    """Drop the tables; no signal is left."""
    op.drop_table("signal")
    op.drop_table("signal_key")
