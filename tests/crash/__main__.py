"""The crash tests: ``python -m tests.crash``, from the root of the repository.

Runs every mark with every fault on every database, with random kills between, and adds what it counted to
``docs/proof.md``. The exit code is 1 where anything failed. ``--minutes`` bounds it: what has begun is finished.
Ten thousand kills: ``--kills 10000``, or ``--repeat 20``, which is twenty times the matrix.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tests import proof
from tests.crash import proof as crash_proof
from tests.crash import server
from tests.crash.campaign import Result, counts
from tests.crash.databases import POSTGRES_URL, Databases
from tests.crash.matrix import Matrix, Plan, plans

from headgate.protocol.marks import MARKS
from headgate.supervisor import logs
from headgate.supervisor.config import Settings

KILLS = 400
WRITE_INTERVAL_S = 60.0  # a run of hours that is cut off loses no more of its counts than this
JOBS = 3  # pairs for two cores: each is waited for now and then


def main() -> int:
    """Run the command; return its exit code."""
    given = _parse()
    console = Console()
    # Like Ctrl-C: servers and databases of ours are not left behind, and what was counted is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Replays let the supervisor's core speak, of what was news when it was captured.
    logs.configure(msgspec.structs.replace(Settings(), log_level="critical"))
    started_at = time.monotonic()
    commit = proof.commit()
    dialects = [given.db] if given.db else ["sqlite", "postgresql"]
    version = _postgres_version() if "postgresql" in dialects else ""
    without_server = server.why_none() if version else ""
    todo = plans(dialects, given.mark, given.kills, given.seed, repeat=given.repeat, restarts=not without_server)
    folder = Path(tempfile.mkdtemp(prefix="headgate-crash-"))
    databases = Databases(folder)
    results: list[Result] = []
    versions = crash_proof.versions(version, without_server)
    earlier = crash_proof.Told() if given.afresh else crash_proof.earlier_in(given.proof)
    written_at = started_at

    def write() -> crash_proof.Told:
        took_s = time.monotonic() - started_at
        told = crash_proof.told_by(results, seed=given.seed, took_s=took_s, commit=commit, ended=proof.now())
        crash_proof.write(given.proof, crash_proof.together(earlier, told), versions)
        return told

    with _progress(console) as bar:
        task = bar.add_task("nothing lost", total=sum(plan.steps for plan in todo))

        def note(plan: Plan, some: list[Result]) -> None:
            nonlocal written_at
            results.extend(some)
            for result in some:
                if not result.is_good:
                    bar.print(str(result), markup=False)
            kills, found = sum(result.kills for result in results), counts(results)
            words = f"{kills:,} kills, {found['lost']} lost, {found['stored twice']} stored twice"
            bar.update(task, advance=plan.steps, description=words)
            if time.monotonic() - written_at >= WRITE_INTERVAL_S:
                written_at = time.monotonic()
                write()

        deadline = started_at + given.minutes * 60 if given.minutes else float("inf")
        try:
            matrix = Matrix(folder, databases, seed=given.seed, jobs=given.jobs)
            matrix.run(todo, note, is_over=lambda: time.monotonic() >= deadline)
        except KeyboardInterrupt:
            bar.print("cut short; what was counted is written")
        finally:
            databases.close()
    told = write()
    failed = [result for result in results if not result.is_good]
    kills_per_min = told.runs[0].kills / (time.monotonic() - started_at) * 60
    console.print(
        f"{len(results)} results, {len(failed)} failed; {kills_per_min:.0f} kills a minute, seed {given.seed}"
    )
    console.print(f"written to {given.proof}")
    if any(folder.iterdir()):
        console.print(f"histories, logs and captures of what failed are in {folder}")
    else:
        folder.rmdir()
    return 1 if failed else 0


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin nothing new after so many minutes")
    parser.add_argument("--kills", type=int, default=KILLS, help="random kills beside the matrix")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="the matrix so many times; 0: only kills")
    parser.add_argument("--mark", action="append", choices=sorted(MARKS), help="only this mark; may be repeated")
    parser.add_argument("--db", choices=["sqlite", "postgresql"], help="only this database")
    parser.add_argument("--jobs", type=int, default=JOBS, help="pairs at a time")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of kills and of moments")
    parser.add_argument("--proof", type=Path, default=proof.PATH, help="the document to add to")
    parser.add_argument("--afresh", action="store_true", help="forget the runs that the document tells of")
    return parser.parse_args()


def _postgres_version() -> str:
    with psycopg.connect(POSTGRES_URL) as connection:
        return str(connection.info.parameter_status("server_version"))


if __name__ == "__main__":
    sys.exit(main())
