"""Many rows, and how the databases find some among them: for tests that depend on no machine's speed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, text

from headgate.store.db.prepared import Prepared, driver_of

_COLUMNS = (
    "dag_run_id, task_id, map_index, state, next_method, priority_weight, "
    "tries_max, retries, retry_delay_s, retry_exponential_backoff, pool_slots, created_date"
)
_COPIED = "tries_max, retries, retry_delay_s, retry_exponential_backoff, pool_slots, created_date"


def insert_rows(engine: Engine, rows: int, values: str, **parameters: Any) -> None:
    """Insert so many tasks into the first run; PostgreSQL gets to know how many, as by its autovacuum.

    ``values`` are expressions for their first six columns, in which ``i`` counts from 1; the others are copied.
    """
    statement = (
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows) "
        f"INSERT INTO task_instance ({_COLUMNS}) "
        f"SELECT {values}, {_COPIED} FROM n, (SELECT * FROM task_instance ORDER BY id LIMIT 1) AS first"
    )
    with engine.begin() as connection:
        connection.execute(text(statement), {"rows": rows, **parameters})
    if engine.dialect.name == "sqlite":
        return  # it counts nothing by itself
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))


def plan_of(engine: Engine, statement: Prepared, **parameters: Any) -> str:
    """Return how the database carries out a statement, in its own words."""
    explain = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    with engine.begin() as connection:
        compiled = statement._for(connection.dialect)
        rows = driver_of(connection).execute(explain + compiled.text, compiled.arranged(parameters)).fetchall()
    return "\n".join(str(row[-1]) for row in rows)
