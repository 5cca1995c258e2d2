"""One call of the command line in this process: what it printed, and how it left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from headgate.cli.main import main
from headgate.supervisor.logs import process_log


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
def call_database(call: Call, database_url: str) -> Callable[..., Called]:
    """Calls ``headgate`` on a database with tables and without rows, on both databases."""

    def run(*arguments: str) -> Called:
        return call("--db", database_url, *arguments)

    return run
