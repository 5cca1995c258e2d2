"""The document that says what was proven, written from results by the command and by nobody else."""

from __future__ import annotations

import platform
import sqlite3
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.crash.campaign import FAULTS, Result, counts, is_possible

from headgate.protocol.marks import MARKS

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Run:
    """What is true of the whole run."""

    command: str
    seed: int
    took_s: float
    dialects: tuple[str, ...]
    is_complete: bool
    postgres_version: str


def commit() -> str:
    """Name the commit of the tree that runs, and say so where the tree is not that commit."""
    revision = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    name = subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    # The document itself is being written, and says nothing of the code.
    status = ["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!docs/proof.md"]
    changes = subprocess.run(status, capture_output=True, text=True, check=False).stdout.strip()
    return f"{name}, with changes that are not committed" if changes else name


def write(path: Path, run: Run, results: list[Result]) -> None:
    """Write the document."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(_lines(run, results)) + "\n")


def _lines(run: Run, results: list[Result]) -> Iterable[str]:
    found = counts(results)
    cells = [result for result in results if result.mark in MARKS]
    kills = sum(result.kills for result in results)
    failed = [result for result in results if not result.is_good]
    reached = {result.mark for result in cells if not result.error}
    yield "# Proof"
    yield ""
    yield f"Written by `{run.command}`, and by nobody's hand. What is counted, and how, is told below."
    yield ""
    yield f"- {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, seed {run.seed}, {run.took_s / 60:.0f} minutes"
    yield f"- commit `{commit()}`"
    yield (
        f"- Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
        f"{f'PostgreSQL {run.postgres_version}' if run.postgres_version else 'without PostgreSQL'}"
    )
    if not run.is_complete:
        yield "- **The run was cut short**: not every cell of the matrix was run."
    yield (
        f"- {kills:,} processes killed, in {len(cells):,} cells and {len(results) - len(cells):,} stretches of random "
        f"kills; {sum(result.events for result in results):,} events written; "
        f"{len(reached)} of {len(MARKS)} marks reached"
    )
    yield f"- {sum(result.redelivered for result in results):,} events redelivered, and recognised"
    yield "- " + ", ".join(f"**{count:,} {kind}**" for kind, count in found.items() if "resumed" not in kind)
    yield f"- {len(failed)} cells failed"
    yield ""
    yield from _table(run, results)
    yield from _random(results)
    yield from _marks()
    yield from _failures(failed)


def _table(run: Run, results: list[Result]) -> Iterable[str]:
    yield "## Mark by fault"
    yield ""
    yield (
        "A process is held at the mark, the fault is done there, and everything settles. A cell says: runs / "
        "redelivered / lost / stored twice. With 1 and with 3 subscribers, on each database. A dash: there is no "
        "such cell (SQLite has no connection to drop; where there is no runner none is killed)."
    )
    yield ""
    yield "| mark | " + " | ".join(FAULTS) + " |"
    yield "|---|" + "---|" * len(FAULTS)
    for mark in MARKS:
        row = []
        for fault in FAULTS:
            ran = [result for result in results if (result.mark, result.fault) == (mark, fault)]
            if not any(is_possible(mark, fault, dialect) for dialect in run.dialects):
                row.append("-")
            elif not ran:
                row.append("not run")
            else:
                row.append(_cell(ran))
        yield f"| `{mark}` | " + " | ".join(row) + " |"
    yield ""


def _cell(ran: list[Result]) -> str:
    found = counts(ran)
    redelivered = sum(result.redelivered for result in ran)
    text = f"{len(ran)} / {redelivered} / {found['lost']} / {found['stored twice']}"
    bad = sum(not result.is_good for result in ran)
    return f"{text} **{bad} failed**" if bad else text


def _random(results: list[Result]) -> Iterable[str]:
    yield "## Random kills"
    yield ""
    yield "| database | subscribers | kills | events | redelivered | lost | stored twice |"
    yield "|---|---|---|---|---|---|---|"
    stretches = [result for result in results if result.mark == "random"]
    for dialect, subscribers in sorted({(result.dialect, result.subscribers) for result in stretches}):
        ran = [r for r in stretches if (r.dialect, r.subscribers) == (dialect, subscribers)]
        found = counts(ran)
        numbers = [sum(r.kills for r in ran), sum(r.events for r in ran), sum(r.redelivered for r in ran)]
        numbers += [found["lost"], found["stored twice"]]
        yield f"| {dialect} | {subscribers} | " + " | ".join(f"{number:,}" for number in numbers) + " |"
    yield ""


def _marks() -> Iterable[str]:
    yield "## What the marks mean, and how it is counted"
    yield ""
    yield from (f"- `{name}` ({mark.side}): {mark.meaning}" for name, mark in MARKS.items())
    yield ""
    yield (
        "The truth is read from outside: the log files, the file of committed offsets, a journal that the producer "
        "keeps of what it hands out and advances, and the tables, in this order; once while the process stands at the "
        "mark, once when everything has come to rest. `headgate.testing.history` judges it; it imports nothing of "
        "headgate. A mark that is not reached, a pair that does not settle, a dead letter, an orphan, a wrong exit "
        "code: each fails its cell."
    )
    yield ""


def _failures(failed: list[Result]) -> Iterable[str]:
    if not failed:
        return
    yield "## What failed"
    yield ""
    for result in failed:
        yield "```"
        yield str(result)
        yield "```"
        yield ""
