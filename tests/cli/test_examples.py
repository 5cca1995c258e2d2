"""``headgate examples``: what it copies, and that it leaves alone what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = [
    "daily_chain.py",
    "expand_pages.py",
    "load_pages.py",
    "poll_endpoint.py",
    "train_on_signals.py",
    "wait_for_file.py",
]

# Runs the command, then says what of users' code it has imported.
PROGRAM = """
import sys
from headgate.cli.main import main
assert main(["examples", "dags"]) == 0
print(*(name for name in sys.modules if name in ("headgate.examples", "headgate.tasks", "trio", "sqlalchemy")))
"""


def test_the_examples_are_copied_as_they_are(call: Any, tmp_path: Path) -> None:
    called = call("examples", "new/dags")

    assert (called.code, called.err) == (0, "")
    copied = sorted((tmp_path / "new" / "dags").iterdir())
    assert [path.name for path in copied] == NAMES
    originals = Path(__file__).parents[2] / "runner" / "headgate" / "examples"
    assert all(path.read_bytes() == (originals / path.name).read_bytes() for path in copied)
    assert called.out.splitlines()[-1] == "next: `headgate up --dags new/dags`"


def test_nothing_is_copied_over_what_is_there(call: Any, tmp_path: Path) -> None:
    mine = tmp_path / "wait_for_file.py"
    mine.write_text("# mine")

    called = call("examples", ".")

    assert called.code == 1
    assert "wait_for_file.py already" in called.err
    assert mine.read_text() == "# mine"
    assert [path.name for path in tmp_path.glob("*.py")] == [mine.name]


def test_a_file_is_no_folder(call: Any, tmp_path: Path) -> None:
    (tmp_path / "dags").touch()

    called = call("examples", "dags")

    assert (called.code, called.out) == (1, "")
    assert "dags" in called.err


def test_copying_imports_no_users_code(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
