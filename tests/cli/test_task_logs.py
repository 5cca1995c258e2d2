"""``headgate tasks logs``: what was logged of a task, read as a user reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks
from tests.waiting import WITHIN_S

from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.ids import TryName
from headgate.store.store import Store
from headgate.supervisor.logs.task_logs import TaskLogs


@pytest.fixture
def etl(database_url: str, home: Path, query: Query) -> Any:
    """A run ``r1`` of the DAG ``etl`` with one task ``a``."""
    home.mkdir(exist_ok=True)
    with Store(open_engine(database_url), secrets=Secrets.open(home, None, makes_file=True)) as store:
        yield Tasks(store, query)


def write(home: Path, try_number: int, *events: str) -> None:
    logs = TaskLogs(home / "logs")
    for event in events:
        logs.write(TryName("etl", "r1", "a", try_number), {"event": event, "level": "info", "n": try_number})
    logs.close()


def test_the_log_of_each_try_is_printed_in_order(call_database: Any, etl: Tasks, home: Path) -> None:
    write(home, 1, "first\n  at line 2", "esc \x1b[31m")
    write(home, 2, "second")

    lines = call_database("tasks", "logs", "etl", "latest", "a").out.splitlines()

    assert [line for line in lines if line.startswith("---")] == ["--- try 1 ---", "--- try 2 ---"]
    assert lines[1].endswith("info     task       first n=1")
    assert lines[2].strip() == "at line 2"
    assert lines[3].endswith("esc \\x1b[31m n=1")
    rows = call_database("tasks", "logs", "etl", "r1", "a", "--try", "2", "--json").rows()
    assert [(row["event"], row["try_number"], row["source"]) for row in rows] == [("second", 2, "task")]


def test_a_traceback_is_printed_as_python_prints_it(call_database: Any, etl: Tasks, home: Path) -> None:
    own = '  File "/x/headgate/tasks/execution.py", line 1, in run_step\n    run()'
    users = '  File "dags/boom.py", line 4, in fails\n    raise ValueError("no")'
    logs = TaskLogs(home / "logs")
    text = f"Traceback (most recent call last):\n{own}\n{users}\nValueError: no"
    record = {"event": "failed", "level": "error", "traceback": text, "trigger_id": 7, "classpath": "a.B"}
    logs.write(TryName("etl", "r1", "a", 1), record)
    logs.close()

    lines = call_database("tasks", "logs", "etl", "r1", "a").out.splitlines()
    wide = call_database("tasks", "logs", "etl", "r1", "a", "--wide").out

    assert lines[1].endswith(" failed"), "without the ids of its trigger"
    assert lines[2:] == [
        "    Traceback (most recent call last):",
        '      File "dags/boom.py", line 4, in fails',
        '        raise ValueError("no")',
        "    ValueError: no",
    ]
    assert "run_step" in wide
    assert "trigger_id=7 classpath=a.B" in wide


def test_a_try_without_a_log_is_an_error(call_database: Any, etl: Tasks, home: Path) -> None:
    write(home, 1, "first")

    called = call_database("tasks", "logs", "etl", "r1", "a", "--try", "7")

    assert (called.code, called.out) == (1, "")
    assert "there is no log of try 7 of a; there are logs of: 1" in called.err


def test_a_log_that_was_begun_and_never_written_is_told(call_database: Any, etl: Tasks, home: Path) -> None:
    write(home, 1, "lost on a full disk")
    (file,) = (path for path in (home / "logs").rglob("*.jsonl"))
    file.write_bytes(b"")
    called = call_database("tasks", "logs", "etl", "r1", "a")
    assert (called.code, called.out) == (0, "")
    assert "has no record" in called.err


def test_a_task_without_a_log_says_where_it_was_looked_for(call_database: Any, etl: Tasks, home: Path) -> None:
    etl.plan()
    unbegun = call_database("tasks", "logs", "etl", "r1", "a")
    assert (unbegun.code, unbegun.err) == (1, "headgate: there is no log of a: it has not begun yet\n")
    etl.dispatch()
    called = call_database("tasks", "logs", "etl", "r1", "a")

    assert (called.code, called.out) == (1, "")
    assert f"there is no log of a in {home / 'logs'}; the task is running. Logs are on the machines" in called.err
    assert "did you mean a?" in call_database("tasks", "logs", "etl", "r1", "aa").err


def test_a_log_is_followed_until_the_task_has_ended(database_url: str, etl: Tasks, home: Path) -> None:
    write(home, 1, "before")
    command = [sys.executable, "-m", "headgate.cli", "--db", database_url]
    with subprocess.Popen(
        [*command, "tasks", "logs", "etl", "r1", "a", "--follow", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"HEADGATE_HOME": str(home)},
    ) as following:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["event"] == "before"
        write(home, 1, "while")
        assert json.loads(following.stdout.readline())["event"] == "while"
        write(home, 2, "again")
        assert json.loads(following.stdout.readline())["event"] == "again"
        assert etl.store.tasks.mark(etl.a, "success")
        assert following.stdout.read() == ""
        assert following.wait(WITHIN_S) == 0
