"""The streams of tasks.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "task_stream",
        sa.Column("task_instance_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("trigger_id", BIG_ID, nullable=False),
        sa.Column("handled_to", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("handled", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.Text(), nullable=True),
        sa.Column("contract", sa.Text(), nullable=False),
        sa.Column("batch_count", sa.BigInteger(), nullable=False),
        sa.Column("batch_s", sa.Double(), nullable=True),
        sa.Column("ahead", sa.BigInteger(), nullable=False),
        sa.Column("poison", sa.Text(), nullable=False),
        sa.Column("timeout_s", sa.Double(), nullable=True),
        sa.Column("due_at", UTC, nullable=True),
        sa.Column("one_by_one_to", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("ended_as", sa.Text(), nullable=True),
        sa.Column("ended_error", sa.Text(), nullable=True),
        sa.Column("ended_traceback", sa.Text(), nullable=True),
        sa.Column("ended_run", sa.Text(), nullable=True),
        sa.Column("reopens", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(["task_instance_id"], ["task_instance.id"], name="fk_task_stream_task_instance_id"),
        sa.ForeignKeyConstraint(["trigger_id"], ["trigger.id"], name="fk_task_stream_trigger_id"),
        sa.PrimaryKeyConstraint("task_instance_id", name="pk_task_stream"),
        sa.UniqueConstraint("trigger_id", name="uq_task_stream_trigger_id"),
        sa.CheckConstraint("ended_as IN ('returned', 'failed', 'event')", name="ck_task_stream_ended_as"),
        sa.CheckConstraint("(handled = 0) = (state IS NULL)", name="ck_task_stream_state"),
    )
    for name, column, where in (
        ("ix_task_stream_due", "due_at", "due_at IS NOT NULL"),
        ("ix_task_stream_reopens", "trigger_id", "reopens"),
    ):
        condition = sa.text(where)
        op.create_index(name, "task_stream", [column], postgresql_where=condition, sqlite_where=condition)


def downgrade() -> None:
    """Drop the table. A task that is in the middle of its stream begins anew when it is cleared."""
    op.drop_table("task_stream")
