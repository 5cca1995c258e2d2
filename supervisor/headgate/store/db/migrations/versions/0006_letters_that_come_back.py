"""Dead letters with a state, the event that stands for each, and who did what to it.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")

MESSAGE = ["trigger_id", "key", "position"]
KEY_RULE = "uq_dead_letter_key"


def _letter_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("state", sa.Text(), server_default=sa.text("'open'"), nullable=False),
        sa.Column("edited_payload", sa.LargeBinary(), nullable=True),
        sa.Column("event_id", sa.BigInteger(), nullable=True),
        sa.Column("resolved_at", UTC, nullable=True),
        sa.Column("resolved_by", sa.Text(), nullable=True),
        sa.Column("note", sa.Text(), nullable=True),
    ]


def _index(name: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    condition = sa.text(where)
    op.create_index(name, "dead_letter", columns, unique=unique, postgresql_where=condition, sqlite_where=condition)


def upgrade() -> None:
    """Add the columns and the table. Letters of which only the head was kept have their message at the broker."""
    for column in _letter_columns():
        op.add_column("dead_letter", column)
    op.execute("UPDATE dead_letter SET state = 'at_broker' WHERE NOT payload_kept")
    op.drop_index(KEY_RULE, "dead_letter")
    _index(KEY_RULE, MESSAGE, "key IS NOT NULL AND resolved_at IS NULL", unique=True)
    _index("ix_dead_letter_resolved", MESSAGE, "key IS NOT NULL AND resolved_at IS NOT NULL")
    _index("ix_dead_letter_open", ["id"], "resolved_at IS NULL")
    op.create_table(
        "letter_action",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("letter_id", BIG_ID, nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("done_by", sa.Text(), nullable=False),
        sa.Column("done_at", UTC, nullable=False),
        sa.Column("note", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_letter_action"),
        sa.ForeignKeyConstraint(["letter_id"], ["dead_letter.id"], name="fk_letter_action_letter_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_letter_action_letter", "letter_action", ["letter_id"])


def downgrade() -> None:
    """Drop them. Of several letters of one message the older tables have room for one: the newest stays."""
    op.drop_table("letter_action")
    newer = "newer.trigger_id = old.trigger_id AND newer.key = old.key AND newer.position = old.position"
    op.execute(
        "DELETE FROM dead_letter WHERE id IN (SELECT old.id FROM dead_letter AS old "
        f"JOIN dead_letter AS newer ON {newer} AND newer.id > old.id)"
    )
    for name in ("ix_dead_letter_open", "ix_dead_letter_resolved", KEY_RULE):
        op.drop_index(name, "dead_letter")
    _index(KEY_RULE, MESSAGE, "key IS NOT NULL", unique=True)
    for column in reversed(_letter_columns()):
        op.drop_column("dead_letter", column.name)
