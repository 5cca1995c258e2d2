"""Lists of runs and letters begin with the newest of a DAG, a state or a trigger, however many others there are.

The watchers of an asset are found without a look at all others.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

INDEXES = (
    ("ix_dag_run_newest", "dag_run", ["dag_id", "id"]),
    ("ix_dag_run_state", "dag_run", ["state", "id"]),
    ("ix_dead_letter_trigger", "dead_letter", ["trigger_id", "id"]),
    ("ix_dead_letter_state", "dead_letter", ["state", "id"]),
)


def upgrade() -> None:
    """Make the indexes."""
    for name, table, columns in INDEXES:
        op.create_index(name, table, columns)
    where = sa.text("asset_id IS NOT NULL")
    op.create_index("ix_asset_watcher_asset", "asset_watcher", ["asset_id"], postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_asset_watcher_asset", table_name="asset_watcher")
    for name, table, _ in INDEXES:
        op.drop_index(name, table_name=table)
