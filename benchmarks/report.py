"""``docs/performance.md``: the machine and the tables, written by the command; the rest of it by hand.

A part that the command writes stands between two comments that name it. A benchmark that was not run keeps what its
part says, and each part names the commit it was measured on.
"""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import databases, nothing
from benchmarks.databases import add_triggers, fresh
from benchmarks.harness import Document, rendered
from benchmarks.pairs import ROOT

PATH = ROOT / "docs" / "performance.md"
COMMITS = 100  # of a single row, to measure the duration of a commit on this machine


def write(documents: Sequence[Document], path: Path = PATH) -> None:
    """Write the results into the document at ``path``, each benchmark into its own part."""
    text = path.read_text()
    text = _replaced(text, "machine", "\n".join(machine()))
    measured = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit `{commit()}`"
    for document in documents:
        size = "" if document.size == "full" else f", `--{document.size}`"
        body = f"```\n{rendered(document)}\n```\n\n{measured}{size}"
        text = _replaced(text, f"bench {document.bench}", body)
    path.write_text(text)


def _replaced(text: str, name: str, body: str) -> str:
    """Return the text with a new body of one part. Raises `ValueError` if there is no such part."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the document has no part {begin} ... {end}")
    return f"{text[: found.start()]}{begin}\n\n{body}\n\n{end}{text[found.end() :]}"


def machine() -> list[str]:
    """Return a few lines about the machine on which the figures were measured."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = " / ".join(f"{number:.1f}" for number in os.getloadavg())
    return [
        f"- {os.cpu_count()} processors ({_processor()}), {memory_gb:.0f} GB, Linux {platform.release()}",
        f"- load average when the tables were written: {load}",
        f"- Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
        + (f", PostgreSQL {version}" if (version := databases.postgresql_version()) else ""),
        *(
            f"- one durable commit of one row, {kind}, bare driver: {_commit_ms(kind):.2f} ms (median)"
            for kind in _kinds()
        ),
    ]


def _kinds() -> Sequence[str]:
    return ("sqlite", "postgresql") if databases.postgresql_answers() else ("sqlite",)


def _commit_ms(kind: str) -> float:
    with fresh(kind) as database:
        add_triggers(database, "nobody.Loads", [{}])
        return statistics.median(nothing.commit_moments_s(database, COMMITS)) * 1000


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """Return the commit of the running tree, marked if the tree has uncommitted changes."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    # The document itself is being written, and is not code.
    return f"{name}, with changes that are not committed" if git("status", "--porcelain", "--", ".", ":!docs") else name
