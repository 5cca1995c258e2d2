"""The crash tests: ``python -m tests.proof.crash``, from the root of the repository.

Runs every mark with every fault on every database, with random kills between, first of the pair, then of the pair with
users' code that does harm, with programs of users beside it, of tasks, of tasks with streams, of mapped tasks, and of
signals, and adds what it counted to ``docs/proof.md``. The exit code is 1 where anything failed. ``--minutes`` bounds
each of the seven: what has begun is finished. Ten thousand kills: ``--kills 10000``, or ``--repeat 20``, which is
twenty times the matrix.
``--pair``, ``--harm``, ``--programs``, ``--tasks``, ``--task-streams``, ``--maps`` and ``--signals`` run one alone.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psycopg
from rich.console import Console
from tests.postgres import url_for_tests, why_none
from tests.proof import document as proof
from tests.proof.crash import matrix
from tests.proof.crash import proof as crash_proof
from tests.proof.crash.campaign import Result
from tests.proof.crash.databases import Databases
from tests.proof.crash.workloads.maps import MapWorkload
from tests.proof.crash.workloads.pair import HarmWorkload, PairWorkload
from tests.proof.crash.workloads.programs import ProgramWorkload
from tests.proof.crash.workloads.signals import SignalWorkload
from tests.proof.crash.workloads.task_streams import StreamWorkload
from tests.proof.crash.workloads.tasks import TaskWorkload

from headgate.supervisor.config import Settings
from headgate.supervisor.logs import process_log

KILLS = 400
JOBS = 3  # pairs for two cores: each is waited for now and then


def main() -> int:
    """Run the command; return its exit code."""
    given = _parse()
    console = Console()
    # Like Ctrl-C: servers and databases of ours are not left behind, and what was counted is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Replays let the supervisor's core speak, of what was news when it was captured.
    process_log.configure(msgspec.structs.replace(Settings(), log_level="critical"))
    dialects = [given.db] if given.db else ["sqlite", "postgresql"]
    folder = Path(tempfile.mkdtemp(prefix="headgate-crash-"))
    with ExitStack() as stack:
        version = ""
        if "postgresql" in dialects:
            try:
                version = _postgres_version()
            except psycopg.OperationalError as error:
                console.print(f"nothing is shown on PostgreSQL: {error}")
                dialects.remove("postgresql")
        is_good = bool(dialects) and _run(given, console, dialects, version, folder, stack)
    console.print(f"seed {given.seed}; written to {given.proof}")
    if any(folder.iterdir()):
        console.print(f"histories, logs and captures of what failed are in {folder}")
    else:
        folder.rmdir()
    return 0 if is_good else 1


def _run(
    given: argparse.Namespace,
    console: Console,
    dialects: list[str],
    postgres_version: str,
    folder: Path,
    stack: ExitStack,
) -> bool:
    databases = Databases(folder)
    stack.callback(databases.close)
    runner = matrix.Matrix(folder, databases, seed=given.seed)
    without_server = why_none() if postgres_version else ""
    versions = crash_proof.versions(postgres_version, without_server)
    commit = proof.commit()
    is_good = True
    for workload, layout in crash_proof.LAYOUTS.items():
        if given.only is not None and layout.workload is not given.only:
            continue
        marks = None if given.mark is None else [mark for mark in given.mark if mark in workload.marks]
        todo = matrix.plans(
            *(workload, dialects, marks, given.kills, given.seed), repeat=given.repeat, restarts=not without_server
        )
        earlier = crash_proof.Tally() if given.afresh else crash_proof.earlier_in(given.proof, layout)

        def write(
            results: list[Result],
            took_s: float,
            layout: crash_proof.Layout = layout,
            earlier: crash_proof.Tally = earlier,
        ) -> None:
            new = crash_proof.tally_of(
                results, layout, seed=given.seed, took_s=took_s, commit=commit, ended=proof.now()
            )
            crash_proof.write(given.proof, earlier + new, layout, versions)

        deadline = time.monotonic() + given.minutes * 60 if given.minutes else float("inf")
        try:
            is_good = (
                matrix.run_and_write(todo, runner.run_one, write, console, jobs=given.jobs, deadline=deadline)
                and is_good
            )
        except KeyboardInterrupt:
            return False
    return is_good


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.crash", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin nothing new after so many minutes")
    parser.add_argument("--kills", type=int, default=KILLS, help="random kills beside each matrix")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="the matrix so many times; 0: only kills")
    marks = sorted({mark for workload in crash_proof.LAYOUTS for mark in workload.marks})
    parser.add_argument("--mark", action="append", choices=marks, help="only this mark; may be repeated")
    only = parser.add_mutually_exclusive_group()
    for name, workload, what in (
        ("--pair", PairWorkload, "the pair of supervisor and runner"),
        ("--harm", HarmWorkload, "the pair with users' code that does harm"),
        ("--programs", ProgramWorkload, "the pair with a redrive and a consumer beside it"),
        ("--tasks", TaskWorkload, "tasks that defer"),
        ("--task-streams", StreamWorkload, "tasks with streams"),
        ("--maps", MapWorkload, "mapped tasks"),
        ("--signals", SignalWorkload, "signals"),
    ):
        only.add_argument(name, dest="only", action="store_const", const=workload, help=f"only {what}")
    parser.add_argument("--db", choices=["sqlite", "postgresql"], help="only this database")
    parser.add_argument("--jobs", type=int, default=JOBS, help="campaigns at a time")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of kills and of moments")
    parser.add_argument("--proof", type=Path, default=proof.PATH, help="the document to add to")
    parser.add_argument("--afresh", action="store_true", help="forget the runs that the document tells of")
    return parser.parse_args()


def _postgres_version() -> str:
    with psycopg.connect(url_for_tests()) as connection:
        return str(connection.info.parameter_status("server_version"))


if __name__ == "__main__":
    sys.exit(main())
