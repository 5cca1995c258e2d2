"""When the steps of tasks ran, and the newest runs of watchers' triggers.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Make the tables. Nothing is known of what was before."""
    op.create_table(
        "task_span",
        sa.Column("task_instance_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("ended_at", MOMENT, nullable=False),
        sa.Column("try_number", sa.BigInteger(), nullable=False),
        sa.Column("ready_at", MOMENT, nullable=True),
        sa.Column("began_at", MOMENT, nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["task_instance_id"], ["task_instance.id"], name="fk_task_span_task_instance_id"),
        sa.PrimaryKeyConstraint("task_instance_id", "ended_at", name="pk_task_span"),
    )
    op.create_table(
        "trigger_run",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("trigger_id", sa.BigInteger(), nullable=False),
        sa.Column("trigger_run_id", sa.Text(), nullable=False),
        sa.Column("ended_at", MOMENT, nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("events", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_trigger_run"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_trigger_run_trigger", "trigger_run", ["trigger_id", "id"])


def downgrade() -> None:
    """Forget them."""
    op.drop_table("trigger_run")
    op.drop_table("task_span")
