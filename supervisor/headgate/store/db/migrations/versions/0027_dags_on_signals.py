"""Runs that signals start and end: rules of DAGs and of runs, and the signals that have met those of DAGs.

A migration says what was true when it was written: it imports nothing of headgate, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0025"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")

RUN_TYPES = "run_type IN ('manual', 'scheduled', 'asset', 'signal')"
RUN_TYPES_BEFORE = "run_type IN ('manual', 'scheduled', 'asset')"
RULE_OF_TASK = "(task_instance_id IS NULL) = (rule IS NULL)"
CHECKS = {
    "task_has_rule": "task_instance_id IS NULL OR rule IS NOT NULL",
    "dag_has_rule": "dag_id IS NULL OR (rule IS NOT NULL AND task_instance_id IS NULL)",
    "of_dag_or_run": "(dag_id IS NULL) <> (dag_run_id IS NULL)",
}
# As SQLite keeps definitions.
BEFORE = ("dag_run_id BIGINT NOT NULL", f"CONSTRAINT ck_signal_wait_rule_of_task CHECK ({RULE_OF_TASK})")
AFTER = (
    "dag_run_id BIGINT, \n\tdag_id INTEGER",
    ", \n\t".join(
        (
            "CONSTRAINT uq_signal_wait_dag_id_rule UNIQUE (dag_id, rule)",
            "CONSTRAINT fk_signal_wait_dag_id FOREIGN KEY(dag_id) REFERENCES dag (id)",
            *(f"CONSTRAINT ck_signal_wait_{name} CHECK ({check})" for name, check in CHECKS.items()),
        )
    ),
)


def upgrade() -> None:
    """Make the table, and let rules belong to DAGs and to runs."""
    op.create_table(
        "dag_signal",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("dag_id", BIG_ID, nullable=False),
        sa.Column("wait_id", sa.BigInteger(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("sent_at", MOMENT, nullable=False),
        sa.Column("dag_run_id", BIG_ID, nullable=True),
        sa.Column("is_superseded", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(["dag_id"], ["dag.id"], name="fk_dag_signal_dag_id"),
        sa.ForeignKeyConstraint(["dag_run_id"], ["dag_run.id"], name="fk_dag_signal_dag_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_dag_signal"),
        sqlite_autoincrement=True,
    )
    waits = sa.text("dag_run_id IS NULL")
    columns = ["dag_id", "id"]
    op.create_index("ix_dag_signal_waiting", "dag_signal", columns, postgresql_where=waits, sqlite_where=waits)
    op.create_index("ix_dag_signal_run", "dag_signal", ["dag_run_id"])
    op.add_column("signal_wait", sa.Column("batch_seconds", sa.Double(), nullable=True))
    if op.get_context().dialect.name == "sqlite":
        _rebuild("dag_run", {RUN_TYPES_BEFORE: RUN_TYPES})
        _rebuild("signal_wait", dict(zip(BEFORE, AFTER, strict=True)))
        return
    op.drop_constraint("ck_dag_run_run_type", "dag_run")
    op.create_check_constraint("ck_dag_run_run_type", "dag_run", RUN_TYPES)
    op.add_column("signal_wait", sa.Column("dag_id", sa.BigInteger(), nullable=True))
    op.create_foreign_key("fk_signal_wait_dag_id", "signal_wait", "dag", ["dag_id"], ["id"])
    op.create_unique_constraint("uq_signal_wait_dag_id_rule", "signal_wait", ["dag_id", "rule"])
    op.alter_column("signal_wait", "dag_run_id", nullable=True)
    op.drop_constraint("ck_signal_wait_rule_of_task", "signal_wait")
    for name, check in CHECKS.items():
        op.create_check_constraint(f"ck_signal_wait_{name}", "signal_wait", check)


def downgrade() -> None:
    """Delete what signals wait for runs, and rules of DAGs and of runs. Runs that signals have started are by hand."""
    op.drop_table("dag_signal")
    op.drop_column("signal_wait", "batch_seconds")
    op.execute("DELETE FROM signal_wait WHERE rule IS NOT NULL AND task_instance_id IS NULL")
    op.execute("UPDATE dag_run SET run_type = 'manual' WHERE run_type = 'signal'")
    if op.get_context().dialect.name == "sqlite":
        _rebuild("dag_run", {RUN_TYPES: RUN_TYPES_BEFORE})
        _rebuild("signal_wait", dict(zip(AFTER, BEFORE, strict=True)))
        return
    op.drop_constraint("ck_dag_run_run_type", "dag_run")
    op.create_check_constraint("ck_dag_run_run_type", "dag_run", RUN_TYPES_BEFORE)
    for name in CHECKS:
        op.drop_constraint(f"ck_signal_wait_{name}", "signal_wait")
    op.drop_column("signal_wait", "dag_id")
    op.alter_column("signal_wait", "dag_run_id", nullable=False)
    op.create_check_constraint("ck_signal_wait_rule_of_task", "signal_wait", RULE_OF_TASK)


def _rebuild(table: str, changes: dict[str, str]) -> None:
    """Copy a table of SQLite into one whose definition has these changes, and which takes its place and its name."""
    connection = op.get_bind()
    assert not connection.scalar(sa.text("PRAGMA foreign_keys")), "rows that refer to the table would be deleted"
    of_table = sa.text("SELECT type, sql FROM sqlite_master WHERE tbl_name = :name AND sql IS NOT NULL")
    found = [(row.type, row.sql) for row in connection.execute(of_table, {"name": table})]
    (definition,) = (sql for kind, sql in found if kind == "table")
    columns = [row.name for row in connection.execute(sa.text(f"PRAGMA table_info({table})"))]
    for before, after in changes.items():
        assert before in definition, f"{table} is another one: {definition}"
        definition = definition.replace(before, after)
    head, body = definition.split("(", 1)
    assert head.split() in (["CREATE", "TABLE", table], ["CREATE", "TABLE", f'"{table}"']), head
    connection.exec_driver_sql(f"CREATE TABLE {table}_copy ({body}")
    kept = {row.name for row in connection.execute(sa.text(f"PRAGMA table_info({table}_copy)"))}
    listed = ", ".join(column for column in columns if column in kept)
    op.execute(f"INSERT INTO {table}_copy ({listed}) SELECT {listed} FROM {table} ORDER BY id")
    # The next id is above all that were ever given, also to rows that are deleted by now.
    op.execute(f"DELETE FROM sqlite_sequence WHERE name = '{table}_copy'")
    of_copy = f"SELECT '{table}_copy', seq FROM sqlite_sequence WHERE name = '{table}'"
    op.execute(f"INSERT INTO sqlite_sequence (name, seq) {of_copy}")
    op.drop_table(table)
    op.rename_table(f"{table}_copy", table)
    for sql in [sql for kind, sql in found if kind == "index"]:
        connection.exec_driver_sql(sql)
