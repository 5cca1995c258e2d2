"""``headgate up``: everything on one machine."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.commands.database import upgrade_tables
from headgate.cli.invocation import CommandError, Invocation, invocation
from headgate.protocol.startup import without_collections

PAGES_END_S_MAX = 5.0  # they let requests end for 3 s
SECRET_VARIABLES = frozenset({"HEADGATE_FERNET_KEYS"})


def up(
    ctx: typer.Context,
    dags: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of the DAG files.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Worker processes.")] = None,
    endless_workers_max: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes for endless tasks, beside these.")
    ] = None,
    capacity: Annotated[int | None, typer.Option(metavar="N", help="Run at most N triggers.")] = None,
    queues: Annotated[
        str | None, typer.Option(metavar="A,B", help="Run tasks and triggers of these queues only.")
    ] = None,
    capture: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record every frame between supervisor and runner in DIR.")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Also serve pages, from a process of their own, as `headgate web` does.")
    ] = False,
) -> None:
    """Run everything until it is stopped: upgrade the tables, parse DAG files, run tasks and triggers.

    SIGTERM or Ctrl-C drains: every event that was fired is stored, and tasks may end within drain_s; a task that does
    not loses its try. A second signal does not wait. The exit code is 0 after a complete drain, 1 if the drain was cut
    short, and 3 if another supervisor has taken the lease. Several of these may share one PostgreSQL database.
    """
    with without_collections():
        settings = invocation(ctx).settings(
            dags_folder=dags,
            workers=workers,
            endless_workers_max=endless_workers_max,
            capacity=capacity,
            queues=queues,
            capture=capture,
        )
        from headgate.store.db.engine import open_engine
        from headgate.supervisor.serve import serve

    settings.make_folders()
    engine = open_engine(settings.database_url)
    try:
        upgrade_tables(engine, settings.lease_silence_max_s)
    finally:
        engine.dispose()
    with pages_beside(invocation(ctx)) if web else nullcontext():
        code = serve(settings, capture=settings.capture, runs_tasks=True)
    raise typer.Exit(code)


@contextmanager
def pages_beside(call: Invocation) -> Generator[None]:
    """Serve the pages from a process that ends with this one; it has no key. Raises `CommandError` without the extra.

    If it ends by itself, that is logged, and the supervisor goes on without it.
    """
    try:
        importlib.import_module("headgate.web.server")
    except ImportError as error:
        raise CommandError(f'--web needs an extra: pip install "headgate[web]" ({error})') from error
    flags = {"--config": "config", "--home": "home", "--db": "database_url"}
    given = [text for flag, name in flags.items() if call.flags.get(name) for text in (flag, str(call.flags[name]))]
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    command = [sys.executable, "-P", "-m", "headgate.cli", *given, "web", "--with-stdin"]
    pages = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    is_leaving = threading.Event()
    threading.Thread(target=_watch, args=(pages, is_leaving), name="pages", daemon=True).start()
    try:
        yield
    finally:
        is_leaving.set()
        pages.terminate()
        try:
            pages.wait(PAGES_END_S_MAX)
        except subprocess.TimeoutExpired:
            pages.kill()
            pages.wait()


def _watch(pages: subprocess.Popen[bytes], is_leaving: threading.Event) -> None:
    code = pages.wait()
    if not is_leaving.is_set():
        import structlog

        structlog.get_logger(__name__).error("the process of the pages has ended", exit_code=code)
