"""The elements that tasks emit.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _of_task(table: str) -> tuple[sa.schema.SchemaItem, ...]:
    return (
        sa.Column("task_instance_id", BIG_ID, autoincrement=False, nullable=False),
        sa.ForeignKeyConstraint(["task_instance_id"], ["task_instance.id"], name=f"fk_{table}_task_instance_id"),
    )


def upgrade() -> None:
    """Add the tables."""
    op.add_column("task_instance", sa.Column("map_made", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.create_table(
        "emitter",
        *_of_task("emitter"),
        sa.Column("length", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("place", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("task_instance_id", name="pk_emitter"),
        sa.CheckConstraint("place <= length", name="ck_emitter_place"),
    )
    op.create_table(
        "element",
        *_of_task("element"),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("task_instance_id", "position", name="pk_element"),
        sa.CheckConstraint("length(value) <= 49152", name="ck_element_value_bytes"),
    )


def downgrade() -> None:
    """Drop the tables. What is expanded over elements has no values any more."""
    op.drop_table("element")
    op.drop_table("emitter")
    op.drop_column("task_instance", "map_made")
