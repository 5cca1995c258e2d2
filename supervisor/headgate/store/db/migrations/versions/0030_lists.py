"""Lists of runs and letters begin with the newest of a DAG, a state or a trigger, however many others there are.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0027"
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


def downgrade() -> None:
    """Drop them."""
    for name, table, _ in INDEXES:
        op.drop_index(name, table_name=table)
