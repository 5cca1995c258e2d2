"""One call of the command line in this process: what it printed, and how it left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks, task_states

from headgate.cli.main import main
from headgate.protocol.messages.dags import TaskSpec
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.supervisor.logs import process_log

CHAIN = (TaskSpec("a", "Op"), TaskSpec("b", "Op", upstream=("a",)), TaskSpec("c", "Op", upstream=("b",)))


@dataclass(frozen=True)
class Called:
    """What one call came to."""

    code: int
    out: str
    err: str

    def rows(self) -> list[dict[str, Any]]:
        """The JSON lines it printed."""
        return [json.loads(line) for line in self.out.splitlines()]


class Call(Protocol):
    """Calls ``headgate`` with these arguments."""

    def __call__(self, *arguments: str) -> Called: ...


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of the test's own, and nothing of the settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("HEADGATE_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("HEADGATE_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    yield home
    process_log.reset()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls ``headgate`` on the default database of the test's home."""

    def run(*arguments: str) -> Called:
        code = main(arguments)
        written = capsys.readouterr()
        return Called(code, written.out, written.err)

    return run


@pytest.fixture
def call_database(call: Call, database_url: str, home: Path) -> Callable[..., Called]:
    """Calls ``headgate`` on a database with tables and without rows, on both databases, with a key file in the home."""
    Secrets.open(home, None, makes_file=True)

    def run(*arguments: str) -> Called:
        return call("--db", database_url, *arguments)

    return run


@pytest.fixture
def users_store(database_url: str, home: Path) -> Iterator[Store]:
    """A store beside the commands, with the keys they have."""
    home.mkdir(exist_ok=True)
    with Store(open_engine(database_url), secrets=Secrets.open(home, None, makes_file=True)) as store:
        yield store


@pytest.fixture
def etl(users_store: Store, query: Query) -> Tasks:
    """A DAG ``etl`` with the tasks ``a``, ``b``, ``c`` in a row, and a run ``r1`` of it that has begun."""
    tasks = Tasks(users_store, query, tasks=CHAIN)
    users_store.scheduling.plan(tasks.epoch)
    return tasks


def states(tasks: Tasks) -> str:
    """Return the states of the tasks of the run, by name."""
    found = task_states(tasks.store, tasks.run)
    return " ".join(found[name].value for name in sorted(found))
