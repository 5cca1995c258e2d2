"""Messages that are redriven: the trigger that gets them, and the index of those that are on their way.

Letters of messages that their producer could not decode are told apart, because no trigger can get these.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column and the index."""
    op.add_column("dead_letter", sa.Column("target_id", sa.BigInteger))
    where = sa.text("state = 'redriving'")
    columns = ["target_id", "id"]
    op.create_index("ix_dead_letter_redriving", "dead_letter", columns, postgresql_where=where, sqlite_where=where)
    op.execute(
        "UPDATE dead_letter SET content = 'undecoded' "
        "WHERE content = 'message' AND reason LIKE 'the message cannot be decoded%'"
    )


def downgrade() -> None:
    """Drop them; a message that was on its way is open again."""
    op.execute("UPDATE dead_letter SET content = 'message' WHERE content = 'undecoded'")
    op.execute("UPDATE dead_letter SET state = 'open', resolved_by = NULL, note = NULL WHERE state = 'redriving'")
    op.drop_index("ix_dead_letter_redriving", "dead_letter")
    op.drop_column("dead_letter", "target_id")
