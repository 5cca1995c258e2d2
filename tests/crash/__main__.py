"""The crash tests: ``python -m tests.crash``, from the root of the repository.

Runs every mark with every fault on every database, with random kills between, and writes ``docs/proof.md``. The exit
code is 1 where anything failed. ``--minutes`` bounds it: what has begun is finished, and the document says that it
was cut short.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tests.crash import proof
from tests.crash.campaign import Result, counts
from tests.crash.matrix import POSTGRES_URL, Databases, Matrix, Plan, plans

from headgate.protocol.marks import MARKS

KILLS = 400
JOBS = 2  # a pair uses a core while it starts, and little else


def main() -> int:
    """Run the command; return its exit code."""
    given = _parse()
    console = Console()
    started_at = time.monotonic()
    version, dialects = "", [given.db] if given.db else ["sqlite", "postgresql"]
    if "postgresql" in dialects:
        version = _postgres_version()
    todo = plans(dialects, given.mark, given.kills, given.seed)
    folder = Path(tempfile.mkdtemp(prefix="headgate-crash-"))
    databases = Databases(folder, dialects)
    results: list[Result] = []
    ran: list[Plan] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("nothing lost", total=sum(plan.steps for plan in todo))

        def note(plan: Plan, some: list[Result]) -> None:
            ran.append(plan)
            results.extend(some)
            for result in some:
                if not result.is_good:
                    bar.print(result, markup=False)
            kills, found = sum(result.kills for result in results), counts(results)
            words = f"{kills:,} kills, {found['lost']} lost, {found['stored twice']} stored twice"
            bar.update(task, advance=plan.steps, description=words)

        deadline = started_at + given.minutes * 60 if given.minutes else float("inf")
        try:
            matrix = Matrix(folder, databases, seed=given.seed, jobs=given.jobs)
            matrix.run(todo, note, is_over=lambda: time.monotonic() >= deadline)
        finally:
            databases.close()
    took_s = time.monotonic() - started_at
    command = shlex.join(["python", "-m", "tests.crash", *sys.argv[1:]])
    is_complete = len(ran) == len(todo) and not given.mark
    run = proof.Run(command, given.seed, took_s, tuple(dialects), is_complete, version)
    proof.write(given.proof, run, results)
    failed = [result for result in results if not result.is_good]
    console.print(f"{len(results)} results, {len(failed)} failed; written to {given.proof}")
    if failed:
        console.print(f"histories, logs and captures of what failed are in {folder}")
    else:
        (folder / "migrated.db").unlink()
        folder.rmdir()
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin nothing new after so many minutes")
    parser.add_argument("--kills", type=int, default=KILLS, help="random kills beside the matrix")
    parser.add_argument("--mark", action="append", choices=sorted(MARKS), help="only this mark; may be repeated")
    parser.add_argument("--db", choices=["sqlite", "postgresql"], help="only this database")
    parser.add_argument("--jobs", type=int, default=JOBS, help="pairs at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the kills and of what is passed over before a mark")
    parser.add_argument("--proof", type=Path, default=proof.ROOT / "docs" / "proof.md", help="where to write")
    return parser.parse_args()


def _postgres_version() -> str:
    with psycopg.connect(POSTGRES_URL) as connection:
        return str(connection.info.parameter_status("server_version"))


if __name__ == "__main__":
    sys.exit(main())
