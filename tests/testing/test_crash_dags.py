"""crash_test_dag finds a handler that repeats its rows after a kill; docs/testing.md has one that does not."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headgate.testing import DagCrashTestFailed, crash_test_dag

MODULE = """
import sqlite3
from contextlib import closing

from headgate.tasks import BaseOperator, Batch
from headgate.triggers.paging import Page, PagedTrigger


class Pages(PagedTrigger):
    def serialize(self):
        return "writing.Pages", {}

    async def fetch(self, cursor):
        first = cursor or 0
        return Page([first, first + 1], next=first + 2 if first < 10 else None)


class Write(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Pages(), stream=Batch(count=3, seconds=0.2), kwargs={})

    def handle_trigger_events(self, events, context):
        with closing(sqlite3.connect(context["params"]["database"], timeout=30)) as connection, connection:
            for event in events:
                for number, row in enumerate(event.payload["rows"]):
                    place = (context["run_id"], event.position, number)
                    connection.execute("INSERT INTO written VALUES (?, ?, ?, ?)", (*place, row))
"""
DAG = """
from datetime import timedelta

from writing import Write

from headgate.tasks import DAG

with DAG("write"):
    Write(task_id="write", retries=3, retry_delay=timedelta(0))
"""


def test_rows_that_are_written_again_are_found_with_the_kill(tmp_path: Path) -> None:
    database, dags = tmp_path / "rows.db", tmp_path / "dags"
    dags.mkdir()
    (tmp_path / "writing.py").write_text(MODULE)
    (dags / "write.py").write_text(DAG)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE written (run TEXT, position INTEGER, number INTEGER, row INTEGER)")

    def rows(run_id: str) -> list[int]:
        with closing(sqlite3.connect(database)) as connection:
            return [row for (row,) in connection.execute("SELECT row FROM written WHERE run = ?", [run_id])]

    with pytest.raises(
        DagCrashTestFailed, match=r"crash-0 \(killed: worker, worker.step_done\): .* too often"
    ) as caught:
        crash_test_dag(
            dags,
            "write",
            rows=rows,
            wanted=range(13),
            conf={"database": str(database)},
            kills=1,
            marks=["worker.step_done"],
            import_paths=[tmp_path],
            folder=tmp_path / "place",
        )
    report = caught.value.report
    assert report.missing == {"crash-0": {12: 1}}
    assert set(report.surplus["crash-0"]) <= set(range(12))
    assert report.failed == {}
