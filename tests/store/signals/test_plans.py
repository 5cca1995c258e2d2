"""Rules of ended runs stay: statements about open ones do not read them, however many there are for one key."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql.compiler import SQLCompiler

from headgate.store.db.prepared import Prepared
from headgate.store.signals import sending, waits
from headgate.store.tables import metadata


@pytest.mark.parametrize(
    ("prepared", "values"),
    [
        (waits._PENDING, {"limit": 1}),
        (waits._UNMARK, {"of_id": 1}),
        (sending._SEEN, {"namespace": "default", "key": "go"}),
    ],
)
def test_open_rows_are_found_by_their_index(prepared: Prepared, values: dict[str, Any]) -> None:
    engine = sa.create_engine("sqlite://")
    metadata.create_all(engine)
    statement = next(one for one in vars(prepared).values() if isinstance(one, sa.ClauseElement))
    compiled = statement.compile(dialect=sqlite.dialect())
    assert isinstance(compiled, SQLCompiler)
    assert compiled.positiontup is not None
    parameters = tuple({**compiled.params, **values}[name] for name in compiled.positiontup)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}", parameters).all()
    plan = [row[3] for row in rows]
    assert any("signal_wait USING INDEX ix_signal_wait_key" in step for step in plan), plan
