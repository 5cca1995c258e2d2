"""The index of a task among those that were expanded from one, and the indexes by which runs and tasks are looked at.

SQLite cannot drop a unique constraint, so there the table is made anew and its rows are copied. The caller has switched
foreign keys off, because SQLite would otherwise delete the rows that refer to the table together with it, and checks
all of them before the commit (`headgate.store.db.schema`). PostgreSQL alters the table in place.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0011"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")

TABLE = "task_instance"
COPY = "task_instance_copy"
NEW_COLUMNS = ("map_index", "map_name")
# In this order a range of it has the tasks of a run that are not mapped, however many instances the mapped ones have.
UNIQUE = ("dag_run_id", "map_index", "task_id")
UNIQUE_BEFORE = ("dag_run_id", "task_id")
MAP_INDEX_CHECK = "map_index >= -1"
TASK_STATES = (
    *("none", "scheduled", "running", "deferred", "up_for_retry", "restarting"),
    *("success", "failed", "skipped", "upstream_failed", "removed"),
)
OTHER_INDEXES = (
    ("ix_task_instance_retry", ["retry_at"], "retry_at IS NOT NULL", False),
    ("ix_task_instance_timeout", ["trigger_timeout"], "state = 'deferred'", False),
    ("uq_task_instance_trigger", ["trigger_id"], "trigger_id IS NOT NULL", True),
    ("ix_task_instance_owner", ["triggerer_id"], "triggerer_id IS NOT NULL", False),
    ("ix_task_instance_event", ["event_id"], "event_id IS NOT NULL", False),
)


def upgrade() -> None:
    """Add the columns, and replace the unique constraint and the index of scheduled tasks."""
    if op.get_context().dialect.name == "sqlite":
        _rebuild(is_mapped=True)
    else:
        op.add_column(TABLE, _map_index())
        op.add_column(TABLE, sa.Column("map_name", sa.Text()))
        op.create_check_constraint("ck_task_instance_map_index", TABLE, MAP_INDEX_CHECK)
        op.drop_constraint(_name_of(UNIQUE_BEFORE), TABLE)
        op.create_unique_constraint(_name_of(UNIQUE), TABLE, UNIQUE)
        op.drop_index("ix_task_instance_scheduled", TABLE)
    _index("ix_task_instance_look", ["dag_run_id", "task_id", "state", "map_index"], "map_index >= 0")
    urgency = ["pool", "queue", sa.text("(next_method IS NOT NULL) DESC"), sa.text("priority_weight DESC"), "id"]
    _index("ix_task_instance_scheduled", urgency, "state = 'scheduled'")


def downgrade() -> None:
    """Delete the instances of mapped tasks, for which the older table has no place, and what is new."""
    op.execute("DELETE FROM xcom WHERE task_instance_id IN (SELECT id FROM task_instance WHERE map_index >= 0)")
    op.execute("DELETE FROM task_instance WHERE map_index >= 0")
    if op.get_context().dialect.name == "sqlite":
        _rebuild(is_mapped=False)
    else:
        op.drop_index("ix_task_instance_look", TABLE)
        op.drop_index("ix_task_instance_scheduled", TABLE)
        op.drop_constraint(_name_of(UNIQUE), TABLE)
        op.create_unique_constraint(_name_of(UNIQUE_BEFORE), TABLE, UNIQUE_BEFORE)
        op.drop_constraint("ck_task_instance_map_index", TABLE)
        for column in NEW_COLUMNS:
            op.drop_column(TABLE, column)
    _index("ix_task_instance_scheduled", ["pool", "queue", "priority_weight", "id"], "state = 'scheduled'")


# --- SQLite --------------------------------------------------------------------------------------


def _rebuild(*, is_mapped: bool) -> None:
    """Copy the table into one with the other definition, which takes its place and its name."""
    connection = op.get_bind()
    assert not connection.scalar(sa.text("PRAGMA foreign_keys")), "rows that refer to the table would be deleted"
    columns = [column.name for column in _columns_before()]
    _make_copy(is_mapped=is_mapped)
    listed = ", ".join(columns)
    op.execute(f"INSERT INTO {COPY} ({listed}) SELECT {listed} FROM {TABLE} ORDER BY id")
    # The next id is above all that were ever given, also to rows that are deleted by now.
    op.execute(f"DELETE FROM sqlite_sequence WHERE name = '{COPY}'")
    op.execute(
        f"INSERT INTO sqlite_sequence (name, seq) SELECT '{COPY}', seq FROM sqlite_sequence WHERE name = '{TABLE}'"
    )
    op.drop_table(TABLE)
    op.rename_table(COPY, TABLE)
    for name, of, where, is_unique in OTHER_INDEXES:
        _index(name, of, where, unique=is_unique)


def _make_copy(*, is_mapped: bool) -> None:
    states = ", ".join(f"'{state}'" for state in TASK_STATES)
    new: list[sa.schema.SchemaItem] = []
    if is_mapped:
        check = sa.CheckConstraint(MAP_INDEX_CHECK, name="ck_task_instance_map_index")
        new = [_map_index(), sa.Column("map_name", sa.Text()), check]
    unique = UNIQUE if is_mapped else UNIQUE_BEFORE
    op.create_table(
        COPY,
        *_columns_before(),
        *new,
        sa.PrimaryKeyConstraint("id", name="pk_task_instance"),
        sa.ForeignKeyConstraint(["dag_run_id"], ["dag_run.id"], name="fk_task_instance_dag_run_id"),
        sa.ForeignKeyConstraint(["trigger_id"], ["trigger.id"], name="fk_task_instance_trigger_id"),
        sa.ForeignKeyConstraint(["event_id"], ["trigger_event.id"], name="fk_task_instance_event_id"),
        sa.ForeignKeyConstraint(["triggerer_id"], ["triggerer.id"], name="fk_task_instance_triggerer_id"),
        sa.UniqueConstraint(*unique, name=_name_of(unique)),
        sa.CheckConstraint(f"state IN ({states})", name="ck_task_instance_state"),
        _check_only("trigger", "state = 'deferred'", "trigger_id"),
        _check_only("owner", "state IN ('running', 'restarting')", "triggerer_id"),
        _check_only("retry", "state = 'up_for_retry'", "retry_at"),
        _check_only("token", "state IN ('running', 'restarting', 'deferred')", "token"),
        sqlite_autoincrement=True,
    )


def _columns_before() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("dag_run_id", BIG_ID, nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'none'"), nullable=False),
        sa.Column("try_number", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("tries_max", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.Text()),
        sa.Column("trigger_id", BIG_ID),
        sa.Column("next_method", sa.Text()),
        sa.Column("next_kwargs", sa.Text()),
        sa.Column("event_id", BIG_ID),
        *[sa.Column(name, UTC) for name in ("trigger_timeout", "deadline", "retry_at")],
        sa.Column("triggerer_id", BIG_ID),
        sa.Column("retries", sa.BigInteger(), nullable=False),
        sa.Column("retry_delay_s", sa.Double(), nullable=False),
        sa.Column("retry_exponential_backoff", sa.Boolean(), nullable=False),
        sa.Column("max_retry_delay_s", sa.Double()),
        sa.Column("execution_timeout_s", sa.Double()),
        sa.Column("priority_weight", sa.BigInteger(), nullable=False),
        sa.Column("queue", sa.Text(), server_default=sa.text("'default'"), nullable=False),
        sa.Column("pool", sa.Text(), server_default=sa.text("'default_pool'"), nullable=False),
        sa.Column("pool_slots", sa.BigInteger(), nullable=False),
        sa.Column("created_date", UTC, nullable=False),
        *[sa.Column(name, UTC) for name in ("scheduled_at", "started_at", "ended_at")],
        sa.Column("last_error", sa.Text()),
    ]


# --- both ----------------------------------------------------------------------------------------


def _map_index() -> sa.Column[int]:
    return sa.Column("map_index", sa.BigInteger(), server_default=sa.text("-1"), nullable=False)


def _name_of(unique: tuple[str, ...]) -> str:
    return "_".join(("uq", TABLE, *unique))


def _check_only(name: str, condition: str, column: str) -> sa.CheckConstraint:
    """Return the rule that ``column`` has a value while ``condition`` holds, and at no other time."""
    return sa.CheckConstraint(f"({condition}) = ({column} IS NOT NULL)", name=f"ck_task_instance_{name}")


def _index(name: str, columns: Sequence[Any], where: str, *, unique: bool = False) -> None:
    """Make an index over the rows for which ``where`` holds."""
    op.create_index(name, TABLE, columns, unique=unique, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
