"""``headgate demo``: the main job as proof, with real processes, real kills, and an audit of what is on disk."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.demo.database import database_for_demo
from headgate.cli.invocation import CommandError, Invocation, invocation
from headgate.supervisor.config import masked

if TYPE_CHECKING:
    from headgate.cli.demo.run import Plan

EXIT_NOT_PROVEN = 1
PARTITIONS_MAX = 64  # files the writer appends to; more show nothing more
SUBSCRIBERS_MAX = 100  # each is a trigger of its own
KILLS_MAX = 1000
EVENTS_MAX = 10_000_000  # the audit holds a byte of memory for each event and subscriber


def demo(
    ctx: typer.Context,
    events: Annotated[int, typer.Option(min=1, max=EVENTS_MAX, metavar="N", help="Events to write.")] = 10_000,
    kills: Annotated[
        int, typer.Option(min=0, max=KILLS_MAX, metavar="K", help="SIGKILLs for the runner; the supervisor gets one.")
    ] = 5,
    subscribers: Annotated[
        int, typer.Option(min=1, max=SUBSCRIBERS_MAX, metavar="S", help="Watchers that share the stream.")
    ] = 3,
    partitions: Annotated[
        int, typer.Option(min=1, max=PARTITIONS_MAX, metavar="P", help="Files the log consists of.")
    ] = 4,
    db: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A PostgreSQL database; the demo makes one of its own beside it."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="SEED", help="Kill at the same moments as an earlier run.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder and the database.")] = False,
) -> None:
    """Write events, kill the processes while the events flow, and show that none is lost and none stored twice.

    Leaves with 0 only if that is so. A folder of a failed demo is kept.
    """
    from headgate.cli.demo.run import Plan

    seed = secrets.randbelow(2**32) if seed is None else seed
    plan = Plan(events=events, kills=kills, subscribers=subscribers, partitions=partitions, seed=seed)
    folder = Path(tempfile.mkdtemp(prefix="headgate-demo-"))
    proven = False
    try:
        with database_for_demo(db or _global_db(invocation(ctx)), folder, keep=keep) as url:
            proven = _prove(plan, folder, url)
    except CommandError:
        shutil.rmtree(folder)
        raise
    finally:
        if folder.exists():
            if proven and not keep:
                shutil.rmtree(folder)
            else:
                print(f"kept: {folder}")
    if not proven:
        raise typer.Exit(EXIT_NOT_PROVEN)


def _global_db(given: Invocation) -> str | None:
    """Return the URL of ``headgate --db URL demo``. One from a file or the environment is somebody's real one."""
    url: str | None = given.flags.get("database_url")
    return url


def _prove(plan: Plan, folder: Path, url: str) -> bool:
    """Run the demo in a new folder on a new database; print what came of it, return whether all is well."""
    from sqlalchemy.exc import SQLAlchemyError

    from headgate.cli.demo.processes import DemoFailed, Supervisor, Writer, termination_as_interrupt
    from headgate.cli.demo.report import Progress, print_report
    from headgate.cli.demo.run import Demo
    from headgate.cli.output import console

    out = console()
    out.print(f"demo in {folder}, on {masked('database_url', url)}, seed {plan.seed}", markup=False)
    environment = environment_of_demo(os.environ, folder, url)
    supervisor, writer = Supervisor(folder, environment), Writer(folder / "log", environment)
    with termination_as_interrupt(), contextlib.ExitStack() as stack:
        stack.callback(supervisor.end)
        stack.callback(writer.end)
        progress = Progress(out, plan)
        course = Demo(plan, folder, url, supervisor, writer, progress)
        try:
            with progress:
                result = course.run()
        except (DemoFailed, SQLAlchemyError) as exc:
            out.print(
                f"\nthe end of the supervisor's log ({supervisor.log_path}):\n{supervisor.log_tail()}", markup=False
            )
            out.print(f"\nuntil then: {course.summary}\nthe demo failed: {exc}", markup=False)
            return False
    return print_report(out, plan, result)


def environment_of_demo(environ: os._Environ[str] | dict[str, str], folder: Path, url: str) -> dict[str, str]:
    """Return the environment of the demo's processes: the user's, with headgate's settings replaced.

    Waits are short, so that many kills take little time; what makes events durable stays as it is by default.
    """
    settings = {
        "HEADGATE_HOME": str(folder),
        "HEADGATE_DATABASE_URL": url,
        "HEADGATE_LOG_FORMAT": "human",
        "HEADGATE_POLL_INTERVAL_S": "0.2",
        "HEADGATE_RESPAWN_WAIT_S": "0.02",
        "HEADGATE_RESPAWN_WAIT_MAX_S": "0.2",
        "HEADGATE_RETRY_WAIT_S": "0.1",
        "HEADGATE_RETRY_WAIT_MAX_S": "1",
    }
    return {name: value for name, value in environ.items() if not name.startswith("HEADGATE_")} | settings
