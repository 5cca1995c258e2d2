"""The first tables.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Make the tables."""
    _make_trigger_tables()
    _make_watcher_tables()
    _make_event_tables()
    _make_dead_letter_table()


def downgrade() -> None:
    """Drop the tables, and all that is in them."""
    for table in ("dead_letter", "redelivery", "trigger_event", "asset_watcher", "asset", "trigger", "triggerer"):
        op.drop_table(table)


def _make_trigger_tables() -> None:
    op.create_table(
        "triggerer",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("machine", sa.Text(), nullable=False),
        sa.Column("process_started", sa.Double(), nullable=False),
        sa.Column("capacity", sa.BigInteger(), nullable=False),
        sa.Column("queues", sa.Text(), nullable=False),
        sa.Column("started_at", UTC, nullable=False),
        sa.Column("latest_heartbeat", UTC, nullable=False),
        sa.Column("stopped_at", UTC, nullable=True),
        sa.Column("fenced_at", UTC, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_triggerer"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "trigger",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("classpath", sa.Text(), nullable=False),
        sa.Column("kwargs", sa.Text(), nullable=False),
        sa.Column("created_date", UTC, nullable=False),
        sa.Column("queue", sa.Text(), server_default=sa.text("'default'"), nullable=False),
        sa.Column("triggerer_id", BIG_ID, nullable=True),
        sa.Column("failure_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("last_failed_at", UTC, nullable=True),
        sa.Column("last_failed_run_id", sa.Text(), nullable=True),
        sa.Column("finished_at", UTC, nullable=True),
        sa.Column("removed_at", UTC, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_trigger"),
        sa.ForeignKeyConstraint(["triggerer_id"], ["triggerer.id"], name="fk_trigger_triggerer_id"),
        sqlite_autoincrement=True,
    )
    _index("ix_trigger_claim", "trigger", ["queue", "triggerer_id", "id"], "finished_at IS NULL AND removed_at IS NULL")
    _index("ix_trigger_owner", "trigger", ["triggerer_id"], "triggerer_id IS NOT NULL")


def _make_watcher_tables() -> None:
    op.create_table(
        "asset",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_date", UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_asset"),
        sa.UniqueConstraint("name", name="uq_asset_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "asset_watcher",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("asset_id", BIG_ID, nullable=True),
        sa.Column("trigger_id", BIG_ID, nullable=False),
        sa.Column("created_date", UTC, nullable=False),
        sa.Column("removed_at", UTC, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_asset_watcher"),
        sa.ForeignKeyConstraint(["asset_id"], ["asset.id"], name="fk_asset_watcher_asset_id"),
        sa.ForeignKeyConstraint(["trigger_id"], ["trigger.id"], name="fk_asset_watcher_trigger_id"),
        sa.UniqueConstraint("trigger_id", name="uq_asset_watcher_trigger_id"),
        sqlite_autoincrement=True,
    )
    _index("uq_asset_watcher_name", "asset_watcher", ["name"], "removed_at IS NULL", unique=True)


def _make_event_tables() -> None:
    op.create_table(
        "trigger_event",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("trigger_id", BIG_ID, nullable=False),
        sa.Column("trigger_run_id", sa.Text(), nullable=False),
        sa.Column("sequence_index", sa.BigInteger(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("is_last", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("stored_at", UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trigger_event"),
        sa.ForeignKeyConstraint(["trigger_id"], ["trigger.id"], name="fk_trigger_event_trigger_id"),
        sa.UniqueConstraint("trigger_run_id", "sequence_index", name="uq_trigger_event_trigger_run_id_sequence_index"),
        sa.CheckConstraint("length(key) <= 512", name="ck_trigger_event_key_chars"),
        sqlite_autoincrement=True,
    )
    _index("uq_trigger_event_key", "trigger_event", ["trigger_id", "key", "position"], "key IS NOT NULL", unique=True)
    op.create_index("ix_trigger_event_newest", "trigger_event", ["trigger_id", "id"])
    op.create_table(
        "redelivery",
        sa.Column("trigger_event_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("last_at", UTC, nullable=False),
        sa.PrimaryKeyConstraint("trigger_event_id", name="pk_redelivery"),
        sa.ForeignKeyConstraint(["trigger_event_id"], ["trigger_event.id"], name="fk_redelivery_trigger_event_id"),
    )


def _make_dead_letter_table() -> None:
    op.create_table(
        "dead_letter",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("trigger_id", sa.BigInteger(), nullable=False),
        sa.Column("trigger_run_id", sa.Text(), nullable=False),
        sa.Column("sequence_index", sa.BigInteger(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.Column("payload_head", sa.LargeBinary(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("payload_kept", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("stored_at", UTC, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_dead_letter"),
        sa.UniqueConstraint("trigger_run_id", "sequence_index", name="uq_dead_letter_trigger_run_id_sequence_index"),
        sqlite_autoincrement=True,
    )
    _index("uq_dead_letter_key", "dead_letter", ["trigger_id", "key", "position"], "key IS NOT NULL", unique=True)


def _index(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    """Make an index over the rows for which ``where`` holds."""
    op.create_index(name, table, columns, unique=unique, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
