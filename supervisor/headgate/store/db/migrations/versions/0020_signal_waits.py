"""Tasks that wait for signals.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the tables."""
    op.add_column("signal_key", sa.Column("is_unseen", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table(
        "signal_start",
        sa.Column("dag_run_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["dag_run_id"], ["dag_run.id"], name="fk_signal_start_dag_run_id"),
        sa.PrimaryKeyConstraint("dag_run_id", "namespace", "key", name="pk_signal_start"),
    )
    op.create_table(
        "signal_wait",
        sa.Column("trigger_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("dag_run_id", sa.BigInteger(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=True),
        sa.Column("seen_version", sa.BigInteger(), nullable=False),
        sa.Column("is_fresh", sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.ForeignKeyConstraint(["trigger_id"], ["trigger.id"], name="fk_signal_wait_trigger_id"),
        sa.PrimaryKeyConstraint("trigger_id", name="pk_signal_wait"),
    )
    op.create_index("ix_signal_wait_key", "signal_wait", ["namespace", "key"])
    for name, table, column, where in (
        ("ix_signal_key_unseen", "signal_key", "id", "is_unseen"),
        ("ix_signal_wait_fresh", "signal_wait", "trigger_id", "is_fresh"),
    ):
        condition = sa.text(where)
        op.create_index(name, table, [column], postgresql_where=condition, sqlite_where=condition)


def downgrade() -> None:
    """Drop the tables. A task that waits for a signal waits until its timeout, or until it is cleared."""
    op.drop_table("signal_wait")
    op.drop_table("signal_start")
    op.drop_index("ix_signal_key_unseen", "signal_key")
    op.drop_column("signal_key", "is_unseen")
