"""The tables of tasks.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")

TASK_STATES = (
    *("none", "scheduled", "running", "deferred", "up_for_retry", "restarting"),
    *("success", "failed", "skipped", "upstream_failed", "removed"),
)


def upgrade() -> None:
    """Make the tables."""
    _make_dag_tables()
    _make_task_instance_table()
    _make_value_tables()


def downgrade() -> None:
    """Drop the tables, and all that is in them."""
    for table in ("pool", "connection", "variable", "xcom", "task_instance", "dag_run", "import_error", "dag"):
        op.drop_table(table)


def _make_dag_tables() -> None:
    op.create_table(
        "dag",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("spec", sa.LargeBinary(), nullable=False),
        sa.Column("max_active_runs", sa.BigInteger(), nullable=False),
        sa.Column("is_paused", sa.Boolean(), nullable=False),
        sa.Column("created_date", UTC, nullable=False),
        sa.Column("parsed_at", UTC, nullable=False),
        sa.Column("removed_at", UTC, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_dag"),
        sa.UniqueConstraint("name", name="uq_dag_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "import_error",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("stored_at", UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_import_error"),
        sa.UniqueConstraint("file", name="uq_import_error_file"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "dag_run",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("dag_id", BIG_ID, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("run_type", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("logical_date", UTC, nullable=True),
        sa.Column("conf", sa.LargeBinary(), nullable=True),
        sa.Column("created_date", UTC, nullable=False),
        sa.Column("ended_at", UTC, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_dag_run"),
        sa.ForeignKeyConstraint(["dag_id"], ["dag.id"], name="fk_dag_run_dag_id"),
        sa.UniqueConstraint("dag_id", "run_id", name="uq_dag_run_dag_id_run_id"),
        sa.CheckConstraint("state IN ('running', 'success', 'failed')", name="ck_dag_run_state"),
        sa.CheckConstraint("run_type IN ('manual', 'scheduled', 'asset')", name="ck_dag_run_run_type"),
        sqlite_autoincrement=True,
    )
    _index("ix_dag_run_active", "dag_run", ["dag_id"], "ended_at IS NULL")


def _make_task_instance_table() -> None:
    states = ", ".join(f"'{state}'" for state in TASK_STATES)
    op.create_table(
        "task_instance",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("dag_run_id", BIG_ID, nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'none'"), nullable=False),
        sa.Column("try_number", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("tries_max", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.Text(), nullable=True),
        sa.Column("trigger_id", BIG_ID, nullable=True),
        sa.Column("next_method", sa.Text(), nullable=True),
        sa.Column("next_kwargs", sa.Text(), nullable=True),
        sa.Column("event_id", BIG_ID, nullable=True),
        *[sa.Column(name, UTC, nullable=True) for name in ("trigger_timeout", "deadline", "retry_at")],
        sa.Column("triggerer_id", BIG_ID, nullable=True),
        sa.Column("retries", sa.BigInteger(), nullable=False),
        sa.Column("retry_delay_s", sa.Double(), nullable=False),
        sa.Column("retry_exponential_backoff", sa.Boolean(), nullable=False),
        sa.Column("max_retry_delay_s", sa.Double(), nullable=True),
        sa.Column("execution_timeout_s", sa.Double(), nullable=True),
        sa.Column("priority_weight", sa.BigInteger(), nullable=False),
        sa.Column("queue", sa.Text(), server_default=sa.text("'default'"), nullable=False),
        sa.Column("pool", sa.Text(), server_default=sa.text("'default_pool'"), nullable=False),
        sa.Column("pool_slots", sa.BigInteger(), nullable=False),
        sa.Column("created_date", UTC, nullable=False),
        *[sa.Column(name, UTC, nullable=True) for name in ("scheduled_at", "started_at", "ended_at")],
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_task_instance"),
        sa.ForeignKeyConstraint(["dag_run_id"], ["dag_run.id"], name="fk_task_instance_dag_run_id"),
        sa.ForeignKeyConstraint(["trigger_id"], ["trigger.id"], name="fk_task_instance_trigger_id"),
        sa.ForeignKeyConstraint(["event_id"], ["trigger_event.id"], name="fk_task_instance_event_id"),
        sa.ForeignKeyConstraint(["triggerer_id"], ["triggerer.id"], name="fk_task_instance_triggerer_id"),
        sa.UniqueConstraint("dag_run_id", "task_id", name="uq_task_instance_dag_run_id_task_id"),
        sa.CheckConstraint(f"state IN ({states})", name="ck_task_instance_state"),
        _check_only("trigger", "state = 'deferred'", "trigger_id"),
        _check_only("owner", "state IN ('running', 'restarting')", "triggerer_id"),
        _check_only("retry", "state = 'up_for_retry'", "retry_at"),
        _check_only("token", "state IN ('running', 'restarting', 'deferred')", "token"),
        sqlite_autoincrement=True,
    )
    columns = ["pool", "queue", "priority_weight", "id"]
    _index("ix_task_instance_scheduled", "task_instance", columns, "state = 'scheduled'")
    _index("ix_task_instance_retry", "task_instance", ["retry_at"], "retry_at IS NOT NULL")
    _index("ix_task_instance_timeout", "task_instance", ["trigger_timeout"], "state = 'deferred'")
    _index("uq_task_instance_trigger", "task_instance", ["trigger_id"], "trigger_id IS NOT NULL", unique=True)
    _index("ix_task_instance_owner", "task_instance", ["triggerer_id"], "triggerer_id IS NOT NULL")


def _make_value_tables() -> None:
    op.create_table(
        "xcom",
        sa.Column("task_instance_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("stored_at", UTC, nullable=False),
        sa.PrimaryKeyConstraint("task_instance_id", "key", name="pk_xcom"),
        sa.ForeignKeyConstraint(["task_instance_id"], ["task_instance.id"], name="fk_xcom_task_instance_id"),
        sa.CheckConstraint("length(value) <= 49152", name="ck_xcom_value_bytes"),
    )
    for table in ("variable", "connection"):
        op.create_table(
            table,
            sa.Column("id", BIG_ID, nullable=False),
            sa.Column("name", sa.Text(), nullable=False),
            sa.Column("value", sa.Text(), nullable=False),
            sa.Column("description", sa.Text(), server_default=sa.text("''"), nullable=False),
            sa.Column("updated_at", UTC, nullable=False),
            sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
            sa.UniqueConstraint("name", name=f"uq_{table}_name"),
            sqlite_autoincrement=True,
        )
    op.create_table(
        "pool",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pool"),
        sa.UniqueConstraint("name", name="uq_pool_name"),
        sa.CheckConstraint("slots >= 0", name="ck_pool_slots"),
        sqlite_autoincrement=True,
    )


def _check_only(name: str, condition: str, column: str) -> sa.CheckConstraint:
    """Return the rule that ``column`` has a value while ``condition`` holds, and at no other time."""
    return sa.CheckConstraint(f"({condition}) = ({column} IS NOT NULL)", name=f"ck_task_instance_{name}")


def _index(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    """Make an index over the rows for which ``where`` holds."""
    op.create_index(name, table, columns, unique=unique, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
