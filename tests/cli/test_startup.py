"""What a supervisor and a runner import when they start: each of these is a part of the wait after a death."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Alembic migrates, rich draws tables, psycopg is for PostgreSQL, httpx2 for one trigger,
# importlib.metadata for a version that we know.
SUPERVISOR = ("headgate.supervisor.serve", ["alembic", "rich", "psycopg", "trio"])
RUNNER = ("headgate.runner.session", ["rich", "importlib.metadata", "httpx2", "sqlalchemy", "psycopg", "cryptography"])

PROGRAM = """
import importlib, sys
from headgate.protocol.startup import import_structlog
import_structlog()
importlib.import_module(sys.argv[1])
print(*(name for name in sys.argv[2:] if name in sys.modules))
from rich.console import Console
"""


@pytest.mark.parametrize(("module", "unwanted"), [SUPERVISOR, RUNNER])
def test_a_process_starts_without_what_it_does_not_need(module: str, unwanted: list[str]) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM, module, *unwanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
