"""What the scheduler goes by: runs that need a look, when a DAG is due, and the asset events it waits with.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")

DAG_COLUMNS = ("spec_hash", "next_interval_start", "next_run_at")
RUN_COLUMNS = ("needs_look", "data_interval_start", "data_interval_end", "started_at")


def upgrade() -> None:
    """Add the columns and the tables. Runs that have not ended are under way, and are looked at first of all."""
    op.add_column("dag", sa.Column("spec_hash", sa.Text(), server_default=sa.text("''"), nullable=False))
    for name in ("next_interval_start", "next_run_at"):
        op.add_column("dag", sa.Column(name, UTC, nullable=True))
    _index("ix_dag_next_run", "dag", ["next_run_at"], "next_run_at IS NOT NULL")
    op.add_column("dag_run", sa.Column("needs_look", sa.Boolean(), server_default=sa.false(), nullable=False))
    for name in ("data_interval_start", "data_interval_end", "started_at"):
        op.add_column("dag_run", sa.Column(name, UTC, nullable=True))
    op.execute(sa.text("UPDATE dag_run SET started_at = created_date"))
    run = sa.table("dag_run", sa.column("needs_look", sa.Boolean()), sa.column("ended_at"))
    op.execute(run.update().where(run.c.ended_at.is_(None)).values(needs_look=True))
    _index("ix_dag_run_look", "dag_run", ["id"], "needs_look")
    _make_asset_tables()
    op.add_column("trigger", sa.Column("priority", sa.BigInteger(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    """Drop them, and all that is in them."""
    op.drop_column("trigger", "priority")
    for table in ("dag_run_event", "waiting_event", "asset_subscription"):
        op.drop_table(table)
    op.drop_index("ix_dag_run_look", "dag_run")
    op.drop_index("ix_dag_next_run", "dag")
    for table, columns in (("dag_run", RUN_COLUMNS), ("dag", DAG_COLUMNS)):
        for name in columns:
            op.drop_column(table, name)


def _make_asset_tables() -> None:
    op.create_table(
        "asset_subscription",
        sa.Column("dag_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("asset_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("contract", sa.Text(), nullable=False),
        sa.Column("batch_seconds", sa.Double(), nullable=True),
        sa.Column("dropped", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("dag_id", "asset_id", name="pk_asset_subscription"),
        sa.ForeignKeyConstraint(["dag_id"], ["dag.id"], name="fk_asset_subscription_dag_id"),
        sa.ForeignKeyConstraint(["asset_id"], ["asset.id"], name="fk_asset_subscription_asset_id"),
    )
    op.create_index("ix_asset_subscription_asset", "asset_subscription", ["asset_id"])
    for table, owner in (("waiting_event", "dag"), ("dag_run_event", "dag_run")):
        op.create_table(
            table,
            sa.Column(f"{owner}_id", BIG_ID, autoincrement=False, nullable=False),
            sa.Column("trigger_event_id", BIG_ID, autoincrement=False, nullable=False),
            sa.Column("asset_id", BIG_ID, nullable=False),
            sa.Column("stored_at", UTC, nullable=False)
            if owner == "dag"
            else sa.Column("is_superseded", sa.Boolean(), server_default=sa.false(), nullable=False),
            sa.PrimaryKeyConstraint(f"{owner}_id", "trigger_event_id", name=f"pk_{table}"),
            sa.ForeignKeyConstraint([f"{owner}_id"], [f"{owner}.id"], name=f"fk_{table}_{owner}_id"),
            sa.ForeignKeyConstraint(["trigger_event_id"], ["trigger_event.id"], name=f"fk_{table}_trigger_event_id"),
            sa.ForeignKeyConstraint(["asset_id"], ["asset.id"], name=f"fk_{table}_asset_id"),
        )
        op.create_index(f"ix_{table}_event", table, ["trigger_event_id"])


def _index(name: str, table: str, columns: list[str], where: str) -> None:
    """Make an index over the rows for which ``where`` holds."""
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
