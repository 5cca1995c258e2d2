"""The document ``docs/proof.md``: each command that proves something writes its own section.

A section is delimited by two comments that name it. Writing one leaves the others unchanged.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "proof.md"
# In the order of the document, each with its text before its command has run.
SECTIONS = {
    "crash": "## Crash tests\n\nNot run yet: `make crash`.",
    "harm crash": "## Crash tests of harm\n\nNot run yet: `make crash`.",
    "program crash": "## Crash tests of programs\n\nNot run yet: `make crash`.",
    "task crash": "## Crash tests of tasks\n\nNot run yet: `make crash`.",
    "stream crash": "## Crash tests of task streams\n\nNot run yet: `make crash`.",
    "map crash": "## Crash tests of mapped tasks\n\nNot run yet: `make crash`.",
    "signal crash": "## Crash tests of signals\n\nNot run yet: `make crash`.",
    "signals over gRPC": '## Signals over gRPC\n\nCounted by `make proof ARGS="-k remote_signals"`.',
    "simulation": "## Simulation\n\nNot run yet: `make simulate ARGS=--proof`.",
    "simulation of tasks": '## Simulation of tasks\n\nNot run yet: `make simulate ARGS="--tasks --proof"`.',
    "simulation of groups": '## Simulation of groups\n\nNot run yet: `make simulate ARGS="--groups --proof"`.',
    "simulation of signals": '## Simulation of signals\n\nNot run yet: `make simulate ARGS="--signals --proof"`.',
    "consumers": "## Consumers\n\nNot run yet: `make consumers ARGS=--proof`.",
    "brokers": "## Brokers\n\nNot run yet: `make brokers ARGS=--proof`.",
}
HEAD = """\
# Proof

What was counted last, written by the commands themselves and, but for signals over gRPC, by nobody's hand:
`make crash`, `make simulate SEEDS=N ARGS=--proof`, `make consumers ARGS=--proof` and `make brokers ARGS=--proof`. Each
section names its command, its commit and its date.
"""


def write(section: str, lines: Iterable[str], path: Path = PATH) -> None:
    """Replace one section of the document at ``path``; create the document if there is none."""
    assert section in SECTIONS, section
    text = path.read_text() if path.exists() else ""
    bodies = {name: _body(text, name) or empty for name, empty in SECTIONS.items()}
    bodies[section] = "\n".join(lines).strip()
    parts = [f"<!-- begin {name} -->\n\n{body}\n\n<!-- end {name} -->\n" for name, body in bodies.items()]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([HEAD, *parts]))


def section_of(path: Path, section: str) -> str:
    """Return the text of a section of the document at ``path``; empty if there is none."""
    return _body(path.read_text(), section) if path.exists() else ""


def _body(text: str, section: str) -> str:
    found = re.search(rf"<!-- begin {section} -->\n(.*?)<!-- end {section} -->", text, re.DOTALL)
    return found[1].strip() if found else ""


def commit() -> str:
    """Return the commit of this working tree, and whether the tree has changes on top of it."""
    revision = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    name = subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    # The document itself is being written, and says nothing of the code.
    status = ["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!docs/proof.md"]
    changes = subprocess.run(status, capture_output=True, text=True, check=False).stdout.strip()
    return f"{name}, with changes that are not committed" if changes else name


def now() -> str:
    """Return the date and the time in the format of the document."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
