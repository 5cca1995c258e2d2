"""Tasks that wait for signals, and rules of tasks about them.

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
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


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
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("dag_run_id", sa.BigInteger(), nullable=False),
        sa.Column("trigger_id", BIG_ID, nullable=True),
        sa.Column("task_instance_id", BIG_ID, nullable=True),
        sa.Column("rule", sa.Text(), nullable=True),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("predicate", sa.LargeBinary(), nullable=True),
        sa.Column("seen_version", sa.BigInteger(), nullable=False),
        sa.Column("is_fresh", sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.Column("is_held", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("takes_each", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("every_s", sa.Double(), nullable=True),
        sa.Column("due_at", MOMENT, nullable=True),
        sa.Column("met_version", sa.BigInteger(), nullable=True),
        sa.Column("met_value", sa.LargeBinary(), nullable=True),
        sa.Column("met_at", MOMENT, nullable=True),
        sa.Column("met_id", sa.BigInteger(), nullable=True),
        sa.Column("start_version", sa.BigInteger(), nullable=True),
        sa.Column("start_value", sa.LargeBinary(), nullable=True),
        sa.Column("previous_version", sa.BigInteger(), nullable=True),
        sa.Column("previous_value", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["trigger_id"], ["trigger.id"], name="fk_signal_wait_trigger_id"),
        sa.ForeignKeyConstraint(["task_instance_id"], ["task_instance.id"], name="fk_signal_wait_task_instance_id"),
        sa.PrimaryKeyConstraint("id", name="pk_signal_wait"),
        sa.UniqueConstraint("trigger_id", name="uq_signal_wait_trigger_id"),
        sa.UniqueConstraint("task_instance_id", "rule", name="uq_signal_wait_task_instance_id_rule"),
        sa.CheckConstraint("(trigger_id IS NULL) <> (rule IS NULL)", name="ck_signal_wait_of_sensor_or_rule"),
        sa.CheckConstraint("(task_instance_id IS NULL) = (rule IS NULL)", name="ck_signal_wait_rule_of_task"),
        sqlite_autoincrement=True,
    )
    is_open = sa.text("NOT is_held OR met_version IS NOT NULL")
    columns = ["namespace", "key", "seen_version"]
    op.create_index("ix_signal_wait_key", "signal_wait", columns, postgresql_where=is_open, sqlite_where=is_open)
    for name, table, column, where in (
        ("ix_signal_key_unseen", "signal_key", "id", "is_unseen"),
        ("ix_signal_wait_fresh", "signal_wait", "id", "is_fresh"),
        ("ix_signal_wait_due", "signal_wait", "due_at", "due_at IS NOT NULL"),
        ("ix_signal_wait_rule", "signal_wait", "dag_run_id", "rule IS NOT NULL"),
    ):
        condition = sa.text(where)
        op.create_index(name, table, [column], postgresql_where=condition, sqlite_where=condition)


def downgrade() -> None:
    """Drop the tables. A task that waits for a signal waits until its timeout, or until it is cleared or marked."""
    op.drop_table("signal_wait")
    op.drop_table("signal_start")
    op.drop_index("ix_signal_key_unseen", "signal_key")
    op.drop_column("signal_key", "is_unseen")
